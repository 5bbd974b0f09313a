//! Every R2CC-AllReduce plan is proven, moves what the design says, and overlaps as asked.

use proptest::prelude::*;

use super::*;
use crate::schedule::fabric::FabricNode;
use crate::schedule::testing::{any_fabric, any_shape};
use crate::schedule::{Action, Goal, Stats, check};

const OVERLAPS: [Overlap; 4] =
    [Overlap::AsDataAllows, Overlap::TailBesideMain, Overlap::TailAfterMain, Overlap::Serial];

/// Nodes of `ranks` ranks with three NICs of 1/3 each; the first has lost `lost` of them.
fn one_degraded(nodes: usize, ranks: usize, lost: usize) -> Fabric {
    let node = |i: usize| FabricNode {
        ranks: (i * ranks..(i + 1) * ranks).collect(),
        rails: (0..3).map(|rail| if i == 0 && rail < lost { 0.0 } else { 1.0 / 3.0 }).collect(),
    };
    Fabric::new((0..nodes).map(node).collect()).unwrap()
}

fn layout(fabric: &Fabric) -> R2ccLayout {
    let ring: Vec<usize> = (0..fabric.nodes().len()).collect();
    R2ccLayout::new(fabric, &ring, |node| node > 0).unwrap()
}

fn proven(plans: &[RankPlan], shape: Shape) -> Stats {
    let goal = Goal::AllReduce { in_place: shape.in_place };
    check(plans, goal, shape.elements).unwrap_or_else(|e| panic!("{shape:?}: {e}"))
}

/// Elements that each node receives from others.
fn node_received(fabric: &Fabric, plans: &[RankPlan]) -> Vec<usize> {
    let received = |ranks: &[usize]| {
        let steps = ranks.iter().flat_map(|&rank| &plans[rank].steps);
        let from_others = steps.map(|step| match step.action {
            Action::Recv { peer, dst } | Action::RecvReduce { peer, dst, .. } if !ranks.contains(&peer) => dst.len,
            _ => 0,
        });
        from_others.sum()
    };
    fabric.nodes().iter().map(|node| received(&node.ranks)).collect()
}

#[test]
fn three_nodes_of_two_receive_what_the_published_run_did() {
    let fabric = one_degraded(3, 2, 1);
    let shape = Shape { elements: 16 << 20, element_bytes: 4, in_place: true, slice_elements: None };
    for overlap in OVERLAPS {
        let plans = r2cc_all_reduce(&layout(&fabric), shape, 4, overlap);
        proven(&plans, shape);
        let healthy = 2.0 * 5.0 / 6.0 * shape.elements as f64;
        let shares: Vec<f64> = node_received(&fabric, &plans).iter().map(|&r| r as f64 / healthy).collect();
        for (share, wanted) in shares.iter().zip([0.8667, 1.1667, 1.1667]) {
            assert!((share / wanted - 1.0).abs() < 1e-3, "{overlap:?}: {shares:?}");
        }
    }
}

#[test]
fn edge_sizes_are_proven_for_every_overlap() {
    for (nodes, ranks) in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (5, 3)] {
        let fabric = one_degraded(nodes, ranks, 1);
        // A node alone is healthy or there is no layout.
        let ring: Vec<usize> = (0..nodes).collect();
        let layout = R2ccLayout::new(&fabric, &ring, |node| node > 0 || nodes == 1).unwrap();
        let world = nodes * ranks;
        for elements in [0, 1, 2, world.saturating_sub(1), world, world + 1, 1021, 70_001] {
            for in_place in [false, true] {
                for overlap in OVERLAPS {
                    for chunks in [1, 4] {
                        let shape = Shape { elements, element_bytes: 4, in_place, slice_elements: None };
                        proven(&r2cc_all_reduce(&layout, shape, chunks, overlap), shape);
                    }
                }
            }
        }
    }
}

#[test]
fn without_a_healthy_node_there_is_no_layout() {
    assert_eq!(R2ccLayout::new(&one_degraded(2, 1, 1), &[0, 1], |_| false), None);
}

#[test]
fn the_whole_tensor_or_nothing_may_be_the_tail() {
    let fabric = one_degraded(3, 2, 1);
    let shape = Shape { elements: 50_000, element_bytes: 4, in_place: false, slice_elements: None };
    for tail in [0.0, 1.0] {
        proven(&r2cc_all_reduce(&layout(&fabric).with_tail(tail), shape, 4, Overlap::default()), shape);
    }
}

/// Whether some send of the second kind may be posted while a step of the first kind is under way.
fn waits_for_main(plans: &[RankPlan], second: impl Fn(usize, usize) -> bool) -> bool {
    plans.iter().enumerate().all(|(rank, plan)| {
        let mains: Vec<u32> = (0..plan.steps.len() as u32)
            .filter(|&i| !second(rank, i as usize) && plan.steps[i as usize].class == Class::Main)
            .collect();
        let first =
            (0..plan.steps.len()).find(|&i| second(rank, i) && matches!(plan.steps[i].action, Action::Send { .. }));
        first.is_none_or(|send| mains.is_empty() || plan.steps[send].after.iter().any(|dep| mains.contains(dep)))
    })
}

#[test]
fn the_tail_waits_for_the_main_part_only_where_it_is_asked_to() {
    let fabric = one_degraded(3, 2, 1);
    let shape = Shape { elements: 4 << 20, element_bytes: 4, in_place: true, slice_elements: None };
    for (overlap, waits) in OVERLAPS.into_iter().zip([false, false, true, true]) {
        let plans = r2cc_all_reduce(&layout(&fabric), shape, 4, overlap);
        let is_tail = |rank: usize, step: usize| plans[rank].steps[step].class == Class::Tail;
        assert_eq!(waits_for_main(&plans, is_tail), waits, "{overlap:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_topology_with_any_failures_is_proven(
        fabric in any_fabric(16, 8),
        (shape, threshold) in (any_shape(), 0.0f64..1.0),
        chunks in 1usize..6,
        overlap in prop::sample::select(OVERLAPS.to_vec()),
    ) {
        let ring = fabric.best_ring();
        let best = (0..ring.len()).map(|n| fabric.bandwidth(n)).fold(0.0, f64::max);
        let layout = R2ccLayout::new(&fabric, &ring, |n| fabric.bandwidth(n) >= threshold * best);
        let layout = layout.expect("the best node is healthy");
        let plans = r2cc_all_reduce(&layout, shape, chunks, overlap);
        let proof = check(&plans, Goal::AllReduce { in_place: shape.in_place }, shape.elements);
        prop_assert!(proof.is_ok(), "{:?}", proof);
    }
}
