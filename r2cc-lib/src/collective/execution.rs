//! Runs one rank's plan over the links. Posts what is ready, in list order per link and direction; a step is
//! ready when those in its `after` are complete. Never waits.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::collective::kernel;
use crate::dtype::{DType, ReduceOp};
use crate::repair::MessageSeq;
use crate::schedule::{Action, Buffer, RankPlan, Span};
use crate::transport::{LinksError, RankLinks, Sink, Source, Stream};

/// The caller's memory, and room for partial results. In place, `input` and `output` overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    pub(crate) scratch: *mut u8,
}

// SAFETY: the caller blocks until the execution is over, and the engine drops it before it answers.
unsafe impl Send for Buffers {}

/// A plan and what follows from it, for any number of executions.
#[derive(Debug, PartialEq)]
pub(crate) struct Prepared {
    pub(crate) plan: RankPlan,
    /// The steps that wait for each step.
    dependents: Vec<Vec<u32>>,
    /// The sends of each link in the order of their posting, and the receives.
    sends: Vec<(Stream, Vec<u32>)>,
    receives: Vec<(Stream, Vec<u32>)>,
    copies: Vec<u32>,
}

impl From<RankPlan> for Prepared {
    fn from(plan: RankPlan) -> Self {
        let mut dependents = vec![Vec::new(); plan.steps.len()];
        let (mut sends, mut receives) = (BTreeMap::<Stream, Vec<u32>>::new(), BTreeMap::<Stream, Vec<u32>>::new());
        let mut copies = Vec::new();
        for (i, step) in plan.steps.iter().enumerate() {
            let i = i as u32;
            step.after.iter().for_each(|a| dependents[*a as usize].push(i));
            match step.action {
                Action::Send { peer, .. } => sends.entry(Stream { peer, class: step.class }).or_default().push(i),
                Action::Recv { peer, .. } | Action::RecvReduce { peer, .. } => {
                    receives.entry(Stream { peer, class: step.class }).or_default().push(i);
                }
                Action::Copy { .. } => copies.push(i),
            }
        }
        let (sends, receives) = (sends.into_iter().collect(), receives.into_iter().collect());
        Self { plan, dependents, sends, receives, copies }
    }
}

/// How far the steps of one link and direction are.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    posted: usize,
    /// Number of the first message: the others follow it, as one plan runs at a time.
    first: u64,
}

/// A plan under way.
#[derive(Debug)]
pub(crate) struct Execution {
    prepared: Arc<Prepared>,
    buffers: Buffers,
    dtype: DType,
    op: ReduceOp,
    world: usize,
    blockers: Vec<u32>,
    remaining: usize,
    sends: Vec<Queue>,
    receives: Vec<Queue>,
    copies: Vec<u32>,
}

impl Execution {
    /// Nothing is posted yet.
    pub(crate) fn new(prepared: Arc<Prepared>, buffers: Buffers, dtype: DType, op: ReduceOp, world: usize) -> Self {
        let steps = &prepared.plan.steps;
        let (blockers, remaining) = (steps.iter().map(|s| s.after.len() as u32).collect(), steps.len());
        let queues = |streams: &[_]| vec![Queue::default(); streams.len()];
        let (sends, receives) = (queues(&prepared.sends), queues(&prepared.receives));
        let copies = prepared.copies.clone();
        Self { prepared, buffers, dtype, op, world, blockers, remaining, sends, receives, copies }
    }

    /// Whether every step is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    /// Bytes that this rank receives.
    pub(crate) fn received_bytes(&self) -> u64 {
        let elements: usize = self
            .prepared
            .plan
            .steps
            .iter()
            .map(|step| match step.action {
                Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } => dst.len,
                _ => 0,
            })
            .sum();
        (elements * self.dtype.size_bytes()) as u64
    }

    /// A message has been sent for good.
    pub(crate) fn handle_sent(&mut self, stream: Stream, message: MessageSeq) {
        if let Some(step) = Self::step(&self.prepared.sends, &self.sends, stream, message) {
            self.complete(step);
        }
    }

    /// A message has landed.
    pub(crate) fn handle_received(&mut self, stream: Stream, message: MessageSeq) {
        if let Some(step) = Self::step(&self.prepared.receives, &self.receives, stream, message) {
            self.complete(step);
        }
    }

    /// The step of this plan that a message belongs to.
    fn step(streams: &[(Stream, Vec<u32>)], queues: &[Queue], stream: Stream, message: MessageSeq) -> Option<u32> {
        let at = streams.binary_search_by_key(&stream, |(stream, _)| *stream).ok()?;
        let place = usize::try_from(message.0.checked_sub(queues[at].first)?).ok()?;
        if place < queues[at].posted { Some(streams[at].1[place]) } else { None }
    }

    fn complete(&mut self, step: u32) {
        self.remaining -= 1;
        self.prepared.dependents[step as usize].iter().for_each(|later| self.blockers[*later as usize] -= 1);
    }

    /// Posts everything that is ready.
    ///
    /// # Errors
    /// If a peer shares no rail with this rank.
    pub(crate) fn advance(&mut self, links: &mut RankLinks) -> Result<(), LinksError> {
        while let Some(at) = self.copies.iter().position(|i| self.blockers[*i as usize] == 0) {
            let step = self.copies.remove(at);
            self.copy(step);
            self.complete(step);
        }
        let prepared = Arc::clone(&self.prepared);
        for (at, (stream, steps)) in prepared.receives.iter().enumerate() {
            while let Some(step) = self.next_ready(steps, self.receives[at]) {
                let message = links.post_recv(*stream, self.sink(step))?;
                self.receives[at].note(message);
            }
        }
        for (at, (stream, steps)) in prepared.sends.iter().enumerate() {
            while let Some(step) = self.next_ready(steps, self.sends[at]) {
                let message = links.post_send(*stream, self.source(step))?;
                self.sends[at].note(message);
            }
        }
        Ok(())
    }

    fn next_ready(&self, steps: &[u32], queue: Queue) -> Option<u32> {
        steps.get(queue.posted).copied().filter(|step| self.blockers[*step as usize] == 0)
    }

    fn bytes(&self, span: Span) -> usize {
        span.len * self.dtype.size_bytes()
    }

    fn read_ptr(&self, span: Span) -> *const u8 {
        let base = match span.buffer {
            Buffer::Input => self.buffers.input,
            Buffer::Output => self.buffers.output.cast_const(),
            Buffer::Scratch => self.buffers.scratch.cast_const(),
        };
        // SAFETY: the plan was made for buffers of these lengths.
        unsafe { base.add(span.start * self.dtype.size_bytes()) }
    }

    fn write_ptr(&self, span: Span) -> *mut u8 {
        let base = match span.buffer {
            Buffer::Scratch => self.buffers.scratch,
            Buffer::Output => self.buffers.output,
            Buffer::Input => {
                assert!(self.buffers.input == self.buffers.output.cast_const(), "nobody writes to the caller's input");
                self.buffers.output
            }
        };
        // SAFETY: the plan was made for buffers of these lengths.
        unsafe { base.add(span.start * self.dtype.size_bytes()) }
    }

    fn source(&self, step: u32) -> Source {
        let Action::Send { src, .. } = self.prepared.plan.steps[step as usize].action else {
            unreachable!("send queues hold sends")
        };
        // SAFETY: the caller blocks until this execution is over; the plan keeps the span unchanged until then.
        unsafe { Source::new(self.read_ptr(src), self.bytes(src)) }
    }

    fn sink(&self, step: u32) -> Sink {
        match self.prepared.plan.steps[step as usize].action {
            // SAFETY: the caller blocks until this execution is over; the plan gives the span to this step alone.
            Action::Recv { dst, .. } => unsafe { Sink::copy(self.write_ptr(dst), self.bytes(dst), self.dtype) },
            Action::RecvReduce { operand, dst, finish, .. } => {
                let world = finish.then_some(self.world);
                let (to, bytes) = (self.write_ptr(dst), self.bytes(dst));
                // SAFETY: as above; operand and destination are the same span or disjoint.
                unsafe { Sink::reduce(to, bytes, self.dtype, self.op, self.read_ptr(operand), world) }
            }
            Action::Send { .. } | Action::Copy { .. } => unreachable!("receive queues hold receives"),
        }
    }

    fn copy(&self, step: u32) {
        let Action::Copy { src, dst, finish } = self.prepared.plan.steps[step as usize].action else {
            unreachable!("the copy queue holds copies")
        };
        let bytes = self.bytes(dst);
        // SAFETY: both spans lie in the caller's buffers and are disjoint, as the plan promises.
        let (to, from) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.write_ptr(dst), bytes),
                std::slice::from_raw_parts(self.read_ptr(src), bytes),
            )
        };
        to.copy_from_slice(from);
        if finish {
            kernel::finish(self.dtype, self.op, to, self.world);
        }
    }
}

impl Queue {
    fn note(&mut self, message: MessageSeq) {
        if self.posted == 0 {
            self.first = message.0;
        }
        self.posted += 1;
    }
}
