//! Compares two recorded runs, or two sets of runs: what became slower or faster, and which checks changed.
//!
//! A time counts as changed only when the whole confidence interval of the ratio lies beyond a threshold, and as the
//! same only when all of it lies within; else the runs cannot tell. Reads `summary.json` files and nothing else.
//! Start at [`compare`].

mod interval;
mod load;
#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use interval::{CONFIDENCE, Interval, RESAMPLES};
pub use load::{LoadError, load};
pub use text::words;

use crate::check::CheckStatus;
use crate::report::{ExitCode, Summary};

/// Version of the comparison's JSON.
pub const COMPARISON_VERSION: u32 = 1;

/// Runs of each side, by suite.
pub type Side = BTreeMap<String, Vec<Summary>>;

/// Two sides compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Comparison {
    /// Version of this object; always 1.
    pub version: u32,
    /// What it comes to.
    pub verdict: Change,
    /// Exit code of the command.
    pub exit_code: i32,
    /// Confidence of every interval, as a fraction.
    pub confidence: f64,
    /// Relative change of a time from which it counts.
    pub threshold: f64,
    /// Suites that both sides have.
    pub suites: Vec<SuiteComparison>,
    /// Suites that only the first side has.
    pub only_before: Vec<String>,
    /// Suites that only the second side has.
    pub only_after: Vec<String>,
}

/// One suite on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SuiteComparison {
    /// Its name.
    pub suite: String,
    /// Runs of each side.
    pub runs: (usize, usize),
    /// What was measured, on both sides.
    pub measures: Vec<Measured>,
    /// Checks that fail on either side, or cannot tell where they could.
    pub checks: Vec<CheckChange>,
    /// What differs of the clusters and machines.
    pub environment: Vec<Difference>,
}

/// One measure on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// What it is.
    pub name: String,
    /// Unit of the medians.
    pub unit: String,
    /// The first side.
    pub before: Spread,
    /// The second side.
    pub after: Spread,
    /// Second over first, or second minus first where `relative` is false; none of too few samples.
    pub change: Option<Interval>,
    /// Whether `change` is a ratio.
    pub relative: bool,
    /// What it comes to.
    pub verdict: Change,
}

/// Median and range of one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Spread {
    /// Median of the runs' medians.
    pub median: f64,
    /// The smallest sample.
    pub least: f64,
    /// The largest sample.
    pub most: f64,
    /// Samples, all runs together.
    pub samples: usize,
}

/// What a comparison comes to; of several the first counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// The second side is worse.
    Worse,
    /// The runs cannot tell.
    CannotTell,
    /// The second side is better.
    Better,
    /// No difference that counts.
    Same,
    /// Too few samples to say anything; never counts.
    TooFew,
}

impl Change {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Worse => "WORSE",
            Self::CannotTell => "CANNOT TELL",
            Self::Better => "BETTER",
            Self::Same => "same",
            Self::TooFew => "too few runs",
        }
    }

    fn exit(self) -> ExitCode {
        match self {
            Self::Worse => ExitCode::Failed,
            Self::CannotTell => ExitCode::Inconclusive,
            Self::Better | Self::Same | Self::TooFew => ExitCode::Pass,
        }
    }
}

/// A check that does not simply pass on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckChange {
    /// Its name.
    pub name: String,
    /// What became of it.
    pub fate: Fate,
    /// Runs of the first side in which it failed, of how many that have it.
    pub before: (usize, usize),
    /// Runs of the second side in which it failed, of how many that have it.
    pub after: (usize, usize),
    /// What came in the first failing run of the side that fails, the second side first.
    pub actual: String,
    /// What was expected there.
    pub expected: String,
}

/// What became of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// Fails on the second side only.
    New,
    /// Fails on both.
    StillFailing,
    /// Fails on the first side only.
    Fixed,
    /// Fails on neither, and cannot tell on the second where it could on the first.
    NoLongerKnown,
}

impl Fate {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::New => "NEW FAILURE",
            Self::StillFailing => "still failing",
            Self::Fixed => "fixed",
            Self::NoLongerKnown => "no longer known",
        }
    }
}

/// A fact of the machine or the cluster that differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Difference {
    /// The fact.
    pub name: String,
    /// On the first side; several values where its runs differ.
    pub before: String,
    /// On the second side.
    pub after: String,
}

/// How a measure is compared.
#[derive(Clone, Copy)]
enum Scale {
    /// As a ratio, against the threshold.
    Ratio,
    /// As a difference in milliseconds, against this one.
    Millis(f64),
}

struct Measure {
    name: &'static str,
    unit: &'static str,
    more_is_better: bool,
    scale: Scale,
    /// Samples of one run.
    of: fn(&Summary) -> Vec<f64>,
}

/// Differences of single events below this are a scheduler's, not a library's.
const EVENT_MILLIS: f64 = 5.0;

const MEASURES: [Measure; 5] = [
    Measure {
        name: "healthy iteration",
        unit: "ms",
        more_is_better: false,
        scale: Scale::Ratio,
        of: |run| run.baseline.millis.clone(),
    },
    Measure {
        name: "iteration under the faults",
        unit: "ms",
        more_is_better: false,
        scale: Scale::Ratio,
        of: under_faults,
    },
    Measure {
        name: "cost of the hit iteration",
        unit: "ms",
        more_is_better: false,
        scale: Scale::Millis(EVENT_MILLIS),
        of: |run| run.hit_iteration.iter().map(|hit| hit.over_millis).collect(),
    },
    Measure {
        name: "slowest detection",
        unit: "ms",
        more_is_better: false,
        scale: Scale::Millis(EVENT_MILLIS),
        of: |run| {
            let timed = run.repairs.iter().filter(|repair| repair.replayed_bytes > 0);
            timed.filter_map(|repair| repair.first_drop_to_detect_ms).reduce(f64::max).into_iter().collect()
        },
    },
    Measure {
        name: "plain TCP's goodput",
        unit: "Mbit/s",
        more_is_better: true,
        scale: Scale::Ratio,
        of: |run| run.baseline.tcp_goodput_bits_s.iter().map(|bits_s| bits_s / 1e6).collect(),
    },
];

/// Whole iterations after the first one that a fault hit; all of them where none did.
fn under_faults(run: &Summary) -> Vec<f64> {
    let hits: BTreeSet<u32> = run.faults.iter().filter_map(|fault| fault.iteration).collect();
    let after = |index: u32| hits.first().is_none_or(|first| index > *first) && !hits.contains(&index);
    run.iterations.iter().filter(|it| after(it.index)).map(|it| it.millis).collect()
}

/// Compares `after` with `before`; a time counts from the relative change `threshold` on. The same runs give the same
/// answer: what is random is seeded.
pub fn compare(before: &Side, after: &Side, threshold: f64) -> Comparison {
    let names =
        |side: &Side, other: &Side| side.keys().filter(|name| !other.contains_key(*name)).cloned().collect::<Vec<_>>();
    // One suite a side is what is meant, whatever the two are called.
    if let ([(first, before)], [(second, after)]) =
        (&*before.iter().collect::<Vec<_>>(), &*after.iter().collect::<Vec<_>>())
        && first != second
    {
        let suites = vec![compare_suite(&format!("{first} -> {second}"), before, after, threshold)];
        return summed(suites, Vec::new(), Vec::new(), threshold);
    }
    let both = before.iter().filter_map(|(name, runs)| Some((name, runs, after.get(name)?)));
    let suites: Vec<SuiteComparison> =
        both.map(|(name, before, after)| compare_suite(name, before, after, threshold)).collect();
    summed(suites, names(before, after), names(after, before), threshold)
}

fn summed(
    suites: Vec<SuiteComparison>,
    only_before: Vec<String>,
    only_after: Vec<String>,
    threshold: f64,
) -> Comparison {
    let verdict = suites.iter().map(SuiteComparison::verdict).min().unwrap_or(Change::CannotTell);
    Comparison {
        version: COMPARISON_VERSION,
        verdict,
        exit_code: verdict.exit().code(),
        confidence: CONFIDENCE,
        threshold,
        suites,
        only_before,
        only_after,
    }
}

impl SuiteComparison {
    /// What the suite comes to.
    pub fn verdict(&self) -> Change {
        let measures =
            self.measures.iter().map(|measured| measured.verdict).filter(|verdict| *verdict != Change::TooFew);
        let checks = self.checks.iter().map(|check| match check.fate {
            Fate::New => Change::Worse,
            Fate::NoLongerKnown => Change::CannotTell,
            Fate::Fixed => Change::Better,
            Fate::StillFailing => Change::Same,
        });
        measures.chain(checks).min().unwrap_or(Change::CannotTell)
    }
}

fn compare_suite(name: &str, before: &[Summary], after: &[Summary], threshold: f64) -> SuiteComparison {
    SuiteComparison {
        suite: name.to_owned(),
        runs: (before.len(), after.len()),
        measures: MEASURES.iter().filter_map(|measure| measured(measure, before, after, threshold)).collect(),
        checks: check_changes(before, after),
        environment: differences(before, after),
    }
}

fn measured(measure: &Measure, before: &[Summary], after: &[Summary], threshold: f64) -> Option<Measured> {
    let samples = |runs: &[Summary]| -> Vec<Vec<f64>> {
        runs.iter().map(measure.of).filter(|samples| !samples.is_empty()).collect()
    };
    let (first, second) = (samples(before), samples(after));
    let (relative, limit) = match measure.scale {
        Scale::Ratio => (true, threshold),
        Scale::Millis(limit) => (false, limit),
    };
    let change = interval::change(&first, &second, relative);
    let verdict = change.map_or(Change::TooFew, |change| {
        let zero = if relative { 1.0 } else { 0.0 };
        let (low, high) = (change.low - zero, change.high - zero);
        // Beyond the limit in a direction, as a whole.
        let (up, down) = (low > limit, high < -limit);
        match (up, down) {
            (true, _) if measure.more_is_better => Change::Better,
            (true, _) => Change::Worse,
            (_, true) if measure.more_is_better => Change::Worse,
            (_, true) => Change::Better,
            _ if low >= -limit && high <= limit => Change::Same,
            // Single events vary more than iterations: it takes more runs to bound them.
            _ if !relative => Change::TooFew,
            _ => Change::CannotTell,
        }
    });
    Some(Measured {
        name: measure.name.to_owned(),
        unit: measure.unit.to_owned(),
        before: spread(&first)?,
        after: spread(&second)?,
        change,
        relative,
        verdict,
    })
}

fn spread(runs: &[Vec<f64>]) -> Option<Spread> {
    let samples = || runs.iter().flatten().copied();
    Some(Spread {
        median: interval::centre(runs)?,
        least: samples().reduce(f64::min)?,
        most: samples().reduce(f64::max)?,
        samples: samples().count(),
    })
}

fn check_changes(before: &[Summary], after: &[Summary]) -> Vec<CheckChange> {
    let mut names: Vec<&str> = Vec::new();
    for check in before.iter().chain(after).flat_map(|run| &run.checks) {
        if !names.contains(&check.name.as_str()) {
            names.push(&check.name);
        }
    }
    let mut changes: Vec<CheckChange> =
        names.into_iter().filter_map(|name| check_change(name, before, after)).collect();
    changes.sort_by_key(|change| change.fate);
    changes
}

fn check_change(name: &str, before: &[Summary], after: &[Summary]) -> Option<CheckChange> {
    let of = |runs: &[Summary]| -> Vec<_> {
        runs.iter().filter_map(|run| run.checks.iter().find(|check| check.name == name)).cloned().collect()
    };
    let (first, second) = (of(before), of(after));
    let count = |checks: &[crate::check::CheckResult], status| checks.iter().filter(|c| c.status == status).count();
    let failed = |checks: &[_]| count(checks, CheckStatus::Fail);
    let unknown = |checks: &[_]| count(checks, CheckStatus::Inconclusive);
    let fate = match (failed(&first) > 0, failed(&second) > 0) {
        (false, true) => Fate::New,
        (true, true) => Fate::StillFailing,
        // A check that the second side does not have, or cannot answer, is not fixed.
        (true, false) if second.is_empty() || unknown(&second) > 0 => Fate::NoLongerKnown,
        (true, false) => Fate::Fixed,
        (false, false) if unknown(&second) > 0 && unknown(&first) == 0 && !first.is_empty() => Fate::NoLongerKnown,
        (false, false) => return None,
    };
    let worst = |status| second.iter().chain(&first).find(|check| check.status == status);
    let shown = worst(CheckStatus::Fail).or_else(|| worst(CheckStatus::Inconclusive))?;
    Some(CheckChange {
        name: name.to_owned(),
        fate,
        before: (failed(&first), first.len()),
        after: (failed(&second), second.len()),
        actual: format!("{} {}", shown.actual, shown.unit).trim_end().to_owned(),
        expected: shown.expected.clone(),
    })
}

/// Facts whose values differ between the sides. The load differs always, and is told by its range.
fn differences(before: &[Summary], after: &[Summary]) -> Vec<Difference> {
    let facts = |run: &Summary| -> BTreeMap<String, String> {
        let cluster = &run.cluster;
        let rate =
            cluster.nic_rate_bits_s.map_or("as it is".to_owned(), |rate| format!("{} Mbit/s", rate as f64 / 1e6));
        let mut facts = run.environment.clone();
        facts.extend([
            ("backend".to_owned(), run.backend.clone()),
            ("cluster".to_owned(), cluster.kind.clone()),
            ("nodes".to_owned(), cluster.nodes.len().to_string()),
            ("ranks per node".to_owned(), cluster.ranks_per_node.to_string()),
            ("NICs".to_owned(), cluster.nics.join(", ")),
            ("fabric".to_owned(), format!("{:?}", cluster.fabric).to_lowercase()),
            ("bytes a rank".to_owned(), cluster.bytes.to_string()),
            ("NIC rate".to_owned(), rate),
            ("faults".to_owned(), run.faults.iter().map(|fault| fault.spec.as_str()).collect::<Vec<_>>().join("; ")),
        ]);
        facts
    };
    let values = |runs: &[Summary], name: &str| -> BTreeSet<String> {
        runs.iter().map(|run| facts(run).remove(name).unwrap_or_else(|| "-".to_owned())).collect()
    };
    let names: BTreeSet<String> = before.iter().chain(after).flat_map(|run| facts(run).into_keys()).collect();
    let differing = names.into_iter().filter_map(|name| {
        let (first, second) = (values(before, &name), values(after, &name));
        let joined = |values: BTreeSet<String>| match name.as_str() {
            "load_average" => load_range(&values),
            _ => values.into_iter().collect::<Vec<_>>().join(" | "),
        };
        let (before, after) = (first != second).then(|| (joined(first), joined(second)))?;
        (before != after).then_some(Difference { name, before, after })
    });
    differing.collect()
}

/// The load averages of one minute.
fn load_range(values: &BTreeSet<String>) -> String {
    let loads = || values.iter().filter_map(|text| text.split(' ').next()?.parse::<f64>().ok());
    match (loads().reduce(f64::min), loads().reduce(f64::max)) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (Some(one), _) => one.to_string(),
        _ => "-".to_owned(),
    }
}
