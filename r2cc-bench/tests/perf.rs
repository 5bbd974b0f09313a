//! `r2cc-bench perf` on emulated clusters: every collective, sweeps that are killed and go on, disks without room.
//! Needs root.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::mount::MsFlags;
use nix::sys::signal::Signal;
use r2cc_bench::perf::parse::{Check, ReadSweep, read};
use support::{Held, Running, SOON, bench, host, program, run, wait_for, with_disk};

/// A cluster that is built quickly.
const SMALL: [&str; 6] = ["--nodes", "3", "--ranks-per-node", "1", "--nics", "mlx5_0,mlx5_2"];

fn perf(arguments: &[&str], out: &Path) -> support::Ended {
    let mut all = vec!["perf"];
    all.extend(arguments.iter().chain(&SMALL));
    all.extend(["--quiet", "--out", out.to_str().unwrap()]);
    bench(&all)
}

/// The rows, both from the text and from the document, which must agree.
fn rows(stdout: &str, out: &Path) -> ReadSweep {
    let (text, document) = (read(stdout).unwrap(), read(&fs::read_to_string(out.join("perf.json")).unwrap()).unwrap());
    assert_eq!(text.rows.len(), document.rows.len());
    for (a, b) in text.rows.iter().zip(&document.rows) {
        assert_eq!((a.size, a.count, &a.dtype, &a.op, a.root), (b.size, b.count, &b.dtype, &b.op, b.root));
        assert_eq!(a.in_place.as_ref().map(|half| half.check), b.in_place.as_ref().map(|half| half.check));
    }
    assert_eq!(text.concluded, document.concluded);
    text
}

#[test]
fn every_collective_is_measured_and_every_element_right() {
    let place = tempfile::tempdir().unwrap();
    // Two sizes of each, for every type and operator, or every root.
    let (all, roots) = (&["-d", "all", "-o", "all"][..], &["-d", "bfloat16", "-r", "-1"][..]);
    let collectives = [
        ("all-reduce", all, 80, true),
        ("all_gather_perf", all, 16, true),
        ("reduce-scatter", all, 80, true),
        ("broadcast", roots, 6, true),
        ("reduce", roots, 6, true),
        ("sendrecv", roots, 2, false),
        ("alltoall", roots, 2, false),
        ("gather", roots, 6, true),
        ("scatter", roots, 6, true),
    ];
    for (collective, more, count, in_place) in collectives {
        let out = place.path().join(collective);
        let sizes = ["-b", "1K", "-e", "128K", "-f", "128", "-n", "2", "-c", "2"];
        let arguments: Vec<&str> = [collective].iter().chain(&sizes).chain(more).copied().collect();
        let ended = perf(&arguments, &out).expect_code(0);
        let sweep = rows(&ended.stdout, &out);
        assert!(sweep.concluded && sweep.out_of_bounds == Some((0, true)), "{collective}: {sweep:?}");
        for row in &sweep.rows {
            assert_eq!(row.out_of_place.as_ref().unwrap().check, Check::Wrong(0), "{collective}");
            assert_eq!(row.in_place.is_some(), in_place, "{collective}");
        }
        assert_eq!(sweep.rows.len(), count, "{collective}");
    }
}

#[test]
fn a_damaged_element_ends_in_exit_2_with_its_place() {
    let place = tempfile::tempdir().unwrap();
    for collective in ["all-gather", "reduce", "all-to-all"] {
        let out = place.path().join(collective);
        let ended = perf(&[collective, "-b", "64K", "-e", "64K", "-n", "1", "--corrupt", "1"], &out).expect_code(2);
        let ended = ended.expect_words(&["wrong elements, first on rank", "Out of bounds values : 1 FAILED"]);
        assert_eq!(rows(&ended.stdout, &out).out_of_bounds, Some((1, false)));
    }
}

#[test]
fn iteration_times_and_unchecked_rows_are_told() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let copy = place.path().join("copy.json");
    let json = ["-J", copy.to_str().unwrap()];
    let arguments =
        ["-b", "1K", "-e", "2K", "-i", "1K", "-n", "5", "-c", "0", "-I", "1", "-z", "1", "-N", "2", "-a", "3"];
    let arguments: Vec<&str> = arguments.into_iter().chain(json).collect();
    fs::write(&copy, "somebody else's").unwrap();
    let ended = perf(&arguments, &out).expect_code(0);
    let sweep = rows(&ended.stdout, &out);
    assert_eq!(sweep.rows.iter().map(|row| row.size).collect::<Vec<_>>(), [1024, 2048, 1024, 2048], "two cycles");
    let half = sweep.rows[0].out_of_place.as_ref().unwrap();
    assert_eq!((half.check, half.more.len()), (Check::Unchecked, 4));
    assert_eq!(fs::read_to_string(&copy).unwrap(), "somebody else's");
    let second = fs::read_to_string(place.path().join("copy.json.1")).unwrap();
    assert_eq!(second, fs::read_to_string(out.join("perf.json")).unwrap());
    let document: serde_json::Value = serde_json::from_str(&second).unwrap();
    assert_eq!(document["results"][0]["in_place_per_iter"]["times_us"].as_array().unwrap().len(), 5);
}

#[test]
fn a_killed_sweep_goes_on_after_its_finished_rows() {
    let place = tempfile::tempdir().unwrap();
    let (out, before) = (place.path().join("out"), host());
    let mut command = Command::new(program());
    command.args(["perf", "all-gather", "-b", "8", "-e", "1M", "-f", "2", "-n", "20"]).args(SMALL);
    command.arg("--out").arg(&out);
    let bench = Running::spawn(command, &out);
    let document = || fs::read_to_string(out.join("perf.json")).ok().and_then(|text| read(&text).ok());
    wait_for("some rows", SOON, || document().filter(|sweep| sweep.rows.len() >= 3));
    let held = Held::by(&bench, before);
    bench.signal(Signal::SIGKILL);
    assert_eq!(bench.end(SOON).signal, Some(Signal::SIGKILL as i32));
    held.expect_gone(false);
    let partial = document().expect("a document that is whole");
    assert!(!partial.concluded && partial.rows.len() >= 3, "{partial:?}");

    let resume = |expected| {
        let folder = out.to_str().unwrap();
        support::bench(&["perf", "--resume", folder, "--quiet"]).expect_code(expected)
    };
    let ended = resume(0);
    let whole = document().unwrap();
    assert_eq!(whole.rows[..partial.rows.len()], partial.rows[..], "finished rows stay as they were");
    // 8 and 16 bytes are both one element a rank.
    assert_eq!(whole.rows.len(), 17);
    assert!(whole.concluded && rows(&ended.stdout, &out).concluded);
    // There is nothing left to be done: nothing is measured again.
    resume(0);
    assert_eq!(document().unwrap().rows, whole.rows);
}

#[test]
fn an_interrupted_sweep_is_exit_130_and_says_how_to_go_on() {
    let place = tempfile::tempdir().unwrap();
    let (out, before) = (place.path().join("out"), host());
    let mut command = Command::new(program());
    command.args(["perf", "-b", "8", "-e", "64K", "-f", "2", "-N", "0"]).args(SMALL).arg("--out").arg(&out);
    let bench = Running::spawn(command, &out);
    let document = || fs::read_to_string(out.join("perf.json")).ok().and_then(|text| read(&text).ok());
    wait_for("some rows", SOON, || document().filter(|sweep| sweep.rows.len() >= 2));
    let held = Held::by(&bench, before);
    bench.ctrl_c();
    bench.end(SOON).expect_code(130).expect_words(&["interrupted", "hint: `r2cc-bench perf --resume"]);
    held.expect_gone(true);
    assert!(!document().unwrap().concluded);
}

#[test]
fn a_disk_without_room_or_rights_is_exit_4_before_anything_runs() {
    let place = tempfile::tempdir().unwrap();
    let disk = place.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let (elsewhere, inside) = (place.path().join("out"), disk.join("out"));
    for (options, flags, said) in [
        (c"size=512k", MsFlags::empty(), "no space left on the disk"),
        (c"size=16m", MsFlags::MS_RDONLY, "Read-only file system"),
    ] {
        for json in [false, true] {
            let mut command = Command::new(program());
            command.args(["perf", "-b", "8", "-e", "8"]).args(SMALL);
            if json {
                command.arg("--out").arg(&elsewhere).arg("-J").arg(disk.join("perf.json"));
            } else {
                command.arg("--out").arg(&inside);
            }
            let ended =
                run(with_disk(&mut command, &disk, options, flags)).expect_code(4).expect_words(&[said, "hint:"]);
            assert!(!ended.stderr.contains("cluster:"), "a cluster was built: {ended:#?}");
        }
    }
}

#[test]
fn what_makes_no_sweep_is_exit_64_before_anything_runs() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    for (arguments, said) in [
        (&["-b", "8", "-e", "4"][..], "-e at least -b"),
        (&["-b", "1X"], "no unit of bytes"),
        (&["-d", "int8"], "unknown element type"),
        (&["-o", "xor"], "one of sum"),
        (&["-r", "3"], "root 3 of 3 ranks"),
        (&["-n", "0"], "-n is at least 1"),
        (&["all-shuffle"], "possible values"),
        (&["--nic-rate", "1bit"], "at least 1 Mbit/s"),
        (&["--cluster", "none.yaml"], "none.yaml"),
    ] {
        perf(arguments, &out).expect_code(64).expect_words(&[said]);
        assert!(!out.exists(), "{arguments:?}");
    }
    bench(&["perf", "--resume", out.to_str().unwrap()]).expect_code(64).expect_words(&["perf.json", "hint:"]);
}

#[test]
fn an_output_of_nccl_tests_is_read_to_json() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("output.txt");
    fs::write(&file, include_str!("../src/perf/parse/golden/today.txt")).unwrap();
    let ended = bench(&["perf", "--read", file.to_str().unwrap()]).expect_code(0);
    let document: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(document["rows"][2]["in_place"]["check"]["wrong"], 3);
    fs::write(&file, "nothing\n").unwrap();
    bench(&["perf", "--read", file.to_str().unwrap()]).expect_code(64).expect_words(&["no row", "hint:"]);
}
