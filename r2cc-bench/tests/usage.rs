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
    for command in
        [&["--help"] as &[&str], &["run", "--help"], &["launch", "--help"], &["plan", "--help"], &["doctor", "--help"]]
    {
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
    for (which, title) in [("suite", "Suite"), ("summary", "Summary")] {
        let schema: serde_json::Value = serde_json::from_str(&told(&["schema", which])).unwrap();
        assert_eq!(schema["title"], title);
    }
}
