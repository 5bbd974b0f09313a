//! Which plan a collective takes. Owns the choice, and the plans that are kept for the next call.

use std::sync::Arc;

use super::collectives::SMALL_BYTES;
use super::{Communicator, Operation};
use crate::collective::Prepared;
use crate::schedule::blocks::{chain_reduce, ring_all_gather, ring_reduce_scatter};
use crate::schedule::exchange::{all_to_all, gather, scatter, shift};
use crate::schedule::{RankPlan, Schedule, Shape, ring_all_reduce, ring_broadcast, small_all_reduce};

impl Communicator {
    /// The plan of the next AllReduce: every rank is at the same one and takes the same schedule.
    fn plan(&mut self, shape: Shape) -> Arc<Prepared> {
        let schedule = self.gate.enter();
        let Shape { elements, element_bytes, in_place, slice_elements } = shape;
        if elements * element_bytes <= SMALL_BYTES && self.is_complete {
            if let Some((of, plan)) = &self.last_small
                && *of == shape
            {
                return Arc::clone(plan);
            }
            let plan = prepared(small_all_reduce(&self.nodes, self.rank, elements, in_place));
            self.last_small = Some((shape, Arc::clone(&plan)));
            return plan;
        }
        match (&*schedule, &self.last) {
            (Schedule::Ring { .. }, _) => prepared(schedule.plan(self.rank, shape)),
            _ if elements * element_bytes < self.min_bytes => {
                prepared(ring_all_reduce(self.rank, self.world, elements, in_place, element_bytes, slice_elements))
            }
            (_, Some((known, of, plan))) if Arc::ptr_eq(known, &schedule) && *of == shape => Arc::clone(plan),
            _ => {
                let plan = prepared(schedule.plan(self.rank, shape));
                self.last = Some((schedule, shape, Arc::clone(&plan)));
                plan
            }
        }
    }

    /// The plan of a collective on blocks of this shape.
    pub(super) fn plan_of(&mut self, operation: Operation, shape: Shape) -> Arc<Prepared> {
        let (rank, world) = (self.rank, self.world);
        let Shape { elements, element_bytes, in_place, .. } = shape;
        let order = || (0..world).collect::<Vec<_>>();
        prepared(match operation {
            Operation::AllReduce(_) => return self.plan(shape),
            Operation::AllGather => ring_all_gather(&order(), rank, shape),
            Operation::ReduceScatter(_) => ring_reduce_scatter(&order(), rank, shape),
            Operation::Broadcast { root } => ring_broadcast(rank, world, root, elements, in_place, element_bytes, None),
            Operation::Reduce { root, .. } => chain_reduce(&order(), rank, root, shape),
            Operation::AllToAll => all_to_all(rank, world, elements),
            Operation::Gather { root } => gather(rank, world, root, elements, in_place),
            Operation::Scatter { root } => scatter(rank, world, root, elements, in_place),
            Operation::Shift => shift(rank, world, elements),
        })
    }
}

fn prepared(plan: RankPlan) -> Arc<Prepared> {
    Arc::new(plan.into())
}
