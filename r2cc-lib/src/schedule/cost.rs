//! What schedules cost, and which one to take: the planner.
//!
//! Owns the formulas of the design for a fabric as it is now, healthy or not, and the choice of the cheapest that
//! is allowed. Never measures; the bench holds the formulas against the flow simulator. Start at [`choose`].

use serde::{Deserialize, Serialize};

use super::fabric::Fabric;
use super::packing::Packing;
use super::plan::RankPlan;
use super::r2cc::{Overlap, R2ccLayout, Shape, r2cc_all_reduce};
use super::ring::ring_all_reduce_along;
use super::weighted::{SECTIONS, Weighted, weighted_all_reduce};

/// A schedule must be faster than a simpler one by this part to be taken.
const WORTHWHILE: f64 = 0.02;

/// Below so many bytes, Balance: the default of `R2CC_AR_MIN_BYTES`.
pub const MIN_BYTES: usize = 16 << 20;

/// Which schedules may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The flat ring.
    Balance,
    /// R2CC-AllReduce where a node is weaker than others, else the flat ring.
    R2ccAllReduce,
    /// Weighted.
    Weighted,
    /// Whichever is fastest.
    #[default]
    Fastest,
}

/// What the user has asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wishes {
    /// Which schedules may be taken.
    pub policy: Policy,
    /// Chunks of R2CC-AllReduce, from 1: `R2CC_AR_STAGE2_CHUNKS`.
    pub chunks: usize,
    /// What it may overlap: `R2CC_AR_SCHEDULE`.
    pub overlap: Overlap,
    /// Below so many bytes, Balance: `R2CC_AR_MIN_BYTES`.
    pub min_bytes: usize,
}

impl Default for Wishes {
    fn default() -> Self {
        Self { policy: Policy::default(), chunks: 4, overlap: Overlap::default(), min_bytes: MIN_BYTES }
    }
}

/// A schedule for AllReduce on a fabric. The same on all ranks only if made on one and sent to the others:
/// measured bandwidths differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "schedule")]
pub enum Schedule {
    /// The flat ring: node by node, in this order of ranks.
    Ring {
        /// The ranks around the ring.
        ranks: Vec<usize>,
    },
    /// R2CC-AllReduce.
    R2ccAllReduce {
        /// Who does what.
        layout: R2ccLayout,
        /// K.
        chunks: usize,
        /// What it may overlap.
        overlap: Overlap,
    },
    /// Weighted.
    Weighted {
        /// Ranks of each node.
        nodes: Vec<Vec<usize>>,
        /// How nodes share the tensor.
        packing: Packing,
    },
}

impl Schedule {
    /// Its name in logs and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ring { .. } => "balance",
            Self::R2ccAllReduce { .. } => "r2cc-allreduce",
            Self::Weighted { .. } => "weighted",
        }
    }

    /// The plans of all ranks, by rank.
    pub fn plans(&self, shape: Shape) -> Vec<RankPlan> {
        match self {
            Self::Ring { ranks } => (0..ranks.len()).map(|rank| ring_plan(ranks, rank, shape)).collect(),
            Self::R2ccAllReduce { layout, chunks, overlap } => r2cc_all_reduce(layout, shape, *chunks, *overlap),
            Self::Weighted { nodes, packing } => weighted_all_reduce(nodes, packing, shape, Weighted::default()),
        }
    }

    /// The plan of one rank. All but the ring make everybody's plans for it.
    pub fn plan(&self, rank: usize, shape: Shape) -> RankPlan {
        match self {
            Self::Ring { ranks } => ring_plan(ranks, rank, shape),
            _ => self.plans(shape).swap_remove(rank),
        }
    }

    /// Seconds for `bytes` on the fabric that it was made for, by the formulas.
    pub fn seconds(&self, fabric: &Fabric, bytes: usize) -> f64 {
        match self {
            Self::Ring { ranks } => {
                let node_of = |rank: &usize| fabric.nodes().iter().position(|node| node.ranks.contains(rank));
                let mut order: Vec<usize> = ranks.iter().filter_map(node_of).collect();
                order.dedup();
                ring_volume(ranks.len()) * bytes as f64 / fabric.ring_bandwidth(&order)
            }
            Self::R2ccAllReduce { layout, chunks, .. } => layout.seconds_a_byte(*chunks) * bytes as f64,
            // The first section's way up and the last one's way down have nothing beside them.
            Self::Weighted { packing, .. } => packing.seconds_a_byte * bytes as f64 * (1.0 + 1.0 / SECTIONS as f64),
        }
    }
}

fn ring_plan(ranks: &[usize], rank: usize, shape: Shape) -> RankPlan {
    let Shape { elements, element_bytes, in_place, slice_elements } = shape;
    ring_all_reduce_along(ranks, rank, elements, in_place, element_bytes, slice_elements)
}

/// Bytes around a ring for each byte of the tensor.
pub(super) fn ring_volume(world: usize) -> f64 {
    2.0 * (world as f64 - 1.0) / world as f64
}

/// The flat ring with the nodes in their given order.
pub fn flat_ring(fabric: &Fabric) -> Schedule {
    let order: Vec<usize> = (0..fabric.nodes().len()).collect();
    Schedule::Ring { ranks: fabric.ranks_of(&order) }
}

/// R2CC-AllReduce with the healthy nodes that make it fastest; `None` if all nodes are alike.
pub fn best_r2cc(fabric: &Fabric, ring: &[usize], chunks: usize, overlap: Overlap) -> Option<Schedule> {
    let mut levels: Vec<f64> = (0..ring.len()).map(|node| fabric.bandwidth(node)).collect();
    levels.sort_by(f64::total_cmp);
    levels.dedup_by(|a, b| (*a / *b - 1.0).abs() < WORTHWHILE);
    let layouts = levels[1.min(levels.len())..].iter().filter_map(|level| {
        let layout = R2ccLayout::new(fabric, ring, |node| fabric.bandwidth(node) >= level * (1.0 - WORTHWHILE))?;
        (layout.tail() > 0.0).then(|| (layout.seconds_a_byte(chunks), layout))
    });
    let best = layouts.reduce(|best, other| if other.0 < best.0 { other } else { best });
    best.map(|(_, layout)| Schedule::R2ccAllReduce { layout, chunks, overlap })
}

/// Weighted with the best packing known.
pub fn best_weighted(fabric: &Fabric, ring: &[usize]) -> Schedule {
    let nodes = fabric.nodes().iter().map(|node| node.ranks.clone()).collect();
    Schedule::Weighted { nodes, packing: Packing::new(fabric, ring) }
}

/// The schedule for an AllReduce of `bytes`: by the wishes, or the one that the formulas say is fastest. Small
/// ones take the flat ring, in the given order of nodes unless another is faster by a good part.
pub fn choose(fabric: &Fabric, wishes: Wishes, bytes: usize) -> Schedule {
    let given: Vec<usize> = (0..fabric.nodes().len()).collect();
    let better = fabric.best_ring();
    let gain = fabric.ring_bandwidth(&better) / fabric.ring_bandwidth(&given);
    let order = if gain > 1.0 + WORTHWHILE { better } else { given };
    let balance = Schedule::Ring { ranks: fabric.ranks_of(&order) };
    if bytes < wishes.min_bytes || fabric.nodes().len() < 2 {
        return balance;
    }
    let r2cc = || best_r2cc(fabric, &order, wishes.chunks.max(1), wishes.overlap);
    match wishes.policy {
        Policy::Balance => balance,
        Policy::R2ccAllReduce => r2cc().unwrap_or(balance),
        Policy::Weighted => best_weighted(fabric, &order),
        Policy::Fastest => {
            let others = r2cc().into_iter().chain([best_weighted(fabric, &order)]);
            others.fold(balance, |best, other| {
                let gains = other.seconds(fabric, bytes) < best.seconds(fabric, bytes) * (1.0 - WORTHWHILE);
                if gains { other } else { best }
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::fabric::FabricNode;

    const BYTES: usize = 64 << 20;

    fn fabric(lost: &[(usize, usize)]) -> Fabric {
        let node = |i: usize| FabricNode {
            ranks: vec![2 * i, 2 * i + 1],
            rails: (0..3).map(|rail| if lost.contains(&(i, rail)) { 0.0 } else { 1e9 / 3.0 }).collect(),
        };
        Fabric::new((0..3).map(node).collect()).unwrap()
    }

    fn ratio(schedule: &Schedule, fabric: &Fabric) -> f64 {
        schedule.seconds(fabric, BYTES) / (ring_volume(6) * BYTES as f64 / 1e9)
    }

    #[test]
    fn the_formulas_give_the_designs_table() {
        let fabric = fabric(&[(0, 1)]);
        let ring = [0, 1, 2];
        assert!((ratio(&flat_ring(&fabric), &fabric) - 1.5).abs() < 1e-9);
        let r2cc = best_r2cc(&fabric, &ring, 4, Overlap::default()).unwrap();
        assert!((ratio(&r2cc, &fabric) - 1.375).abs() < 0.01, "{}", ratio(&r2cc, &fabric));
        let weighted = ratio(&best_weighted(&fabric, &ring), &fabric);
        assert!((0.9..0.93).contains(&weighted), "{weighted}");
    }

    #[test]
    fn the_wish_decides_and_below_the_minimum_balance() {
        let fabric = fabric(&[(0, 1)]);
        for (policy, name) in [
            (Policy::Balance, "balance"),
            (Policy::R2ccAllReduce, "r2cc-allreduce"),
            (Policy::Weighted, "weighted"),
            (Policy::Fastest, "weighted"),
        ] {
            let wishes = Wishes { policy, ..Wishes::default() };
            assert_eq!(choose(&fabric, wishes, MIN_BYTES).name(), name);
            assert_eq!(choose(&fabric, wishes, MIN_BYTES - 1).name(), "balance");
        }
    }

    #[test]
    fn r2cc_allreduce_without_a_weak_node_is_the_ring() {
        let wishes = Wishes { policy: Policy::R2ccAllReduce, ..Wishes::default() };
        assert_eq!(choose(&fabric(&[]), wishes, BYTES), flat_ring(&fabric(&[])));
    }

    #[test]
    fn a_schedule_sent_to_another_rank_makes_the_same_plans() {
        let fabric = fabric(&[(0, 1), (1, 2)]);
        let shape = Shape { elements: 100_000, element_bytes: 4, in_place: true, slice_elements: None };
        for policy in [Policy::Balance, Policy::R2ccAllReduce, Policy::Weighted] {
            let schedule = choose(&fabric, Wishes { policy, min_bytes: 0, ..Wishes::default() }, BYTES);
            let text = serde_json::to_string(&schedule).unwrap();
            let received: Schedule = serde_json::from_str(&text).unwrap();
            assert_eq!(received.plans(shape), schedule.plans(shape), "{text}");
            assert_eq!(received.plan(3, shape), schedule.plans(shape)[3]);
        }
    }
}
