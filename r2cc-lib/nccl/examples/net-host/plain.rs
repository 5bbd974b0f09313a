//! The baseline: the same messages over plain sockets, one a communicator and direction, with nothing around them.
//! Communicator `i` uses NIC `i` modulo their number, as NCCL's own sockets do. A thread writes, another reads.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use nix::ifaddrs::getifaddrs;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use crate::{Script, order};

/// Addresses of the NICs that carry data.
fn addresses() -> Vec<Ipv4Addr> {
    let nics = getifaddrs().unwrap().filter(|nic| nic.interface_name != "lo" && nic.interface_name != "mgmt0");
    nics.filter_map(|nic| nic.address?.as_sockaddr_in().map(|addr| addr.ip())).collect()
}

pub(crate) fn round(script: &Script) -> Value {
    let own = addresses();
    let listeners: Vec<TcpListener> =
        (0..script.comms).map(|at| TcpListener::bind((own[at % own.len()], 0)).unwrap()).collect();
    let places: Vec<String> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
    println!("handles {}", places.join(" "));
    let line = order();
    let peers: Vec<SocketAddr> = line.split(' ').skip(1).map(|place| place.parse().unwrap()).collect();
    let out: Vec<TcpStream> = peers.iter().enumerate().map(|(at, peer)| connect(own[at % own.len()], *peer)).collect();
    let into: Vec<TcpStream> = listeners.iter().map(|l| l.accept().unwrap().0).collect();
    println!("connected");
    let bytes = script.bytes.expect("plain sockets move messages of one length");
    let started = Instant::now();
    std::thread::scope(|scope| {
        for mut socket in out {
            scope.spawn(move || {
                let buffers = vec![vec![0x5a_u8; bytes]; script.in_flight];
                (0..script.messages).for_each(|m| socket.write_all(&buffers[m as usize % buffers.len()]).unwrap());
            });
        }
        for mut socket in into {
            scope.spawn(move || {
                let mut buffers = vec![vec![0_u8; bytes]; script.in_flight];
                for m in 0..script.messages {
                    let at = m as usize % buffers.len();
                    socket.read_exact(&mut buffers[at]).unwrap();
                }
            });
        }
    });
    let received = script.comms as u64 * script.messages * bytes as u64;
    json!({"seconds": started.elapsed().as_secs_f64(), "received_bytes": received, "wrong_bytes": 0})
}

fn connect(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}
