//! What ranks tell each other beside the data: who takes part, who left, which paths died, what follows.
//!
//! Control messages go over the mesh (a connection of each rank to rank 0 on the rendezvous network) and ride
//! on live data lanes as well; each rank passes a message on once, so it arrives as long as the ranks are
//! connected by anything at all.

mod events;
mod fault_view;
mod gate;
mod mesh;
mod nic_watch;
mod rendezvous;
mod switch;

pub use events::EventLog;
pub use fault_view::{Component, FaultView, PathFact, PathHealth, ViewEntry};
pub(crate) use gate::Gate;
pub use mesh::{Mesh, MeshEvent};
pub use nic_watch::NicWatch;
pub use rendezvous::{Joined, RendezvousError, join};
pub use switch::{Commit, Switch, SwitchAction, SwitchMessage, r2cc_switch_freeze};

use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// Why a communicator cannot go on. The same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "failure")]
pub enum Failure {
    /// A rank's process is gone.
    #[error("rank {rank} on {node} is lost: its control connection closed without a goodbye")]
    RankLost {
        /// The rank.
        rank: usize,
        /// Its node.
        node: String,
    },
    /// Every path between two ranks has been silent for the bound.
    #[error(
        "no path from rank {from} on {from_node} to rank {to} on {to_node} for {seconds} s; \
         hint: all NICs that the two nodes share are down or unreachable"
    )]
    LinkDead {
        /// Sending rank.
        from: usize,
        /// Its node.
        from_node: String,
        /// Receiving rank.
        to: usize,
        /// Its node.
        to_node: String,
        /// The bound.
        seconds: u64,
    },
    /// A rank gave up for a reason of its own.
    #[error("rank {rank} gave up: {reason}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its reason.
        reason: String,
    },
}

/// What a control message says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Statement {
    /// A path was lost or came back, as its sending rank sees it.
    Path(PathFact),
    /// A rank's own NIC lost or regained its carrier or address.
    Nic {
        /// Index of the NIC on that rank.
        nic: usize,
        /// Whether it has a carrier.
        up: bool,
    },
    /// A step on the way to another schedule.
    Switch(Box<SwitchMessage<Schedule>>),
    /// The rank has finished and will close.
    Bye,
    /// Everybody must give up.
    Abort(Failure),
}

/// A control message. `(origin, number)` names it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gossip {
    /// Rank that made it.
    pub origin: usize,
    /// Its number on that rank, from 1.
    pub number: u64,
    /// What it says.
    pub statement: Statement,
}
