//! Collectives on host memory: the arithmetic, and the execution of a plan over links.

mod execution;
pub mod kernel;

pub(crate) use execution::{Buffers, Execution, Prepared};

/// Which collective a call is; the number is the first argument of [`r2cc_collective_begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Collective {
    /// Every rank ends up with the reduction of all contributions.
    AllReduce = 1,
    /// Every rank ends up with the root's elements.
    Broadcast = 2,
    /// Every rank ends up with all ranks' elements.
    AllGather = 3,
    /// Every rank ends up with its block of the reduction of all contributions.
    ReduceScatter = 4,
    /// The root ends up with the reduction of all contributions.
    Reduce = 5,
    /// Grouped sends and receives.
    SendRecv = 6,
    /// Every rank ends up with its block of every rank's elements.
    AllToAll = 7,
    /// The root ends up with all ranks' elements.
    Gather = 8,
    /// Every rank ends up with its block of the root's elements.
    Scatter = 9,
}

crate::marks::mark! {
    /// Marks the start of a collective for tracers: called once by every collective, but not by a barrier, on the
    /// calling thread before anything is enqueued. `collective` is a [`Collective`], `bytes` the length of
    /// this rank's longer buffer.
    r2cc_collective_begin(collective, bytes)
}
