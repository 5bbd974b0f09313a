//! R2CC-AllReduce: a degraded node takes no part in the ring of the last part of the tensor.
//!
//! The *main* part is all-reduced among everybody while the *tail* is among the healthy nodes. Then, in K
//! pipelined chunks, each degraded node's contribution to the tail is reduced onto a helper rank, and the
//! finished chunk is passed on to all. Main messages go before those of the tail on every NIC direction.
//! Owns the layout ([`R2ccLayout`]) and the plans. With X of a node lost and a tail as large, it takes
//! T0 (1 + X / ((1 - X) 2 (P - 1) / P) (1 + 1/K)). Start at [`r2cc_all_reduce`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::compose::{Composer, Landing};
use super::cost::ring_volume;
use super::fabric::Fabric;
use super::plan::{Class, RankPlan};
use super::ring::{SLICES_A_SEGMENT, granule_elements, segments, slices};

/// Slices of a chunk on its way to the helper and back, at least, and for each node that it passes through: a
/// chunk is as much later at the last node as one slice takes for all hops.
const SLICES_A_CHUNK: usize = 16;
const SLICES_A_NODE: usize = 4;

/// The buffers of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Elements of each buffer.
    pub elements: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Input and output are the same memory.
    pub in_place: bool,
    /// Length of a slice in elements, rounded up to 4 KiB; by default as the sizes suggest.
    pub slice_elements: Option<usize>,
}

/// What may run beside what: the values of `R2CC_AR_SCHEDULE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlap {
    /// 0: everything as soon as its data allows.
    AsDataAllows,
    /// 1: the tail beside the main part, then the chunks.
    #[default]
    TailBesideMain,
    /// 2: the tail after the main part, the chunks beside the tail.
    TailAfterMain,
    /// 3: main part, tail, chunks, one after the other.
    Serial,
}

impl Overlap {
    /// The value of `R2CC_AR_SCHEDULE` with this number.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::AsDataAllows),
            1 => Some(Self::TailBesideMain),
            2 => Some(Self::TailAfterMain),
            3 => Some(Self::Serial),
            _ => None,
        }
    }
}

/// Who does what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct R2ccLayout {
    /// All ranks around the ring of the main part.
    ring: Vec<usize>,
    /// Ranks of the healthy nodes around the ring of the tail; the first is the helper, and finished chunks go
    /// from each to the next.
    healthy: Vec<usize>,
    /// Ranks of each degraded node.
    degraded: Vec<Vec<usize>>,
    /// Part of the tensor that is the tail.
    tail: f64,
    /// Number of nodes.
    nodes: usize,
    /// Seconds a byte around the ring of the main part, around that of the tail, and along the chunks' worst hop.
    ring_s: f64,
    healthy_s: f64,
    chain_s: f64,
}

impl R2ccLayout {
    /// The layout for `ring`, an order of the fabric's nodes, with the nodes that `is_healthy` tells healthy.
    /// The tail is the fraction by which the main ring is slower than the healthy ring. `None` if no node is
    /// healthy.
    pub fn new(fabric: &Fabric, ring: &[usize], is_healthy: impl Fn(usize) -> bool) -> Option<Self> {
        let (healthy, degraded): (Vec<usize>, Vec<usize>) = ring.iter().partition(|&&node| is_healthy(node));
        if healthy.is_empty() {
            return None;
        }
        let nics = |node: usize| fabric.nodes()[node].rails.iter().sum::<f64>();
        let undamaged = fabric.ring_bandwidth(&healthy).min(healthy.iter().map(|&n| nics(n)).fold(f64::MAX, f64::min));
        let tail = if degraded.is_empty() { 0.0 } else { 1.0 - fabric.ring_bandwidth(ring) / undamaged };
        let turns = (0..healthy.len()).map(|turn| [&healthy[turn..], &healthy[..turn]].concat());
        // Of equals the first: the healthy node that comes first in the ring.
        let chain = turns.reduce(|best, turn| {
            let worth = |chain: &[usize]| Self::chain_bandwidth(fabric, chain, &degraded);
            if worth(&turn) > worth(&best) { turn } else { best }
        })?;
        Some(Self {
            ring: fabric.ranks_of(ring),
            healthy: fabric.ranks_of(&chain),
            degraded: degraded.iter().map(|&node| fabric.nodes()[node].ranks.clone()).collect(),
            tail: tail.clamp(0.0, 1.0),
            nodes: ring.len(),
            ring_s: 1.0 / fabric.ring_bandwidth(ring),
            healthy_s: 1.0 / fabric.ring_bandwidth(&healthy),
            chain_s: 1.0 / Self::chain_bandwidth(fabric, &chain, &degraded),
        })
    }

    /// Bytes a second of the worst hop of the chunks: to the helper, and from each node to the next.
    fn chain_bandwidth(fabric: &Fabric, healthy: &[usize], degraded: &[usize]) -> f64 {
        let passed_on = [healthy, degraded].concat();
        let onwards = passed_on.windows(2).map(|pair| fabric.common(pair[0], pair[1]));
        let to_helper = degraded.iter().map(|&node| fabric.common(node, healthy[0]) / degraded.len() as f64);
        onwards.chain(to_helper).fold(f64::INFINITY, f64::min)
    }

    /// The same with another part of the tensor as its tail, from 0 to 1.
    pub fn with_tail(self, tail: f64) -> Self {
        Self { tail: tail.clamp(0.0, 1.0), ..self }
    }

    /// Part of the tensor that is the tail, from 0 to 1.
    pub fn tail(&self) -> f64 {
        self.tail
    }

    /// Seconds for each byte of the tensor, with the tail beside the main part: the main ring, what of the tail
    /// does not fit beside it, and the chunks, of which the first goes to the helper alone.
    pub(super) fn seconds_a_byte(&self, chunks: usize) -> f64 {
        let main = (1.0 - self.tail) * ring_volume(self.ring.len()) * self.ring_s;
        let tail = self.tail * ring_volume(self.healthy.len());
        // Healthy links carry the tail at what the main part leaves of them.
        let beside =
            if self.healthy_s > 0.0 { main * (1.0 / self.healthy_s - 1.0 / self.ring_s).max(0.0) } else { tail };
        let rest = (tail - beside).max(0.0) * self.healthy_s;
        // The last node is later than the first by a slice for each node between.
        let hops = self.nodes.saturating_sub(2) as f64 / slices_a_chunk(self.nodes) as f64;
        main + rest + self.tail * self.chain_s * (1.0 + (1.0 + hops) / chunks.max(1) as f64)
    }
}

/// Plans of all ranks, by rank, for an R2CC-AllReduce with `chunks` chunks (K, at least 1).
pub fn r2cc_all_reduce(layout: &R2ccLayout, shape: Shape, chunks: usize, overlap: Overlap) -> Vec<RankPlan> {
    let mut composer = Composer::new(layout.ring.len(), shape.elements, shape.in_place);
    let (main, tail) = parts(layout, shape);
    let chunks = chunked(&tail, chunks.max(1), shape);
    ring(&mut composer, Class::Main, &layout.ring, main, shape, Landing::Finish);
    let ranks = &layout.ring;
    // What each rank has done of the main part when it is through with it.
    let main_done: Vec<(usize, Vec<u32>)> =
        ranks.iter().map(|&rank| (rank, composer.last_of(rank, Class::Main))).collect();
    if matches!(overlap, Overlap::TailAfterMain | Overlap::Serial) {
        main_done.iter().for_each(|(rank, steps)| composer.hold_sends(*rank, steps.clone()));
    }
    let chunk_by_chunk = matches!(overlap, Overlap::AsDataAllows | Overlap::TailAfterMain);
    let rounds = if chunk_by_chunk { chunks.clone() } else { vec![tail] };
    for part in rounds {
        ring(&mut composer, Class::Tail, &layout.healthy, part, shape, Landing::Reduce);
    }
    if overlap == Overlap::TailBesideMain {
        main_done.into_iter().for_each(|(rank, steps)| composer.hold_sends(rank, steps));
    }
    if overlap == Overlap::Serial {
        for &rank in ranks {
            let steps = composer.last_of(rank, Class::Tail);
            composer.hold_sends(rank, steps);
        }
    }
    for chunk in chunks {
        finish_chunk(&mut composer, layout, chunk, shape);
    }
    if layout.ring.len() == 1 {
        composer.copy_input(layout.ring[0], 0..shape.elements, true);
    }
    composer.finish()
}

fn slices_a_chunk(nodes: usize) -> usize {
    SLICES_A_CHUNK.max(SLICES_A_NODE * nodes)
}

/// Main part and tail; without a degraded node there is no tail.
fn parts(layout: &R2ccLayout, shape: Shape) -> (Range<usize>, Range<usize>) {
    let tail = if layout.degraded.is_empty() { 0.0 } else { layout.tail };
    let exact = ((1.0 - tail) * shape.elements as f64).round() as usize;
    let granule = granule_elements(shape.element_bytes);
    // Whole pages, unless that moved the bound by much.
    let main = if shape.elements >= 64 * granule { exact.next_multiple_of(granule) } else { exact };
    let main = main.min(shape.elements);
    (0..main, main..shape.elements)
}

/// `count` parts of about the same length; none is empty, so there may be fewer.
fn chunked(range: &Range<usize>, count: usize, shape: Shape) -> Vec<Range<usize>> {
    let parts = segments(count, range.len(), shape.element_bytes).into_iter();
    parts.filter(|part| !part.is_empty()).map(|part| range.start + part.start..range.start + part.end).collect()
}

/// A ring AllReduce of `range` among `ranks`, in that order.
fn ring(
    composer: &mut Composer,
    class: Class,
    ranks: &[usize],
    range: Range<usize>,
    shape: Shape,
    last_reduction: Landing,
) {
    let world = ranks.len();
    if world < 2 || range.is_empty() {
        return;
    }
    let parts: Vec<Vec<Range<usize>>> = segments(world, range.len(), shape.element_bytes)
        .into_iter()
        .map(|part| range.start + part.start..range.start + part.end)
        .map(|part| slices(&part, part.len().div_ceil(SLICES_A_SEGMENT), shape.element_bytes, shape.slice_elements))
        .collect();
    let most = parts.iter().map(Vec::len).max().unwrap_or(0);
    for round in 0..2 * (world - 1) {
        let landing = match round + 1 {
            done if done < world - 1 => Landing::Reduce,
            done if done == world - 1 => last_reduction,
            _ => Landing::Store,
        };
        for slice in 0..most {
            for place in 0..world {
                // In round r a place sends the segment that is r + 1 behind it.
                let segment = (place + 2 * world - round - 1) % world;
                if let Some(range) = parts[segment].get(slice) {
                    composer.message(class, ranks[place], ranks[(place + 1) % world], range.clone(), landing);
                }
            }
        }
    }
}

/// A chunk of the tail: what the degraded nodes have goes to the helper, and when all of it is there, the sum
/// goes from rank to rank. Both in slices; the helper's sends of a chunk wait for the whole chunk.
fn finish_chunk(composer: &mut Composer, layout: &R2ccLayout, chunk: Range<usize>, shape: Shape) {
    let wanted = chunk.len().div_ceil(slices_a_chunk(layout.nodes)).max(1);
    let hint = shape.slice_elements.map(|hint| hint.min(wanted));
    let parts = slices(&chunk, wanted, shape.element_bytes, hint);
    let helper = layout.healthy[0];
    let mut reduced = Vec::new();
    for part in &parts {
        for (i, ranks) in layout.degraded.iter().enumerate() {
            for pair in ranks.windows(2) {
                composer.message(Class::Main, pair[0], pair[1], part.clone(), Landing::Reduce);
            }
            let landing = if i + 1 == layout.degraded.len() { Landing::Finish } else { Landing::Reduce };
            if let Some(&last) = ranks.last() {
                reduced.extend(composer.message(Class::Main, last, helper, part.clone(), landing));
            }
        }
    }
    composer.hold_sends_for(helper, reduced);
    // Against the direction in which the contributions went, so that neither waits behind the other.
    let back = layout.degraded.iter().flat_map(|ranks| ranks.iter().rev());
    let chain: Vec<usize> = layout.healthy.iter().chain(back).copied().collect();
    for part in &parts {
        for pair in chain.windows(2) {
            composer.message(Class::Main, pair[0], pair[1], part.clone(), Landing::Store);
        }
    }
}

#[cfg(test)]
mod tests;
