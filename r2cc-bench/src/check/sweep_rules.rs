//! Checks of a sweep: every element of every row, times under the faults over healthy ones by size, and healthy bus
//! bandwidth over plain TCP's goodput.

use super::figures::{self, median};
use super::record::{Phase, RunRecord, SweepRecord};
use super::rules::{self, ROUNDING};
use super::{CheckClass, CheckResult, CheckStatus, fault_rules};
use crate::perf::sweep::{Half, expected_elements, of_suite, points};
use crate::perf::{Collective, Row};
use crate::suite::{ScaleRow, Suite, SweepRatio};

/// Spread of a row's healthy times, in percent of their median, above which its ratio cannot be judged.
const NOISY_ROW_PERCENT: f64 = 3.0;

pub(super) fn all(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let mut results = elements(suite, record);
    results.extend(fault_rules::of_sweep(suite, record));
    results.extend(rules::believed(suite, record));
    results.extend(suite.checks.sweep_goodput.map(|rule| goodput(rule.from.0, rule.at_least, record)));
    results.extend(suite.checks.sweep_ratio.iter().map(|rule| ratio(rule, record)));
    results
}

/// How a row is named to people.
fn named(collective: Collective, row: &Row, in_place: bool) -> String {
    let place = if in_place { "in place" } else { "out of place" };
    format!("{} of {} bytes, {} {}, {place}", collective.name(), row.size, row.dtype, row.op)
}

fn halves(row: &Row) -> impl Iterator<Item = (bool, &Half)> {
    std::iter::once((false, &row.out_of_place)).chain(row.in_place.as_ref().map(|half| (true, half)))
}

fn elements(suite: &Suite, record: &RunRecord) -> Vec<CheckResult> {
    let wrong: u64 = record.sweep.iter().map(|of| of.row.wrong()).sum();
    let mut exact = CheckResult::new("elements", CheckClass::Elements, "wrong elements").judged(wrong == 0, 0, wrong);
    exact.detail = record.sweep.iter().find(|of| of.row.wrong() > 0).map(|of| {
        let (in_place, half) = halves(&of.row)
            .find(|(_, half)| half.wrong.is_some_and(|w| w > 0))
            .unwrap_or((false, &of.row.out_of_place));
        let mut words = named(of.collective, &of.row, in_place);
        if let Some(first) = &half.first_wrong {
            words.push_str(&format!(
                ": first on rank {}, element {}: expected {}, found {}",
                first.rank, first.element, first.expected, first.actual
            ));
        }
        words
    });

    let world = (suite.cluster.nodes * record.ranks_per_node) as usize;
    let asked: usize = of_suite(suite, ScaleRow::Host).iter().map(|options| points(options, world).len()).sum();
    let under = usize::from(!suite.faults.is_empty());
    let of_phase = |phase| record.sweep.iter().filter(|of| of.phase == phase).count();
    let measured = (of_phase(Phase::Healthy), of_phase(Phase::Hit), of_phase(Phase::Degraded));
    let short = record.sweep.iter().find_map(|of| {
        let (in_place, half) = halves(&of.row).find(|(in_place, half)| {
            let each = expected_elements(of.collective, of.row.count as usize, of.row.root, world, *in_place);
            half.checked != Some(each * half.times_us.len() as u64) || half.times_us.is_empty()
        })?;
        Some((named(of.collective, &of.row, in_place), half.checked.unwrap_or(0)))
    });
    let whole = (asked, under, under * asked);
    let rows = |(healthy, hit, degraded): (usize, usize, usize)| format!("{healthy} + {hit} + {degraded}");
    let counted = CheckResult::new("elements_checked", CheckClass::Counters, "rows healthy, hit, degraded").judged(
        measured == whole && short.is_none() && asked > 0,
        rows(whole),
        rows(measured),
    );
    let counted = match short {
        Some((row, checked)) => counted.because(format!("only {checked} elements compared in {row}")),
        None => counted,
    };
    vec![exact, counted]
}

/// Median time and spread in percent of it.
fn middle(half: &Half) -> Option<(f64, f64)> {
    let middle = median(&half.times_us).filter(|time| *time > 0.0)?;
    let off: Vec<f64> = half.times_us.iter().map(|time| (time - middle).abs()).collect();
    Some((middle, median(&off)? / middle * 100.0))
}

fn ratio(rule: &SweepRatio, record: &RunRecord) -> CheckResult {
    let name = format!("sweep_ratio {}", rule.sizes());
    let result = CheckResult::new(name, CheckClass::Timing, "x the healthy time");
    let expected = match (rule.value, rule.within, rule.at_most) {
        (Some(value), Some(within), _) => format!("{value} within {within}"),
        (_, _, most) => format!("at most {}", most.unwrap_or(f64::NAN)),
    };
    let applies = |row: &Row| row.size >= rule.from.0 && rule.to.is_none_or(|to| row.size <= to.0);
    let of_phase = |phase| record.sweep.iter().filter(move |of| of.phase == phase && applies(&of.row));
    // How far a ratio is from what is asked, least first.
    let off = |ratio: f64| match (rule.value, rule.at_most) {
        (Some(value), _) => (ratio / value - 1.0).abs(),
        (None, most) => ratio - most.unwrap_or(f64::NAN),
    };
    let limit = rule.within.map_or(0.0, |within| within.0) + ROUNDING;
    let mut worst: Option<(f64, String, f64)> = None;
    for degraded in of_phase(Phase::Degraded) {
        let same = |of: &&SweepRecord| {
            let (a, b) = (&of.row, &degraded.row);
            of.collective == degraded.collective
                && (a.size, &a.dtype, &a.op, a.root) == (b.size, &b.dtype, &b.op, b.root)
        };
        let Some(healthy) = of_phase(Phase::Healthy).find(same) else { continue };
        for ((in_place, before), (_, after)) in halves(&healthy.row).zip(halves(&degraded.row)) {
            let (Some((before, spread)), Some((after, _))) = (middle(before), middle(after)) else { continue };
            let ratio = after / before;
            if worst.as_ref().is_none_or(|(worst, ..)| off(ratio) > off(*worst)) {
                worst = Some((ratio, named(degraded.collective, &degraded.row, in_place), spread));
            }
        }
    }
    let Some((ratio, place, spread)) = worst else {
        return result.unknown(expected, "no row of these sizes was measured both healthy and under the faults");
    };
    let mut result = result
        .judged(off(ratio) <= limit, expected, format!("{ratio:.3}"))
        .because(format!("furthest off: {place} (spread {spread:.1} %)"));
    if spread > NOISY_ROW_PERCENT {
        result.status = CheckStatus::Inconclusive;
    }
    result
}

/// Bus bandwidth of collectives that pass every node once, over what plain TCP moves through a node's NICs.
fn goodput(from: u64, at_least: f64, record: &RunRecord) -> CheckResult {
    let result = CheckResult::new("sweep_goodput", CheckClass::Timing, "of plain TCP's goodput");
    let expected = format!("at least {at_least}");
    let Some(goodput) = figures::goodput_bits_s(record) else {
        return result.unknown(expected, "plain TCP was not measured");
    };
    let passes_once = |collective| {
        use Collective::{AllGather, AllReduce, ReduceScatter, SendRecv};
        matches!(collective, AllReduce | AllGather | ReduceScatter | SendRecv)
    };
    let rows = record
        .sweep
        .iter()
        .filter(|of| of.phase == Phase::Healthy && of.row.size >= from && passes_once(of.collective));
    let worst = rows
        .flat_map(|of| halves(&of.row).map(move |(in_place, half)| (of, in_place, half)))
        .filter_map(|(of, in_place, half)| {
            // The mean's bandwidth, at the median's time.
            let bus_bw = half.bus_bw * half.time_us / middle(half)?.0;
            Some((bus_bw * 8e9 / goodput, named(of.collective, &of.row, in_place)))
        })
        .min_by(|a, b| a.0.total_cmp(&b.0));
    match worst {
        Some((ratio, place)) => {
            let result = result.judged(ratio + ROUNDING >= at_least, expected, format!("{ratio:.3}"));
            result.because(format!("least: {place}"))
        }
        None => result.unknown(expected, "no row of these sizes was measured"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::evaluate;
    use crate::check::record::{FaultRecord, FaultViewEntry, WrongElement};
    use crate::perf::options::nccl_name;
    use crate::suite::Timing;

    fn suite() -> Suite {
        Suite::parse(include_str!("../../../suites/05.yaml"), "suites/05.yaml").unwrap()
    }

    fn half(collective: Collective, count: usize, time_us: f64, in_place: bool) -> Half {
        let times_us = vec![time_us, time_us * 1.01, time_us * 0.99, time_us, time_us];
        let checked = expected_elements(collective, count, -1, 6, in_place) * times_us.len() as u64;
        Half { time_us, alg_bw: 1.0, bus_bw: 0.06, checked: Some(checked), wrong: Some(0), first_wrong: None, times_us }
    }

    /// A run of suite 05 in which everything holds.
    fn record() -> RunRecord {
        let mut record = RunRecord { bytes: 32 << 20, ranks_per_node: 2, ..RunRecord::default() };
        for phase in [Phase::Healthy, Phase::Hit, Phase::Degraded] {
            for options in of_suite(&suite(), ScaleRow::Host) {
                for point in points(&options, 6) {
                    let collective = options.collective;
                    let count = collective.count(point.bytes, point.dtype.size_bytes(), 6);
                    let size = collective.size(count, point.dtype.size_bytes(), 6);
                    let slower = if phase == Phase::Degraded { 1.49 } else { 1.0 };
                    let time = |in_place| half(collective, count, size as f64 * slower, in_place);
                    let row = Row {
                        size,
                        count: count as u64,
                        dtype: nccl_name(point.dtype).into(),
                        op: point.op.to_string(),
                        root: -1,
                        out_of_place: time(false),
                        in_place: Some(time(true)),
                    };
                    record.sweep.push(SweepRecord { collective, phase, row });
                }
            }
        }
        // One row is hit, not a whole sweep.
        let mut hits = 0;
        record.sweep.retain(|of| {
            hits += usize::from(of.phase == Phase::Hit);
            of.phase != Phase::Hit || hits == 1
        });
        record.faults = vec![FaultRecord { fired: true, packets_dropped: 9, healed: true, ..FaultRecord::default() }];
        let entry = FaultViewEntry {
            node: Some("node-1".into()),
            nic: Some("mlx5_2".into()),
            state: "down".into(),
            ..FaultViewEntry::default()
        };
        record.fault_view = (0..6).map(|rank| (rank, vec![entry.clone()])).collect();
        record
    }

    fn failing(bend: impl FnOnce(&mut RunRecord)) -> Vec<(String, CheckStatus)> {
        let mut record = record();
        bend(&mut record);
        let results = evaluate(&suite(), &record, Timing::Enforced);
        results.into_iter().filter(|r| r.status != CheckStatus::Pass).map(|r| (r.name, r.status)).collect()
    }

    fn one(name: &str, status: CheckStatus) -> Vec<(String, CheckStatus)> {
        vec![(name.to_owned(), status)]
    }

    #[test]
    fn a_sweep_in_which_everything_holds_passes() {
        assert_eq!(failing(|_| {}), []);
    }

    #[test]
    fn a_wrong_element_in_any_row_shows_with_its_place() {
        let mut record = record();
        let row = &mut record.sweep[7].row;
        let half = row.in_place.as_mut().unwrap();
        half.wrong = Some(2);
        half.first_wrong = Some(WrongElement { rank: 4, element: 17, expected: "1".into(), actual: "2".into() });
        let check = evaluate(&suite(), &record, Timing::Enforced).remove(0);
        assert_eq!((check.status, check.actual.as_str()), (CheckStatus::Fail, "2"));
        let detail = check.detail.unwrap();
        assert!(detail.contains("in place") && detail.contains("rank 4, element 17"), "{detail}");
    }

    #[test]
    fn a_row_or_elements_that_are_missing_show() {
        let missing = one("elements_checked", CheckStatus::Fail);
        assert_eq!(failing(|record| drop(record.sweep.remove(3))), missing);
        assert_eq!(failing(|record| drop(record.sweep.pop())), missing);
        assert_eq!(failing(|record| *record.sweep[3].row.out_of_place.checked.as_mut().unwrap() -= 1), missing);
    }

    #[test]
    fn a_size_that_is_too_slow_or_too_fast_fails_and_one_whose_healthy_times_spread_cannot_tell() {
        let slow = |record: &mut RunRecord, factor: f64| {
            let half = &mut record.sweep.last_mut().unwrap().row.out_of_place;
            half.times_us.iter_mut().for_each(|time| *time *= factor);
        };
        assert_eq!(failing(|record| slow(record, 1.05)), one("sweep_ratio 8MiB-", CheckStatus::Fail));
        assert_eq!(failing(|record| slow(record, 0.95)), one("sweep_ratio 8MiB-", CheckStatus::Fail));
        let noisy = failing(|record| {
            slow(record, 1.05);
            let healthy = record.sweep.iter_mut().rfind(|of| of.phase == Phase::Healthy).unwrap();
            let times = &mut healthy.row.out_of_place.times_us;
            let time = times[0];
            *times = vec![time * 0.9, time * 0.95, time, time * 1.05, time * 1.1];
        });
        assert_eq!(noisy, one("sweep_ratio 8MiB-", CheckStatus::Inconclusive));
        // Small sizes have no rule.
        assert_eq!(failing(|record| record.sweep[0].row.out_of_place.times_us = vec![1.0; 5]), []);
    }

    #[test]
    fn a_fault_that_stopped_nothing_or_stays_shows() {
        assert_eq!(
            failing(|record| record.faults[0].packets_dropped = 0),
            one("fault_stopped", CheckStatus::Inconclusive)
        );
        assert_eq!(failing(|record| record.faults[0].healed = false), one("fault_healed", CheckStatus::Fail));
        assert_eq!(failing(|record| record.faults.clear()), one("fault_stopped", CheckStatus::Inconclusive));
    }
}
