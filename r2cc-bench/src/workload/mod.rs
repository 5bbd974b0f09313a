//! What ranks do, and how the bench talks to them: orders on a rank's standard input, reports on its standard
//! output, one JSON object a line. [`rank`] is the rank's side on host memory, [`gpu_rank`] on a GPU, [`job`] the
//! bench's; [`support`] says what of a suite can be run at all.

pub mod gpu_rank;
pub mod job;
mod liveness;
pub mod rank;
pub mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use r2cc::transport::Corruption;
use serde::{Deserialize, Serialize};

use crate::cluster::EmulatedCluster;
use crate::gpu::GpuFacts;
use crate::perf::measure::Measurement;

/// Everything a rank needs to begin; its first line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankConfig {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Name of its node.
    pub node: String,
    /// Where rank 0 listens.
    pub rendezvous: SocketAddr,
    /// Secret of the job.
    pub secret: String,
    /// NICs to use.
    pub nics: Vec<String>,
    /// Where to write its events.
    pub events: PathBuf,
    /// Bytes of the collective.
    pub bytes: u64,
    /// Element type, as suites name it.
    pub dtype: String,
    /// Reduction, as suites name it.
    pub op: String,
    /// Whether the result replaces the input.
    pub in_place: bool,
    /// Seconds that a link may be without a live path.
    pub link_bound_s: u64,
    /// What the library is asked to do.
    pub settings: r2cc::Settings,
    /// What a rank on a GPU needs besides; none for one on host memory.
    #[serde(default)]
    pub gpu: Option<GpuConfig>,
}

/// Seconds that a link may be without a live path before every rank gets an error.
pub(crate) const LINK_BOUND_S: u64 = 30;
/// Port of the rendezvous, inside the cluster's own namespaces.
pub(crate) const RENDEZVOUS_PORT: u16 = 29_500;

impl RankConfig {
    /// Of every rank of an emulated cluster, node by node, with their event files in `out`; no collective yet.
    pub(crate) fn of_cluster(
        cluster: &EmulatedCluster,
        ranks_per_node: usize,
        nics: &[String],
        out: &Path,
        library: &r2cc::Settings,
    ) -> Vec<Self> {
        let nodes = cluster.nodes();
        // A cluster has at least one node.
        let first = nodes.first().map_or(Ipv4Addr::LOCALHOST, |node| node.mgmt.addr);
        let secret = format!("{}-{}", cluster.id(), r2cc::transport::now().as_nanos());
        let world = nodes.len() * ranks_per_node;
        let config = |rank: usize| Self {
            rank,
            world,
            node: nodes[rank / ranks_per_node].name.clone(),
            rendezvous: SocketAddr::new(first.into(), RENDEZVOUS_PORT),
            secret: secret.clone(),
            nics: nics.to_vec(),
            events: out.join(format!("events-rank-{rank}.jsonl")),
            link_bound_s: LINK_BOUND_S,
            settings: library.clone(),
            dtype: "f32".to_owned(),
            op: "sum".to_owned(),
            ..Self::alone()
        };
        (0..world).map(config).collect()
    }

    /// Of a process that joins nobody.
    pub(crate) fn alone() -> Self {
        Self {
            rank: 0,
            world: 1,
            node: String::new(),
            rendezvous: ([0, 0, 0, 0], 0).into(),
            secret: String::new(),
            nics: Vec::new(),
            events: PathBuf::new(),
            bytes: 0,
            dtype: String::new(),
            op: String::new(),
            in_place: true,
            link_bound_s: 0,
            settings: r2cc::Settings::default(),
            gpu: None,
        }
    }
}

/// What a rank on a GPU needs besides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuConfig {
    /// Which GPU of the machine.
    pub ordinal: usize,
    /// The NCCL library asked for.
    pub nccl: Option<PathBuf>,
    /// Whether iterations replay a captured graph.
    pub graph: bool,
}

/// What the bench asks of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "order")]
pub enum Order {
    /// Run one collective on the inputs of this iteration and check the result.
    Iterate {
        /// Number of the iteration, from 1, unique in the run: it chooses the inputs.
        iteration: u64,
        /// Damage what the rank receives.
        corrupt: Option<Damage>,
    },
    /// Measure half a row of a sweep.
    Measure(Measurement),
    /// On a GPU: join the communicator of this identity.
    Join {
        /// NCCL's unique id, in hexadecimal.
        unique_id: String,
    },
    /// On a GPU, before `iterate`: fill the inputs of this iteration.
    Prepare {
        /// Number of the iteration.
        iteration: u64,
    },
    /// On a GPU, after `iterate` on every rank: check the result of this iteration.
    Check {
        /// Number of the iteration.
        iteration: u64,
        /// Damage the result before.
        corrupt: Option<Damage>,
    },
    /// On a GPU: capture the graph again and use the new one from then on.
    Recapture,
    /// Close the communicator and end.
    Finish,
}

/// Damage for a self-test of the checks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Damage {
    /// Chooses the bit.
    pub seed: u64,
    /// Where in the received payload, 0 to 1.
    pub position: f64,
    /// A NaN instead of a flipped bit.
    pub nan: bool,
}

impl From<Damage> for Corruption {
    fn from(damage: Damage) -> Self {
        Self { seed: damage.seed, position: damage.position, nan: damage.nan }
    }
}

/// What a rank tells the bench.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "report")]
pub enum Report {
    /// This rank has joined the others.
    Ready,
    /// On a GPU: what this process has loaded, and on rank 0 the identity of the communicator to join.
    Loaded {
        /// The GPU and the libraries.
        facts: GpuFacts,
        /// NCCL's unique id, in hexadecimal.
        unique_id: Option<String>,
    },
    /// On a GPU: the inputs are in place.
    Prepared {
        /// Number of the iteration.
        iteration: u64,
    },
    /// On a GPU: about to call the collective; told before it is called.
    Calling {
        /// Number of the iteration.
        iteration: u64,
        /// CLOCK_MONOTONIC.
        start_ns: u64,
    },
    /// On a GPU: the collective is over.
    Returned {
        /// Number of the iteration.
        iteration: u64,
        /// Call of the collective, CLOCK_MONOTONIC.
        start_ns: u64,
        /// When the GPU was done with it.
        end_ns: u64,
    },
    /// On a GPU, after the first capture in place of `ready`: the graph was captured, or captured again.
    Captured {
        /// What the capture took.
        capture_ms: f64,
        /// What making it replayable took.
        instantiate_ms: f64,
    },
    /// One iteration is over and checked.
    Iterated {
        /// Its number.
        iteration: u64,
        /// Call of the collective, CLOCK_MONOTONIC.
        start_ns: u64,
        /// Its return.
        end_ns: u64,
        /// Elements compared.
        checked: u64,
        /// Elements that differed.
        wrong: u64,
        /// The first of them: index, expected, actual.
        first_wrong: Option<(u64, String, String)>,
    },
    /// Half a row of a sweep is measured.
    Measured {
        /// Time of each timed iteration.
        times_ns: Vec<u64>,
        /// Elements compared, in all checked iterations.
        checked: u64,
        /// Elements that differed.
        wrong: u64,
        /// The first of them: index, expected, actual.
        first_wrong: Option<(u64, String, String)>,
    },
    /// The rank is about to end; sums over its outgoing links.
    Finished {
        /// Payload bytes sent once.
        payload_bytes: u64,
        /// Payload bytes sent again.
        replayed_bytes: u64,
        /// Paths that became suspect.
        paths_suspected: u64,
        /// Paths that were declared failed.
        paths_failed: u64,
        /// Paths not in service at the end.
        paths_down: u64,
    },
    /// The rank cannot go on.
    Failed {
        /// Why, with a hint.
        error: String,
        /// Whether the machine is at fault (a port in use, a NIC missing), not the job.
        environment: bool,
    },
}
