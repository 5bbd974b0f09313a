//! What a running bench and its ranks say when they are asked, and how little is left afterwards. Needs root.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use r2cc::status::ProcessStatus;
use r2cc_bench::live::{self, BenchStatus, Told};
use support::{GONE, Running, SOON, SmallSuite, bench, program, run, wait_for};

fn endless() -> SmallSuite {
    SmallSuite { name: "endless", iterations: 2000, ..SmallSuite::default() }
}

/// What the bench of this process number and its ranks say.
fn asked(pid: i32) -> (Option<BenchStatus>, Vec<ProcessStatus>) {
    let folder = format!("/run/r2cc/live-{pid}");
    let sockets = live::sockets().unwrap().into_iter().filter(|socket| socket.starts_with(&folder));
    let (mut bench, mut ranks) = (None, Vec::new());
    for told in sockets.filter_map(|socket| live::ask(&socket).ok()) {
        match told {
            Told::Bench(status) => bench = Some(status),
            Told::Process(status) => ranks.push(status),
        }
    }
    (bench, ranks)
}

#[test]
fn a_running_bench_tells_where_it_stands_and_its_ranks_which_paths_are_left() {
    let place = tempfile::tempdir().unwrap();
    let (suite, out) = (endless().write(place.path()), place.path().join("out"));
    let mut bench = Running::start(&suite, &out, &[]);
    bench.wait_for_cut();
    let pid = bench.pid();
    let (status, ranks) = wait_for("the cut to show in the status", SOON, || {
        let (status, ranks) = asked(pid);
        // Rank 0 is on the node that lost a NIC.
        let links = ranks.first().into_iter().flat_map(|rank| &rank.comms).flat_map(|comm| &comm.links);
        let failed = links.flat_map(|link| &link.paths).any(|path| path.state == "failed");
        (failed && ranks.len() == 3).then_some((status, ranks))
    });
    let status = status.expect("the bench answers");
    assert_eq!((status.suite.as_str(), status.suites, status.repetition), ("endless", (1, 1), (1, 1)));
    assert!(status.iteration.is_some_and(|(phase, index, count)| phase == "iteration" && index >= 2 && count == 2000));
    let comms: Vec<_> = ranks.iter().flat_map(|rank| &rank.comms).collect();
    assert_eq!(
        comms.iter().map(|comm| (comm.rank, comm.world)).collect::<Vec<_>>(),
        [0, 1, 2].map(|n| (Some(n), Some(3)))
    );
    // Two NICs a node, one lost on node-1: whatever leads there hangs on one path.
    assert!(comms[0].unprotected().count() > 0, "{comms:#?}");
    assert!(comms.iter().all(|comm| comm.payload_bytes > 0 && comm.begun > 0), "{comms:#?}");
    let last = comms[0].last_transition.as_ref().expect("a path has failed");
    assert!(last.text.contains("mlx5_2 to rank"), "{last:?}");

    let said = support::bench(&["status"]).expect_code(0);
    let said =
        said.expect_words(&[&format!("bench {pid}: endless: iteration"), "rank 0 of 3 on node-1", "UNPROTECTED"]);
    assert!(said.stdout.contains("fault drop@node-1/mlx5_2"), "{said:#?}");
    let json = support::bench(&["status", "--format", "json"]).expect_code(0).stdout;
    assert!(json.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{json}");

    // The same without a socket: a signal, to the bench and to a rank, whose standard error is its log.
    bench.signal(Signal::SIGUSR1);
    bench.wait_for_line(&format!("bench {pid}: endless: iteration"));
    kill(Pid::from_raw(bench.worker_in("node-1").pid), Signal::SIGUSR1).unwrap();
    wait_for("the rank's words", SOON, || {
        fs::read_to_string(out.join("rank-0.log")).unwrap().contains("rank 0 of 3 on node-1").then_some(())
    });
    bench.signal(Signal::SIGTERM);
    bench.end(GONE).expect_code(130);
    assert!(!Path::new(&format!("/run/r2cc/live-{pid}")).exists());
}

#[test]
fn what_a_killed_bench_left_is_not_asked_and_goes_with_the_next_start() {
    let place = tempfile::tempdir().unwrap();
    let (suite, out) = (endless().write(place.path()), place.path().join("out"));
    let mut killed = Running::start(&suite, &out, &[]);
    killed.wait_for_line("baseline 1/");
    let folder = format!("/run/r2cc/live-{}", killed.pid());
    assert!(Path::new(&folder).exists());
    killed.signal(Signal::SIGKILL);
    wait_for("the bench to be gone", GONE, || {
        live::sockets().unwrap().iter().all(|s| !s.starts_with(&folder)).then_some(())
    });
    let quick = SmallSuite { iterations: 2, ..SmallSuite::default() };
    fs::create_dir(place.path().join("next")).unwrap();
    let (suite, out) = (quick.write(&place.path().join("next")), place.path().join("next/out"));
    bench(&["run", suite.to_str().unwrap(), "--out", out.to_str().unwrap(), "--quiet"]);
    assert!(!Path::new(&folder).exists(), "{folder} is left");
}

#[test]
fn a_socket_that_nobody_answers_is_exit_4_with_a_hint() {
    let place = tempfile::tempdir().unwrap();
    let nobody = place.path().join("nobody").display().to_string();
    bench(&["status", &nobody]).expect_code(4).expect_words(&["nobody: ", "hint:", "R2CC_STATUS"]);
    fs::write(&nobody, "").unwrap();
    bench(&["status", &nobody]).expect_code(4).expect_words(&["hint:"]);
    let nothing = run(Command::new(program()).args(["status", "--watch", &nobody]));
    nothing.expect_code(4);
}

#[test]
fn an_archive_holds_the_results_and_one_that_cannot_be_written_stops_the_run_before_it_starts() {
    let place = tempfile::tempdir().unwrap();
    let quick = SmallSuite { iterations: 3, ..SmallSuite::default() };
    let (suite, out) = (quick.write(place.path()), place.path().join("out"));
    let archive = place.path().join("out.tar.zst");
    let args = |archive: &Path| {
        let paths = [&suite, &out, &archive.to_path_buf()].map(|path| path.display().to_string());
        let [suite, out, archive] = paths;
        ["run".to_owned(), suite, "--out".to_owned(), out, "--archive".to_owned(), archive, "--quiet".to_owned()]
    };
    let ended = run(Command::new(program()).args(args(&place.path().join("no/where.tar.zst"))));
    ended.expect_code(4).expect_words(&["where.tar.zst: cannot be written", "hint:"]);
    assert!(!out.exists(), "nothing has run");

    // Whatever the verdict is on a busy machine.
    drop(run(Command::new(program()).args(args(&archive))));
    let held = tar::Archive::new(zstd::Decoder::new(fs::File::open(&archive).unwrap()).unwrap())
        .entries()
        .map(|entries| entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect::<Vec<_>>());
    let held = held.unwrap();
    for name in ["out/summary.json", "out/run.jsonl", "out/junit.xml", "out/report.html", "out/events-rank-0.jsonl"] {
        assert!(held.iter().any(|file| file == name), "{name} is not in {held:?}");
    }
}
