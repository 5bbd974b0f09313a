//! Suites that are good, and every way found so far in which one is bad.

use std::fs;
use std::path::{Path, PathBuf};

use super::{MODELINE, ScaleRow, Suite, SuiteError, effect, list, plan, schema};

const GOOD: &str = include_str!("../../../suites/01.yaml");

fn suites() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../suites")
}

/// Suite 01 with one piece of its text replaced.
fn with(old: &str, new: &str) -> String {
    assert!(GOOD.contains(old), "suite 01 has no {old:?}");
    GOOD.replacen(old, new, 1)
}

/// The errors of a text, as a user reads them.
fn errors(text: &str) -> String {
    Suite::parse(text, "bad.yaml").expect_err("the suite must be refused").to_string()
}

#[test]
fn every_suite_of_the_repository_is_valid_and_carries_the_modeline() {
    let listed = list(&suites()).unwrap();
    assert!(listed.len() >= 16, "{}", listed.len());
    let mut names = std::collections::BTreeSet::new();
    for entry in listed {
        let file = entry.file.display();
        let suite = entry.suite.unwrap_or_else(|error| panic!("{error}"));
        assert!(names.insert(suite.name.clone()), "{file}: the name {} is taken", suite.name);
        let text = fs::read_to_string(&entry.file).unwrap();
        let line = text.lines().next().unwrap();
        let schema = line.strip_prefix(MODELINE).unwrap_or_else(|| panic!("{file}: no modeline"));
        assert!(entry.file.parent().unwrap().join(schema).is_file(), "{file}: {schema} is not there");
        assert!(!plan(&suite, suite.default_row()).is_empty());
        // What a suite says can be written and read again without loss.
        let again = Suite::parse(&serde_json::to_string(&suite).unwrap(), "again").unwrap();
        assert_eq!(again, suite, "{file}");
    }
}

#[test]
fn every_library_mode_can_be_written_as_it_is_named() {
    use super::Mode;
    for (word, mode) in [("off", Mode::Off), ("none", Mode::None), ("hot-repair", Mode::HotRepair)] {
        let suite = Suite::parse(&with("mode: balance", &format!("mode: {word}")), "suite.yaml").unwrap();
        assert_eq!(suite.library.mode, mode);
    }
}

#[test]
fn the_schema_beside_the_suites_is_the_generated_one() {
    let text = fs::read_to_string(suites().join("schema.json")).unwrap();
    let stored: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(stored == *schema(), "suites/schema.json is out of date: r2cc-bench schema > suites/schema.json");
}

#[test]
fn every_key_of_the_schema_has_a_description() {
    fn walk(value: &serde_json::Value, path: &str) {
        if let Some(properties) = value["properties"].as_object() {
            for (key, property) in properties {
                assert!(property["description"].is_string(), "{path}.{key} has no description");
            }
        }
    }
    walk(schema(), "suite");
    for (name, definition) in schema()["$defs"].as_object().unwrap() {
        walk(definition, name);
        assert!(definition["description"].is_string(), "{name}");
    }
}

#[test]
fn suite_01_is_the_example_of_the_contract() {
    let suite = Suite::parse(GOOD, "01.yaml").unwrap();
    assert_eq!(suite.ranks(ScaleRow::Host), 6);
    assert_eq!(suite.ranks(ScaleRow::Nccl), 3, "the row replaces ranks_per_node");
    assert_eq!(suite.scale(ScaleRow::Host).unwrap().bytes.0, 64 << 20);
    assert_eq!(suite.scale(ScaleRow::Ssh).unwrap().nic_rate, None);
    assert_eq!(suite.faults[0].to_string(), "drop@node-1/mlx5_2 from allreduce#3+25% for run");
    assert_eq!(suite.checks.baseline_over_t0, 1.06, "asked of every suite");
}

#[test]
fn an_unknown_key_has_line_column_and_suggestion() {
    let error = Suite::parse(&with("iterations: 10", "iteratons: 10"), "bad.yaml").unwrap_err();
    let problem = error.problems().iter().find(|problem| problem.what.contains("iteratons")).unwrap();
    let line = GOOD.lines().position(|line| line.contains("iterations: 10")).unwrap();
    let column = GOOD.lines().nth(line).unwrap().find("iterations").unwrap();
    assert_eq!((problem.line, problem.column), (line as u64 + 1, column as u64 + 1));
    assert_eq!(problem.hint.as_deref(), Some("did you mean `iterations`?"));
    insta::assert_snapshot!(error.to_string());
}

#[test]
fn everything_of_the_wrong_shape_is_told_at_once() {
    insta::assert_snapshot!(errors(
        r#"version: one
name: shapes
purpos: x
cluster: {kind: emulatd, nodes: 1, ranks_per_node: two, nics: mlx5_0, frabic: rails}
scale:
  hots: {bytes: 64MiB}
  host: {nic_rate: 200Mb, bytes: sixty}
workload: {kind: allreduce-loop, dtype: f23, iterations: 0, in_place: maybe}
faults:
  - "dorp@node-1/mlx5_2 from allreduce#3+25% for run"
  - drop@node-1/mlx5_2 form allreduce#3 for run
  - 7
checks:
  time_ratio: {iterations: 10-4, value: fast, within: 2}
  survivors_share: 3
  colour: red
"#
    ));
}

#[test]
fn everything_that_does_not_fit_together_is_told_at_once() {
    insta::assert_snapshot!(errors(
        r#"version: 2
name: "a/b"
purpose: x
cluster: {nodes: 3, ranks_per_node: 2, nics: [mlx5_0, mlx5_2, mlx5_2, mgmt0, a-name-that-is-too-long], fabric: any}
scale:
  host: {bytes: 1001, nic_rate: 200Mbit}
  nccl: {bytes: 8, ranks_per_node: 0}
  ssh: {bytes: 8}
workload: {kind: allreduce-loop, iterations: 10, sync: none}
library: {mode: hot-repair, after_repair: weighted}
faults:
  - "drop@node-4/mlx5_2 from allreduce#3 for run"
  - "drop@node-1/mlx5_4 from allreduce#13+25% at wire until allreduce#2"
  - "drop@switch/rail-2 from broadcast#1 at wire for run"
  - "rate:1Gbit@node-1/mlx5_2 from now until allreduce#11"
  - "drop@node-2/mlx5_2 from allreduce#3+1GiB at wire for run"
  - "drop@node-2/mlx5_2 from allreduce#3+100% at wire for run"
checks:
  cut_iteration: 4
  time_ratio:
    - {iterations: 4-12, value: 1.5}
    - {iterations: 4-6, at_most: 0}
  node_bytes: [{node: nod-1, iterations: 4-11, value: 1, within: 1%}]
  fault_view: [node-1/mlx5_3, node-1]
  survivors_share: {value: 0.25, within: 3%}
  baseline_over_t0: 0.9
"#
    ));
}

#[test]
fn checks_of_a_cut_need_a_fault() {
    insta::assert_snapshot!(errors(&with(
        "faults: [\"drop@node-1/mlx5_2 from allreduce#3+25% for run\"]",
        "faults: []"
    )));
}

#[test]
fn a_rail_that_is_not_there_is_told() {
    insta::assert_snapshot!(errors(&with("drop@node-1/mlx5_2", "drop@switch/rail-4")));
}

#[test]
fn the_share_must_fit_the_number_of_nics_that_survive() {
    insta::assert_snapshot!(errors(&with("survivors_share: {value: 0.5", "survivors_share: {value: 0.33")));
}

#[test]
fn a_text_that_is_no_yaml_is_told_with_its_place() {
    for (text, line) in [("version: 1\nname: [\n", 3), ("version: 1\nversion: 1\n", 2), ("a: b: c\n", 1)] {
        let error = Suite::parse(text, "bad.yaml").unwrap_err();
        assert_eq!(error.problems().len(), 1, "{error}");
        assert!(error.problems()[0].line >= 1 && error.problems()[0].line <= line, "{error}");
        assert!(error.to_string().starts_with("bad.yaml:"), "{error}");
    }
    for text in ["", "just words", "- a\n- b\n", "null"] {
        assert!(matches!(Suite::parse(text, "bad.yaml"), Err(SuiteError::Invalid { .. })), "{text:?}");
    }
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Suite::load(Path::new("nowhere/99.yaml")).unwrap_err();
    assert!(matches!(error, SuiteError::Unreadable { .. }));
    assert!(error.to_string().starts_with("nowhere/99.yaml: "), "{error}");
}

#[test]
fn the_plan_of_suite_01() {
    insta::assert_snapshot!(plan(&Suite::parse(GOOD, "01.yaml").unwrap(), ScaleRow::Host));
}

#[test]
fn the_plan_says_where_a_row_is_missing_or_unshaped() {
    let mut suite = Suite::parse(GOOD, "01.yaml").unwrap();
    assert!(plan(&suite, ScaleRow::Ssh).contains("NICs run as they are"));
    suite.scale.nccl = None;
    assert!(plan(&suite, ScaleRow::Nccl).contains("scale.nccl is not in the suite"));
}

/// Balance's factor of suite 01's cluster under some faults, at worst.
fn balance(fabric_any: bool, faults: &[&str]) -> f64 {
    let mut suite = Suite::parse(GOOD, "01.yaml").unwrap();
    if fabric_any {
        suite.cluster.fabric = super::Fabric::Any;
    }
    suite.faults = faults.iter().map(|text| text.parse().unwrap()).collect();
    effect::balance_factor(&suite, &suite.faults.iter().collect::<Vec<_>>(), false)
}

#[test]
fn balance_runs_at_the_speed_of_the_worst_ring_edge() {
    let near = |factor: f64, expected: f64| assert!((factor - expected).abs() < 1e-9, "{factor} is not {expected}");
    near(balance(false, &[]), 1.0);
    near(balance(false, &["drop@node-1/mlx5_2 from now for run"]), 1.5);
    near(balance(false, &["drop@node-1/mlx5_2/tx from now for run"]), 1.5);
    near(balance(false, &["link-down@node-1/mlx5_2 from now for run"]), 1.5);
    near(balance(false, &["drop@switch/rail-2 from now for run"]), 1.5);
    near(balance(false, &["drop@node-1/mgmt0 from now for run"]), 1.0);
    near(balance(false, &["rate:20Mbit@node-1/mlx5_2 from now for run"]), 3.0 / 2.1);
    let same = ["drop@node-1/mlx5_2 from now for run", "drop@node-2/mlx5_2 from now for run"];
    let different = ["drop@node-1/mlx5_2 from now for run", "drop@node-2/mlx5_3 from now for run"];
    near(balance(false, &same), 1.5);
    near(balance(false, &different), 3.0);
    near(balance(true, &different), 1.5);
    let one_node = ["drop@node-1/mlx5_2 from now for run", "drop@node-1/mlx5_3 from now for run"];
    near(balance(false, &one_node), 3.0);
    let apart = [one_node[0], one_node[1], "drop@node-2/mlx5_0 from now for run"];
    assert!(balance(false, &apart).is_infinite(), "no rail in common");
}

#[test]
fn schedules_after_the_repair_follow_their_formulas() {
    let mut suite = Suite::parse(GOOD, "01.yaml").unwrap();
    assert!(effect::scheduled_factor(&suite, ScaleRow::Host, 1.5).is_none());
    suite.library.after_repair = Some(super::AfterRepair::R2ccAllreduce);
    let (_, factor) = effect::scheduled_factor(&suite, ScaleRow::Host, 1.5).unwrap();
    assert!((factor - 1.375).abs() < 1e-9, "{factor}");
    suite.library.after_repair = Some(super::AfterRepair::Weighted);
    let (_, factor) = effect::scheduled_factor(&suite, ScaleRow::Host, 1.5).unwrap();
    assert!((factor - 0.9).abs() < 1e-9, "{factor}");
    let (_, healthy) = effect::scheduled_factor(&suite, ScaleRow::Host, 1.0).unwrap();
    assert!((healthy - 0.8).abs() < 1e-9, "{healthy}");
}

mod random {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
            let _ = Suite::parse(&text, "random");
        }

        #[test]
        fn a_suite_with_a_piece_cut_out_is_read_or_refused_with_a_place(start in 0..GOOD.len(), length in 1_usize..60) {
            let mut text = GOOD.to_string();
            let end = (start + length).min(text.len());
            prop_assume!(text.is_char_boundary(start) && text.is_char_boundary(end));
            text.replace_range(start..end, "");
            if let Err(error) = Suite::parse(&text, "cut") {
                prop_assert!(!error.problems().is_empty());
                for problem in error.problems() {
                    prop_assert!(problem.line >= 1 && problem.column >= 1, "{error}");
                }
            }
        }
    }
}

#[test]
fn a_sweep_is_told_what_does_not_fit_it() {
    const SWEEP: &str = include_str!("../../../suites/05.yaml");
    let spoilt = |old: &str, new: &str| {
        assert!(SWEEP.contains(old), "suite 05 has no {old:?}");
        errors(&SWEEP.replacen(old, new, 1))
    };
    let list = "  sweep: {collectives: [all-reduce], from: 8, factor: 4, also: [{dtype: bf16, op: max}]}\n";
    for (old, new, said) in [
        (list, "", "kind perf without a `sweep`"),
        ("kind: perf", "kind: allreduce-loop", "only kind perf sweeps sizes"),
        ("[all-reduce]", "[]", "nothing to measure"),
        ("[all-reduce]", "[all-shuffle]", "all-shuffle"),
        ("from: 8,", "from: 64MiB,", "at most scale.host.bytes"),
        ("factor: 4", "factor: 1", "factor"),
        ("from after 200ms for run", "from allreduce#1 for run", "begin by time and last for the run"),
        ("value: 1.5, within: 3%", "value: 1.5", "either `value` and `within`, or `at_most`"),
        ("  elements: exact\n", "  cut_iteration: 1\n", "looks at iterations"),
        ("faults: [\"drop@node-1/mlx5_2 from after 200ms for run\"]", "faults: []", "no times under faults"),
    ] {
        let told = spoilt(old, new);
        assert!(told.contains(said), "{new:?}: {told}");
    }
}

const ROWS: &str = include_str!("../../../suites/03.yaml");

#[test]
fn a_row_has_its_own_in_place_of_the_suites() {
    let suite = Suite::parse(ROWS, "03.yaml").unwrap();
    let runs = suite.runs();
    let names: Vec<&str> = runs.iter().filter_map(|run| run.row.as_deref()).collect();
    assert_eq!(names, ["healthy", "balance", "r2cc-allreduce", "weighted"]);
    assert!(runs.iter().all(|run| run.suite.rows.is_empty() && run.suite.cluster == suite.cluster));
    assert_eq!((&runs[0].against, &runs[1].against), (&None, &Some("healthy".to_owned())));
    assert_eq!(runs[1].suite.library.failed, ["node-1/mlx5_2"]);
    assert_eq!(runs[2].suite.checks.node_bytes.len(), 3);
    let alone = Suite::parse(GOOD, "01.yaml").unwrap();
    assert_eq!(alone.runs()[0].suite, alone);
}

#[test]
fn a_row_that_makes_no_sense_is_told_at_its_place() {
    // What is put where, the text whose place is told, and what is said of it.
    let cases = [
        ("name: balance", "name: healthy", "healthy\n    against", "there are two rows `healthy`"),
        ("against: healthy", "against: heathy", "heathy", "did you mean `healthy`?"),
        ("    against: healthy\n", "", "name: balance", "has no healthy iterations"),
        ("failed: [node-1/mlx5_2]", "failed: [node-1/mlx5_9]", "node-1/mlx5_9", "there is no NIC `node-1/mlx5_9`"),
        ("failed: [node-1/mlx5_2]", "failed: [node-1/mlx5_2, node-2/mlx5_2]", "node-2/mlx5_2", "not of the node"),
        ("failed: [node-1/mlx5_2]", "failed: [node-1/mlx5_2, node-1/mlx5_2]", "node-1/mlx5_2]", "listed twice"),
        ("iterations: 1-5, value: 1.5,", "iterations: 1-50, value: 1.5,", "1-50", "beyond the workload's 5"),
    ];
    for (from, to, told, words) in cases {
        assert!(ROWS.contains(from), "{from}");
        let text = ROWS.replacen(from, to, 1);
        let before = &text[..text.find(told).unwrap()];
        let (line, column) = (before.matches('\n').count() + 1, before.len() - before.rfind('\n').unwrap());
        let said = errors(&text);
        assert!(said.contains(&format!("bad.yaml:{line}:{column}: ")) && said.contains(words), "{to}: {said}");
    }
    let alone = errors(&with("mode: balance", "failed: [node-1/mlx5_2], mode: balance"));
    assert!(alone.contains("no healthy iterations to compare with"), "{alone}");
}
