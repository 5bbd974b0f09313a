//! Ring plans: AllReduce as reduce-scatter and all-gather in rank order, broadcast as a chain.
//!
//! Owns how a buffer is cut (segments, one a rank; slices, the unit of pipelining) and the exact
//! dependencies of the ring. Never looks at topology: ranks are neighbours in rank order, or in one that the caller gives. Start at
//! [`ring_all_reduce`].

use std::ops::Range;

use super::plan::{Action, Buffer, RankPlan, Span};

/// Slice bounds are multiples of this, so that lines of NCCL's LL and LL128 protocols and pages
/// stay whole.
const GRANULE_BYTES: usize = 4 << 10;
const SLICE_BYTES_MIN: usize = 64 << 10;
const SLICE_BYTES_MAX: usize = 4 << 20;
/// Slices a segment of the AllReduce ring: while one slice is reduced the next is on the wire.
pub(super) const SLICES_A_SEGMENT: usize = 8;
/// Slices of a broadcast: the chain needs (slices + P - 2) / slices of the time of one hop.
pub(super) const SLICES_A_BROADCAST: usize = 32;

/// Plan of `rank` for a ring AllReduce of `elements` elements of `element_bytes` bytes each.
///
/// Every rank must pass the same `world`, `elements`, `in_place`, `element_bytes` and hint.
/// `slice_elements_hint` replaces the computed slice length (rounded up to 4 KiB). Each rank sends
/// and receives 2 (P - 1) / P of the buffer. Rank r completes segment r; out of place nothing is
/// copied: the first send reads the input, each reduction takes its operand there.
///
/// An empty buffer, or one rank in place, gives an empty plan.
pub fn ring_all_reduce(
    rank: usize,
    world: usize,
    elements: usize,
    in_place: bool,
    element_bytes: usize,
    slice_elements_hint: Option<usize>,
) -> RankPlan {
    let order: Vec<usize> = (0..world).collect();
    ring_all_reduce_along(&order, rank, elements, in_place, element_bytes, slice_elements_hint)
}

/// [`ring_all_reduce`] with the ranks around the ring in `order`, which names each once.
pub fn ring_all_reduce_along(
    order: &[usize],
    rank: usize,
    elements: usize,
    in_place: bool,
    element_bytes: usize,
    slice_elements_hint: Option<usize>,
) -> RankPlan {
    let world = order.len();
    let place = order.iter().position(|&r| r == rank);
    let rank = place.unwrap_or_else(|| panic!("rank {rank} is not in the ring {order:?}"));
    let mut plan = RankPlan::default();
    if world == 1 {
        if !in_place && elements > 0 {
            plan.push(
                Action::Copy {
                    src: span(Buffer::Input, &(0..elements)),
                    dst: span(Buffer::Output, &(0..elements)),
                    finish: true,
                },
                Vec::new(),
            );
        }
        return plan;
    }
    let segments = segments(world, elements, element_bytes);
    let slices: Vec<Vec<Range<usize>>> = segments
        .iter()
        .map(|segment| {
            let wanted = segment.len().div_ceil(SLICES_A_SEGMENT);
            slices(segment, wanted, element_bytes, slice_elements_hint)
        })
        .collect();
    let own = if in_place { Buffer::Output } else { Buffer::Input };
    let right = order[(rank + 1) % world];
    let left = order[(rank + world - 1) % world];
    // Segment `back` places behind this rank in the ring.
    let behind = |back: usize| (rank + 2 * world - back) % world;
    // Last step of this rank that sent, and that wrote, each slice.
    let mut sent: Vec<Vec<Option<u32>>> = slices.iter().map(|s| vec![None; s.len()]).collect();
    let mut written = sent.clone();

    let rounds = world - 1;
    for round in 0..2 * rounds {
        let gathering = round >= rounds;
        let (outgoing, incoming) = if gathering {
            (behind(round - rounds), behind(round - rounds + 1))
        } else {
            (behind(round + 1), behind(round + 2))
        };
        // A send and the receive of the same place alternate, so that slice j of the next round
        // leaves while slice j + 1 of this one arrives.
        for j in 0..slices[outgoing].len().max(slices[incoming].len()) {
            if let Some(range) = slices[outgoing].get(j) {
                let received = written[outgoing][j];
                let source = if received.is_some() { Buffer::Output } else { own };
                let action = Action::Send { peer: right, src: span(source, range) };
                let index = plan.push(action, received.into_iter().collect());
                // A send from the input does not bar a write to the output.
                if source == Buffer::Output {
                    sent[outgoing][j] = Some(index);
                }
            }
            if let Some(range) = slices[incoming].get(j) {
                let dst = span(Buffer::Output, range);
                let action = if gathering {
                    Action::Recv { peer: left, dst }
                } else {
                    Action::RecvReduce { peer: left, operand: span(own, range), dst, finish: round + 1 == rounds }
                };
                // The send of a slice waits for its write, so waiting for the send covers both.
                let after = sent[incoming][j].into_iter().collect();
                written[incoming][j] = Some(plan.push(action, after));
            }
        }
    }
    plan
}

/// Plan of `rank` for a broadcast of `root`'s input to every rank's output, as a pipelined chain
/// root, root + 1, … in ring order. Out of place the root also copies its input to its output.
///
/// The arguments are those of [`ring_all_reduce`]. An empty buffer gives an empty plan.
pub fn ring_broadcast(
    rank: usize,
    world: usize,
    root: usize,
    elements: usize,
    in_place: bool,
    element_bytes: usize,
    slice_elements_hint: Option<usize>,
) -> RankPlan {
    assert!(rank < world, "rank {rank} of a world of {world}");
    assert!(root < world, "root {root} of a world of {world}");
    let mut plan = RankPlan::default();
    let whole = 0..elements;
    let wanted = elements.div_ceil(SLICES_A_BROADCAST);
    let place = (rank + world - root) % world;
    let next = (rank + 1) % world;
    let previous = (rank + world - 1) % world;
    let source = if place == 0 && !in_place { Buffer::Input } else { Buffer::Output };
    for range in slices(&whole, wanted, element_bytes, slice_elements_hint) {
        let mut after = Vec::new();
        if place > 0 {
            let dst = span(Buffer::Output, &range);
            after.push(plan.push(Action::Recv { peer: previous, dst }, Vec::new()));
        }
        if place + 1 < world {
            let src = span(source, &range);
            plan.push(Action::Send { peer: next, src }, after);
        }
    }
    if place == 0 && !in_place && elements > 0 {
        plan.push(
            Action::Copy { src: span(Buffer::Input, &whole), dst: span(Buffer::Output, &whole), finish: false },
            Vec::new(),
        );
    }
    plan
}

pub(super) fn span(buffer: Buffer, range: &Range<usize>) -> Span {
    Span { buffer, start: range.start, len: range.len() }
}

/// One segment a rank, equal but for one unit. The unit is 4 KiB where that unbalances a segment by
/// at most a sixteenth, else one element: small buffers gain nothing from whole pages.
pub(super) fn segments(world: usize, elements: usize, element_bytes: usize) -> Vec<Range<usize>> {
    let granule = granule_elements(element_bytes);
    let unit = if elements / world >= 16 * granule { granule } else { 1 };
    let units = elements.div_ceil(unit);
    let (each, longer) = (units / world, units % world);
    let bound = |i: usize| ((i * each + i.min(longer)) * unit).min(elements);
    (0..world).map(|i| bound(i)..bound(i + 1)).collect()
}

/// Cuts `range` into slices of the hint, or else of about `wanted` elements within the slice size
/// limits; whole granules, but for the last.
pub(super) fn slices(
    range: &Range<usize>,
    wanted: usize,
    element_bytes: usize,
    hint: Option<usize>,
) -> Vec<Range<usize>> {
    let least = (SLICE_BYTES_MIN / element_bytes).max(1);
    let most = (SLICE_BYTES_MAX / element_bytes).max(1);
    let granule = granule_elements(element_bytes);
    let len = hint.unwrap_or(wanted.clamp(least, most)).clamp(1, range.len().max(1)).next_multiple_of(granule);
    range.clone().step_by(len).map(|start| start..range.end.min(start.saturating_add(len))).collect()
}

pub(super) fn granule_elements(element_bytes: usize) -> usize {
    (GRANULE_BYTES / element_bytes).max(1)
}
