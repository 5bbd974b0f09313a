//! The bench's own alarms: damage is found and named, and a fault that never came is no pass.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use r2cc_bench::report::{Summary, Verdict};
use support::{Ended, SmallSuite, bench};

fn judged(suite: &SmallSuite, more: &[&str]) -> (Ended, Summary) {
    let place = tempfile::tempdir().unwrap();
    let (file, out) = (suite.write(place.path()), place.path().join("out"));
    let mut args = vec!["run", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
    args.extend(more);
    let ended = bench(&args);
    let text = std::fs::read_to_string(out.join("summary.json"));
    let text = text.unwrap_or_else(|error| panic!("{error}: {ended:#?}"));
    (ended, serde_json::from_str(&text).unwrap())
}

/// Damage to iteration 3 is found there and nowhere else, on a rank and an element.
fn expect_damage(ended: Ended, summary: &Summary, found: &str) {
    let ended = ended.expect_code(2).expect_words(&["FAIL", "iteration 3", "first on rank", "element"]);
    assert!(ended.stdout.contains(found), "{found:?} is not in {ended:#?}");
    assert_eq!((summary.exit_code, summary.verdict), (2, Verdict::WrongElements));
    let wrong: Vec<u32> = summary.iterations.iter().filter(|it| it.wrong_elements > 0).map(|it| it.index).collect();
    assert_eq!(wrong, [3]);
    let first = summary.iterations[2].first_wrong.as_ref().unwrap();
    assert!(first.rank < 3 && first.element < (4 << 20) / 4, "{first:?}");
    assert_ne!(first.expected, first.actual);
}

#[test]
fn a_flipped_bit_is_exit_2_and_names_rank_and_element() {
    for seed in ["1", "17"] {
        let (ended, summary) = judged(&SmallSuite::default(), &["--corrupt", "3", "--seed", seed]);
        expect_damage(ended, &summary, "expected");
    }
}

#[test]
fn a_nan_is_exit_2_and_names_rank_and_element() {
    let (ended, summary) = judged(&SmallSuite::default(), &["--corrupt", "3,nan", "--seed", "5"]);
    expect_damage(ended, &summary, "NaN");
}

#[test]
fn a_trigger_that_never_comes_is_exit_3() {
    let faults = "drop@node-1/mlx5_2 from after 1h for run";
    let (ended, summary) = judged(&SmallSuite { faults, ..SmallSuite::default() }, &[]);
    ended.expect_code(3).expect_words(&["INCONCLUSIVE cut_iteration", "its trigger never came"]);
    assert_eq!(summary.verdict, Verdict::Inconclusive);
    assert!(!summary.faults[0].fired && summary.faults[0].healed, "{:?}", summary.faults);
    assert_eq!(summary.wrong_elements(), 0);
}

#[test]
fn a_wire_position_that_is_never_reached_is_exit_3() {
    // The first fault silences the port, so that the second waits for bytes that never come.
    let faults =
        "drop@node-1/mlx5_2 from allreduce#2+25% for run\", \"drop@node-1/mlx5_2 from allreduce#4+50% at wire for run";
    let (ended, summary) = judged(&SmallSuite { faults, ..SmallSuite::default() }, &[]);
    ended.expect_code(3).expect_words(&["INCONCLUSIVE cut_iteration 2", "its trigger never came"]);
    assert_eq!(summary.faults.iter().map(|fault| fault.fired).collect::<Vec<_>>(), [true, false]);
    assert_eq!(summary.wrong_elements(), 0);
}

#[test]
fn a_cut_between_collectives_is_exit_3() {
    // It comes at once when it is armed, before the first measured iteration is called.
    let faults = "drop@node-1/mlx5_2 from now for run";
    let (ended, summary) = judged(&SmallSuite { faults, ..SmallSuite::default() }, &[]);
    ended.expect_code(3).expect_words(&["INCONCLUSIVE cut_iteration"]);
    assert!(summary.faults[0].fired && summary.faults[0].iteration.is_none(), "{:?}", summary.faults);
}
