//! Benches that are interrupted, killed or stopped while they run: nothing is left of them, and no fault outlives
//! its lease.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use r2cc_bench::cluster::{ClusterState, NicState};
use r2cc_bench::report::Summary;
use r2cc_inject::Phase;
use r2cc_inject::netlink::Route;
use socket2::{Domain, Socket, Type};
use support::{GONE, Held, Process, Running, SOON, SmallSuite, bench, host, inside, run, wait_for};

/// Far more iterations than any of these tests waits for.
const ENDLESS: u32 = 2000;

fn endless() -> SmallSuite {
    SmallSuite {
        name: "endless",
        iterations: ENDLESS,
        faults: "drop@node-1/mlx5_2 from allreduce#1+25% for run",
        ..SmallSuite::default()
    }
}

fn summary(out: &Path) -> Summary {
    serde_json::from_str(&std::fs::read_to_string(out.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn ctrl_c_during_the_baseline_ends_in_130_and_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let (suite, out, host) = (endless().write(place.path()), place.path().join("out"), host());
    let mut bench = Running::start(&suite, &out, &[]);
    bench.wait_for_line("baseline 1/");
    let held = Held::by(&bench, host);
    bench.ctrl_c();
    bench.end(GONE).expect_code(130).expect_words(&["interrupted"]);
    held.expect_gone(true);
    assert_eq!(summary(&out).exit_code, 130);
}

#[test]
fn sigterm_during_the_cut_ends_in_130_with_the_fault_healed() {
    let place = tempfile::tempdir().unwrap();
    let (suite, out, host) = (endless().write(place.path()), place.path().join("out"), host());
    let mut bench = Running::start(&suite, &out, &[]);
    bench.wait_for_cut();
    bench.wait_for_line("iteration 3/");
    let held = Held::by(&bench, host);
    bench.signal(Signal::SIGTERM);
    bench.end(GONE).expect_code(130).expect_words(&["interrupted"]);
    held.expect_gone(true);
    let summary = summary(&out);
    assert_eq!(summary.exit_code, 130);
    assert!(summary.faults.iter().all(|fault| fault.fired && fault.healed), "{:?}", summary.faults);
    assert!(summary.iterations.iter().all(|it| it.wrong_elements == 0));
}

#[test]
fn an_interrupt_stops_the_suites_that_have_not_begun() {
    let place = tempfile::tempdir().unwrap();
    let first = endless().write(place.path());
    let second = place.path().join("second.yaml");
    std::fs::write(&second, SmallSuite { name: "second", ..SmallSuite::default() }.text()).unwrap();
    let out = place.path().join("out");
    let mut command = std::process::Command::new(support::program());
    command.arg("run").args([&first, &second]).arg("--out").arg(&out);
    let mut bench = Running::spawn(command, &out);
    bench.wait_for_line("baseline 1/");
    bench.ctrl_c();
    bench.end(GONE).expect_code(130);
    assert!(out.join("endless/summary.json").exists());
    assert!(!out.join("second").exists(), "the second suite was begun");
}

#[test]
fn kill_9_during_the_cut_leaves_nothing_and_the_next_run_passes() {
    let place = tempfile::tempdir().unwrap();
    let (suite, out, before) = (endless().write(place.path()), place.path().join("out"), host());
    let bench_run = Running::start(&suite, &out, &[]);
    bench_run.wait_for_cut();
    let held = Held::by(&bench_run, before);
    let pid = bench_run.pid();
    bench_run.signal(Signal::SIGKILL);
    let ended = bench_run.end(GONE);
    assert_eq!(ended.signal, Some(9), "{ended:#?}");
    held.expect_gone(false);
    assert!(!out.join("summary.json").exists(), "a run that was killed has no verdict");

    let next = SmallSuite::default().write(place.path());
    let path = place.path().join("next");
    bench(&["run", next.to_str().unwrap(), "--out", path.to_str().unwrap(), "--only", "elements"]).expect_code(0);
    // That run has swept what was left to sweep.
    held.expect_gone(true);
    let doctor = bench(&["doctor", "--format", "json", "--out", path.to_str().unwrap()]);
    let mentioned = |what: &str| doctor.stdout.contains(what);
    assert!(!mentioned(&format!("pid {pid},")) && !mentioned(&format!("cluster-{pid}-")), "{doctor:#?}");
}

#[test]
fn a_rank_that_is_killed_in_a_collective_is_named_by_every_other_rank() {
    let place = tempfile::tempdir().unwrap();
    // An iteration takes most of a second, so that the kill falls into it.
    let suite = SmallSuite { name: "killed-rank", bytes: "24MiB", iterations: 9, ..endless() }.write(place.path());
    let (out, before) = (place.path().join("out"), host());
    let mut bench = Running::start(&suite, &out, &[]);
    bench.wait_for_line("iteration 2/");
    bench.wait_for_cut();
    let held = Held::by(&bench, before);
    // Rank 2: one a node.
    bench.worker_in("node-3").signal(Signal::SIGKILL);
    bench.end(GONE).expect_rank_lost(2, "node-3", [0, 1]);
    held.expect_gone(true);
    let summary = summary(&out);
    assert_eq!(summary.exit_code, 1);
    assert!(summary.faults.iter().all(|fault| fault.healed));
}

#[test]
fn rank_0_that_is_killed_during_the_baseline_is_named_too() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite { name: "killed-rank-0", bytes: "24MiB", iterations: 9, ..endless() }.write(place.path());
    let mut bench = Running::start(&suite, &place.path().join("out"), &[]);
    bench.wait_for_line("baseline 1/");
    bench.worker_in("node-1").signal(Signal::SIGKILL);
    let lost = "rank 0 on node-1 is lost";
    bench.end(GONE).expect_code(1).expect_words(&[&format!("rank 1: {lost}"), &format!("rank 2: {lost}")]);
}

#[test]
fn a_fault_outlives_two_leases_while_it_is_renewed_and_ends_with_its_lease_when_the_bench_is_stopped() {
    let lease = Duration::from_secs(1);
    let place = tempfile::tempdir().unwrap();
    let (suite, out, before) = (endless().write(place.path()), place.path().join("out"), host());
    let bench = Running::start(&suite, &out, &["--lease", "1s"]);
    let cut = bench.wait_for_cut();
    let held = Held::by(&bench, before);
    assert_eq!(cut.label, endless().faults, "whoever looks sees which fault it is");
    let stream = Stream::between(&bench.cluster(), "node-2", "node-1", "mlx5_2");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sending = scope.spawn(|| stream.send(&stop));
        let fired_ns = cut.status.fired_at_ns.unwrap();

        // Renewed: still dropping after two leases.
        wait_for("two leases to pass", SOON, || (now_ns() > fired_ns + ns(lease * 2) + ns(lease / 2)).then_some(()));
        let first = bench.fault().unwrap().status;
        assert!(!first.expired && first.healed_at_ns.is_none(), "{first:?}");
        wait_for("more packets to be dropped", SOON, || {
            (bench.fault()?.status.packets_dropped.rx > first.packets_dropped.rx).then_some(())
        });
        assert_eq!(stream.arrived(), BTreeSet::new(), "something passed the cut port");

        // Stopped: nobody renews it.
        let renewing = Process::of(bench.pid());
        renewing.signal(Signal::SIGSTOP);
        let stopped_ns = now_ns();
        let passed = wait_for("traffic to pass", SOON, || stream.arrived().first().copied());
        let after = bench.fault().expect("the program is still attached").status;
        assert!(after.expired && after.healed_at_ns.is_none() && after.passed_after_expiry > 0, "{after:?}");
        assert!(after.expires_at_ns <= stopped_ns + ns(lease), "{after:?}, stopped at {stopped_ns}");
        stop.store(true, Ordering::Relaxed);
        let sent = sending.join().unwrap();
        // Whatever this machine's load: no datagram that was sent half a second after the lease was lost.
        let due = sent.iter().position(|at| *at > after.expires_at_ns + 500_000_000).unwrap_or(sent.len());
        assert!(passed as usize <= due, "{passed} was the first to pass, {due} the first that had to");
        assert!(sent[passed as usize] + 50_000_000 >= after.expires_at_ns, "passed before the lease was over");
    });

    // Woken up, it notices, heals and ends as it is told.
    bench.signal(Signal::SIGCONT);
    bench.signal(Signal::SIGTERM);
    bench.end(GONE).expect_code(130);
    held.expect_gone(true);
}

const LINK_DOWN: &str = "link-down@node-1/mlx5_2 from allreduce#1+25% for run";

fn endless_with(faults: &'static str) -> SmallSuite {
    SmallSuite { faults, ..endless() }
}

/// What a look from inside `node-1` says of its NIC.
fn seen<T>(state: &ClusterState, look: impl FnOnce(&mut Route) -> T) -> T {
    let netns = std::fs::File::open(&state.nodes[0].netns).unwrap();
    look(&mut Route::open(netns.as_fd()).unwrap())
}

fn has_carrier(state: &ClusterState) -> bool {
    seen(state, |route| route.interface("mlx5_2").unwrap().has_carrier)
}

#[test]
fn a_link_that_the_bench_took_down_outlives_two_leases_only_where_nobody_watches() {
    let lease = Duration::from_secs(1);
    let place = tempfile::tempdir().unwrap();
    let (suite, before) = (endless_with(LINK_DOWN).write(place.path()), host());
    let bench = Running::start(&suite, &place.path().join("out"), &["--lease", "1s"]);
    let change = bench.wait_for_change();
    let (held, state) = (Held::by(&bench, before), bench.cluster());
    assert_eq!(change.fault, LINK_DOWN);

    let made_ns = change.made_at_ns.unwrap();
    wait_for("two leases to pass", SOON, || (now_ns() > made_ns + ns(lease * 2)).then_some(()));
    assert!(!has_carrier(&state), "renewed, it stays");

    // Neither renewed nor watched over: the watcher is stopped first, so that it cannot undo.
    let watcher = change.watcher.unwrap();
    watcher.signal(libc::SIGSTOP).unwrap();
    bench.signal(Signal::SIGSTOP);
    let stopped_ns = now_ns();
    wait_for("three more leases to pass", SOON, || (now_ns() > stopped_ns + ns(lease * 3)).then_some(()));
    assert!(!has_carrier(&state), "nobody has put it back");

    watcher.signal(libc::SIGCONT).unwrap();
    wait_for("the watcher to put it back", SOON, || has_carrier(&state).then_some(()));
    // It says so once it has done so.
    let expired = || (bench.wait_for_change().phase == Phase::Expired).then_some(());
    wait_for("the watcher to say that the lease ran out", SOON, expired);
    bench.signal(Signal::SIGCONT);
    bench.signal(Signal::SIGTERM);
    bench.end(GONE).expect_code(130);
    held.expect_gone(true);
}

#[test]
fn what_the_bench_changed_by_netlink_is_put_back_half_a_second_after_its_lease_when_the_bench_is_stopped() {
    let place = tempfile::tempdir().unwrap();
    let rate = "rate:20Mbit@node-1/mlx5_2 from allreduce#1+25% for run";
    for (fault, cutter) in [(LINK_DOWN, "xdp"), (rate, "xdp"), (endless().faults, "switch")] {
        let (suite, before) = (endless_with(fault).write(place.path()), host());
        let bench = Running::start(&suite, &place.path().join("out"), &["--lease", "1s", "--cutter", cutter]);
        let change = bench.wait_for_change();
        let (held, state) = (Held::by(&bench, before), bench.cluster());
        let stream = Stream::between(&state, "node-2", "node-1", "mlx5_2");
        let shaping = |nic: &str| {
            seen(&state, |route| {
                let index = route.interface(nic).unwrap().index;
                route.root_qdisc(index).unwrap()
            })
        };
        let stop = AtomicBool::new(false);
        let sent = thread::scope(|scope| {
            let sending = scope.spawn(|| stream.send(&stop));
            let is_back = || match fault {
                LINK_DOWN => has_carrier(&state),
                _ if fault == rate => shaping("mlx5_2") == shaping("mlx5_0"),
                _ => !stream.arrived().is_empty(),
            };
            // What was sent before the change may still arrive; what is sent after it must not.
            let wait_until = |at_ns: u64| wait_for("time to pass", SOON, || (now_ns() > at_ns).then_some(()));
            wait_until(change.made_at_ns.unwrap() + 200_000_000);
            stream.arrived();
            wait_until(change.made_at_ns.unwrap() + 500_000_000);
            assert!(!is_back(), "{fault}");
            bench.signal(Signal::SIGSTOP);
            wait_for("the change to be put back", SOON, || is_back().then_some(()));
            stop.store(true, Ordering::Relaxed);
            sending.join().unwrap()
        });
        assert!(!sent.is_empty());
        let ended = wait_for("the record of its end", SOON, || {
            Some(bench.wait_for_change()).filter(|record| record.ended_at_ns.is_some())
        });
        assert_eq!(ended.phase, Phase::Expired, "{fault}");
        let late = ended.ended_at_ns.unwrap().checked_sub(ended.expires_at_ns).expect("not before its time");
        assert!(late < 500_000_000, "{fault}: put back {late} ns after its lease");
        bench.signal(Signal::SIGCONT);
        bench.signal(Signal::SIGTERM);
        bench.end(GONE).expect_code(130);
        held.expect_gone(true);
    }
    let (next, path) = (SmallSuite::default().write(place.path()), place.path().join("next"));
    bench(&["run", next.to_str().unwrap(), "--out", path.to_str().unwrap(), "--only", "elements"]).expect_code(0);
    let doctor = bench(&["doctor", "--format", "json", "--out", path.to_str().unwrap()]);
    assert!(!doctor.stdout.contains(LINK_DOWN) && !doctor.stdout.contains(rate), "{doctor:#?}");
}

#[test]
fn kill_9_while_a_link_is_down_leaves_no_watcher_and_no_record() {
    let place = tempfile::tempdir().unwrap();
    let (suite, before) = (endless_with(LINK_DOWN).write(place.path()), host());
    let bench = Running::start(&suite, &place.path().join("out"), &[]);
    let watcher = bench.wait_for_change().watcher.unwrap();
    let held = Held::by(&bench, before);
    bench.signal(Signal::SIGKILL);
    bench.end(GONE);
    wait_for("the watcher to end", GONE, || (!watcher.is_alive()).then_some(()));
    held.expect_gone(false);
}

#[test]
fn a_run_whose_fault_ended_with_its_lease_is_inconclusive() {
    let place = tempfile::tempdir().unwrap();
    let suite = SmallSuite { iterations: 12, ..endless() }.write(place.path());
    let bench = Running::start(&suite, &place.path().join("out"), &["--lease", "300ms"]);
    bench.wait_for_cut();
    let renewing = Process::of(bench.pid());
    renewing.signal(Signal::SIGSTOP);
    wait_for("the lease to run out", SOON, || bench.fault().filter(|fault| fault.status.expired));
    renewing.signal(Signal::SIGCONT);
    bench.end(SOON).expect_code(3).expect_words(&["fault drop@node-1/mlx5_2", "lease ran out"]);
}

#[test]
fn two_benches_at_once_both_pass() {
    let start = |place: &Path| {
        let suite = SmallSuite::default().write(place);
        Running::start(&suite, &place.join("out"), &["--only", "elements"])
    };
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (first, second) = (start(one.path()), start(other.path()));
    assert_ne!(first.cluster().id, second.cluster().id);
    let (first, second) = (first.end(SOON), second.end(SOON));
    first.expect_code(0);
    second.expect_code(0);
    for place in [&one, &other] {
        let summary = summary(&place.path().join("out"));
        assert!(summary.faults[0].fired && summary.faults[0].iteration == Some(2), "{:?}", summary.faults);
    }
}

#[test]
fn a_command_can_be_run_inside_a_node_of_a_running_bench() {
    let place = tempfile::tempdir().unwrap();
    let suite = endless().write(place.path());
    let bench = Running::start(&suite, &place.path().join("out"), &[]);
    let id = bench.cluster().id;
    let enter = |node: &str| {
        let words = ["worker", "enter", node, "--cluster", &id, "--", "cat", "/proc/sys/kernel/hostname"];
        run(std::process::Command::new(support::program()).args(words))
    };
    assert_eq!(enter("node-2").expect_code(0).stdout.trim(), "node-2");
    enter("node-9").expect_code(1).expect_words(&["node-9", "node-1, node-2, node-3", "hint:"]);
}

/// Datagrams by broadcast from one node's NIC to another's, which need no answer of a dead port.
struct Stream {
    out: UdpSocket,
    into: UdpSocket,
    target: (Ipv4Addr, u16),
}

impl Stream {
    fn between(state: &ClusterState, from: &str, to: &str, nic: &str) -> Self {
        let node = |name: &str| state.nodes.iter().find(|node| node.name == name).unwrap();
        let socket = |name: &str, port: u16| {
            inside(&node(name).netns, || {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                socket.bind_device(Some(nic.as_bytes())).unwrap();
                socket.set_broadcast(true).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket.bind(&std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port).into()).unwrap();
                UdpSocket::from(socket)
            })
        };
        let port = 40_000;
        let target = node(from).nics.iter().find(|known| known.name == nic).map(broadcast).unwrap();
        Self { out: socket(from, 0), into: socket(to, port), target: (target, port) }
    }

    /// Sends one a few milliseconds until told to stop; when each was sent.
    fn send(&self, stop: &AtomicBool) -> Vec<u64> {
        let mut sent = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let number = sent.len() as u32;
            sent.push(now_ns());
            self.out.send_to(&number.to_le_bytes(), self.target).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        sent
    }

    /// Numbers that have arrived since this was last asked.
    fn arrived(&self) -> BTreeSet<u32> {
        let mut buffer = [0; 4];
        std::iter::from_fn(|| self.into.recv(&mut buffer).ok().map(|_| u32::from_le_bytes(buffer))).collect()
    }
}

fn broadcast(nic: &NicState) -> Ipv4Addr {
    let (address, prefix) = nic.addr.split_once('/').unwrap();
    let (address, prefix) = (address.parse::<Ipv4Addr>().unwrap(), prefix.parse::<u32>().unwrap());
    Ipv4Addr::from_bits(address.to_bits() | (u32::MAX >> prefix))
}

fn now_ns() -> u64 {
    r2cc_inject::monotonic_ns()
}

fn ns(span: Duration) -> u64 {
    span.as_nanos() as u64
}
