//! Each shape of output, in a file of our own making; and what we print reads back, whatever a log puts in between.

use proptest::prelude::*;

use super::*;
use crate::perf::sweep::{Half, Row};
use crate::perf::text;
use crate::perf::{Collective, Options};

fn half(time_us: f64, alg_bw: f64, bus_bw: f64, check: Check) -> Option<ReadHalf> {
    Some(ReadHalf { time_us, alg_bw, bus_bw, check, more: vec![] })
}

#[test]
fn a_release_of_today_is_read_whole() {
    let sweep = read(include_str!("golden/today.txt")).unwrap();
    assert_eq!(sweep.program.as_deref(), Some("all_reduce_perf"));
    assert_eq!((sweep.rows.len(), sweep.unfinished, sweep.foreign, sweep.concluded), (3, 0, 0, true));
    assert_eq!((sweep.out_of_bounds, sweep.average_bus_bw), (Some((1, false)), Some(2.545)));
    let last = &sweep.rows[2];
    assert_eq!((last.size, last.count, last.dtype.as_str()), (1 << 30, 1 << 28, "float"));
    assert_eq!((last.op.as_deref(), last.root), (Some("sum"), Some(-1)));
    assert_eq!(last.out_of_place, half(508_286.0, 2.11, 3.52, Check::Wrong(0)));
    assert_eq!(last.in_place, half(508_504.0, 2.11, 3.52, Check::Wrong(3)));
    assert_eq!(sweep.wrong(), 3);
}

#[test]
fn a_release_before_2_13_has_deviations_and_no_root() {
    let sweep = read(include_str!("golden/before-2.13.txt")).unwrap();
    assert_eq!((sweep.rows.len(), sweep.foreign, sweep.concluded), (3, 0, true));
    assert_eq!(sweep.out_of_bounds, Some((0, true)));
    assert_eq!((sweep.rows[0].op.as_deref(), sweep.rows[0].root), (Some("sum"), None));
    assert_eq!(sweep.rows[0].out_of_place, half(49.49, 0.02, 0.03, Check::Deviation(1e-7)));
    assert_eq!(sweep.rows[2].in_place, half(50.77, 0.08, 0.13, Check::Unchecked));
}

#[test]
fn log_lines_may_come_between_any_two_pieces() {
    let sweep = read(include_str!("golden/interleaved.txt")).unwrap();
    let sizes: Vec<u64> = sweep.rows.iter().map(|row| row.size).collect();
    // The first row's root is glued to a log line, so that nobody can tell where it ends.
    assert_eq!(sizes, [262_144, 524_288]);
    assert_eq!(sweep.rows[0].out_of_place, half(120.5, 2.18, 1.63, Check::Wrong(0)));
    assert_eq!(sweep.rows[0].in_place, half(118.0, 2.22, 1.67, Check::Unchecked));
    assert_eq!(sweep.rows[1].in_place, half(199.0, 2.63, 1.98, Check::Unchecked));
    assert_eq!(sweep.unfinished, 1, "the last row was begun");
    assert_eq!(sweep.rows[0].op.as_deref(), Some("none"));
}

#[test]
fn columns_are_found_by_their_heads_and_those_unknown_are_kept() {
    let sweep = read(include_str!("golden/columns.txt")).unwrap();
    assert_eq!((sweep.rows.len(), sweep.foreign, sweep.concluded), (2, 0, false));
    let first = &sweep.rows[0];
    assert_eq!((first.size, first.dtype.as_str(), first.root), (1024, "bfloat16", Some(0)));
    let in_place = first.in_place.as_ref().unwrap();
    assert_eq!((in_place.time_us, in_place.bus_bw, in_place.check), (1.2e6, 3e-2, Check::Wrong(2000)));
    let names: Vec<&str> = in_place.more.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["i_min", "i_max", "i_p99", "i_cv%"]);
    assert_eq!(in_place.more[1].1, Some(1.3e8));
    assert_eq!(sweep.rows[1].in_place, None, "N/A throughout");
}

#[test]
fn json_is_read_with_its_words_for_booleans_and_numbers() {
    let sweep = read(include_str!("golden/whole.json")).unwrap();
    assert_eq!((sweep.rows.len(), sweep.concluded, sweep.out_of_bounds), (2, true, Some((1, false))));
    assert_eq!(sweep.rows[0].in_place, None);
    assert_eq!(sweep.rows[0].root, Some(-1));
    let odd = sweep.rows[1].out_of_place.as_ref().unwrap();
    assert_eq!((odd.time_us, odd.check), (13.0, Check::Unchecked));
    assert!(odd.bus_bw.is_nan());
    assert_eq!(sweep.wrong(), 5);
}

#[test]
fn a_partial_json_has_no_end() {
    let mut document: serde_json::Value = serde_json::from_str(include_str!("golden/whole.json")).unwrap();
    for key in ["end_time", "out_of_bounds", "average_bus_bandwidth", "nccl_version"] {
        document.as_object_mut().unwrap().remove(key);
    }
    let sweep = read(&document.to_string()).unwrap();
    assert_eq!((sweep.rows.len(), sweep.concluded, sweep.out_of_bounds), (2, false, None));
}

#[test]
fn what_is_no_output_of_a_test_is_refused() {
    for (text, said) in [
        ("", "no row"),
        ("hello\nworld 1 2 3 4 5", "no row"),
        ("{\"results\": 3}", "no `results`"),
        ("{", "EOF"),
        ("{\"results\": [{\"size\": 8}]}", "without `count`"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text:?}: {error}");
    }
    // A test that was killed before its first row.
    let header = include_str!("golden/today.txt").lines().take(11).collect::<Vec<_>>().join("\n");
    assert_eq!(read(&header).unwrap().rows, []);
}

fn any_half(per_iteration: bool) -> impl Strategy<Value = Half> {
    let time = prop_oneof![0.01f64..100.0, 100.0f64..1e6, 1e6f64..1e12];
    (time, 0f64..1000.0, prop::option::of(prop_oneof![Just(0u64), 1u64..10_000_000])).prop_map(
        move |(time_us, alg_bw, wrong)| Half {
            time_us,
            alg_bw,
            bus_bw: alg_bw * 1.5,
            checked: wrong.map(|_| 1 << 30),
            wrong,
            first_wrong: None,
            times_us: if per_iteration { vec![time_us * 0.5, time_us, time_us * 1.5] } else { vec![] },
        },
    )
}

fn any_row(per_iteration: bool) -> impl Strategy<Value = Row> {
    let halves = (any_half(per_iteration), prop::option::of(any_half(per_iteration)));
    (1u64..1 << 40, 0usize..8, -1i64..64, any::<bool>(), halves).prop_map(
        |(count, dtype, root, reduces, (out_of_place, in_place))| {
            let dtype = r2cc::DType::ALL[dtype];
            Row {
                size: count * dtype.size_bytes() as u64,
                count,
                dtype: crate::perf::options::nccl_name(dtype).to_owned(),
                op: if reduces { "avg" } else { "none" }.to_owned(),
                root,
                out_of_place,
                in_place,
            }
        },
    )
}

/// A number, within what its column's places keep.
fn close(read: f64, written: f64) -> bool {
    (read - written).abs() <= (written.abs() * 0.06).max(0.0051)
}

fn check_half(read: &Option<ReadHalf>, written: &Half) {
    let read = read.as_ref().expect("a half that is defined");
    assert!(close(read.time_us, written.time_us), "{read:?} {written:?}");
    assert!(close(read.alg_bw, written.alg_bw) && close(read.bus_bw, written.bus_bw), "{read:?} {written:?}");
    assert_eq!(read.check, written.wrong.map_or(Check::Unchecked, Check::Wrong));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_we_print_reads_back_with_a_log_between_any_two_pieces(
        (per_iteration, rows) in any::<bool>()
            .prop_flat_map(|p| (Just(p), prop::collection::vec(any_row(p), 0..6))),
        breaks in prop::collection::vec(0usize..3, 24),
    ) {
        let options = Options { collective: Collective::Reduce, per_iteration, ..Options::default() };
        let mut output = text::header(&options, &[]);
        let mut breaks = breaks.into_iter().cycle();
        let half_words = if per_iteration { 8 } else { 4 };
        for row in &rows {
            let line = text::row(row, per_iteration);
            let words: Vec<&str> = line.split_whitespace().collect();
            for piece in [&words[..5], &words[5..5 + half_words], &words[5 + half_words..]] {
                output.push_str("   ");
                output.push_str(&piece.join("  "));
                match breaks.next() {
                    Some(1) => output.push_str("\nnode-1:4711:4720 [0] NCCL INFO Channel 00/02 : 0 1\n"),
                    Some(2) => output.push_str(" node-1:4711:4720 [0] NCCL WARN 12 of 3 4.5 6\n"),
                    _ => {}
                }
            }
            output.push('\n');
        }
        output.push_str(&text::footer(&options, &rows));
        let sweep = read(&output).unwrap();
        prop_assert_eq!(sweep.rows.len(), rows.len(), "{}", output);
        prop_assert!(sweep.concluded && sweep.unfinished == 0);
        prop_assert_eq!(sweep.program.as_deref(), Some("reduce_perf"));
        for (read, written) in sweep.rows.iter().zip(&rows) {
            prop_assert_eq!((read.size, read.count, read.root), (written.size, written.count, Some(written.root)));
            prop_assert_eq!((&read.dtype, read.op.as_ref()), (&written.dtype, Some(&written.op)));
            check_half(&read.out_of_place, &written.out_of_place);
            match &written.in_place {
                Some(half) => check_half(&read.in_place, half),
                None => prop_assert_eq!(&read.in_place, &None),
            }
        }
        let failed = rows.iter().flat_map(Row::halves).filter(|half| half.wrong.is_some_and(|w| w > 0)).count();
        prop_assert_eq!(sweep.out_of_bounds, Some((failed as u64, failed == 0)));
    }

    #[test]
    fn nothing_that_is_fed_to_the_reader_makes_it_panic(text in "[ -~\n]{0,400}") {
        drop(read(&text));
    }
}
