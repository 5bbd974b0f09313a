//! From `run.jsonl` back to the record of each repetition, so that a report can be made, or a
//! run judged again, without running it again.

use std::collections::BTreeMap;

use thiserror::Error;

use super::event::{EVENT_VERSION, Event, EventLine, Transition};
use super::exit::Verdict;
use crate::check::CheckResult;
use crate::check::record::RunRecord;
use crate::suite::Suite;

/// One repetition as `run.jsonl` tells it.
#[derive(Debug, Clone, PartialEq)]
pub struct RebuiltRun {
    /// The suite as it was read then.
    pub suite: Suite,
    /// host or nccl.
    pub backend: String,
    /// Kernel, processors, versions, load.
    pub environment: BTreeMap<String, String>,
    /// Everything recorded.
    pub record: RunRecord,
    /// What the ranks told of their paths, rank by rank.
    pub transitions: Vec<Transition>,
    /// The checks as they were judged then.
    pub checks: Vec<CheckResult>,
    /// Verdict and exit code; none when the bench did not live to give them.
    pub ended: Option<(Verdict, i32)>,
}

/// Why a `run.jsonl` cannot be read.
#[derive(Debug, Error)]
pub enum RebuildError {
    /// A line is no event.
    #[error("run.jsonl:{line}: {source}")]
    Malformed {
        /// The line, from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// An event of another version.
    #[error("run.jsonl:{line}: version {version} is not known\n  hint: this build reads version {EVENT_VERSION}")]
    Version {
        /// The line, from 1.
        line: usize,
        /// Its version.
        version: u32,
    },
    /// An event before the first `started`.
    #[error("run.jsonl:{line}: an event before the start of a run")]
    NotStarted {
        /// The line, from 1.
        line: usize,
    },
}

/// Every repetition that `text` tells of. A last line that a killed bench left half-written
/// is left out.
pub fn rebuild(text: &str) -> Result<Vec<RebuiltRun>, RebuildError> {
    let mut runs: Vec<RebuiltRun> = Vec::new();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (position, words) in whole.lines().enumerate() {
        let line = position + 1;
        let read: EventLine = serde_json::from_str(words).map_err(|source| RebuildError::Malformed { line, source })?;
        if read.version != EVENT_VERSION {
            return Err(RebuildError::Version { line, version: read.version });
        }
        match (read.event, runs.last_mut()) {
            (Event::Started { suite, backend, bytes, ranks_per_node, environment, .. }, _) => runs.push(RebuiltRun {
                suite: *suite,
                backend,
                environment,
                record: RunRecord { bytes, ranks_per_node, ..RunRecord::default() },
                transitions: Vec::new(),
                checks: Vec::new(),
                ended: None,
            }),
            // Notes come before the first run too.
            (Event::Note { .. }, _) => {}
            (event, Some(run)) => run.add(event),
            (_, None) => return Err(RebuildError::NotStarted { line }),
        }
    }
    Ok(runs)
}

impl RebuiltRun {
    fn add(&mut self, event: Event) {
        let record = &mut self.record;
        match event {
            Event::Goodput(bits_s) => record.goodput_bits_s = bits_s,
            Event::Baseline(iteration) => record.baseline.push(iteration),
            Event::Iteration(iteration) => record.iterations.push(iteration),
            Event::Fault(fault) => record.faults.push(fault),
            Event::Repair(repair) => record.repairs.push(repair),
            Event::FaultView { rank, entries } => {
                record.fault_view.insert(rank, entries);
            }
            Event::Transport(transport) => record.transport = transport,
            Event::Switch(switch) => record.switch = switch,
            Event::Switches(switches) => record.switches = switches,
            Event::Hang(hang) => record.hang = Some(hang),
            Event::Graph(graph) => record.graph = Some(graph),
            Event::Sweep(row) => record.sweep.push(row),
            Event::Transition(transition) => self.transitions.push(transition),
            Event::Check(check) => self.checks.push(check),
            Event::Ended { verdict, exit_code } => self.ended = Some((verdict, exit_code)),
            Event::Started { .. } | Event::Note { .. } => {}
        }
    }
}
