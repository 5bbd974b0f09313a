//! What an I/O thread tells whoever asks for the status of its process.

use std::collections::BTreeMap;

use r2cc::repair::Transition;
use r2cc::status::{CommStatus, LastTransition, LinkNow, PathNow};
use r2cc::topology::PairOfNics;
use r2cc::transport::{LinkStatus, Side};

use super::driver::{Driver, Entry};
use crate::events;

impl Driver {
    /// The communicators of this thread as they are now.
    pub(super) fn told(&self) -> Vec<CommStatus> {
        let mut links: BTreeMap<usize, LinkStatus> =
            self.links.status().into_iter().map(|link| (link.peer, link)).collect();
        let mut entries: Vec<(&usize, &Entry)> = self.entries.iter().filter(|(_, e)| e.closed_at.is_none()).collect();
        entries.sort_by_key(|(number, _)| **number);
        entries.into_iter().map(|(number, entry)| self.told_of(*number, entry, links.remove(number))).collect()
    }

    fn told_of(&self, number: usize, entry: &Entry, link: Option<LinkStatus>) -> CommStatus {
        let (side, from_to) = match entry.comm.side {
            Side::Send => ("send", "to"),
            Side::Recv => ("recv", "from"),
        };
        let peer = match (entry.peer.rank, &entry.peer.node) {
            (Some(rank), Some(node)) => format!("rank {rank} on {node}"),
            (None, Some(node)) => node.clone(),
            _ => "a peer that has not said who it is".to_owned(),
        };
        let activity = match (entry.comm.ending(), entry.slots.len()) {
            (Err(_), _) => format!("{from_to} {peer}: failed"),
            (Ok(()), 0) => format!("{from_to} {peer}: idle"),
            (Ok(()), under_way) => format!("{from_to} {peer}: {under_way} messages under way"),
        };
        let paths = link.iter().flat_map(|link| &link.paths);
        let paths: Vec<PathNow> = paths
            .map(|(pair, report)| PathNow::new(self.nic_name(pair.from_nic), entry.peer_nic(pair), report))
            .collect();
        CommStatus {
            name: format!("nccl {side} {number}"),
            rank: events::rank(),
            world: None,
            node: self.node.clone(),
            activity,
            begun: entry.posted,
            payload_bytes: entry.posted_bytes,
            replayed_bytes: entry.replayed_bytes,
            links: if paths.is_empty() { Vec::new() } else { vec![LinkNow { peer, paths }] },
            last_transition: entry.last_transition.clone(),
        }
    }
}

impl Entry {
    pub(super) fn peer_nic(&self, pair: &PairOfNics) -> String {
        let name = pair.to_nic.and_then(|nic| self.peer.nics.get(nic)).cloned();
        name.unwrap_or_else(|| pair.to.ip().to_string())
    }

    /// Keeps what happened to a path last.
    pub(super) fn remember(&mut self, nic: &str, pair: &PairOfNics, t: &Transition) {
        self.replayed_bytes += t.replayed_bytes;
        self.last_transition = Some(LastTransition::new(format_args!("{nic} to {}", self.peer_nic(pair)), t));
    }
}
