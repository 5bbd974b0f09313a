//! Nodes, NICs and rails: what a rank has, and which pairs of NICs make the paths of a link.
//!
//! A *rail* is a subnet: NICs whose addresses share a prefix reach each other.

mod discovery;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};

use serde::{Deserialize, Serialize};

pub use discovery::{TopologyError, local_nics};

/// One NIC of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Interface name.
    pub name: String,
    /// Its IPv4 address.
    pub addr: Ipv4Addr,
    /// Length of the subnet prefix.
    pub prefix: u8,
}

impl Nic {
    /// First address of its subnet.
    pub fn subnet(&self) -> Ipv4Addr {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix.min(32))).unwrap_or(0);
        Ipv4Addr::from(u32::from(self.addr) & mask)
    }
}

/// What every rank knows of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its rank.
    pub rank: usize,
    /// Its node; ranks with the same name share a host.
    pub node: String,
    /// Its NICs, in its own order.
    pub nics: Vec<Nic>,
    /// Port of its listener on each NIC.
    pub ports: Vec<u16>,
    /// Port of its listener on the loopback address.
    pub local_port: u16,
}

/// One path of a link, seen from the sending rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairOfNics {
    /// Index of the sender's NIC; `None` inside a node.
    pub from_nic: Option<usize>,
    /// Index of the receiver's NIC; `None` inside a node.
    pub to_nic: Option<usize>,
    /// Address to send from.
    pub from: Ipv4Addr,
    /// Address to send to.
    pub to: SocketAddrV4,
}

/// The paths of the link from `a` to `b`; both ends compute the same list. Inside a node there is one path,
/// over the loopback device; between nodes one path for each pair of NICs on a common rail.
pub fn paths(a: &Member, b: &Member) -> Vec<PairOfNics> {
    if a.node == b.node {
        let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, b.local_port);
        return vec![PairOfNics { from_nic: None, to_nic: None, from: Ipv4Addr::LOCALHOST, to }];
    }
    let mut pairs = Vec::new();
    for (i, from) in a.nics.iter().enumerate() {
        for (j, to) in b.nics.iter().enumerate() {
            if (from.subnet(), from.prefix) == (to.subnet(), to.prefix) {
                let port = b.ports.get(j).copied().unwrap_or(0);
                let to = SocketAddrV4::new(to.addr, port);
                pairs.push(PairOfNics { from_nic: Some(i), to_nic: Some(j), from: from.addr, to });
            }
        }
    }
    pairs
}

/// Whether every two members have a path. Members of one node with NICs on the same subnets have the same paths, so
/// that one of them is asked.
pub fn is_complete(members: &[Member]) -> bool {
    let subnets = |m: &Member| m.nics.iter().map(|nic| (nic.subnet(), nic.prefix)).collect::<Vec<_>>();
    let kinds: BTreeMap<_, &Member> = members.iter().map(|m| ((&m.node, subnets(m)), m)).collect();
    kinds.values().all(|a| kinds.values().all(|b| !paths(a, b).is_empty()))
}

/// The members of each node, both in order of appearance.
pub fn by_node(members: &[Member]) -> Vec<Vec<&Member>> {
    let mut nodes: Vec<Vec<&Member>> = Vec::new();
    for member in members {
        match nodes.iter_mut().find(|of_node| of_node[0].node == member.node) {
            Some(of_node) => of_node.push(member),
            None => nodes.push(vec![member]),
        }
    }
    nodes
}

/// Subnets of all members in order of appearance: rail `k` (named `rail-<k+1>`) is the k-th.
pub fn rails(members: &[Member]) -> Vec<Ipv4Addr> {
    let mut rails: Vec<Ipv4Addr> = Vec::new();
    for nic in members.iter().flat_map(|m| &m.nics) {
        if !rails.contains(&nic.subnet()) {
            rails.push(nic.subnet());
        }
    }
    rails
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(rank: usize, node: &str, hosts: &[(u8, u8)]) -> Member {
        let nics = hosts
            .iter()
            .map(|(rail, host)| Nic {
                name: format!("nic{rail}"),
                addr: Ipv4Addr::new(10, 0, *rail, *host),
                prefix: 24,
            })
            .collect::<Vec<_>>();
        Member { rank, node: node.into(), ports: (1000..).take(nics.len()).collect(), nics, local_port: 999 }
    }

    #[test]
    fn paths_join_nics_of_one_rail_and_both_ends_agree_on_their_order() {
        let (a, b) = (member(0, "a", &[(1, 1), (2, 1), (3, 1)]), member(1, "b", &[(3, 2), (1, 2)]));
        let pairs: Vec<_> = paths(&a, &b).iter().map(|p| (p.from_nic, p.to_nic, p.to.port())).collect();
        assert_eq!(pairs, [(Some(0), Some(1), 1001), (Some(2), Some(0), 1000)]);
        assert_eq!(rails(&[a, b]).len(), 3);
    }

    #[test]
    fn members_are_complete_if_every_two_share_a_rail_or_a_node() {
        let line = [member(0, "a", &[(1, 1)]), member(1, "b", &[(1, 2), (2, 2)]), member(2, "c", &[(2, 3)])];
        assert!(is_complete(&line[..2]) && is_complete(&line[1..]));
        assert!(!is_complete(&line), "a and c share none");
        assert!(is_complete(&[member(0, "a", &[]), member(1, "a", &[(1, 1)])]), "inside a node");
    }

    #[test]
    fn ranks_of_one_node_have_one_path_inside_it() {
        let (a, b) = (member(0, "a", &[(1, 1)]), member(1, "a", &[(1, 1)]));
        assert_eq!(paths(&a, &b)[0].to, SocketAddrV4::new(Ipv4Addr::LOCALHOST, 999));
    }

    #[test]
    fn a_prefix_of_zero_or_thirty_two_is_a_subnet_too() {
        let nic = |prefix| Nic { name: "x".into(), addr: Ipv4Addr::new(10, 1, 2, 3), prefix };
        assert_eq!(nic(0).subnet(), Ipv4Addr::UNSPECIFIED);
        assert_eq!(nic(32).subnet(), Ipv4Addr::new(10, 1, 2, 3));
        assert_eq!(nic(16).subnet(), Ipv4Addr::new(10, 1, 0, 0));
    }
}
