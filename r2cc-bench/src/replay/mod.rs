//! A recorded run told again: from `run.jsonl` to what happened when, in the order of the run's own clock.
//!
//! Pure; the command line prints. A run's file is written in the order in which the bench learnt things, and it learns
//! what the ranks say only at the end. Start at [`scenes`].

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::check::CheckStatus;
use crate::check::record::IterationRecord;
use crate::report::{EVENT_VERSION, Event, EventLine, RebuildError, Verdict};

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Scene {
    /// When, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// How it is to be shown.
    pub tone: Tone,
    /// What, in one line.
    pub text: String,
    /// Iterations that are over by then, and how many there are: what a bar shows.
    pub progress: Option<(u32, u32)>,
}

/// What kind of thing it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// A step of the bench.
    Step,
    /// The job goes on.
    Work,
    /// Something broke.
    Trouble,
    /// Something was put right.
    Relief,
}

/// Everything that `text`, a `run.jsonl`, tells, in the order in which it happened. A last line that is half written
/// is left out.
///
/// # Errors
/// If a line is no event of a version that is known.
pub fn scenes(text: &str) -> Result<Vec<Scene>, RebuildError> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut told = Told::default();
    for (position, words) in whole.lines().enumerate() {
        let line = position + 1;
        let read: EventLine = serde_json::from_str(words).map_err(|source| RebuildError::Malformed { line, source })?;
        if read.version != EVENT_VERSION {
            return Err(RebuildError::Version { line, version: read.version });
        }
        told.add(read);
    }
    // Equal times keep the order of the file.
    told.scenes.sort_by_key(|scene| scene.at_ns);
    Ok(told.scenes)
}

#[derive(Default)]
struct Told {
    scenes: Vec<Scene>,
    /// Iterations and ranks of the run under way.
    planned: u32,
    median_millis: BTreeMap<u32, f64>,
}

impl Told {
    fn say(&mut self, at_ns: u64, tone: Tone, text: impl Into<String>) {
        self.scenes.push(Scene { at_ns, tone, text: text.into(), progress: None });
    }

    fn add(&mut self, line: EventLine) {
        let at_ns = line.at_ns;
        match line.event {
            Event::Started { repetition, suite, backend, bytes, .. } => {
                self.planned = suite.workload.iterations;
                self.median_millis.clear();
                let mib = bytes as f64 / f64::from(1 << 20);
                self.say(
                    at_ns,
                    Tone::Step,
                    format!("run {repetition} of {}: {mib} MiB, backend {backend}", suite.name),
                );
                self.say(at_ns, Tone::Step, suite.purpose.clone());
            }
            Event::Note { text } => self.say(at_ns, Tone::Step, text),
            Event::Goodput(of_nodes) => {
                let slowest = of_nodes.into_values().reduce(f64::min).unwrap_or(0.0) / 1e6;
                self.say(at_ns, Tone::Step, format!("plain TCP: {slowest:.0} Mbit/s on the slowest node"));
            }
            Event::Baseline(it) => {
                self.median_millis.insert(it.index, it.millis());
                self.say(it.end_ns, Tone::Work, format!("baseline {}: {:.1} ms", it.index, it.millis()));
            }
            Event::Iteration(it) => self.iteration(&it),
            Event::Fault(fault) => {
                if let Some(at) = fault.first_drop_ns.or(fault.fired_at_ns) {
                    self.say(at, Tone::Trouble, format!("FAULT {}", fault.spec));
                }
                if let Some(at) = fault.healed_at_ns {
                    self.say(at, Tone::Relief, format!("fault over: {}", fault.spec));
                }
            }
            // How every job begins.
            Event::Transition(told) if told.kind == "live" && told.text.contains("opening -> ") => {}
            Event::Transition(told) => {
                let tone = match told.kind.as_str() {
                    "suspect" | "failed" | "view" => Tone::Trouble,
                    "live" | "resume" => Tone::Relief,
                    _ => Tone::Step,
                };
                let word = match told.kind.as_str() {
                    "view" => "knows: out of order is ",
                    _ => "",
                };
                self.say(told.at_ns, tone, format!("rank {}: {word}{}", told.rank, told.text));
            }
            Event::Hang(hang) => {
                let it = hang.iteration;
                let text = format!("iteration {} given up: nothing moved for {:.1} s", it.index, hang.silent_s);
                self.say(it.end_ns, Tone::Trouble, text);
            }
            Event::Check(check) => match check.status {
                CheckStatus::Pass | CheckStatus::Skipped => {}
                status => {
                    let text =
                        format!("{} {}: {} (expected {})", status.word(), check.name, check.actual, check.expected);
                    self.say(at_ns, Tone::Trouble, text);
                }
            },
            Event::Ended { verdict, exit_code } => {
                let tone = if verdict == Verdict::Pass { Tone::Relief } else { Tone::Trouble };
                self.say(at_ns, tone, format!("{}, exit code {exit_code}", verdict.words()));
            }
            Event::Sweep(told) => {
                let wrong = told.row.wrong();
                let tone = if wrong == 0 { Tone::Work } else { Tone::Trouble };
                let (what, when) = (told.collective.name(), format!("{:?}", told.phase).to_lowercase());
                let text = format!(
                    "{what} of {} B, {when}: {:.1} us, {wrong} wrong",
                    told.row.size, told.row.out_of_place.time_us
                );
                self.say(at_ns, tone, text);
            }
            // Sums, told by the table and the page.
            Event::Repair(_)
            | Event::FaultView { .. }
            | Event::Transport(_)
            | Event::Switch(_)
            | Event::Switches(_)
            | Event::Graph(_) => {}
        }
    }

    fn iteration(&mut self, it: &IterationRecord) {
        let healthy = crate::check::figures::median(&self.median_millis.values().copied().collect::<Vec<_>>());
        let ratio = healthy.map_or(String::new(), |healthy| format!(", {:.3} x the baseline", it.millis() / healthy));
        self.say(it.start_ns, Tone::Work, format!("iteration {} of {} begins", it.index, self.planned));
        let tone = if it.wrong_elements == 0 { Tone::Work } else { Tone::Trouble };
        let text = format!("iteration {}: {:.1} ms{ratio}, {} wrong", it.index, it.millis(), it.wrong_elements);
        let progress = Some((it.index, self.planned));
        self.scenes.push(Scene { at_ns: it.end_ns, tone, text, progress });
    }
}
