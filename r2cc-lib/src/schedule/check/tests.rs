//! The builders' plans are proven, and every way to spoil one is refused.

use proptest::prelude::*;

use super::*;
use crate::schedule::plan::Step;
use crate::schedule::{barrier, ring_all_reduce, ring_broadcast};

/// Slices of one granule, so that small buffers have many.
const SHORT: Option<usize> = Some(1);

fn ring(world: usize, elements: usize, in_place: bool, hint: Option<usize>) -> Vec<RankPlan> {
    (0..world).map(|rank| ring_all_reduce(rank, world, elements, in_place, 4, hint)).collect()
}

fn all_reduce(plans: &[RankPlan], elements: usize, in_place: bool) -> Result<Stats, PlanError> {
    check(plans, Goal::AllReduce { in_place }, elements)
}

/// Sizes around every edge: none, fewer than ranks, primes, granules, several slices a segment.
fn sizes(world: usize) -> Vec<usize> {
    let pages = 1024 * 16 * world;
    let mut sizes = vec![0, 1, 2, 7, 1021, 4099, 65_537, pages, pages + 1, 3 * pages - 1];
    sizes.extend([world.saturating_sub(1), world, world + 1]);
    sizes
}

#[test]
fn the_ring_is_proven_for_every_world_to_16_and_every_edge_size() {
    for world in 1..=16 {
        for elements in sizes(world) {
            for in_place in [false, true] {
                for hint in [None, SHORT.filter(|_| elements < 5000)] {
                    let plans = ring(world, elements, in_place, hint);
                    let stats = all_reduce(&plans, elements, in_place)
                        .unwrap_or_else(|e| panic!("P {world}, {elements}, {in_place}: {e}"));
                    let sent: usize = stats.ranks.iter().map(|r| r.sent_elements).sum();
                    assert_eq!(sent, 2 * (world - 1) * elements);
                }
            }
        }
    }
}

#[test]
fn every_rank_of_the_ring_moves_the_same_share_of_a_large_buffer() {
    let elements = 16 << 20;
    let stats = all_reduce(&ring(6, elements, true, None), elements, true).unwrap();
    let ideal = 2.0 * 5.0 / 6.0 * elements as f64;
    for rank in &stats.ranks {
        for moved in [rank.sent_elements, rank.received_elements] {
            assert!((moved as f64 / ideal - 1.0).abs() < 1e-3, "{rank:?}");
        }
        assert_eq!(rank.sends, 2 * 5 * 8, "eight slices a segment");
    }
}

#[test]
fn slices_keep_their_bounds_on_pages() {
    let elements = (16 << 20) + 13;
    for plan in ring(6, elements, false, None) {
        for step in &plan.steps {
            let (read, written) = step_accesses(&step.action);
            for span in [read, written].into_iter().flatten() {
                assert_eq!(span.start * 4 % 4096, 0);
                assert!(span.end() * 4 % 4096 == 0 || span.end() == elements);
                assert!((64 << 10..=4 << 20).contains(&(span.len * 4)) || span.end() == elements);
            }
        }
    }
}

#[test]
fn one_rank_copies_out_of_place_and_does_nothing_in_place() {
    assert_eq!(ring_all_reduce(0, 1, 9, true, 4, None).steps, []);
    let steps = ring_all_reduce(0, 1, 9, false, 4, None).steps;
    assert!(matches!(steps[..], [Step { action: Action::Copy { finish: true, .. }, .. }]));
}

#[test]
fn the_broadcast_chain_is_proven_from_every_root() {
    for world in 1..=16 {
        for root in 0..world {
            for elements in [0, 1, 1021, 100_000] {
                for in_place in [false, true] {
                    let plans: Vec<RankPlan> =
                        (0..world).map(|rank| ring_broadcast(rank, world, root, elements, in_place, 4, None)).collect();
                    check(&plans, Goal::Broadcast { root, in_place }, elements)
                        .unwrap_or_else(|e| panic!("P {world}, root {root}, {elements}: {e}"));
                }
            }
        }
    }
}

#[test]
fn the_barrier_is_proven_and_a_round_less_is_refused() {
    for world in 1..=33 {
        let mut plans: Vec<RankPlan> = (0..world).map(|rank| barrier(rank, world)).collect();
        check(&plans, Goal::Barrier, 0).unwrap();
        if world > 1 {
            for plan in &mut plans {
                plan.steps.truncate(plan.steps.len() - 2);
            }
            let refused = check(&plans, Goal::Barrier, 0);
            assert!(matches!(refused, Err(PlanError::NotABarrier { .. })), "{refused:?}");
        }
    }
}

#[test]
fn a_barrier_round_that_does_not_wait_for_all_earlier_ones_is_refused() {
    let mut plans: Vec<RankPlan> = (0..8).map(|rank| barrier(rank, 8)).collect();
    for plan in &mut plans {
        plan.steps[4].after = vec![3];
    }
    let refused = check(&plans, Goal::Barrier, 0);
    assert!(matches!(refused, Err(PlanError::NotABarrier { .. })), "{refused:?}");
}

#[test]
fn a_wrong_root_is_refused() {
    let goal = Goal::Broadcast { root: 3, in_place: true };
    let plans = vec![RankPlan::default(); 3];
    assert_eq!(check(&plans, goal, 0), Err(PlanError::NoSuchRoot { root: 3, world: 3 }));
}

#[test]
fn ranks_that_receive_before_they_send_wait_in_a_circle() {
    let span = |start| Span { buffer: Buffer::Output, start, len: 1 };
    let plans: Vec<RankPlan> = (0..2)
        .map(|rank| {
            let mut plan = RankPlan::default();
            let peer = 1 - rank;
            let received = plan.push(Action::Recv { peer, dst: span(0) }, vec![]);
            plan.push(Action::Send { peer, src: span(1) }, vec![received]);
            plan
        })
        .collect();
    let refused = all_reduce(&plans, 2, true);
    assert!(matches!(refused, Err(PlanError::CyclicWait { .. })), "{refused:?}");
}

/// An exchange of two ranks in place that receives without waiting for its own send. Every run in
/// which the acknowledgement is quick is right; a replay would send the peer its own sum.
#[test]
fn a_write_into_an_outstanding_send_is_refused_however_likely_it_is_to_go_well() {
    let mut plans = ring(2, 4096, true, None);
    all_reduce(&plans, 4096, true).unwrap();
    let gather = plans[0].steps.iter_mut().find(|s| matches!(s.action, Action::Recv { .. }));
    gather.unwrap().after.clear();
    let refused = all_reduce(&plans, 4096, true);
    assert!(matches!(refused, Err(PlanError::Hazard { rank: 0, .. })), "{refused:?}");
}

#[test]
fn the_ring_waits_for_nothing_that_it_need_not_wait_for() {
    for (world, in_place) in [(2, false), (2, true), (3, false), (3, true), (5, true)] {
        let elements = world * 16 * 1024;
        let plans = ring(world, elements, in_place, Some(8 * 1024));
        for rank in 0..world {
            for (index, step) in plans[rank].steps.iter().enumerate() {
                for wait in 0..step.after.len() {
                    let mut plans = plans.clone();
                    plans[rank].steps[index].after.remove(wait);
                    let refused = all_reduce(&plans, elements, in_place);
                    assert!(matches!(refused, Err(PlanError::Hazard { .. })), "rank {rank} step {index}");
                }
            }
        }
    }
}

/// One way to spoil a plan.
#[derive(Debug, Clone, Copy)]
enum Mutation {
    DropWait,
    MoveSpan,
    ShortenSpan,
    DropStep,
    DuplicateReduce,
    ReceiveInsteadOfReduce,
    FlipFinish,
    SwapReceives,
}

const MUTATIONS: [Mutation; 8] = [
    Mutation::DropWait,
    Mutation::MoveSpan,
    Mutation::ShortenSpan,
    Mutation::DropStep,
    Mutation::DuplicateReduce,
    Mutation::ReceiveInsteadOfReduce,
    Mutation::FlipFinish,
    Mutation::SwapReceives,
];

fn destination(action: &mut Action) -> &mut Span {
    match action {
        Action::Send { src, .. } => src,
        Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } | Action::Copy { dst, .. } => dst,
    }
}

/// Spoils the `pick`-th step that the mutation applies to; false when there is none.
fn spoil(plans: &mut [RankPlan], mutation: Mutation, pick: usize, elements: usize) -> bool {
    let applies = |action: &Action, step: &Step| match mutation {
        Mutation::DropWait => !step.after.is_empty(),
        Mutation::MoveSpan => elements > step_accesses(action).0.map_or(elements, |s| s.len),
        Mutation::DuplicateReduce | Mutation::ReceiveInsteadOfReduce | Mutation::FlipFinish => {
            matches!(action, Action::RecvReduce { .. })
        }
        Mutation::SwapReceives => matches!(action, Action::Recv { .. }),
        Mutation::ShortenSpan | Mutation::DropStep => true,
    };
    let places: Vec<(usize, usize)> = plans
        .iter()
        .enumerate()
        .flat_map(|(rank, plan)| plan.steps.iter().enumerate().map(move |(i, s)| (rank, i, s)))
        .filter(|(_, _, step)| applies(&step.action, step))
        .map(|(rank, index, _)| (rank, index))
        .collect();
    if places.is_empty() {
        return false;
    }
    let (rank, index) = places[pick % places.len()];
    let plan = &mut plans[rank];
    match mutation {
        Mutation::DropWait => {
            let waits = &mut plan.steps[index].after;
            waits.remove(pick % waits.len());
        }
        Mutation::MoveSpan => {
            let span = destination(&mut plan.steps[index].action);
            // Another place of the buffer, of the same length.
            let places = elements - span.len + 1;
            span.start = (span.start + 1 + pick % (places - 1)) % places;
        }
        Mutation::ShortenSpan => destination(&mut plan.steps[index].action).len -= 1,
        Mutation::DropStep => plan.remove(index),
        Mutation::DuplicateReduce => {
            // Both ends, so that counts still match: the same slice is sent and added twice.
            let Action::RecvReduce { peer, dst, .. } = plan.steps[index].action else {
                return false;
            };
            let again = plan.steps[index].clone();
            plan.insert(index + 1, again);
            plan.steps[index + 1].after.push(index as u32);
            let Action::RecvReduce { operand, .. } = &mut plan.steps[index + 1].action else {
                return false;
            };
            *operand = dst;
            let sender = &mut plans[peer];
            let sends =
                |s: &Step| matches!(s.action, Action::Send { peer, src } if peer == rank && src.start == dst.start);
            let Some(at) = sender.steps.iter().position(sends) else {
                return false;
            };
            let again = sender.steps[at].clone();
            sender.insert(at + 1, again);
        }
        Mutation::ReceiveInsteadOfReduce => {
            if let Action::RecvReduce { peer, dst, .. } = plan.steps[index].action {
                plan.steps[index].action = Action::Recv { peer, dst };
            }
        }
        Mutation::FlipFinish => {
            if let Action::RecvReduce { finish, .. } = &mut plan.steps[index].action {
                *finish = !*finish;
            }
        }
        Mutation::SwapReceives => {
            let dst = *destination(&mut plan.steps[index].action);
            let others = index + 1..plan.steps.len();
            let other =
                others.into_iter().find(|&i| matches!(plan.steps[i].action, Action::Recv { dst: d, .. } if d != dst));
            let Some(other) = other else { return false };
            let other_dst = *destination(&mut plan.steps[other].action);
            *destination(&mut plan.steps[index].action) = other_dst;
            *destination(&mut plan.steps[other].action) = dst;
        }
    }
    true
}

impl RankPlan {
    fn remove(&mut self, index: usize) {
        self.steps.remove(index);
        for step in &mut self.steps {
            step.after.retain(|&d| d as usize != index);
            step.after.iter_mut().for_each(|d| *d -= u32::from(*d as usize > index));
        }
    }

    fn insert(&mut self, index: usize, step: Step) {
        for step in &mut self.steps[index..] {
            step.after.iter_mut().for_each(|d| *d += u32::from(*d as usize >= index));
        }
        self.steps.insert(index, step);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_ring_is_proven(
        world in 1usize..=16,
        elements in 0usize..40_000,
        in_place: bool,
        element_bytes in prop::sample::select(vec![2usize, 4, 8]),
        hint in prop::option::of(1usize..10_000),
    ) {
        let plans: Vec<RankPlan> = (0..world)
            .map(|rank| ring_all_reduce(rank, world, elements, in_place, element_bytes, hint))
            .collect();
        let stats = all_reduce(&plans, elements, in_place);
        prop_assert!(stats.is_ok(), "{:?}", stats);
    }

    #[test]
    fn a_spoilt_ring_is_refused(
        world in 2usize..=8,
        elements in 1usize..20_000,
        in_place: bool,
        mutation in prop::sample::select(MUTATIONS.to_vec()),
        pick in any::<prop::sample::Index>(),
    ) {
        let mut plans = ring(world, elements, in_place, SHORT);
        let spoilt = spoil(&mut plans, mutation, pick.index(1 << 20), elements);
        prop_assume!(spoilt);
        let refused = all_reduce(&plans, elements, in_place);
        prop_assert!(refused.is_err(), "{:?} went unseen", mutation);
    }
}
