//! The rule of exit codes, repetitions, and the formats as they look.

use std::path::Path;

use super::*;
use crate::check::record::{RunRecord, SwitchRecord};
use crate::check::sample::{MS, record_01, suite_01};
use crate::check::{CheckClass, CheckResult, CheckStatus, evaluate};
use crate::suite::{ScaleRow, Timing, departures};

fn context() -> RunContext {
    RunContext { backend: "host".into(), ended: None, environment: [("kernel".to_string(), "6.18".to_string())].into() }
}

fn summary_of(record: &RunRecord) -> Summary {
    let suite = suite_01();
    Summary::of_run(&suite, ScaleRow::Host, record, evaluate(&suite, record, Timing::Enforced), &context())
}

fn bent(bend: impl FnOnce(&mut RunRecord)) -> Summary {
    let mut record = record_01();
    bend(&mut record);
    summary_of(&record)
}

/// A run whose hit iteration costs so much over its ideal.
fn costing(over_ms: u64) -> Summary {
    bent(|run| run.iterations[2].end_ns = run.iterations[2].start_ns + (2200 + over_ms) * MS)
}

fn result(class: CheckClass, status: CheckStatus) -> CheckResult {
    CheckResult {
        name: "x".into(),
        class,
        status,
        expected: String::new(),
        actual: String::new(),
        unit: String::new(),
        detail: None,
    }
}

#[test]
fn of_two_codes_the_first_of_the_contract_wins_in_either_order() {
    let order = [6, 130, 4, 70, 5, 2, 3, 1, 0];
    let code = |number| ExitCode::from_code(number).unwrap();
    for (first, one) in order.iter().enumerate() {
        for other in &order[first..] {
            assert_eq!(ExitCode::worst([code(*one), code(*other)]).code(), *one);
            assert_eq!(ExitCode::worst([code(*other), code(*one)]).code(), *one);
        }
    }
    assert_eq!(ExitCode::worst([]), ExitCode::Pass);
    assert_eq!(code(64), ExitCode::Usage);
    assert_eq!(ExitCode::from_code(7), None);
}

#[test]
fn checks_and_the_way_a_run_ended_make_the_verdict() {
    use CheckClass::*;
    use CheckStatus::*;
    let cases = [
        (vec![], None, Verdict::Pass, 0),
        (vec![(Timing, Note), (Counters, Skipped)], None, Verdict::Pass, 0),
        (vec![(Counters, Fail)], None, Verdict::Fail, 1),
        (vec![(View, Fail), (Elements, Fail)], None, Verdict::WrongElements, 2),
        (vec![(Cut, Inconclusive), (Counters, Fail)], None, Verdict::Inconclusive, 3),
        (vec![(Timing, Inconclusive)], None, Verdict::TimingInconclusive, 3),
        (vec![(Timing, Inconclusive), (Counters, Fail)], None, Verdict::Inconclusive, 3),
        (vec![(Timing, Inconclusive), (Counters, Inconclusive)], None, Verdict::Inconclusive, 3),
        (vec![(Elements, Fail)], Some(ExitCode::TimedOut), Verdict::TimedOut, 5),
        (vec![(Healed, Fail), (Elements, Fail)], Some(ExitCode::Interrupted), Verdict::FaultLeftBehind, 6),
        (vec![(Elements, Fail)], Some(ExitCode::Interrupted), Verdict::Interrupted, 130),
        (vec![(Timing, Inconclusive)], Some(ExitCode::Internal), Verdict::Internal, 70),
        (vec![(Cut, Inconclusive), (Counters, Fail)], Some(ExitCode::Failed), Verdict::Fail, 1),
        (vec![(Cut, Inconclusive), (Elements, Fail)], Some(ExitCode::Failed), Verdict::WrongElements, 2),
        (vec![(Counters, Fail)], Some(ExitCode::Inconclusive), Verdict::Inconclusive, 3),
    ];
    for (checks, ended, verdict, code) in cases {
        let results: Vec<_> = checks.iter().map(|(class, status)| result(*class, *status)).collect();
        let (given, exit) = judge(&results, ended);
        assert_eq!((given, exit.code()), (verdict, code), "{checks:?} {ended:?}");
    }
}

#[test]
fn with_repetitions_the_top_is_the_worst_run_and_every_run_is_kept() {
    let runs = vec![costing(10), bent(|run| run.iterations[3].wrong_elements = 7), costing(40)];
    let summary = Summary::of_repeats(&suite_01(), runs).unwrap();
    assert_eq!((summary.exit_code, summary.wrong_elements(), summary.runs.len()), (2, 7, 3));
    let passing = Summary::of_repeats(&suite_01(), vec![costing(10), costing(40), costing(20)]).unwrap();
    assert_eq!((passing.exit_code, passing.hit_iteration.unwrap().over_millis.round()), (0, 40.0));
    assert!(Summary::of_repeats(&suite_01(), vec![]).is_none());
    assert!(Summary::of_repeats(&suite_01(), vec![costing(10)]).unwrap().runs.is_empty());
}

#[test]
fn over_repetitions_the_hit_iteration_has_the_limit_for_the_median_and_twice_for_each() {
    let code = |costs: &[u64]| {
        let runs = costs.iter().map(|cost| costing(*cost)).collect();
        Summary::of_repeats(&suite_01(), runs).unwrap().exit_code
    };
    assert_eq!(code(&[20, 30, 99]), 0);
    assert_eq!(code(&[20, 30, 101]), 1, "the worst is over twice the limit");
    assert_eq!(code(&[20, 51, 60]), 1, "the median is over the limit");
    assert_eq!(code(&[20, 60]), 1, "two runs have no median to speak of");
}

#[test]
fn a_summary_reads_back_as_it_was_and_has_the_shape_of_its_schema() {
    let mut summary = Summary::of_repeats(&suite_01(), vec![costing(10), costing(20)]).unwrap();
    summary.switch.insert(3, 17);
    summary.switches.insert(3, vec![SwitchRecord { epoch: 1, collective: 17, ..SwitchRecord::default() }]);
    let text = serde_json::to_string(&summary).unwrap();
    assert!(serde_json::from_str::<Summary>(&text).unwrap() == summary);
    let schema = summary_schema();
    assert_eq!(departures(&schema, &text), vec![]);
    // The comparison is able to fail.
    let bad = text.replacen("\"exit_code\":0", "\"exit_cod\":0", 1);
    assert!(!departures(&schema, &bad).is_empty());
}

#[test]
fn a_summary_has_every_field_of_the_contract() {
    let summary = serde_json::to_value(bent(|run| run.switch = [(0, 4)].into())).unwrap();
    for field in [
        "version",
        "verdict",
        "exit_code",
        "suite",
        "cluster",
        "backend",
        "checks",
        "baseline",
        "iterations",
        "faults",
        "repairs",
        "transport",
        "hit_iteration",
        "fault_view",
        "switch",
        "environment",
    ] {
        assert!(!summary[field].is_null(), "{field}");
    }
    for (pointer, fields) in [
        ("/checks/0", &["name", "status", "expected", "actual", "unit"][..]),
        ("/baseline", &["millis", "mad_percent", "tcp_goodput_bits_s", "t0_millis"]),
        ("/iterations/0", &["index", "millis", "checked_elements", "wrong_elements", "nics"]),
        ("/iterations/0/nics/node-1/mlx5_0", &["rx_bytes", "tx_bytes", "passed_rx_bytes", "passed_tx_bytes"]),
        (
            "/faults/0",
            &[
                "spec",
                "fired",
                "iteration",
                "asked_bytes",
                "bytes_before",
                "packets_dropped",
                "fired_at_ns",
                "first_drop_ns",
                "healed",
            ],
        ),
        (
            "/repairs/0",
            &["rank", "peer", "nic", "cause", "first_drop_to_detect_ms", "detect_to_resume_ms", "replayed_bytes"],
        ),
        ("/transport", &["payload_bytes", "replayed_bytes", "paths_suspected", "paths_failed"]),
        ("/hit_iteration", &["ideal_millis", "over_millis"]),
        ("/fault_view/0/0", &["node", "nic", "rail", "state", "cause"]),
    ] {
        for field in fields {
            assert!(!summary.pointer(pointer).unwrap()[field].is_null(), "{pointer}/{field}");
        }
    }
    assert_eq!(summary["iterations"][0]["index"], 1);
}

#[test]
fn a_run_on_the_screen() {
    insta::assert_snapshot!(run_text(&bent(|_| {}), Paint::Plain));
}

#[test]
fn a_bad_run_on_the_screen() {
    let mut summary = bent(|run| {
        run.iterations.truncate(5);
        run.iterations[4].wrong_elements = 3;
        run.iterations[2].nics.remove("node-3");
        run.faults[0].healed = false;
        run.faults[0].packets_dropped = 0;
        run.repairs[0].first_drop_to_detect_ms = None;
        run.goodput_bits_s.clear();
    });
    summary.ended_early = Some("rank 4 was killed in iteration 6".into());
    insta::assert_snapshot!(run_text(&summary, Paint::Plain));
}

#[test]
fn colour_only_repeats_what_a_word_says() {
    let summary = bent(|run| run.iterations[4].wrong_elements = 3);
    let coloured = run_text(&summary, Paint::Colour);
    assert!(coloured.contains("\u{1b}[31m"));
    let mut plain = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        rest = after.split_once('m').unwrap().1;
    }
    plain.push_str(rest);
    assert_eq!(plain, run_text(&summary, Paint::Plain));
}

#[test]
fn published_figures_stand_beside_ours_as_ratios() {
    let suites = Path::new(env!("CARGO_MANIFEST_DIR")).join("../suites/01.yaml");
    let reference = Reference::load(&suites, &suite_01().reference.unwrap()).unwrap();
    insta::assert_snapshot!(reference.beside(&bent(|_| {})));
    let missing = Reference::load(&suites, "nowhere/99.yaml").unwrap_err();
    assert!(matches!(&missing, ReferenceError::Missing { name, .. } if name == "nowhere/99.yaml"), "{missing}");
}

#[test]
fn junit_has_one_case_for_every_check_of_every_repetition() {
    let runs = vec![costing(10), bent(|run| run.iterations[3].wrong_elements = 7)];
    let mut summary = Summary::of_repeats(&suite_01(), runs).unwrap();
    summary.runs[0].checks[3].status = CheckStatus::Note;
    summary.runs[1].ended_early = Some("interrupted <by> the user".into());
    let xml = junit(&summary).unwrap();
    let checks: usize = summary.runs.iter().map(|run| run.checks.len()).sum();
    assert_eq!(xml.matches("<testcase ").count(), checks + 1);
    assert_eq!(xml.matches("<testsuite ").count(), 2);
    assert_eq!(xml.matches("<failure ").count(), 1);
    assert_eq!(xml.matches("<error ").count(), 1);
    assert_eq!(xml.matches("<skipped ").count(), 1);
    assert!(xml.contains("interrupted &lt;by&gt; the user"), "{xml}");
    assert!(xml.contains("7 wrong elements, expected 0"), "{xml}");
}

#[test]
fn every_event_reads_back() {
    let record = record_01();
    let events = [
        Event::Started {
            row: None,
            repetition: 1,
            suite: Box::new(suite_01()),
            backend: "host".into(),
            bytes: record.bytes,
            ranks_per_node: 2,
            environment: Default::default(),
        },
        Event::Goodput(record.goodput_bits_s.clone()),
        Event::Baseline(record.baseline[0].clone()),
        Event::Iteration(record.iterations[2].clone()),
        Event::Fault(record.faults[0].clone()),
        Event::Repair(record.repairs[0].clone()),
        Event::FaultView { rank: 0, entries: record.fault_view[&0].clone() },
        Event::Transport(record.transport),
        Event::Switch([(0, 4)].into()),
        Event::Switches([(0, vec![SwitchRecord { epoch: 1, collective: 4, ..SwitchRecord::default() }])].into()),
        Event::Check(result(CheckClass::Timing, CheckStatus::Note)),
        Event::Ended { verdict: Verdict::Pass, exit_code: 0 },
    ];
    let schema = event_schema();
    for event in events {
        let line = EventLine { version: EVENT_VERSION, at_ns: 1, event };
        let text = serde_json::to_string(&line).unwrap();
        assert!(!text.contains('\n'));
        assert_eq!(serde_json::from_str::<EventLine>(&text).unwrap(), line);
        assert_eq!(departures(&schema, &text), vec![], "{text}");
    }
}

/// `record` as the events of one repetition.
fn told(record: &RunRecord, repetition: u32) -> Vec<Event> {
    let mut events = vec![Event::Started {
        row: None,
        repetition,
        suite: Box::new(suite_01()),
        backend: "host".into(),
        bytes: record.bytes,
        ranks_per_node: record.ranks_per_node,
        environment: context().environment,
    }];
    events.push(Event::Goodput(record.goodput_bits_s.clone()));
    events.extend(record.baseline.iter().cloned().map(Event::Baseline));
    events.extend(record.iterations.iter().cloned().map(Event::Iteration));
    events.extend(record.faults.iter().cloned().map(Event::Fault));
    events.extend(record.repairs.iter().cloned().map(Event::Repair));
    events.extend(record.fault_view.iter().map(|(rank, view)| Event::FaultView { rank: *rank, entries: view.clone() }));
    events.push(Event::Transport(record.transport));
    events.push(Event::Switch(record.switch.clone()));
    events.push(Event::Switches(record.switches.clone()));
    events
}

#[test]
fn a_recorded_run_is_rebuilt_from_its_events_even_when_the_bench_was_killed() {
    let place = tempfile::tempdir().unwrap();
    let folder = ResultsFolder::open(place.path()).unwrap();
    let mut log = folder.event_log().unwrap();
    let mut second = record_01();
    second.iterations.truncate(4);
    log.record(0, Event::Note { text: "building the cluster".into() }).unwrap();
    for event in told(&record_01(), 1) {
        log.record(1, event).unwrap();
    }
    log.record(2, Event::Check(result(CheckClass::Cut, CheckStatus::Pass))).unwrap();
    log.record(3, Event::Ended { verdict: Verdict::Pass, exit_code: 0 }).unwrap();
    for event in told(&second, 2) {
        log.record(4, event).unwrap();
    }
    let mut text = std::fs::read_to_string(place.path().join("run.jsonl")).unwrap();
    text.push_str("{\"version\":1,\"at_ns\":9,\"eve");
    let runs = rebuild(&text).unwrap();
    assert_eq!(runs.len(), 2);
    assert!(runs[0].record == record_01() && runs[1].record == second);
    assert_eq!((runs[0].suite.clone(), runs[0].checks.len()), (suite_01(), 1));
    assert_eq!((runs[0].ended, runs[1].ended), (Some((Verdict::Pass, 0)), None));
}

#[test]
fn lines_that_are_no_events_are_told_by_their_number() {
    let event = |event| serde_json::to_string(&EventLine { version: EVENT_VERSION, at_ns: 0, event }).unwrap();
    let note = event(Event::Note { text: "x".into() });
    let error = |text: &str| rebuild(text).unwrap_err();
    assert!(matches!(error(&format!("{note}\nnonsense\n")), RebuildError::Malformed { line: 2, .. }));
    let newer = note.replacen("\"version\":1", "\"version\":2", 1);
    assert!(matches!(error(&format!("{newer}\n")), RebuildError::Version { line: 1, version: 2 }));
    let early = event(Event::Switch([(0, 1)].into()));
    assert!(matches!(error(&format!("{note}\n{early}\n")), RebuildError::NotStarted { line: 2 }));
    assert!(rebuild("").unwrap().is_empty());
}
