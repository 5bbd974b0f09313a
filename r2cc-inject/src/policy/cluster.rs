//! Emulated clusters that run on this machine, as their state files describe them.

use std::{os::unix::fs::MetadataExt, path::PathBuf};

use serde::Deserialize;

use super::{Because, Permitted, Refusal};
use crate::{
    change::Place,
    fault::Target,
    netns::Netns,
    process::Process,
    watcher::{STATE_DIR, check_owner, files},
};

/// The management interface, which every node of a cluster has beside its NICs.
const MANAGEMENT_NIC: &str = "mgmt0";

/// A cluster's state file, `/run/r2cc/cluster-<id>.json`; keys that the injector does
/// not need are left alone.
#[derive(Debug, Clone, Deserialize)]
pub struct Cluster {
    /// its name
    pub id: String,
    /// the process that holds it
    pub pid: u32,
    /// that process's start time, where the file says it
    #[serde(default)]
    pub start_time: Option<u64>,
    /// its nodes
    pub nodes: Vec<ClusterNode>,
    /// its switch
    pub switch: ClusterSwitch,
}

/// A node of a cluster.
#[derive(Debug, Clone, Deserialize)]
pub struct ClusterNode {
    /// its name
    pub name: String,
    /// a path that opens its namespace
    pub netns: PathBuf,
    /// its NICs
    pub nics: Vec<ClusterNic>,
}

/// A NIC of a cluster's node.
#[derive(Debug, Clone, Deserialize)]
pub struct ClusterNic {
    /// its name, in faults and in its namespace
    pub name: String,
    /// the rail it is plugged into
    pub rail: String,
    /// the other end of its cable, in the switch's namespace
    #[serde(default)]
    pub switch_port: Option<String>,
}

/// The switch of a cluster.
#[derive(Debug, Clone, Deserialize)]
pub struct ClusterSwitch {
    /// a path that opens its namespace
    pub netns: PathBuf,
}

impl Cluster {
    /// All clusters whose process lives, the latest last.
    ///
    /// # Errors
    /// A state file that cannot be read or trusted.
    pub fn all() -> Result<Vec<Self>, Refusal> {
        let mut found = Vec::new();
        let folder = |error: std::io::Error| Refusal::BadFile { path: STATE_DIR.into(), reason: error.to_string() };
        for path in files("cluster-").map_err(folder)? {
            let read = || {
                check_owner(&path)?;
                let facts = std::fs::metadata(&path)?;
                let text = std::fs::read(&path)?;
                std::io::Result::Ok(((facts.mtime(), facts.mtime_nsec()), text))
            };
            let (age, text) = match read() {
                // its cluster ended meanwhile
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                read => read.map_err(|error| Refusal::BadFile { path: path.clone(), reason: error.to_string() })?,
            };
            let cluster: Self = serde_json::from_slice(&text)
                .map_err(|error| Refusal::BadFile { path: path.clone(), reason: error.to_string() })?;
            if cluster.holder().is_some() {
                found.push((age, cluster));
            }
        }
        found.sort_by_key(|(age, _)| *age);
        Ok(found.into_iter().map(|(_, cluster)| cluster).collect())
    }

    /// The process that holds it, if it lives.
    #[must_use]
    pub fn holder(&self) -> Option<Process> {
        let holder = Process::of(self.pid)?;
        // Its id may have come to another process.
        self.start_time.is_none_or(|started| started == holder.start_time).then_some(holder)
    }

    /// The running cluster of that id, or the latest.
    pub(super) fn running(id: &str, target: &Target) -> Result<Self, Refusal> {
        let mut all = Self::all()?;
        let position = match id {
            "latest" => all.len().checked_sub(1),
            id => all.iter().position(|cluster| cluster.id == id),
        };
        match position {
            Some(position) => Ok(all.swap_remove(position)),
            None => {
                let known: Vec<&str> = all.iter().map(|cluster| cluster.id.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                let reason = format!("no cluster {id} is running under {STATE_DIR}; running: {known}");
                Err(Refusal::Unknown { target: target.clone(), reason })
            }
        }
    }

    /// The interface that `target` means, if a running cluster made its namespace.
    pub(super) fn owning(netns: &Netns, target: &Target) -> Result<Option<Permitted>, Refusal> {
        for cluster in Self::all()? {
            let found =
                cluster.nodes.iter().find(|node| Netns::at(&node.netns).is_ok_and(|its| its.inode == netns.inode));
            if let Some(node) = found {
                return cluster.nic(node, target).map(Some);
            }
        }
        Ok(None)
    }

    /// The interfaces that `target` means.
    pub(super) fn locate(&self, target: &Target) -> Result<Vec<Permitted>, Refusal> {
        let unknown = |reason: String| Refusal::Unknown { target: target.clone(), reason };
        if target.is_rail() {
            return self.rail(target);
        }
        let node = self.nodes.iter().find(|node| node.name == target.node).ok_or_else(|| {
            let known: Vec<&str> = self.nodes.iter().map(|node| node.name.as_str()).collect();
            unknown(format!("cluster {} has the nodes {} and the switch", self.id, known.join(", ")))
        })?;
        Ok(vec![self.nic(node, target)?])
    }

    fn nic(&self, node: &ClusterNode, target: &Target) -> Result<Permitted, Refusal> {
        let known = node.nics.iter().find(|nic| nic.name == target.nic);
        if known.is_none() && target.nic != MANAGEMENT_NIC {
            let names: Vec<&str> = node.nics.iter().map(|nic| nic.name.as_str()).collect();
            let reason = format!("{} of cluster {} has {}, {MANAGEMENT_NIC}", node.name, self.id, names.join(", "));
            return Err(Refusal::Unknown { target: target.clone(), reason });
        }
        let port = known.and_then(|nic| nic.switch_port.clone());
        let far_end = match port {
            Some(ifname) => Some(Place { netns: self.open(&self.switch.netns, target)?, ifname }),
            None => None,
        };
        Ok(Permitted {
            node: target.node.clone(),
            nic: target.nic.clone(),
            place: Place { netns: self.open(&node.netns, target)?, ifname: target.nic.clone() },
            far_end,
            because: Because::Cluster(self.id.clone()),
            holder: self.holder(),
        })
    }

    /// A rail is cut at the switch's ports of its NICs.
    fn rail(&self, target: &Target) -> Result<Vec<Permitted>, Refusal> {
        let unknown = |reason: String| Refusal::Unknown { target: target.clone(), reason };
        let mut rails: Vec<&str> = Vec::new();
        let mut ports = Vec::new();
        for node in &self.nodes {
            for nic in &node.nics {
                rails.push(&nic.rail);
                if nic.rail != target.nic {
                    continue;
                }
                let Some(ifname) = nic.switch_port.clone() else {
                    return Err(unknown(format!("cluster {} does not say its switch's ports", self.id)));
                };
                ports.push(Permitted {
                    node: target.node.clone(),
                    nic: ifname.clone(),
                    place: Place { netns: self.open(&self.switch.netns, target)?, ifname },
                    far_end: Some(Place { netns: self.open(&node.netns, target)?, ifname: nic.name.clone() }),
                    because: Because::Cluster(self.id.clone()),
                    holder: self.holder(),
                });
            }
        }
        if ports.is_empty() {
            rails.sort_unstable();
            rails.dedup();
            return Err(unknown(format!("the switch of cluster {} has {}", self.id, rails.join(", "))));
        }
        Ok(ports)
    }

    fn open(&self, path: &std::path::Path, target: &Target) -> Result<Netns, Refusal> {
        Netns::at(path).map_err(|source| Refusal::System {
            target: target.clone(),
            what: format!("a namespace of cluster {}", self.id),
            source,
        })
    }
}
