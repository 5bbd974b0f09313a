//! Every collective over blocks is proven for any world, size, order, root and place.

use proptest::prelude::*;

use super::*;
use crate::schedule::exchange::{all_to_all, gather, scatter, shift};
use crate::schedule::{Goal, Part, PlanError, Stats, check, exchange};

const KINDS: usize = 7;

/// The plans of a collective of each kind, and what they are for.
fn plans(kind: usize, order: &[usize], root: usize, shape: Shape) -> (Vec<RankPlan>, Goal) {
    let (world, n, in_place) = (order.len(), shape.elements, shape.in_place);
    let of = |plan: &dyn Fn(usize) -> RankPlan| (0..world).map(plan).collect::<Vec<_>>();
    match kind {
        0 => (of(&|rank| ring_all_gather(order, rank, shape)), Goal::AllGather { in_place }),
        1 => (of(&|rank| ring_reduce_scatter(order, rank, shape)), Goal::ReduceScatter { in_place }),
        2 => (of(&|rank| chain_reduce(order, rank, root, shape)), Goal::Reduce { root, in_place }),
        3 => (of(&|rank| gather(rank, world, root, n, in_place)), Goal::Gather { root, in_place }),
        4 => (of(&|rank| scatter(rank, world, root, n, in_place)), Goal::Scatter { root, in_place }),
        5 => (of(&|rank| all_to_all(rank, world, n)), Goal::AllToAll),
        _ => (of(&|rank| shift(rank, world, n)), Goal::Shift),
    }
}

/// A ring of `world` ranks that is not in rank order.
fn any_order(world: usize, seed: usize) -> Vec<usize> {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let stride = (1..=world).cycle().skip(seed).find(|s| gcd(*s, world) == 1).unwrap_or(1);
    (0..world).map(|i| (i * stride + seed) % world).collect()
}

/// Elements that cross between ranks, all together.
fn crossing(kind: usize, world: usize, n: usize) -> usize {
    let others = world - 1;
    match kind {
        0 | 1 | 5 => world * others * n,
        2..=4 => others * n,
        _ => {
            if world == 1 {
                0
            } else {
                world * n
            }
        }
    }
}

fn proven(kind: usize, world: usize, seed: usize, shape: Shape) -> Result<Stats, PlanError> {
    let (order, root) = (any_order(world, seed), seed % world);
    let (plans, goal) = plans(kind, &order, root, shape);
    check(&plans, goal, shape.elements)
}

#[test]
fn every_collective_is_proven_for_every_world_to_9_and_every_edge_size() {
    for (kind, world) in (0..KINDS).flat_map(|kind| (1..=9).map(move |world| (kind, world))) {
        for elements in [0, 1, 7, 1021, 4096, 16 * 1024 * 9 + 5] {
            for in_place in [false, true] {
                let shape = Shape { elements, element_bytes: 4, in_place, slice_elements: None };
                let stats = proven(kind, world, 1, shape)
                    .unwrap_or_else(|e| panic!("kind {kind}, P {world}, {elements}, {in_place}: {e}"));
                let sent: usize = stats.ranks.iter().map(|r| r.sent_elements).sum();
                assert_eq!(sent, crossing(kind, world, elements), "kind {kind}, P {world}, {elements}");
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_block() {
    for (elements, in_place) in [(1 << 20, true), (1 << 28, false)] {
        let shape = Shape { elements, element_bytes: 4, in_place, slice_elements: None };
        for plan in [ring_reduce_scatter(&[0, 1, 2], 1, shape), chain_reduce(&[0, 1, 2], 1, 2, shape)] {
            assert!(plan.scratch_elements * 4 <= SCRATCH_SLICES * (4 << 20), "{} elements", plan.scratch_elements);
        }
    }
}

#[test]
fn a_rank_may_send_many_parts_to_one_and_to_itself() {
    let part = |peer, elements| Part { peer, elements };
    // An AllToAll of blocks of 4 elements between two ranks, each block in two halves.
    let plans: Vec<RankPlan> = (0..2)
        .map(|rank: usize| {
            let halves: Vec<Part> = [0, 2, 4, 6].map(|start: usize| part(start / 4, start..start + 2)).to_vec();
            exchange(rank, &halves, &halves)
        })
        .collect();
    check(&plans, Goal::AllToAll, 4).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_collective_is_proven(
        kind in 0..KINDS,
        world in 1usize..=12,
        seed in 0usize..1000,
        elements in prop_oneof![0usize..64, 64usize..30_000],
        in_place: bool,
        element_bytes in prop::sample::select(vec![2usize, 4, 8]),
        slice_elements in prop::option::of(1usize..3_000),
    ) {
        let shape = Shape { elements, element_bytes, in_place, slice_elements };
        let proof = proven(kind, world, seed, shape);
        prop_assert!(proof.is_ok(), "{:?}", proof);
    }

    #[test]
    fn a_dropped_wait_or_a_moved_destination_is_refused(
        kind in 0..3usize,
        world in 3usize..=6,
        seed in 0usize..1000,
        elements in 40_000usize..60_000,
        in_place: bool,
        move_it: bool,
        pick in any::<prop::sample::Index>(),
    ) {
        // Enough slices that every slot of scratch is used again.
        let shape = Shape { elements, element_bytes: 4, in_place, slice_elements: Some(1) };
        let (order, root) = (any_order(world, seed), seed % world);
        let (mut plans, goal) = plans(kind, &order, root, shape);
        let places: Vec<(usize, usize)> = plans.iter().enumerate()
            .flat_map(|(rank, plan)| plan.steps.iter().enumerate().map(move |(i, step)| (rank, i, step)))
            .filter(|(_, _, step)| if move_it {
                matches!(step.action, Action::Recv { .. } | Action::RecvReduce { .. })
            } else {
                !step.after.is_empty()
            })
            .map(|(rank, i, _)| (rank, i))
            .collect();
        let (rank, i) = places[pick.index(places.len())];
        let step = &mut plans[rank].steps[i];
        if move_it {
            let (Action::Recv { dst, .. } | Action::RecvReduce { dst, .. }) = &mut step.action else { unreachable!() };
            dst.start += 1;
        } else {
            step.after.clear();
        }
        let refused = check(&plans, goal, elements);
        prop_assert!(refused.is_err(), "kind {kind}: rank {rank} step {i}");
    }
}
