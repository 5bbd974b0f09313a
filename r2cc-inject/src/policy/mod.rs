//! Which interfaces a fault may act on. Default deny: those of emulated clusters that
//! run on this machine, and those an allow file names; never, unless forced, the one
//! with the default route or the one that carries this session's SSH connection.
//!
//! Turns a fault's target into interfaces in namespaces, each with the reason why it is
//! allowed. Changes nothing. Start at [`resolve`].

mod allow;
mod cluster;

use std::{fmt, io, net::IpAddr, os::fd::AsFd, path::PathBuf};

pub use allow::{Allow, DEFAULT_PATH as ALLOW_PATH};
pub use cluster::{Cluster, ClusterNic, ClusterNode};
use thiserror::Error;

use crate::{change::Place, fault::Target, netlink::Route, netns::Netns, process::Process};

/// Where a fault's nodes are to be found.
#[derive(Debug, Clone, Default)]
pub struct Where {
    /// a running cluster by its id, or `latest`
    pub cluster: Option<String>,
    /// nodes by a process in their namespace
    pub nodes: Vec<(String, u32)>,
    /// an allow file beside the default one
    pub allow: Option<PathBuf>,
    /// lets go of the default route's and SSH's interface
    pub danger_default_route: bool,
}

/// An interface that a fault may act on.
#[derive(Debug, Clone)]
pub struct Permitted {
    /// the node, as the fault names it
    pub node: String,
    /// the NIC; for a rail, the switch's port
    pub nic: String,
    /// the interface
    pub place: Place,
    /// the other end of its cable, where that is known
    pub far_end: Option<Place>,
    /// why it may
    pub because: Because,
    /// the process that holds the namespace, where a cluster made it
    pub holder: Option<Process>,
}

/// Why an interface may be acted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Because {
    /// an emulated cluster made it
    Cluster(String),
    /// an allow file names it
    AllowFile(PathBuf),
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster(id) => write!(f, "made by the emulated cluster {id}"),
            Self::AllowFile(path) => write!(f, "named in {}", path.display()),
        }
    }
}

/// Why a target was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Not ours and not allowed.
    #[error("{target}: interface {ifname} may not be touched: no running emulated cluster made it, and no allow file names it\n  hint: name it in {} or in a file given with --allow: interfaces = [\"{target}\"]", allow.display())]
    NotAllowed {
        /// the fault's target
        target: Target,
        /// the interface
        ifname: String,
        /// the file that could allow it
        allow: PathBuf,
    },
    /// It carries what must not be cut.
    #[error(
        "{target}: interface {ifname} carries {what}: cutting it could lock you out\n  hint: --danger-default-route does it nevertheless"
    )]
    Lifeline {
        /// the fault's target
        target: Target,
        /// the interface
        ifname: String,
        /// the default route, or an SSH connection
        what: &'static str,
    },
    /// Nothing of that name.
    #[error("{target}: {reason}")]
    Unknown {
        /// the fault's target
        target: Target,
        /// what is there instead
        reason: String,
    },
    /// A file that cannot be used.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// the file
        path: PathBuf,
        /// why
        reason: String,
    },
    /// The system does not answer.
    #[error("{target}: cannot look at {what}: {source}")]
    System {
        /// the fault's target
        target: Target,
        /// what was looked at
        what: String,
        /// what the system said
        source: io::Error,
    },
}

/// The interfaces that `target` means and that may be acted on.
///
/// # Errors
/// [`Refusal`].
pub fn resolve(target: &Target, place: &Where) -> Result<Vec<Permitted>, Refusal> {
    let found = locate(target, place)?;
    for permitted in &found {
        check_lifelines(target, permitted, place.danger_default_route)?;
    }
    Ok(found)
}

fn locate(target: &Target, place: &Where) -> Result<Vec<Permitted>, Refusal> {
    if let Some(id) = &place.cluster {
        return Cluster::running(id, target)?.locate(target);
    }
    let unknown = |reason: String| Refusal::Unknown { target: target.clone(), reason };
    if target.is_rail() {
        return Err(unknown("a rail is cut in a cluster: name it with --cluster".to_owned()));
    }
    let netns = match place.nodes.iter().find(|(name, _)| *name == target.node) {
        Some((_, pid)) => Netns::at(format!("/proc/{pid}/ns/net")).map_err(|source| Refusal::System {
            target: target.clone(),
            what: format!("the network namespace of process {pid}"),
            source,
        })?,
        None if is_this_host(&target.node) => Netns::current().map_err(|source| Refusal::System {
            target: target.clone(),
            what: "this network namespace".to_owned(),
            source,
        })?,
        None => {
            let known: Vec<&str> = place.nodes.iter().map(|(name, _)| name.as_str()).collect();
            let hint = if known.is_empty() { "none is given".to_owned() } else { known.join(", ") };
            return Err(unknown(format!(
                "no such node ({hint}); give --cluster ID, --node {}=PID, or localhost for this host",
                target.node
            )));
        }
    };
    // A namespace given by a process may be one that a cluster made.
    if let Some(permitted) = Cluster::owning(&netns, target)? {
        return Ok(vec![permitted]);
    }
    let here = Place { netns, ifname: target.nic.clone() };
    let allowed = Allow::find(place.allow.as_deref(), target)?;
    let Some(file) = allowed else {
        return Err(Refusal::NotAllowed {
            target: target.clone(),
            ifname: target.nic.clone(),
            allow: ALLOW_PATH.into(),
        });
    };
    Ok(vec![Permitted {
        node: target.node.clone(),
        nic: target.nic.clone(),
        place: here,
        far_end: None,
        because: Because::AllowFile(file),
        holder: None,
    }])
}

/// `localhost`, or this host's name.
fn is_this_host(node: &str) -> bool {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    node == "localhost" || name.as_deref() == Some(node)
}

fn check_lifelines(target: &Target, permitted: &Permitted, forced: bool) -> Result<(), Refusal> {
    let look = || {
        let mut route = Route::open(permitted.place.netns.open()?.as_fd())?;
        let index = route.interface(&permitted.place.ifname)?.index;
        let mut what = None;
        if route.default_route_interfaces()?.contains(&index) {
            what = Some("the default route");
        }
        if let Some(address) = ssh_server_address()
            && route.interface_of(address)? == Some(index)
        {
            what = Some("this SSH connection");
        }
        io::Result::Ok(what)
    };
    let what = look().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Refusal::Unknown { target: target.clone(), reason: source.to_string() },
        _ => Refusal::System { target: target.clone(), what: permitted.place.to_string(), source },
    })?;
    match what {
        Some(what) if !forced => {
            Err(Refusal::Lifeline { target: target.clone(), ifname: permitted.place.ifname.clone(), what })
        }
        _ => Ok(()),
    }
}

/// This host's end of the SSH connection that this process runs under.
fn ssh_server_address() -> Option<IpAddr> {
    // CLIENT-ADDRESS CLIENT-PORT SERVER-ADDRESS SERVER-PORT
    let connection = std::env::var("SSH_CONNECTION").ok()?;
    let address = connection.split_whitespace().nth(2)?;
    address.split('%').next()?.parse().ok()
}
