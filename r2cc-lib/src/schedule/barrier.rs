//! The dissemination barrier as a plan: ceil(log2 P) rounds of empty messages.
//!
//! Owns the plan only; `check` proves with `Goal::Barrier` that no rank is through before every
//! rank has entered.

use super::plan::{Action, Buffer, RankPlan, Span};

const NOTHING: Span = Span { buffer: Buffer::Output, start: 0, len: 0 };

/// Plan of `rank` for a barrier among `world` ranks.
///
/// In round k a rank tells rank + 2^k that it and everybody it has heard of are here, so after
/// ceil(log2 P) rounds it has heard of all (Hensgen, Finkel, Manber 1988).
pub fn barrier(rank: usize, world: usize) -> RankPlan {
    assert!(rank < world, "rank {rank} of a world of {world}");
    let mut plan = RankPlan::default();
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < world {
        let to = (rank + distance) % world;
        let from = (rank + world - distance) % world;
        // All earlier rounds, not just the last: different peers, so nothing else orders them.
        plan.push(Action::Send { peer: to, src: NOTHING }, heard.clone());
        heard.push(plan.push(Action::Recv { peer: from, dst: NOTHING }, Vec::new()));
        distance *= 2;
    }
    plan
}
