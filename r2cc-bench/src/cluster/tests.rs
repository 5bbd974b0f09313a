//! Real namespaces: these need root, and leave nothing behind.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use socket2::{Domain, Socket, Type};

use super::state::{start_time, survey_in, sweep_in};
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
