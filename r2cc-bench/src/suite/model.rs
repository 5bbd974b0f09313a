//! The types of suite schema version 1: what a suite file can say.
//!
//! Plain data; every doc comment here is also the description in the JSON Schema, so it
//! is written for the author of a suite. Reading and judging a file is `read`'s work,
//! the figures a suite implies are `plan`'s.

use r2cc_inject::fault::Fault;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::expect::Checks;
use super::rows::Row;
use super::values::{BitRate, Bytes, Percent};
use crate::perf::Collective;

/// One experiment: a cluster, a workload, the faults and what must hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// Version of this schema; always 1.
    pub version: u32,
    /// Short unique name, also the name of the results folder.
    pub name: String,
    /// What the experiment proves, in one sentence.
    pub purpose: String,
    /// The machines: how many nodes, ranks and NICs, and how they are wired.
    pub cluster: ClusterSpec,
    /// Sizes and rates; the backend (host, nccl) or the cluster (ssh) in use picks its row.
    pub scale: Scales,
    /// What the ranks do.
    pub workload: WorkloadSpec,
    /// How the library under test is set.
    #[serde(default)]
    pub library: LibrarySpec,
    /// The faults, each as `KIND[:ARG]@NODE/NIC[/rx|/tx] from WHEN for HOW-LONG`.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// What must hold. Some checks hold without being asked for: see suites/README.md.
    #[serde(default)]
    pub checks: Checks,
    /// Whether a failing timing check fails the run.
    #[serde(default)]
    pub timing: Timing,
    /// Published figures to show beside ours, a path below reference-logs/; never enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Several runs side by side in one table: each is the suite with what its row says in place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Row>,
}

/// The machines of a suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    /// Where the nodes come from.
    #[serde(default)]
    pub kind: ClusterKind,
    /// Number of nodes, named node-1, node-2 and so on.
    #[schemars(range(min = 2, max = 64))]
    pub nodes: u32,
    /// Ranks on each node, placed node by node.
    #[schemars(range(min = 1, max = 64))]
    pub ranks_per_node: u32,
    /// NICs of each node by name; the n-th NIC of every node forms rail-n.
    pub nics: Vec<String>,
    /// Which NICs reach each other.
    #[serde(default)]
    pub fabric: Fabric,
}

/// Where the nodes of a cluster come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterKind {
    /// Network namespaces on this machine.
    #[default]
    Emulated,
    /// Hosts of an inventory, reached by ssh.
    Ssh,
    /// Real verbs over software RDMA in a virtual machine.
    SoftRoce,
}

/// Which NICs reach each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// Only NICs of the same rail: one subnet and one bridge a rail.
    #[default]
    Rails,
    /// Every NIC reaches every other.
    Any,
}

/// Names the row of `scale` that applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScaleRow {
    /// The native engine on host memory.
    Host,
    /// NCCL on a GPU.
    Nccl,
    /// A cluster of real hosts.
    Ssh,
}

impl ScaleRow {
    /// All rows, in the order they are shown.
    pub const ALL: [Self; 3] = [Self::Host, Self::Nccl, Self::Ssh];

    /// The row with this key.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|row| row.name() == name)
    }

    /// The key of the row in `scale`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nccl => "nccl",
            Self::Ssh => "ssh",
        }
    }
}

/// Sizes and rates of each backend or cluster; the one in use picks its row.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scales {
    /// The native engine on host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Scale>,
    /// NCCL on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<Scale>,
    /// A cluster of real hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh: Option<Scale>,
}

/// Sizes and rates of one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// Bytes of the collective on each rank.
    pub bytes: Bytes,
    /// Rate every NIC is shaped to, both ways; without it NICs run as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_rate: Option<BitRate>,
    /// Replaces `cluster.ranks_per_node` for this row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_per_node: Option<u32>,
    /// Replaces `within` of time ratios and of healthy NIC shares for this row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Percent>,
}

/// What the ranks do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkloadSpec {
    /// The program that runs on every rank.
    pub kind: WorkloadKind,
    /// Element type.
    #[serde(default)]
    pub dtype: DType,
    /// Reduction.
    #[serde(default)]
    pub op: Op,
    /// Whether the result replaces the input.
    #[serde(default = "yes")]
    pub in_place: bool,
    /// Iterations that are measured and may be hit, counted from 1.
    #[schemars(range(min = 1))]
    pub iterations: u32,
    /// Healthy, verified iterations run first by the same processes; all ratios refer to them.
    #[serde(default = "five")]
    #[schemars(range(min = 3))]
    pub baseline: u32,
    /// When ranks wait for each other.
    #[serde(default)]
    pub sync: Sync,
    /// What is swept, for kind perf.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<SweepSpec>,
}

/// A sweep of sizes up to `scale.bytes`, each out of place and, where it is defined, in place. Every size is measured
/// `workload.baseline` times healthy; with faults, then `workload.iterations` times under them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepSpec {
    /// What is measured, in turn.
    #[serde(default = "all_reduce")]
    pub collectives: Vec<Collective>,
    /// First size.
    #[serde(default = "eight")]
    pub from: Bytes,
    /// Each size is so many times the one before.
    #[serde(default = "eightfold")]
    #[schemars(range(min = 2))]
    pub factor: u64,
    /// Types and reductions beside `workload.dtype` and `workload.op`.
    #[serde(default)]
    pub also: Vec<TypeAndOp>,
}

/// An element type and a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TypeAndOp {
    /// Element type.
    pub dtype: DType,
    /// Reduction.
    pub op: Op,
}

fn all_reduce() -> Vec<Collective> {
    vec![Collective::AllReduce]
}

fn eight() -> Bytes {
    Bytes(8)
}

fn eightfold() -> u64 {
    8
}

fn yes() -> bool {
    true
}

fn five() -> u32 {
    5
}

/// The program that runs on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// One AllReduce after another, each verified element by element.
    AllreduceLoop,
    /// A sweep of sizes with nccl-tests' options and output.
    Perf,
    /// A captured CUDA graph, replayed.
    CudaGraph,
    /// A PyTorch DistributedDataParallel training run.
    Ddp,
}

/// Element type of the collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the meaning")]
pub enum DType {
    #[default]
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
    U32,
    U64,
}

impl DType {
    /// Bytes of one element.
    pub fn size_bytes(self) -> u64 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The name a suite file uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }
}

/// Reduction of the collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the meaning")]
pub enum Op {
    #[default]
    Sum,
    Prod,
    Min,
    Max,
    Avg,
}

impl Op {
    /// The name a suite file uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }
}

/// When ranks wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sync {
    /// All ranks finish iteration n-1 before any calls n, so a fault placed by call is exact.
    #[default]
    Each,
    /// Ranks run on; use a fault placed `at wire`.
    None,
}

/// How the library under test is set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LibrarySpec {
    /// What the library does about a failed NIC.
    #[serde(default)]
    pub mode: Mode,
    /// The schedule of a healthy AllReduce.
    #[serde(default)]
    pub schedule: Schedule,
    /// The schedule to change to once a fault has settled; without it the mode's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_repair: Option<AfterRepair>,
    /// NICs of one node, as `node-1/mlx5_2`, that ranks are told from the start to take for failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<String>,
    /// K: in how many chunks R2CC-AllReduce takes the weak node's part of the tail, by default 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub stage2_chunks: Option<u32>,
}

/// What the library does about a failed NIC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The library is not loaded.
    None,
    /// Loaded and inactive.
    Off,
    /// Everything of a failed NIC moves to one backup NIC.
    HotRepair,
    /// The load is spread over all surviving NICs.
    #[default]
    Balance,
    /// Balance, then the R2CC AllReduce schedule.
    R2ccAllreduce,
    /// Balance, then the bandwidth-weighted schedule.
    Weighted,
}

/// The schedule of a healthy AllReduce.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// One flat ring over all ranks.
    #[default]
    Ring,
    /// Inside the node first, then between nodes.
    Weighted,
}

/// The schedule to change to once a fault has settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the modes of the same name say it")]
pub enum AfterRepair {
    Balance,
    R2ccAllreduce,
    Weighted,
}

/// Whether a failing timing check fails the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Timing {
    /// Timing checks count.
    #[default]
    Enforced,
    /// Timing checks are shown as notes; everything else counts.
    Advisory,
}

impl Suite {
    /// Names of the nodes, in rank order.
    pub fn node_names(&self) -> Vec<String> {
        (1..=self.cluster.nodes).map(|n| format!("node-{n}")).collect()
    }

    /// Name of the rail that the n-th NIC (from 0) of every node forms.
    pub fn rail_name(nic_index: usize) -> String {
        format!("rail-{}", nic_index + 1)
    }

    /// The row of `scale` that applies, if the suite has it.
    pub fn scale(&self, row: ScaleRow) -> Option<&Scale> {
        match row {
            ScaleRow::Host => self.scale.host.as_ref(),
            ScaleRow::Nccl => self.scale.nccl.as_ref(),
            ScaleRow::Ssh => self.scale.ssh.as_ref(),
        }
    }

    /// The suite with the tolerances of `row`.
    pub fn on_row(mut self, row: ScaleRow) -> Self {
        if let Some(within) = self.scale(row).and_then(|scale| scale.within) {
            let of_rows = self.rows.iter_mut().filter_map(|row| row.checks.as_mut());
            for checks in of_rows.chain([&mut self.checks]) {
                checks.healthy_shares = within;
                for rule in &mut checks.time_ratio.0 {
                    rule.within = rule.within.map(|_| within);
                }
            }
        }
        self
    }

    /// Ranks on each node under `row`.
    pub fn ranks_per_node(&self, row: ScaleRow) -> u32 {
        self.scale(row).and_then(|scale| scale.ranks_per_node).unwrap_or(self.cluster.ranks_per_node)
    }

    /// Ranks of the whole cluster under `row`.
    pub fn ranks(&self, row: ScaleRow) -> u32 {
        self.cluster.nodes * self.ranks_per_node(row)
    }
}

impl ClusterKind {
    /// The name a suite file uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::Ssh => "ssh",
            Self::SoftRoce => "soft-roce",
        }
    }
}
