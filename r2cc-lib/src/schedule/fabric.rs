//! What a schedule knows of the network: which ranks share a node, and what each node's NICs carry on each rail.
//!
//! Owns the bandwidths that follow from it: of a node, of a pair of nodes, of a ring. A fabric on which any NIC
//! reaches any other is a fabric of one rail. Never measures anything. Start at [`Fabric::new`].

mod members;

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub struct FabricNode {
    /// Its ranks.
    pub ranks: Vec<usize>,
    /// Bytes a second, each way, of its working NICs on each rail; 0 where it has none.
    pub rails: Vec<f64>,
}

/// Nodes that reach one another.
#[derive(Debug, Clone, PartialEq)]
pub struct Fabric {
    nodes: Vec<FabricNode>,
}

/// Why nodes make no fabric.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FabricError {
    /// The nodes' ranks are not 0, 1, … each once.
    #[error("the nodes have {ranks} ranks, but none or two of them is rank {rank}")]
    Ranks {
        /// Ranks of all nodes.
        ranks: usize,
        /// The first that is missing or there twice.
        rank: usize,
    },
    /// A node without ranks, or with another number of rails than the first.
    #[error("node {node} has {ranks} ranks and {rails} rails, the first node {expected} rails")]
    Node {
        /// The node, from 0.
        node: usize,
        /// Its ranks.
        ranks: usize,
        /// Its rails.
        rails: usize,
        /// Rails of the first node.
        expected: usize,
    },
    /// A bandwidth that is none.
    #[error("node {node} rail {rail}: {bytes_s} bytes a second is no bandwidth")]
    Bandwidth {
        /// The node, from 0.
        node: usize,
        /// The rail, from 0.
        rail: usize,
        /// What was given.
        bytes_s: f64,
    },
    /// Two nodes share no rail.
    #[error("nodes {a} and {b} share no rail on which both have a working NIC")]
    Unreachable {
        /// One node, from 0.
        a: usize,
        /// The other.
        b: usize,
    },
}

impl Fabric {
    /// Nodes in the order of a flat ring.
    ///
    /// # Errors
    /// If the ranks are not 0, 1, … each once, the nodes differ in their number of rails, a bandwidth is not a
    /// finite number from 0, or a pair of nodes shares no rail.
    pub fn new(nodes: Vec<FabricNode>) -> Result<Self, FabricError> {
        let mut ranks: Vec<usize> = nodes.iter().flat_map(|node| &node.ranks).copied().collect();
        ranks.sort_unstable();
        if let Some(rank) = (0..ranks.len()).find(|&rank| ranks[rank] != rank) {
            return Err(FabricError::Ranks { ranks: ranks.len(), rank });
        }
        let expected = nodes.first().map_or(0, |node| node.rails.len());
        for (i, node) in nodes.iter().enumerate() {
            if node.ranks.is_empty() || node.rails.len() != expected {
                let (ranks, rails) = (node.ranks.len(), node.rails.len());
                return Err(FabricError::Node { node: i, ranks, rails, expected });
            }
            let wrong = node.rails.iter().position(|b| !b.is_finite() || *b < 0.0);
            if let Some(rail) = wrong {
                return Err(FabricError::Bandwidth { node: i, rail, bytes_s: node.rails[rail] });
            }
        }
        let fabric = Self { nodes };
        for b in 0..fabric.nodes.len() {
            if let Some(a) = (0..b).find(|&a| fabric.common(a, b) == 0.0) {
                return Err(FabricError::Unreachable { a, b });
            }
        }
        Ok(fabric)
    }

    /// The nodes, in the order of a flat ring.
    pub fn nodes(&self) -> &[FabricNode] {
        &self.nodes
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.nodes.iter().map(|node| node.ranks.len()).sum()
    }

    /// Bytes a second that a node can use: on each rail no more than all others have on it.
    pub fn bandwidth(&self, node: usize) -> f64 {
        let others = |rail: usize| {
            let of = |(i, other): (usize, &FabricNode)| if i == node { 0.0 } else { other.rails[rail] };
            self.nodes.iter().enumerate().map(of).sum::<f64>()
        };
        self.nodes[node].rails.iter().enumerate().map(|(rail, b)| b.min(others(rail))).sum()
    }

    /// Bytes a second between two nodes that have their NICs for each other.
    pub fn common(&self, a: usize, b: usize) -> f64 {
        self.nodes[a].rails.iter().zip(&self.nodes[b].rails).map(|(a, b)| a.min(*b)).sum()
    }

    /// Bytes a second around a ring through `order`: those of its worst edge; infinite with less than two nodes.
    pub fn ring_bandwidth(&self, order: &[usize]) -> f64 {
        if order.len() < 2 {
            return f64::INFINITY;
        }
        let next = |i: usize| order[(i + 1) % order.len()];
        (0..order.len()).map(|i| self.common(order[i], next(i))).fold(f64::INFINITY, f64::min)
    }

    /// Ranks of the nodes in `order`, node by node.
    pub fn ranks_of(&self, order: &[usize]) -> Vec<usize> {
        order.iter().flat_map(|&node| &self.nodes[node].ranks).copied().collect()
    }

    /// The nodes in a ring of the highest bandwidth: exact to nine nodes, beyond them no worse than the given
    /// order.
    pub fn best_ring(&self) -> Vec<usize> {
        let given: Vec<usize> = (0..self.nodes.len()).collect();
        best_order(&given, |order| self.ring_bandwidth(order))
    }
}

/// The best of the rings through `given` by `worth`; the given one where none is better. All of them to nine
/// nodes; beyond, what exchanges of two or reversals of a part make better, until none does.
fn best_order(given: &[usize], worth: impl Fn(&[usize]) -> f64) -> Vec<usize> {
    let mut best = (worth(given), given.to_vec());
    if given.len() <= 9 {
        let mut order = given.to_vec();
        every_order(&mut order, 1, &mut |order| {
            let found = worth(order);
            if found > best.0 {
                best = (found, order.to_vec());
            }
        });
        return best.1;
    }
    let mut better = true;
    while better {
        better = false;
        for i in 1..given.len() {
            for j in i + 1..given.len() {
                for reverse in [false, true] {
                    let mut order = best.1.clone();
                    if reverse {
                        order[i..=j].reverse()
                    } else {
                        order.swap(i, j)
                    }
                    let found = worth(&order);
                    if found > best.0 {
                        best = (found, order);
                        better = true;
                    }
                }
            }
        }
    }
    best.1
}

fn every_order(order: &mut [usize], from: usize, visit: &mut impl FnMut(&[usize])) {
    if from >= order.len() {
        return visit(order);
    }
    for i in from..order.len() {
        order.swap(from, i);
        every_order(order, from + 1, visit);
        order.swap(from, i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric(rails: &[&[f64]]) -> Result<Fabric, FabricError> {
        let node = |(i, rails): (usize, &&[f64])| FabricNode { ranks: vec![i], rails: rails.to_vec() };
        Fabric::new(rails.iter().enumerate().map(node).collect())
    }

    #[test]
    fn a_pair_has_the_rails_that_both_have() {
        let f = fabric(&[&[1.0, 0.0, 1.0], &[1.0, 1.0, 0.0], &[1.0, 1.0, 1.0]]).unwrap();
        assert_eq!((f.common(0, 1), f.common(0, 2), f.common(1, 2)), (1.0, 2.0, 2.0));
        assert_eq!((0..3).map(|i| f.bandwidth(i)).collect::<Vec<_>>(), [2.0, 2.0, 3.0]);
        assert_eq!(f.ring_bandwidth(&[0, 1, 2]), 1.0);
    }

    #[test]
    fn another_order_of_four_nodes_keeps_the_bad_pair_apart() {
        let f = fabric(&[&[1.0, 0.0, 1.0], &[1.0, 1.0, 0.0], &[1.0; 3], &[1.0; 3]]).unwrap();
        assert_eq!(f.ring_bandwidth(&[0, 1, 2, 3]), 1.0);
        assert_eq!(f.ring_bandwidth(&f.best_ring()), 2.0);
    }

    #[test]
    fn what_is_no_fabric_is_refused() {
        assert_eq!(fabric(&[&[1.0, 0.0], &[0.0, 1.0]]), Err(FabricError::Unreachable { a: 0, b: 1 }));
        assert!(matches!(fabric(&[&[1.0], &[1.0, 1.0]]), Err(FabricError::Node { node: 1, .. })));
        assert!(matches!(fabric(&[&[f64::NAN]]), Err(FabricError::Bandwidth { .. })));
        let twice = vec![FabricNode { ranks: vec![0, 0], rails: vec![1.0] }];
        assert_eq!(Fabric::new(twice), Err(FabricError::Ranks { ranks: 2, rank: 1 }));
    }
}
