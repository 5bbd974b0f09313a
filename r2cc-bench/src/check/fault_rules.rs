//! Checks that each fault came when and where it was asked, did something, and is gone.
//!
//! The proof of a cut does not trust the injector's own count: the firing time must lie
//! inside the asked iteration of every rank, by the ranks' own clocks.

use r2cc_inject::fault::{Direction, Fault, Kind, Offset, Trigger};

use super::record::{FaultRecord, IterationRecord, Means, NicCounters, RunRecord};
use super::{CheckClass, CheckResult, CheckStatus, figures, switch_rules};
use crate::suite::{MANAGEMENT_NIC, Suite, effect};

/// One GSO packet: what may pass between the byte asked for and the cut.
const OVERSHOOT_BYTES: u64 = 64 * 1024;

/// The other bound of the overshoot, as a part of the port's bytes per collective.
const OVERSHOOT_SHARE: f64 = 0.01;

/// Sets the iteration into which each fault fell, by the ranks' own clocks; none when it fell
/// outside every one of them, on some rank.
pub fn place_faults(suite: &Suite, record: &mut RunRecord) {
    for (position, fired) in record.faults.iter_mut().enumerate() {
        let at_the_call = suite.faults.get(position).is_some_and(at_the_call);
        fired.iteration = fired.fired_at_ns.filter(|_| fired.fired).and_then(|at_ns| {
            let unended = record.hang.iter().map(|hang| &hang.iteration);
            let mut all = record.iterations.iter().chain(unended);
            all.find(|iteration| within(iteration, at_ns, at_the_call)).map(|hit| hit.index)
        });
    }
}

fn at_the_call(fault: &Fault) -> bool {
    matches!(&fault.from, Trigger::Position(at) if at.offset == Offset::Start)
}

pub(super) fn all(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let mut results = Vec::new();
    for (position, fault) in suite.faults.iter().enumerate() {
        // With one fault its number says nothing.
        let suffix = if suite.faults.len() > 1 { format!(" {}", position + 1) } else { String::new() };
        let Some(fired) = record.faults.get(position) else {
            results.push(
                CheckResult::new(format!("cut_iteration{suffix}"), CheckClass::Cut, "")
                    .unknown(fault, "the run ended before this fault was armed"),
            );
            continue;
        };
        let checked = [
            Some(if effect::in_a_freeze(fault) {
                switch_rules::cut_in_freeze(record, fired)
            } else {
                cut_iteration(suite, record, fault, fired)
            }),
            Some(if fault.kind == Kind::LinkDown { carrier(fired) } else { stopped(fired) }),
            overshoot(suite, record, fault, fired),
            silent_after_cut(suite, record, fault, fired),
            Some(healed(fired)),
        ];
        results.extend(checked.into_iter().flatten().map(|mut result| {
            result.name.push_str(&suffix);
            result
        }));
    }
    results
}

/// Faults of a sweep come by time: that each did something, and is gone.
pub(super) fn of_sweep(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let mut results = Vec::new();
    for (position, fault) in suite.faults.iter().enumerate() {
        let suffix = if suite.faults.len() > 1 { format!(" {}", position + 1) } else { String::new() };
        let checked = match record.faults.get(position) {
            None => {
                let result = CheckResult::new("fault_stopped", CheckClass::Cut, "packets");
                vec![result.unknown("at least 1", "the run ended before this fault was armed")]
            }
            Some(fired) if fault.kind == Kind::LinkDown => vec![carrier(fired), healed(fired)],
            Some(fired) => vec![stopped(fired), healed(fired)],
        };
        results.extend(checked.into_iter().map(|mut result| {
            result.name.push_str(&suffix);
            result
        }));
    }
    results
}

/// That the fault fired while every rank was inside the asked iteration.
fn cut_iteration(suite: &Suite, record: &RunRecord, fault: &Fault, fired: &FaultRecord) -> CheckResult {
    let result = CheckResult::new("cut_iteration", CheckClass::Cut, "");
    let asked = suite.checks.cut_iteration.or_else(|| effect::begin_call(fault).and_then(|n| u32::try_from(n).ok()));
    let expected = asked.map_or("any".to_string(), |n| n.to_string());
    let miss = |result: CheckResult, why: String| result.unknown(expected.clone(), why);
    if !fired.fired {
        return miss(result, "its trigger never came".to_string());
    }
    let Some(at_ns) = fired.fired_at_ns else {
        return miss(result, "the time of the firing is not known".to_string());
    };
    let unended = record.hang.iter().map(|hang| &hang.iteration);
    let hit = record.iterations.iter().chain(unended).find(|iteration| within(iteration, at_ns, at_the_call(fault)));
    match (hit, asked) {
        (Some(hit), None) => result.judged(true, expected, hit.index),
        (Some(hit), Some(asked)) if hit.index == asked => result.judged(true, asked, hit.index),
        (Some(hit), Some(_)) => {
            let why = format!("it fired in iteration {}", hit.index);
            CheckResult { actual: hit.index.to_string(), ..miss(result, why) }
        }
        (None, _) => miss(result, where_it_fell(record, at_ns)),
    }
}

/// Whether every rank was inside the iteration. A fault placed at the call itself fires with
/// the first call of its node, when other ranks may not have called yet.
fn within(iteration: &IterationRecord, at_ns: u64, at_the_call: bool) -> bool {
    if at_the_call {
        let first_end = iteration.ranks.values().map(|span| span.end_ns).min();
        iteration.start_ns <= at_ns && first_end.is_some_and(|end_ns| at_ns <= end_ns)
    } else {
        iteration.runs_on_every_rank_at(at_ns)
    }
}

fn where_it_fell(record: &RunRecord, at_ns: u64) -> String {
    let partly = record.iterations.iter().find(|it| (it.start_ns..=it.end_ns).contains(&at_ns));
    if let Some(iteration) = partly {
        let outside = iteration.ranks.iter().find(|(_, span)| !(span.start_ns..=span.end_ns).contains(&at_ns));
        if let Some((rank, _)) = outside {
            return format!("it fired in iteration {}, but rank {rank} was not inside it", iteration.index);
        }
    }
    let before = record.iterations.iter().filter(|it| it.end_ns < at_ns).map(|it| it.index).max();
    match before {
        Some(index) => format!("it fired after iteration {index}, between collectives"),
        None => "it fired before the first iteration".to_string(),
    }
}

/// That the fault stopped (or slowed) something.
fn stopped(fired: &FaultRecord) -> CheckResult {
    let result = CheckResult::new("fault_stopped", CheckClass::Cut, "packets");
    if fired.packets_dropped > 0 {
        result.judged(true, "at least 1", fired.packets_dropped)
    } else {
        let mut result = result.judged(false, "at least 1", 0).because("a fault that stopped nothing proves nothing");
        result.status = CheckStatus::Inconclusive;
        result
    }
}

/// That a link which was set down took the carrier of its NICs: what follows is no news otherwise.
fn carrier(fired: &FaultRecord) -> CheckResult {
    let result = CheckResult::new("carrier_lost", CheckClass::Cut, "");
    match fired.carrier_lost {
        Some(true) => result.judged(true, "no carrier", "no carrier"),
        Some(false) => result.unknown("no carrier", "a NIC still had its carrier after its link was set down"),
        None => result.unknown("no carrier", "the link was never set down"),
    }
}

/// That no more passed before the cut than was asked, plus one packet or 1 %.
fn overshoot(suite: &Suite, record: &RunRecord, fault: &Fault, fired: &FaultRecord) -> Option<CheckResult> {
    let asked = fired.asked_bytes.filter(|_| fired.fired)?;
    let result = CheckResult::new("cut_overshoot", CheckClass::Counters, "bytes");
    let per_collective = ports(suite, fault)
        .iter()
        .filter_map(|(node, nic)| figures::healthy_port_rx_bytes(record, node, nic))
        .fold(0.0, f64::max);
    let most = OVERSHOOT_BYTES.max((per_collective * OVERSHOOT_SHARE) as u64);
    let expected = format!("0 to {most}");
    Some(match fired.bytes_before {
        None => result.unknown(expected, "the bytes before the cut are not known"),
        Some(before) if before < asked => {
            let early = format!("-{}", asked - before);
            result.judged(false, expected, early).because(format!("asked at {asked}, cut at {before}"))
        }
        Some(before) => {
            let over = before - asked;
            result.judged(over <= most, expected, over).because(format!("asked at {asked}, cut at {before}"))
        }
    })
}

/// That nothing passed the cut port in the later iterations.
///
/// A port that our programs cut: by their own count. One that is blocked at the switch: what they see arrive, since
/// the node goes on sending into it, for nobody. One without a carrier: by the interface's own count, which stands
/// still both ways.
fn silent_after_cut(suite: &Suite, record: &RunRecord, fault: &Fault, fired: &FaultRecord) -> Option<CheckResult> {
    if !matches!(fault.kind, Kind::Drop | Kind::LinkDown) {
        return None;
    }
    type Count = fn(&NicCounters) -> u64;
    let (unit, count): (_, Count) = match (&fault.kind, fired.means, fault.direction) {
        (Kind::LinkDown, ..) => ("bytes moved without a carrier", |nic| nic.rx_bytes + nic.tx_bytes),
        (_, Means::Change, _) => ("bytes received", |nic| nic.passed_rx_bytes),
        (_, Means::Packets, Direction::Both) => ("bytes passed", |nic| nic.passed_rx_bytes + nic.passed_tx_bytes),
        (_, Means::Packets, Direction::Rx) => ("bytes passed", |nic| nic.passed_rx_bytes),
        (_, Means::Packets, Direction::Tx) => ("bytes passed", |nic| nic.passed_tx_bytes),
    };
    let result = CheckResult::new("silent_after_cut", CheckClass::Counters, unit);
    let later: Vec<&IterationRecord> = record
        .iterations
        .iter()
        .filter(|it| fired.iteration.is_some_and(|hit| it.index > hit))
        .filter(|it| figures::ran_under(fired, it))
        .collect();
    if later.is_empty() {
        return Some(result.unknown(0, "no whole iteration ran under the fault"));
    }
    let mut passed = 0;
    let mut first: Option<String> = None;
    for (node, nic) in ports(suite, fault) {
        for iteration in &later {
            let Some(counters) = iteration.nics.get(&node).and_then(|nics| nics.get(&nic)) else {
                let why = format!("iteration {} has no counters of {node}/{nic}", iteration.index);
                return Some(result.unknown(0, why));
            };
            let bytes = count(counters);
            if bytes > 0 && first.is_none() {
                first = Some(format!("first in iteration {} at {node}/{nic}", iteration.index));
            }
            passed += bytes;
        }
    }
    let mut result = result.judged(passed == 0, 0, passed);
    result.detail = first;
    Some(result)
}

fn healed(fired: &FaultRecord) -> CheckResult {
    let result = CheckResult::new("fault_healed", CheckClass::Healed, "");
    let actual = if fired.healed { "gone" } else { "left behind" };
    let result = result.judged(fired.healed, "gone", actual);
    if fired.healed { result } else { result.because("run `r2cc-inject heal --all`") }
}

/// The ports a fault acts on.
fn ports(suite: &Suite, fault: &Fault) -> Vec<(String, String)> {
    if fault.target.nic == MANAGEMENT_NIC {
        return vec![(fault.target.node.clone(), fault.target.nic.clone())];
    }
    suite
        .node_names()
        .into_iter()
        .filter_map(|node| {
            let rail = effect::rail_index(suite, fault, &node)?;
            Some((node, suite.cluster.nics[rail].clone()))
        })
        .collect()
}
