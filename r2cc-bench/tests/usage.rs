//! What the command line says of itself and of suites: help, usage errors, plans and lists. Needs no rights.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::path::Path;

use support::{SmallSuite, bench, run, write_suite};

/// Standard output of a command that ends well.
fn told(args: &[&str]) -> String {
    let ended = bench(args).expect_code(0);
    assert_eq!(ended.stderr, "", "{args:?}");
    ended.stdout
}

fn in_folder(folder: &Path, args: &[&str]) -> support::Ended {
    run(std::process::Command::new(support::program()).current_dir(folder).args(args))
}

#[test]
fn every_command_explains_itself() {
    let mut text = String::new();
    for command in [
        &["--help"] as &[&str],
        &["run", "--help"],
        &["launch", "--help"],
        &["plan", "--help"],
        &["doctor", "--help"],
        &["report", "--help"],
        &["replay", "--help"],
        &["compare", "--help"],
        &["status", "--help"],
    ] {
        text.push_str(&format!("$ r2cc-bench {}\n{}\n", command.join(" "), told(command)));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn wrong_usage_is_exit_64_with_a_suggestion() {
    let mut text = String::new();
    for arguments in [
        &[] as &[&str],
        &["rnu"],
        &["run"],
        &["run", "a.yaml", "--repeat", "0"],
        &["run", "a.yaml", "--corrupt", "0"],
        &["run", "a.yaml", "--corrupt", "3,inf"],
        &["run", "a.yaml", "--timing", "strict"],
        &["run", "a.yaml", "--cuter", "xdp"],
        &["schema", "suites"],
        &["report"],
        &["replay", "results", "--speed", "0"],
        &["compare", "before"],
        &["compare", "before", "after", "--threshold", "1"],
        &["completions", "tcsh"],
    ] {
        let ended = bench(arguments).expect_code(64);
        assert_eq!(ended.stdout, "", "{arguments:?}");
        // Of the help that follows without arguments only the beginning matters here.
        let shown: Vec<&str> = ended.stderr.lines().take(6).collect();
        text.push_str(&format!("$ r2cc-bench {}\n{}\n\n", arguments.join(" "), shown.join("\n")));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_plan_says_what_a_suite_will_do() {
    let place = tempfile::tempdir().unwrap();
    SmallSuite::default().write(place.path());
    insta::assert_snapshot!(in_folder(place.path(), &["plan", "suite.yaml"]).expect_code(0).stdout);
}

#[test]
fn a_list_has_every_suite_with_its_purpose_and_marks_the_invalid() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(place.path().join("suites/variants")).unwrap();
    std::fs::write(place.path().join("suites/01.yaml"), SmallSuite::default().text()).unwrap();
    std::fs::write(place.path().join("suites/variants/broken.yaml"), "version: 1\n").unwrap();
    let ended = in_folder(place.path(), &["list"]).expect_code(64);
    insta::assert_snapshot!(format!("{}{}", ended.stdout, ended.stderr));
    in_folder(place.path(), &["list", "nowhere"]).expect_code(64).expect_words(&["nowhere: cannot be read"]);
}

#[test]
fn validation_names_every_problem_of_every_file_at_its_place() {
    let place = tempfile::tempdir().unwrap();
    let good = SmallSuite::default().text();
    let bad = good.replace("baseline: 3", "baselin: 3").replace("mode: balance", "mode: balanced");
    std::fs::write(place.path().join("good.yaml"), &good).unwrap();
    write_suite(place.path(), &bad);
    let ended = in_folder(place.path(), &["validate", "good.yaml", "suite.yaml", "missing.yaml"]).expect_code(64);
    insta::assert_snapshot!(format!("{}---\n{}", ended.stdout, ended.stderr));
}

#[test]
fn schemas_are_json_with_a_title() {
    for (which, title) in
        [("suite", "Suite"), ("summary", "Summary"), ("event", "EventLine"), ("comparison", "Comparison")]
    {
        let schema: serde_json::Value = serde_json::from_str(&told(&["schema", which])).unwrap();
        assert_eq!(schema["title"], title);
    }
}

#[test]
fn every_shell_gets_a_completion_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = told(&["completions", shell]);
        for word in ["compare", "replay", "speed", "archive"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

/// A recorded run of the repository.
fn recorded(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference-logs").join(name).display().to_string()
}

#[test]
fn a_replay_in_a_pipe_tells_the_run_without_waiting_colour_or_bar() {
    let text = told(&["replay", &recorded("emulated/01")]);
    assert!(!text.contains('\u{1b}') && !text.contains('\r'), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn a_comparison_ends_in_the_code_of_what_it_found() {
    let (one, ten, gpu) = (recorded("emulated/01"), recorded("emulated/01-ten-runs"), recorded("h200-emulated/01"));
    bench(&["compare", &one, &ten]).expect_code(0).expect_words(&["1 run and 10 runs", "same: at 99 % confidence"]);
    bench(&["compare", &ten, &gpu]).expect_code(0).expect_words(&["BETTER: at", "differs", "backend: host -> nccl"]);
    bench(&["compare", &gpu, &ten]).expect_code(1).expect_words(&["WORSE: at", "backend: nccl -> host"]);
    let found = told(&["compare", &ten, &ten, "--format", "json"]);
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    assert_eq!((&found["verdict"], &found["exit_code"]), (&"same".into(), &0.into()));
}

#[test]
fn paths_without_runs_are_exit_64_and_say_what_is_wanted() {
    let place = tempfile::tempdir().unwrap();
    let (empty, run) = (place.path().to_str().unwrap(), recorded("emulated/01"));
    bench(&["compare", &run, empty]).expect_code(64).expect_words(&["no summary.json", "hint:"]);
    bench(&["compare", "/nowhere", &run]).expect_code(64).expect_words(&["/nowhere: cannot be read", "hint:"]);
    bench(&["replay", empty]).expect_code(64).expect_words(&["run.jsonl: cannot be read", "hint:"]);
    std::fs::write(place.path().join("summary.json"), "{\"version\": 1}").unwrap();
    bench(&["compare", &run, empty]).expect_code(64).expect_words(&["summary.json: missing field", "hint:"]);
    std::fs::write(place.path().join("run.jsonl"), "{}\n").unwrap();
    bench(&["replay", empty]).expect_code(64).expect_words(&["run.jsonl:1:"]);
}
