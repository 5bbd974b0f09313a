//! Where the buffers of a collective lie, and what belongs into them.
//!
//! Owns [`Goal`] and what follows from it for one rank: how long input and output are, where in the same memory
//! they lie in place (NCCL's convention: the smaller of the two is the rank's own block of the larger), and whose
//! elements the output must hold. Checker, builders and communicator share it.

use std::ops::Range;

use super::plan::{Buffer, RankPlan, Span};

/// What a set of plans is meant to do. With `n` elements a block and P ranks, block b of a buffer of P n elements is
/// elements b n to (b + 1) n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Every output element is the reduction of that element of every rank's input.
    AllReduce {
        /// Input and output are the same memory.
        in_place: bool,
    },
    /// Every output element is that element of the root's input.
    Broadcast {
        /// Rank whose input is sent.
        root: usize,
        /// Input and output are the same memory.
        in_place: bool,
    },
    /// The root's output element is the reduction of that element of every rank's input; others have no output.
    Reduce {
        /// Rank that gets the result.
        root: usize,
        /// The root's input and output are the same memory.
        in_place: bool,
    },
    /// Block b of every output is rank b's input.
    AllGather {
        /// The input is the rank's own block of the output.
        in_place: bool,
    },
    /// Rank r's output is the reduction of block r of every rank's input.
    ReduceScatter {
        /// The output is the rank's own block of the input.
        in_place: bool,
    },
    /// Block b of rank r's output is block r of rank b's input.
    AllToAll,
    /// Block b of the root's output is rank b's input; others have no output.
    Gather {
        /// Rank that gets the blocks.
        root: usize,
        /// The root's input is its own block of its output.
        in_place: bool,
    },
    /// Rank r's output is block r of the root's input; others have no input.
    Scatter {
        /// Rank that has the blocks.
        root: usize,
        /// The root's output is its own block of its input.
        in_place: bool,
    },
    /// Rank r's output is the input of rank r - 1, the first rank's the last one's.
    Shift,
    /// No rank is through before every rank has entered.
    Barrier,
}

/// Contributions that an element is made of: (rank, element of its input that the first element of the range holds).
pub(super) type Terms = Vec<(usize, usize)>;

impl Goal {
    /// The root, if there is one.
    pub fn root(self) -> Option<usize> {
        match self {
            Self::Broadcast { root, .. }
            | Self::Reduce { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(root),
            _ => None,
        }
    }

    /// Whether the output is a reduction, which `finish` completes.
    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce { .. } | Self::Reduce { .. } | Self::ReduceScatter { .. })
    }

    /// What rank `rank` of `world` must find in its output for blocks of `elements` elements.
    pub(super) fn wanted(self, rank: usize, world: usize, elements: usize) -> Vec<(Range<usize>, Terms)> {
        let everyone = |from: usize| (0..world).map(|r| (r, from)).collect::<Terms>();
        let block = |b: usize| b * elements..(b + 1) * elements;
        match self {
            Self::AllReduce { .. } => vec![(0..elements, everyone(0))],
            Self::Reduce { root, .. } if rank == root => vec![(0..elements, everyone(0))],
            Self::ReduceScatter { .. } => vec![(0..elements, everyone(rank * elements))],
            Self::Broadcast { root, .. } => vec![(0..elements, vec![(root, 0)])],
            Self::AllGather { .. } => (0..world).map(|b| (block(b), vec![(b, 0)])).collect(),
            Self::Gather { root, .. } if rank == root => (0..world).map(|b| (block(b), vec![(b, 0)])).collect(),
            Self::Scatter { root, .. } => vec![(0..elements, vec![(root, rank * elements)])],
            Self::AllToAll => (0..world).map(|b| (block(b), vec![(b, rank * elements)])).collect(),
            Self::Shift => vec![(0..elements, vec![((rank + world - 1) % world, 0)])],
            Self::Reduce { .. } | Self::Gather { .. } | Self::Barrier => Vec::new(),
        }
    }
}

/// The memories of a rank: what it contributes, what it gets (the same memory, in place), and room for partial results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Memory {
    Input,
    Output,
    Scratch,
}

/// Where one rank's buffers lie, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Where the input lies in its memory.
    pub(crate) input: Range<usize>,
    /// Where the output lies in its memory.
    pub(crate) output: Range<usize>,
    /// Both lie in the same memory.
    pub(crate) shared: bool,
    scratch: usize,
}

impl Layout {
    /// The buffers of rank `rank` of `world` for blocks of `elements` elements; in place, both lie in a memory of the
    /// larger one's length.
    pub(crate) fn new(goal: Goal, rank: usize, world: usize, elements: usize) -> Self {
        let (one, all) = (elements, world * elements);
        let own = rank * elements..(rank + 1) * elements;
        let (input, output, in_place) = match goal {
            Goal::AllReduce { in_place } | Goal::Broadcast { in_place, .. } => (one, one, in_place),
            Goal::Reduce { root, in_place } => (one, if rank == root { one } else { 0 }, in_place && rank == root),
            Goal::AllGather { in_place } => (one, all, in_place),
            Goal::ReduceScatter { in_place } => (all, one, in_place),
            Goal::AllToAll => (all, all, false),
            Goal::Gather { root, in_place } => (one, if rank == root { all } else { 0 }, in_place && rank == root),
            Goal::Scatter { root, in_place } => (if rank == root { all } else { 0 }, one, in_place && rank == root),
            Goal::Shift => (one, one, false),
            Goal::Barrier => (0, 0, true),
        };
        let (mut layout_in, mut layout_out) = (0..input, 0..output);
        if in_place && input < output {
            layout_in = own;
        } else if in_place && output < input {
            layout_out = own;
        }
        Self { input: layout_in, output: layout_out, shared: in_place, scratch: 0 }
    }

    pub(super) fn with_scratch(mut self, plan: &RankPlan) -> Self {
        self.scratch = plan.scratch_elements;
        self
    }

    /// Length of a buffer.
    pub(super) fn len(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Input => self.input.len(),
            Buffer::Output => self.output.len(),
            Buffer::Scratch => self.scratch,
        }
    }

    /// The memory that a span of a buffer lies in, and its first element there.
    pub(super) fn place(&self, span: Span) -> (Memory, usize) {
        match span.buffer {
            Buffer::Input if self.shared => (Memory::Output, self.input.start + span.start),
            Buffer::Input => (Memory::Input, span.start),
            Buffer::Output => (Memory::Output, self.output.start + span.start),
            Buffer::Scratch => (Memory::Scratch, span.start),
        }
    }

    /// Whether a plan may write there: to its output and its scratch, to nothing else of the caller's.
    pub(super) fn is_writable(&self, span: Span) -> bool {
        let (memory, start) = self.place(span);
        match memory {
            Memory::Input => false,
            Memory::Output => start >= self.output.start && start + span.len <= self.output.end,
            Memory::Scratch => true,
        }
    }
}

/// The layout of every rank.
pub(super) fn layouts(plans: &[RankPlan], goal: Goal, elements: usize) -> Vec<Layout> {
    let of = |(rank, plan): (usize, &RankPlan)| Layout::new(goal, rank, plans.len(), elements).with_scratch(plan);
    plans.iter().enumerate().map(of).collect()
}
