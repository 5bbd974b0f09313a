//! What can go wrong with a cluster: each error says what, where, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why a cluster could not be built, changed, read or entered.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The caller asked for a cluster that cannot exist.
    #[error("{place}: {reason}\n  hint: {hint}")]
    Spec {
        /// Node or NIC the fault is at.
        place: String,
        /// What is wrong with it.
        reason: String,
        /// What would be accepted.
        hint: &'static str,
    },
    /// The process lacks a right that namespaces and interfaces need.
    #[error("not permitted to {what} ({place})\n  hint: run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN")]
    Privilege {
        /// What was attempted.
        what: String,
        /// Namespace or file it was attempted in.
        place: String,
    },
    /// The kernel does not offer what the emulation needs.
    #[error("the kernel cannot {what} ({place}): {source}\n  hint: {hint}")]
    Unsupported {
        /// What was attempted.
        what: String,
        /// Namespace it was attempted in.
        place: String,
        /// Which kernel option is needed.
        hint: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused a change for another reason.
    #[error("cannot {what} ({place}): {source}{}", explained(.kernel))]
    Refused {
        /// What was attempted.
        what: String,
        /// Namespace or file it was attempted in.
        place: String,
        /// The kernel's own words, where it gave any.
        kernel: Option<String>,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No such node, or no such NIC on it.
    #[error("{node}{}: no such place in cluster {cluster}\n  hint: it has {known}", slash(.nic))]
    Unknown {
        /// The cluster asked.
        cluster: String,
        /// The node asked for.
        node: String,
        /// The NIC asked for, when the node exists.
        nic: Option<String>,
        /// What there is instead.
        known: String,
    },
    /// A state file cannot be read, written or understood.
    #[error("state file {}: {reason}\n  hint: {hint}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
    /// No running cluster answers to that name.
    #[error("no running cluster{}\n  hint: start one with `r2cc-bench run` or `r2cc-bench cluster`, as the same user", named(.asked))]
    NotRunning {
        /// The cluster asked for; `None` when any would have done.
        asked: Option<String>,
    },
}

impl ClusterError {
    /// Whether the environment, and not the request, is at fault (the bench then exits 4).
    pub fn is_environment(&self) -> bool {
        !matches!(self, Self::Spec { .. } | Self::Unknown { .. })
    }

    /// Sorts an operating system error by what the reader can do about it.
    pub(super) fn from_os(what: impl Into<String>, place: &str, source: io::Error) -> Self {
        let (what, place) = (what.into(), place.to_owned());
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Privilege { what, place },
            Some(libc::EROFS) => Self::Unsupported {
                what,
                place,
                hint: "/proc/sys is mounted read-only: in a container, start it privileged",
                source,
            },
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => Self::Unsupported {
                what,
                place,
                hint: "needs veth, bridge, sch_tbf, network and UTS namespaces, and policy routing \
                       (CONFIG_VETH, BRIDGE, NET_SCH_TBF, NET_NS, UTS_NS, IP_MULTIPLE_TABLES)",
                source,
            },
            _ => Self::Refused { what, place, kernel: None, source },
        }
    }
}

fn explained(kernel: &Option<String>) -> String {
    kernel.as_ref().map_or_else(String::new, |text| format!(" ({text})"))
}

fn slash(nic: &Option<String>) -> String {
    nic.as_ref().map_or_else(String::new, |nic| format!("/{nic}"))
}

fn named(asked: &Option<String>) -> String {
    asked.as_ref().map_or_else(String::new, |id| format!(" called {id}"))
}
