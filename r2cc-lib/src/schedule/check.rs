//! Proves a set of plans right, for every interleaving that the plan rules allow.
//!
//! Owns the proof: shape of every step, sends matched with receives in count and length, no cyclic
//! wait, no access to memory that an outstanding step may still write or (a send: replay) read, and
//! by symbolic execution that every output element holds what the [`Goal`] asks for it. Time grows with
//! the steps, not with the elements. Never looks at which builder made the plans.
//! Start at [`check`]; the happens-before order is in `order`, the execution in `symbolic`.

use super::layout::{Goal, Layout, layouts};
use super::order::{Order, access_conflict};
use super::plan::{Action, Buffer, RankPlan, Span};
use super::symbolic;

/// What one rank moves when it runs its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankTraffic {
    /// Messages sent.
    pub sends: usize,
    /// Messages received.
    pub receives: usize,
    /// Elements sent.
    pub sent_elements: usize,
    /// Elements received.
    pub received_elements: usize,
}

impl RankTraffic {
    /// Payload bytes sent, for elements of `element_bytes`.
    pub fn sent_bytes(&self, element_bytes: usize) -> usize {
        self.sent_elements * element_bytes
    }

    /// Payload bytes received, for elements of `element_bytes`.
    pub fn received_bytes(&self, element_bytes: usize) -> usize {
        self.received_elements * element_bytes
    }
}

/// Traffic of a proven set of plans.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stats {
    /// One entry a rank.
    pub ranks: Vec<RankTraffic>,
}

/// Why a set of plans is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A step cannot be carried out as written.
    #[error("rank {rank} step {step}: {reason}")]
    Malformed {
        /// Rank that owns the step.
        rank: usize,
        /// Index of the step.
        step: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The root is not one of the ranks.
    #[error("root {root} is not one of {world} ranks")]
    NoSuchRoot {
        /// The root asked for.
        root: usize,
        /// Number of plans.
        world: usize,
    },
    /// A link does not carry as many sends as receives.
    #[error("link {from} to {to}: {sends} sends but {receives} receives")]
    Unmatched {
        /// Sending rank.
        from: usize,
        /// Receiving rank.
        to: usize,
        /// Sends in the sender's plan.
        sends: usize,
        /// Receives in the receiver's plan.
        receives: usize,
    },
    /// A message is not as long as the receive that it matches.
    #[error("link {from} to {to}, message {message}: {sent} elements sent, {expected} expected")]
    LengthMismatch {
        /// Sending rank.
        from: usize,
        /// Receiving rank.
        to: usize,
        /// Position on the link, from 0.
        message: usize,
        /// Elements sent.
        sent: usize,
        /// Elements that the receive is for.
        expected: usize,
    },
    /// Steps wait for one another in a circle.
    #[error("rank {rank} step {step} waits, through other steps, for itself")]
    CyclicWait {
        /// A rank on the circle, or behind it.
        rank: usize,
        /// A step on the circle, or behind it.
        step: usize,
    },
    /// Two steps touch the same memory, one of them writes, and nothing orders them.
    #[error(
        "rank {rank}: steps {first} and {second} touch {buffer:?} elements {start}..{end}, \
         at least one writes, and neither waits for the other"
    )]
    Hazard {
        /// Rank that owns both steps.
        rank: usize,
        /// The earlier step in the list.
        first: usize,
        /// The later step.
        second: usize,
        /// Where they meet.
        buffer: Buffer,
        /// First element that both touch.
        start: usize,
        /// One past the last such element.
        end: usize,
    },
    /// A step reads output elements that nothing has written.
    #[error("rank {rank} step {step} reads {buffer:?} elements {start}..{end} before any write")]
    ReadsNothing {
        /// Rank that owns the step.
        rank: usize,
        /// Index of the step.
        step: usize,
        /// Buffer read.
        buffer: Buffer,
        /// First such element.
        start: usize,
        /// One past the last.
        end: usize,
    },
    /// `finish` is applied twice, too early, or elements are reduced after it.
    #[error("rank {rank} step {step}, elements {start}..{end}: {reason}")]
    Finish {
        /// Rank that owns the step.
        rank: usize,
        /// Index of the step.
        step: usize,
        /// First such element of the destination.
        start: usize,
        /// One past the last.
        end: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// The output is not what the goal asks.
    #[error("rank {rank} output elements {start}..{end}: {found}")]
    WrongResult {
        /// Rank whose output it is.
        rank: usize,
        /// First wrong element.
        start: usize,
        /// One past the last.
        end: usize,
        /// What they hold instead.
        found: String,
    },
    /// A barrier lets a rank through too early.
    #[error("rank {rank} may be through before rank {absent} has entered")]
    NotABarrier {
        /// The rank let through.
        rank: usize,
        /// The rank it has not heard of.
        absent: usize,
    },
}

/// Proves that `plans`, one a rank, over blocks of `elements` elements, reach `goal`.
pub fn check(plans: &[RankPlan], goal: Goal, elements: usize) -> Result<Stats, PlanError> {
    if let Some(root) = goal.root()
        && root >= plans.len()
    {
        return Err(PlanError::NoSuchRoot { root, world: plans.len() });
    }
    let layouts = layouts(plans, goal, elements);
    for (rank, plan) in plans.iter().enumerate() {
        for step in 0..plan.steps.len() {
            well_formed(plans, rank, step, &layouts[rank]).map_err(|reason| PlanError::Malformed {
                rank,
                step,
                reason,
            })?;
        }
    }
    let order = Order::new(plans)?;
    let sorted = order.sorted()?;
    for (rank, layout) in layouts.iter().enumerate() {
        access_conflict(plans, rank, layout, &order, &sorted)?;
    }
    match goal {
        Goal::Barrier => order.barrier(plans, &sorted)?,
        _ => symbolic::execute(plans, goal, elements, &layouts, &order, &sorted)?,
    }
    Ok(Stats { ranks: plans.iter().map(traffic).collect() })
}

fn traffic(plan: &RankPlan) -> RankTraffic {
    let mut traffic = RankTraffic::default();
    for step in &plan.steps {
        match step.action {
            Action::Send { src, .. } => {
                traffic.sends += 1;
                traffic.sent_elements += src.len;
            }
            Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } => {
                traffic.receives += 1;
                traffic.received_elements += dst.len;
            }
            Action::Copy { .. } => {}
        }
    }
    traffic
}

/// The spans a step reads and the span it writes.
pub(super) fn step_accesses(action: &Action) -> (Option<Span>, Option<Span>) {
    match *action {
        Action::Send { src, .. } => (Some(src), None),
        Action::Recv { dst, .. } => (None, Some(dst)),
        Action::RecvReduce { operand, dst, .. } => (Some(operand), Some(dst)),
        Action::Copy { src, dst, .. } => (Some(src), Some(dst)),
    }
}

fn well_formed(plans: &[RankPlan], rank: usize, index: usize, layout: &Layout) -> Result<(), String> {
    let step = &plans[rank].steps[index];
    if let Some(&dep) = step.after.iter().find(|&&dep| dep as usize >= index) {
        return Err(format!("waits for step {dep}, which is not an earlier one"));
    }
    if let Action::Send { peer, .. } | Action::Recv { peer, .. } | Action::RecvReduce { peer, .. } = step.action
        && (peer >= plans.len() || peer == rank)
    {
        return Err(format!("peer {peer} is not another of {} ranks", plans.len()));
    }
    let (read, written) = step_accesses(&step.action);
    for span in [read, written].into_iter().flatten() {
        let Span { buffer, start, len } = span;
        let elements = layout.len(buffer);
        if start.checked_add(len).is_none_or(|end| end > elements) {
            return Err(format!("{len} {buffer:?} elements from {start} of a buffer of {elements}"));
        }
    }
    if let Some(dst) = written
        && !layout.is_writable(dst)
    {
        return Err("writes to the caller's input".to_owned());
    }
    if let (Some(src), Some(dst)) = (read, written) {
        if src.len != dst.len {
            return Err(format!("{} elements into {}", src.len, dst.len));
        }
        let ((from, from_start), (to, to_start)) = (layout.place(src), layout.place(dst));
        let overlaps = from == to && from_start < to_start + dst.len && to_start < from_start + src.len;
        let reduces_there = matches!(step.action, Action::RecvReduce { .. }) && from_start == to_start;
        if overlaps && !reduces_there {
            return Err("source and destination overlap".to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
