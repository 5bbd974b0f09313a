//! `summary.json`, version 1: what a run was and what it showed.
//!
//! The types are the contract; the JSON Schema is generated from them. Built by
//! [`Summary::of_run`] from the suite, the record and the check results, and folded over
//! repetitions by [`Summary::of_repeats`]. Nothing here measures or judges.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::exit::{ExitCode, Verdict, judge};
use crate::check::figures::{Baseline, HitIteration, References};
use crate::check::record::{
    FaultRecord, FaultViewEntry, GraphRecord, HangRecord, IterationRecord, Means, NodeCounters, RepairRecord,
    RunRecord, SweepRecord, SwitchRecord, TransportRecord, WrongElement,
};
use crate::check::{CheckResult, CheckStatus, figures};
use crate::suite::{Fabric, ScaleRow, Suite, effect};

/// Version of `summary.json` that this build writes.
pub const SUMMARY_VERSION: u32 = 1;

/// One run of a suite; all `_ns` are CLOCK_MONOTONIC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    /// Version of this file; always 1.
    pub version: u32,
    /// The verdict in one word.
    pub verdict: Verdict,
    /// Exit code of the bench.
    pub exit_code: i32,
    /// Why the run ended before its last iteration, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_early: Option<String>,
    /// Name of the suite.
    pub suite: String,
    /// Row of the suite, if it has rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<String>,
    /// The machines as they were.
    pub cluster: ClusterSummary,
    /// What ran the collective: host or nccl.
    pub backend: String,
    /// Every check with what was expected and what came.
    pub checks: Vec<CheckResult>,
    /// The healthy iterations that all ratios refer to.
    pub baseline: BaselineSummary,
    /// The measured iterations, indexed from 1.
    pub iterations: Vec<IterationSummary>,
    /// What became of each fault.
    pub faults: Vec<FaultSummary>,
    /// Every repair that a rank reported.
    pub repairs: Vec<RepairRecord>,
    /// Sums over all ranks.
    pub transport: TransportRecord,
    /// The iteration that the first fault hit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_iteration: Option<HitIteration>,
    /// Fault view of each rank at its fullest, from its own event file.
    pub fault_view: BTreeMap<u32, Vec<FaultViewEntry>>,
    /// Collective at which each rank first changed its schedule.
    pub switch: BTreeMap<u32, u64>,
    /// Every change of schedule of each rank, from its own event file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub switches: BTreeMap<u32, Vec<SwitchRecord>>,
    /// What Weighted is held against, where the library comes to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub references: Option<References>,
    /// The collective that never ended, if one did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang: Option<HangRecord>,
    /// What capturing the collective as a graph took, if it was captured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<GraphRecord>,
    /// Rows of a sweep, in the order in which they were measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepRecord>,
    /// Kernel, processors, versions, load: whatever may explain a figure.
    pub environment: BTreeMap<String, String>,
    /// With `--repeat`, or of a suite with rows: each run; the fields above are those of the worst.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Summary>,
}

/// The machines as they were.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterSummary {
    /// emulated, ssh or soft-roce.
    pub kind: String,
    /// Names of the nodes, in rank order.
    pub nodes: Vec<String>,
    /// Ranks on each node.
    pub ranks_per_node: u32,
    /// NICs of each node.
    pub nics: Vec<String>,
    /// Which NICs reach each other.
    pub fabric: Fabric,
    /// Bytes of the collective on each rank.
    pub bytes: u64,
    /// Rate each NIC is shaped to.
    pub nic_rate_bits_s: Option<u64>,
}

/// The healthy iterations that all ratios refer to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BaselineSummary {
    /// Time of each.
    pub millis: Vec<f64>,
    /// Their median.
    pub median_millis: f64,
    /// Median absolute deviation, in percent of the median.
    pub mad_percent: f64,
    /// Goodput of plain TCP over all NICs of the slowest node.
    pub tcp_goodput_bits_s: Option<f64>,
    /// T0 at that goodput: 2(P-1)/P x D / goodput.
    pub t0_millis: Option<f64>,
}

/// One measured iteration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IterationSummary {
    /// Position, from 1.
    pub index: u32,
    /// From the earliest start to the latest end.
    pub millis: f64,
    /// What the cost model gives it under the faults in force, from the healthy median; of the iteration that the first
    /// fault hit: its ideal. None where a fault begins or ends within it, or may spare it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ideal_millis: Option<f64>,
    /// Start on the rank that started first.
    pub start_ns: u64,
    /// End on the rank that ended last.
    pub end_ns: u64,
    /// Elements compared, all ranks together.
    pub checked_elements: u64,
    /// Elements that differed.
    pub wrong_elements: u64,
    /// The first that differed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<WrongElement>,
    /// What each NIC moved.
    pub nics: NodeCounters,
}

/// What became of one fault.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FaultSummary {
    /// The fault as the suite writes it.
    pub spec: String,
    /// Whether its trigger came.
    pub fired: bool,
    /// Iteration during which it fired on every rank.
    pub iteration: Option<u32>,
    /// Port bytes into the collective at which it was asked to fire.
    pub asked_bytes: Option<u64>,
    /// Port bytes that had passed when it fired.
    pub bytes_before: Option<u64>,
    /// Packets it stopped.
    pub packets_dropped: u64,
    /// Bytes it stopped.
    pub bytes_dropped: u64,
    /// When the trigger came.
    pub fired_at_ns: Option<u64>,
    /// When the first packet was stopped.
    pub first_drop_ns: Option<u64>,
    /// When it ended, if before the run did.
    pub healed_at_ns: Option<u64>,
    /// Whether nothing of it is left.
    pub healed: bool,
    /// What carried it out.
    #[serde(default)]
    pub means: Means,
    /// Of a link set down: whether the carrier went.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carrier_lost: Option<bool>,
}

/// What a summary needs beyond the record: how and where the run was made.
#[derive(Debug, Clone, Default)]
pub struct RunContext {
    /// What ran the collective: host or nccl.
    pub backend: String,
    /// How the run ended, when not by itself: an exit code and a sentence.
    pub ended: Option<(ExitCode, String)>,
    /// Kernel, processors, versions, load.
    pub environment: BTreeMap<String, String>,
}

impl Summary {
    /// The summary of one run.
    pub fn of_run(
        suite: &Suite,
        row: ScaleRow,
        record: &RunRecord,
        checks: Vec<CheckResult>,
        context: &RunContext,
    ) -> Self {
        let (verdict, exit) = judge(&checks, context.ended.as_ref().map(|(code, _)| *code));
        let baseline = BaselineSummary::of(suite, record);
        let hit_iteration = figures::hit_iteration(suite, record).ok();
        let ideal = |index: u32| match &hit_iteration {
            Some(hit) if hit.index == index => Some(hit.ideal_millis),
            _ => effect::ideal_factor(suite, row, index).map(|factor| factor * baseline.median_millis),
        };
        let iteration =
            |it: &IterationRecord| IterationSummary { ideal_millis: ideal(it.index), ..IterationSummary::of(it) };
        let iterations = record.iterations.iter().map(iteration).collect();
        Self {
            version: SUMMARY_VERSION,
            verdict,
            exit_code: exit.code(),
            ended_early: context.ended.as_ref().map(|(_, why)| why.clone()),
            suite: suite.name.clone(),
            row: None,
            cluster: ClusterSummary {
                kind: suite.cluster.kind.name().to_string(),
                nodes: suite.node_names(),
                ranks_per_node: suite.ranks_per_node(row),
                nics: suite.cluster.nics.clone(),
                fabric: suite.cluster.fabric,
                bytes: record.bytes,
                nic_rate_bits_s: suite.scale(row).and_then(|scale| scale.nic_rate).map(|rate| rate.0),
            },
            backend: context.backend.clone(),
            checks,
            baseline,
            iterations,
            faults: record.faults.iter().map(FaultSummary::of).collect(),
            repairs: record.repairs.clone(),
            transport: record.transport,
            hit_iteration,
            fault_view: record.fault_view.clone(),
            switch: record.switch.clone(),
            switches: record.switches.clone(),
            references: figures::references(suite, record),
            hang: record.hang.clone(),
            graph: record.graph,
            sweep: record.sweep.clone(),
            environment: context.environment.clone(),
            runs: Vec::new(),
        }
    }

    /// One summary of several runs of `suite`, its rows or repetitions: the worst run's figures on top, every
    /// run in `runs`. `None` when `runs` is empty.
    ///
    /// The worst is the one whose exit code comes first in the contract's order, then the
    /// one whose hit iteration cost most over its ideal. From three runs on, the limit of
    /// `hit_over_ideal_ms` holds for their median, and twice the limit for each.
    pub fn of_repeats(suite: &Suite, mut runs: Vec<Self>) -> Option<Self> {
        if runs.len() <= 1 && suite.rows.is_empty() {
            return runs.into_iter().next();
        }
        if suite.rows.is_empty() {
            settle_hit_iterations(suite, &mut runs);
        }
        let over = |run: &Self| run.hit_iteration.as_ref().map_or(f64::NEG_INFINITY, |hit| hit.over_millis);
        let rank = |run: &Self| {
            let only_timing = run.verdict == Verdict::TimingInconclusive;
            let code = ExitCode::from_code(run.exit_code).unwrap_or(ExitCode::Internal);
            (code.rank(), only_timing)
        };
        let mut worst = runs.iter().min_by(|a, b| rank(a).cmp(&rank(b)).then(over(b).total_cmp(&over(a))))?.clone();
        worst.runs = runs;
        Some(worst)
    }

    /// Elements that differed, all iterations together.
    pub fn wrong_elements(&self) -> u64 {
        let sweep: u64 = self.sweep.iter().map(|record| record.row.wrong()).sum();
        self.iterations.iter().map(|it| it.wrong_elements).sum::<u64>() + sweep
    }
}

/// Repetitions from which a median stands for them.
const FEWEST_FOR_MEDIAN: usize = 3;

fn settle_hit_iterations(suite: &Suite, runs: &mut [Summary]) {
    let Some(limit) = suite.checks.hit_over_ideal_ms.filter(|_| runs.len() >= FEWEST_FOR_MEDIAN) else {
        return;
    };
    let costs: Vec<f64> = runs.iter().filter_map(|run| run.hit_iteration.as_ref()).map(|hit| hit.over_millis).collect();
    let Some(median) = figures::median(&costs).filter(|median| *median <= limit && costs.len() == runs.len()) else {
        return;
    };
    for run in runs {
        let within_twice = run.hit_iteration.as_ref().is_some_and(|hit| hit.over_millis <= 2.0 * limit);
        let failed =
            run.checks.iter_mut().find(|check| check.name == "hit_over_ideal_ms" && check.status == CheckStatus::Fail);
        if let Some(check) = failed.filter(|_| within_twice) {
            check.status = CheckStatus::Pass;
            let reason =
                format!("the median of {} runs is {median:.1} ms, and each is within twice the limit", costs.len());
            check.detail = Some(match check.detail.take() {
                Some(detail) => format!("{detail}; {reason}"),
                None => reason,
            });
            if run.ended_early.is_none() {
                let (verdict, exit) = judge(&run.checks, None);
                run.verdict = verdict;
                run.exit_code = exit.code();
            }
        }
    }
}

impl BaselineSummary {
    fn of(suite: &Suite, record: &RunRecord) -> Self {
        let millis: Vec<f64> = record.baseline.iter().map(IterationRecord::millis).collect();
        let Baseline { median_millis, mad_percent } = figures::baseline(record).unwrap_or_default();
        Self {
            millis,
            median_millis,
            mad_percent,
            tcp_goodput_bits_s: figures::goodput_bits_s(record),
            t0_millis: figures::t0_millis(suite, record),
        }
    }
}

impl IterationSummary {
    fn of(record: &IterationRecord) -> Self {
        Self {
            index: record.index,
            millis: record.millis(),
            ideal_millis: None,
            start_ns: record.start_ns,
            end_ns: record.end_ns,
            checked_elements: record.checked_elements,
            wrong_elements: record.wrong_elements,
            first_wrong: record.first_wrong.clone(),
            nics: record.nics.clone(),
        }
    }
}

impl FaultSummary {
    fn of(record: &FaultRecord) -> Self {
        Self {
            spec: record.spec.clone(),
            fired: record.fired,
            iteration: record.iteration,
            asked_bytes: record.asked_bytes,
            bytes_before: record.bytes_before,
            packets_dropped: record.packets_dropped,
            bytes_dropped: record.bytes_dropped,
            fired_at_ns: record.fired_at_ns,
            first_drop_ns: record.first_drop_ns,
            healed_at_ns: record.healed_at_ns,
            healed: record.healed,
            means: record.means,
            carrier_lost: record.carrier_lost,
        }
    }
}
