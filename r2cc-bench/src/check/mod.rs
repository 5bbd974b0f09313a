//! Judges a recorded run: pure functions from (suite, record) to check results.
//!
//! Owns what is expected, how far off is still right, and what makes a run inconclusive.
//! Never measures, reads a clock or a file, and never compares with an absolute figure of a
//! machine: bytes and times are ratios to the run's own healthy iterations. Start at
//! [`evaluate`]; the formulas are in [`figures`], the input in [`record`].

mod fault_rules;
pub mod figures;
mod hang_rules;
pub mod record;
mod rules;
#[cfg(test)]
pub(crate) mod sample;
mod sweep_rules;
mod switch_rules;
#[cfg(test)]
mod tests;
mod timing_rules;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use fault_rules::place_faults;
pub use record::RunRecord;

use crate::suite::{Suite, Timing, WorkloadKind, effect};

/// What `actual` says when the run cannot tell; no unit belongs to it.
pub(crate) const NOT_KNOWN: &str = "not known";

/// One check with what was expected and what came.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckResult {
    /// The suite key, with its place where one key makes several checks: `time_ratio 4-10`.
    pub name: String,
    /// What kind of evidence it rests on.
    pub class: CheckClass,
    /// What it says.
    pub status: CheckStatus,
    /// What was expected, in `unit`.
    pub expected: String,
    /// What came, in `unit`.
    pub actual: String,
    /// Unit of both; empty for counts and names.
    pub unit: String,
    /// Why, where the figures alone do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What kind of evidence a check rests on; decides its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CheckClass {
    /// Output elements; a failure is exit code 2.
    Elements,
    /// Byte and event counters.
    Counters,
    /// That a fault came when and where it was asked; a miss is exit code 3.
    Cut,
    /// That a fault is gone; a failure is exit code 6.
    Healed,
    /// What the ranks believe.
    View,
    /// Times; inconclusive on a noisy machine, notes under advisory timing.
    Timing,
}

/// What a check says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CheckStatus {
    /// It holds.
    Pass,
    /// It does not hold.
    Fail,
    /// The run cannot tell.
    Inconclusive,
    /// A timing check that does not hold or cannot tell, under advisory timing.
    Note,
    /// Left out by `--only`.
    Skipped,
}

impl CheckStatus {
    /// How a check line says it; never by colour alone.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::Fail => "FAIL",
            Self::Inconclusive => "INCONCLUSIVE",
            Self::Note => "NOTE",
            Self::Skipped => "SKIPPED",
        }
    }
}

impl CheckResult {
    fn new(name: impl Into<String>, class: CheckClass, unit: &str) -> Self {
        Self {
            name: name.into(),
            class,
            status: CheckStatus::Inconclusive,
            expected: String::new(),
            actual: String::new(),
            unit: unit.to_string(),
            detail: None,
        }
    }

    fn judged(mut self, holds: bool, expected: impl ToString, actual: impl ToString) -> Self {
        self.status = if holds { CheckStatus::Pass } else { CheckStatus::Fail };
        self.expected = expected.to_string();
        self.actual = actual.to_string();
        self
    }

    fn unknown(mut self, expected: impl ToString, why: impl Into<String>) -> Self {
        self.status = CheckStatus::Inconclusive;
        self.expected = expected.to_string();
        self.actual = NOT_KNOWN.to_string();
        self.detail = Some(why.into());
        self
    }

    fn because(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }
}

/// Judges `record` against `suite`; `timing` is the setting in force, the command line's
/// or the suite's.
///
/// The result holds every check the suite asks for and those that always apply, in a fixed
/// order: elements, faults, counters, views, times. Where nothing repairs a cut, what is expected
/// is a hang, and what would hold after it is not judged.
pub fn evaluate(suite: &Suite, record: &RunRecord, timing: Timing) -> Vec<CheckResult> {
    if effect::hangs(suite) {
        return hang_rules::all(suite, record);
    }
    let mut results = if suite.workload.kind == WorkloadKind::Perf {
        sweep_rules::all(suite, record)
    } else {
        let mut results = rules::elements(suite, record, suite.workload.iterations);
        results.extend(fault_rules::all(suite, record));
        results.extend(rules::counters(suite, record));
        results.extend(timing_rules::all(suite, record));
        results
    };
    if timing == Timing::Advisory {
        for result in &mut results {
            let unsettled = matches!(result.status, CheckStatus::Fail | CheckStatus::Inconclusive);
            if result.class == CheckClass::Timing && unsettled {
                result.status = CheckStatus::Note;
            }
        }
    }
    results
}

/// Leaves only the checks whose name is `name` or starts with it as a word; marks the rest
/// skipped. Healing is never skipped. Returns how many are left.
pub fn keep_only(results: &mut [CheckResult], name: &str) -> usize {
    let mut kept = 0;
    for result in results {
        let key = result.name.split(' ').next().unwrap_or_default();
        if result.name == name || key == name {
            kept += 1;
        } else if result.class != CheckClass::Healed {
            result.status = CheckStatus::Skipped;
        }
    }
    kept
}
