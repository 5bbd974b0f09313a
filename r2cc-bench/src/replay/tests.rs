use super::*;
use crate::report::Transition;

fn line(at_ns: u64, event: Event) -> String {
    serde_json::to_string(&EventLine { version: EVENT_VERSION, at_ns, event }).unwrap() + "\n"
}

#[test]
fn what_is_learnt_late_is_told_when_it_happened() {
    let iteration = IterationRecord { index: 1, start_ns: 10, end_ns: 3_000_000, ..IterationRecord::default() };
    let late = Transition { rank: 2, at_ns: 2_000_000, kind: "suspect".into(), text: "mlx5_2: live -> suspect".into() };
    let text = line(3_000_001, Event::Iteration(iteration)) + &line(9_000_000, Event::Transition(late)) + "{\"versi";
    let told = scenes(&text).unwrap();
    let texts: Vec<&str> = told.iter().map(|scene| scene.text.as_str()).collect();
    assert_eq!(texts, ["iteration 1 of 0 begins", "rank 2: mlx5_2: live -> suspect", "iteration 1: 3.0 ms, 0 wrong"]);
    assert_eq!(told[2].progress, Some((1, 0)));
}

#[test]
fn a_recorded_run_is_told_from_its_start_to_its_verdict() {
    let told = scenes(include_str!("../../../reference-logs/emulated/01/run.jsonl")).unwrap();
    assert!(told.is_sorted_by_key(|scene| scene.at_ns));
    let at = |words: &str| {
        told.iter().position(|scene| scene.text.contains(words)).unwrap_or_else(|| panic!("{words:?} is not told"))
    };
    let order = [
        "run 1 of 01-hot-repair-balance",
        "iteration 3 of 10 begins",
        "FAULT drop@node-1",
        "live -> suspect",
        "iteration 3: 2178.2 ms, 1.384 x",
        "PASS, exit code 0",
    ];
    assert!(order.iter().map(|words| at(words)).is_sorted(), "{told:#?}");
    assert_eq!(told.iter().filter(|scene| scene.progress.is_some()).count(), 10);
}

#[test]
fn a_line_that_is_no_event_is_told_by_its_number() {
    let good = line(1, Event::Note { text: "x".into() });
    assert!(matches!(scenes(&format!("{good}{{}}\n")), Err(RebuildError::Malformed { line: 2, .. })));
    let newer = good.replacen("\"version\":1", "\"version\":7", 1);
    assert!(matches!(scenes(&newer), Err(RebuildError::Version { line: 1, version: 7 })));
    assert!(scenes("").unwrap().is_empty());
}
