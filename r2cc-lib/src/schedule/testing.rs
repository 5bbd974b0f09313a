//! Topologies and sizes for property tests.

use proptest::prelude::*;

use super::fabric::{Fabric, FabricNode};
use super::r2cc::Shape;

/// A fabric of up to `nodes` nodes with up to `ranks` ranks and 1 to 8 NICs of unequal speed each, rails or
/// any-to-any, with any failures that leave each pair reachable. Ranks lie anyhow.
pub(crate) fn any_fabric(nodes: usize, ranks: usize) -> impl Strategy<Value = Fabric> {
    let node = (1..=ranks, prop::collection::vec((1u32..=10, prop::bool::weighted(0.75)), 8));
    (prop::collection::vec(node, 1..=nodes), 1usize..=8, any::<bool>(), any::<prop::sample::Index>()).prop_map(
        |(drawn, nics, any_to_any, safe)| {
            let world: usize = drawn.iter().map(|(ranks, _)| ranks).sum();
            let stride = (1..world.max(2)).rev().find(|s| gcd(*s, world) == 1).unwrap_or(1);
            let mut next = 0;
            // One NIC works on all nodes, so that each pair is reachable.
            let safe = safe.index(nics);
            let nodes = drawn.into_iter().map(|(ranks, speeds)| {
                let speed = |(nic, (speed, works)): (usize, &(u32, bool))| {
                    if *works || nic == safe { f64::from(*speed) } else { 0.0 }
                };
                let rails: Vec<f64> = speeds[..nics].iter().enumerate().map(speed).collect();
                let rails = if any_to_any { vec![rails.iter().sum()] } else { rails };
                let ranks = (0..ranks).map(|_| {
                    next += 1;
                    (next - 1) * stride % world
                });
                FabricNode { ranks: ranks.collect(), rails }
            });
            Fabric::new(nodes.collect()).expect("each pair shares a rail")
        },
    )
}

/// Buffers from none to some slices, among them fewer elements than ranks.
pub(crate) fn any_shape() -> impl Strategy<Value = Shape> {
    let elements = prop_oneof![Just(0usize), 1usize..128, 128usize..5_000, 5_000usize..60_000];
    (elements, any::<bool>(), prop::sample::select(vec![2usize, 4, 8])).prop_map(
        |(elements, in_place, element_bytes)| Shape { elements, element_bytes, in_place, slice_elements: None },
    )
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
