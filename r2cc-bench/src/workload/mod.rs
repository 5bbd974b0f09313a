//! What ranks do, and how the bench talks to them: orders on a rank's standard input, reports on its standard
//! output, one JSON object a line. [`rank`] is the rank's side, [`job`] the bench's; [`support`] says what of a
//! suite can be run at all.

pub mod job;
mod liveness;
pub mod rank;
pub mod support;

use std::net::SocketAddr;
use std::path::PathBuf;

use r2cc::transport::Corruption;
use serde::{Deserialize, Serialize};

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
    /// All ranks have joined.
    Ready,
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
