//! Runs one rank's plan over the links. Posts what is ready, in list order per link and direction; a step is
//! ready when those in its `after` are complete. Never waits.

use std::collections::{BTreeMap, VecDeque};

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

/// Steps of one link and direction.
#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<u32>,
    posted: BTreeMap<MessageSeq, u32>,
}

/// A plan under way.
#[derive(Debug)]
pub(crate) struct Execution {
    plan: RankPlan,
    buffers: Buffers,
    dtype: DType,
    op: ReduceOp,
    world: usize,
    blockers: Vec<u32>,
    dependents: Vec<Vec<u32>>,
    remaining: usize,
    sends: BTreeMap<Stream, Queue>,
    receives: BTreeMap<Stream, Queue>,
    copies: VecDeque<u32>,
}

impl Execution {
    /// Takes over `plan`; nothing is posted yet.
    pub(crate) fn new(plan: RankPlan, buffers: Buffers, dtype: DType, op: ReduceOp, world: usize) -> Self {
        let mut dependents = vec![Vec::new(); plan.steps.len()];
        let (mut sends, mut receives) = (BTreeMap::<Stream, Queue>::new(), BTreeMap::<Stream, Queue>::new());
        let mut copies = VecDeque::new();
        for (i, step) in plan.steps.iter().enumerate() {
            let i = i as u32;
            step.after.iter().for_each(|a| dependents[*a as usize].push(i));
            match step.action {
                Action::Send { peer, .. } => {
                    sends.entry(Stream { peer, class: step.class }).or_default().waiting.push_back(i);
                }
                Action::Recv { peer, .. } | Action::RecvReduce { peer, .. } => {
                    receives.entry(Stream { peer, class: step.class }).or_default().waiting.push_back(i);
                }
                Action::Copy { .. } => copies.push_back(i),
            }
        }
        let blockers = plan.steps.iter().map(|s| s.after.len() as u32).collect();
        let remaining = plan.steps.len();
        Self { plan, buffers, dtype, op, world, blockers, dependents, remaining, sends, receives, copies }
    }

    /// Whether every step is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    /// Bytes that this rank receives.
    pub(crate) fn received_bytes(&self) -> u64 {
        let elements: usize = self
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
        if let Some(step) = self.sends.get_mut(&stream).and_then(|q| q.posted.remove(&message)) {
            self.complete(step);
        }
    }

    /// A message has landed.
    pub(crate) fn handle_received(&mut self, stream: Stream, message: MessageSeq) {
        if let Some(step) = self.receives.get_mut(&stream).and_then(|q| q.posted.remove(&message)) {
            self.complete(step);
        }
    }

    fn complete(&mut self, step: u32) {
        self.remaining -= 1;
        for dependent in std::mem::take(&mut self.dependents[step as usize]) {
            self.blockers[dependent as usize] -= 1;
        }
    }

    /// Posts everything that is ready.
    ///
    /// # Errors
    /// If a peer shares no rail with this rank.
    pub(crate) fn advance(&mut self, links: &mut RankLinks) -> Result<(), LinksError> {
        while let Some(at) = self.copies.iter().position(|i| self.blockers[*i as usize] == 0) {
            if let Some(step) = self.copies.remove(at) {
                self.copy(step);
                self.complete(step);
            }
        }
        for stream in self.receives.keys().copied().collect::<Vec<_>>() {
            while let Some(step) = Self::next_ready(&mut self.receives, stream, &self.blockers) {
                let sink = self.sink(step);
                let message = links.post_recv(stream, sink)?;
                Self::note(&mut self.receives, stream, message, step);
            }
        }
        for stream in self.sends.keys().copied().collect::<Vec<_>>() {
            while let Some(step) = Self::next_ready(&mut self.sends, stream, &self.blockers) {
                let source = self.source(step);
                let message = links.post_send(stream, source)?;
                Self::note(&mut self.sends, stream, message, step);
            }
        }
        Ok(())
    }

    fn next_ready(queues: &mut BTreeMap<Stream, Queue>, stream: Stream, blockers: &[u32]) -> Option<u32> {
        let queue = queues.get_mut(&stream)?;
        let ready = queue.waiting.front().is_some_and(|step| blockers[*step as usize] == 0);
        if ready { queue.waiting.pop_front() } else { None }
    }

    fn note(queues: &mut BTreeMap<Stream, Queue>, stream: Stream, message: MessageSeq, step: u32) {
        queues.entry(stream).or_default().posted.insert(message, step);
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
        let Action::Send { src, .. } = self.plan.steps[step as usize].action else {
            unreachable!("send queues hold sends")
        };
        // SAFETY: the caller blocks until this execution is over; the plan keeps the span unchanged until then.
        unsafe { Source::new(self.read_ptr(src), self.bytes(src)) }
    }

    fn sink(&self, step: u32) -> Sink {
        match self.plan.steps[step as usize].action {
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
        let Action::Copy { src, dst, finish } = self.plan.steps[step as usize].action else {
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
