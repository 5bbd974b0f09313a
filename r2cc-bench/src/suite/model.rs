//! The types of suite schema version 1: what a suite file can say.
//!
//! Plain data; every doc comment here is also the description in the JSON Schema, so it
//! is written for the author of a suite. Reading and judging a file is `read`'s work,
//! the figures a suite implies are `plan`'s.

use std::fmt;

use r2cc_inject::fault::Fault;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{BitRate, Bytes, IterationRange, Percent};

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

/// What must hold. `within` is relative: 0.5 within 3% is 0.485 to 0.515.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Checks {
    /// Every output element of every rank and iteration, the baseline included.
    #[serde(default)]
    pub elements: ElementCheck,
    /// The iteration every fault must fall into, on every rank; by default the one its trigger names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_iteration: Option<u32>,
    /// Share of the received bytes that each surviving NIC of a cut node carries in the iterations after the cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survivors_share: Option<Near>,
    /// Iteration time over the median of the baseline; one rule or a list of them.
    #[serde(default, skip_serializing_if = "TimeRatios::is_empty")]
    pub time_ratio: TimeRatios,
    /// Milliseconds that the hit iteration may take beyond its ideal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_over_ideal_ms: Option<f64>,
    /// Milliseconds from the first dropped packet to its detection, of the slowest repair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detection_ms: Option<f64>,
    /// How often a NIC may be taken back into service, on the rank that did so most often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readmissions_at_most: Option<u32>,
    /// How many paths may be declared failed, all ranks together; 0: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths_failed_at_most: Option<u64>,
    /// How many paths may still be down when the run ends; 0: none is held down for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths_down_at_end_at_most: Option<u64>,
    /// Replayed bytes over payload bytes, all ranks together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replayed_at_most: Option<Percent>,
    /// Bytes a node receives over what it received in a healthy iteration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_bytes: Vec<NodeBytes>,
    /// What every rank's fault view names, at its fullest: `node-1/mlx5_2` or `rail-2`; an empty list: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_view: Option<Vec<String>>,
    /// Median baseline time over T0, the time at the goodput that plain TCP reaches in the same run.
    #[serde(default = "baseline_over_t0")]
    pub baseline_over_t0: f64,
}

fn baseline_over_t0() -> f64 {
    1.06
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            elements: ElementCheck::default(),
            cut_iteration: None,
            survivors_share: None,
            time_ratio: TimeRatios::default(),
            hit_over_ideal_ms: None,
            detection_ms: None,
            readmissions_at_most: None,
            paths_failed_at_most: None,
            paths_down_at_end_at_most: None,
            replayed_at_most: None,
            node_bytes: Vec::new(),
            fault_view: None,
            baseline_over_t0: baseline_over_t0(),
        }
    }
}

/// How elements are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ElementCheck {
    /// Bit for bit with the exact result (avg over a P that is no power of two: within nccl-tests' bound).
    #[default]
    Exact,
}

/// A value and how far from it is still right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Near {
    /// The expected value.
    pub value: f64,
    /// Tolerance, relative to the value.
    pub within: Percent,
}

/// Bytes that one node receives over those of its healthy iterations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeBytes {
    /// The node.
    pub node: String,
    /// The iterations the rule holds for: `4-10`.
    pub iterations: IterationRange,
    /// The expected ratio.
    pub value: f64,
    /// Tolerance, relative to the value.
    pub within: Percent,
}

/// One rule or a list of rules.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct TimeRatios(#[schemars(with = "OneOrMany")] pub Vec<TimeRatio>);

impl TimeRatios {
    /// Whether no rule is given.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Either form of `time_ratio`, for the schema.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum OneOrMany {
    One(TimeRatio),
    Many(Vec<TimeRatio>),
}

impl<'de> Deserialize<'de> for TimeRatios {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // An untagged enum would answer "did not match any variant"; this keeps the cause.
        struct Either;
        impl<'de> serde::de::Visitor<'de> for Either {
            type Value = TimeRatios;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a rule {iterations, value, within} or a list of such rules")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<TimeRatios, A::Error> {
                let rule = TimeRatio::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                Ok(TimeRatios(vec![rule]))
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<TimeRatios, A::Error> {
                let mut rules = Vec::new();
                while let Some(rule) = seq.next_element()? {
                    rules.push(rule);
                }
                Ok(TimeRatios(rules))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Iteration times over the median of the baseline: `value` with `within`, or `at_most`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeRatio {
    /// The iterations the rule holds for: `4-10`.
    pub iterations: IterationRange,
    /// The expected ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Tolerance relative to `value`, both ways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Percent>,
    /// Upper limit, instead of `value` and `within`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Whether each iteration must comply or only their median.
    #[serde(default, skip_serializing_if = "Statistic::is_each")]
    pub of: Statistic,
}

/// Which times a rule looks at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Statistic {
    /// Every iteration of the range.
    #[default]
    Each,
    /// The median of the range.
    Median,
}

impl Statistic {
    fn is_each(&self) -> bool {
        *self == Self::Each
    }
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
