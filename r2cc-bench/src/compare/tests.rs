//! Verdicts on recorded runs of the bench: noise is none, a slowdown is one, and checks have fates.

use super::*;
use crate::check::{CheckClass, CheckResult};

const THRESHOLD: f64 = 0.01;

/// Ten runs of suite 01 on a quiet machine.
fn ten_runs() -> Vec<Summary> {
    let text = include_str!("../../../reference-logs/emulated/01-ten-runs/summary.json");
    serde_json::from_str::<Summary>(text).unwrap().runs
}

fn side(runs: &[Summary]) -> Side {
    [(runs[0].suite.clone(), runs.to_vec())].into()
}

fn compared(before: &[Summary], after: &[Summary]) -> Comparison {
    compare(&side(before), &side(after), THRESHOLD)
}

fn slowed(runs: &[Summary], factor: f64) -> Vec<Summary> {
    let mut runs = runs.to_vec();
    for run in &mut runs {
        run.baseline.millis.iter_mut().for_each(|millis| *millis *= factor);
        run.iterations.iter_mut().for_each(|it| it.millis *= factor);
    }
    runs
}

fn verdict(comparison: &Comparison, measure: &str) -> Change {
    comparison.suites[0].measures.iter().find(|measured| measured.name == measure).unwrap().verdict
}

#[test]
fn runs_of_one_build_do_not_differ_one_by_one_or_as_sets() {
    let runs = ten_runs();
    for (i, before) in runs.iter().enumerate() {
        for after in &runs[i + 1..] {
            let found = compared(std::slice::from_ref(before), std::slice::from_ref(after));
            assert_eq!(verdict(&found, "iteration under the faults"), Change::Same);
            assert_ne!(verdict(&found, "healthy iteration"), Change::Worse);
            assert_ne!(verdict(&found, "healthy iteration"), Change::Better);
            assert_eq!(verdict(&found, "cost of the hit iteration"), Change::TooFew);
        }
    }
    let found = compared(&runs[..5], &runs[5..]);
    assert_eq!((verdict(&found, "healthy iteration"), found.exit_code), (Change::Same, 0), "{found:#?}");
}

#[test]
fn a_slowdown_of_3_percent_is_found_in_single_runs_and_in_sets_and_its_reverse_is_better() {
    let runs = ten_runs();
    for run in &runs {
        let slow = slowed(std::slice::from_ref(run), 1.03);
        for before in &runs {
            let found = compared(std::slice::from_ref(before), &slow);
            assert_eq!((found.verdict, found.exit_code), (Change::Worse, 1), "{found:#?}");
        }
    }
    let (before, after) = (&runs[..5], slowed(&runs[5..], 1.03));
    let found = compared(before, &after);
    assert_eq!(verdict(&found, "healthy iteration"), Change::Worse);
    let by = found.suites[0].measures[0].change.unwrap();
    assert!(by.low < 1.03 && 1.03 < by.high && by.low > 1.02, "{by:?}");
    let back = compared(&after, before);
    assert_eq!((verdict(&back, "healthy iteration"), back.exit_code), (Change::Better, 0));
}

#[test]
fn a_change_about_as_large_as_the_threshold_cannot_be_told() {
    let runs = ten_runs();
    let found = compared(&runs[..1], &slowed(&runs[1..2], 1.012));
    assert_eq!((found.verdict, found.exit_code), (Change::CannotTell, 3), "{found:#?}");
}

#[test]
fn the_same_runs_give_the_same_answer() {
    let runs = ten_runs();
    assert_eq!(compared(&runs[..3], &runs[3..6]), compared(&runs[..3], &runs[3..6]));
}

#[test]
fn a_healthy_suite_and_a_degraded_one_are_compared_whatever_they_are_called() {
    let degraded = ten_runs()[..1].to_vec();
    let mut healthy = degraded.clone();
    healthy[0].suite = "quiet".into();
    healthy[0].faults.clear();
    healthy[0].iterations.truncate(2);
    let of_baseline = healthy[0].baseline.millis.clone();
    healthy[0].iterations = of_baseline
        .iter()
        .map(|millis| crate::report::IterationSummary { millis: *millis, ..Default::default() })
        .collect();
    let found = compare(&side(&healthy), &side(&degraded), THRESHOLD);
    assert_eq!(found.suites[0].suite, "quiet -> 01-hot-repair-balance");
    assert_eq!(verdict(&found, "healthy iteration"), Change::Same);
    assert_eq!((verdict(&found, "iteration under the faults"), found.exit_code), (Change::Worse, 1));
    assert!(found.suites[0].environment.iter().any(|fact| fact.name == "faults"));
}

#[test]
fn each_check_has_a_fate() {
    use CheckStatus::{Fail, Inconclusive, Pass};
    let with = |status: CheckStatus| {
        let mut run = ten_runs().remove(0);
        run.checks = vec![CheckResult {
            name: "x".into(),
            class: CheckClass::Counters,
            status,
            expected: "1".into(),
            actual: "2".into(),
            unit: "bytes".into(),
            detail: None,
        }];
        run
    };
    let cases = [
        (vec![Pass], vec![Pass], None, Change::Same),
        (vec![Pass, Pass], vec![Pass, Fail], Some(Fate::New), Change::Worse),
        (vec![Fail], vec![Fail], Some(Fate::StillFailing), Change::Same),
        (vec![Fail], vec![Pass], Some(Fate::Fixed), Change::Better),
        (vec![Fail], vec![Inconclusive], Some(Fate::NoLongerKnown), Change::CannotTell),
        (vec![Pass], vec![Inconclusive], Some(Fate::NoLongerKnown), Change::CannotTell),
        (vec![Inconclusive], vec![Inconclusive], None, Change::Same),
    ];
    for (before, after, fate, verdict) in cases {
        let runs = |statuses: &[CheckStatus]| statuses.iter().map(|status| with(*status)).collect::<Vec<_>>();
        let found = compared(&runs(&before), &runs(&after));
        let check = found.suites[0].checks.first();
        assert_eq!((check.map(|check| check.fate), found.verdict), (fate, verdict), "{before:?} {after:?}");
        if let Some(check) = check.filter(|check| check.fate == Fate::New) {
            assert_eq!((check.before, check.after, check.actual.as_str()), ((0, 2), (1, 2), "2 bytes"));
        }
    }
}

#[test]
fn suites_of_one_side_alone_are_named_and_nothing_in_common_is_no_pass() {
    let runs = ten_runs();
    let mut two = side(&runs[..1]);
    two.insert("other".into(), runs[..1].to_vec());
    let found = compare(&two, &side(&runs[..1]), THRESHOLD);
    assert_eq!((found.only_before.as_slice(), found.exit_code), (["other".to_owned()].as_slice(), 0));
    let mut foreign = two.clone();
    foreign.remove("01-hot-repair-balance");
    foreign.insert("third".into(), runs[..1].to_vec());
    let named: Side = [("a".to_owned(), runs[..1].to_vec()), ("b".to_owned(), runs[..1].to_vec())].into();
    assert_eq!(compare(&foreign, &named, THRESHOLD).verdict, Change::CannotTell);
}

#[test]
fn a_comparison_in_words() {
    let runs = ten_runs();
    let mut after = slowed(&runs[5..], 1.03);
    after[0].checks[0].status = CheckStatus::Fail;
    for run in &mut after {
        run.environment.insert("kernel".into(), "6.99".into());
        run.environment.insert("load_average".into(), "3.10 1.00 1.00 1/1 1".into());
    }
    let mut before = runs[..5].to_vec();
    for run in &mut before {
        run.environment.insert("kernel".into(), "6.18".into());
        run.environment.insert("load_average".into(), "0.50 1.00 1.00 1/1 1".into());
    }
    insta::assert_snapshot!(words(&compared(&before, &after), crate::report::Paint::Plain));
}
