//! `r2cc-bench launch` with ordinary programs: faults by time and by call, how ranks end, and that nothing is left.
//! Needs root for namespaces and BPF.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{Ended, GONE, Held, Running, SmallSuite, host, program, run, wait_for};

/// Rank 1 sends 40 MB to rank 0 over the rail of mlx5_2; rank 0 calls getpgid before each read.
const STREAM: &str = r#"
import os, socket, sys, time
rank, to = int(os.environ["RANK"]), ("10.77.2.1", 5000)
assert os.environ["WORLD_SIZE"] == "3" and os.environ["LOCAL_RANK"] == "0"
assert socket.gethostname() == f"node-{rank + 1}" and os.environ["MASTER_ADDR"] == "10.78.0.1"
total = 40_000_000
if rank == 0:
    with socket.create_server(to) as listener:
        peer, _ = listener.accept()
        got = 0
        while got < total:
            os.getpgid(0)
            got += len(peer.recv(65536))
    print("received", got)
elif rank == 1:
    for _ in range(1000):
        try:
            peer = socket.create_connection(to)
            break
        except OSError:
            time.sleep(0.02)
    peer.sendall(bytes(total))
    print("sent", file=sys.stderr)
"#;

/// Launches `argv` on the small suite's cluster.
fn launch(folder: &Path, more: &[&str], argv: &[&str]) -> Ended {
    run(&mut command(folder, more, argv))
}

fn command(folder: &Path, more: &[&str], argv: &[&str]) -> Command {
    let suite = SmallSuite::default().write(folder);
    let mut command = Command::new(program());
    command.arg("launch").arg("--cluster").arg(suite).arg("--out").arg(folder.join("out"));
    command.args(more).arg("--").args(argv);
    command
}

fn summary(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("out/launch.json")).unwrap()).unwrap()
}

/// The C library that every process here has mapped.
fn libc() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("/libc.so.6") && line.contains(" r-xp ")).unwrap();
    line[line.find('/').unwrap()..].to_owned()
}

#[test]
fn a_program_is_cut_off_at_a_call_and_goes_on_when_the_fault_is_over() {
    let place = tempfile::tempdir().unwrap();
    let count = format!("allreduce={}:getpgid", libc());
    let more = ["--count", &count, "--fault", "drop@node-1/mlx5_2 from allreduce#200+1MiB for 600ms"];
    let ended = launch(place.path(), &more, &["python3", "-c", STREAM]).expect_code(0);
    ended.expect_words(&["[0] received 40000000", "rank    0 (node-1): exit 0", "packets stopped, ended at"]);
    let summary = summary(place.path());
    let fault = &summary["faults"][0];
    assert_eq!((&fault["fired"], &fault["healed"]), (&Value::from(true), &Value::from(true)), "{fault}");
    assert!(fault["packets_dropped"].as_u64().unwrap() > 0, "{fault}");
    let span = fault["healed_at_ns"].as_u64().unwrap() - fault["fired_at_ns"].as_u64().unwrap();
    assert!(span >= 600_000_000, "{span} ns");
    let received = summary["nics"]["node-1"]["mlx5_2"]["passed_rx_bytes"].as_u64().unwrap();
    assert!(received > 40_000_000, "{received}");
    assert_eq!(fs::read_to_string(place.path().join("out/rank-0.log")).unwrap(), "received 40000000\n");
    assert_eq!(fs::read_to_string(place.path().join("out/rank-1.log")).unwrap(), "sent\n");
}

#[test]
fn a_fault_that_stopped_nothing_is_inconclusive() {
    let place = tempfile::tempdir().unwrap();
    let never = ["--fault", "drop@node-2/mlx5_0 from allreduce#1 for run"];
    launch(place.path(), &never, &["true"]).expect_code(3).expect_words(&["never fired"]);
    let idle = ["--fault", "drop@node-2/mlx5_0 from now for run"];
    launch(place.path(), &idle, &["sleep", "0.3"]).expect_code(3).expect_words(&[" 0 packets stopped"]);
}

#[test]
fn a_rank_that_fails_ends_the_launch_and_whatever_the_others_have_started() {
    let place = tempfile::tempdir().unwrap();
    let script = "setsid sleep 1000 & [ $RANK = 1 ] && exit 7; sleep 1000";
    let before = host();
    let command = command(place.path(), &["--grace", "2s"], &["sh", "-c", script]);
    let bench = Running::spawn(command, &place.path().join("out"));
    wait_for("the ranks", GONE, || (bench.workers().len() >= 2).then_some(()));
    let held = Held::by(&bench, before);
    let ended = bench.end(GONE).expect_code(1);
    ended.expect_words(&[
        "rank 1 had failed; ranks [0, 2]",
        "rank    1 (node-2): exit 7",
        "rank    2 (node-3): killed",
    ]);
    held.expect_gone(true);
}

#[test]
fn a_launch_that_lasts_too_long_or_is_interrupted_is_cleared_away() {
    let place = tempfile::tempdir().unwrap();
    let ended = launch(place.path(), &["--timeout", "500ms"], &["sleep", "1000"]).expect_code(5);
    ended.expect_words(&["ranks [0, 1, 2] had not ended after 0.5 s"]);

    let before = host();
    let fault = ["--fault", "drop@node-1/mlx5_2 from now for run"];
    let bench = Running::spawn(command(place.path(), &fault, &["sleep", "1000"]), &place.path().join("out"));
    wait_for("the ranks", GONE, || (bench.workers().len() >= 3).then_some(()));
    let held = Held::by(&bench, before);
    bench.ctrl_c();
    bench.end(GONE).expect_code(130);
    held.expect_gone(true);
}

#[test]
fn what_cannot_be_launched_is_refused_with_a_hint_before_anything_runs() {
    let place = tempfile::tempdir().unwrap();
    let refused = |more: &[&str], argv: &[&str], words: &[&str]| {
        launch(place.path(), more, argv).expect_code(64).expect_words(words);
        assert!(!place.path().join("out/launch.json").exists(), "{more:?} {argv:?}");
    };
    refused(&["--fault", "drop@node-4/mlx5_2 from now for run"], &["true"], &["no node `node-4`", "node-1"]);
    refused(&["--fault", "drop@node-1/mlx5_9 from now for run"], &["true"], &["no NIC `mlx5_9`", "mlx5_0"]);
    refused(&["--fault", "drop@node-1/mlx5_2 form now for run"], &["true"], &["column 20", "from"]);
    let percent = "drop@node-1/mlx5_2 from allreduce#3+25% for run";
    refused(&["--fault", percent], &["true"], &["the bytes of one call are not known here", "allreduce#3+4MiB"]);
    refused(&["--count", "allreduce=/nowhere.so:f"], &["true"], &["/nowhere.so"]);
    refused(&["--count", "allredcue=/bin/true:f"], &["true"], &["no operation", "allreduce"]);
    refused(&["--env", "=1"], &["true"], &["NAME=VALUE"]);
    refused(&["--nic-rate", "fast"], &["true"], &["200Mbit", "none"]);
    refused(&[], &["no-such-program"], &["cannot run no-such-program", "hint: "]);
    refused(&[], &[], &["<ARGV>"]);
    let missing = ["launch", "--cluster", "nowhere.yaml", "--", "true"];
    run(Command::new(program()).args(missing)).expect_code(64).expect_words(&["nowhere.yaml"]);
}
