//! A hand-built run of suite 01 in which everything holds; tests bend it.

use super::record::{
    FaultRecord, FaultViewEntry, IterationRecord, Means, NicCounters, NodeCounters, RepairRecord, RunRecord, Span,
    TransportRecord,
};
use crate::suite::Suite;

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const HEALTHY_MS: u64 = 1600;
pub(crate) const DEGRADED_MS: u64 = 2400;
/// What one port receives in a healthy iteration.
pub(crate) const PORT_BYTES: u64 = 39_000_000;
pub(crate) const NICS: [&str; 3] = ["mlx5_0", "mlx5_2", "mlx5_3"];
pub(crate) const ELEMENTS: u64 = (64 << 20) / 4 * 6;
/// How long into iteration 3 the cut comes, and what its ideal and real times are.
pub(crate) const CUT_AFTER_MS: u64 = 400;
pub(crate) const HIT_MS: u64 = 2230;

pub(crate) fn suite_01() -> Suite {
    Suite::parse(include_str!("../../../suites/01.yaml"), "suites/01.yaml").unwrap()
}

/// Counters of all nodes with `bytes` on each NIC of `live`, none on the others.
pub(crate) fn counters(bytes: u64, live: &[&str]) -> NodeCounters {
    let port = |nic: &str| {
        let bytes = if live.contains(&nic) { bytes } else { 0 };
        NicCounters { rx_bytes: bytes, tx_bytes: bytes, passed_rx_bytes: bytes, passed_tx_bytes: bytes }
    };
    (1..=3).map(|n| (format!("node-{n}"), NICS.iter().map(|nic| (nic.to_string(), port(nic))).collect())).collect()
}

pub(crate) fn iteration(index: u32, start_ns: u64, millis: u64, nics: NodeCounters) -> IterationRecord {
    let end_ns = start_ns + millis * MS;
    IterationRecord {
        index,
        start_ns,
        end_ns,
        // Ranks start and end a little apart.
        ranks: (0..6)
            .map(|rank| {
                (
                    rank,
                    Span {
                        start_ns: start_ns + u64::from(rank) * MS / 10,
                        end_ns: end_ns - u64::from(5 - rank) * MS / 10,
                    },
                )
            })
            .collect(),
        checked_elements: ELEMENTS,
        wrong_elements: 0,
        first_wrong: None,
        nics,
    }
}

pub(crate) fn record_01() -> RunRecord {
    let mut now_ns = 1_000 * MS;
    let mut run = |index, millis, nics| {
        let record = iteration(index, now_ns, millis, nics);
        now_ns = record.end_ns + 20 * MS;
        record
    };
    let baseline: Vec<_> = (1..=5).map(|index| run(index, HEALTHY_MS, counters(PORT_BYTES, &NICS))).collect();
    let mut iterations = Vec::new();
    for index in 1..=10 {
        iterations.push(match index {
            1 | 2 => run(index, HEALTHY_MS, counters(PORT_BYTES, &NICS)),
            3 => run(index, HIT_MS, counters(PORT_BYTES, &NICS)),
            _ => run(index, DEGRADED_MS, counters(PORT_BYTES * 3 / 2, &["mlx5_0", "mlx5_3"])),
        });
    }
    let fired_at_ns = iterations[2].start_ns + CUT_AFTER_MS * MS;
    let place = FaultViewEntry {
        node: Some("node-1".into()),
        nic: Some("mlx5_2".into()),
        rail: Some("rail-2".into()),
        state: "down".into(),
        cause: "stall".into(),
    };
    RunRecord {
        sweep: Vec::new(),
        bytes: 64 << 20,
        ranks_per_node: 2,
        baseline,
        iterations,
        faults: vec![FaultRecord {
            spec: "drop@node-1/mlx5_2 from allreduce#3+25% for run".into(),
            fired: true,
            iteration: Some(3),
            asked_bytes: Some(PORT_BYTES / 4),
            bytes_before: Some(PORT_BYTES / 4 + 1500),
            packets_dropped: 120,
            bytes_dropped: 120 * 1500,
            fired_at_ns: Some(fired_at_ns),
            first_drop_ns: Some(fired_at_ns),
            healed_at_ns: None,
            healed: true,
            means: Means::Packets,
            carrier_lost: None,
            ports_at_firing: counters(PORT_BYTES / 4, &NICS),
        }],
        repairs: vec![RepairRecord {
            rank: 0,
            peer: 5,
            nic: "mlx5_2".into(),
            cause: "stall".into(),
            noticed_ns: Some(fired_at_ns + 24 * MS),
            first_drop_to_detect_ms: Some(24.0),
            detect_to_resume_ms: Some(1.5),
            replayed_bytes: 1 << 20,
        }],
        transport: TransportRecord {
            payload_bytes: 10_000_000_000,
            replayed_bytes: 4_000_000,
            paths_suspected: 2,
            paths_failed: 2,
            paths_down_at_end: 2,
            readmissions: 0,
        },
        goodput_bits_s: (1..=3).map(|n| (format!("node-{n}"), 573e6)).collect(),
        fault_view: (0..6).map(|rank| (rank, vec![place.clone()])).collect(),
        switch: Default::default(),
        switches: Default::default(),
        hang: None,
        graph: None,
    }
}
