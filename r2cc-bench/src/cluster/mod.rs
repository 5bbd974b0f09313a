//! Clusters: where ranks run.
//!
//! Owns the emulated cluster: network and UTS namespaces as nodes, veth pairs as NICs, a bridge
//! per rail in a switch namespace, `mgmt0` on a bridge of its own, rates shaped at both ends.
//! Everything is made over netlink in this process and held by file descriptors of this process
//! and its children, so that nothing is left when it is killed. Never mounts anything, never
//! names a namespace, never touches an interface of the host.
//!
//! Start at [`EmulatedCluster::build`]; [`enter`] and [`sweep`] work on the state files that
//! running clusters keep in `/run/r2cc`.

mod emulated;
mod error;
#[cfg(test)]
mod lifecycle_tests;
mod netlink;
mod netns;
mod spec;
mod state;
#[cfg(test)]
mod tests;
mod wiring;

pub use emulated::{EmulatedCluster, Nic, NicCounters, Node, Side};
pub use error::ClusterError;
pub use netns::in_netns;
pub use spec::{ClusterSpec, Fabric, MGMT_NIC, NicSpec, NodeSpec, rail_name};
pub use state::{ClusterState, NicState, NodeState, Orphan, Survey, SwitchState, enter, is_running, survey, sweep};
