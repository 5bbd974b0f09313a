//! Builds the plans of all ranks at once, message by message, as one rank after another could carry them out.
//!
//! Owns the bookkeeping that every builder would need: where a rank holds its value of an element (its input
//! until something has landed in its output), and which steps a new one must wait for so that no outstanding
//! send is overwritten and nothing is read too early. Since each message only waits for earlier ones, plans
//! made here never wait in a circle. Never decides what is sent. Start at [`Composer::message`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::plan::{Action, Buffer, Class, RankPlan, Span};

/// What the receiver does with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Landing {
    /// It replaces what the receiver holds.
    Store,
    /// It is reduced with what the receiver holds.
    Reduce,
    /// As `Reduce`, and completes the elements.
    Finish,
}

/// Elements of one rank's output, up to `end`, that share one story.
#[derive(Debug, Clone)]
struct Piece {
    end: usize,
    /// Something has landed: the rank's value is here and no longer in its input.
    landed: bool,
    writer: Option<u32>,
    /// Sends of this place since it was written.
    readers: Vec<u32>,
}

/// One direction of one stream, seen from a rank: peer, whether it sends, class.
type Stream = (usize, bool, Class);

#[derive(Debug, Default)]
struct Rank {
    plan: RankPlan,
    /// The output by first element; covers it without gaps.
    output: BTreeMap<usize, Piece>,
    last: BTreeMap<Stream, u32>,
    /// What the next send of each stream has to wait for beside its data, and the streams that have done so.
    gate: Vec<u32>,
    through: BTreeSet<usize>,
}

/// Plans under construction.
#[derive(Debug)]
pub(super) struct Composer {
    ranks: Vec<Rank>,
    in_place: bool,
}

impl Composer {
    pub(super) fn new(world: usize, elements: usize, in_place: bool) -> Self {
        let rank = || {
            let all = Piece { end: elements, landed: false, writer: None, readers: Vec::new() };
            Rank { output: BTreeMap::from([(0, all)]), ..Rank::default() }
        };
        Self { ranks: (0..world).map(|_| rank()).collect(), in_place }
    }

    pub(super) fn finish(self) -> Vec<RankPlan> {
        self.ranks.into_iter().map(|rank| rank.plan).collect()
    }

    /// The last step of each stream of `class` at `rank`, sends and receives: once they are complete, so is
    /// what the rank has done in the class so far, but for messages that overtake one another.
    pub(super) fn last_of(&self, rank: usize, class: Class) -> Vec<u32> {
        self.ranks[rank].last.iter().filter(|((_, _, c), _)| *c == class).map(|(_, step)| *step).collect()
    }

    /// Sends of `rank` that are added from here on wait for `steps` too.
    pub(super) fn hold_sends(&mut self, rank: usize, steps: Vec<u32>) {
        let rank = &mut self.ranks[rank];
        rank.gate.extend(steps);
        rank.gate.sort_unstable();
        rank.gate.dedup();
        rank.through.clear();
    }

    /// Sends of `rank` that are added from here on wait for `steps`, and no longer for those of earlier calls.
    pub(super) fn hold_sends_for(&mut self, rank: usize, steps: Vec<u32>) {
        self.ranks[rank].gate.clear();
        self.hold_sends(rank, steps);
    }

    /// `from` sends its value of `range` to `to`. Returns the receiving steps: one, unless a part of the
    /// range has a story of its own.
    pub(super) fn message(
        &mut self,
        class: Class,
        from: usize,
        to: usize,
        range: Range<usize>,
        landing: Landing,
    ) -> Vec<u32> {
        let mut received = Vec::new();
        for part in self.uniform(from, to, range, landing) {
            let (buffer, _) = self.source(from, part.start);
            let src = Span { buffer, start: part.start, len: part.len() };
            self.send(class, from, to, src);
            received.push(self.receive(class, from, to, &part, landing));
        }
        received
    }

    /// Out of place, moves what has not landed from `rank`'s input to its output.
    pub(super) fn copy_input(&mut self, rank: usize, range: Range<usize>, finish: bool) {
        if self.in_place || range.is_empty() {
            return;
        }
        let src = Span { buffer: Buffer::Input, start: range.start, len: range.len() };
        let dst = Span { buffer: Buffer::Output, ..src };
        let step = self.ranks[rank].plan.push(Action::Copy { src, dst, finish }, Vec::new());
        self.land(rank, &range, step);
    }

    fn send(&mut self, class: Class, from: usize, to: usize, src: Span) {
        let range = src.start..src.end();
        let rank = &mut self.ranks[from];
        let mut after = Vec::new();
        if src.buffer == Buffer::Output {
            split(&mut rank.output, &range);
            after.extend(rank.output.range(range.clone()).filter_map(|(_, piece)| piece.writer));
        }
        if rank.through.insert(to * Class::ALL.len() + class as usize) {
            after.extend(&rank.gate);
        }
        let step = rank.plan.push_as(class, Action::Send { peer: to, src }, sorted(after));
        rank.last.insert((to, true, class), step);
        if src.buffer == Buffer::Output {
            rank.output.range_mut(range).for_each(|(_, piece)| piece.readers.push(step));
        }
    }

    fn receive(&mut self, class: Class, from: usize, to: usize, range: &Range<usize>, landing: Landing) -> u32 {
        let dst = Span { buffer: Buffer::Output, start: range.start, len: range.len() };
        let (held, _) = self.source(to, range.start);
        let action = match landing {
            Landing::Store => Action::Recv { peer: from, dst },
            Landing::Reduce | Landing::Finish => {
                let operand = Span { buffer: held, ..dst };
                Action::RecvReduce { peer: from, operand, dst, finish: landing == Landing::Finish }
            }
        };
        let rank = &mut self.ranks[to];
        split(&mut rank.output, range);
        let mut after = Vec::new();
        for (_, piece) in rank.output.range(range.clone()) {
            // A send of the piece waits for its writer, so waiting for the send covers both.
            if piece.readers.is_empty() {
                after.extend(piece.writer);
            } else {
                after.extend(&piece.readers);
            }
        }
        let step = rank.plan.push_as(class, action, sorted(after));
        rank.last.insert((from, false, class), step);
        self.land(to, range, step);
        step
    }

    fn land(&mut self, rank: usize, range: &Range<usize>, step: u32) {
        let output = &mut self.ranks[rank].output;
        split(output, range);
        let starts: Vec<usize> = output.range(range.clone()).map(|(start, _)| *start).collect();
        starts.iter().for_each(|start| drop(output.remove(start)));
        if !range.is_empty() {
            let piece = Piece { end: range.end, landed: true, writer: Some(step), readers: Vec::new() };
            output.insert(range.start, piece);
        }
    }

    /// Where `rank` holds its value of the element, and where the next story begins.
    fn source(&self, rank: usize, element: usize) -> (Buffer, usize) {
        let held = self.ranks[rank].output.range(..=element).next_back();
        let (landed, end) = held.map_or((false, usize::MAX), |(_, piece)| (piece.landed, piece.end));
        let buffer = if landed || self.in_place { Buffer::Output } else { Buffer::Input };
        (buffer, end)
    }

    /// Cuts `range` so that in each part the sender, and if it reduces the receiver, hold their value in one
    /// buffer.
    fn uniform(&self, from: usize, to: usize, range: Range<usize>, landing: Landing) -> Vec<Range<usize>> {
        let mut parts: Vec<(Range<usize>, (Buffer, Buffer))> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (source, source_end) = self.source(from, at);
            let (operand, operand_end) = self.source(to, at);
            let (operand, operand_end) =
                if landing == Landing::Store { (source, source_end) } else { (operand, operand_end) };
            let end = source_end.min(operand_end).min(range.end);
            match parts.last_mut() {
                Some((part, held)) if *held == (source, operand) => part.end = end,
                _ => parts.push((at..end, (source, operand))),
            }
            at = end;
        }
        parts.into_iter().map(|(part, _)| part).collect()
    }
}

fn sorted(mut steps: Vec<u32>) -> Vec<u32> {
    steps.sort_unstable();
    steps.dedup();
    steps
}

/// Makes both ends of `range` bounds of pieces.
fn split(output: &mut BTreeMap<usize, Piece>, range: &Range<usize>) {
    for at in [range.start, range.end] {
        let Some((_, piece)) = output.range_mut(..at).next_back() else { continue };
        if piece.end > at {
            let rest = piece.clone();
            piece.end = at;
            output.insert(at, rest);
        }
    }
}
