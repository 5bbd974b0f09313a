//! Plans of collectives over blocks of one rank each, around the ring: AllGather, ReduceScatter; and Reduce along it.
//!
//! Owns how partial results pass through the scratch buffer: a block is cut into sections that go all the way around
//! one after the other, so that scratch is bounded by the slices of two sections, whatever the size of a block.
//! Never looks at topology: neighbours are those of `order`, which names each rank once.

use std::ops::Range;

use super::plan::{Action, Buffer, RankPlan};
use super::r2cc::Shape;
use super::ring::{SLICES_A_BROADCAST, SLICES_A_SEGMENT, slices, span};

/// Slices of a section.
const SLICES_A_SECTION: usize = SLICES_A_SEGMENT;
/// Slices that scratch has room for: while those of one round leave, those of the next arrive.
const SCRATCH_SLICES: usize = 2 * SLICES_A_SECTION;

/// A rank's place in a ring.
struct Ring<'a> {
    order: &'a [usize],
    place: usize,
}

impl<'a> Ring<'a> {
    fn new(order: &'a [usize], rank: usize) -> Self {
        let place = order.iter().position(|&r| r == rank);
        Self { order, place: place.unwrap_or_else(|| panic!("rank {rank} is not in the ring {order:?}")) }
    }

    /// The rank `back` places behind this one.
    fn behind(&self, back: usize) -> usize {
        self.order[(self.place + 2 * self.order.len() - back) % self.order.len()]
    }

    fn right(&self) -> usize {
        self.order[(self.place + 1) % self.order.len()]
    }

    fn left(&self) -> usize {
        self.behind(1)
    }
}

fn cut(shape: Shape, parts: usize) -> Vec<Range<usize>> {
    let wanted = shape.elements.div_ceil(parts);
    slices(&(0..shape.elements), wanted, shape.element_bytes, shape.slice_elements)
}

fn moved(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Where slices of partial results lie until they have been passed on.
struct Scratch {
    slice: usize,
    /// The step that sends what lies in each slot away.
    leaves: Vec<Option<u32>>,
    next: usize,
}

impl Scratch {
    fn new(cuts: &[Range<usize>]) -> Self {
        let slice = cuts.first().map_or(0, ExactSizeIterator::len);
        Self { slice, leaves: vec![None; SCRATCH_SLICES], next: 0 }
    }

    /// Room for a slice: slot, place, and the steps that must be complete before it may be written.
    fn take(&mut self, len: usize, plan: &mut RankPlan) -> (usize, Range<usize>, Vec<u32>) {
        let slot = self.next % SCRATCH_SLICES;
        self.next += 1;
        let start = slot * self.slice;
        plan.scratch_elements = plan.scratch_elements.max(start + self.slice);
        (slot, start..start + len, self.leaves[slot].take().into_iter().collect())
    }
}

/// Plan of `rank` for an AllGather of blocks of `shape.elements` elements (input: one block, output: one a rank).
///
/// Every rank must pass the same order and shape. Each rank sends and receives P - 1 blocks; out of place it copies its
/// own.
pub fn ring_all_gather(order: &[usize], rank: usize, shape: Shape) -> RankPlan {
    let (ring, n) = (Ring::new(order, rank), shape.elements);
    let mut plan = RankPlan::default();
    let cuts = cut(shape, SLICES_A_SEGMENT);
    // The step that brought each slice of the block that is passed on next.
    let mut brought: Vec<Option<u32>> = vec![None; cuts.len()];
    for round in 0..order.len() - 1 {
        let (outgoing, incoming) = (ring.behind(round), ring.behind(round + 1));
        for (cut, brought) in cuts.iter().zip(&mut brought) {
            let src =
                if round == 0 { span(Buffer::Input, cut) } else { span(Buffer::Output, &moved(cut, outgoing * n)) };
            plan.push(Action::Send { peer: ring.right(), src }, brought.take().into_iter().collect());
            let dst = span(Buffer::Output, &moved(cut, incoming * n));
            *brought = Some(plan.push(Action::Recv { peer: ring.left(), dst }, Vec::new()));
        }
    }
    if !shape.in_place && n > 0 {
        let (src, dst) = (span(Buffer::Input, &(0..n)), span(Buffer::Output, &(rank * n..(rank + 1) * n)));
        plan.push(Action::Copy { src, dst, finish: false }, Vec::new());
    }
    plan
}

/// Plan of `rank` for a ReduceScatter of blocks of `shape.elements` elements (input: one block a rank, output: one).
///
/// Every rank must pass the same order and shape. Each rank sends and receives P - 1 blocks; the input is not written
/// (in place: but for the own block).
pub fn ring_reduce_scatter(order: &[usize], rank: usize, shape: Shape) -> RankPlan {
    let (ring, n, world) = (Ring::new(order, rank), shape.elements, order.len());
    let mut plan = RankPlan::default();
    let own = |cut: &Range<usize>, block: usize| span(Buffer::Input, &moved(cut, block * n));
    if world == 1 {
        if !shape.in_place && n > 0 {
            let whole = 0..n;
            let (src, dst) = (own(&whole, 0), span(Buffer::Output, &whole));
            plan.push(Action::Copy { src, dst, finish: true }, Vec::new());
        }
        return plan;
    }
    let cuts = cut(shape, SLICES_A_SEGMENT);
    let mut scratch = Scratch::new(&cuts);
    for section in cuts.chunks(SLICES_A_SECTION) {
        // Slot, place and step of each slice that has been reduced in the round before.
        let mut partial: Vec<Option<(usize, Range<usize>, u32)>> = vec![None; section.len()];
        for round in 0..world - 1 {
            let (outgoing, incoming) = (ring.behind(round + 1), ring.behind(round + 2));
            for (cut, partial) in section.iter().zip(&mut partial) {
                match partial.take() {
                    None => {
                        plan.push(Action::Send { peer: ring.right(), src: own(cut, outgoing) }, Vec::new());
                    }
                    Some((slot, place, reduced)) => {
                        let src = span(Buffer::Scratch, &place);
                        scratch.leaves[slot] = Some(plan.push(Action::Send { peer: ring.right(), src }, vec![reduced]));
                    }
                }
                let (peer, operand) = (ring.left(), own(cut, incoming));
                if round + 2 == world {
                    let dst = span(Buffer::Output, cut);
                    plan.push(Action::RecvReduce { peer, operand, dst, finish: true }, Vec::new());
                } else {
                    let (slot, place, free) = scratch.take(cut.len(), &mut plan);
                    let dst = span(Buffer::Scratch, &place);
                    let reduced = plan.push(Action::RecvReduce { peer, operand, dst, finish: false }, free);
                    *partial = Some((slot, place, reduced));
                }
            }
        }
    }
    plan
}

/// Plan of `rank` for a Reduce of `shape.elements` elements to `root`, as a pipelined chain along the ring that ends at
/// the root.
///
/// Every rank must pass the same order, root and shape. Only the root's output is written.
pub fn chain_reduce(order: &[usize], rank: usize, root: usize, shape: Shape) -> RankPlan {
    let (ring, world) = (Ring::new(order, rank), order.len());
    let end = Ring::new(order, root).place;
    // Ranks that lie before this one in the chain, which begins behind the root.
    let before = (ring.place + 2 * world - end - 1) % world;
    let mut plan = RankPlan::default();
    let cuts = cut(shape, SLICES_A_BROADCAST);
    if world == 1 {
        if !shape.in_place && shape.elements > 0 {
            let whole = 0..shape.elements;
            let (src, dst) = (span(Buffer::Input, &whole), span(Buffer::Output, &whole));
            plan.push(Action::Copy { src, dst, finish: true }, Vec::new());
        }
        return plan;
    }
    let mut scratch = Scratch::new(&cuts);
    for cut in &cuts {
        let operand = span(Buffer::Input, cut);
        let (left, right) = (ring.left(), ring.right());
        if before == 0 {
            plan.push(Action::Send { peer: right, src: operand }, Vec::new());
        } else if rank == root {
            let dst = span(Buffer::Output, cut);
            plan.push(Action::RecvReduce { peer: left, operand, dst, finish: true }, Vec::new());
        } else {
            let (slot, place, free) = scratch.take(cut.len(), &mut plan);
            let dst = span(Buffer::Scratch, &place);
            let reduced = plan.push(Action::RecvReduce { peer: left, operand, dst, finish: false }, free);
            scratch.leaves[slot] = Some(plan.push(Action::Send { peer: right, src: dst }, vec![reduced]));
        }
    }
    plan
}

#[cfg(test)]
mod tests;
