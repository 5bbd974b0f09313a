//! Namespaces as nodes: made on a thread of their own, held only by file descriptors.
//!
//! Never mounts and never names a namespace, so the kernel frees it with its last descriptor,
//! socket or process.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::sethostname;

use super::ClusterError;

/// Settings of every namespace, written before it has any interface.
///
/// Several NICs of a node may share one segment (any-to-any fabric), so each answers ARP for its
/// own address alone and asks with its own; a reply may come in where no route leads out, so no
/// reverse path filter. Cached TCP metrics would let one iteration influence the next. IPv6 is
/// off: its router and neighbour discovery would put packets on NICs that should be silent.
const SETTINGS: [(&str, &str); 9] = [
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    ("net/ipv4/conf/all/arp_ignore", "1"),
    ("net/ipv4/conf/default/arp_ignore", "1"),
    ("net/ipv4/conf/all/arp_announce", "2"),
    ("net/ipv4/conf/default/arp_announce", "2"),
    ("net/ipv4/tcp_no_metrics_save", "1"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
];

/// A network and a UTS namespace.
#[derive(Debug)]
pub(super) struct Namespaces {
    pub(super) net: OwnedFd,
    pub(super) uts: OwnedFd,
}

impl Namespaces {
    /// Makes both, with `hostname` set inside.
    pub(super) fn create(hostname: &str) -> Result<Self, ClusterError> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS).map_err(|errno| {
                ClusterError::from_os("create network and UTS namespaces", hostname, io::Error::from(errno))
            })?;
            sethostname(hostname)
                .map_err(|errno| ClusterError::from_os("set the hostname", hostname, io::Error::from(errno)))?;
            for (name, value) in SETTINGS {
                write_setting(hostname, name, value)?;
            }
            // The path follows the thread, not the process, whose namespaces stay as they are.
            Ok(Self {
                net: open("/proc/thread-self/ns/net", hostname)?,
                uts: open("/proc/thread-self/ns/uts", hostname)?,
            })
        })
    }
}

/// Runs `work` on a thread inside the network namespace and returns what it made.
///
/// Sockets and BPF links opened there stay bound to that namespace after the thread has gone.
pub fn in_netns<T: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> Result<T, ClusterError> {
    on_thread(|| {
        setns(netns.as_fd(), CloneFlags::CLONE_NEWNET)
            .map_err(|errno| ClusterError::from_os("enter the network namespace", "setns", io::Error::from(errno)))?;
        Ok(work())
    })
}

fn on_thread<T: Send>(work: impl FnOnce() -> Result<T, ClusterError> + Send) -> Result<T, ClusterError> {
    thread::scope(|scope| {
        let spawned = thread::Builder::new()
            .name("r2cc-netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(|error| ClusterError::from_os("start a thread", "this process", error))?;
        spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn write_setting(hostname: &str, name: &str, value: &str) -> Result<(), ClusterError> {
    let path = Path::new("/proc/sys").join(name);
    match fs::write(&path, value) {
        Ok(()) => Ok(()),
        // A kernel without IPv6 has nothing to switch off.
        Err(error) if error.kind() == io::ErrorKind::NotFound && name.contains("ipv6") => Ok(()),
        Err(error) => Err(ClusterError::from_os(format!("set {name} to {value}"), hostname, error)),
    }
}

fn open(path: &str, hostname: &str) -> Result<OwnedFd, ClusterError> {
    File::open(path).map(OwnedFd::from).map_err(|error| ClusterError::from_os(format!("open {path}"), hostname, error))
}
