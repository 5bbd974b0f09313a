//! What one run recorded: the only input of the checks.
//!
//! Plain data, filled by the workload, the cluster's counters, the injector and the ranks'
//! own event files. All `_ns` are CLOCK_MONOTONIC of one host (on several hosts, mapped to
//! the bench's clock by the recorder). Nothing here judges.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::perf::{Collective, Row};
use crate::suite::MANAGEMENT_NIC;

/// Counters of NICs by node and NIC name.
pub type NodeCounters = BTreeMap<String, BTreeMap<String, NicCounters>>;

/// Everything recorded of one repetition of a suite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunRecord {
    /// Bytes of the collective on each rank.
    pub bytes: u64,
    /// Ranks on each node that took part.
    pub ranks_per_node: u32,
    /// Healthy iterations run before the fault, indexed from 1.
    pub baseline: Vec<IterationRecord>,
    /// The measured iterations, indexed from 1; may end early when the run did.
    pub iterations: Vec<IterationRecord>,
    /// One for each fault of the suite, in the suite's order.
    pub faults: Vec<FaultRecord>,
    /// Every repair that a rank reported.
    pub repairs: Vec<RepairRecord>,
    /// Sums over all ranks.
    pub transport: TransportRecord,
    /// Goodput of plain TCP over all NICs of a node in this run, bits per second, by node.
    pub goodput_bits_s: BTreeMap<String, f64>,
    /// Fault view of each rank at its fullest, from the rank's own event file.
    pub fault_view: BTreeMap<u32, Vec<FaultViewEntry>>,
    /// Collective at which each rank first changed its schedule, counted from the first of the baseline.
    pub switch: BTreeMap<u32, u64>,
    /// Every change of schedule of each rank, in the order in which it made them, from its own event file.
    #[serde(default)]
    pub switches: BTreeMap<u32, Vec<SwitchRecord>>,
    /// The collective that never ended, if one did not.
    #[serde(default)]
    pub hang: Option<HangRecord>,
    /// What capturing the collective as a graph took, if it was captured.
    #[serde(default)]
    pub graph: Option<GraphRecord>,
    /// Rows of a sweep, in the order in which they were measured.
    #[serde(default)]
    pub sweep: Vec<SweepRecord>,
}

/// A rank goes over to another schedule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SwitchRecord {
    /// Number of the proposal, from 1.
    pub epoch: u64,
    /// The schedule.
    pub schedule: String,
    /// The collective from which it holds, counted from the first of the baseline.
    pub collective: u64,
    /// Collectives that the rank had started when it froze.
    pub started: u64,
    /// When it froze.
    pub frozen_ns: u64,
    /// When it heard the decision.
    pub decided_ns: u64,
}

/// When a row of a sweep was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Before the faults.
    Healthy,
    /// While the faults struck and were repaired.
    Hit,
    /// Under the faults.
    Degraded,
}

/// One row of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SweepRecord {
    /// What was measured.
    pub collective: Collective,
    /// When.
    pub phase: Phase,
    /// What came of it; every timed iteration was compared, element by element.
    pub row: Row,
}

/// A collective that never ended: every rank is alive and inside it, and nothing moves any more.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HangRecord {
    /// The iteration, from each rank's call to the moment it was given up.
    pub iteration: IterationRecord,
    /// Seconds for which no payload had arrived on any data port by then.
    pub silent_s: f64,
    /// Frames without payload that arrived all the same: address resolution, window probes, acknowledgements.
    pub control_frames: u64,
    /// Their bytes.
    pub control_bytes: u64,
    /// The ranks' processes at that moment: `rank 0: 4711 R`, the letter being the kernel's.
    pub processes: Vec<String>,
}

/// What it takes to capture a collective as a graph and make it replayable; of the slowest rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GraphRecord {
    /// The capture before the baseline.
    pub capture_millis: f64,
    /// Making that replayable.
    pub instantiate_millis: f64,
    /// The capture after the last iteration.
    #[serde(default)]
    pub recapture_millis: Option<f64>,
    /// Making that replayable.
    #[serde(default)]
    pub reinstantiate_millis: Option<f64>,
    /// One replay of the new graph, over the median of the baseline.
    #[serde(default)]
    pub replay_ratio: Option<f64>,
    /// Elements of that replay that differ.
    #[serde(default)]
    pub replay_wrong: u64,
}

/// One collective on all ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IterationRecord {
    /// Position, from 1.
    pub index: u32,
    /// Start on the rank that started first.
    pub start_ns: u64,
    /// End on the rank that ended last.
    pub end_ns: u64,
    /// Start and end on each rank.
    pub ranks: BTreeMap<u32, Span>,
    /// Elements compared with their expected value, all ranks together.
    pub checked_elements: u64,
    /// Elements that differed.
    pub wrong_elements: u64,
    /// The first element that differed, of the lowest rank that had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<WrongElement>,
    /// What each NIC moved during the iteration.
    pub nics: NodeCounters,
}

/// Start and end of a collective on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Span {
    /// Call of the collective.
    pub start_ns: u64,
    /// Its return.
    pub end_ns: u64,
}

/// An output element that is not what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WrongElement {
    /// Rank whose output it is in.
    pub rank: u32,
    /// Element index in the output.
    pub element: u64,
    /// Expected value, printed (text, so that a NaN can be named).
    pub expected: String,
    /// Value found, printed.
    pub actual: String,
}

/// Bytes that one NIC moved during an iteration, headers included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NicCounters {
    /// Received, as the interface counts (frames that XDP drops included).
    pub rx_bytes: u64,
    /// Sent, as the interface counts.
    pub tx_bytes: u64,
    /// Received and let pass by the injector's program; equals `rx_bytes` where none is attached.
    pub passed_rx_bytes: u64,
    /// Sent and let pass by the injector's program; equals `tx_bytes` where none is attached.
    pub passed_tx_bytes: u64,
}

/// What carries a fault out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// The injector's programs, in the path of the packets.
    #[default]
    Packets,
    /// A change by netlink outside the node, of which the programs know only when it is to come.
    Change,
}

/// What became of one fault.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FaultRecord {
    /// The fault as the suite writes it.
    pub spec: String,
    /// Whether its trigger came.
    pub fired: bool,
    /// Iteration during which it fired on every rank, if there is one; `place_faults` sets it.
    pub iteration: Option<u32>,
    /// Port bytes into the collective at which it was asked to fire; none when asked by time.
    pub asked_bytes: Option<u64>,
    /// Port bytes of that collective that had passed when it fired.
    pub bytes_before: Option<u64>,
    /// Packets it stopped (a rate change: packets it delayed).
    pub packets_dropped: u64,
    /// Bytes it stopped.
    #[serde(default)]
    pub bytes_dropped: u64,
    /// When the trigger came.
    pub fired_at_ns: Option<u64>,
    /// When the first packet was stopped.
    pub first_drop_ns: Option<u64>,
    /// When it ended, if it ended before the run did.
    #[serde(default)]
    pub healed_at_ns: Option<u64>,
    /// Whether nothing of it is left.
    pub healed: bool,
    /// What carried it out.
    #[serde(default)]
    pub means: Means,
    /// Of a link set down: whether every NIC that it was to cut off had lost its carrier when it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carrier_lost: Option<bool>,
    /// Bytes every NIC had moved since the start of the iteration that was hit, at the firing.
    #[serde(default)]
    pub ports_at_firing: NodeCounters,
}

/// One repair of a link, as the rank that made it tells.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RepairRecord {
    /// Rank that repaired.
    pub rank: u32,
    /// Rank at the other end.
    pub peer: u32,
    /// Local NIC of the path that failed.
    pub nic: String,
    /// What gave it away: stall, socket error, carrier, notice of the peer.
    pub cause: String,
    /// When this rank noticed it; none in records of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noticed_ns: Option<u64>,
    /// From the first dropped packet to the detection; none when no packet is known to be dropped.
    pub first_drop_to_detect_ms: Option<f64>,
    /// From the detection to the first replayed byte acknowledged.
    pub detect_to_resume_ms: Option<f64>,
    /// Bytes sent again.
    pub replayed_bytes: u64,
}

/// Sums over all ranks of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TransportRecord {
    /// Payload bytes sent once.
    pub payload_bytes: u64,
    /// Payload bytes sent again.
    pub replayed_bytes: u64,
    /// Paths that became suspect.
    pub paths_suspected: u64,
    /// Paths that were declared failed.
    pub paths_failed: u64,
    /// Paths still down when the run ended.
    #[serde(default)]
    pub paths_down_at_end: u64,
    /// Readmissions of a NIC, on the rank that made most.
    #[serde(default)]
    pub readmissions: u32,
}

/// One entry of a rank's fault view.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FaultViewEntry {
    /// Node, when the fault is at one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// NIC, when the fault is at one NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<String>,
    /// Rail of the NIC, or the rail itself when all of it is down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<String>,
    /// What it is: down, slow, suspect.
    pub state: String,
    /// What gave it away.
    pub cause: String,
}

impl FaultViewEntry {
    /// `node-1/mlx5_2`, or `rail-2` when no node is to blame.
    pub fn place(&self) -> String {
        match (&self.node, &self.nic, &self.rail) {
            (Some(node), Some(nic), _) => format!("{node}/{nic}"),
            (None, _, Some(rail)) => rail.clone(),
            (Some(node), None, Some(rail)) => format!("{node}/{rail}"),
            (Some(node), None, None) => node.clone(),
            (None, Some(nic), None) => nic.clone(),
            (None, None, None) => "unknown".to_string(),
        }
    }
}

impl IterationRecord {
    /// From the earliest start to the latest end, in milliseconds.
    pub fn millis(&self) -> f64 {
        self.end_ns.saturating_sub(self.start_ns) as f64 / 1e6
    }

    /// Bytes that `node` received.
    pub fn node_rx_bytes(&self, node: &str) -> u64 {
        rx_bytes(&self.nics, node)
    }

    /// Whether every rank was inside the iteration at `at_ns`.
    pub fn runs_on_every_rank_at(&self, at_ns: u64) -> bool {
        !self.ranks.is_empty() && self.ranks.values().all(|span| (span.start_ns..=span.end_ns).contains(&at_ns))
    }
}

/// Bytes that `node` received over all its data NICs and that were let pass.
pub fn rx_bytes(counters: &NodeCounters, node: &str) -> u64 {
    let data = |nics: &BTreeMap<String, NicCounters>| {
        nics.iter().filter(|(nic, _)| *nic != MANAGEMENT_NIC).map(|(_, counters)| counters.passed_rx_bytes).sum()
    };
    counters.get(node).map_or(0, data)
}
