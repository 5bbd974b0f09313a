//! Weighted AllReduce: reduce inside the node, then up and down weighted trees between nodes.
//!
//! The tensor is cut into sections, each section among the trees of a [`Packing`]. In each tree one rank of a
//! node leads: its node's sum is made on it, it speaks to the other nodes, and it passes the result on. Ranks take
//! the trees in turn, so that with as many trees as ranks each leads the same tree always, and what goes up to a
//! rank comes to it alone: few flows share a NIC. The way up (class `Beside`) and the way down (`Main`) have a
//! stream each, so that one section goes down while the next ones come up and a weak link is busy both ways. A
//! node takes in one contribution at a time for each piece, in plan order, and no rank runs ahead by more than a
//! window. Start at [`weighted_all_reduce`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::compose::{Composer, Landing};
use super::packing::{Packing, PairRails, Tree};
use super::plan::{Action, Class, RankPlan};
use super::r2cc::Shape;
use super::ring::{granule_elements, segments};

pub(super) const SECTIONS: usize = 128;
const WINDOW: usize = 4;
const SECTION_BYTES_MIN: usize = 64 << 10;

/// How the tensor is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Weighted {
    /// Number of sections; by default 128, fewer if they would be shorter than 64 KiB.
    pub sections: Option<usize>,
    /// A rank sends nothing of a section before the section so many before it has come back to it; what keeps
    /// fast nodes from running ahead of slow ones. By default 4, or as many as there are nodes, for
    /// each rank of a node: each leads a section at a time.
    pub window: Option<usize>,
}

/// Plans of all ranks, by rank, for nodes with these ranks.
pub fn weighted_all_reduce(nodes: &[Vec<usize>], packing: &Packing, shape: Shape, how: Weighted) -> Vec<RankPlan> {
    let world = nodes.iter().map(Vec::len).sum();
    let mut composer = Composer::new(world, shape.elements, shape.in_place);
    if world == 1 {
        composer.copy_input(0, 0..shape.elements, true);
        return composer.finish();
    }
    let sections = how.sections.unwrap_or_else(|| {
        let bytes = shape.elements * shape.element_bytes;
        SECTIONS.min(bytes / SECTION_BYTES_MIN).max(1)
    });
    let loads = packing.loads();
    let routes: Vec<Route> = packing.trees.iter().enumerate().map(|(i, tree)| Route::new(i, tree, &loads)).collect();
    let sections: Vec<Section> = segments(sections, shape.elements, shape.element_bytes)
        .into_iter()
        .filter(|range| !range.is_empty())
        .enumerate()
        .map(|(number, range)| Section::new(nodes, packing, number, range, shape))
        .collect();
    let window = how.window.unwrap_or(WINDOW.max(nodes.len()) * nodes.iter().map(Vec::len).max().unwrap_or(1)).max(1);
    // Steps with which each section has come back, by rank.
    let mut back: VecDeque<Vec<Vec<u32>>> = VecDeque::new();
    for section in &sections {
        let mut landed = vec![Vec::new(); world];
        if back.len() == window
            && let Some(before) = back.pop_front()
        {
            before.into_iter().enumerate().for_each(|(rank, steps)| composer.hold_sends_for(rank, steps));
        }
        section.pieces.iter().for_each(|piece| piece.gather_in_nodes(&mut composer));
        for round in 0..routes.iter().map(|route| route.up.len()).max().unwrap_or(0) {
            for (route, piece) in routes.iter().zip(&section.pieces) {
                for hop in route.up.get(round).into_iter().flatten() {
                    let steps = piece.hop(&mut composer, Class::Beside, hop);
                    if hop.landing == Landing::Finish {
                        landed[piece.nodes[hop.to][0]].extend(steps);
                    }
                }
            }
        }
        for round in 0..routes.iter().map(|route| route.down.len()).max().unwrap_or(0) {
            for (route, piece) in routes.iter().zip(&section.pieces) {
                for hop in route.down.get(round).into_iter().flatten() {
                    let steps = piece.hop(&mut composer, Class::Main, hop);
                    landed[piece.nodes[hop.to][0]].extend(steps);
                }
            }
        }
        section.pieces.iter().for_each(|piece| piece.spread_in_nodes(&mut composer, &mut landed));
        back.push_back(landed);
    }
    let mut plans = composer.finish();
    share_rails(&mut plans, nodes, &packing.rails);
    plans
}

/// Tells each rank how many elements of its messages each rail should carry.
fn share_rails(plans: &mut [RankPlan], nodes: &[Vec<usize>], rails: &[PairRails]) {
    for pair in rails {
        for &from in &nodes[pair.from] {
            let mut sent: BTreeMap<(usize, Class), usize> = BTreeMap::new();
            for step in &plans[from].steps {
                if let Action::Send { peer, src } = step.action
                    && nodes[pair.to].contains(&peer)
                {
                    *sent.entry((peer, step.class)).or_default() += src.len;
                }
            }
            let share = |(stream, sent)| (stream, pair.parts.iter().map(|part| part * sent as f64).collect());
            plans[from].shares.extend(sent.into_iter().map(share));
        }
    }
}

/// One message of a tree.
#[derive(Debug, Clone, Copy)]
struct Hop {
    from: usize,
    to: usize,
    landing: Landing,
}

/// The messages of a tree, by round.
#[derive(Debug)]
struct Route {
    up: Vec<Vec<Hop>>,
    down: Vec<Vec<Hop>>,
}

impl Route {
    /// Nodes that carry more go first: the others have less to make up for what they wait. `turn` decides who is first
    /// among equals, so that trees do not all begin with the same node.
    fn new(turn: usize, tree: &Tree, loads: &[f64]) -> Self {
        let nodes = tree.parent.len();
        let mut height = vec![0; nodes];
        let mut depth = vec![0; nodes];
        for (node, depth) in depth.iter_mut().enumerate() {
            let (mut at, mut hops) = (node, 0);
            while at != tree.root {
                at = tree.parent[at];
                hops += 1;
                height[at] = height[at].max(hops);
            }
            *depth = hops;
        }
        let mut children: Vec<usize> =
            (1..=nodes).map(|i| (tree.root + turn + i) % nodes).filter(|&node| node != tree.root).collect();
        // Loads that should be equal differ by rounding.
        children.sort_by_key(|&node| Reverse((loads[node] * 1e6).round() as u64));
        let mut up = vec![Vec::new(); height[tree.root]];
        let mut down = up.clone();
        for node in children {
            let parent = tree.parent[node];
            up[height[node]].push(Hop { from: node, to: parent, landing: Landing::Reduce });
            down[depth[node] - 1].push(Hop { from: parent, to: node, landing: Landing::Store });
        }
        let last = up.iter_mut().flatten().rev().find(|hop| hop.to == tree.root);
        if let Some(last) = last {
            last.landing = Landing::Finish;
        }
        Self { up, down }
    }
}

/// A section of the tensor: the part of each tree.
#[derive(Debug)]
struct Section {
    pieces: Vec<Piece>,
}

/// The part of a section that takes one tree.
#[derive(Debug)]
struct Piece {
    range: Range<usize>,
    /// Ranks of each node, the leader first.
    nodes: Vec<Vec<usize>>,
}

impl Section {
    fn new(nodes: &[Vec<usize>], packing: &Packing, number: usize, range: Range<usize>, shape: Shape) -> Self {
        let trees = packing.trees.len();
        let granule = granule_elements(shape.element_bytes);
        let unit = if range.len() >= 64 * granule * trees { granule } else { 1 };
        let mut sum = 0.0;
        let mut bounds = vec![range.start];
        for tree in &packing.trees {
            sum += tree.weight;
            let exact = (sum * range.len() as f64 / unit as f64).round() as usize * unit;
            bounds.push(range.start + exact.min(range.len()));
        }
        // Weights sum to 1 but for rounding.
        if let Some(last) = bounds.last_mut() {
            *last = range.end;
        }
        let turned = |ranks: &Vec<usize>, by: usize| {
            let mut ranks = ranks.clone();
            let by = by % ranks.len();
            ranks.rotate_left(by);
            ranks
        };
        let piece = |(tree, pair): (usize, &[usize])| Piece {
            range: pair[0]..pair[1],
            nodes: nodes.iter().map(|ranks| turned(ranks, number * trees + tree)).collect(),
        };
        Self { pieces: bounds.windows(2).enumerate().map(piece).collect() }
    }
}

impl Piece {
    /// Returns the receiving steps.
    fn hop(&self, composer: &mut Composer, class: Class, hop: &Hop) -> Vec<u32> {
        let (from, to) = (self.nodes[hop.from][0], self.nodes[hop.to][0]);
        composer.message(class, from, to, self.range.clone(), hop.landing)
    }

    /// The sum of each node goes from rank to rank, to the leader last.
    fn gather_in_nodes(&self, composer: &mut Composer) {
        let alone = self.nodes.len() == 1;
        for ranks in &self.nodes {
            for to in (0..ranks.len() - 1).rev() {
                let landing = if alone && to == 0 { Landing::Finish } else { Landing::Reduce };
                composer.message(Class::Beside, ranks[to + 1], ranks[to], self.range.clone(), landing);
            }
        }
    }

    fn spread_in_nodes(&self, composer: &mut Composer, landed: &mut [Vec<u32>]) {
        for ranks in &self.nodes {
            for pair in ranks.windows(2) {
                let steps = composer.message(Class::Main, pair[0], pair[1], self.range.clone(), Landing::Store);
                landed[pair[1]].extend(steps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::fabric::{Fabric, FabricNode};
    use crate::schedule::testing::{any_fabric, any_shape};
    use crate::schedule::{Goal, check};

    fn ring(fabric: &Fabric) -> Vec<usize> {
        (0..fabric.nodes().len()).collect()
    }

    fn ranks(fabric: &Fabric) -> Vec<Vec<usize>> {
        fabric.nodes().iter().map(|node| node.ranks.clone()).collect()
    }

    #[test]
    fn the_weak_of_three_nodes_receives_three_fifths_of_what_the_flat_ring_gives_it() {
        let third = 1.0 / 3.0;
        let node = |i: usize| FabricNode {
            ranks: vec![2 * i, 2 * i + 1],
            rails: vec![third, if i == 0 { 0.0 } else { third }, third],
        };
        let fabric = Fabric::new((0..3).map(node).collect()).unwrap();
        let packing = Packing::new(&fabric, &ring(&fabric));
        let shape = Shape { elements: 16 << 20, element_bytes: 4, in_place: true, slice_elements: None };
        let plans = weighted_all_reduce(&ranks(&fabric), &packing, shape, Weighted::default());
        check(&plans, Goal::AllReduce { in_place: true }, shape.elements).unwrap();
        let received: usize = plans[..2]
            .iter()
            .flat_map(|plan| &plan.steps)
            .map(|step| match step.action {
                Action::Recv { peer, dst } | Action::RecvReduce { peer, dst, .. } if peer > 1 => dst.len,
                _ => 0,
            })
            .sum();
        let share = received as f64 / (2.0 * 5.0 / 6.0 * shape.elements as f64);
        assert!((share - 0.6).abs() < 1e-3, "{share}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_topology_with_any_failures_is_proven(
            fabric in any_fabric(16, 8),
            shape in any_shape(),
            sections in prop::option::of(1usize..7),
            window in prop::option::of(1usize..4),
        ) {
            let packing = Packing::new(&fabric, &ring(&fabric));
            let plans = weighted_all_reduce(&ranks(&fabric), &packing, shape, Weighted { sections, window });
            let proof = check(&plans, Goal::AllReduce { in_place: shape.in_place }, shape.elements);
            prop_assert!(proof.is_ok(), "{:?}", proof);
        }
    }
}
