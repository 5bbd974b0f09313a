//! AllReduce of small buffers, whose time is that of their messages' rounds.
//!
//! Owns the plan only. Among all ranks, or one rank of each node, it is recursive doubling: with n parties, of which q is
//! the largest power of two, the last n - q first give their part to one of the q and are told at the end, and the q
//! exchange everything in log2 q rounds, each time with a partner twice as far away (Thakur, Rabenseifner, Gropp 2005).
//! The two partners of a round add the same two numbers, so every rank ends up with the same bits. Three parties give
//! theirs to the first, which tells the others: two rounds instead of three. Where that takes no more rounds, a tree
//! inside each node reduces first, and fewer messages cross the network.

use super::plan::{Action, Buffer, RankPlan, Span};

/// What a rank does with another, with all that it knows so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    /// Sends it.
    Give(usize),
    /// Adds what the other sends.
    Take(usize),
    /// Both.
    Swap(usize),
    /// Forgets it for the result that the other sends.
    Learn(usize),
}

/// Plan of `rank` for an AllReduce of `elements` elements among the ranks of `nodes`, which names each rank once.
///
/// Every rank must pass the same `nodes`, `elements` and `in_place`. Each rank moves the whole buffer as often as there
/// are rounds or more, so this is for buffers whose time is that of their rounds. An empty buffer, or one rank in place,
/// gives an empty plan.
pub fn small_all_reduce(nodes: &[Vec<usize>], rank: usize, elements: usize, in_place: bool) -> RankPlan {
    let mut plan = RankPlan::default();
    if elements == 0 {
        return plan;
    }
    let moves = moves(nodes, rank);
    let at = |buffer, start| Span { buffer, start, len: elements };
    let (input, output) = (at(Buffer::Input, 0), at(Buffer::Output, 0));
    if moves.is_empty() && !in_place {
        plan.push(Action::Copy { src: input, dst: output, finish: true }, Vec::new());
    }
    let reduces = |m: &Move| matches!(m, Move::Take(_) | Move::Swap(_));
    let learns = moves.iter().any(|m| matches!(m, Move::Learn(_)));
    let last = moves.iter().rposition(reduces).filter(|_| !learns);
    // A swap waits for no send of its own, which the partner may wait for likewise: what is sent then lies where nothing
    // is received until the end, and each partial result has a place of its own.
    let swaps = moves.iter().any(|m| matches!(m, Move::Swap(_)));
    let place = |plan: &mut RankPlan| {
        plan.scratch_elements += elements;
        at(Buffer::Scratch, plan.scratch_elements - elements)
    };
    let mut current = input;
    // The steps that wrote what is sent, and those that send it.
    let (mut written, mut sent) = (Vec::new(), Vec::new());
    if swaps && in_place {
        current = place(&mut plan);
        written.push(plan.push(Action::Copy { src: input, dst: current, finish: false }, Vec::new()));
    }
    for (i, m) in moves.iter().copied().enumerate() {
        if let Move::Give(peer) | Move::Swap(peer) = m {
            sent.push(plan.push(Action::Send { peer, src: current }, written.clone()));
        }
        let finish = Some(i) == last;
        let dst = if reduces(&m) && swaps && !finish { place(&mut plan) } else { output };
        let action = match m {
            Move::Give(_) => continue,
            Move::Learn(peer) => Action::Recv { peer, dst },
            Move::Take(peer) | Move::Swap(peer) => Action::RecvReduce { peer, operand: current, dst, finish },
        };
        let mut after = std::mem::take(&mut written);
        if !swaps {
            after.append(&mut sent);
        }
        written.push(plan.push(action, after));
        current = dst;
    }
    plan
}

/// What `rank` does, in order.
fn moves(nodes: &[Vec<usize>], rank: usize) -> Vec<Move> {
    let everybody: Vec<usize> = nodes.iter().flatten().copied().collect();
    let firsts: Vec<usize> = nodes.iter().filter_map(|node| node.first().copied()).collect();
    let largest = nodes.iter().map(Vec::len).max().unwrap_or(0);
    // One round less for three: the two that give do so at once.
    let within = if largest == 3 { 1 } else { largest.next_power_of_two().ilog2() };
    if largest < 2 || rounds(everybody.len()) < rounds(firsts.len()) + 2 * within {
        return exchange(&everybody, rank);
    }
    let own = nodes.iter().find(|node| node.contains(&rank));
    let own = own.unwrap_or_else(|| panic!("rank {rank} is on none of the nodes {nodes:?}"));
    let (parent, children) = family(own, rank);
    let mut moves: Vec<Move> = children.iter().copied().map(Move::Take).collect();
    match parent {
        Some(parent) => moves.extend([Move::Give(parent), Move::Learn(parent)]),
        None => moves.extend(exchange(&firsts, rank)),
    }
    moves.extend(children.into_iter().rev().map(Move::Give));
    moves
}

/// Rounds of [`exchange`] among so many.
fn rounds(parties: usize) -> u32 {
    match parties {
        0 | 1 => 0,
        3 => 2,
        n => n.ilog2() + if n.is_power_of_two() { 0 } else { 2 },
    }
}

/// What `rank`, one of `parties`, does so that all of them know everything.
fn exchange(parties: &[usize], rank: usize) -> Vec<Move> {
    let place = parties.iter().position(|r| *r == rank).unwrap_or_else(|| panic!("rank {rank} is not in {parties:?}"));
    if parties.len() == 3 {
        let others = &parties[1..];
        return match place {
            0 => others.iter().copied().map(Move::Take).chain(others.iter().copied().map(Move::Give)).collect(),
            _ => vec![Move::Give(parties[0]), Move::Learn(parties[0])],
        };
    }
    let core = 1 << parties.len().ilog2();
    if place >= core {
        let partner = parties[place - core];
        return vec![Move::Give(partner), Move::Learn(partner)];
    }
    let above = parties.get(place + core).copied();
    let partners = (0..core.ilog2()).map(|round| Move::Swap(parties[place ^ (1 << round)]));
    above.map(Move::Take).into_iter().chain(partners).chain(above.map(Move::Give)).collect()
}

/// The parent of `rank` in a binomial tree of `ranks`, whose root is the first, and its children, nearest first.
fn family(ranks: &[usize], rank: usize) -> (Option<usize>, Vec<usize>) {
    let place = ranks.iter().position(|r| *r == rank).unwrap_or(0);
    let own = if place == 0 { ranks.len().next_power_of_two() } else { 1 << place.trailing_zeros() };
    let distances = (0..own.ilog2()).map(|round| 1 << round);
    let parent = (place > 0).then(|| ranks[place - own]);
    (parent, distances.filter_map(|distance: usize| ranks.get(place + distance).copied()).collect())
}

#[cfg(test)]
mod tests {
    use super::super::{Goal, check};
    use super::*;
    use proptest::prelude::*;

    fn proven(nodes: &[Vec<usize>], in_place: bool) -> super::super::Stats {
        let world = nodes.iter().map(Vec::len).sum();
        let plans: Vec<_> = (0..world).map(|rank| small_all_reduce(nodes, rank, 3, in_place)).collect();
        check(&plans, Goal::AllReduce { in_place }, 3).unwrap_or_else(|e| panic!("{nodes:?}: {e}"))
    }

    fn nodes(sizes: &[usize]) -> Vec<Vec<usize>> {
        let mut ranks = 0..;
        sizes.iter().map(|size| ranks.by_ref().take(*size).collect()).collect()
    }

    #[test]
    fn every_world_ends_up_with_the_whole_sum_in_few_rounds() {
        for world in 1..=33 {
            for in_place in [false, true] {
                let stats = proven(&nodes(&vec![1; world]), in_place);
                let most = stats.ranks.iter().map(|r| r.receives).max().unwrap_or(0);
                let expected = world.ilog2() as usize + usize::from(!world.is_power_of_two());
                assert_eq!(most, if world == 1 { 0 } else { expected }, "{world} ranks");
            }
        }
    }

    #[test]
    fn ranks_of_one_node_reduce_first_where_that_takes_no_more_rounds() {
        for (sizes, messages) in
            [(&[2, 2, 2][..], 10), (&[2, 2], 8), (&[3, 3, 3], 16), (&[4], 8), (&[3], 4), (&[1, 2], 4), (&[2; 4], 24)]
        {
            let stats = proven(&nodes(sizes), true);
            assert_eq!(stats.ranks.iter().map(|r| r.sends).sum::<usize>(), messages, "{sizes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_ranks_on_any_nodes_end_up_with_the_whole_sum(
            sizes in prop::collection::vec(1usize..6, 1..8), stride in 1usize..40, in_place in any::<bool>()
        ) {
            let world: usize = sizes.iter().sum();
            let coprime = |s: &usize| (2..=world).all(|d| !s.is_multiple_of(d) || !world.is_multiple_of(d));
            let stride = (stride..).find(coprime).unwrap_or(1);
            let place = |node: &Vec<usize>| node.iter().map(|rank| rank * stride % world).collect();
            let spread: Vec<Vec<usize>> = nodes(&sizes).iter().map(place).collect();
            proven(&spread, in_place);
        }
    }
}
