//! Leases, processes that die, injectors of other processes, and what is left behind:
//! against a real kernel. Needs root.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::{
    os::fd::AsFd,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use r2cc_inject::{
    ArmRequest, CallPoint, Effect, Error, Injector, KernelTrigger, Phase, PortSpec, monotonic_ns, observe,
};
use support::{LONG, Lab, assert_dead, attach, request, traces, wait_until};

fn call_point(n: u64) -> CallPoint {
    CallPoint {
        pid: std::process::id(),
        binary: std::env::current_exe().unwrap(),
        symbol: "main".to_owned(),
        arg0: None,
        n,
    }
}

#[test]
fn a_fault_lasts_while_it_is_renewed_and_ends_when_it_is_not() {
    const LEASE: Duration = Duration::from_millis(300);
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let stream = lab.inbound(0);
    let id = injector.arm(ArmRequest { lease: LEASE, ..request(port, Effect::Drop) }).unwrap();
    let armed = injector.status(id).unwrap().fired_at_ns.unwrap();
    let mut renewed = injector.status(id).unwrap().expires_at_ns;
    let mut held = true;
    while monotonic_ns() < armed + 3 * LEASE.as_nanos() as u64 {
        match injector.renew(id, LEASE) {
            Ok(expires) => {
                assert!(expires > renewed);
                renewed = expires;
            }
            // this machine can stall a test for longer than a lease
            Err(Error::Expired { .. }) => {
                held = false;
                break;
            }
            Err(error) => panic!("{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if held {
        assert_eq!(injector.status(id).unwrap().passed_after_expiry, 0);
    }
    stream.wait_for_more(); // although the program is attached and nobody healed
    let status = injector.status(id).unwrap();
    assert_eq!(status.phase(), Phase::Expired);
    assert!(status.expired && status.healed_at_ns.is_none());
    assert!(status.passed_after_expiry > 0);
    assert!(matches!(injector.renew(id, LEASE), Err(Error::Expired { .. })));
}

#[test]
fn slots_of_healed_faults_are_used_again_and_old_ids_stay_dead() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let first = injector.arm(request(port, Effect::MarkOnly)).unwrap();
    for _ in 1..32 {
        injector.arm(request(port, Effect::MarkOnly)).unwrap();
    }
    let full = injector.arm(request(port, Effect::MarkOnly)).unwrap_err();
    assert!(matches!(full, Error::TooManyFaults { limit: 32 }));
    injector.heal(first).unwrap();
    let next = injector.arm(request(port, Effect::MarkOnly)).unwrap();
    assert!(matches!(injector.status(first), Err(Error::UnknownFault)));
    assert!(injector.status(next).unwrap().fired);
}

#[test]
fn killing_the_process_that_holds_an_injector_heals_at_once() {
    let lab = Lab::new(1);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_drops", "--ignored", "--nocapture"])
        .env("R2CC_TEST_NETNS", &lab.here)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let of_child = || {
        observe::sessions()
            .unwrap()
            .into_iter()
            .find(|session| session.faults().iter().any(|fault| fault.owner_pid == pid))
    };
    let (sender, receiver) = lab.datagrams(0);
    receiver.set_nonblocking(true).unwrap();
    let mut block = [0; 8];
    wait_until("the child's fault drops", || {
        sender.send(b"x").unwrap();
        of_child().is_some_and(|session| session.faults()[0].status.packets_dropped.rx > 0)
    });
    while receiver.recv(&mut block).is_ok() {}
    let seen = of_child().unwrap();
    let fault = &seen.faults()[0];
    assert_eq!(fault.label, "drop@node-1/mlx5_0 from now for run");
    assert_eq!(fault.status.phase(), Phase::Active);
    drop(seen);

    child.kill().unwrap();
    child.wait().unwrap();
    sender.send(b"y").unwrap();
    wait_until("it passes", || receiver.recv(&mut block).is_ok());
    assert_eq!(block[0], b'y', "the very first packet passes");
    assert!(of_child().is_none());
    let left = traces(&lab);
    assert!(!left.contains("xdp") && !left.contains("clsact"), "{left}");
}

#[test]
#[ignore = "run by killing_the_process_that_holds_an_injector_heals_at_once in a process of its own"]
fn child_drops() {
    let netns = std::env::var("R2CC_TEST_NETNS").unwrap();
    let netns = std::fs::File::open(PathBuf::from("/run/netns").join(netns)).unwrap();
    let mut injector = Injector::attach(&[PortSpec {
        node: "node-1".to_owned(),
        nic: "mlx5_0".to_owned(),
        netns: Some(netns.as_fd()),
        ifname: "nic0".to_owned(),
    }])
    .unwrap();
    let port = injector.port("node-1", "mlx5_0").unwrap();
    let id = injector.arm(request(port, Effect::Drop)).unwrap();
    injector.label(id, "drop@node-1/mlx5_0 from now for run").unwrap();
    std::thread::sleep(LONG);
}

#[test]
fn another_process_s_faults_can_be_healed_and_detached_without_it() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let stream = lab.inbound(0);
    let id = injector.arm(request(port, Effect::Drop)).unwrap();
    injector.label(id, &lab.here).unwrap();
    let session = observe::sessions()
        .unwrap()
        .into_iter()
        .find(|session| session.faults().iter().any(|fault| fault.label == lab.here))
        .unwrap();
    assert_dead(&injector, id);
    session.heal();
    assert_eq!(injector.status(id).unwrap().phase(), Phase::Healed);
    stream.wait_for_more();
    assert!(traces(&lab).contains("xdp"));
    assert_eq!(session.detach().unwrap(), 2);
    assert!(!traces(&lab).contains("xdp"));
}

#[test]
fn dropping_the_injector_leaves_nothing() {
    let lab = Lab::new(2);
    let before = traces(&lab);
    let (mut injector, port) = attach(&lab);
    injector.arm(request(port, Effect::Drop)).unwrap();
    assert!(traces(&lab).contains("xdp"));
    drop(injector);
    assert_eq!(traces(&lab), before);
}

#[test]
fn a_port_that_cannot_be_had_is_refused_and_nothing_stays_attached() {
    let lab = Lab::new(1);
    let netns = lab.here_fd();
    let spec = |nic: &str, ifname: &str| PortSpec {
        node: "node-1".to_owned(),
        nic: nic.to_owned(),
        netns: Some(netns.as_fd()),
        ifname: ifname.to_owned(),
    };
    let missing = Injector::attach(&[spec("a", "nic0"), spec("b", "nic9")]).unwrap_err();
    assert!(matches!(missing, Error::NoInterface { ifname, .. } if ifname == "nic9"));
    assert!(!traces(&lab).contains("xdp"));
    let twice = Injector::attach(&[spec("a", "nic0"), spec("a", "nic0")]).unwrap_err();
    assert!(matches!(twice, Error::BadPorts { .. }), "{twice}");
    let _first = Injector::attach(&[spec("a", "nic0")]).unwrap();
    let second = Injector::attach(&[spec("a", "nic0")]).unwrap_err();
    assert!(matches!(second, Error::Occupied { .. }), "{second}");
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let lab = Lab::new(1);
    let (mut injector, port) = attach(&lab);
    let good = || request(port, Effect::Drop);
    for bad in [
        ArmRequest { ports: vec![], ..good() },
        ArmRequest { lease: Duration::ZERO, ..good() },
        ArmRequest { trigger: KernelTrigger::Wire { bytes: 0 }, ..good() },
        ArmRequest { until: Some(call_point(0)), ..good() },
        ArmRequest { effect: Effect::Loss { parts_per_million: 1_000_001, seed: 1 }, ..good() },
        ArmRequest { effect: Effect::Flap { down: LONG, up: Duration::ZERO }, ..good() },
    ] {
        assert!(matches!(injector.arm(bad), Err(Error::BadRequest { .. })));
    }
    let mut point = call_point(1);
    point.symbol = "no_such_function".to_owned();
    let error = injector.arm(ArmRequest { until: Some(point), ..good() }).unwrap_err();
    assert!(error.to_string().contains("no_such_function"), "{error}");
    let gone = CallPoint { pid: u32::MAX >> 1, ..call_point(1) };
    let error = injector.arm(ArmRequest { until: Some(gone), ..good() }).unwrap_err();
    assert!(matches!(error, Error::Probe { .. }), "{error}");
}
