//! The injector against a real kernel: namespaces, veth, real traffic. Needs root.

#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::{
    collections::BTreeSet,
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use r2cc_inject::{ArmRequest, CallPoint, Direction, Effect, KernelTrigger, Phase, loss_drops, monotonic_ns};
use support::{Lab, assert_dead, attach, in_ns, request, wait_until};

/// Tests probe this function of their own executable; each uses its own `id`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn r2cc_inject_test_call(id: u64) -> u64 {
    std::hint::black_box(id)
}

fn call_point(id: u64, n: u64) -> CallPoint {
    CallPoint {
        pid: std::process::id(),
        binary: std::env::current_exe().unwrap(),
        symbol: "r2cc_inject_test_call".to_owned(),
        arg0: Some(id),
        n,
    }
}

#[test]
fn a_drop_stops_both_directions_and_healing_lets_them_go_on() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let (inbound, outbound) = (lab.inbound(0), lab.outbound(0));
    let id = injector.arm(request(port, Effect::Drop)).unwrap();
    assert_dead(&injector, id);
    let status = injector.status(id).unwrap();
    assert_eq!(status.phase(), Phase::Active);
    assert!(status.first_drop_ns.unwrap() >= status.fired_at_ns.unwrap());
    wait_until("both directions have dropped", || {
        let dropped = injector.status(id).unwrap().bytes_dropped;
        dropped.rx > 0 && dropped.tx > 0
    });
    let healed = injector.heal(id).unwrap();
    assert_eq!(healed.phase(), Phase::Healed);
    inbound.wait_for_more();
    outbound.wait_for_more();
    let later = injector.status(id).unwrap();
    assert_eq!(later.packets_dropped, healed.packets_dropped);
    assert_eq!(injector.counters().unwrap()[0].rx_dropped.bytes, later.bytes_dropped.rx);
}

#[test]
fn a_drop_of_one_direction_leaves_the_other_alone() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    for (direction, stopped_rx) in [(Direction::Rx, true), (Direction::Tx, false)] {
        let (sender, receiver) = lab.datagrams(0);
        receiver.connect(sender.local_addr().unwrap()).unwrap();
        let id = injector.arm(ArmRequest { direction, ..request(port, Effect::Drop) }).unwrap();
        let tick = Some(Duration::from_millis(200));
        sender.set_read_timeout(tick).unwrap();
        receiver.set_read_timeout(tick).unwrap();
        sender.send(b"to the port").unwrap();
        receiver.send(b"from the port").ok();
        let mut block = [0; 64];
        assert_eq!(receiver.recv(&mut block).is_err(), stopped_rx, "{direction:?}");
        assert_eq!(sender.recv(&mut block).is_err(), !stopped_rx, "{direction:?}");
        let status = injector.heal(id).unwrap();
        let dropped = status.packets_dropped;
        assert_eq!((dropped.rx, dropped.tx), if stopped_rx { (1, 0) } else { (0, 1) });
    }
}

#[test]
fn counters_equal_the_interface_s_own_bytes() {
    let lab = Lab::new(1);
    let own = || {
        let table = in_ns(&lab.here, || std::fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
        let line = table.lines().find_map(|line| line.trim().strip_prefix("nic0:")).unwrap();
        let fields: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
        (fields[0], fields[8])
    };
    let (injector, _) = attach(&lab);
    let before = own();
    drop((lab.inbound(0), lab.outbound(0)));
    wait_until("the last packets have crossed", || {
        let first = own();
        std::thread::sleep(Duration::from_millis(50));
        first == own()
    });
    let (rx, tx) = own();
    let counted = &injector.counters().unwrap()[0];
    assert!(counted.rx_passed.bytes > 8192);
    assert_eq!(counted.rx_passed.bytes, rx - before.0);
    assert_eq!(counted.tx_passed.bytes, tx - before.1);
}

#[test]
fn a_position_fires_at_the_asked_byte_of_the_asked_call() {
    const ASKED: u64 = 200_000;
    let lab = Lab::new(2);
    let (mut injector, port) = attach(&lab);
    for _ in 0..5 {
        r2cc_inject_test_call(1); // warm-up before arming does not count
    }
    let id = injector
        .arm(ArmRequest {
            trigger: KernelTrigger::Call { point: call_point(1, 3), bytes: ASKED },
            ..request(port, Effect::Drop)
        })
        .unwrap();
    let (sender, receiver) = lab.datagrams(0);
    let packet = [0_u8; 1000 - 42]; // 1000 bytes with its Ethernet, IP and UDP headers
    let send = |count: u64| {
        for _ in 0..count {
            sender.send(&packet).unwrap();
        }
    };
    let settle = |expected: u64| {
        wait_until("the packets have arrived", || {
            let port = &injector.counters().unwrap()[0];
            port.rx_passed.packets + port.rx_dropped.packets == expected
        });
    };
    r2cc_inject_test_call(1);
    r2cc_inject_test_call(2); // another communicator's call
    r2cc_inject_test_call(1);
    send(300);
    settle(300);
    assert!(!injector.status(id).unwrap().fired, "bytes before call 3 do not count");
    r2cc_inject_test_call(1);
    let status = injector.status(id).unwrap();
    assert!(status.call_ns.is_some() && !status.fired);
    send(300);
    settle(600);
    let status = injector.status(id).unwrap();
    assert!(status.fired);
    // The packet that reaches the threshold is the first one dropped.
    assert_eq!(status.bytes_before, ASKED);
    assert_eq!(status.packets_dropped.rx, 300 - 199);
    assert_eq!(status.first_drop_ns, status.fired_at_ns);
    assert!(status.call_ns < status.fired_at_ns);
    assert_eq!(status.snapshot.len(), 2, "all ports are in the snapshot");
    assert_eq!(status.snapshot[0].rx_passed.packets, 300 + 199);
    assert_eq!(status.snapshot[0].rx_dropped.packets, 0);
    assert!(status.snapshot[0].at_ns >= status.fired_at_ns.unwrap());
    let mut block = [0; 2000];
    for _ in 0..300 + 199 {
        receiver.recv(&mut block).unwrap();
    }
    receiver.set_nonblocking(true).unwrap();
    assert!(receiver.recv(&mut block).is_err(), "not one packet more");
}

#[test]
fn a_fast_tcp_stream_overshoots_a_position_by_one_segment_at_most() {
    const ASKED: u64 = 3_000_000;
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let id = injector
        .arm(ArmRequest { trigger: KernelTrigger::Wire { bytes: ASKED }, ..request(port, Effect::Drop) })
        .unwrap();
    let base = injector.counters().unwrap()[0].rx_passed.bytes;
    let listener = in_ns(&lab.here, || std::net::TcpListener::bind("10.88.0.1:0").unwrap());
    let address = listener.local_addr().unwrap();
    let mut sender = in_ns(&lab.there, || std::net::TcpStream::connect(address).unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    let reader = std::thread::spawn(move || {
        receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let (mut total, mut block) = (0, vec![0; 1 << 16]);
        while let Ok(n @ 1..) = receiver.read(&mut block) {
            total += n;
        }
        total as u64
    });
    sender.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    std::io::Write::write_all(&mut sender, &vec![1; 32 << 20]).unwrap_err();
    let delivered = reader.join().unwrap();
    let status = injector.status(id).unwrap();
    assert!(status.fired);
    let overshoot = status.bytes_before - ASKED;
    assert!(overshoot <= 65_550, "{overshoot} bytes over");
    let passed = injector.counters().unwrap()[0].rx_passed.bytes - base;
    assert!(passed < ASKED && passed + 65_550 >= ASKED, "{passed} passed");
    assert!(delivered < ASKED);
}

#[test]
fn a_call_without_bytes_cuts_at_the_call_and_another_call_heals() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let stream = lab.inbound(0);
    let id = injector
        .arm(ArmRequest {
            trigger: KernelTrigger::Call { point: call_point(10, 2), bytes: 0 },
            until: Some(call_point(11, 3)),
            ..request(port, Effect::Drop)
        })
        .unwrap();
    r2cc_inject_test_call(10);
    stream.wait_for_more();
    assert_eq!(injector.status(id).unwrap().phase(), Phase::Armed);
    let before = monotonic_ns();
    // from another thread: a call counts whichever thread makes it
    std::thread::spawn(|| r2cc_inject_test_call(10)).join().unwrap();
    let after = monotonic_ns();
    let status = injector.status(id).unwrap();
    assert!((before..after).contains(&status.fired_at_ns.unwrap()));
    assert_eq!(status.call_ns, status.fired_at_ns);
    assert_eq!(status.bytes_before, 0);
    assert_dead(&injector, id);
    r2cc_inject_test_call(11);
    r2cc_inject_test_call(11);
    assert_dead(&injector, id);
    r2cc_inject_test_call(11);
    assert_eq!(injector.status(id).unwrap().phase(), Phase::Healed);
    stream.wait_for_more();
}

#[test]
fn calls_of_another_process_do_not_count() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let id = injector
        .arm(ArmRequest {
            trigger: KernelTrigger::Call { point: call_point(20, 1), bytes: 0 },
            ..request(port, Effect::MarkOnly)
        })
        .unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_calls", "--ignored"])
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert!(!injector.status(id).unwrap().fired);
    r2cc_inject_test_call(20);
    assert!(injector.status(id).unwrap().fired);
}

#[test]
#[ignore = "run by calls_of_another_process_do_not_count in a process of its own"]
fn child_calls() {
    assert_eq!(r2cc_inject_test_call(20), 20);
}

#[test]
fn a_mark_fires_and_takes_the_snapshot_but_drops_nothing() {
    let lab = Lab::new(2);
    let (mut injector, port) = attach(&lab);
    let stream = lab.inbound(0);
    let id = injector
        .arm(ArmRequest { trigger: KernelTrigger::Wire { bytes: 10_000 }, ..request(port, Effect::MarkOnly) })
        .unwrap();
    wait_until("it fires", || injector.status(id).unwrap().snapshot.len() == 2);
    stream.wait_for_more();
    let status = injector.status(id).unwrap();
    assert!(status.bytes_before >= 10_000);
    assert_eq!(status.packets_dropped.total(), 0);
    assert_eq!(status.snapshot[1].nic, "mlx5_1");
}

#[test]
fn a_loss_drops_exactly_the_indices_its_seed_names() {
    const PACKETS: u32 = 4000;
    const PPM: u32 = 50_000;
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let mut sets = Vec::new();
    for seed in [1, 1, 2] {
        let (sender, receiver) = lab.datagrams(0);
        let effect = Effect::Loss { parts_per_million: PPM, seed };
        let id = injector.arm(request(port, effect)).unwrap();
        let mut arrived = BTreeSet::new();
        let mut block = [0; 4];
        receiver.set_nonblocking(true).unwrap();
        for index in 0..PACKETS {
            sender.send(&index.to_be_bytes()).unwrap();
            while receiver.recv(&mut block).is_ok() {
                arrived.insert(u32::from_be_bytes(block));
            }
        }
        wait_until("all are accounted for", || {
            while receiver.recv(&mut block).is_ok() {
                arrived.insert(u32::from_be_bytes(block));
            }
            let dropped = injector.status(id).unwrap().packets_dropped.rx;
            arrived.len() as u64 + dropped == u64::from(PACKETS)
        });
        injector.heal(id).unwrap();
        let lost: BTreeSet<u32> = (0..PACKETS).filter(|i| !arrived.contains(i)).collect();
        let named: BTreeSet<u32> = (0..PACKETS).filter(|i| loss_drops(seed, PPM, 0, u64::from(*i))).collect();
        assert_eq!(lost, named);
        // five standard deviations of the binomial: sqrt(4000 * 0.05 * 0.95) = 13.8
        assert!(lost.len().abs_diff(200) < 69, "{} of 4000 lost", lost.len());
        sets.push(lost);
    }
    assert_eq!(sets[0], sets[1]);
    assert_ne!(sets[0], sets[2]);
}

#[test]
fn a_flap_is_dead_and_alive_by_turns_from_its_firing_on() {
    const DOWN: Duration = Duration::from_millis(150);
    const UP: Duration = Duration::from_millis(100);
    const MARGIN_NS: u64 = 30_000_000;
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let (sender, receiver) = lab.datagrams(0);
    receiver.set_nonblocking(true).unwrap();
    let id = injector.arm(request(port, Effect::Flap { down: DOWN, up: UP })).unwrap();
    let fired = injector.status(id).unwrap().fired_at_ns.unwrap();
    let (down, period) = (DOWN.as_nanos() as u64, (DOWN + UP).as_nanos() as u64);
    let (mut dead, mut alive) = (0, 0);
    let mut block = [0; 8];
    while dead < 20 || alive < 20 {
        let before = monotonic_ns();
        let dropped = injector.status(id).unwrap().packets_dropped.rx;
        sender.send(&before.to_be_bytes()).unwrap();
        let mut passed = None;
        wait_until("the packet passes or is dropped", || {
            if receiver.recv(&mut block).is_ok() {
                passed = Some(true);
            } else if injector.status(id).unwrap().packets_dropped.rx > dropped {
                passed = Some(false);
            }
            passed.is_some()
        });
        // judged somewhere between the two readings of the clock
        let (start, end) = ((before - fired) % period, (monotonic_ns() - fired) % period);
        if end < start || end - start > MARGIN_NS {
            continue;
        }
        if end < down {
            assert_eq!(passed, Some(false), "{start} ns into the period");
            dead += 1;
        } else if start >= down {
            assert_eq!(passed, Some(true), "{start} ns into the period");
            alive += 1;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

#[test]
fn two_faults_on_one_port_are_independent() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let (inbound, outbound) = (lab.inbound(0), lab.outbound(0));
    let rx = ArmRequest { direction: Direction::Rx, ..request(port, Effect::Drop) };
    let tx = ArmRequest { direction: Direction::Tx, ..request(port, Effect::Drop) };
    let (rx, tx) = (injector.arm(rx).unwrap(), injector.arm(tx).unwrap());
    for id in [rx, tx] {
        wait_until("each drops", || injector.status(id).unwrap().packets_dropped.total() > 0);
    }
    let first = injector.heal(rx).unwrap();
    assert_eq!(first.packets_dropped.tx, 0);
    assert_eq!(injector.status(tx).unwrap().phase(), Phase::Active);
    let still = injector.status(tx).unwrap().packets_dropped.tx;
    wait_until("the other still drops", || injector.status(tx).unwrap().packets_dropped.tx > still);
    let healed = injector.heal_all().unwrap();
    assert_eq!(healed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [tx]);
    inbound.wait_for_more();
    outbound.wait_for_more();
}
