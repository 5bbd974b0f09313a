//! AllReduce of small buffers in as few rounds as there can be: recursive doubling.
//!
//! Owns the plan only. With P ranks, of which Q is the largest power of two, the first P - Q ranks take in a rank above
//! Q each, then Q ranks exchange everything in log2 Q rounds, each time with a partner twice as far away (Thakur,
//! Rabenseifner, Gropp 2005), and the ranks above Q are told. The two partners of a round add the same two numbers, so
//! every rank ends up with the same bits.

use super::plan::{Action, Buffer, RankPlan, Span};

/// Plan of `rank` for an AllReduce of `elements` elements among `world` ranks.
///
/// Every rank must pass the same `world`, `elements` and `in_place`. Each rank moves the whole buffer log2 Q times or
/// more, so this is for buffers whose time is that of their rounds. An empty buffer, or one rank in place, gives an
/// empty plan.
pub fn doubling_all_reduce(rank: usize, world: usize, elements: usize, in_place: bool) -> RankPlan {
    assert!(rank < world, "rank {rank} of a world of {world}");
    let mut plan = RankPlan::default();
    if elements == 0 || (world == 1 && in_place) {
        return plan;
    }
    let at = |buffer, start| Span { buffer, start, len: elements };
    let (input, output) = (at(Buffer::Input, 0), at(Buffer::Output, 0));
    if world == 1 {
        plan.push(Action::Copy { src: input, dst: output, finish: true }, Vec::new());
        return plan;
    }
    let core = 1 << world.ilog2();
    // What is sent lies where nothing is received until the end: each partial result has a place of its own.
    let mut places = 0;
    let mut place = |plan: &mut RankPlan| {
        let start = places * elements;
        places += 1;
        plan.scratch_elements = places * elements;
        at(Buffer::Scratch, start)
    };
    let mut current = input;
    let mut known = Vec::new();
    if in_place {
        current = place(&mut plan);
        known.push(plan.push(Action::Copy { src: at(Buffer::Output, 0), dst: current, finish: false }, Vec::new()));
    }
    if rank >= core {
        plan.push(Action::Send { peer: rank - core, src: current }, known.clone());
        // In place the result replaces what was copied before it was sent.
        plan.push(Action::Recv { peer: rank - core, dst: output }, known);
        return plan;
    }
    let above = (rank + core < world).then_some(rank + core);
    let rounds = (0..core.ilog2()).map(|round| rank ^ (1 << round));
    let partners: Vec<(usize, bool)> =
        above.map(|peer| (peer, false)).into_iter().chain(rounds.map(|peer| (peer, true))).collect();
    for (i, (peer, both)) in partners.iter().copied().enumerate() {
        let finish = i + 1 == partners.len();
        let dst = if finish { output } else { place(&mut plan) };
        if both {
            plan.push(Action::Send { peer, src: current }, known.clone());
        }
        known = vec![plan.push(Action::RecvReduce { peer, operand: current, dst, finish }, known)];
        current = dst;
    }
    if let Some(peer) = above {
        plan.push(Action::Send { peer, src: current }, known);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::super::{Goal, check};
    use super::*;

    #[test]
    fn every_world_ends_up_with_the_whole_sum_in_few_rounds() {
        for world in 1..=33 {
            for in_place in [false, true] {
                let plans: Vec<_> = (0..world).map(|rank| doubling_all_reduce(rank, world, 3, in_place)).collect();
                let stats = check(&plans, Goal::AllReduce { in_place }, 3).unwrap_or_else(|e| panic!("{world}: {e}"));
                let most = stats.ranks.iter().map(|r| r.receives).max().unwrap_or(0);
                let rounds = world.ilog2() as usize + usize::from(!world.is_power_of_two());
                assert_eq!(most, if world == 1 { 0 } else { rounds }, "{world} ranks");
            }
        }
    }
}
