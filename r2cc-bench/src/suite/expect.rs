//! The types of a suite's `checks`: what must hold, and how far off is still right.
//!
//! Plain data; doc comments are the descriptions in the JSON Schema.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Bytes, IterationRange, Percent};

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
    /// Of a sweep: time of a size under the faults over its healthy time, medians; a list of rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep_ratio: Vec<SweepRatio>,
    /// Of a sweep: healthy bus bandwidth over the goodput that plain TCP reaches in the same run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep_goodput: Option<SweepGoodput>,
    /// Median baseline time over T0, the time at the goodput that plain TCP reaches in the same run.
    #[serde(default = "baseline_over_t0")]
    pub baseline_over_t0: f64,
    /// How far the share of each NIC of a healthy node may be from equal, relative, where NICs are shaped.
    #[serde(default = "healthy_shares")]
    pub healthy_shares: Percent,
}

fn healthy_shares() -> Percent {
    Percent(0.02)
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
            sweep_ratio: Vec::new(),
            sweep_goodput: None,
            baseline_over_t0: baseline_over_t0(),
            healthy_shares: healthy_shares(),
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

/// Times under the faults over healthy ones, of the sizes from `from` to `to`: `value` with `within`, or `at_most`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepRatio {
    /// First size the rule holds for.
    pub from: Bytes,
    /// Last size; without it the largest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Bytes>,
    /// The expected ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Tolerance relative to `value`, both ways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Percent>,
    /// Upper limit, instead of `value` and `within`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
}

impl SweepRatio {
    /// The sizes, as a check's name has them.
    pub fn sizes(&self) -> String {
        match self.to {
            Some(to) => format!("{}-{to}", self.from),
            None => format!("{}-", self.from),
        }
    }
}

/// Healthy bus bandwidth of the sizes from `from` on, over plain TCP's goodput.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepGoodput {
    /// First size the rule holds for.
    pub from: Bytes,
    /// Lower limit of the ratio.
    pub at_least: f64,
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

/// Iteration times over the median of the baseline, or over the bound: `value` with `within`, or `at_most`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeRatio {
    /// The iterations the rule holds for: `4-10`.
    pub iterations: IterationRange,
    /// The expected ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Tolerance relative to `value`, both ways, or to `at_most`, by which it may be passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Percent>,
    /// Upper limit, instead of `value` and `within`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Whether each iteration must comply or only their median.
    #[serde(default, skip_serializing_if = "Statistic::is_each")]
    pub of: Statistic,
    /// What the times are held against.
    #[serde(default, skip_serializing_if = "Against::is_baseline")]
    pub over: Against,
}

/// What times are held against.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Against {
    /// The median of the healthy iterations.
    #[default]
    Baseline,
    /// What any AllReduce takes at least under the faults that last for the run: the linear program over rails, in
    /// multiples of the healthy flat ring's time, times the median of the healthy iterations.
    Bound,
}

impl Against {
    fn is_baseline(&self) -> bool {
        *self == Self::Baseline
    }
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
