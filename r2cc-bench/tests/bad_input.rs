//! Input and machines that are not as they should be: each ends with the documented exit code and an error that
//! says what, where, and what to do; nothing half written, nothing left.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::fs;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::MsFlags;
use support::{Held, Running, SOON, SmallSuite, bench, host, inside, program, run, wait_for, with_disk, write_suite};

fn run_in(place: &Path, text: &str, more: &[&str]) -> support::Ended {
    let suite = write_suite(place, text);
    let out = place.join("out");
    let mut args = vec!["run", suite.to_str().unwrap(), "--out", out.to_str().unwrap()];
    args.extend(more);
    bench(&args)
}

#[test]
fn an_invalid_suite_is_refused_with_its_place_and_a_suggestion_before_anything_is_made() {
    let good = SmallSuite::default().text();
    let cases: [(&str, &str, &[&str]); 8] = [
        ("iterations:", "iteratons:", &["suite.yaml:7:34: ", "unknown key `iteratons`", "did you mean `iterations`?"]),
        ("node-1/mlx5_2", "node-1/mlx5_3", &["suite.yaml:9:10: ", "no NIC `mlx5_3`", "known: mlx5_0, mlx5_2, mgmt0"]),
        ("node-1/mlx5_2", "node-7/mlx5_2", &["suite.yaml:9:10: ", "no node `node-7`", "known: node-1, node-2, node-3"]),
        ("4MiB", "4194303B", &["suite.yaml:6:17: ", "not a whole number of f32", "use 4194300 or 4194304"]),
        ("4MiB", "8B", &["suite.yaml:6:17: ", "2 elements are fewer than 3 ranks"]),
        ("allreduce#2", "allreduce#99", &["suite.yaml:9:10: ", "begins at call 99", "iterations 1 to 4"]),
        ("drop@", "dorp@", &["suite.yaml:9:11: ", "drop"]),
        ("version: 1", "version: [", &["suite.yaml:", "hint: a suite is one YAML document"]),
    ];
    for (from, to, words) in cases {
        let place = tempfile::tempdir().unwrap();
        assert!(good.contains(from), "{from}");
        run_in(place.path(), &good.replace(from, to), &[]).expect_code(64).expect_words(words);
        assert!(!place.path().join("out").exists(), "{to}: a results folder was made");
    }
}

#[test]
fn a_suite_that_needs_more_than_this_build_is_refused_by_key() {
    let good = SmallSuite::default().text();
    let cases = [
        ("kind: emulated", "kind: ssh", "`cluster.kind: ssh`"),
        ("kind: emulated", "kind: soft-roce", "`cluster.kind: soft-roce`"),
        ("kind: allreduce-loop", "kind: ddp", "`workload.kind: ddp`"),
        ("kind: allreduce-loop", "kind: ddp", "`workload.kind: ddp`"),
        ("mode: balance", "mode: none", "`library.mode: none`"),
        ("mode: balance", "mode: off", "`library.mode: off`"),
        ("mode: balance", "mode: hot-repair", "`library.mode: hot-repair`"),
    ];
    for (from, to, words) in cases {
        let place = tempfile::tempdir().unwrap();
        let ended = run_in(place.path(), &good.replace(from, to), &[]);
        ended.expect_code(64).expect_words(&[words, "suite.yaml: ", "cannot be run by this build", "hint:"]);
        assert!(!place.path().join("out").exists(), "{to}: a results folder was made");
    }
    let graph = good.replace("kind: allreduce-loop", "kind: cuda-graph").replace("allreduce#2", "graphlaunch#2");
    let place = tempfile::tempdir().unwrap();
    run_in(place.path(), &graph, &[]).expect_code(64);
}

#[test]
fn arguments_that_do_not_fit_the_suite_are_usage_errors() {
    let place = tempfile::tempdir().unwrap();
    let good = SmallSuite::default().text();
    run_in(place.path(), &good, &["--corrupt", "5"]).expect_code(64).expect_words(&["--corrupt 5", "4 iterations"]);
    run_in(place.path(), &good, &["--only", "speed"]).expect_code(64).expect_words(&["--only speed", "cut_iteration"]);
    run_in(place.path(), &good, &["--lease", "1ms"]).expect_code(64).expect_words(&["--lease"]);
    let suite = write_suite(place.path(), &good);
    let suite = suite.to_str().unwrap();
    bench(&["run", suite, suite]).expect_code(64).expect_words(&["named small"]);
    bench(&["run", "no-such-suite.yaml"]).expect_code(64).expect_words(&["no-such-suite.yaml: cannot be read"]);
    assert!(!place.path().join("out").exists());
}

/// As root, but with no capability: what is refused is what a plain user is refused.
fn without_capabilities(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(|| {
            for capability in 0..=40 {
                // Fails for those that this kernel does not know.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
            Ok(())
        })
    }
}

#[test]
fn a_missing_privilege_is_exit_4_and_says_which() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite::default().write(place.path());
    let mut command = Command::new(program());
    command.arg("run").arg(&suite).arg("--out").arg(place.path().join("out"));
    run(without_capabilities(&mut command)).expect_code(4).expect_words(&[
        "not permitted to create network and UTS namespaces",
        "hint: run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN",
    ]);
    let mut doctor = Command::new(program());
    doctor.arg("doctor").arg("--out").arg(place.path());
    run(without_capabilities(&mut doctor)).expect_code(4).expect_words(&["fail  rights: missing", "hint:"]);
    let mut plan = Command::new(program());
    plan.arg("plan").arg(&suite);
    run(without_capabilities(&mut plan)).expect_code(0);
}

#[test]
fn two_benches_with_the_same_out_are_told_apart_by_the_folder() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite { iterations: 500, ..SmallSuite::default() }.write(place.path());
    let out = place.path().join("out");
    let mut first = Running::start(&suite, &out, &[]);
    first.wait_for_line("baseline 1/");
    let second = bench(&["run", suite.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    let folder = format!("{}: another bench is writing its results there", out.display());
    second.expect_code(4).expect_words(&[&folder, "hint: give this one its own --out"]);
    // The first goes on undisturbed.
    first.wait_for_line("iteration 1/");
}

#[test]
fn a_used_rendezvous_port_is_exit_4_and_named() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite::default().write(place.path());
    let (out, before) = (place.path().join("out"), host());
    let bench = Running::start(&suite, &out, &[]);
    // Ranks start only after the goodput measurement, which takes more than a second.
    let state = bench.cluster();
    let _occupied = inside(&state.nodes[0].netns, || TcpListener::bind("0.0.0.0:29500").unwrap());
    let workers = wait_for("workers", SOON, || Some(bench.workers()).filter(|workers| !workers.is_empty()));
    let held = Held::by(&bench, before);
    bench.end(SOON).expect_code(4).expect_words(&["rank 0 cannot listen on", ":29500", "hint: is another job"]);
    held.expect_gone(true);
    assert!(workers.iter().all(|worker| !worker.is_alive()));
}

#[test]
fn a_disk_without_room_is_exit_4_before_anything_runs() {
    let place = tempfile::tempdir().unwrap();
    let (suite, disk) = (SmallSuite::default().write(place.path()), place.path().join("disk"));
    fs::create_dir(&disk).unwrap();
    let mut command = Command::new(program());
    command.arg("run").arg(&suite).arg("--out").arg(disk.join("out"));
    let ended = run(with_disk(&mut command, &disk, c"size=512k", MsFlags::empty()));
    let ended =
        ended.expect_code(4).expect_words(&["disk/out/", "no space left on the disk", "hint: free at least 1 MiB"]);
    assert!(!ended.stderr.contains("cluster:"), "a cluster was built: {ended:#?}");
}

#[test]
fn a_read_only_folder_is_exit_4_before_anything_runs() {
    let place = tempfile::tempdir().unwrap();
    let (suite, disk) = (SmallSuite::default().write(place.path()), place.path().join("disk"));
    fs::create_dir(&disk).unwrap();
    let mut command = Command::new(program());
    command.arg("run").arg(&suite).arg("--out").arg(disk.join("out"));
    let ended = run(with_disk(&mut command, &disk, c"size=4m", MsFlags::MS_RDONLY));
    let ended =
        ended.expect_code(4).expect_words(&["disk/out: cannot be written: Read-only", "hint: give another --out"]);
    assert!(!ended.stderr.contains("cluster:"), "a cluster was built: {ended:#?}");
}

#[test]
fn a_disk_that_fills_up_during_the_run_is_exit_4_with_no_half_verdict() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite { iterations: 500, ..SmallSuite::default() }.write(place.path());
    let (disk, before) = (place.path().join("disk"), host());
    fs::create_dir(&disk).unwrap();
    let out = disk.join("out");
    let mut command = Command::new(program());
    command.arg("run").arg(&suite).arg("--out").arg(&out);
    with_disk(&mut command, &disk, c"size=2m", MsFlags::empty());
    let mut bench = Running::spawn(command, &out);
    bench.wait_for_line("iteration 1/");
    let held = Held::by(&bench, before);
    // The disk as the bench sees it; kept open, it can be looked at when the bench has gone.
    let seen = PathBuf::from(format!("/proc/{}/root{}", bench.pid(), disk.display()));
    let folder = fs::File::open(seen.join("out")).unwrap();
    let mut filler = fs::File::create(seen.join("filler")).unwrap();
    let full = std::iter::repeat_with(|| filler.write_all(&[0x55; 512])).find_map(Result::err).unwrap();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    let ended = bench.end(SOON).expect_code(4);
    ended.expect_words(&["disk/out/run.jsonl: no space left on the disk", "hint:"]);
    held.expect_gone(true);
    use std::os::fd::AsRawFd;
    let left = fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd())).unwrap();
    let left: Vec<String> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().any(|name| name == "run.jsonl"), "{left:?}");
    assert!(!left.iter().any(|name| name.contains("summary")), "{left:?}");
}

#[test]
fn a_results_folder_that_a_user_may_not_write_is_named() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite::default().write(place.path());
    let locked = place.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    let mut command = Command::new(program());
    command.arg("run").arg(&suite).arg("--out").arg(locked.join("out"));
    run(without_capabilities(&mut command)).expect_code(4).expect_words(&["locked/out: cannot be written: Permission"]);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let script = format!("'{}' schema suite | head -c 10", program().display());
    let ended = run(Command::new("bash").args(["-o", "pipefail", "-c", &script])).expect_code(0);
    assert_eq!((ended.stdout.len(), ended.stderr.as_str()), (10, ""));
    let full = format!("'{}' schema suite > /dev/full", program().display());
    run(Command::new("bash").args(["-c", &full])).expect_code(4).expect_words(&["standard output: No space left"]);
}
