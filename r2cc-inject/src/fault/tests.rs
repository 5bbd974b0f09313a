use proptest::prelude::*;

use super::*;

fn span() -> impl Strategy<Value = Duration> {
    (1_u64..1_000_000, 0_usize..SPAN_UNITS.len())
        .prop_map(|(value, unit)| Duration::from_nanos(value.saturating_mul(SPAN_UNITS[unit].1)))
}

fn op() -> impl Strategy<Value = Op> {
    proptest::sample::select(Op::ALL.to_vec())
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Drop),
        Just(Kind::LinkDown),
        (1_u32..=1_000_000).prop_map(|parts_per_million| Kind::Loss { parts_per_million }),
        (span(), span()).prop_map(|(down, up)| Kind::Flap { down, up }),
        (1_u64..).prop_map(|bits_per_second| Kind::Rate { bits_per_second }),
    ]
}

fn trigger() -> impl Strategy<Value = Trigger> {
    let offset = prop_oneof![
        Just(Offset::Start),
        (1_u32..=100_000).prop_map(Offset::MilliPercent),
        (0_u32..100_000, 1_u32..=100_000)
            .prop_map(|(least, more)| Offset::Between { least, most: (least + more).min(100_000) }),
        (1_u64..).prop_map(Offset::Bytes),
    ];
    let at = prop_oneof![Just(At::Call), Just(At::Wire)];
    prop_oneof![
        Just(Trigger::Now),
        span().prop_map(Trigger::After),
        (op(), 1_u64.., offset, at).prop_map(|(op, n, offset, at)| Trigger::Position(Position { op, n, offset, at })),
    ]
}

fn until() -> impl Strategy<Value = Until> {
    prop_oneof![
        Just(Until::Run),
        span().prop_map(Until::For),
        (op(), 1_u64..).prop_map(|(op, n)| Until::Call { op, n }),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    let direction = prop_oneof![Just(Direction::Both), Just(Direction::Rx), Just(Direction::Tx)];
    let name = "[a-z][a-z0-9_.-]{0,11}";
    (kind(), name, name, direction, trigger(), until()).prop_map(|(kind, node, nic, direction, from, until)| Fault {
        direction: match kind {
            Kind::LinkDown | Kind::Rate { .. } => Direction::Both,
            _ => direction,
        },
        kind,
        target: Target { node, nic },
        from,
        until,
    })
}

proptest! {
    #[test]
    fn printing_and_parsing_are_inverse(fault in fault()) {
        let text = fault.to_string();
        prop_assert_eq!(text.parse::<Fault>(), Ok(fault.clone()), "{}", text);
        let json = serde_json::to_string(&fault).unwrap();
        prop_assert_eq!(serde_json::from_str::<Fault>(&json).unwrap(), fault);
    }

    #[test]
    fn any_text_is_parsed_or_refused_with_a_column_inside_it(text in "\\PC{0,60}") {
        if let Err(error) = text.parse::<Fault>() {
            prop_assert!(error.column >= 1 && error.column <= text.chars().count() + 1);
        }
    }

    #[test]
    fn a_damaged_fault_is_parsed_or_refused(fault in fault(), at in 0_usize..80, with in "\\PC?") {
        let text = fault.to_string();
        let mut damaged: Vec<char> = text.chars().collect();
        let at = at % damaged.len();
        damaged.splice(at..=at, with.chars());
        let damaged: String = damaged.into_iter().collect();
        if let Ok(parsed) = damaged.parse::<Fault>() {
            prop_assert_eq!(parsed.to_string().parse::<Fault>(), Ok(parsed));
        }
    }
}

#[test]
fn the_example_of_the_design_means_what_it_says() {
    let fault: Fault = Fault::EXAMPLE.parse().unwrap();
    assert_eq!(
        fault,
        Fault {
            kind: Kind::Drop,
            target: Target { node: "node-1".into(), nic: "mlx5_2".into() },
            direction: Direction::Both,
            from: Trigger::Position(Position {
                op: Op::AllReduce,
                n: 3,
                offset: Offset::MilliPercent(25_000),
                at: At::Call
            }),
            until: Until::Run,
        }
    );
    assert_eq!(fault.to_string(), Fault::EXAMPLE);
    let rail: Fault = "drop@switch/rail-2 from now for run".parse().unwrap();
    assert!(rail.target.is_rail());
}

#[test]
fn each_form_of_the_grammar_is_read() {
    for text in [
        "loss:1%@node-1/mlx5_0 from now for run",
        "loss:0.0001%@node-1/mlx5_0 from now for run",
        "flap:300ms/1s@node-2/mlx5_3 from after 2s for 30s",
        "rate:20Mbit@node-1/mlx5_2 from allreduce#1 for run",
        "link-down@node-3/mgmt0 from broadcast#7 until broadcast#9",
        "drop@node-1/mlx5_2/rx from allreduce#3+4MiB for run",
        "drop@node-1/mlx5_2/tx from graph-launch#3+12.5% at wire for 500ms",
        "drop@node-1/mlx5_2 from allreduce#3+0%..97.5% for run",
        "drop@node-2/mlx5_3 from switch-freeze#1 for run",
    ] {
        assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
    }
    // what is the default, or said the long way, prints short
    for (long, short) in [
        ("drop@a/b from allreduce#1 at call for run", "drop@a/b from allreduce#1 for run"),
        ("drop@a/b from now for until reduce#2", "drop@a/b from now until reduce#2"),
        ("drop@a/b  from  now   for 1000ms ", "drop@a/b from now for 1s"),
        ("loss:1.50%@a/b from allreduce#2+0% for run", "loss:1.5%@a/b from allreduce#2 for run"),
        ("drop@a/b from allreduce#2+7%..7.0% for run", "drop@a/b from allreduce#2+7% for run"),
    ] {
        assert_eq!(long.parse::<Fault>().unwrap().to_string(), short);
    }
}

#[test]
fn a_seed_chooses_one_share_of_a_range_and_other_seeds_choose_others() {
    let range: Fault = "drop@node-1/mlx5_2 from allreduce#3+5%..95% for run".parse().unwrap();
    let share = |seed: u64| match range.drawn(seed).from {
        Trigger::Position(Position { offset: Offset::MilliPercent(share), .. }) => share,
        other => panic!("{other:?}"),
    };
    let shares: Vec<u32> = (1..=1000).map(share).collect();
    assert!(shares.iter().all(|share| (5_000..=95_000).contains(share)));
    assert_eq!(shares, (1..=1000).map(share).collect::<Vec<_>>());
    // ten tenths of the range, each of them hit about a hundred times
    for tenth in 0..10 {
        let hits = shares.iter().filter(|share| (**share - 5_000) / 9_001 == tenth).count();
        assert!((50..200).contains(&hits), "{tenth}: {hits}");
    }
    let fixed: Fault = Fault::EXAMPLE.parse().unwrap();
    assert_eq!(fixed.drawn(7), fixed);
}

#[test]
fn an_error_points_at_the_word_and_hints_at_the_right_one() {
    for (text, column, found, expected, hint) in [
        ("dorp@n/x from now for run", 1, "dorp", "a kind of fault", "\"drop\""),
        ("drop@n/x from allredcue#3 for run", 15, "allredcue", "an operation", "\"allreduce\""),
        ("drop@n/x form now for run", 10, "form", "from", "\"from\""),
        ("drop@n/x from allreduce#0 for run", 25, "0", "from 1", "first call"),
        ("drop@n/x from allreduce for run", 24, "", "# and a number", "third call"),
        ("drop@n/x from allreduce#3+9%..8% for run", 31, "8%", "not below", ""),
        ("drop@n/x from allreduce#3+9..8% for run", 27, "9", "a percentage", "up to 100"),
        ("drop@n/x/both from now for run", 10, "both", "rx, tx", "both directions"),
        ("drop@n from now for run", 7, "", "/NIC", "n/mlx5_0"),
        ("drop from now for run", 5, "", "@NODE/NIC", "reads like"),
        ("loss:101%@n/x from now for run", 6, "101%", "a percentage", "up to 100"),
        ("flap:300ms@n/x from now for run", 11, "", "how long the port is up", "300ms/1s"),
        ("rate:20Mb@n/x from now for run", 6, "20Mb", "a rate", "20Mbit"),
        ("drop@n/x from now", 18, "", "how long", ""),
        ("drop@n/x from now for 5", 23, "5", "a duration", "a unit"),
        ("drop@n/x from now for run run", 27, "run", "the end", ""),
        ("link-down@n/x/rx from now for run", 15, "rx", "no direction", "drop"),
        ("dröp@n/x from now for run", 1, "dröp", "a kind of fault", "\"drop\""),
        ("drop@nö/x from nwo for run", 16, "nwo", "now", "\"now\""),
    ] {
        let error = text.parse::<Fault>().unwrap_err();
        assert_eq!((error.column, error.found.as_str()), (column, found), "{text}: {error}");
        assert!(error.expected.contains(expected), "{text}: {error}");
        assert!(error.hint.clone().unwrap_or_default().contains(hint), "{text}: {error}");
    }
    let text = "drop@n/x from allredcue#3 for run";
    let pointed = text.parse::<Fault>().unwrap_err().pointed(text);
    assert_eq!(pointed, format!("  {text}\n  {}^^^^^^^^^", " ".repeat(14)));
}
