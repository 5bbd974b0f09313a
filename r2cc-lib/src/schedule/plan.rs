//! The plan of one rank: an ordered list of steps over the caller's two buffers and a scratch buffer.
//!
//! Owns the meaning of a plan, which builders, checker, executor and cost model share:
//! - a directed link (a to b) has one stream of messages for each [`Class`]; in each stream the k-th
//!   `Send` to b in a's list matches the k-th `Recv` or `RecvReduce` from a in b's list; a message
//!   of zero elements is a message too;
//! - sends of one stream, and receives of one stream, are posted in list order, each once the steps
//!   in its `after` are complete; nothing else orders steps;
//! - on each NIC direction a message of [`Class::Tail`] takes only what the others leave; that decides
//!   how long a plan takes, never what it computes;
//! - a send's source must not change until the send is complete (it is the replay source); a
//!   receive's destination may be written from the moment the receive is posted.
//!
//! Never executes anything. `check` proves that a set of plans keeps these rules.

use std::collections::BTreeMap;

/// One of the buffers of a collective. In place, input and output lie in the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's contribution; never written, unless the collective is in place.
    Input,
    /// The caller's result.
    Output,
    /// Room for partial results, of the executor's.
    Scratch,
}

/// A range of elements of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The buffer.
    pub buffer: Buffer,
    /// First element.
    pub start: usize,
    /// Number of elements; may be zero.
    pub len: usize,
}

impl Span {
    /// One past the last element.
    pub const fn end(&self) -> usize {
        self.start + self.len
    }
}

/// Which messages go first where two want the same NIC direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Class {
    /// Takes what it can use.
    #[default]
    Main,
    /// Shares alike with `Main`, but neither waits behind the other: a stream of its own.
    Beside,
    /// Takes what the others leave.
    Tail,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 3] = [Class::Main, Class::Beside, Class::Tail];
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send `src` to `peer`.
    Send {
        /// Receiving rank.
        peer: usize,
        /// What is sent.
        src: Span,
    },
    /// Receive into `dst`.
    Recv {
        /// Sending rank.
        peer: usize,
        /// Where the elements land.
        dst: Span,
    },
    /// Receive, and set `dst = operand op incoming`.
    RecvReduce {
        /// Sending rank.
        peer: usize,
        /// The left operand; the very span of `dst`, or disjoint from it.
        operand: Span,
        /// Where the result goes.
        dst: Span,
        /// This reduction completes the elements: `Avg` divides here.
        finish: bool,
    },
    /// Copy `src` to `dst`, which are disjoint.
    Copy {
        /// What is copied.
        src: Span,
        /// Where to.
        dst: Span,
        /// The copy completes the elements: `Avg` divides here.
        finish: bool,
    },
}

/// One step of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What to do.
    pub action: Action,
    /// Indices of earlier steps of this rank that must be complete before this one is posted. A
    /// `Send` is complete when its bytes may be overwritten, a `Recv` when its elements are in
    /// place, a `RecvReduce` when its result is.
    pub after: Vec<u32>,
    /// The stream of a message, the same at both ends; says nothing of a `Copy`.
    pub class: Class,
}

/// The steps of one rank, in posting order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RankPlan {
    /// The steps; a plan without steps is complete at once.
    pub steps: Vec<Step>,
    /// Length of the scratch buffer.
    pub scratch_elements: usize,
    /// Elements that each rail should carry, by peer and class. While all are busy, messages share a NIC in these
    /// proportions; a rail with none carries nothing as long as one with some works. Messages that are not named take
    /// every rail alike. That decides how long a plan takes, never what it computes.
    pub shares: BTreeMap<(usize, Class), Vec<f64>>,
}

impl RankPlan {
    /// Appends a step of class `Main` and returns its index.
    pub(crate) fn push(&mut self, action: Action, after: Vec<u32>) -> u32 {
        self.push_as(Class::Main, action, after)
    }

    /// Appends a step and returns its index.
    pub(crate) fn push_as(&mut self, class: Class, action: Action, after: Vec<u32>) -> u32 {
        // A plan has a few steps a slice and rank; four thousand million of them fit no memory.
        let index = u32::try_from(self.steps.len()).expect("a plan has fewer than 2^32 steps");
        self.steps.push(Step { action, after, class });
        index
    }
}
