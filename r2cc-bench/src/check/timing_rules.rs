//! Checks of times, all of them ratios or differences within the run itself.
//!
//! When the baseline is too noisy to be a measure, every one of them is inconclusive.

use super::figures::{self, Baseline, NOISY_MAD_PERCENT};
use super::record::RunRecord;
use super::rules::ROUNDING;
use super::{CheckClass, CheckResult, CheckStatus};
use crate::suite::{Against, Statistic, Suite, TimeRatio};

/// Baseline iterations below which a spread says nothing.
const FEWEST_BASELINE: usize = 3;

pub(super) fn all(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let spread = baseline_spread(record);
    let quiet = spread.status == CheckStatus::Pass;
    let mut results = vec![spread];
    let Some(baseline) = figures::baseline(record) else {
        return results;
    };
    results.push(baseline_over_t0(suite, record, baseline));
    for rule in &suite.checks.time_ratio.0 {
        results.push(time_ratio(suite, rule, record, baseline));
    }
    results.extend(suite.checks.hit_over_ideal_ms.map(|most| hit_over_ideal(suite, record, most)));
    results.extend(suite.checks.detection_ms.map(|most| detection(record, most)));
    if !quiet {
        for result in &mut results {
            if matches!(result.status, CheckStatus::Pass | CheckStatus::Fail) {
                result.status = CheckStatus::Inconclusive;
                let noise = format!("the baseline's spread is {:.2} %", baseline.mad_percent);
                result.detail = Some(match result.detail.take() {
                    Some(detail) => format!("{noise}; {detail}"),
                    None => noise,
                });
            }
        }
    }
    results
}

fn baseline_spread(record: &RunRecord) -> CheckResult {
    let result = CheckResult::new("baseline_spread", CheckClass::Timing, "% of the median");
    let expected = format!("at most {NOISY_MAD_PERCENT}");
    let Some(baseline) = figures::baseline(record).filter(|_| record.baseline.len() >= FEWEST_BASELINE) else {
        return result.unknown(expected, format!("{} baseline iterations ran", record.baseline.len()));
    };
    let quiet = baseline.mad_percent <= NOISY_MAD_PERCENT;
    let mut result = result.judged(quiet, expected, format!("{:.2}", baseline.mad_percent));
    if !quiet {
        // Noise is no fault of the library.
        result.status = CheckStatus::Inconclusive;
    }
    result
}

fn baseline_over_t0(suite: &Suite, record: &RunRecord, baseline: Baseline) -> CheckResult {
    let most = suite.checks.baseline_over_t0;
    let result = CheckResult::new("baseline_over_t0", CheckClass::Timing, "x T0");
    let expected = format!("at most {most}");
    match figures::t0_millis(suite, record) {
        Some(t0) => {
            let ratio = baseline.median_millis / t0;
            result
                .judged(ratio <= most + ROUNDING, expected, format!("{ratio:.3}"))
                .because(format!("T0 is {t0:.1} ms at plain TCP's goodput"))
        }
        None => result.unknown(expected, "plain TCP's goodput was not measured"),
    }
}

fn time_ratio(suite: &Suite, rule: &TimeRatio, record: &RunRecord, baseline: Baseline) -> CheckResult {
    let name = format!("time_ratio {}", rule.iterations);
    let (result, reference) = match rule.over {
        Against::Baseline => {
            (CheckResult::new(name, CheckClass::Timing, "x the baseline median"), Some(baseline.median_millis))
        }
        Against::Bound => {
            let name = format!("{name} over the bound");
            (CheckResult::new(name, CheckClass::Timing, "x the bound"), figures::bound_millis(suite, record))
        }
    };
    let Some(reference) = reference else {
        return result.unknown("", "under the faults two nodes do not reach each other");
    };
    let ratios: Vec<(f64, u32)> = record
        .iterations
        .iter()
        .filter(|iteration| rule.iterations.contains(iteration.index))
        .map(|iteration| (iteration.millis() / reference, iteration.index))
        .collect();
    // Distance from what is asked, in tolerances; above 1 the rule is broken.
    let (expected, excess): (String, Box<dyn Fn(f64) -> f64>) = match (rule.value, rule.within, rule.at_most) {
        (Some(value), Some(within), _) => {
            (format!("{value} within {within}"), Box::new(move |ratio| (ratio / value - 1.0).abs() - within.0))
        }
        (_, Some(within), Some(most)) => {
            (format!("at most {most} + {within}"), Box::new(move |ratio| ratio / most - 1.0 - within.0))
        }
        (_, None, Some(most)) => (format!("at most {most}"), Box::new(move |ratio| ratio / most - 1.0)),
        // Refused when the suite was read.
        _ => return result.unknown("", "the rule has no limit"),
    };
    let asked = (rule.iterations.last - rule.iterations.first + 1) as usize;
    if ratios.len() < asked {
        // Not the machine's noise: the run ended before it came to these iterations.
        let why = format!("{} of {asked} iterations ran", ratios.len());
        return CheckResult { status: CheckStatus::Fail, ..result.unknown(expected, why) };
    }
    match rule.of {
        Statistic::Median => {
            let values: Vec<f64> = ratios.iter().map(|(ratio, _)| *ratio).collect();
            let Some(median) = figures::median(&values) else {
                return result.unknown(expected, "none of these iterations ran");
            };
            result
                .judged(excess(median) <= ROUNDING, expected, format!("{median:.3}"))
                .because(format!("median of {asked}"))
        }
        Statistic::Each => {
            let worst = ratios.iter().max_by(|a, b| excess(a.0).total_cmp(&excess(b.0)));
            let Some((ratio, index)) = worst else {
                return result.unknown(expected, "none of these iterations ran");
            };
            let least = ratios.iter().map(|(ratio, _)| *ratio).fold(f64::INFINITY, f64::min);
            let most = ratios.iter().map(|(ratio, _)| *ratio).fold(0.0, f64::max);
            result
                .judged(excess(*ratio) <= ROUNDING, expected, format!("{ratio:.3}"))
                .because(format!("furthest off: iteration {index}; all between {least:.3} and {most:.3}"))
        }
    }
}

fn hit_over_ideal(suite: &Suite, record: &RunRecord, most: f64) -> CheckResult {
    let result = CheckResult::new("hit_over_ideal_ms", CheckClass::Timing, "ms");
    let expected = format!("at most {most}");
    match figures::hit_iteration(suite, record) {
        Ok(hit) => result.judged(hit.over_millis <= most, expected, format!("{:.1}", hit.over_millis)).because(
            format!("iteration {} took {:.1} ms, its ideal is {:.1} ms", hit.index, hit.millis, hit.ideal_millis),
        ),
        Err(why) => result.unknown(expected, why),
    }
}

/// A path with nothing under way has nothing to notice; it is probed once another rank tells of trouble, and
/// does not count here unless there is no other.
fn detection(record: &RunRecord, most: f64) -> CheckResult {
    let result = CheckResult::new("detection_ms", CheckClass::Timing, "ms");
    let expected = format!("at most {most}");
    let timed = || record.repairs.iter().filter_map(|repair| Some((repair.first_drop_to_detect_ms?, repair)));
    let slowest = timed()
        .filter(|(_, repair)| repair.replayed_bytes > 0)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .or_else(|| timed().min_by(|a, b| a.0.total_cmp(&b.0)));
    match slowest {
        Some((millis, repair)) => result.judged(millis <= most, expected, format!("{millis:.1}")).because(format!(
            "slowest: rank {} towards {} on {}, by {}",
            repair.rank, repair.peer, repair.nic, repair.cause
        )),
        None => result.unknown(expected, "no rank reported a detection after a dropped packet"),
    }
}
