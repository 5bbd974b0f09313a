//! What the engine tells whoever asks for the status of its process.

use super::Engine;
use crate::repair::Transition;
use crate::schedule::Class;
use crate::status::{CommStatus, LastTransition, LinkNow, PathNow};
use crate::topology::PairOfNics;

/// Several links may lead to one rank.
fn kind(class: Class) -> &'static str {
    match class {
        Class::Main => "",
        Class::Beside => ", beside",
        Class::Tail => ", tail",
    }
}

impl Engine {
    /// This communicator as it is now.
    pub(super) fn told(&self) -> CommStatus {
        let activity = match (&self.state.failure, &self.state.running) {
            (Some(failure), _) => format!("failed: {failure}"),
            (None, Some(_)) => "a collective is under way".to_owned(),
            (None, None) if self.state.closing.is_some() => "closing".to_owned(),
            (None, None) if self.state.connecting.is_some() => "connecting".to_owned(),
            (None, None) => "between collectives".to_owned(),
        };
        let totals = self.links.totals();
        let links = self.links.status().into_iter().map(|(class, link)| LinkNow {
            peer: format!("rank {} on {}{}", link.peer, self.roster[link.peer].node, kind(class)),
            paths: link
                .paths
                .iter()
                .map(|(pair, report)| PathNow {
                    nic: self.nic_name(self.me, pair.from_nic).to_owned(),
                    peer_nic: self.nic_name(link.peer, pair.to_nic).to_owned(),
                    state: report.state.word().to_owned(),
                    bits_s: report.bytes_s.map(|bytes_s| bytes_s.saturating_mul(8)),
                    in_flight_bytes: report.in_flight_bytes,
                })
                .collect(),
        });
        CommStatus {
            name: "native".to_owned(),
            rank: Some(self.me),
            world: Some(self.roster.len()),
            node: self.roster[self.me].node.clone(),
            activity,
            begun: self.state.begun,
            payload_bytes: totals.payload_bytes,
            replayed_bytes: totals.replayed_bytes,
            links: links.collect(),
            last_transition: self.state.last_transition.clone(),
        }
    }

    /// Keeps what happened to a path last.
    pub(super) fn remember(&mut self, peer: usize, pair: &PairOfNics, t: &Transition) {
        let nic = self.nic_name(self.me, pair.from_nic);
        let text = format!("{nic} to rank {peer}: {} -> {}, {}", t.from.word(), t.to.word(), t.cause.word());
        self.state.last_transition = Some(LastTransition { at_ns: t.at.as_nanos() as u64, text });
    }
}
