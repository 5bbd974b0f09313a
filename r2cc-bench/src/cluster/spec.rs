//! What a cluster should look like, and the addresses that follow from it.
//!
//! Owns the specification, its limits and the address plan. Makes nothing.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::ClusterError;

/// Name of the management interface of every node: unshaped, on its own bridge.
pub const MGMT_NIC: &str = "mgmt0";
/// Prefix length of each rail's subnet, and of the management subnet.
pub(super) const RAIL_PREFIX: u8 = 24;
/// All rails together; the reach of a NIC on an any-to-any fabric.
pub(super) const FABRIC_NETWORK: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 77, 0, 0), 16);

const NODES_MAX: usize = 200;
const RAILS_MAX: usize = 64;
/// `IFNAMSIZ` without its terminating zero.
pub(super) const INTERFACE_NAME_MAX: usize = 15;
const HOSTNAME_MAX: usize = 63;
/// Below this a single 64 KiB packet takes more than half a second.
const RATE_MIN_BITS_S: u64 = 1_000_000;

/// How NICs of different rails reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// A bridge and a subnet per rail; a NIC reaches only its own rail.
    Rails,
    /// One bridge; every NIC reaches every NIC, and leaves by itself.
    Any,
}

/// The cluster to build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSpec {
    /// The nodes, in the order that gives them their addresses.
    pub nodes: Vec<NodeSpec>,
    /// How rails reach each other.
    pub fabric: Fabric,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// Name, also the hostname inside: `node-1`.
    pub name: String,
    /// Its NICs beside `mgmt0`.
    pub nics: Vec<NicSpec>,
}

/// One NIC of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSpec {
    /// Interface name: `mlx5_0`.
    pub name: String,
    /// Index of its rail, from 0 (`rail-1`).
    pub rail: usize,
    /// Rate of each direction; `None` leaves it unshaped.
    pub rate_bits_s: Option<u64>,
}

/// The name of a rail by its index from 0: `rail-1` is the first NIC's.
pub fn rail_name(rail: usize) -> String {
    format!("rail-{}", rail + 1)
}

impl ClusterSpec {
    /// A cluster whose nodes `node-1` … are all alike: NIC *i* of each sits on rail *i*.
    pub fn uniform(nodes: usize, nics: &[&str], rate_bits_s: Option<u64>, fabric: Fabric) -> Self {
        let nics: Vec<NicSpec> = nics
            .iter()
            .enumerate()
            .map(|(rail, name)| NicSpec { name: (*name).to_owned(), rail, rate_bits_s })
            .collect();
        Self {
            nodes: (1..=nodes).map(|index| NodeSpec { name: format!("node-{index}"), nics: nics.clone() }).collect(),
            fabric,
        }
    }

    /// Checks every limit, so that building fails only for the environment's reasons.
    pub fn validate(&self) -> Result<(), ClusterError> {
        if self.nodes.is_empty() || self.nodes.len() > NODES_MAX {
            return Err(fault("cluster", format!("{} nodes", self.nodes.len()), "1 to 200 nodes"));
        }
        let mut names = HashSet::new();
        for node in &self.nodes {
            let hostname = !node.name.is_empty()
                && node.name.len() <= HOSTNAME_MAX
                && node.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'));
            if !hostname {
                return Err(fault(&node.name, "not a hostname".to_owned(), "letters, digits, '-' and '.', at most 63"));
            }
            if !names.insert(&node.name) {
                return Err(fault(&node.name, "two nodes have this name".to_owned(), "node names are unique"));
            }
            node.validate()?;
        }
        Ok(())
    }
}

impl NodeSpec {
    fn validate(&self) -> Result<(), ClusterError> {
        let mut names = HashSet::new();
        let mut rails = HashSet::new();
        for nic in &self.nics {
            let place = format!("{}/{}", self.name, nic.name);
            let interface = !nic.name.is_empty()
                && nic.name.len() <= INTERFACE_NAME_MAX
                && nic.name.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%'))
                && !matches!(nic.name.as_str(), "." | ".." | "lo" | MGMT_NIC);
            if !interface {
                return Err(fault(
                    &place,
                    "not a usable interface name".to_owned(),
                    "1 to 15 visible characters without '/', ':' and '%', and neither lo nor mgmt0",
                ));
            }
            if !names.insert(&nic.name) {
                return Err(fault(&place, "the node has this NIC twice".to_owned(), "NIC names of a node are unique"));
            }
            if nic.rail >= RAILS_MAX {
                return Err(fault(&place, format!("rail index {}", nic.rail), "rail indices are 0 to 63"));
            }
            if !rails.insert(nic.rail) {
                return Err(fault(
                    &place,
                    format!("the node has two NICs on {}", rail_name(nic.rail)),
                    "at most one NIC of a node on each rail",
                ));
            }
            if let Some(rate) = nic.rate_bits_s {
                check_rate(&place, rate)?;
            }
        }
        Ok(())
    }
}

/// Refuses a rate that could not pass one large packet in reasonable time.
pub(super) fn check_rate(place: &str, bits_s: u64) -> Result<(), ClusterError> {
    if bits_s < RATE_MIN_BITS_S {
        return Err(fault(place, format!("rate {bits_s} bit/s"), "at least 1 Mbit/s; to stop a NIC use a fault"));
    }
    Ok(())
}

/// Address of a node (index from 0) on a rail: `10.77.<rail>.<node>`, both counted from 1.
pub(super) fn rail_address(rail: usize, node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, octet(rail + 1), octet(node + 1))
}

/// Network of a rail.
pub(super) fn rail_network(rail: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, octet(rail + 1), 0)
}

/// Management address of a node (index from 0).
pub(super) fn mgmt_address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, 0, octet(node + 1))
}

/// Locally administered MAC that says where it belongs: rail (0xff for management) and node.
pub(super) fn mac_address(rail: Option<usize>, node: usize, side: u8) -> [u8; 6] {
    [0x02, 0x52, 0x32, side, rail.map_or(0xff, octet), octet(node + 1)]
}

/// `validate` has bounded nodes and rails well below 255.
fn octet(index: usize) -> u8 {
    u8::try_from(index).unwrap_or(u8::MAX)
}

fn fault(place: &str, reason: String, hint: &'static str) -> ClusterError {
    ClusterError::Spec { place: place.to_owned(), reason, hint }
}
