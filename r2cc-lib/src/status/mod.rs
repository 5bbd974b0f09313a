//! What the communicators of this process are doing right now, for whoever asks.
//!
//! With `R2CC_STATUS=SOCKET` (`%p`: the process number) whoever connects to that Unix socket gets one JSON line, a
//! [`ProcessStatus`]; SIGUSR1 has the same written to standard error in words. An I/O thread has a [`Source`]: once a
//! tick it looks at one number, and tells only when it is asked, so that nobody who looks can hold up the data.

mod board;
mod server;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::repair::{PathReport, Transition};
pub use board::Source;
pub use server::{Server, read, tell_on_signal};

/// Version of the status line.
pub const STATUS_VERSION: u32 = 1;

/// One process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Version of the line; always 1.
    pub version: u32,
    /// When it was told, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The process.
    pub pid: u32,
    /// Its communicators.
    pub comms: Vec<CommStatus>,
    /// I/O threads that did not answer in time.
    pub silent: usize,
}

/// One communicator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CommStatus {
    /// `native`, or `nccl send 3`: what it is to the caller.
    pub name: String,
    /// This rank, if it is known.
    pub rank: Option<usize>,
    /// Ranks of the communicator, if it is known.
    pub world: Option<usize>,
    /// This node.
    pub node: String,
    /// What it is doing, in words.
    pub activity: String,
    /// Collectives, or messages, that have begun.
    pub begun: u64,
    /// Payload bytes posted so far.
    pub payload_bytes: u64,
    /// Of them sent again.
    pub replayed_bytes: u64,
    /// Its outgoing links.
    pub links: Vec<LinkNow>,
    /// The last change of a path.
    pub last_transition: Option<LastTransition>,
}

/// One outgoing link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkNow {
    /// Who receives: `rank 2 on node-2`.
    pub peer: String,
    /// Its paths.
    pub paths: Vec<PathNow>,
}

/// One path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathNow {
    /// Local NIC.
    pub nic: String,
    /// The NIC it reaches, or its address.
    pub peer_nic: String,
    /// opening, live, suspect, failed or proving.
    pub state: String,
    /// Delivery rate measured last, bits/s.
    pub bits_s: Option<u64>,
    /// Bytes sent and not acknowledged.
    pub in_flight_bytes: u64,
}

/// A change of a path's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastTransition {
    /// When, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// Which path, from which state to which, and why.
    pub text: String,
}

impl PathNow {
    /// A path between these NICs, as its link reports it.
    pub fn new(nic: impl Into<String>, peer_nic: impl Into<String>, report: &PathReport) -> Self {
        Self {
            nic: nic.into(),
            peer_nic: peer_nic.into(),
            state: report.state.word().to_owned(),
            bits_s: report.bytes_s.map(|bytes_s| bytes_s.saturating_mul(8)),
            in_flight_bytes: report.in_flight_bytes,
        }
    }
}

impl LastTransition {
    /// Of the path `path`, in words.
    pub fn new(path: impl fmt::Display, t: &Transition) -> Self {
        let text = format!("{path}: {} -> {}, {}", t.from.word(), t.to.word(), t.cause.word());
        Self { at_ns: t.at.as_nanos() as u64, text }
    }
}

impl LinkNow {
    /// Paths in service.
    pub fn live(&self) -> usize {
        self.paths.iter().filter(|path| path.state == "live").count()
    }

    /// Whether one more failure would end it; a link inside a node has no NIC to lose.
    pub fn is_unprotected(&self) -> bool {
        self.live() <= 1 && self.paths.iter().any(|path| path.nic != "lo")
    }
}

impl CommStatus {
    /// Its links that one more failure would end.
    pub fn unprotected(&self) -> impl Iterator<Item = &LinkNow> {
        self.links.iter().filter(|link| link.is_unprotected())
    }
}

impl fmt::Display for ProcessStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.comms.is_empty() && self.silent == 0 {
            writeln!(f, "process {}: no communicators", self.pid)?;
        }
        for comm in &self.comms {
            comm.write(f, self.pid, self.at_ns)?;
        }
        if self.silent > 0 {
            writeln!(f, "process {}: {} I/O threads did not answer", self.pid, self.silent)?;
        }
        Ok(())
    }
}

impl CommStatus {
    fn write(&self, f: &mut fmt::Formatter<'_>, pid: u32, at_ns: u64) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        match (self.rank, self.world) {
            (Some(rank), Some(world)) => write!(f, "rank {rank} of {world}")?,
            (Some(rank), None) => write!(f, "rank {rank}")?,
            (None, _) => write!(f, "process {pid}")?,
        }
        write!(f, " on {}, {}: {}; {} begun, ", self.node, self.name, self.activity, self.begun)?;
        writeln!(f, "{:.1} MiB posted, {:.2} MiB again", mib(self.payload_bytes), mib(self.replayed_bytes))?;
        for link in &self.links {
            write!(f, "  to {}: {} of {} paths live", link.peer, link.live(), link.paths.len())?;
            for path in &link.paths {
                write!(f, "; {} {}", path.nic, path.state)?;
                if let Some(bits_s) = path.bits_s.filter(|_| path.state == "live") {
                    write!(f, " {:.0} Mbit/s", bits_s as f64 / 1e6)?;
                }
            }
            writeln!(f, "{}", if link.is_unprotected() { "  UNPROTECTED" } else { "" })?;
        }
        if let Some(last) = &self.last_transition {
            let ago = at_ns.saturating_sub(last.at_ns) as f64 / 1e9;
            writeln!(f, "  last change {ago:.1} s ago: {}", last.text)?;
        }
        Ok(())
    }
}
