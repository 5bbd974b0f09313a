//! What the processes of the job have told each other of their paths, and which NIC, port or rail that makes broken.
//! Whoever learns something passes it on over all its links, so that all end up with the same facts. Needs to know
//! this process's rank: without it nothing is told.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use r2cc::control::{FaultView, PathFact, PathHealth, ViewEntry};
use r2cc::repair::Time;
use r2cc::topology::{Member, Nic};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{events, hub};

/// A process of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Who {
    rank: usize,
    node: String,
    nics: Vec<Nic>,
}

/// A fact and when its sending rank stated it, by that rank's clock: the latest counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stated {
    at_ns: u64,
    fact: PathFact,
}

/// What one process tells another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Knowledge {
    members: Vec<Who>,
    facts: Vec<Stated>,
}

/// Members and facts of one message: the longest of them are a kilobyte.
const PIECE: usize = 32;

impl Knowledge {
    /// The same in messages that are not too long.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Self> + '_ {
        let members = self.members.chunks(PIECE).map(|some| Self { members: some.to_vec(), facts: Vec::new() });
        let facts = self.facts.chunks(PIECE).map(|some| Self { members: Vec::new(), facts: some.to_vec() });
        members.chain(facts)
    }
}

type Path = (usize, usize, usize, usize);

#[derive(Debug, Default)]
struct Known {
    members: BTreeMap<usize, Who>,
    facts: BTreeMap<Path, Stated>,
    view: Vec<ViewEntry>,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

impl Known {
    /// Takes in what is news; answers with just that.
    fn merge(&mut self, told: Knowledge) -> Knowledge {
        let mut news = Knowledge::default();
        for who in told.members {
            if self.members.get(&who.rank) != Some(&who) {
                self.members.insert(who.rank, who.clone());
                news.members.push(who);
            }
        }
        for stated in told.facts {
            let fact = &stated.fact;
            let path = (fact.from, fact.to, fact.from_nic, fact.to_nic);
            if self.facts.get(&path).is_none_or(|known| known.at_ns < stated.at_ns) {
                self.facts.insert(path, stated.clone());
                news.facts.push(stated);
            }
        }
        news
    }

    fn judge(&self) -> Vec<ViewEntry> {
        // The view counts members from 0; those that have not been heard of are not among them.
        let place = |rank: usize| self.members.keys().position(|known| *known == rank);
        let member = |(place, who): (usize, &Who)| {
            let (node, nics) = (who.node.clone(), who.nics.clone());
            Member { rank: place, node, ports: vec![0; nics.len()], nics, local_port: 0 }
        };
        let members: Vec<Member> = self.members.values().enumerate().map(member).collect();
        let mut view = FaultView::new(&members);
        for Stated { fact, .. } in self.facts.values() {
            if let (Some(from), Some(to)) = (place(fact.from), place(fact.to)) {
                view.handle_path(&PathFact { from, to, ..fact.clone() });
            }
        }
        view.entries()
    }

    /// Everything, for an end that has just been connected.
    fn all(&self) -> Knowledge {
        let (members, facts) = (self.members.values().cloned(), self.facts.values().cloned());
        Knowledge { members: members.collect(), facts: facts.collect() }
    }
}

fn known<T>(work: impl FnOnce(&mut Known) -> T) -> T {
    let mut guard = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    work(guard.get_or_insert_with(|| {
        let mut known = Known::default();
        if let (Some(rank), Ok(device)) = (events::rank(), hub::device()) {
            let who = Who { rank, node: hub::host_name(), nics: device.nics.clone() };
            known.members.insert(rank, who);
        }
        known
    }))
}

/// What this process knows.
pub(crate) fn all() -> Knowledge {
    known(|known| known.all())
}

/// Takes in what another process has told, or this one found out; what is to be passed on, if any of it is news.
/// A view that changes by it is written to the event file.
pub(crate) fn learn(at: Time, told: Knowledge) -> Option<Knowledge> {
    known(|known| {
        let news = known.merge(told);
        if news == Knowledge::default() {
            return None;
        }
        let view = known.judge();
        if view != known.view {
            events::write(at, "view", &json!({ "view": view }));
            known.view = view;
        }
        Some(news)
    })
}

/// A path of ours is in service or out of it; to be passed on if that is news. That a path is up is news only where it
/// had been down.
pub(crate) fn learn_path(
    at: Time,
    to: usize,
    (from_nic, to_nic): (usize, usize),
    up: bool,
    cause: &str,
) -> Option<Knowledge> {
    let from = events::rank()?;
    let health = if up { PathHealth::Up } else { PathHealth::Down };
    let differs = known(|known| match known.facts.get(&(from, to, from_nic, to_nic)) {
        Some(stated) => stated.fact.health != health,
        None => !up,
    });
    let fact = PathFact { from, to, from_nic, to_nic, health, cause: cause.to_owned() };
    let stated = Stated { at_ns: at.as_nanos() as u64, fact };
    differs.then(|| learn(at, Knowledge { members: Vec::new(), facts: vec![stated] })).flatten()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

    use super::*;
    use r2cc::control::Component;
    use std::net::Ipv4Addr;

    fn who(rank: usize) -> Who {
        let nic = |rail: u8| Nic {
            name: format!("mlx5_{rail}"),
            addr: Ipv4Addr::new(10, 77, rail, rank as u8 + 1),
            prefix: 24,
        };
        Who { rank, node: format!("node-{}", rank + 1), nics: vec![nic(1), nic(2)] }
    }

    fn down(from: usize, to: usize, at_ns: u64) -> Stated {
        let fact = PathFact { from, to, from_nic: 1, to_nic: 1, health: PathHealth::Down, cause: "stall".into() };
        Stated { at_ns, fact }
    }

    /// Ranks of a ring that pass on their news until there are none.
    fn gossip(ranks: &mut [Known], start: usize, told: Knowledge) {
        let mut open = vec![(start, told)];
        let mut steps = 0;
        while let Some((at, told)) = open.pop() {
            steps += 1;
            assert!(steps < 1000, "the news never ends");
            let news = ranks[at].merge(told);
            if news != Knowledge::default() {
                let (left, right) = ((at + ranks.len() - 1) % ranks.len(), (at + 1) % ranks.len());
                open.extend([(left, news.clone()), (right, news)]);
            }
        }
    }

    #[test]
    fn every_rank_names_the_nic_that_all_dead_pairs_share() {
        let mut ranks: Vec<Known> = (0..4).map(|_| Known::default()).collect();
        for rank in 0..4 {
            gossip(&mut ranks, rank, Knowledge { members: vec![who(rank)], facts: vec![] });
        }
        gossip(&mut ranks, 0, Knowledge { members: vec![], facts: vec![down(0, 1, 5)] });
        assert!(matches!(ranks[2].judge()[0].component, Component::OneOf { .. }), "one pair tells of two NICs");
        gossip(&mut ranks, 3, Knowledge { members: vec![], facts: vec![down(3, 0, 6)] });
        for rank in &ranks {
            let [entry] = &rank.judge()[..] else { panic!("{:?}", rank.judge()) };
            assert_eq!(entry.component, Component::Nic { node: "node-1".into(), nic: "mlx5_2".into() });
            assert_eq!(entry.rail, "rail-2");
        }
    }

    #[test]
    fn of_two_statements_about_a_path_the_later_counts_whatever_their_order() {
        let mut up = down(0, 1, 9);
        up.fact.health = PathHealth::Up;
        for order in [[down(0, 1, 5), up.clone()], [up.clone(), down(0, 1, 5)]] {
            let mut known = Known::default();
            known.merge(Knowledge { members: vec![who(0), who(1)], facts: order.to_vec() });
            assert!(known.judge().is_empty());
            assert_eq!(known.merge(known.all()), Knowledge::default(), "nothing of it is news");
            let mut again = Known::default();
            for piece in known.all().pieces() {
                again.merge(piece);
            }
            assert_eq!(again.all(), known.all());
        }
    }
}
