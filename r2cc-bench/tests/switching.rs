//! Ranks that are stopped or killed while the schedule changes, and while Weighted runs: one error on all others,
//! naming who is lost. A freeze is held open by stopping a rank that has said it is ready: it cannot answer.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::path::Path;

use nix::sys::signal::Signal;
use support::{GONE, Held, Running, SOON, SmallSuite, host, wait_for, write_suite};

/// Three ranks on three nodes; an iteration takes most of a second. Large enough for a schedule of its own.
fn suite(mode: &str, place: &Path) -> std::path::PathBuf {
    let small = SmallSuite {
        name: "switching",
        bytes: "24MiB",
        iterations: 2000,
        faults: "drop@node-1/mlx5_2 from allreduce#1+25% for run",
    };
    write_suite(place, &small.text().replace("mode: balance", &format!("mode: {mode}")))
}

/// Waits until a rank's event file tells of `event`; returns when that was, CLOCK_MONOTONIC.
#[track_caller]
fn wait_for_event(out: &Path, rank: usize, event: &str) -> u64 {
    wait_for(&format!("rank {rank} to tell of {event}"), SOON, || {
        let text = std::fs::read_to_string(out.join(format!("events-rank-{rank}.jsonl"))).ok()?;
        // The last line may be half written.
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.find(|line| line["event"] == event)?["at_ns"].as_u64()
    })
}

#[test]
fn a_rank_that_is_killed_during_a_freeze_is_named_by_every_other_rank() {
    let place = tempfile::tempdir().unwrap();
    let (out, before) = (place.path().join("out"), host());
    let bench = Running::start(&suite("r2cc-allreduce", place.path()), &out, &[]);
    bench.wait_for_cut();
    let held = Held::by(&bench, before);
    let (second, third) = (bench.worker_in("node-2"), bench.worker_in("node-3"));
    // Not ready, so nobody is asked to freeze until the third rank is stopped.
    second.signal(Signal::SIGSTOP);
    wait_for_event(&out, 2, "switch-ready");
    third.signal(Signal::SIGSTOP);
    second.signal(Signal::SIGCONT);
    wait_for_event(&out, 0, "switch-freeze");
    wait_for_event(&out, 1, "switch-freeze");
    third.signal(Signal::SIGKILL);
    bench.end(GONE).expect_rank_lost(2, "node-3", [0, 1]);
    held.expect_gone(true);
    let told = std::fs::read_to_string(out.join("events-rank-0.jsonl")).unwrap();
    assert!(!told.contains("\"event\":\"switch\""), "the freeze was over before the kill: {told}");
}

#[test]
fn a_rank_that_is_killed_in_a_weighted_section_is_named_by_every_other_rank() {
    let place = tempfile::tempdir().unwrap();
    let (out, before) = (place.path().join("out"), host());
    let mut bench = Running::start(&suite("weighted", place.path()), &out, &[]);
    bench.wait_for_line("iteration 3/");
    let held = Held::by(&bench, before);
    bench.worker_in("node-2").signal(Signal::SIGKILL);
    bench.end(GONE).expect_rank_lost(1, "node-2", [0, 2]);
    held.expect_gone(true);
}
