//! What the benchmark asks of a rank on its standard input and what the rank answers on its standard output,
//! one JSON object a line.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use serde::{Deserialize, Serialize};

/// Congestion control of the baseline and of iperf3: that of the library's lanes.
pub(crate) const CONGESTION_CONTROL: &str = "cubic";

/// Everything a rank needs to begin; an argument of its process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankConfig {
    pub(crate) rank: usize,
    pub(crate) node: String,
    /// Where rank 0 listens.
    pub(crate) rendezvous: SocketAddr,
    pub(crate) secret: String,
    pub(crate) nics: Vec<String>,
    pub(crate) bytes: usize,
}

/// How plain sockets are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Connections a NIC and direction.
    pub(crate) lanes_a_nic: usize,
    /// Most bytes of one read or write.
    pub(crate) piece_bytes: usize,
    /// 1: one thread sends and receives; 2: one each.
    pub(crate) threads: usize,
    /// Send and receive buffer of a socket; 0: the kernel tunes them.
    pub(crate) buffer_bytes: usize,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Listen on these addresses for plain connections.
    Listen { addrs: Vec<Ipv4Addr>, shape: Shape },
    /// Open the plain connections: source and target of each NIC; then accept as many.
    Connect { ends: Vec<(Ipv4Addr, SocketAddrV4)>, shape: Shape },
    /// Move and add the bytes over the plain connections.
    Plain { shape: Shape },
    /// Move as many bytes over them, as iperf3 does.
    Sink { shape: Shape },
    /// Run one AllReduce of the library.
    AllReduce,
    /// Run this many AllReduces of 8 bytes.
    Latency { count: usize },
    /// Close and end.
    Finish,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// The rank has joined.
    Ready,
    /// Ports of the listeners.
    Listening { ports: Vec<u16> },
    /// The plain connections are open.
    Connected,
    /// One timed run whose results were right.
    Ran(Run),
    /// Times of the small AllReduces.
    Latencies { nanos: Vec<u64> },
    /// Sums over the links at the end.
    Finished { replayed_bytes: u64, paths_suspected: u64 },
    /// The rank cannot go on.
    Failed { error: String },
}

/// One rank's share of a run.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Run {
    /// CLOCK_MONOTONIC.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    /// User and system time of the process.
    pub(crate) cpu_ns: u64,
}
