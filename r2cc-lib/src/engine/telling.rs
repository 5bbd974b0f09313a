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
                .map(|(pair, report)| {
                    let nics = (self.nic_name(self.me, pair.from_nic), self.nic_name(link.peer, pair.to_nic));
                    PathNow::new(nics.0, nics.1, report)
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
        self.state.last_transition = Some(LastTransition::new(format_args!("{nic} to rank {peer}"), t));
    }
}
