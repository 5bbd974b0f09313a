//! The state file of a running cluster: who holds it and where its namespaces are.
//!
//! Owns `/run/r2cc/cluster-<id>.json`, entering a node by it, and sweeping what killed benches
//! left: their files. Their namespaces are gone by themselves, unless a process escaped into one;
//! such orphans are reported, never killed, and their file stays as long as they do.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};

use super::{ClusterError, Node, rail_name};

const STATE_DIR: &str = "/run/r2cc";

/// A cluster as its state file describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    /// Name of the cluster.
    pub id: String,
    /// Process that holds it.
    pub pid: i32,
    /// That process's start time, in clock ticks since boot: tells it from a later one with its
    /// pid.
    pub start_time: u64,
    /// The nodes.
    pub nodes: Vec<NodeState>,
    /// The switch.
    pub switch: SwitchState,
}

/// A node of a running cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Node name.
    pub name: String,
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// Path of its UTS namespace.
    pub uts: PathBuf,
    /// Inode of its network namespace.
    pub netns_inode: u64,
    /// Its management address with prefix.
    pub mgmt: String,
    /// Its NICs.
    pub nics: Vec<NicState>,
}

/// A NIC of a running cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicState {
    /// NIC name.
    pub name: String,
    /// Rail name.
    pub rail: String,
    /// Address with prefix.
    pub addr: String,
    /// Its port in the switch's namespace.
    pub switch_port: String,
}

/// The switch of a running cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchState {
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// Inode of its network namespace.
    pub netns_inode: u64,
}

/// What the state files of a machine amount to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// Clusters whose process lives, oldest first.
    pub running: Vec<ClusterState>,
    /// Files of clusters whose process is gone.
    pub stale: Vec<PathBuf>,
    /// Processes still inside a namespace of a cluster whose process is gone.
    pub orphans: Vec<Orphan>,
}

/// A process inside a node whose bench has gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// The cluster.
    pub cluster: String,
    /// The node, or `switch`.
    pub node: String,
    /// The process.
    pub pid: i32,
    /// Its name.
    pub command: String,
}

/// The file of a cluster of this process; removed with this value.
#[derive(Debug)]
pub(super) struct StateFile(PathBuf);

impl StateFile {
    /// Writes the file whole, or not at all.
    pub(super) fn write(id: &str, nodes: &[Node], switch: BorrowedFd<'_>) -> Result<Self, ClusterError> {
        let pid = nix::unistd::getpid().as_raw();
        let state = ClusterState {
            id: id.to_owned(),
            pid,
            start_time: start_time(pid).unwrap_or(0),
            nodes: nodes.iter().map(|node| describe(pid, node)).collect::<Result<_, _>>()?,
            switch: SwitchState {
                netns: fd_path(pid, switch.as_raw_fd()),
                netns_inode: inode(&fd_path(pid, switch.as_raw_fd()))?,
            },
        };
        let directory = Path::new(STATE_DIR);
        let path = directory.join(format!("cluster-{id}.json"));
        let partial = directory.join(format!("cluster-{id}.partial"));
        let text = serde_json::to_vec_pretty(&state).map_err(io::Error::other);
        fs::create_dir_all(directory)
            .and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(0o755)))
            .and(text)
            .and_then(|text| fs::write(&partial, text))
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(|error| {
                // A full disk may have left half of it.
                let _ = fs::remove_file(&partial);
                unusable(&path, &error, "needs a writable /run")
            })?;
        Ok(Self(path))
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        // Whatever remains, the next sweep takes away.
        let _ = fs::remove_file(&self.0);
    }
}

/// Looks at every state file without changing anything.
pub fn survey() -> Result<Survey, ClusterError> {
    survey_in(Path::new(STATE_DIR))
}

/// Removes the files of clusters whose process is gone, except where orphans remain: their file
/// is what finds them. Returns the survey it acted on.
pub fn sweep() -> Result<Survey, ClusterError> {
    sweep_in(Path::new(STATE_DIR))
}

/// Replaces this process by `argv`, run inside a node of a running cluster (the given one, else
/// the youngest). Returns only when that fails.
pub fn enter(node: &str, cluster: Option<&str>, argv: &[String]) -> Result<std::convert::Infallible, ClusterError> {
    let (program, arguments) = argv.split_first().ok_or_else(|| ClusterError::Spec {
        place: node.to_owned(),
        reason: "no command to run".to_owned(),
        hint: "give one after --",
    })?;
    let running = survey()?.running;
    let state = match cluster {
        Some(id) => running.iter().find(|state| state.id == id),
        None => running.last(),
    }
    .ok_or_else(|| ClusterError::NotRunning { asked: cluster.map(str::to_owned) })?;
    let place = state.nodes.iter().find(|known| known.name == node).ok_or_else(|| ClusterError::Unknown {
        cluster: state.id.clone(),
        node: node.to_owned(),
        nic: None,
        known: state.nodes.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", "),
    })?;
    for (path, kind) in [(&place.netns, CloneFlags::CLONE_NEWNET), (&place.uts, CloneFlags::CLONE_NEWUTS)] {
        fs::File::open(path)
            .and_then(|namespace| setns(namespace, kind).map_err(io::Error::from))
            .map_err(|error| ClusterError::from_os(format!("join {}", path.display()), node, error))?;
    }
    let error = Command::new(program).args(arguments).exec();
    Err(ClusterError::from_os(format!("run {program}"), node, error))
}

pub(super) fn sweep_in(directory: &Path) -> Result<Survey, ClusterError> {
    let survey = survey_in(directory)?;
    for path in &survey.stale {
        let held = survey.orphans.iter().any(|orphan| path.ends_with(format!("cluster-{}.json", orphan.cluster)));
        if !held {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(unusable(path, &error, "remove it by hand"));
                }
                _ => {}
            }
        }
    }
    Ok(survey)
}

pub(super) fn survey_in(directory: &Path) -> Result<Survey, ClusterError> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Survey::default()),
        Err(error) => return Err(unusable(directory, &error, "run as root")),
    };
    let mut survey = Survey::default();
    let mut running = Vec::new();
    let mut gone = HashMap::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("cluster-") {
            continue;
        }
        // Its bench may remove a file while this looks: then there is nothing to say about it.
        let (Ok(text), Ok(written)) = (fs::read(&path), entry.metadata().map(|m| m.modified())) else {
            continue;
        };
        match serde_json::from_slice::<ClusterState>(&text) {
            Ok(state) if state.is_alive() => running.push((written.ok(), state)),
            Ok(state) => {
                gone.extend(state.namespaces());
                survey.stale.push(path);
            }
            // Half a file: stale unless its writer still lives.
            Err(_) if writer(&name).is_some_and(|pid| start_time(pid).is_some()) => {}
            Err(_) => survey.stale.push(path),
        }
    }
    running.sort_by_key(|(written, state)| (*written, state.id.clone()));
    survey.running = running.into_iter().map(|(_, state)| state).collect();
    // A freed inode number may serve a younger, living cluster.
    for state in &survey.running {
        for (inode, _) in state.namespaces() {
            gone.remove(&inode);
        }
    }
    if !gone.is_empty() {
        survey.orphans = orphans(&gone);
    }
    survey.stale.sort();
    Ok(survey)
}

impl ClusterState {
    fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }

    /// Inode of each network namespace, with the cluster's and the node's name.
    fn namespaces(&self) -> impl Iterator<Item = (u64, (String, String))> + '_ {
        self.nodes
            .iter()
            .map(|node| (node.netns_inode, node.name.clone()))
            .chain([(self.switch.netns_inode, "switch".to_owned())])
            .map(|(inode, node)| (inode, (self.id.clone(), node)))
    }
}

fn orphans(gone: &HashMap<u64, (String, String)>) -> Vec<Orphan> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found: Vec<Orphan> = processes
        .flatten()
        .filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let inode = fs::metadata(process.path().join("ns/net")).ok()?.ino();
            let (cluster, node) = gone.get(&inode)?;
            let command = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            Some(Orphan { cluster: cluster.clone(), node: node.clone(), pid, command: command.trim_end().to_owned() })
        })
        .collect();
    found.sort_by_key(|orphan| orphan.pid);
    found
}

fn describe(pid: i32, node: &Node) -> Result<NodeState, ClusterError> {
    let netns = fd_path(pid, node.netns.as_raw_fd());
    Ok(NodeState {
        name: node.name.clone(),
        netns_inode: inode(&netns)?,
        netns,
        uts: fd_path(pid, node.utsns.as_raw_fd()),
        mgmt: format!("{}/{}", node.mgmt.addr, node.mgmt.prefix),
        nics: node
            .nics
            .iter()
            .map(|nic| NicState {
                name: nic.name.clone(),
                rail: nic.rail.map_or_else(String::new, rail_name),
                addr: format!("{}/{}", nic.addr, nic.prefix),
                switch_port: nic.switch_port.clone(),
            })
            .collect(),
    })
}

/// Field 22 of `/proc/PID/stat`; `None` when there is no such process, or only its corpse.
pub(super) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name, in parentheses, may hold anything.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether there is such a process, and not only its corpse.
pub fn is_running(pid: i32) -> bool {
    start_time(pid).is_some()
}

fn writer(file_name: &str) -> Option<i32> {
    let id = file_name.strip_prefix("cluster-")?;
    id.split('-').next()?.parse().ok()
}

fn fd_path(pid: i32, fd: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/fd/{fd}"))
}

fn inode(path: &Path) -> Result<u64, ClusterError> {
    fs::metadata(path).map(|metadata| metadata.ino()).map_err(|error| unusable(path, &error, "needs /proc"))
}

fn unusable(path: &Path, error: &io::Error, hint: &'static str) -> ClusterError {
    ClusterError::State { path: path.to_owned(), reason: error.to_string(), hint }
}
