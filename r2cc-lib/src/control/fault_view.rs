//! Which NIC, port or rail died: a pure function of who reaches whom over which rail.
//!
//! Every rank feeds the same gossiped facts, so every rank ends up with the same view. With two nodes alone a
//! dead pair may be either end's fault, and the view says so.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::topology::{Member, rails};

/// How well a path does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathHealth {
    /// It carries chunks.
    Up,
    /// It carries chunks at less than half the rate that it had, and that its neighbours have.
    Slow,
    /// It is out of service.
    Down,
}

/// A path as its sending rank sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathFact {
    /// Sending rank.
    pub from: usize,
    /// Receiving rank.
    pub to: usize,
    /// The sender's NIC, by index.
    pub from_nic: usize,
    /// The receiver's NIC, by index.
    pub to_nic: usize,
    /// How well it does.
    pub health: PathHealth,
    /// Why it changed.
    pub cause: String,
}

/// What is taken to be broken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Component {
    /// One NIC, its cable or its switch port.
    Nic {
        /// Node.
        node: String,
        /// Interface name.
        nic: String,
    },
    /// A whole rail: no pair of nodes reaches each other over it.
    Rail,
    /// Either of these NICs; nothing tells which.
    OneOf {
        /// `node/nic` of each.
        candidates: Vec<String>,
    },
}

/// One line of the view.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ViewEntry {
    /// What is down.
    pub component: Component,
    /// The rail that it belongs to, `rail-1` being the first.
    pub rail: String,
    /// How bad it is.
    pub health: PathHealth,
    /// First cause that was told.
    pub cause: String,
}

/// Facts so far.
#[derive(Clone, Debug)]
pub struct FaultView {
    members: Vec<Member>,
    rails: Vec<Ipv4Addr>,
    troubled: BTreeMap<(usize, usize, usize, usize), (PathHealth, String)>,
    dark: BTreeSet<(usize, usize)>,
}

type End = (String, String);

impl FaultView {
    /// Everything is taken to be up.
    pub fn new(members: &[Member]) -> Self {
        Self { members: members.to_vec(), rails: rails(members), troubled: BTreeMap::new(), dark: BTreeSet::new() }
    }

    /// Takes in a fact about a path. Facts that name no NIC of ours are ignored.
    pub fn handle_path(&mut self, fact: &PathFact) {
        let known = |rank: usize, nic: usize| self.members.get(rank).is_some_and(|m| nic < m.nics.len());
        if !known(fact.from, fact.from_nic) || !known(fact.to, fact.to_nic) {
            return;
        }
        let key = (fact.from, fact.from_nic, fact.to, fact.to_nic);
        match self.troubled.get(&key) {
            _ if fact.health == PathHealth::Up => drop(self.troubled.remove(&key)),
            // The first cause of a trouble counts.
            Some((health, _)) if *health == fact.health => {}
            _ => drop(self.troubled.insert(key, (fact.health, fact.cause.clone()))),
        }
    }

    /// Takes in what a rank says of its own NIC.
    pub fn handle_nic(&mut self, rank: usize, nic: usize, up: bool) {
        if up {
            self.dark.remove(&(rank, nic));
        } else if self.members.get(rank).is_some_and(|m| nic < m.nics.len()) {
            self.dark.insert((rank, nic));
        }
    }

    fn end(&self, rank: usize, nic: usize) -> End {
        (self.members[rank].node.clone(), self.members[rank].nics[nic].name.clone())
    }

    fn rail_of(&self, rank: usize, nic: usize) -> usize {
        let subnet = self.members[rank].nics[nic].subnet();
        self.rails.iter().position(|r| *r == subnet).unwrap_or(0)
    }

    /// What is broken, by the facts.
    pub fn entries(&self) -> Vec<ViewEntry> {
        let mut entries = Vec::new();
        for rail in 0..self.rails.len() {
            self.judge_rail(rail, PathHealth::Down, &mut entries);
            self.judge_rail(rail, PathHealth::Slow, &mut entries);
        }
        entries.sort();
        entries
    }

    fn judge_rail(&self, rail: usize, health: PathHealth, entries: &mut Vec<ViewEntry>) {
        let name = format!("rail-{}", rail + 1);
        let mut bad: BTreeMap<(End, End), String> = BTreeMap::new();
        for ((from, from_nic, to, to_nic), (its_health, cause)) in &self.troubled {
            if *its_health == health && self.rail_of(*from, *from_nic) == rail {
                let (a, b) = (self.end(*from, *from_nic), self.end(*to, *to_nic));
                let pair = if a < b { (a, b) } else { (b, a) };
                bad.entry(pair).or_insert_with(|| cause.clone());
            }
        }
        // A NIC without a carrier explains every dead pair that it is part of.
        for (rank, nic) in self.dark.iter().filter(|(rank, nic)| self.rail_of(*rank, *nic) == rail) {
            let (node, nic) = self.end(*rank, *nic);
            bad.retain(|(a, b), _| *a != (node.clone(), nic.clone()) && *b != (node.clone(), nic.clone()));
            let entry = ViewEntry {
                component: Component::Nic { node, nic },
                rail: name.clone(),
                health: PathHealth::Down,
                cause: "carrier".into(),
            };
            if !entries.contains(&entry) {
                entries.push(entry);
            }
        }
        if bad.is_empty() {
            return;
        }
        let pairs = self.pairs_in_use(rail);
        let cause = bad.values().next().cloned().unwrap_or_default();
        if pairs.len() > 1 && pairs.iter().all(|p| bad.contains_key(p)) {
            entries.push(ViewEntry { component: Component::Rail, rail: name, health, cause });
            return;
        }
        // Ends all of whose pairs are dead; each explains the pairs it is part of.
        let ends: BTreeSet<&End> = bad.keys().flat_map(|(a, b)| [a, b]).collect();
        let wholly: BTreeSet<&End> = ends
            .into_iter()
            .filter(|end| pairs.iter().filter(|(a, b)| a == *end || b == *end).all(|p| bad.contains_key(p)))
            .collect();
        // What pairs with one such end name explains those with two.
        let are_both = |(a, b): &(End, End)| wholly.contains(a) && wholly.contains(b);
        let (two, one): (Vec<_>, Vec<_>) = bad.iter().partition(|(pair, _)| are_both(pair));
        for ((a, b), cause) in one.into_iter().chain(two) {
            let nic = |(node, nic): &End| Component::Nic { node: node.clone(), nic: nic.clone() };
            let is_named = |end: &End| entries.iter().any(|e| e.rail == name && e.component == nic(end));
            let component = match (wholly.contains(a), wholly.contains(b)) {
                (true, false) => nic(a),
                (false, true) => nic(b),
                (true, true) if is_named(a) || is_named(b) => continue,
                _ => Component::OneOf { candidates: vec![format!("{}/{}", a.0, a.1), format!("{}/{}", b.0, b.1)] },
            };
            if !entries.iter().any(|e| e.component == component) {
                entries.push(ViewEntry { component, rail: name.clone(), health, cause: cause.clone() });
            }
        }
    }

    /// Pairs of NICs on a rail that the ring of ranks uses: those about which facts can be had.
    fn pairs_in_use(&self, rail: usize) -> BTreeSet<(End, End)> {
        let mut pairs = BTreeSet::new();
        let world = self.members.len();
        for from in 0..world {
            let to = (from + 1) % world;
            if self.members[from].node == self.members[to].node {
                continue;
            }
            for i in (0..self.members[from].nics.len()).filter(|i| self.rail_of(from, *i) == rail) {
                for j in (0..self.members[to].nics.len()).filter(|j| self.rail_of(to, *j) == rail) {
                    let (a, b) = (self.end(from, i), self.end(to, j));
                    pairs.insert(if a < b { (a, b) } else { (b, a) });
                }
            }
        }
        pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Nic;

    fn cluster(nodes: usize, ranks_per_node: usize) -> FaultView {
        let names = ["mlx5_0", "mlx5_2", "mlx5_3"];
        let members: Vec<Member> = (0..nodes * ranks_per_node)
            .map(|rank| {
                let node = rank / ranks_per_node;
                let nic = |(i, name): (usize, &&str)| Nic {
                    name: (*name).into(),
                    addr: Ipv4Addr::new(10, 0, i as u8, node as u8 + 1),
                    prefix: 24,
                };
                let nics: Vec<Nic> = names.iter().enumerate().map(nic).collect();
                Member { rank, node: format!("node-{}", node + 1), ports: vec![1; 3], nics, local_port: 1 }
            })
            .collect();
        FaultView::new(&members)
    }

    fn lose(view: &mut FaultView, from: usize, to: usize, nic: usize) {
        view.handle_path(&PathFact {
            from,
            to,
            from_nic: nic,
            to_nic: nic,
            health: PathHealth::Down,
            cause: "stall".into(),
        });
    }

    fn nic(node: &str, nic: &str) -> Component {
        Component::Nic { node: node.into(), nic: nic.into() }
    }

    fn components(view: &FaultView) -> Vec<Component> {
        view.entries().into_iter().map(|e| e.component).collect()
    }

    #[test]
    fn the_nic_that_all_dead_pairs_share_is_named() {
        let mut view = cluster(3, 2);
        lose(&mut view, 1, 2, 1);
        lose(&mut view, 5, 0, 1);
        assert_eq!(components(&view), [nic("node-1", "mlx5_2")]);
        assert_eq!(view.entries()[0].rail, "rail-2");
    }

    #[test]
    fn two_dead_neighbours_of_four_nodes_are_named_and_the_pair_between_them_needs_no_other_reason() {
        let mut view = cluster(4, 1);
        for (from, to) in [(0, 1), (1, 2), (3, 0)] {
            lose(&mut view, from, to, 1);
        }
        assert_eq!(components(&view), [nic("node-1", "mlx5_2"), nic("node-2", "mlx5_2")]);
    }

    #[test]
    fn a_rail_with_every_pair_dead_is_named_as_a_rail() {
        let mut view = cluster(3, 2);
        for (from, to) in [(1, 2), (3, 4), (5, 0)] {
            lose(&mut view, from, to, 1);
        }
        assert_eq!(components(&view), [Component::Rail]);
    }

    #[test]
    fn two_nodes_alone_cannot_tell_which_end_it_was_unless_one_lost_its_carrier() {
        let mut view = cluster(2, 1);
        lose(&mut view, 0, 1, 2);
        let candidates = vec!["node-1/mlx5_3".to_owned(), "node-2/mlx5_3".to_owned()];
        assert_eq!(components(&view), [Component::OneOf { candidates }]);
        view.handle_nic(1, 2, false);
        assert_eq!(components(&view), [nic("node-2", "mlx5_3")]);
    }

    #[test]
    fn different_rails_are_judged_apart_and_a_healed_path_is_forgotten() {
        let mut view = cluster(3, 2);
        for (from, to, nic) in [(1, 2, 0), (5, 0, 0), (3, 4, 2), (1, 2, 2)] {
            lose(&mut view, from, to, nic);
        }
        assert_eq!(components(&view), [nic("node-1", "mlx5_0"), nic("node-2", "mlx5_3")]);
        for (from, to) in [(1, 2), (5, 0)] {
            view.handle_path(&PathFact {
                from,
                to,
                from_nic: 0,
                to_nic: 0,
                health: PathHealth::Up,
                cause: "answered".into(),
            });
        }
        assert_eq!(components(&view), [nic("node-2", "mlx5_3")]);
    }

    #[test]
    fn a_slow_nic_is_named_as_slow() {
        let mut view = cluster(3, 2);
        for (from, to) in [(1, 2), (5, 0)] {
            let health = PathHealth::Slow;
            view.handle_path(&PathFact { from, to, from_nic: 2, to_nic: 2, health, cause: "rate".into() });
        }
        assert_eq!(components(&view), [nic("node-1", "mlx5_3")]);
        assert_eq!(view.entries()[0].health, PathHealth::Slow);
    }

    #[test]
    fn facts_about_unknown_nics_are_ignored() {
        let mut view = cluster(3, 2);
        lose(&mut view, 99, 0, 0);
        lose(&mut view, 0, 1, 77);
        view.handle_nic(4, 9, false);
        assert!(view.entries().is_empty());
    }
}
