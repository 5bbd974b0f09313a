//! `run.jsonl`, version 1: one event a line, in the order they were learnt.
//!
//! Enough to rebuild the record of the run, so that a report can be made again later.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::exit::Verdict;
use crate::check::CheckResult;
use crate::check::record::{
    FaultRecord, FaultViewEntry, GraphRecord, HangRecord, IterationRecord, RepairRecord, SweepRecord, SwitchRecord,
    TransportRecord,
};
use crate::suite::Suite;

/// Version of `run.jsonl` that this build writes.
pub const EVENT_VERSION: u32 = 1;

/// One line of `run.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventLine {
    /// Version of the event; always 1.
    pub version: u32,
    /// When it was written, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// What happened.
    pub event: Event,
}

/// A change of a path, a NIC or a schedule, as one rank tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Transition {
    /// The rank.
    pub rank: u32,
    /// When, by the rank's clock.
    pub at_ns: u64,
    /// A path's new state (suspect, failed, live, ...), resume, view or switch.
    pub kind: String,
    /// NIC, peer and cause, in words.
    pub text: String,
}

/// What happened during a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A repetition begins.
    Started {
        /// Row of the suite, if it has rows; `suite` is then what that row runs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        row: Option<String>,
        /// Repetition, from 1.
        repetition: u32,
        /// The suite as it was read.
        suite: Box<Suite>,
        /// host or nccl.
        backend: String,
        /// Bytes of the collective on each rank.
        bytes: u64,
        /// Ranks on each node.
        ranks_per_node: u32,
        /// Kernel, processors, versions, load.
        environment: BTreeMap<String, String>,
    },
    /// A step of setting up or tearing down, in words.
    Note {
        /// The words.
        text: String,
    },
    /// Plain TCP's goodput over all NICs of a node, by node, bits per second.
    Goodput(BTreeMap<String, f64>),
    /// A healthy iteration ended.
    Baseline(IterationRecord),
    /// A measured iteration ended.
    Iteration(IterationRecord),
    /// A fault is settled: fired or not, healed or not.
    Fault(FaultRecord),
    /// A rank repaired a link.
    Repair(RepairRecord),
    /// A rank told of a change of a path, a NIC or its schedule.
    Transition(Transition),
    /// A rank's fault view at its fullest.
    FaultView {
        /// The rank.
        rank: u32,
        /// Its entries.
        entries: Vec<FaultViewEntry>,
    },
    /// Sums over all ranks.
    Transport(TransportRecord),
    /// Collective at which each rank first changed its schedule.
    Switch(BTreeMap<u32, u64>),
    /// Every change of schedule of each rank.
    Switches(BTreeMap<u32, Vec<SwitchRecord>>),
    /// A collective never ended.
    Hang(HangRecord),
    /// The collective was captured as a graph.
    Graph(GraphRecord),
    /// A row of a sweep is measured.
    Sweep(SweepRecord),
    /// A check is settled.
    Check(CheckResult),
    /// The repetition is over.
    Ended {
        /// The verdict.
        verdict: Verdict,
        /// Exit code of this repetition.
        exit_code: i32,
    },
}
