//! What a suite's faults should do to its times, by the formulas of the cost model.
//!
//! Pure arithmetic on the suite as written; used to print a plan and to refuse checks that
//! cannot hold, never to judge a run.

use std::collections::BTreeSet;

use r2cc::schedule::{self, FabricNode};
use r2cc_inject::fault::{Fault, Kind, Op, Trigger, Until};

use super::judge::MANAGEMENT_NIC;
use super::model::{AfterRepair, Fabric, Mode, ScaleRow, Suite};

/// Chunks of the R2CC-AllReduce's second stage, K, unless set otherwise.
const STAGE2_CHUNKS: f64 = 4.0;

/// Rows in the order in which one stands for the suite.
fn first_row(suite: &Suite) -> Option<ScaleRow> {
    ScaleRow::ALL.into_iter().find(|row| suite.scale(*row).is_some())
}

/// Rate of a NIC in the first row that shapes it.
pub(super) fn nic_rate(suite: &Suite) -> Option<u64> {
    ScaleRow::ALL.into_iter().filter_map(|row| suite.scale(row)?.nic_rate).map(|rate| rate.0).next()
}

/// Payload bytes that a node receives in a flat-ring AllReduce: 2(P-1)/P x D.
pub(super) fn node_bytes(suite: &Suite, row: ScaleRow) -> Option<f64> {
    Some(ring_volume(suite.ranks(row)) * suite.scale(row)?.bytes.0 as f64)
}

/// Payload bytes that one port receives in a healthy collective, in the suite's first row.
pub(super) fn port_bytes(suite: &Suite) -> Option<u64> {
    let nics = suite.cluster.nics.len().max(1) as f64;
    Some((node_bytes(suite, first_row(suite)?)? / nics) as u64)
}

/// T0 in seconds at the line rate of all NICs; `None` where NICs run as they are.
pub(super) fn t0_seconds(suite: &Suite, row: ScaleRow) -> Option<f64> {
    let rate = suite.scale(row)?.nic_rate?.0 as f64 * suite.cluster.nics.len() as f64;
    Some(node_bytes(suite, row)? * 8.0 / rate)
}

/// The call at which a fault begins, where it is placed in a collective.
pub(crate) fn begin_call(fault: &Fault) -> Option<u64> {
    match &fault.from {
        Trigger::Position(position) if position.op != Op::SwitchFreeze => Some(position.n),
        Trigger::Position(_) | Trigger::Now | Trigger::After(_) => None,
    }
}

/// Whether a fault begins while the ranks are frozen to go over to another schedule.
pub(crate) fn in_a_freeze(fault: &Fault) -> bool {
    matches!(&fault.from, Trigger::Position(position) if position.op == Op::SwitchFreeze)
}

/// NICs of `node` that some fault of the suite takes out of service.
pub(crate) fn dead_nics(suite: &Suite, node: &str) -> BTreeSet<String> {
    let nics = &suite.cluster.nics;
    suite
        .faults
        .iter()
        .filter(|fault| matches!(fault.kind, Kind::Drop | Kind::LinkDown))
        .filter_map(|fault| rail_index(suite, fault, node))
        .map(|rail| nics[rail].clone())
        .collect()
}

/// Whether the collective that a fault of the suite hits never ends: nothing repairs it.
pub(crate) fn hangs(suite: &Suite) -> bool {
    let cuts = |fault: &Fault| matches!(fault.kind, Kind::Drop | Kind::LinkDown) && fault.target.nic != MANAGEMENT_NIC;
    suite.library.mode == Mode::None && suite.faults.iter().any(cuts)
}

/// Position of the NIC of `node` that `fault` acts on.
pub(crate) fn rail_index(suite: &Suite, fault: &Fault, node: &str) -> Option<usize> {
    let mut nics = suite.cluster.nics.iter().enumerate();
    if fault.target.is_rail() {
        nics.find(|(rail, _)| Suite::rail_name(*rail) == fault.target.nic)
    } else if fault.target.node == node {
        nics.find(|(_, nic)| **nic == fault.target.nic)
    } else {
        None
    }
    .map(|(rail, _)| rail)
}

/// Part of its rate that a NIC keeps under `fault`, at best or at worst: a flap may leave it
/// in or out of service, and so may a loss that TCP does not make up for.
fn kept(suite: &Suite, fault: &Fault, at_best: bool) -> f64 {
    match &fault.kind {
        // A path with one dead direction counts as failed, so the direction is no matter.
        Kind::Drop | Kind::LinkDown => 0.0,
        Kind::Loss { .. } | Kind::Flap { .. } => f64::from(u8::from(at_best)),
        Kind::Rate { bits_per_second } => {
            nic_rate(suite).map_or(1.0, |full| (*bits_per_second as f64 / full as f64).min(1.0))
        }
    }
}

/// The part of the rate that each NIC of each node keeps under `faults`, and with those the ranks are told of.
fn rates_left(suite: &Suite, faults: &[&Fault], at_best: bool) -> Vec<Vec<f64>> {
    let of = |node: String| {
        let declared = |nic: &String| suite.library.failed.contains(&format!("{node}/{nic}"));
        let mut rates: Vec<f64> = suite.cluster.nics.iter().map(|nic| if declared(nic) { 0.0 } else { 1.0 }).collect();
        for fault in faults {
            if let Some(rail) = rail_index(suite, fault, &node) {
                rates[rail] = f64::min(rates[rail], kept(suite, fault, at_best));
            }
        }
        rates
    };
    suite.node_names().into_iter().map(of).collect()
}

/// The nodes as schedules see them, a healthy NIC carrying 1; `None` where two of them no longer reach each other.
fn fabric(suite: &Suite, ranks_per_node: u32, faults: &[&Fault]) -> Option<schedule::Fabric> {
    let per_node = ranks_per_node as usize;
    let node = |(node, rates): (usize, Vec<f64>)| FabricNode {
        ranks: (node * per_node..(node + 1) * per_node).collect(),
        rails: if suite.cluster.fabric == Fabric::Rails { rates } else { vec![rates.iter().sum()] },
    };
    schedule::Fabric::new(rates_left(suite, faults, false).into_iter().enumerate().map(node).collect()).ok()
}

/// The least time that any AllReduce can take under the faults that last for the run, relative to the healthy flat
/// ring: the linear program over rails, or the formula that is below it; see [`schedule::packing::bound`].
pub(crate) fn bound_factor(suite: &Suite, ranks_per_node: u32) -> Option<f64> {
    let lasting: Vec<&Fault> = suite.faults.iter().filter(|fault| fault.until == Until::Run).collect();
    let seconds_a_byte = schedule::packing::bound(&fabric(suite, ranks_per_node, &lasting)?);
    Some(seconds_a_byte * suite.cluster.nics.len() as f64 / ring_volume(suite.cluster.nodes * ranks_per_node))
}

/// The least time that an AllReduce can take on the healthy nodes, reduced inside them first, relative to their flat
/// ring: (n-1)/n over (P-1)/P.
pub(crate) fn hierarchical_factor(suite: &Suite, ranks_per_node: u32) -> f64 {
    ring_volume(suite.cluster.nodes) / ring_volume(suite.cluster.nodes * ranks_per_node)
}

/// Bytes around a ring of `members` for each byte of the tensor: 2(P-1)/P.
fn ring_volume(members: u32) -> f64 {
    2.0 * (f64::from(members) - 1.0) / f64::from(members)
}

/// Whether the library may come to the Weighted schedule.
pub(crate) fn comes_to_weighted(suite: &Suite) -> bool {
    match suite.library.after_repair {
        Some(after) => after == AfterRepair::Weighted,
        None => suite.library.mode == Mode::Weighted,
    }
}

/// Time of an iteration under `faults`, relative to the healthy flat ring, when the load is
/// spread over all NICs that are left; infinite when two nodes no longer reach each other.
///
/// On rails the worst ring edge decides, B / common(i, j); else the worst node, B / b_i.
pub(super) fn balance_factor(suite: &Suite, faults: &[&Fault], at_best: bool) -> f64 {
    let nics = suite.cluster.nics.len();
    let left = rates_left(suite, faults, at_best);
    let edge = |i: usize, j: usize| -> f64 {
        let common: f64 = match suite.cluster.fabric {
            Fabric::Rails => left[i].iter().zip(&left[j]).map(|(a, b)| a.min(*b)).sum(),
            Fabric::Any => left[i].iter().sum::<f64>().min(left[j].iter().sum()),
        };
        nics as f64 / common
    };
    (0..left.len()).map(|i| edge(i, (i + 1) % left.len())).fold(1.0, f64::max)
}

/// Time relative to the healthy flat ring once the schedule has changed; `None` when the
/// suite's library keeps the schedule, or the formula does not cover the faults.
pub(super) fn scheduled_factor(suite: &Suite, row: ScaleRow, balance: f64) -> Option<(String, f64)> {
    let ring = ring_volume(suite.ranks(row));
    let schedule = suite.library.after_repair.or(match suite.library.mode {
        Mode::R2ccAllreduce => Some(AfterRepair::R2ccAllreduce),
        Mode::Weighted => Some(AfterRepair::Weighted),
        _ => None,
    })?;
    // With one weak node, 1/(1-X) is Balance's factor.
    let lost = 1.0 - 1.0 / balance;
    match schedule {
        AfterRepair::Balance => None,
        AfterRepair::R2ccAllreduce => {
            let chunks = suite.library.stage2_chunks.map_or(STAGE2_CHUNKS, f64::from);
            let factor = 1.0 + lost / ((1.0 - lost) * ring) * (1.0 + 1.0 / chunks);
            Some((format!("R2CC-AllReduce, K = {chunks}"), factor))
        }
        AfterRepair::Weighted => {
            let weak = 1.0 / (1.0 - lost);
            let all = ring_volume(suite.cluster.nodes) / (1.0 - lost / f64::from(suite.cluster.nodes));
            Some(("Weighted".to_owned(), weak.max(all) / ring))
        }
    }
}

/// How the faults partition the iterations: for each stretch, the faults in force throughout.
pub(super) fn stretches(suite: &Suite) -> Vec<(u32, u32, Vec<&Fault>)> {
    let last = u64::from(suite.workload.iterations);
    // The ranks freeze in the iteration that the first fault hits, or, if it is hit late, in the next.
    let first_hit = suite.faults.iter().filter_map(begin_call).min();
    let whole = |fault: &Fault| -> (u64, u64) {
        let first = match &fault.from {
            Trigger::Now => 1,
            // Where it begins inside a call, the first whole iteration is the next.
            Trigger::After(_) | Trigger::Position(_) => match begin_call(fault) {
                Some(n) => n + 1,
                None if in_a_freeze(fault) => first_hit.map_or(last, |hit| hit + 1) + 1,
                None => return (1, 0),
            },
        };
        match &fault.until {
            Until::Run => (first, last),
            Until::Call { n, .. } => (first, n - 1),
            Until::For(_) => (first, 0),
        }
    };
    let mut stretches: Vec<(u32, u32, Vec<&Fault>)> = Vec::new();
    for index in 1..=suite.workload.iterations {
        let at = u64::from(index);
        let partly = suite.faults.iter().any(|fault| {
            let begins =
                begin_call(fault) == Some(at) || in_a_freeze(fault) && first_hit.is_some_and(|hit| at == hit + 1);
            begins || matches!(&fault.until, Until::Call { n, .. } if *n == at)
        });
        let in_force: Vec<&Fault> =
            suite.faults.iter().filter(|fault| (whole(fault).0..=whole(fault).1).contains(&at)).collect();
        match stretches.last_mut() {
            _ if partly => stretches.push((index, 0, in_force)),
            Some((_, end, faults)) if *end + 1 == index && *faults == in_force => *end = index,
            _ => stretches.push((index, index, in_force)),
        }
    }
    stretches
}

/// Time of iteration `index` relative to the healthy flat ring, by the cost model; `None` where a fault begins or ends
/// within it, may spare it or not, or leaves no way on.
pub(crate) fn ideal_factor(suite: &Suite, row: ScaleRow, index: u32) -> Option<f64> {
    let (_, _, faults) = stretches(suite).into_iter().find(|(first, last, _)| (*first..=*last).contains(&index))?;
    let (slow, fast) = (balance_factor(suite, &faults, false), balance_factor(suite, &faults, true));
    if slow.is_infinite() || (slow - fast).abs() > 1e-9 {
        return None;
    }
    match suite.library.mode {
        _ if slow <= 1.0 => Some(1.0),
        Mode::None | Mode::Off => None,
        Mode::HotRepair => Some(one_backup_factor(suite, &faults)),
        Mode::Balance | Mode::R2ccAllreduce | Mode::Weighted => {
            // A small tensor is not worth another schedule.
            let large =
                suite.scale(row).is_some_and(|scale| scale.bytes.0 >= r2cc::Settings::default().min_bytes as u64);
            let scheduled = scheduled_factor(suite, row, slow).filter(|_| large).map(|(_, factor)| factor);
            Some(scheduled.unwrap_or(slow))
        }
    }
}

/// Time of an iteration when one NIC carries its own load and that of every dead NIC of its
/// node: 1 + the most NICs a node lost.
pub(super) fn one_backup_factor(suite: &Suite, faults: &[&Fault]) -> f64 {
    let lost = suite.node_names().into_iter().map(|node| {
        let dead: BTreeSet<usize> = faults.iter().filter_map(|fault| rail_index(suite, fault, &node)).collect();
        dead.len()
    });
    1.0 + lost.max().unwrap_or(0) as f64
}
