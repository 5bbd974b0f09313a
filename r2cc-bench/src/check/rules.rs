//! Checks of elements, of byte and event counters, and of what the ranks believe.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use r2cc_inject::fault::{Fault, Kind};

use super::figures;
use super::record::{FaultRecord, FaultViewEntry, IterationRecord, RunRecord};
use super::{CheckClass, CheckResult, switch_rules};
use crate::suite::{Schedule, Suite, WorkloadKind, effect};

/// Every element of every rank and of `asked` iterations, and that there is one result for each.
pub(super) fn elements(suite: &Suite, record: &RunRecord, asked: u32) -> Vec<CheckResult> {
    let all = || record.baseline.iter().chain(&record.iterations);
    let wrong: u64 = all().map(|iteration| iteration.wrong_elements).sum();
    let mut exact = CheckResult::new("elements", CheckClass::Elements, "wrong elements").judged(wrong == 0, 0, wrong);
    let first_wrong = |label: &str, iterations: &[IterationRecord]| {
        let iteration = iterations.iter().find(|iteration| iteration.wrong_elements > 0)?;
        let mut words = format!("{label} {}: {} wrong", iteration.index, iteration.wrong_elements);
        if let Some(first) = &iteration.first_wrong {
            words.push_str(&format!(
                ", first on rank {}, element {}: expected {}, found {}",
                first.rank, first.element, first.expected, first.actual
            ));
        }
        Some(words)
    };
    exact.detail =
        first_wrong("baseline iteration", &record.baseline).or_else(|| first_wrong("iteration", &record.iterations));

    let ranks = u64::from(suite.cluster.nodes) * u64::from(record.ranks_per_node);
    let each = record.bytes / suite.workload.dtype.size_bytes() * ranks;
    let short = all().filter(|iteration| iteration.checked_elements != each).count();
    let done = record.iterations.len();
    let asked = asked as usize;
    let counted = CheckResult::new("elements_checked", CheckClass::Counters, "").judged(
        short == 0 && done == asked && each > 0,
        format!("{each} elements x {asked} iterations"),
        match all().find(|iteration| iteration.checked_elements != each) {
            Some(first) => format!("{} elements in iteration {}", first.checked_elements, first.index),
            None => format!("{each} elements x {done} iterations"),
        },
    );
    vec![exact, counted]
}

/// Shares of NICs, bytes of nodes, events of the transport, and fault views.
pub(super) fn counters(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let mut results = vec![healthy_nic_shares(suite, record)];
    results.extend(baseline_bytes(suite, record));
    results.extend(survivors_share(suite, record));
    results.extend(declared_unused(suite, record));
    results.extend(node_bytes(suite, record));
    let checks = &suite.checks;
    let transport = &record.transport;
    let mut at_most = |name: &str, unit: &str, most: Option<u64>, actual: u64| {
        if let Some(most) = most {
            let result = CheckResult::new(name, CheckClass::Counters, unit);
            results.push(result.judged(actual <= most, format!("at most {most}"), actual));
        }
    };
    at_most(
        "readmissions_at_most",
        "readmissions",
        checks.readmissions_at_most.map(u64::from),
        u64::from(transport.readmissions),
    );
    at_most("paths_failed_at_most", "paths", checks.paths_failed_at_most, transport.paths_failed);
    at_most("paths_down_at_end_at_most", "paths", checks.paths_down_at_end_at_most, transport.paths_down_at_end);
    if let Some(most) = checks.replayed_at_most {
        let result = CheckResult::new("replayed_at_most", CheckClass::Counters, "of the payload");
        let expected = format!("at most {most}");
        results.push(if transport.payload_bytes == 0 {
            result.unknown(expected, "no payload was counted")
        } else {
            let share = transport.replayed_bytes as f64 / transport.payload_bytes as f64;
            result.judged(share <= most.0, expected, format!("{:.3}%", share * 100.0))
        });
    }
    results.extend(believed(suite, record));
    results
}

/// What the ranks believe, and did because of it.
pub(super) fn believed(suite: &Suite, record: &RunRecord) -> impl Iterator<Item = CheckResult> {
    fault_view(suite, record).into_iter().chain(switch_rules::switch(suite, record))
}

fn healthy_nic_shares(suite: &Suite, record: &RunRecord) -> CheckResult {
    let result = CheckResult::new("healthy_nic_shares", CheckClass::Counters, "of the node's bytes");
    let equal = 1.0 / suite.cluster.nics.len().max(1) as f64;
    let within = suite.checks.healthy_shares;
    let expected = format!("{equal:.3} within {within}");
    let mut worst: Option<Share> = None;
    for node in suite.node_names() {
        for share in shares(&record.baseline, &node, &suite.cluster.nics) {
            if worst.as_ref().is_none_or(|worst| share.off(equal) > worst.off(equal)) {
                worst = Some(share);
            }
        }
    }
    match worst {
        Some(share) if share.value.is_finite() => result
            .judged(share.off(equal) <= within.0 + ROUNDING, expected, format!("{:.4}", share.value))
            .because(format!("furthest from equal: {}", share.place)),
        _ => result.unknown(expected, "the baseline has no counters"),
    }
}

/// Wire bytes over payload bytes that a healthy ring may have: headers and acknowledgements
/// of full-sized segments take under 8 %; what goes once over a NIC and back is 100 %.
const WIRE_OVER_PAYLOAD: RangeInclusive<f64> = 0.999..=1.1;

/// That the collective really crossed the NICs, each payload byte about once.
fn baseline_bytes(suite: &Suite, record: &RunRecord) -> Option<CheckResult> {
    let ring = suite.library.schedule == Schedule::Ring && suite.workload.kind == WorkloadKind::AllreduceLoop;
    if !ring {
        return None;
    }
    let result = CheckResult::new("baseline_bytes", CheckClass::Counters, "x the payload of a flat ring");
    let (least, most) = (WIRE_OVER_PAYLOAD.start(), WIRE_OVER_PAYLOAD.end());
    let expected = format!("{least} to {most}");
    let payload = figures::ring_bytes(suite, record);
    let ratios = suite.node_names().into_iter().filter_map(|node| {
        let ratio = figures::healthy_rx_bytes(record, &node)? / payload;
        ratio.is_finite().then_some((ratio, node))
    });
    let middle = (least + most) / 2.0;
    let worst = ratios.max_by(|a, b| (a.0 - middle).abs().total_cmp(&(b.0 - middle).abs()));
    Some(match worst {
        Some((ratio, node)) => result
            .judged(WIRE_OVER_PAYLOAD.contains(&ratio), expected, format!("{ratio:.4}"))
            .because(format!("furthest off: {node}")),
        None => result.unknown(expected, "the baseline has no counters"),
    })
}

/// Slack for the binary representation of decimal limits.
pub(super) const ROUNDING: f64 = 1e-9;

/// Share of one NIC in what its node received.
struct Share {
    place: String,
    value: f64,
}

impl Share {
    /// Relative distance from `expected`.
    fn off(&self, expected: f64) -> f64 {
        let off = (self.value / expected - 1.0).abs();
        if off.is_nan() { f64::INFINITY } else { off }
    }
}

/// Shares of `nics` in what `node` received in `iterations` together.
fn shares(iterations: &[IterationRecord], node: &str, nics: &[String]) -> Vec<Share> {
    let total: u64 = iterations.iter().map(|iteration| iteration.node_rx_bytes(node)).sum();
    nics.iter()
        .map(|nic| {
            let bytes: u64 = iterations
                .iter()
                .filter_map(|iteration| iteration.nics.get(node)?.get(nic))
                .map(|counters| counters.passed_rx_bytes)
                .sum();
            Share { place: format!("{node}/{nic}"), value: bytes as f64 / total as f64 }
        })
        .collect()
}

fn survivors_share(suite: &Suite, record: &RunRecord) -> Option<CheckResult> {
    let near = suite.checks.survivors_share?;
    let result = CheckResult::new("survivors_share", CheckClass::Counters, "of the node's bytes");
    let expected = format!("{} within {}", near.value, near.within);
    let mut worst: Option<(Share, u32)> = None;
    for node in suite.node_names() {
        let dead = effect::dead_nics(suite, &node);
        if dead.is_empty() {
            continue;
        }
        let left: Vec<String> = suite.cluster.nics.iter().filter(|nic| !dead.contains(*nic)).cloned().collect();
        let Some(last_cut) = last_cut(suite, record, &node) else {
            continue;
        };
        for iteration in figures::degraded(record, last_cut) {
            for share in shares(std::slice::from_ref(iteration), &node, &left) {
                if worst.as_ref().is_none_or(|(worst, _)| share.off(near.value) > worst.off(near.value)) {
                    worst = Some((share, iteration.index));
                }
            }
        }
    }
    Some(match worst {
        Some((share, index)) => result
            .judged(share.off(near.value) <= near.within.0 + ROUNDING, expected, format!("{:.4}", share.value))
            .because(format!("furthest off: {} in iteration {index}", share.place)),
        None => result.unknown(expected, "no whole iteration ran under the fault"),
    })
}

/// Of what a node receives, the part that may come over a NIC that is taken for failed: the kernel's own frames.
const UNUSED_SHARE: f64 = 1e-3;

/// That NICs which ranks are told to take for failed carry nothing of theirs.
fn declared_unused(suite: &Suite, record: &RunRecord) -> Option<CheckResult> {
    let failed: Vec<(&str, &str)> = suite.library.failed.iter().filter_map(|place| place.split_once('/')).collect();
    let (node, _) = *failed.first()?;
    let result = CheckResult::new("declared_unused", CheckClass::Counters, "of the node's bytes");
    let expected = format!("at most {UNUSED_SHARE}");
    let nics: Vec<String> = failed.iter().map(|(_, nic)| (*nic).to_owned()).collect();
    let worst = shares(&record.iterations, node, &nics).into_iter().max_by(|a, b| a.value.total_cmp(&b.value));
    Some(match worst {
        Some(share) if share.value.is_finite() => {
            result.judged(share.value <= UNUSED_SHARE, expected, format!("{:.5}", share.value)).because(share.place)
        }
        _ => result.unknown(expected, "no iteration has counters"),
    })
}

/// The last fault that took a NIC of `node` out of service.
fn last_cut<'a>(suite: &Suite, record: &'a RunRecord, node: &str) -> Option<&'a FaultRecord> {
    let cuts = |fault: &Fault| {
        matches!(fault.kind, Kind::Drop | Kind::LinkDown) && effect::rail_index(suite, fault, node).is_some()
    };
    suite
        .faults
        .iter()
        .zip(&record.faults)
        .filter(|(fault, fired)| cuts(fault) && fired.iteration.is_some())
        .map(|(_, fired)| fired)
        .max_by_key(|fired| fired.iteration)
}

fn node_bytes(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let rules = suite.checks.node_bytes.iter();
    rules
        .map(|rule| {
            let name = format!("node_bytes {} {}", rule.node, rule.iterations);
            let result = CheckResult::new(name, CheckClass::Counters, "x its healthy bytes");
            let expected = format!("{} within {}", rule.value, rule.within);
            let healthy = figures::healthy_rx_bytes(record, &rule.node).filter(|bytes| *bytes > 0.0);
            let Some(healthy) = healthy else {
                return result.unknown(expected, "the baseline has no counters");
            };
            let worst = record
                .iterations
                .iter()
                .filter(|iteration| rule.iterations.contains(iteration.index))
                .map(|iteration| (iteration.node_rx_bytes(&rule.node) as f64 / healthy, iteration.index))
                .max_by(|a, b| (a.0 / rule.value - 1.0).abs().total_cmp(&(b.0 / rule.value - 1.0).abs()));
            match worst {
                Some((ratio, index)) => {
                    let holds = (ratio / rule.value - 1.0).abs() <= rule.within.0 + ROUNDING;
                    result
                        .judged(holds, expected, format!("{ratio:.4}"))
                        .because(format!("furthest off: iteration {index}"))
                }
                None => result.unknown(expected, "none of these iterations ran"),
            }
        })
        .collect()
}

fn fault_view(suite: &Suite, record: &RunRecord) -> Option<CheckResult> {
    let places = suite.checks.fault_view.as_ref()?;
    let expected: BTreeSet<String> = places.iter().cloned().collect();
    let words = |places: &BTreeSet<String>| match places.len() {
        0 => "nothing".to_string(),
        _ => places.iter().cloned().collect::<Vec<_>>().join(", "),
    };
    let ranks = suite.cluster.nodes * record.ranks_per_node;
    let result = CheckResult::new("fault_view", CheckClass::View, "");
    for rank in 0..ranks {
        let Some(entries) = record.fault_view.get(&rank) else {
            let actual = format!("rank {rank} left no view");
            return Some(result.judged(false, words(&expected), actual));
        };
        let named: BTreeSet<String> = entries.iter().map(FaultViewEntry::place).collect();
        if named != expected {
            let actual = format!("rank {rank} names {}", words(&named));
            return Some(result.judged(false, words(&expected), actual));
        }
    }
    Some(result.judged(ranks > 0, words(&expected), words(&expected)))
}
