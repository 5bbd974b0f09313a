//! Weighted trees over the nodes: how Weighted shares the tensor, and the bound that it is measured against.
//!
//! An AllReduce that reduces up a spanning tree and broadcasts down it moves each element once each way over
//! every edge, so a node of degree d receives d times the elements of the tree. The best schedule is a packing
//! of trees: weights that sum to 1 and keep every NIC's load least. With one rail the answer is known (stars or
//! nested rings with the shares of [`shares`]); with more it is a linear program over (pair, rail), in `rails`.
//! Never makes a plan. Start at [`Packing::new`].

mod rails;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::fabric::Fabric;

/// Most nodes for which the linear program is solved.
pub const FEW_NODES: usize = 8;
/// Most nodes that send to each other directly; beyond, around rings.
const DIRECT_NODES: usize = 8;

/// Flat trees are taken if they are slower than the best by no more than this part.
const NEARLY: f64 = 0.005;

/// A spanning tree of the nodes, and the part of the tensor that takes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// The node that completes the elements.
    pub root: usize,
    /// Where each node sends its sum; the root's own entry is the root.
    pub parent: Vec<usize>,
    /// Part of the tensor.
    pub weight: f64,
}

impl Tree {
    /// Number of edges at each node.
    fn degrees(&self) -> Vec<usize> {
        let mut degrees = vec![0; self.parent.len()];
        for (node, &parent) in self.parent.iter().enumerate().filter(|(node, _)| *node != self.root) {
            degrees[node] += 1;
            degrees[parent] += 1;
        }
        degrees
    }
}

/// How one node's messages to another are shared out among the rails.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairRails {
    /// The sending node.
    pub from: usize,
    /// The receiving node.
    pub to: usize,
    /// Part of their bytes that each rail carries; they sum to 1.
    pub parts: Vec<f64>,
}

/// Trees whose weights sum to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Packing {
    /// The trees.
    pub trees: Vec<Tree>,
    /// Seconds that a byte of the tensor takes when every NIC carries its load without a gap.
    pub seconds_a_byte: f64,
    /// The rails of all pairs that a tree joins, so that flows share each NIC by what they have to carry: in equal
    /// parts the one would wait for more and the other leave a NIC idle.
    pub rails: Vec<PairRails>,
}

impl Packing {
    /// The best packing known for the fabric, with rings through the nodes in the order `ring`.
    pub fn new(fabric: &Fabric, ring: &[usize]) -> Self {
        let nodes = fabric.nodes().len();
        if nodes < 2 {
            let trees = vec![Tree { root: 0, parent: vec![0], weight: 1.0 }];
            return Self { trees, seconds_a_byte: 0.0, rails: Vec::new() };
        }
        let rails = fabric.nodes()[0].rails.len();
        let bandwidth: Vec<f64> = (0..nodes).map(|node| fabric.bandwidth(node)).collect();
        if rails > 1
            && nodes <= FEW_NODES
            && let Some((trees, least)) = rails::solve(fabric)
        {
            // Flat trees wait less; the program's own may be of any shape.
            let flat = stars(&shares(&bandwidth));
            let nearly = |found: &(f64, Vec<PairRails>)| found.0 <= least * (1.0 + NEARLY);
            return match (rails::assign(fabric, &flat).filter(nearly), rails::assign(fabric, &trees)) {
                (Some((seconds_a_byte, rails)), _) => Self { trees: flat, seconds_a_byte, rails },
                (_, Some((seconds_a_byte, rails))) => Self { trees, seconds_a_byte, rails },
                _ => Self { rails: by_speed(fabric, &trees), trees, seconds_a_byte: least },
            };
        }
        let shares = shares(&bandwidth);
        let trees = if nodes <= DIRECT_NODES { stars(&shares) } else { nested_rings(&shares, ring) };
        let seconds_a_byte = loads(&trees).iter().zip(&bandwidth).map(|(load, b)| load / b).fold(0.0, f64::max);
        Self { rails: by_speed(fabric, &trees), trees, seconds_a_byte }
    }

    /// Bytes that each node receives for each byte of the tensor.
    pub(super) fn loads(&self) -> Vec<f64> {
        loads(&self.trees)
    }
}

fn loads(trees: &[Tree]) -> Vec<f64> {
    let mut loads = vec![0.0; trees.first().map_or(0, |tree| tree.parent.len())];
    for tree in trees {
        for (load, degree) in loads.iter_mut().zip(tree.degrees()) {
            *load += tree.weight * degree as f64;
        }
    }
    loads
}

/// Every pair that a tree joins on all rails that it shares, in proportion to their speed.
fn by_speed(fabric: &Fabric, trees: &[Tree]) -> Vec<PairRails> {
    let edges = trees.iter().flat_map(|tree| tree.parent.iter().copied().enumerate());
    let pairs: BTreeSet<(usize, usize)> = edges.filter(|(a, b)| a != b).flat_map(|(a, b)| [(a, b), (b, a)]).collect();
    let rails = |(from, to): (usize, usize)| {
        let (a, b) = (&fabric.nodes()[from].rails, &fabric.nodes()[to].rails);
        let parts = a.iter().zip(b).map(|(a, b)| a.min(*b) / fabric.common(from, to)).collect();
        PairRails { from, to, parts }
    };
    pairs.into_iter().map(rails).collect()
}

/// Least seconds a byte of the tensor that any AllReduce of the fabric can take, full duplex, with free traffic
/// inside nodes and no reduction in the network: with one rail max(1 / b_min, 2 (n - 1) / sum of b); with
/// more, to [`FEW_NODES`] nodes, the linear program, beyond them the same formula, which is below it.
pub fn bound(fabric: &Fabric) -> f64 {
    let nodes = fabric.nodes().len();
    if nodes < 2 {
        return 0.0;
    }
    if fabric.nodes()[0].rails.len() > 1
        && nodes <= FEW_NODES
        && let Some((_, seconds_a_byte)) = rails::solve(fabric)
    {
        return seconds_a_byte;
    }
    let bandwidth = (0..nodes).map(|node| fabric.bandwidth(node));
    let least = bandwidth.clone().fold(f64::INFINITY, f64::min);
    (1.0 / least).max(2.0 * (nodes as f64 - 1.0) / bandwidth.sum::<f64>())
}

/// The part f_i of the tensor that each node completes: (1 + (n - 2) f_i) / b_i equal among the nodes with a
/// share, and no lower for those without. They sum to 1.
pub fn shares(bandwidth: &[f64]) -> Vec<f64> {
    let n = bandwidth.len();
    if n <= 2 {
        return vec![1.0 / n as f64; n];
    }
    let others = (n - 2) as f64;
    let at = |seconds: f64| bandwidth.iter().map(move |b| ((b * seconds - 1.0) / others).max(0.0));
    // The sum of shares grows with the time, from 0 to above 1.
    let least = bandwidth.iter().copied().fold(f64::INFINITY, f64::min);
    let (mut low, mut high) = (0.0, n as f64 / least);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if at(middle).sum::<f64>() < 1.0 { low = middle } else { high = middle }
    }
    let sum: f64 = at(high).sum();
    at(high).map(|share| share / sum).collect()
}

/// Each node with a share is the root of a star over all others.
fn stars(shares: &[f64]) -> Vec<Tree> {
    let star = |(root, &weight): (usize, &f64)| Tree { root, parent: vec![root; shares.len()], weight };
    shares.iter().enumerate().filter(|(_, share)| **share > 0.0).map(star).collect()
}

/// Nested layers: the first is a ring of all nodes, as large as the smallest share allows; the next one of all
/// but the nodes whose share is used up, and so on. In a layer each member completes an equal part, which comes
/// to it around the ring; nodes that are no members are leaves at the part's root.
fn nested_rings(shares: &[f64], ring: &[usize]) -> Vec<Tree> {
    let mut levels: Vec<f64> = shares.to_vec();
    levels.sort_by(f64::total_cmp);
    levels.dedup_by(|a, b| (*a - *b).abs() < 1e-9);
    let mut trees = Vec::new();
    let mut below = 0.0;
    for level in levels {
        let members: Vec<usize> = ring.iter().copied().filter(|&node| shares[node] >= level - 1e-9).collect();
        if level - below > 1e-9 {
            for (place, &root) in members.iter().enumerate() {
                let mut parent = vec![root; shares.len()];
                for hop in 1..members.len() {
                    let at = |hop: usize| members[(place + hop) % members.len()];
                    parent[at(hop)] = at(hop + 1);
                }
                trees.push(Tree { root, parent, weight: level - below });
            }
        }
        below = level;
    }
    let sum: f64 = trees.iter().map(|tree| tree.weight).sum();
    trees.iter_mut().for_each(|tree| tree.weight /= sum);
    trees
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::fabric::FabricNode;

    fn fabric(rails: &[Vec<f64>]) -> Fabric {
        let node = |(i, rails): (usize, &Vec<f64>)| FabricNode { ranks: vec![i], rails: rails.clone() };
        Fabric::new(rails.iter().enumerate().map(node).collect()).unwrap()
    }

    fn packed(rails: &[Vec<f64>]) -> (Packing, f64) {
        let fabric = fabric(rails);
        let packing = Packing::new(&fabric, &(0..rails.len()).collect::<Vec<_>>());
        let weights: f64 = packing.trees.iter().map(|tree| tree.weight).sum();
        assert!((weights - 1.0).abs() < 1e-6, "{packing:?}");
        (packing, bound(&fabric))
    }

    #[test]
    fn the_weak_of_three_nodes_has_no_share_and_the_others_a_half() {
        let f = shares(&[2.0 / 3.0, 1.0, 1.0]);
        for (share, wanted) in f.iter().zip([0.0, 0.5, 0.5]) {
            assert!((share - wanted).abs() < 1e-9, "{f:?}");
        }
        assert_eq!(shares(&[1.0, 3.0]), [0.5, 0.5]);
    }

    #[test]
    fn one_rail_reaches_its_formula() {
        let cases: [&[f64]; 7] = [
            &[2.0, 3.0, 3.0],
            &[1.0, 3.0, 3.0],
            &[2.0, 2.0, 3.0, 3.0],
            &[1.0, 2.0],
            &[1.0; 20],
            &[[1.0; 10], [0.75; 10]].concat(),
            &[1.0, 1.0, 1.0, 0.75, 1.0, 1.0, 0.5, 1.0, 1.0, 0.25, 1.0, 0.9],
        ];
        for bandwidth in cases {
            let (packing, bound) = packed(&bandwidth.iter().map(|b| vec![*b]).collect::<Vec<_>>());
            assert!((packing.seconds_a_byte / bound - 1.0).abs() < 1e-6, "{bandwidth:?}: {packing:?}");
        }
    }

    #[test]
    fn a_lost_rail_of_three_costs_what_the_node_loses() {
        let third = 1.0 / 3.0;
        let (packing, bound) = packed(&[vec![third, 0.0, third], vec![third; 3], vec![third; 3]]);
        assert!((bound - 1.5).abs() < 1e-6, "{bound}");
        assert!((packing.seconds_a_byte - 1.5).abs() < 1e-6);
    }

    /// Every NIC direction has one peer, and the pairs together take every rail that works.
    #[test]
    fn with_a_lost_rail_each_nic_direction_has_one_peer() {
        let third = 1.0 / 3.0;
        let (packing, _) = packed(&[vec![third, 0.0, third], vec![third; 3], vec![third; 3]]);
        let mut ends = BTreeSet::new();
        for pair in &packing.rails {
            for rail in (0..3).filter(|rail| pair.parts[*rail] > 0.0) {
                assert!(ends.insert((pair.from, rail, "out")) && ends.insert((pair.to, rail, "in")), "{packing:?}");
            }
        }
        assert_eq!(ends.len(), 2 * (2 + 3 + 3), "{packing:?}");
    }

    #[test]
    fn where_pairs_have_to_share_a_nic_it_is_not_asked_for_more_than_it_has() {
        let third = 1.0 / 3.0;
        let weak = vec![0.0, third, third];
        let rails = [weak.clone(), weak, vec![third; 3], vec![third; 3]];
        let (packing, _) = packed(&rails);
        let weight = |pair: &PairRails| {
            let joins = |tree: &&Tree| tree.parent[pair.from] == pair.to || tree.parent[pair.to] == pair.from;
            packing.trees.iter().filter(joins).map(|tree| tree.weight).sum::<f64>()
        };
        for (node, rails) in rails.iter().enumerate() {
            for (rail, bytes_s) in rails.iter().enumerate() {
                let of_node = packing.rails.iter().filter(|pair| pair.from == node);
                let bytes: f64 = of_node.map(|pair| pair.parts[rail] * weight(pair)).sum();
                assert!(bytes <= bytes_s * packing.seconds_a_byte * (1.0 + 1e-6), "{node}/{rail}: {packing:?}");
            }
        }
        assert!(packing.rails.iter().all(|pair| (pair.parts.iter().sum::<f64>() - 1.0).abs() < 1e-9), "{packing:?}");
    }

    /// Nodes 0 and 1 share one rail only, so the edge between them is used little, and nothing is lost by it.
    #[test]
    fn different_rails_lost_on_two_of_four_nodes_cost_no_more_than_the_formula_where_trees_go_around() {
        let healthy = vec![1.0; 3];
        let rails = [vec![0.0, 1.0, 1.0], vec![1.0, 0.0, 1.0], healthy.clone(), healthy];
        let (packing, bound) = packed(&rails);
        let formula = 2.0 * 3.0 / 10.0;
        assert!(bound >= formula - 1e-9, "{bound}");
        assert!((packing.seconds_a_byte / bound - 1.0).abs() <= NEARLY);
        assert!(bound < 0.65, "{bound}");
    }

    #[test]
    fn with_three_nodes_and_different_rails_lost_the_rails_decide() {
        let rails = [vec![0.0, 1.0, 1.0], vec![1.0, 0.0, 1.0], vec![1.0; 3]];
        let formula = 2.0 * 2.0 / 7.0;
        let (_, bound) = packed(&rails);
        assert!(bound > formula - 1e-9, "{bound} {formula}");
    }
}
