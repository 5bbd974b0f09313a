//! Grouped Send and Recv as plans: any parts of the input to any ranks, any parts of the output from any ranks; and
//! what is made of them: AllToAll, Gather, Scatter, a shift along the ranks.
//!
//! Every message goes straight to its receiver. Never looks at topology.

use std::ops::Range;

use super::plan::{Action, Buffer, RankPlan};
use super::ring::span;

/// Sends of a rank under way at a time: with many ranks more would only take turns on the same NICs.
const SENDS_IN_FLIGHT: usize = 16;

/// A part of a buffer that goes to, or comes from, another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The other rank; the rank itself for what stays.
    pub peer: usize,
    /// Elements of the input that are sent, or of the output that are received.
    pub elements: Range<usize>,
}

/// Plan of `rank` for sending `sends` of its input and receiving `receives` into its output, all at once.
///
/// The k-th send from a to b matches the k-th receive of b from a, which must be as long; a send of a rank to itself is
/// a copy. Parts received must not overlap.
pub fn exchange(rank: usize, sends: &[Part], receives: &[Part]) -> RankPlan {
    let mut plan = RankPlan::default();
    let kept = |parts: &[Part]| parts.iter().filter(|p| p.peer == rank).map(|p| p.elements.clone()).collect::<Vec<_>>();
    for (from, to) in kept(sends).iter().zip(&kept(receives)) {
        let (src, dst) = (span(Buffer::Input, from), span(Buffer::Output, to));
        plan.push(Action::Copy { src, dst, finish: false }, Vec::new());
    }
    for part in receives.iter().filter(|p| p.peer != rank) {
        plan.push(Action::Recv { peer: part.peer, dst: span(Buffer::Output, &part.elements) }, Vec::new());
    }
    let mut sent = Vec::new();
    for part in sends.iter().filter(|p| p.peer != rank) {
        let after = sent.len().checked_sub(SENDS_IN_FLIGHT).map(|k| sent[k]);
        let action = Action::Send { peer: part.peer, src: span(Buffer::Input, &part.elements) };
        sent.push(plan.push(action, after.into_iter().collect()));
    }
    plan
}

fn block(index: usize, elements: usize) -> Range<usize> {
    index * elements..(index + 1) * elements
}

/// Plan of `rank` for an AllToAll of blocks of `elements` elements: at each moment every rank sends to another one.
pub fn all_to_all(rank: usize, world: usize, elements: usize) -> RankPlan {
    let part = |peer| Part { peer, elements: block(peer, elements) };
    let sends: Vec<Part> = (0..world).map(|k| part((rank + k) % world)).collect();
    let receives: Vec<Part> = (0..world).map(|k| part((rank + world - k) % world)).collect();
    exchange(rank, &sends, &receives)
}

/// Plan of `rank` for a Gather of blocks of `elements` elements to `root`.
pub fn gather(rank: usize, world: usize, root: usize, elements: usize, in_place: bool) -> RankPlan {
    let stays = |peer: usize| in_place && peer == root;
    let send = Part { peer: root, elements: 0..elements };
    let sends = if stays(rank) { vec![] } else { vec![send] };
    let receive = |peer| Part { peer, elements: block(peer, elements) };
    let receives: Vec<Part> =
        if rank == root { (0..world).filter(|p| !stays(*p)).map(receive).collect() } else { vec![] };
    exchange(rank, &sends, &receives)
}

/// Plan of `rank` for a Scatter of blocks of `elements` elements of `root`.
pub fn scatter(rank: usize, world: usize, root: usize, elements: usize, in_place: bool) -> RankPlan {
    let stays = |peer: usize| in_place && peer == root;
    let send = |peer| Part { peer, elements: block(peer, elements) };
    let sends: Vec<Part> = if rank == root { (0..world).filter(|p| !stays(*p)).map(send).collect() } else { vec![] };
    let receive = Part { peer: root, elements: 0..elements };
    let receives = if stays(rank) { vec![] } else { vec![receive] };
    exchange(rank, &sends, &receives)
}

/// Plan of `rank` for sending its `elements` elements to the next rank while it receives those of the one before.
pub fn shift(rank: usize, world: usize, elements: usize) -> RankPlan {
    let part = |peer| [Part { peer, elements: 0..elements }];
    exchange(rank, &part((rank + 1) % world), &part((rank + world - 1) % world))
}
