//! Every limit from both sides, on a hand-built run.

use r2cc_inject::fault::Fault;

use super::record::{FaultRecord, FaultViewEntry, Means, RunRecord, WrongElement};
use super::sample::{CUT_AFTER_MS, HEALTHY_MS, HIT_MS, MS, NICS, PORT_BYTES, counters, record_01, suite_01};
use super::{CheckClass, CheckResult, CheckStatus, evaluate, figures, keep_only, place_faults};
use crate::suite::{Against, Near, NodeBytes, Percent, Statistic, Suite, TimeRatio, Timing};

fn check(suite: &Suite, record: &RunRecord, name: &str) -> CheckResult {
    let results = evaluate(suite, record, Timing::Enforced);
    let names: Vec<_> = results.iter().map(|result| result.name.clone()).collect();
    results.into_iter().find(|result| result.name == name).unwrap_or_else(|| panic!("no {name} in {names:?}"))
}

fn status(suite: &Suite, record: &RunRecord, name: &str) -> CheckStatus {
    check(suite, record, name).status
}

/// The status of `name` after bending the good run.
fn bent(name: &str, bend: impl FnOnce(&mut RunRecord)) -> CheckStatus {
    let mut record = record_01();
    bend(&mut record);
    status(&suite_01(), &record, name)
}

fn asking(name: &str, ask: impl FnOnce(&mut Suite), bend: impl FnOnce(&mut RunRecord)) -> CheckStatus {
    let (mut suite, mut record) = (suite_01(), record_01());
    ask(&mut suite);
    bend(&mut record);
    status(&suite, &record, name)
}

fn set_millis(record: &mut RunRecord, index: usize, millis: f64) {
    let iteration = &mut record.iterations[index - 1];
    iteration.end_ns = iteration.start_ns + (millis * 1e6).round() as u64;
}

use CheckStatus::{Fail, Inconclusive, Note, Pass};

#[test]
fn a_run_in_which_everything_holds_passes_every_check() {
    let results = evaluate(&suite_01(), &record_01(), Timing::Enforced);
    assert!(results.iter().all(|result| result.status == Pass), "{results:#?}");
    insta::assert_snapshot!(
        results
            .iter()
            .map(|r| format!("{}: {} {} (expected {})\n", r.name, r.actual, r.unit, r.expected))
            .collect::<String>()
    );
}

#[test]
fn one_wrong_element_anywhere_fails_and_names_rank_and_element() {
    assert_eq!(bent("elements", |run| run.baseline[1].wrong_elements = 1), Fail);
    let mut record = record_01();
    record.iterations[8].wrong_elements = 2;
    record.iterations[8].first_wrong =
        Some(WrongElement { rank: 4, element: 123, expected: "8".into(), actual: "NaN".into() });
    let result = check(&suite_01(), &record, "elements");
    assert_eq!((result.status, result.class), (Fail, CheckClass::Elements));
    assert_eq!(
        result.detail.as_deref(),
        Some("iteration 9: 2 wrong, first on rank 4, element 123: expected 8, found NaN")
    );
}

#[test]
fn an_element_that_nobody_compared_fails() {
    assert_eq!(bent("elements_checked", |run| run.iterations[4].checked_elements -= 1), Fail);
    assert_eq!(bent("elements_checked", |run| run.baseline[0].checked_elements = 0), Fail);
    assert_eq!(bent("elements_checked", |run| drop(run.iterations.pop())), Fail);
}

#[test]
fn a_cut_counts_only_inside_the_asked_iteration_of_every_rank() {
    let at = |run: &mut RunRecord, ns: u64| run.faults[0].fired_at_ns = Some(ns);
    let last_start = |run: &RunRecord| run.iterations[2].ranks[&5].start_ns;
    let first_end = |run: &RunRecord| run.iterations[2].ranks[&0].end_ns;
    assert_eq!(bent("cut_iteration", |run| at(run, last_start(run))), Pass);
    assert_eq!(bent("cut_iteration", |run| at(run, last_start(run) - 1)), Inconclusive);
    assert_eq!(bent("cut_iteration", |run| at(run, first_end(run))), Pass);
    assert_eq!(bent("cut_iteration", |run| at(run, first_end(run) + 1)), Inconclusive);
    // Whole in another iteration, between two, and never.
    assert_eq!(bent("cut_iteration", |run| at(run, run.iterations[3].start_ns + 100 * MS)), Inconclusive);
    assert_eq!(bent("cut_iteration", |run| at(run, run.iterations[2].end_ns + 10 * MS)), Inconclusive);
    assert_eq!(bent("cut_iteration", |run| run.faults[0].fired = false), Inconclusive);
    assert_eq!(bent("cut_iteration", |run| run.faults.clear()), Inconclusive);
    assert_eq!(bent("cut_iteration", |run| run.iterations[2].ranks.clear()), Inconclusive);
}

#[test]
fn a_cut_placed_at_the_call_may_come_before_the_other_ranks_call() {
    let at_call = |suite: &mut Suite| {
        suite.faults[0] = "drop@node-1/mlx5_2 from allreduce#3 for run".parse::<Fault>().unwrap();
    };
    let at = |offset: i64| {
        move |run: &mut RunRecord| run.faults[0].fired_at_ns = run.iterations[2].start_ns.checked_add_signed(offset)
    };
    assert_eq!(asking("cut_iteration", at_call, at(0)), Pass);
    assert_eq!(asking("cut_iteration", at_call, at(-1)), Inconclusive);
    assert_eq!(asking("cut_iteration", |_| {}, at(0)), Inconclusive, "not with a byte position");
}

#[test]
fn a_fault_that_stopped_nothing_is_inconclusive_and_one_packet_is_enough() {
    assert_eq!(bent("fault_stopped", |run| run.faults[0].packets_dropped = 1), Pass);
    assert_eq!(bent("fault_stopped", |run| run.faults[0].packets_dropped = 0), Inconclusive);
}

#[test]
fn a_fault_left_behind_fails_even_when_other_checks_are_left_out() {
    assert_eq!(bent("fault_healed", |run| run.faults[0].healed = false), Fail);
    let mut record = record_01();
    record.faults[0].healed = false;
    let mut results = evaluate(&suite_01(), &record, Timing::Enforced);
    assert_eq!(keep_only(&mut results, "time_ratio"), 1);
    let left: Vec<_> = results.iter().filter(|r| r.status != CheckStatus::Skipped).map(|r| r.name.as_str()).collect();
    assert_eq!(left, ["fault_healed", "time_ratio 4-10"]);
}

#[test]
fn overshoot_is_at_most_64_kib_or_one_percent_of_the_port() {
    // 1 % of 39 MB is more than 64 KiB.
    let over = |bytes: i64| {
        bent("cut_overshoot", |run| run.faults[0].bytes_before = (PORT_BYTES / 4).checked_add_signed(bytes))
    };
    assert_eq!(over(0), Pass);
    assert_eq!(over(-1), Fail);
    assert_eq!(over(390_000), Pass);
    assert_eq!(over(390_001), Fail);
    let small = |bytes: u64| {
        bent("cut_overshoot", |run| {
            for iteration in &mut run.baseline {
                iteration.nics = counters(1_000_000, &NICS);
            }
            run.faults[0].bytes_before = Some(PORT_BYTES / 4 + bytes);
        })
    };
    assert_eq!(small(65_536), Pass);
    assert_eq!(small(65_537), Fail);
    assert_eq!(bent("cut_overshoot", |run| run.faults[0].bytes_before = None), Inconclusive);
}

#[test]
fn one_byte_passed_after_the_cut_fails_in_the_direction_that_was_cut() {
    let port = |run: &mut RunRecord, rx: u64, tx: u64| {
        let port = run.iterations[9].nics.get_mut("node-1").unwrap().get_mut("mlx5_2").unwrap();
        (port.passed_rx_bytes, port.passed_tx_bytes) = (rx, tx);
        // The interface goes on counting what the program drops.
        port.rx_bytes = 50_000;
    };
    let direction = |text: &'static str| {
        move |suite: &mut Suite| {
            suite.faults[0] =
                format!("drop@node-1/mlx5_2{text} from allreduce#3+25% for run").parse::<Fault>().unwrap();
        }
    };
    let silent = |text, rx, tx| asking("silent_after_cut", direction(text), |run| port(run, rx, tx));
    assert_eq!(silent("", 0, 0), Pass);
    assert_eq!(silent("", 1, 0), Fail);
    assert_eq!(silent("", 0, 1), Fail);
    assert_eq!(silent("/rx", 0, 1), Pass);
    assert_eq!(silent("/rx", 1, 0), Fail);
    assert_eq!(silent("/tx", 1, 0), Pass);
    assert_eq!(silent("/tx", 0, 1), Fail);
    assert_eq!(bent("silent_after_cut", |run| run.iterations.truncate(3)), Inconclusive);
    // A rail is cut on every node.
    let rail = |suite: &mut Suite| {
        suite.faults[0] = "drop@switch/rail-2 from allreduce#3+25% for run".parse::<Fault>().unwrap();
    };
    assert_eq!(asking("silent_after_cut", rail, |_| {}), Pass);
    let on_node_3 = |run: &mut RunRecord| {
        run.iterations[5].nics.get_mut("node-3").unwrap().get_mut("mlx5_2").unwrap().passed_rx_bytes = 1;
    };
    assert_eq!(asking("silent_after_cut", rail, on_node_3), Fail);
    assert_eq!(bent("silent_after_cut", on_node_3), Pass);
}

#[test]
fn a_port_that_is_blocked_at_the_switch_may_go_on_sending_and_receives_nothing() {
    let moved = |rx: u64, tx: u64| {
        let mut record = record_01();
        record.faults[0].means = Means::Change;
        let port = record.iterations[9].nics.get_mut("node-1").unwrap().get_mut("mlx5_2").unwrap();
        (port.passed_rx_bytes, port.passed_tx_bytes) = (rx, tx);
        check(&suite_01(), &record, "silent_after_cut")
    };
    assert_eq!((moved(0, 9000).status, moved(0, 9000).unit.as_str()), (Pass, "bytes received"));
    assert_eq!(moved(1, 0).status, Fail);
}

#[test]
fn a_link_that_is_set_down_is_proved_by_its_carrier_and_by_counters_that_stand_still() {
    let down = |suite: &mut Suite| {
        suite.faults[0] = "link-down@node-1/mlx5_2 from allreduce#3+25% for run".parse::<Fault>().unwrap();
    };
    let carrier = |lost| {
        asking("carrier_lost", down, |run| {
            run.faults[0].carrier_lost = lost;
            // Nothing is dropped where nothing can be sent.
            run.faults[0].packets_dropped = 0;
        })
    };
    assert_eq!(carrier(Some(true)), Pass);
    assert_eq!(carrier(Some(false)), Inconclusive);
    assert_eq!(carrier(None), Inconclusive);
    let moved = |interface: u64, programs: u64| {
        asking("silent_after_cut", down, |run| {
            run.faults[0].means = Means::Change;
            let port = run.iterations[9].nics.get_mut("node-1").unwrap().get_mut("mlx5_2").unwrap();
            (port.tx_bytes, port.passed_tx_bytes) = (interface, programs);
        })
    };
    assert_eq!(moved(0, 0), Pass);
    assert_eq!(moved(0, 60), Pass, "what a program saw on its way to a dead interface did not move");
    assert_eq!(moved(1, 0), Fail);
    let mut suite = suite_01();
    down(&mut suite);
    let results = evaluate(&suite, &record_01(), Timing::Enforced);
    assert!(results.iter().all(|result| result.name != "fault_stopped"));
}

#[test]
fn silence_is_asked_only_until_the_fault_heals() {
    // By the clock of the healing, or by the fault's own text where that is not known.
    let by_clock = |run: &mut RunRecord| run.faults[0].healed_at_ns = Some(run.iterations[5].start_ns + 1);
    let by_text = |run: &mut RunRecord| {
        run.faults[0].spec = "drop@node-1/mlx5_2 from allreduce#3+25% until allreduce#6".into();
    };
    for heal in [&by_clock as &dyn Fn(&mut RunRecord), &by_text] {
        let healed = |run: &mut RunRecord| {
            heal(run);
            run.iterations[5].nics = counters(PORT_BYTES, &NICS);
        };
        assert_eq!(bent("silent_after_cut", healed), Pass);
        assert_eq!(bent("survivors_share", healed), Pass);
        let mut record = record_01();
        healed(&mut record);
        let indices: Vec<u32> = figures::degraded(&record, &record.faults[0]).iter().map(|it| it.index).collect();
        assert_eq!(indices, [4, 5]);
        record.iterations[4].nics = counters(PORT_BYTES, &NICS);
        assert_eq!(status(&suite_01(), &record, "silent_after_cut"), Fail);
    }
}

#[test]
fn faults_are_placed_by_the_ranks_clocks() {
    let placed = |at_ns: Option<u64>, fired| {
        let mut record = record_01();
        record.faults[0].iteration = Some(9);
        (record.faults[0].fired_at_ns, record.faults[0].fired) = (at_ns, fired);
        place_faults(&suite_01(), &mut record);
        record.faults[0].iteration
    };
    let run = record_01();
    assert_eq!(placed(run.faults[0].fired_at_ns, true), Some(3));
    assert_eq!(placed(run.faults[0].fired_at_ns, false), None);
    assert_eq!(placed(None, true), None);
    assert_eq!(placed(Some(run.iterations[2].start_ns), true), None, "rank 5 had not started");
    assert_eq!(placed(Some(run.iterations[6].end_ns + MS), true), None);
}

#[test]
fn survivors_carry_their_share_within_the_tolerance() {
    let move_bytes = |bytes: u64| {
        bent("survivors_share", |run| {
            let ports = run.iterations[6].nics.get_mut("node-1").unwrap();
            ports.get_mut("mlx5_0").unwrap().passed_rx_bytes += bytes;
            ports.get_mut("mlx5_3").unwrap().passed_rx_bytes -= bytes;
        })
    };
    // Half of 117 MB within 3 % is 1,755,000 bytes.
    assert_eq!(move_bytes(1_755_000), Pass);
    assert_eq!(move_bytes(1_756_000), Fail);
    assert_eq!(bent("survivors_share", |run| run.iterations.truncate(3)), Inconclusive);
}

#[test]
fn healthy_nics_share_equally_within_two_percent_over_the_baseline() {
    let add = |bytes: u64| {
        bent("healthy_nic_shares", |run| {
            for iteration in &mut run.baseline {
                let ports = iteration.nics.get_mut("node-2").unwrap();
                ports.get_mut("mlx5_0").unwrap().passed_rx_bytes += bytes;
                ports.get_mut("mlx5_3").unwrap().passed_rx_bytes -= bytes;
            }
        })
    };
    assert_eq!(add(780_000), Pass);
    assert_eq!(add(780_100), Fail);
    // The management interface is no data NIC.
    let chatty = |run: &mut RunRecord| {
        for iteration in &mut run.baseline {
            let port = iteration.nics["node-2"]["mlx5_0"];
            iteration.nics.get_mut("node-2").unwrap().insert("mgmt0".into(), port);
        }
    };
    assert_eq!(bent("healthy_nic_shares", chatty), Pass);
    assert_eq!(bent("healthy_nic_shares", |run| run.baseline.iter_mut().for_each(|it| it.nics.clear())), Inconclusive);
}

#[test]
fn a_healthy_ring_crosses_the_nics_about_once() {
    let payload = 2.0 * 5.0 / 6.0 * f64::from(64 << 20);
    let ratio = |ratio: f64| {
        bent("baseline_bytes", |run| {
            for iteration in &mut run.baseline {
                // All of node-2's bytes on one NIC, to hit the ratio exactly.
                let ports = iteration.nics.get_mut("node-2").unwrap();
                ports.values_mut().for_each(|port| port.passed_rx_bytes = 0);
                ports.get_mut("mlx5_0").unwrap().passed_rx_bytes = (payload * ratio) as u64;
            }
        })
    };
    assert_eq!((ratio(0.9995), ratio(0.998)), (Pass, Fail), "bytes that never crossed a NIC");
    assert_eq!((ratio(1.0999), ratio(1.101)), (Pass, Fail), "bytes that crossed more than once");
    assert_eq!(bent("baseline_bytes", |run| run.baseline.clear()), Inconclusive);
}

#[test]
fn node_bytes_are_relative_to_the_healthy_iterations() {
    let rule = |value| {
        move |suite: &mut Suite| {
            let iterations = "4-10".parse().unwrap();
            suite.checks.node_bytes =
                vec![NodeBytes { node: "node-1".into(), iterations, value, within: Percent(0.01) }];
        }
    };
    assert_eq!(asking("node_bytes node-1 4-10", rule(1.0), |_| {}), Pass);
    assert_eq!(asking("node_bytes node-1 4-10", rule(0.991), |_| {}), Pass);
    assert_eq!(asking("node_bytes node-1 4-10", rule(0.99), |_| {}), Fail);
}

#[test]
fn every_rank_must_name_the_place_and_nothing_else() {
    let entry = |nic: &str| FaultViewEntry { node: Some("node-2".into()), nic: Some(nic.into()), ..Default::default() };
    assert_eq!(bent("fault_view", |run| drop(run.fault_view.remove(&5))), Fail);
    assert_eq!(bent("fault_view", |run| run.fault_view.get_mut(&3).unwrap().clear()), Fail);
    assert_eq!(bent("fault_view", |run| run.fault_view.get_mut(&3).unwrap().push(entry("mlx5_0"))), Fail);
    let nothing = |suite: &mut Suite| suite.checks.fault_view = Some(vec![]);
    assert_eq!(asking("fault_view", nothing, |_| {}), Fail);
    assert_eq!(asking("fault_view", nothing, |run| run.fault_view.values_mut().for_each(Vec::clear)), Pass);
    let rail = |suite: &mut Suite| suite.checks.fault_view = Some(vec!["rail-2".into()]);
    let rail_view = |run: &mut RunRecord| {
        run.fault_view.values_mut().flatten().for_each(|entry| (entry.node, entry.nic) = (None, None));
    };
    assert_eq!(asking("fault_view", rail, rail_view), Pass);
    assert_eq!(asking("fault_view", rail, |_| {}), Fail, "a NIC is not the rail");
}

#[test]
fn event_counts_have_an_inclusive_limit() {
    let ask = |suite: &mut Suite| {
        suite.checks.readmissions_at_most = Some(4);
        suite.checks.paths_failed_at_most = Some(0);
        suite.checks.paths_down_at_end_at_most = Some(1);
        suite.checks.replayed_at_most = Some(Percent(0.005));
    };
    let readmitted = |n| asking("readmissions_at_most", ask, |run| run.transport.readmissions = n);
    assert_eq!((readmitted(4), readmitted(5)), (Pass, Fail));
    let failed = |n| asking("paths_failed_at_most", ask, |run| run.transport.paths_failed = n);
    assert_eq!((failed(0), failed(1)), (Pass, Fail));
    let down = |n| asking("paths_down_at_end_at_most", ask, |run| run.transport.paths_down_at_end = n);
    assert_eq!((down(1), down(2)), (Pass, Fail));
    let replayed = |n| asking("replayed_at_most", ask, |run| run.transport.replayed_bytes = n);
    assert_eq!((replayed(50_000_000), replayed(50_001_000)), (Pass, Fail));
    assert_eq!(asking("replayed_at_most", ask, |run| run.transport.payload_bytes = 0), Inconclusive);
}

#[test]
fn time_ratio_holds_for_each_iteration_from_both_sides() {
    let takes = |millis| bent("time_ratio 4-10", |run| set_millis(run, 7, millis));
    assert_eq!((takes(2448.0), takes(2448.1)), (Pass, Fail));
    assert_eq!((takes(2352.0), takes(2351.9)), (Pass, Fail));
    assert_eq!(bent("time_ratio 4-10", |run| run.iterations.truncate(9)), Fail);
    // Iterations outside the range do not matter.
    assert_eq!(bent("time_ratio 4-10", |run| set_millis(run, 3, 9999.0)), Pass);
}

#[test]
fn time_ratio_at_most_and_of_the_median() {
    let rule = |of| {
        move |suite: &mut Suite| {
            let iterations = "1-10".parse().unwrap();
            suite.checks.time_ratio.0 = vec![TimeRatio {
                iterations,
                value: None,
                within: None,
                at_most: Some(1.5),
                of,
                over: Against::Baseline,
            }];
        }
    };
    let all = |millis: f64| move |run: &mut RunRecord| (1..=10).for_each(|index| set_millis(run, index, millis));
    for of in [Statistic::Each, Statistic::Median] {
        assert_eq!(asking("time_ratio 1-10", rule(of), all(2400.0)), Pass);
        assert_eq!(asking("time_ratio 1-10", rule(of), all(2400.1)), Fail);
    }
    let one_slow = |run: &mut RunRecord| set_millis(run, 10, 9999.0);
    assert_eq!(asking("time_ratio 1-10", rule(Statistic::Median), one_slow), Pass);
    assert_eq!(asking("time_ratio 1-10", rule(Statistic::Each), one_slow), Fail);
}

#[test]
fn a_noisy_baseline_makes_every_timing_check_inconclusive_and_no_other() {
    let noisy = |factor: f64| {
        let mut record = record_01();
        for (iteration, sign) in record.baseline.iter_mut().zip([-1.0, -1.0, 0.0, 1.0, 1.0]) {
            let millis = HEALTHY_MS as f64 * (1.0 + sign * factor);
            iteration.end_ns = iteration.start_ns + (millis * 1e6).round() as u64;
        }
        evaluate(&suite_01(), &record, Timing::Enforced)
    };
    assert!(noisy(0.01).iter().all(|result| result.status == Pass));
    for result in noisy(0.0101) {
        let expected = if result.class == CheckClass::Timing { Inconclusive } else { Pass };
        assert_eq!(result.status, expected, "{}", result.name);
    }
    // Two iterations have no spread to speak of.
    assert_eq!(bent("baseline_spread", |run| run.baseline.truncate(2)), Inconclusive);
}

#[test]
fn the_baseline_is_compared_with_plain_tcp_of_the_same_run() {
    // T0 = 2 x 5/6 x 64 MiB x 8 / goodput; the slowest node counts.
    let bits = 2.0 * 5.0 / 6.0 * f64::from(64 << 20) * 8.0;
    let goodput = |ratio: f64| {
        bent("baseline_over_t0", |run| {
            *run.goodput_bits_s.get_mut("node-2").unwrap() = bits / (HEALTHY_MS as f64 / 1e3) * ratio;
            *run.goodput_bits_s.get_mut("node-1").unwrap() = 1e12;
            *run.goodput_bits_s.get_mut("node-3").unwrap() = 1e12;
        })
    };
    assert_eq!((goodput(1.06), goodput(1.0601)), (Pass, Fail));
    assert_eq!(bent("baseline_over_t0", |run| run.goodput_bits_s.clear()), Inconclusive);
}

#[test]
fn the_ideal_is_the_time_to_the_cut_plus_what_was_missing_at_the_degraded_rate() {
    let hit = figures::hit_iteration(&suite_01(), &record_01()).unwrap();
    // 400 ms, then three quarters of the bytes at a rate that takes 2400 ms for all.
    assert!((hit.ideal_millis - (CUT_AFTER_MS as f64 + 0.75 * 2400.0)).abs() < 1e-6, "{hit:?}");
    assert_eq!((hit.index, hit.millis), (3, HIT_MS as f64));
    assert!((hit.over_millis - 30.0).abs() < 1e-6, "{hit:?}");
    // The node that had received least decides.
    let mut record = record_01();
    record.faults[0].ports_at_firing.insert("node-2".into(), counters(PORT_BYTES / 8, &NICS)["node-2"].clone());
    let hit = figures::hit_iteration(&suite_01(), &record).unwrap();
    assert!((hit.ideal_millis - (400.0 + 0.875 * 2400.0)).abs() < 1e-3, "{hit:?}");
}

#[test]
fn the_hit_iteration_may_cost_its_limit_and_no_more() {
    let takes = |millis| bent("hit_over_ideal_ms", |run| set_millis(run, 3, millis));
    assert_eq!((takes(2249.9), takes(2250.2)), (Pass, Fail));
    assert_eq!(bent("hit_over_ideal_ms", |run| run.iterations.truncate(3)), Inconclusive);
    assert_eq!(bent("hit_over_ideal_ms", |run| run.faults[0].ports_at_firing.clear()), Inconclusive);
}

#[test]
fn of_two_cuts_in_one_iteration_the_last_counts_and_a_later_fault_ends_the_stretch() {
    let mut record = record_01();
    let second = FaultRecord {
        fired_at_ns: record.faults[0].fired_at_ns.map(|ns| ns + 200 * MS),
        ports_at_firing: counters(PORT_BYTES / 2, &NICS),
        ..record.faults[0].clone()
    };
    record.faults.push(second.clone());
    let hit = figures::hit_iteration(&suite_01(), &record).unwrap();
    assert!((hit.ideal_millis - (600.0 + 0.5 * 2400.0)).abs() < 1e-6, "{hit:?}");
    record.faults[1] = FaultRecord { iteration: Some(6), ..second };
    let indices: Vec<u32> = figures::degraded(&record, &record.faults[0]).iter().map(|it| it.index).collect();
    assert_eq!(indices, [4, 5]);
}

#[test]
fn the_slowest_detection_counts() {
    let after = |millis| {
        bent("detection_ms", |run| {
            let mut slow = run.repairs[0].clone();
            slow.first_drop_to_detect_ms = Some(millis);
            run.repairs.insert(0, slow);
        })
    };
    assert_eq!((after(50.0), after(50.1)), (Pass, Fail));
    assert_eq!(bent("detection_ms", |run| run.repairs.clear()), Inconclusive);
}

#[test]
fn advisory_timing_turns_timing_checks_into_notes_and_leaves_the_rest() {
    let mut record = record_01();
    set_millis(&mut record, 7, 5000.0);
    record.iterations[6].wrong_elements = 1;
    let results = evaluate(&suite_01(), &record, Timing::Advisory);
    let of = |name: &str| results.iter().find(|result| result.name == name).unwrap().status;
    assert_eq!((of("time_ratio 4-10"), of("detection_ms"), of("elements")), (Note, Pass, Fail));
    record.baseline.truncate(1);
    let results = evaluate(&suite_01(), &record, Timing::Advisory);
    assert!(results.iter().all(|r| r.class != CheckClass::Timing || r.status == Note), "{results:#?}");
}

#[test]
fn a_suite_with_two_faults_has_the_checks_of_each() {
    let mut suite = suite_01();
    suite.faults.push("drop@node-1/mlx5_3 from allreduce#3+40% for run".parse().unwrap());
    suite.checks.survivors_share = Some(Near { value: 1.0, within: Percent(0.03) });
    let mut record = record_01();
    record.faults.push(FaultRecord { packets_dropped: 0, ..record.faults[0].clone() });
    assert_eq!(status(&suite, &record, "fault_stopped 1"), Pass);
    assert_eq!(status(&suite, &record, "fault_stopped 2"), Inconclusive);
}

#[test]
fn an_empty_record_proves_nothing_and_breaks_nothing() {
    let results = evaluate(&suite_01(), &RunRecord::default(), Timing::Enforced);
    let passed: Vec<_> = results.iter().filter(|r| r.status == Pass).map(|r| r.name.as_str()).collect();
    assert_eq!(passed, ["elements"], "nothing was wrong, and nothing else is proved");
}
