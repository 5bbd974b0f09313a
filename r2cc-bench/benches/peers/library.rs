//! The libraries that are compared, and how a job of each is started.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use r2cc_bench::cluster::{EmulatedCluster, Node};
use serde::{Deserialize, Serialize};

use crate::job::{Calls, Job};
use crate::rank::RankConfig;

/// Any free port: the nodes are the run's own.
const RENDEZVOUS_PORT: u16 = 29_500;
/// Tells the remote shell of MPI's launcher which cluster a host is in.
pub(crate) const CLUSTER: &str = "R2CC_PEERS_CLUSTER";

/// The nodes' addresses and names, for the same.
const NODES: &str = "R2CC_PEERS_NODES";

/// The node of an address, inside a job of MPI.
pub(crate) fn node_at(address: &str) -> Option<String> {
    let places = std::env::var(NODES).ok()?;
    let (_, name) = places.split(',').filter_map(|place| place.split_once('=')).find(|(known, _)| *known == address)?;
    Some(name.to_owned())
}

/// What a job does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Work {
    /// Each size in turn.
    Timed(Vec<Calls>),
    /// Calls of one size, in bytes, until the job is killed.
    Loop(usize),
    /// Some small calls, then none for so many seconds; of this library only.
    Idle(u64),
}

impl Work {
    /// As the programs of the peers take it.
    fn arguments(&self) -> Vec<String> {
        match self {
            Self::Timed(all) => {
                all.iter().map(|calls| format!("{}:{}:{}", calls.bytes, calls.warmup, calls.count)).collect()
            }
            Self::Loop(bytes) => vec!["loop".to_owned(), bytes.to_string()],
            Self::Idle(seconds) => vec!["idle".to_owned(), seconds.to_string()],
        }
    }
}

/// A library and its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    /// This one; its flat ring for all but small sizes.
    Ours,
    /// This one, reducing inside the nodes first.
    OursByNodes,
    /// Open MPI over TCP on all NICs; its own choice of algorithm.
    OpenMpi,
    /// The same, its ring.
    OpenMpiRing,
    /// The same, its ring in segments of 1 MiB.
    OpenMpiSegments,
    /// Gloo under PyTorch, in three parts at once.
    Gloo,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ours => "R2CC",
            Self::OursByNodes => "R2CC, by nodes",
            Self::OpenMpi => "Open MPI",
            Self::OpenMpiRing => "Open MPI, ring",
            Self::OpenMpiSegments => "Open MPI, segmented",
            Self::Gloo => "Gloo, three parts",
        })
    }
}

impl Library {
    /// Starts `world` ranks, as many on each node.
    pub(crate) fn start<'a>(self, cluster: &'a EmulatedCluster, world: usize, work: &Work) -> Result<Job<'a>> {
        let algorithm = |number| [("coll_tuned_use_dynamic_rules", "1"), ("coll_tuned_allreduce_algorithm", number)];
        let segment = ("coll_tuned_allreduce_algorithm_segmentsize", "1048576");
        let commands = match self {
            Self::Ours => ours(cluster, world, work, &[])?,
            Self::OursByNodes => ours(cluster, world, work, &[("R2CC_MODE", "4"), ("R2CC_AR_MIN_BYTES", "1048576")])?,
            Self::OpenMpi => vec![open_mpi(cluster, world, work, &[])?],
            Self::OpenMpiRing => vec![open_mpi(cluster, world, work, &algorithm("4"))?],
            Self::OpenMpiSegments => {
                let settings = [&algorithm("5")[..], &[segment]].concat();
                vec![open_mpi(cluster, world, work, &settings)?]
            }
            Self::Gloo => gloo(cluster, world, work)?,
        };
        Job::start(cluster, commands)
    }
}

/// The node of a rank: the first ranks are on the first node.
fn node_of(cluster: &EmulatedCluster, rank: usize, world: usize) -> &Node {
    let nodes = cluster.nodes();
    &nodes[rank * nodes.len() / world]
}

/// Variables or parameters and their values.
type Settings<'a> = &'a [(&'a str, &'a str)];

fn ours(cluster: &EmulatedCluster, world: usize, work: &Work, variables: Settings<'_>) -> Result<Vec<Command>> {
    let program = std::env::current_exe()?;
    let rank = |rank| {
        let node = node_of(cluster, rank, world);
        let config = RankConfig {
            rank,
            world,
            node: node.name.clone(),
            rendezvous: (cluster.nodes()[0].mgmt.addr, RENDEZVOUS_PORT),
            secret: format!("peers-{}", cluster.id()),
            nics: node.nics.iter().map(|nic| nic.name.clone()).collect(),
            work: work.clone(),
        };
        let mut command = cluster.command(&node.name, &program)?;
        command.arg("rank").arg(serde_json::to_string(&config)?).envs(variables.iter().copied());
        Ok(command)
    };
    (0..world).map(rank).collect()
}

fn gloo(cluster: &EmulatedCluster, world: usize, work: &Work) -> Result<Vec<Command>> {
    let (python, program) = (Path::new("/usr/bin/python3"), source("gloo.py"));
    let address = format!("{}:{RENDEZVOUS_PORT}", cluster.nodes()[0].mgmt.addr);
    let rank = |rank: usize| {
        let node = node_of(cluster, rank, world);
        let mut command = cluster.command(&node.name, python)?;
        command.env("GLOO_SOCKET_IFNAME", nics(node)).env("OMP_NUM_THREADS", "1");
        command.arg(&program).args([&rank.to_string(), &world.to_string(), &address]).args(work.arguments());
        Ok(command)
    };
    (0..world).map(rank).collect()
}

fn nics(node: &Node) -> String {
    node.nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>().join(",")
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(name)
}

fn open_mpi(cluster: &EmulatedCluster, world: usize, work: &Work, settings: Settings<'_>) -> Result<Command> {
    let first = &cluster.nodes()[0];
    let launcher = find("mpirun.openmpi")?;
    let program = compile()?;
    let (nics, agent) = (nics(first), format!("{} enter", std::env::current_exe()?.display()));
    let ranks_a_node = world / cluster.nodes().len();
    let hosts: Vec<String> = cluster.nodes().iter().map(|node| format!("{}:{ranks_a_node}", node.mgmt.addr)).collect();
    let mut command = cluster.command(&first.name, &launcher)?;
    command.env(CLUSTER, cluster.id());
    let places = cluster.nodes().iter().map(|node| format!("{}={}", node.mgmt.addr, node.name));
    command.env(NODES, places.collect::<Vec<_>>().join(","));
    command.args(["--allow-run-as-root", "-np", &world.to_string(), "-H", &hosts.join(","), "--bind-to", "none"]);
    let usual = [
        ("plm_rsh_agent", agent.as_str()),
        ("oob_tcp_if_include", first.mgmt.name.as_str()),
        ("pml", "ob1"),
        ("btl", "tcp,vader,self"),
        ("btl_tcp_if_include", nics.as_str()),
        // There are more ranks than processors, or as many.
        ("mpi_yield_when_idle", "1"),
    ];
    for &(name, value) in usual.iter().chain(settings) {
        command.args(["--mca", name, value]);
    }
    command.arg(program);
    command.args(work.arguments());
    Ok(command)
}

/// Compiles the program for MPI beside this one.
fn compile() -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("peers-allreduce-mpi");
    let mut compiler = Command::new(find("mpicc.openmpi")?);
    compiler
        .args([OsStr::new("-O3"), OsStr::new("-march=native"), OsStr::new("-o")])
        .arg(&program)
        .arg(source("allreduce.c"));
    let status = compiler.stdin(Stdio::null()).status().context("start mpicc")?;
    ensure!(status.success(), "the program for MPI does not compile");
    Ok(program)
}

fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file());
    found.with_context(|| format!("no {program}\n  hint: `make compare-peers` installs what the comparison needs"))
}
