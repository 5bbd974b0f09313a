//! The happens-before order of a set of plans.
//!
//! Owns the events (each step is posted, then complete) and what the plan rules say about them:
//! posted before complete; a step's `after` complete before it is posted; posted in list order on
//! one stream of a directed link; a receive complete after its send is posted. A send may be complete before or
//! long after the matching receive is (staging slots, lost acknowledgements), so for hazards its
//! completion is ordered after nothing but its own posting; for cyclic waits it waits, at worst,
//! until the receive is posted. Never looks at memory contents: that is `symbolic`.

use std::collections::{BTreeMap, BTreeSet};

use super::check::{PlanError, step_accesses};
use super::layout::{Layout, Memory};
use super::plan::{Action, Class, RankPlan, Span};

/// Sending rank, receiving rank, class.
type Stream = (usize, usize, Class);
/// Numbers and lengths of the steps of each stream.
type Streams = BTreeMap<Stream, Vec<(u32, usize)>>;
/// Index of an event over all ranks: twice the step's index for posted, one more for complete.
type Event = u32;

pub(super) fn posted(step: u32) -> Event {
    2 * step
}

pub(super) fn complete(step: u32) -> Event {
    2 * step + 1
}

/// Steps of all ranks, numbered through, and the edges between their events.
pub(super) struct Order {
    /// Number of rank r's first step; one more entry than ranks.
    first: Vec<u32>,
    /// Events that come before each event in every execution.
    before: Vec<Vec<Event>>,
    /// The receive that each send matches, and the other way round.
    partner: Vec<Option<u32>>,
}

impl Order {
    /// Matches sends with receives and collects the edges.
    pub(super) fn new(plans: &[RankPlan]) -> Result<Order, PlanError> {
        let mut first = vec![0u32];
        for plan in plans {
            let end = first[first.len() - 1] + plan.steps.len() as u32;
            first.push(end);
        }
        let steps = first[plans.len()] as usize;
        let mut order = Order { first, before: vec![Vec::new(); 2 * steps], partner: vec![None; steps] };
        // (step, elements) of each stream, in list order, by (from, to, class).
        let mut sends: Streams = BTreeMap::new();
        let mut receives: Streams = BTreeMap::new();
        for (rank, plan) in plans.iter().enumerate() {
            for (index, step) in plan.steps.iter().enumerate() {
                let number = order.number(rank, index);
                let deps = step.after.iter().map(|&d| complete(order.first[rank] + d));
                order.before[posted(number) as usize] = deps.collect();
                order.before[complete(number) as usize].push(posted(number));
                match step.action {
                    Action::Send { peer, src } => {
                        sends.entry((rank, peer, step.class)).or_default().push((number, src.len));
                    }
                    Action::Recv { peer, dst } | Action::RecvReduce { peer, dst, .. } => {
                        receives.entry((peer, rank, step.class)).or_default().push((number, dst.len));
                    }
                    Action::Copy { .. } => {}
                }
            }
        }
        let streams: BTreeSet<Stream> = sends.keys().chain(receives.keys()).copied().collect();
        for stream in streams {
            let of = |all: &Streams| all.get(&stream).cloned().unwrap_or_default();
            order.join(stream.0, stream.1, &of(&sends), &of(&receives))?;
        }
        Ok(order)
    }

    fn join(
        &mut self,
        from: usize,
        to: usize,
        sends: &[(u32, usize)],
        receives: &[(u32, usize)],
    ) -> Result<(), PlanError> {
        if sends.len() != receives.len() {
            return Err(PlanError::Unmatched { from, to, sends: sends.len(), receives: receives.len() });
        }
        for (message, (&(send, sent), &(receive, expected))) in sends.iter().zip(receives).enumerate() {
            if sent != expected {
                return Err(PlanError::LengthMismatch { from, to, message, sent, expected });
            }
            self.partner[send as usize] = Some(receive);
            self.partner[receive as usize] = Some(send);
            self.before[complete(receive) as usize].push(posted(send));
        }
        for queue in [sends, receives] {
            for pair in queue.windows(2) {
                self.before[posted(pair[1].0) as usize].push(posted(pair[0].0));
            }
        }
        Ok(())
    }

    /// Number of a rank's step among all steps.
    pub(super) fn number(&self, rank: usize, step: usize) -> u32 {
        self.first[rank] + step as u32
    }

    /// Rank and index of a numbered step.
    pub(super) fn place(&self, number: u32) -> (usize, usize) {
        let rank = self.first.partition_point(|&first| first <= number) - 1;
        (rank, (number - self.first[rank]) as usize)
    }

    /// The step at the other end of the message.
    pub(super) fn partner(&self, number: u32) -> Option<u32> {
        self.partner[number as usize]
    }

    /// All events in an order that keeps every edge, a send's completion also behind the posting of
    /// its receive; or the circle that makes that impossible.
    pub(super) fn sorted(&self) -> Result<Vec<Event>, PlanError> {
        let mut waits = self.before.clone();
        for (number, partner) in self.partner.iter().enumerate() {
            if let Some(partner) = partner {
                // For a receive this repeats what is there.
                waits[complete(number as u32) as usize].push(posted(*partner));
            }
        }
        let mut behind: Vec<Vec<Event>> = vec![Vec::new(); waits.len()];
        for (event, before) in waits.iter().enumerate() {
            for &b in before {
                behind[b as usize].push(event as Event);
            }
        }
        let mut open: Vec<usize> = waits.iter().map(Vec::len).collect();
        let mut sorted: Vec<Event> = (0..waits.len() as Event).filter(|&e| open[e as usize] == 0).collect();
        let mut next = 0;
        while let Some(&event) = sorted.get(next) {
            next += 1;
            for &b in &behind[event as usize] {
                open[b as usize] -= 1;
                if open[b as usize] == 0 {
                    sorted.push(b);
                }
            }
        }
        match open.iter().position(|&waits| waits > 0) {
            None => Ok(sorted),
            Some(event) => {
                let (rank, step) = self.place(event as u32 / 2);
                Err(PlanError::CyclicWait { rank, step })
            }
        }
    }

    /// For every event, which of `width` marks lie at or before it.
    fn marks_before(&self, sorted: &[Event], width: usize, mark: impl Fn(Event) -> Option<usize>) -> Marks {
        let words = width.div_ceil(64).max(1);
        let mut bits = vec![0u64; words * self.before.len()];
        let mut row = vec![0u64; words];
        for &event in sorted {
            row.fill(0);
            for &before in &self.before[event as usize] {
                let from = before as usize * words;
                for (r, b) in row.iter_mut().zip(&bits[from..from + words]) {
                    *r |= b;
                }
            }
            if let Some(mark) = mark(event) {
                row[mark / 64] |= 1 << (mark % 64);
            }
            let at = event as usize * words;
            bits[at..at + words].copy_from_slice(&row);
        }
        Marks { words, bits }
    }

    /// Proves that every rank's last completion comes after every other rank's entry.
    pub(super) fn barrier(&self, plans: &[RankPlan], sorted: &[Event]) -> Result<(), PlanError> {
        let world = plans.len();
        let entered = self.marks_before(sorted, world, |e| Some(self.place(e / 2).0));
        for (rank, plan) in plans.iter().enumerate() {
            let heard = |other: usize| {
                (0..plan.steps.len()).any(|step| entered.contains(complete(self.number(rank, step)), other))
            };
            if let Some(absent) = (0..world).find(|&other| other != rank && !heard(other)) {
                return Err(PlanError::NotABarrier { rank, absent });
            }
        }
        Ok(())
    }
}

struct Marks {
    words: usize,
    bits: Vec<u64>,
}

impl Marks {
    fn contains(&self, event: Event, mark: usize) -> bool {
        self.bits[event as usize * self.words + mark / 64] >> (mark % 64) & 1 == 1
    }
}

/// Finds two steps of `rank` that touch the same memory, one of them writing, and that no order
/// keeps apart: neither is complete before the other is posted.
pub(super) fn access_conflict(
    plans: &[RankPlan],
    rank: usize,
    layout: &Layout,
    order: &Order,
    sorted: &[Event],
) -> Result<(), PlanError> {
    struct Access {
        step: usize,
        span: Span,
        /// Memory, and first element there.
        place: (Memory, usize),
        writes: bool,
    }
    let steps = &plans[rank].steps;
    let mut accesses: Vec<Access> = Vec::with_capacity(2 * steps.len());
    for (step, s) in steps.iter().enumerate() {
        let (read, written) = step_accesses(&s.action);
        let access = |writes| move |span: Span| Access { step, span, place: layout.place(span), writes };
        accesses.extend(read.map(access(false)));
        accesses.extend(written.map(access(true)));
    }
    accesses.retain(|a| a.span.len > 0);
    accesses.sort_by_key(|a| a.place);
    let number = |step: usize| order.number(rank, step);
    let done = order.marks_before(sorted, steps.len(), |event| {
        let (at, step) = order.place(event / 2);
        (at == rank && event % 2 == 1).then_some(step)
    });
    let ordered = |a: usize, b: usize| done.contains(posted(number(b)), a);
    for (i, a) in accesses.iter().enumerate() {
        let end = a.place.1 + a.span.len;
        for b in accesses[i + 1..].iter().take_while(|b| b.place < (a.place.0, end)) {
            if a.step == b.step || !(a.writes || b.writes) || ordered(a.step, b.step) || ordered(b.step, a.step) {
                continue;
            }
            let common = (end - b.place.1).min(b.span.len);
            return Err(PlanError::Hazard {
                rank,
                first: a.step.min(b.step),
                second: a.step.max(b.step),
                buffer: b.span.buffer,
                start: b.span.start,
                end: b.span.start + common,
            });
        }
    }
    Ok(())
}
