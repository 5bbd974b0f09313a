//! What each collective moves: buffers for a size, bandwidth factors, and what its output must hold.
//!
//! Sizes as in nccl-tests: S is the longer buffer; of collectives over blocks a block is S / P, rounded down to whole
//! elements, but never less than one.

use std::ops::Range;

use clap::ValueEnum;
use r2cc::{Operation, ReduceOp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::elements::Expected;

/// A collective that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names are the meaning")]
pub enum Collective {
    #[value(alias = "all_reduce", alias = "all_reduce_perf")]
    AllReduce,
    #[value(alias = "all_gather", alias = "all_gather_perf")]
    AllGather,
    #[value(alias = "reduce_scatter", alias = "reduce_scatter_perf")]
    ReduceScatter,
    #[value(alias = "broadcast_perf")]
    Broadcast,
    #[value(alias = "reduce_perf")]
    Reduce,
    #[value(alias = "sendrecv", alias = "sendrecv_perf")]
    SendRecv,
    #[value(alias = "alltoall", alias = "alltoall_perf")]
    AllToAll,
    #[value(alias = "gather_perf")]
    Gather,
    #[value(alias = "scatter_perf")]
    Scatter,
}

/// A part of a rank's output, and what it must hold: elements from `first` on of `expected`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedPart {
    /// Elements of the output buffer.
    pub range: Range<usize>,
    /// Whose inputs.
    pub expected: Expected,
    /// Which element of them comes first.
    pub first: usize,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::SendRecv,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
    ];

    /// nccl-tests' name of the program that measures it.
    pub fn program(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce_perf",
            Self::AllGather => "all_gather_perf",
            Self::ReduceScatter => "reduce_scatter_perf",
            Self::Broadcast => "broadcast_perf",
            Self::Reduce => "reduce_perf",
            Self::SendRecv => "sendrecv_perf",
            Self::AllToAll => "alltoall_perf",
            Self::Gather => "gather_perf",
            Self::Scatter => "scatter_perf",
        }
    }

    /// The name in suites and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::SendRecv => "send-recv",
            Self::AllToAll => "all-to-all",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
        }
    }

    /// Whether it combines elements.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether it has a root.
    pub fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// Whether it is defined in place.
    pub fn in_place(self) -> bool {
        !matches!(self, Self::SendRecv | Self::AllToAll)
    }

    fn over_blocks(self) -> bool {
        matches!(self, Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter)
    }

    /// Elements of a block (the column "count") for an asked size.
    pub fn count(self, bytes: u64, element_bytes: usize, world: usize) -> usize {
        let blocks = if self.over_blocks() { world } else { 1 };
        (bytes as usize / element_bytes / blocks).max(1)
    }

    /// S: bytes of the longer buffer.
    pub fn size(self, count: usize, element_bytes: usize, world: usize) -> u64 {
        (count * element_bytes * if self.over_blocks() { world } else { 1 }) as u64
    }

    /// Bus bandwidth over algorithm bandwidth: the share of S that crosses each rank's link in the bound.
    pub fn bus_factor(self, world: usize) -> f64 {
        let others = (world - 1) as f64 / world as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter => others,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
        }
    }

    /// What the library is asked for.
    pub fn operation(self, op: ReduceOp, root: usize) -> Operation {
        match self {
            Self::AllReduce => Operation::AllReduce(op),
            Self::AllGather => Operation::AllGather,
            Self::ReduceScatter => Operation::ReduceScatter(op),
            Self::Broadcast => Operation::Broadcast { root },
            Self::Reduce => Operation::Reduce { op, root },
            Self::SendRecv => Operation::Shift,
            Self::AllToAll => Operation::AllToAll,
            Self::Gather => Operation::Gather { root },
            Self::Scatter => Operation::Scatter { root },
        }
    }

    /// Blocks of a rank's input and of its output.
    pub fn blocks(self, rank: usize, world: usize, root: usize) -> (usize, usize) {
        let at_root = |blocks| if rank == root { blocks } else { 0 };
        match self {
            Self::AllReduce | Self::Broadcast | Self::SendRecv => (1, 1),
            Self::Reduce => (1, at_root(1)),
            Self::AllGather => (1, world),
            Self::ReduceScatter => (world, 1),
            Self::AllToAll => (world, world),
            Self::Gather => (1, at_root(world)),
            Self::Scatter => (at_root(world), 1),
        }
    }

    /// Where in the one buffer a rank's input lies in place, in blocks: its own block of the longer buffer.
    pub fn input_in_place(self, rank: usize, world: usize, root: usize) -> Range<usize> {
        match self.blocks(rank, world, root) {
            (0, _) => 0..0,
            (input, output) if input < output => rank..rank + 1,
            (input, _) => 0..input,
        }
    }

    /// What rank `rank` must find in its output, of blocks of `n` elements; in place, in the one buffer.
    pub fn expected(self, rank: usize, world: usize, root: usize, n: usize, in_place: bool) -> Vec<ExpectedPart> {
        let part = |range, expected, first| ExpectedPart { range, expected, first };
        let block = |b: usize| b * n..(b + 1) * n;
        let own_if_in_place = |larger: bool| if in_place && larger { block(rank) } else { 0..n };
        let of_each = |first| (0..world).map(|b| part(block(b), Expected::Input(b), first)).collect();
        match self {
            Self::AllReduce => vec![part(0..n, Expected::Reduced, 0)],
            Self::Reduce if rank == root => vec![part(0..n, Expected::Reduced, 0)],
            // What is not theirs stays as it was.
            Self::Reduce | Self::Gather if rank != root && in_place => vec![part(0..n, Expected::Input(rank), 0)],
            Self::Reduce => vec![],
            Self::ReduceScatter => vec![part(own_if_in_place(true), Expected::Reduced, rank * n)],
            Self::Broadcast => vec![part(0..n, Expected::Input(root), 0)],
            Self::AllGather => of_each(0),
            Self::Gather if rank == root => of_each(0),
            Self::Gather => vec![],
            Self::Scatter => vec![part(own_if_in_place(rank == root), Expected::Input(root), rank * n)],
            Self::AllToAll => of_each(rank * n),
            Self::SendRecv => vec![part(0..n, Expected::Input((rank + world - 1) % world), 0)],
        }
    }

    /// A rank that receives, for a self-test that damages what is received.
    pub fn receiver(self, world: usize, root: usize, seed: u64) -> usize {
        match self {
            Self::Reduce | Self::Gather => root,
            Self::Broadcast | Self::Scatter => (root + 1) % world,
            _ => (seed % world as u64) as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_factors_are_nccl_tests() {
        let of = |collective: Collective, bytes| {
            let count = collective.count(bytes, 4, 4);
            (count, collective.size(count, 4, 4))
        };
        assert_eq!(of(Collective::AllReduce, 1024), (256, 1024));
        assert_eq!(of(Collective::AllGather, 1024), (64, 1024));
        assert_eq!(of(Collective::SendRecv, 1024), (256, 1024));
        // Less than an element a rank is not measured.
        assert_eq!(of(Collective::Scatter, 8), (1, 16));
        assert_eq!(Collective::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Collective::Gather.bus_factor(4), 0.75);
        assert_eq!(Collective::Reduce.bus_factor(4), 1.0);
    }

    #[test]
    fn in_place_every_buffer_holds_its_input_and_its_output() {
        let (world, n) = (3, 5);
        for collective in Collective::ALL.into_iter().filter(|c| c.in_place()) {
            for (rank, root) in (0..world).flat_map(|rank| (0..world).map(move |root| (rank, root))) {
                let (input, output) = collective.blocks(rank, world, root);
                let len = input.max(output) * n;
                assert!(collective.input_in_place(rank, world, root).end * n <= len);
                for part in collective.expected(rank, world, root, n, true) {
                    assert!(part.range.end <= len, "{collective:?} rank {rank} root {root}");
                }
            }
        }
    }
}
