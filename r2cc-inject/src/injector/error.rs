//! What can go wrong in the injector, with the facts and what to do about it.

use std::{io, path::PathBuf, time::Duration};

use thiserror::Error;

use crate::probe::ProbeError;

/// Why the injector refused or failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Loading or attaching needs rights this process lacks.
    #[error(
        "not permitted to {action}\n  hint: run as root, or with CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CAP_SYS_ADMIN"
    )]
    NotPermitted {
        /// what was tried
        action: String,
    },
    /// The kernel refused the programs.
    #[error(
        "the kernel refused the program {program}: {reason}\n  hint: this needs Linux 6.6 with BPF and BTF; `r2cc-inject doctor` says what is missing"
    )]
    Load {
        /// the program, or "object"
        program: String,
        /// what it said
        reason: String,
    },
    /// The object built into this library lacks a part.
    #[error("the kernel object lacks {part}\n  hint: it was built from another source; run `make ebpf`")]
    BrokenObject {
        /// the part
        part: &'static str,
    },
    /// The shared arrays cannot be mapped.
    #[error("cannot map the kernel's arrays into memory: {source}")]
    MapMemory {
        /// what the system said
        source: io::Error,
    },
    /// A network namespace cannot be entered.
    #[error("{node}/{nic}: cannot enter its network namespace: {source}")]
    Namespace {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// what the system said
        source: io::Error,
    },
    /// No such interface.
    #[error("{node}/{nic}: no interface {ifname} in its network namespace")]
    NoInterface {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// the interface
        ifname: String,
    },
    /// Another XDP program is on the interface.
    #[error(
        "{node}/{nic}: interface {ifname} already has an XDP program\n  hint: `r2cc-inject doctor` says whose; one injector a port at a time"
    )]
    Occupied {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// the interface
        ifname: String,
    },
    /// A program cannot be attached.
    #[error("{node}/{nic}: cannot attach to {hook} of {ifname}: {source}")]
    Attach {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// the interface
        ifname: String,
        /// ingress or egress
        hook: &'static str,
        /// what the system said
        source: io::Error,
    },
    /// The port's RDMA traffic would bypass the programs.
    #[error(
        "{node}/{nic}: {ifname} has hardware RDMA ({}), which bypasses the kernel: a packet program would drop its TCP and ARP while RDMA goes on\n  hint: cut it at the switch or on its SmartNIC (backend bluefield), set the link down (link-down@{node}/{nic}), or use TCP on it",
        devices.join(", ")
    )]
    RdmaBypass {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// the interface
        ifname: String,
        /// its RDMA devices
        devices: Vec<String>,
    },
    /// The driver cannot be asked about RDMA.
    #[error("{node}/{nic}: cannot ask the driver of {ifname} whether it has RDMA: {source}")]
    Driver {
        /// the port's node
        node: String,
        /// the port's NIC
        nic: String,
        /// the interface
        ifname: String,
        /// what the system said
        source: io::Error,
    },
    /// Two ports under one name, or more ports than there are slots.
    #[error("ports: {reason}")]
    BadPorts {
        /// what is wrong
        reason: String,
    },
    /// A fault that makes no sense.
    #[error("fault: {reason}")]
    BadRequest {
        /// what is wrong
        reason: String,
    },
    /// A call point's function cannot be found.
    #[error(transparent)]
    Symbol(#[from] ProbeError),
    /// A call point cannot be probed.
    #[error("cannot probe {symbol} of {} in process {pid}: {reason}", binary.display())]
    Probe {
        /// the executable or library
        binary: PathBuf,
        /// the function
        symbol: String,
        /// the process
        pid: u32,
        /// what the system said
        reason: String,
    },
    /// All slots hold faults that are not healed.
    #[error("{limit} faults are armed already, which is the limit\n  hint: heal one first")]
    TooManyFaults {
        /// the limit
        limit: usize,
    },
    /// Not a fault of this injector, or one healed so long ago that it is forgotten.
    #[error("no such fault in this injector")]
    UnknownFault,
    /// The lease ran out before it was renewed.
    #[error("the fault's lease ran out {} ms ago; it is healed and stays so", late.as_millis())]
    Expired {
        /// how long ago
        late: Duration,
    },
}

/// An error and its causes on one line: aya's own texts leave the causes out.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let line = next.to_string();
        if !text.contains(&line) {
            text.push_str(": ");
            text.push_str(&line);
        }
        cause = next.source();
    }
    text
}
