//! Confidence intervals by bootstrap (Efron, 1979): runs are drawn with replacement, and within each drawn run its
//! samples, so that what varies from run to run counts where there are several; percentiles of the statistic.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::check::figures::median;

/// Confidence of every interval.
pub const CONFIDENCE: f64 = 0.99;
/// Resamples that an interval comes from.
pub const RESAMPLES: usize = 5_000;
/// Fewest samples of a side: of fewer, a percentile at the confidence is no bound.
const SAMPLES_MIN: usize = 5;
const SEED: u64 = 1;

/// A change and its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Interval {
    /// The change of the medians.
    pub value: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// Median of the medians of runs; none of nothing.
pub(super) fn centre(runs: &[Vec<f64>]) -> Option<f64> {
    median(&runs.iter().filter_map(|samples| median(samples)).collect::<Vec<_>>())
}

/// How `after` differs from `before`, as a ratio or a difference; none of too few samples.
pub(super) fn change(before: &[Vec<f64>], after: &[Vec<f64>], relative: bool) -> Option<Interval> {
    let count = |runs: &[Vec<f64>]| runs.iter().map(Vec::len).sum::<usize>();
    if count(before) < SAMPLES_MIN || count(after) < SAMPLES_MIN {
        return None;
    }
    let between = |first: f64, second: f64| if relative { second / first } else { second - first };
    let value = between(centre(before)?, centre(after)?);
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut values: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| Some(between(centre(&drawn(before, &mut random))?, centre(&drawn(after, &mut random))?)))
        .filter(|value| value.is_finite())
        .collect();
    values.sort_by(f64::total_cmp);
    let tail = ((1.0 - CONFIDENCE) / 2.0 * values.len() as f64) as usize;
    let (low, high) = (*values.get(tail)?, *values.get(values.len().checked_sub(tail + 1)?)?);
    Some(Interval { value, low, high })
}

fn drawn(runs: &[Vec<f64>], random: &mut fastrand::Rng) -> Vec<Vec<f64>> {
    let pick = |random: &mut fastrand::Rng, samples: &[f64]| -> Vec<f64> {
        (0..samples.len()).map(|_| samples[random.usize(..samples.len())]).collect()
    };
    (0..runs.len())
        .map(|_| {
            let run = &runs[random.usize(..runs.len())];
            pick(random, run)
        })
        .collect()
}
