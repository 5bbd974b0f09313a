//! The formulas behind the checks: medians, spread, T0 and the ideal of the hit iteration.
//!
//! Everything is computed from the run's own counters and clock. Says why when a figure
//! cannot be had; never judges.

use std::collections::{BTreeMap, BTreeSet};

use r2cc_inject::fault::{Fault, Until};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::record::{FaultRecord, IterationRecord, RunRecord, SwitchRecord, rx_bytes};
use crate::suite::{Suite, effect};

/// Spread of the baseline, in percent of its median, above which timing cannot be judged.
pub const NOISY_MAD_PERCENT: f64 = 1.0;

/// Median and spread of the baseline.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Baseline {
    /// Median time of a healthy iteration.
    pub median_millis: f64,
    /// Median absolute deviation, in percent of the median.
    pub mad_percent: f64,
}

/// What the iteration that a fault hit took, and would have taken at best.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HitIteration {
    /// Which iteration.
    pub index: u32,
    /// What it took.
    pub millis: f64,
    /// Time up to the cut plus the time of what was missing at the degraded rate.
    pub ideal_millis: f64,
    /// `millis - ideal_millis`.
    pub over_millis: f64,
}

/// The middle value, or the mean of the two middle ones; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[half]),
        _ => Some((sorted[half - 1] + sorted[half]) / 2.0),
    }
}

/// Median and spread of the times of `iterations`; `None` without any.
pub fn spread(iterations: &[IterationRecord]) -> Option<Baseline> {
    let millis: Vec<f64> = iterations.iter().map(IterationRecord::millis).collect();
    let median_millis = median(&millis)?;
    let deviations: Vec<f64> = millis.iter().map(|ms| (ms - median_millis).abs()).collect();
    let mad = median(&deviations)?;
    Some(Baseline { median_millis, mad_percent: if median_millis > 0.0 { 100.0 * mad / median_millis } else { 0.0 } })
}

/// Median and spread of the run's baseline.
pub fn baseline(record: &RunRecord) -> Option<Baseline> {
    spread(&record.baseline)
}

/// Plain TCP's goodput of the slowest node, bits per second.
pub fn goodput_bits_s(record: &RunRecord) -> Option<f64> {
    record.goodput_bits_s.values().copied().filter(|bits| *bits > 0.0).min_by(f64::total_cmp)
}

/// Bytes that each node must receive in one flat-ring AllReduce: 2(P-1)/P x D.
pub fn ring_bytes(suite: &Suite, record: &RunRecord) -> f64 {
    let ranks = f64::from(suite.cluster.nodes * record.ranks_per_node.max(1));
    2.0 * (ranks - 1.0) / ranks * record.bytes as f64
}

/// T0 = 2(P-1)/P x D / goodput, in milliseconds.
pub fn t0_millis(suite: &Suite, record: &RunRecord) -> Option<f64> {
    let goodput = goodput_bits_s(record)?;
    Some(ring_bytes(suite, record) * 8.0 / goodput * 1e3)
}

/// The least time that any AllReduce can take under the suite's lasting faults, in milliseconds: its ratio to the
/// healthy flat ring, times the median of the healthy iterations.
pub fn bound_millis(suite: &Suite, record: &RunRecord) -> Option<f64> {
    Some(effect::bound_factor(suite, record.ranks_per_node.max(1))? * baseline(record)?.median_millis)
}

/// The first iteration in which nothing changes any more: after the last that a fault `hit`, and from the last change
/// of schedule on. Collectives are counted over the `baseline` too.
pub fn settled_from(hit: Option<u32>, switches: &BTreeMap<u32, Vec<SwitchRecord>>, baseline: usize) -> u32 {
    let changes = switches.values().flatten().map(|switch| switch.collective);
    let changed = changes.max().map_or(1, |collective| collective.saturating_sub(baseline as u64) as u32);
    hit.map_or(1, |hit| hit + 1).max(changed)
}

/// What an iteration of Weighted is held against.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct References {
    /// Median of the settled iterations, under Weighted.
    pub median_millis: f64,
    /// The flat healthy ring: the median of the baseline.
    pub flat_ring_millis: f64,
    /// The healthy hierarchical optimum, 2(n-1)/n x D/B: the flat ring's time times (n-1)/n over (P-1)/P.
    pub hierarchical_millis: f64,
    /// The least that any AllReduce can take under the faults.
    pub bound_millis: Option<f64>,
}

/// References of a run whose library comes to Weighted; the settled iterations are those after the last fault and the
/// last change of schedule.
pub fn references(suite: &Suite, record: &RunRecord) -> Option<References> {
    if !effect::comes_to_weighted(suite) {
        return None;
    }
    let flat_ring_millis = baseline(record)?.median_millis;
    let hit = record.faults.iter().filter_map(|fault| fault.iteration).max();
    let from = settled_from(hit, &record.switches, record.baseline.len());
    let settled = record.iterations.iter().filter(|iteration| iteration.index >= from);
    Some(References {
        median_millis: median(&settled.map(IterationRecord::millis).collect::<Vec<_>>())?,
        flat_ring_millis,
        hierarchical_millis: flat_ring_millis * effect::hierarchical_factor(suite, record.ranks_per_node.max(1)),
        bound_millis: bound_millis(suite, record),
    })
}

/// Median bytes that `node` received in a healthy iteration.
pub fn healthy_rx_bytes(record: &RunRecord, node: &str) -> Option<f64> {
    let bytes: Vec<f64> = record.baseline.iter().map(|iteration| iteration.node_rx_bytes(node) as f64).collect();
    median(&bytes)
}

/// Median bytes that one port received in a healthy iteration.
pub fn healthy_port_rx_bytes(record: &RunRecord, node: &str, nic: &str) -> Option<f64> {
    let bytes: Vec<f64> = record
        .baseline
        .iter()
        .filter_map(|iteration| iteration.nics.get(node)?.get(nic))
        .map(|counters| counters.passed_rx_bytes as f64)
        .collect();
    median(&bytes)
}

/// Whether iteration `it` ended before `fault` did, by the clock and by the fault's own text.
pub(super) fn ran_under(fault: &FaultRecord, it: &IterationRecord) -> bool {
    let until = fault.spec.parse::<Fault>().map(|fault| fault.until);
    let by_call = match until {
        Ok(Until::Call { n, .. }) => u64::from(it.index) < n,
        _ => true,
    };
    by_call && fault.healed_at_ns.is_none_or(|healed_ns| it.end_ns <= healed_ns)
}

/// Iterations that ran from start to end with `fault` in force and nothing new happening.
pub fn degraded<'a>(record: &'a RunRecord, fault: &FaultRecord) -> Vec<&'a IterationRecord> {
    let Some(hit) = fault.iteration else {
        return Vec::new();
    };
    let next_fault =
        record.faults.iter().filter_map(|other| other.iteration).filter(|index| *index > hit).min().unwrap_or(u32::MAX);
    let same: Vec<&FaultRecord> = record.faults.iter().filter(|other| other.iteration == Some(hit)).collect();
    record
        .iterations
        .iter()
        .filter(|it| it.index > hit && it.index < next_fault && same.iter().all(|fault| ran_under(fault, it)))
        .collect()
}

/// The iteration that the first fault hit, against its ideal:
/// t_cut - t_start + max over nodes of (bytes of a healthy iteration - bytes received before
/// the cut) / (that node's rate in the later degraded iterations).
///
/// When several faults hit the same iteration, the last of them is the cut. The error says
/// which figure is missing.
pub fn hit_iteration(suite: &Suite, record: &RunRecord) -> Result<HitIteration, String> {
    let hit =
        record.faults.iter().filter_map(|fault| fault.iteration).min().ok_or("no fault fell into an iteration")?;
    let fault = record
        .faults
        .iter()
        .filter(|fault| fault.iteration == Some(hit))
        .max_by_key(|fault| fault.fired_at_ns)
        .ok_or("no fault fell into an iteration")?;
    let cut_ns = fault.fired_at_ns.ok_or("the time of the cut is not known")?;
    let iteration = record
        .iterations
        .iter()
        .find(|iteration| iteration.index == hit)
        .ok_or_else(|| format!("iteration {hit} is not recorded"))?;
    let later = degraded(record, fault);
    let seconds: f64 = later.iter().map(|it| it.millis() / 1e3).sum();
    if seconds <= 0.0 {
        return Err(format!("no whole iteration under the fault follows iteration {hit}"));
    }
    let mut missing_s: f64 = 0.0;
    let nodes: BTreeSet<String> = suite.node_names().into_iter().collect();
    for node in &nodes {
        let healthy = healthy_rx_bytes(record, node).ok_or("there is no baseline")?;
        if !fault.ports_at_firing.contains_key(node) {
            return Err(format!("the counters of {node} at the cut are not known"));
        }
        let before = rx_bytes(&fault.ports_at_firing, node) as f64;
        let rate = later.iter().map(|it| it.node_rx_bytes(node) as f64).sum::<f64>() / seconds;
        let missing = (healthy - before).max(0.0);
        if missing > 0.0 && rate <= 0.0 {
            return Err(format!("{node} received nothing after iteration {hit}"));
        }
        if missing > 0.0 {
            missing_s = missing_s.max(missing / rate);
        }
    }
    let millis = iteration.millis();
    let before_cut_ms = cut_ns.saturating_sub(iteration.start_ns) as f64 / 1e6;
    let ideal_millis = before_cut_ms + missing_s * 1e3;
    Ok(HitIteration { index: hit, millis, ideal_millis, over_millis: millis - ideal_millis })
}
