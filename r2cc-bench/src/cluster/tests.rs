//! Real namespaces: these need root, and leave nothing behind.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{io, thread};

use r2cc_inject::change::{Change, Planned};
use socket2::{Domain, Socket, Type};

use super::*;

const NICS: [&str; 3] = ["mlx5_0", "mlx5_2", "mlx5_3"];
const RATE: u64 = 200_000_000;
/// Long enough for a busy machine; nothing is measured with it.
const PATIENCE: Duration = Duration::from_secs(10);

fn three_by_three(fabric: Fabric) -> EmulatedCluster {
    EmulatedCluster::build(&ClusterSpec::uniform(3, &NICS, Some(RATE), fabric)).unwrap()
}

fn nic<'a>(cluster: &'a EmulatedCluster, node: &str, nic: &str) -> &'a Nic {
    cluster.node(node).unwrap().nic(nic).unwrap()
}

/// A change at one end of a cable, made.
fn changed(cluster: &EmulatedCluster, node: &str, nic: &str, side: Side, change: Change) -> Planned {
    let planned = Planned::new(cluster.place(node, nic, side).unwrap(), change).unwrap();
    planned.make().unwrap();
    planned
}

fn listener(cluster: &EmulatedCluster, node: &str, addr: Ipv4Addr) -> Socket {
    let netns = cluster.node(node).unwrap().netns.as_fd();
    in_netns(netns, || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&address(addr, 0)).unwrap();
        socket.listen(16).unwrap();
        socket
    })
    .unwrap()
}

/// Connects from `source` on `node`; the socket is bound to the address, not to the device.
fn connect(
    cluster: &EmulatedCluster,
    node: &str,
    source: Ipv4Addr,
    target: &Socket,
    patience: Duration,
) -> io::Result<Socket> {
    let netns = cluster.node(node).unwrap().netns.as_fd();
    let target = target.local_addr().unwrap();
    in_netns(netns, || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&address(source, 0))?;
        socket.connect_timeout(&target, patience)?;
        Ok(socket)
    })
    .unwrap()
}

fn address(ip: Ipv4Addr, port: u16) -> socket2::SockAddr {
    SocketAddr::V4(SocketAddrV4::new(ip, port)).into()
}

fn stream(cluster: &EmulatedCluster, from: (&str, &str), to: (&str, &str)) -> (Socket, Socket) {
    let target = listener(cluster, to.0, nic(cluster, to.0, to.1).addr);
    let source = nic(cluster, from.0, from.1).addr;
    let sender = connect(cluster, from.0, source, &target, PATIENCE).unwrap();
    let receiver = target.accept().unwrap().0;
    for socket in [&sender, &receiver] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (sender, receiver)
}

/// Moves `bytes` over one stream and returns how long it took.
fn transfer(mut sender: &Socket, mut receiver: &Socket, bytes: usize) -> Duration {
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            let chunk = vec![0x5a; 64 * 1024];
            let mut left = bytes;
            while left > 0 {
                left -= sender.write(&chunk[..left.min(chunk.len())]).unwrap();
            }
        });
        let mut chunk = vec![0; 256 * 1024];
        let mut left = bytes;
        while left > 0 {
            let read = receiver.read(&mut chunk).unwrap();
            assert_ne!(read, 0, "the sender closed early");
            left -= read;
        }
    });
    start.elapsed()
}

fn counters_of(cluster: &EmulatedCluster, node: &str, nic: &str) -> NicCounters {
    let all = cluster.counters().unwrap();
    all.into_iter().find(|counters| counters.node == node && counters.nic == nic).unwrap()
}

#[test]
fn every_rail_connects_every_pair_of_nodes() {
    let cluster = three_by_three(Fabric::Rails);
    for from in cluster.nodes() {
        for to in cluster.nodes().iter().filter(|to| to.name != from.name) {
            for (source, target) in from.nics.iter().zip(&to.nics) {
                let target = listener(&cluster, &to.name, target.addr);
                connect(&cluster, &from.name, source.addr, &target, PATIENCE).unwrap();
            }
        }
    }
}

/// A connection that must not come about is given this long.
const GIVEN_UP: Duration = Duration::from_millis(400);

#[test]
fn a_bound_socket_does_not_reach_another_rail() {
    let cluster = three_by_three(Fabric::Rails);
    let source = nic(&cluster, "node-1", "mlx5_0").addr;
    let target = listener(&cluster, "node-2", nic(&cluster, "node-2", "mlx5_2").addr);
    let error = connect(&cluster, "node-1", source, &target, GIVEN_UP).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH), "{error}");
    let moved = counters_of(&cluster, "node-2", "mlx5_2").rx_packets;
    assert_eq!(moved, 0, "something crossed the rails");
}

#[test]
fn an_idle_cluster_is_silent() {
    let cluster = three_by_three(Fabric::Rails);
    thread::sleep(Duration::from_millis(300));
    for counters in cluster.counters().unwrap() {
        assert_eq!(counters.rx_packets + counters.tx_packets, 0, "{counters:?}");
    }
}

#[test]
fn counters_move_on_the_nic_that_carries_the_bytes_and_on_no_other() {
    let cluster = three_by_three(Fabric::Rails);
    let (sender, receiver) = stream(&cluster, ("node-1", "mlx5_2"), ("node-3", "mlx5_2"));
    let before = cluster.counters().unwrap();
    let bytes = 2_000_000;
    transfer(&sender, &receiver, bytes);
    for (old, new) in before.iter().zip(cluster.counters().unwrap()) {
        let (rx, tx) = (new.rx_bytes - old.rx_bytes, new.tx_bytes - old.tx_bytes);
        let expected = match (new.node.as_str(), new.nic.as_str()) {
            ("node-1", "mlx5_2") => tx,
            ("node-3", "mlx5_2") => rx,
            _ => {
                assert_eq!((rx, tx), (0, 0), "{new:?}");
                continue;
            }
        };
        let payload = bytes as u64;
        assert!((payload..payload + payload / 10).contains(&expected), "{new:?}");
    }
}

/// No transfer over a shaped NIC can be shorter than this, however the machine is loaded: one
/// burst goes at once, the rest at the rate.
fn shortest(bytes: usize, bits_s: u64) -> Duration {
    Duration::from_secs_f64((bytes - 128 * 1024) as f64 * 8.0 / bits_s as f64)
}

/// A busy machine only adds time, so the shortest of several transfers tells most.
fn fastest(sender: &Socket, receiver: &Socket, bytes: usize) -> Duration {
    (0..6).map(|_| transfer(sender, receiver, bytes)).min().unwrap()
}

#[test]
fn the_rate_bounds_either_direction_and_follows_when_changed_and_put_back() {
    let cluster = three_by_three(Fabric::Rails);
    let (one, two) = stream(&cluster, ("node-1", "mlx5_0"), ("node-2", "mlx5_0"));
    let bytes = 2_000_000;
    let is_shaped_to = |bits_s: u64| {
        for (from, to) in [(&one, &two), (&two, &one)] {
            let floor = shortest(bytes, bits_s);
            let took = fastest(from, to, bytes);
            assert!(took >= floor, "{took:?} is faster than {bits_s} bit/s allow");
            assert!(took < floor * 2, "{took:?} is far slower than {bits_s} bit/s allow");
        }
    };
    is_shaped_to(RATE);
    let slow = Change::Rate { bits_per_second: RATE / 4 };
    let made = [Side::Node, Side::Switch].map(|side| changed(&cluster, "node-1", "mlx5_0", side, slow));
    is_shaped_to(RATE / 4);
    made.iter().for_each(|planned| planned.undo().unwrap());
    is_shaped_to(RATE);
    let bare = EmulatedCluster::build(&ClusterSpec::uniform(2, &["mlx5_0"], None, Fabric::Rails)).unwrap();
    let (one, two) = stream(&bare, ("node-1", "mlx5_0"), ("node-2", "mlx5_0"));
    assert!(fastest(&one, &two, bytes) < shortest(bytes, RATE));
}

#[test]
fn a_blocked_port_is_silent_with_its_carrier_and_carries_on_when_freed() {
    let cluster = three_by_three(Fabric::Rails);
    let (sender, receiver) = stream(&cluster, ("node-1", "mlx5_3"), ("node-2", "mlx5_3"));
    transfer(&sender, &receiver, 100_000);
    let blocked = changed(&cluster, "node-1", "mlx5_3", Side::Switch, Change::BlockPort);
    let bystander = counters_of(&cluster, "node-3", "mlx5_3").rx_bytes;
    for socket in [&sender, &receiver] {
        let mut socket = socket;
        socket.write_all(&[1; 1000]).unwrap();
    }
    receiver.set_read_timeout(Some(GIVEN_UP)).unwrap();
    let silence = (&receiver).read(&mut [0; 1]).unwrap_err();
    assert_eq!(silence.kind(), io::ErrorKind::WouldBlock);
    assert!(carrier(&cluster, "node-1", "mlx5_3"), "carrier stays");
    // ARP may ask everybody; a frame for the station that has gone reaches nobody.
    let flooded = counters_of(&cluster, "node-3", "mlx5_3").rx_bytes - bystander;
    assert!(flooded < 1000, "{flooded} bytes reached a third node");

    blocked.undo().unwrap();
    for socket in [&sender, &receiver] {
        let mut socket = socket;
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.read_exact(&mut [0; 1000]).unwrap();
    }
    transfer(&receiver, &sender, 100_000);
}

#[test]
fn a_switch_port_that_goes_down_takes_the_carrier_and_a_nic_its_routes() {
    for fabric in [Fabric::Rails, Fabric::Any] {
        let cluster = three_by_three(fabric);
        let source = nic(&cluster, "node-1", "mlx5_0").addr;
        let target = listener(&cluster, "node-2", nic(&cluster, "node-2", "mlx5_0").addr);
        let reach = |patience| connect(&cluster, "node-1", source, &target, patience);
        reach(PATIENCE).unwrap();
        for side in [Side::Switch, Side::Node] {
            let down = changed(&cluster, "node-1", "mlx5_0", side, Change::LinkDown);
            assert!(!carrier(&cluster, "node-1", "mlx5_0"), "{side:?}");
            assert!(carrier(&cluster, "node-1", "mlx5_2"), "{side:?}");
            let error = reach(GIVEN_UP).unwrap_err();
            if side == Side::Node {
                assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH), "{error}");
            }
            down.undo().unwrap();
            assert!(carrier(&cluster, "node-1", "mlx5_0"), "{side:?}");
            reach(PATIENCE).unwrap();
        }
        let across = listener(&cluster, "node-2", nic(&cluster, "node-2", "mlx5_3").addr);
        let crossed = connect(&cluster, "node-1", source, &across, GIVEN_UP);
        assert_eq!(crossed.is_ok(), fabric == Fabric::Any, "{crossed:?}");
    }
}

#[test]
fn on_an_any_to_any_fabric_every_nic_reaches_every_nic_and_leaves_by_itself() {
    let cluster = three_by_three(Fabric::Any);
    for from in NICS {
        for to in NICS {
            let before = cluster.counters().unwrap();
            let (sender, receiver) = stream(&cluster, ("node-1", from), ("node-2", to));
            transfer(&sender, &receiver, 300_000);
            transfer(&receiver, &sender, 300_000);
            for (old, new) in before.iter().zip(cluster.counters().unwrap()) {
                let used = matches!(
                    (new.node.as_str(), new.nic.as_str()),
                    ("node-1", nic) if nic == from
                ) || (new.node == "node-2" && new.nic == to);
                let (rx, tx) = (new.rx_bytes - old.rx_bytes, new.tx_bytes - old.tx_bytes);
                if used {
                    assert!(rx > 300_000 && tx > 300_000, "{from} to {to}: {new:?}");
                } else {
                    // ARP asks everybody, and nobody else answers.
                    assert!(rx < 2_000 && tx == 0, "{from} to {to}: {new:?} {rx} {tx}");
                }
            }
        }
    }
}

#[test]
fn the_management_network_reaches_every_node_unshaped() {
    let cluster = three_by_three(Fabric::Rails);
    let (sender, receiver) = stream(&cluster, ("node-1", MGMT_NIC), ("node-3", MGMT_NIC));
    let bytes = 2_000_000;
    assert!(fastest(&sender, &receiver, bytes) < shortest(bytes, RATE));
}

#[test]
fn a_command_sees_its_node_by_hostname_and_interfaces() {
    let cluster = three_by_three(Fabric::Rails);
    let run = |script: &str| {
        let mut command = cluster.command("node-2", Path::new("/bin/sh")).unwrap();
        let output = command.args(["-c", script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run("cat /proc/sys/kernel/hostname").trim(), "node-2");
    let devices = run("cat /proc/self/net/dev");
    for name in NICS.iter().chain(&[MGMT_NIC, "lo"]) {
        assert!(devices.contains(name), "{name} is missing in {devices}");
    }
    assert_ne!(nix::unistd::gethostname().unwrap(), "node-2");
}

#[test]
fn two_clusters_with_the_same_names_and_addresses_do_not_meet() {
    let (one, two) = (three_by_three(Fabric::Rails), three_by_three(Fabric::Rails));
    assert_ne!(one.id(), two.id());
    let (sender, receiver) = stream(&one, ("node-1", "mlx5_0"), ("node-2", "mlx5_0"));
    transfer(&sender, &receiver, 100_000);
    assert_eq!(counters_of(&two, "node-2", "mlx5_0").rx_bytes, 0);
    drop(one);
    let (sender, receiver) = stream(&two, ("node-1", "mlx5_0"), ("node-2", "mlx5_0"));
    transfer(&sender, &receiver, 100_000);
}

#[test]
fn a_place_that_does_not_exist_is_named_with_those_that_do() {
    let cluster = three_by_three(Fabric::Rails);
    let error = cluster.place("node-9", "mlx5_0", Side::Switch).unwrap_err();
    assert!(error.to_string().contains("node-1, node-2, node-3"), "{error}");
    let error = cluster.place("node-1", "mlx5_9", Side::Node).unwrap_err();
    assert!(error.to_string().contains("node-1/mlx5_9"), "{error}");
    assert!(error.to_string().contains("mlx5_2"), "{error}");
    assert!(!error.is_environment());
}

#[test]
fn a_cluster_that_cannot_exist_is_refused_with_its_place() {
    type Break = fn(&mut ClusterSpec);
    let broken: [(&str, Break); 7] = [
        ("cluster", |spec| spec.nodes.clear()),
        ("node one", |spec| spec.nodes[0].name = "node one".to_owned()),
        ("node-2", |spec| spec.nodes[0].name = "node-2".to_owned()),
        ("node-1/lo", |spec| spec.nodes[0].nics[0].name = "lo".to_owned()),
        ("node-1/mlx5_2", |spec| spec.nodes[0].nics[0].name = "mlx5_2".to_owned()),
        ("node-3/mlx5_2", |spec| spec.nodes[2].nics[1].rail = 0),
        ("node-3/mlx5_3", |spec| spec.nodes[2].nics[2].rate_bits_s = Some(1000)),
    ];
    for (place, breaks) in broken {
        let mut spec = ClusterSpec::uniform(3, &NICS, Some(RATE), Fabric::Rails);
        breaks(&mut spec);
        let error = EmulatedCluster::build(&spec).unwrap_err();
        assert!(matches!(error, ClusterError::Spec { .. }), "{error}");
        assert!(error.to_string().starts_with(place), "{error}");
    }
}

#[test]
fn without_the_rights_the_error_names_them() {
    let error = thread::spawn(|| {
        // SAFETY: the bare system call changes the identity of this thread alone, which ends here.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        assert_eq!(changed, 0);
        EmulatedCluster::build(&ClusterSpec::uniform(2, &NICS, None, Fabric::Rails)).unwrap_err()
    });
    let error = error.join().unwrap();
    assert!(matches!(error, ClusterError::Privilege { .. }), "{error}");
    assert!(error.is_environment());
    assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
}

#[test]
fn nics_with_long_names_and_missing_rails_are_wired_all_the_same() {
    let mut spec = ClusterSpec::uniform(2, &["a-very-long-nic", "mlx5_2"], None, Fabric::Rails);
    spec.nodes[0].nics.remove(0);
    let cluster = EmulatedCluster::build(&spec).unwrap();
    let (sender, receiver) = stream(&cluster, ("node-1", "mlx5_2"), ("node-2", "mlx5_2"));
    transfer(&sender, &receiver, 100_000);
    assert!(nic(&cluster, "node-2", "a-very-long-nic").switch_port.len() <= 15);
}

/// `IFF_LOWER_UP`, as the node sees it.
fn carrier(cluster: &EmulatedCluster, node: &str, nic: &str) -> bool {
    let netns = cluster.node(node).unwrap().netns.as_fd();
    in_netns(netns, || {
        nix::ifaddrs::getifaddrs()
            .unwrap()
            .filter(|found| found.interface_name == nic)
            .any(|found| found.flags.bits() & libc::IFF_LOWER_UP != 0)
    })
    .unwrap()
}
