//! Checks of a run in which nothing repairs a cut: the collective that is hit must never end.
//!
//! What is right before the cut must still be right, and the cut must have come as asked; whatever a
//! suite asks for after the cut has nothing to be judged by.

use super::record::RunRecord;
use super::{CheckClass, CheckResult, CheckStatus, fault_rules, rules};
use crate::suite::{Suite, effect};

/// Checks of later iterations, of which there are none.
const NEEDS_LATER: &str = "silent_after_cut";

pub(super) fn all(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let before = record.hang.as_ref().map(|hang| hang.iteration.index.saturating_sub(1));
    let mut results = rules::elements(suite, record, before.unwrap_or(suite.workload.iterations));
    results.extend(fault_rules::all(suite, record).into_iter().filter(|result| !result.name.starts_with(NEEDS_LATER)));
    results.push(hang(suite, record));
    results
}

/// That the hit iteration, and no other, hangs.
fn hang(suite: &Suite, record: &RunRecord) -> CheckResult {
    let result = CheckResult::new("hang", CheckClass::Cut, "");
    let asked = suite
        .checks
        .cut_iteration
        .or_else(|| suite.faults.iter().filter_map(effect::begin_call).min().and_then(|n| u32::try_from(n).ok()));
    let expected = match asked {
        Some(index) => format!("iteration {index} never ends"),
        None => "an iteration never ends".to_owned(),
    };
    match &record.hang {
        Some(hang) => {
            let right = asked.is_none_or(|index| index == hang.iteration.index);
            let actual = format!(
                "iteration {} had not ended after {:.1} s",
                hang.iteration.index,
                hang.iteration.millis() / 1e3
            );
            let detail = format!(
                "every rank alive, no payload on any data port for {:.1} s ({} control frames, {} B); {}",
                hang.silent_s,
                hang.control_frames,
                hang.control_bytes,
                hang.processes.join(", ")
            );
            result.judged(right, expected, actual).because(detail)
        }
        None => {
            let done = record.iterations.len();
            CheckResult { status: CheckStatus::Fail, ..result.unknown(expected, format!("{done} iterations ended")) }
        }
    }
}
