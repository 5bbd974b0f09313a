//! Symbolic execution: what every element holds, as contributions of ranks instead of numbers.
//!
//! Owns the memory model: intervals of elements that share one [`Holding`]. Runs the steps in one
//! order only, which is enough because the hazard check has shown that every other order allowed
//! gives the same. Start at [`execute`].

use std::collections::BTreeMap;
use std::rc::Rc;

use super::check::PlanError;
use super::layout::{Goal, Layout, Memory as Place};
use super::order::Order;
use super::plan::{Action, RankPlan, Span};

/// What one element holds: element (index - shift) of each rank's input listed, once an entry. Indices are those of
/// the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holding {
    /// (rank, shift), sorted; a rank appears as often as it contributes.
    terms: Vec<(usize, i64)>,
    finished: bool,
}

impl Holding {
    fn moved(&self, by: i64) -> Holding {
        Holding { terms: self.terms.iter().map(|&(r, s)| (r, s + by)).collect(), finished: self.finished }
    }
}

/// Elements `start..end` hold the same, relative to their own index.
#[derive(Debug, Clone)]
struct Piece {
    start: usize,
    end: usize,
    holds: Rc<Holding>,
}

/// One buffer; intervals that nothing has written are absent.
#[derive(Debug, Default)]
struct Memory {
    /// By first element.
    pieces: BTreeMap<usize, Piece>,
}

impl Memory {
    /// The pieces within `start..end`, clipped, or the first gap.
    fn read(&self, start: usize, end: usize) -> Result<Vec<Piece>, (usize, usize)> {
        let mut found = Vec::new();
        let mut at = start;
        let from = self.pieces.range(..=start).next_back();
        let from = from.map_or(start, |(first, _)| *first);
        for piece in self.pieces.range(from..end).map(|(_, piece)| piece) {
            if piece.end <= at {
                continue;
            }
            if piece.start > at {
                return Err((at, piece.start));
            }
            found.push(Piece { start: at, end: piece.end.min(end), holds: Rc::clone(&piece.holds) });
            at = piece.end.min(end);
        }
        if at < end {
            return Err((at, end));
        }
        Ok(found)
    }

    fn write(&mut self, start: usize, end: usize, pieces: Vec<Piece>) {
        if start == end {
            return;
        }
        let from = self.pieces.range(..=start).next_back();
        let from = from.map_or(start, |(first, _)| *first);
        let touched: Vec<usize> = self.pieces.range(from..end).map(|(key, _)| *key).collect();
        for key in touched {
            let Some(piece) = self.pieces.remove(&key) else {
                continue;
            };
            let keep = [(piece.start, piece.end.min(start)), (piece.start.max(end), piece.end)];
            for (start, end) in keep.into_iter().filter(|(start, end)| start < end) {
                let holds = Rc::clone(&piece.holds);
                self.pieces.insert(start, Piece { start, end, holds });
            }
        }
        self.pieces.extend(pieces.into_iter().map(|p| (p.start, p)));
    }
}

/// Pieces of a message as they lie at its destination.
fn shifted(pieces: &[Piece], from: usize, to: usize) -> Vec<Piece> {
    let by = to as i64 - from as i64;
    pieces
        .iter()
        .map(|piece| Piece {
            start: piece.start - from + to,
            end: piece.end - from + to,
            holds: if by == 0 { Rc::clone(&piece.holds) } else { Rc::new(piece.holds.moved(by)) },
        })
        .collect()
}

/// Runs the plans over contributions and compares every rank's output with the goal.
pub(super) fn execute(
    plans: &[RankPlan],
    goal: Goal,
    elements: usize,
    layouts: &[Layout],
    order: &Order,
    sorted: &[u32],
) -> Result<(), PlanError> {
    let mut world = World::new(goal, elements, layouts);
    // What each send has put on the wire, until its receive takes it.
    let mut wire: BTreeMap<u32, (usize, Vec<Piece>)> = BTreeMap::new();
    for &event in sorted {
        let (number, is_complete) = (event / 2, event % 2 == 1);
        let (rank, step) = order.place(number);
        let at = At { rank, step };
        match (plans[rank].steps[step].action, is_complete) {
            (Action::Send { src, .. }, false) => {
                wire.insert(number, (world.start(rank, src), world.read(at, src)?));
            }
            (Action::Recv { dst, .. } | Action::RecvReduce { dst, .. }, true) => {
                let message = order.partner(number).and_then(|send| wire.remove(&send));
                // The order puts the send's posting before this, and matching is one to one.
                let (from, pieces) = message.expect("a complete receive has its message");
                let incoming = shifted(&pieces, from, world.start(rank, dst));
                let reduction = match plans[rank].steps[step].action {
                    Action::RecvReduce { operand, finish, .. } => Some((operand, finish)),
                    _ => None,
                };
                world.receive(at, dst, incoming, reduction)?;
            }
            (Action::Copy { src, dst, finish }, true) => {
                let mut pieces = shifted(&world.read(at, src)?, world.start(rank, src), world.start(rank, dst));
                if finish {
                    world.finish(at, &mut pieces)?;
                }
                world.write(rank, dst, pieces);
            }
            _ => {}
        }
    }
    world.compare()
}

#[derive(Clone, Copy)]
struct At {
    rank: usize,
    step: usize,
}

struct World<'a> {
    goal: Goal,
    elements: usize,
    layouts: &'a [Layout],
    /// Memories of each rank, by [`Place`].
    memory: Vec<[Memory; 3]>,
}

impl<'a> World<'a> {
    fn new(goal: Goal, elements: usize, layouts: &'a [Layout]) -> Self {
        let memory = layouts.iter().map(|_| Default::default()).collect();
        let mut world = World { goal, elements, layouts, memory };
        for (rank, layout) in layouts.iter().enumerate() {
            let (start, end) = (layout.input.start, layout.input.end);
            let holds = Rc::new(Holding { terms: vec![(rank, start as i64)], finished: false });
            let place = if layout.shared { Place::Output } else { Place::Input };
            world.memory[rank][place as usize].write(start, end, vec![Piece { start, end, holds }]);
        }
        world
    }

    fn ranks(&self) -> usize {
        self.layouts.len()
    }

    /// First element of a span in its memory.
    fn start(&self, rank: usize, span: Span) -> usize {
        self.layouts[rank].place(span).1
    }

    fn write(&mut self, rank: usize, span: Span, pieces: Vec<Piece>) {
        let (place, start) = self.layouts[rank].place(span);
        self.memory[rank][place as usize].write(start, start + span.len, pieces);
    }

    fn read(&mut self, at: At, span: Span) -> Result<Vec<Piece>, PlanError> {
        let (place, start) = self.layouts[at.rank].place(span);
        let pieces = self.memory[at.rank][place as usize].read(start, start + span.len);
        pieces.map_err(|(from, to)| PlanError::ReadsNothing {
            rank: at.rank,
            step: at.step,
            buffer: span.buffer,
            start: from - start + span.start,
            end: to - start + span.start,
        })
    }

    fn receive(
        &mut self,
        at: At,
        dst: Span,
        incoming: Vec<Piece>,
        reduction: Option<(Span, bool)>,
    ) -> Result<(), PlanError> {
        let mut result = incoming;
        if let Some((operand, finish)) = reduction {
            let operand_pieces = self.read(at, operand)?;
            let (from, to) = (self.start(at.rank, operand), self.start(at.rank, dst));
            result = self.combine(at, &shifted(&operand_pieces, from, to), &result)?;
            if finish {
                self.finish(at, &mut result)?;
            }
        }
        self.write(at.rank, dst, result);
        Ok(())
    }

    /// Both sides cover the same elements, in pieces of their own.
    fn combine(&self, at: At, left: &[Piece], right: &[Piece]) -> Result<Vec<Piece>, PlanError> {
        let mut result: Vec<Piece> = Vec::new();
        let (mut l, mut r) = (0, 0);
        while let (Some(a), Some(b)) = (left.get(l), right.get(r)) {
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            if a.holds.finished || b.holds.finished {
                return Err(finish_error(at, start, end, "reduced after being finished"));
            }
            let mut terms = [&a.holds.terms[..], &b.holds.terms[..]].concat();
            terms.sort_unstable();
            result.push(Piece { start, end, holds: Rc::new(Holding { terms, finished: false }) });
            l += usize::from(a.end == end);
            r += usize::from(b.end == end);
        }
        Ok(result)
    }

    fn finish(&self, at: At, pieces: &mut [Piece]) -> Result<(), PlanError> {
        for piece in pieces {
            let (start, end) = (piece.start, piece.end);
            if piece.holds.finished {
                return Err(finish_error(at, start, end, "finished twice"));
            }
            let ranks = piece.holds.terms.iter().map(|(rank, _)| *rank);
            if !ranks.eq(0..self.ranks()) {
                let reason = "finished before every rank's contribution is in, once";
                return Err(finish_error(at, start, end, reason));
            }
            piece.holds = Rc::new(Holding { finished: true, ..(*piece.holds).clone() });
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), PlanError> {
        // Dividing by one rank is nothing, so a world of one may leave it out.
        let must_finish = self.goal.reduces() && self.ranks() > 1;
        let may_finish = self.goal.reduces();
        for (rank, (memory, layout)) in self.memory.iter().zip(self.layouts).enumerate() {
            let base = layout.output.start;
            let wrong = |start, end, found: String| PlanError::WrongResult {
                rank,
                start: start - base,
                end: end - base,
                found,
            };
            for (range, terms) in self.goal.wanted(rank, self.ranks(), self.elements) {
                let (start, end) = (base + range.start, base + range.end);
                let pieces = memory[Place::Output as usize]
                    .read(start, end)
                    .map_err(|(start, end)| wrong(start, end, "nothing was written".to_owned()))?;
                let wanted: Vec<(usize, i64)> =
                    terms.iter().map(|&(rank, element)| (rank, start as i64 - element as i64)).collect();
                for Piece { start, end, holds } in pieces {
                    if holds.terms != wanted {
                        return Err(wrong(start, end, described(&holds.terms, &wanted)));
                    }
                    if (must_finish && !holds.finished) || (!may_finish && holds.finished) {
                        let found = if holds.finished { "finished" } else { "not finished" };
                        return Err(wrong(start, end, found.to_owned()));
                    }
                }
            }
        }
        Ok(())
    }
}

/// The contributions held, by how far each is from where it belongs.
fn described(terms: &[(usize, i64)], wanted: &[(usize, i64)]) -> String {
    let right = |rank: usize| wanted.iter().find(|(r, _)| *r == rank).map(|(_, shift)| *shift);
    let terms: Vec<String> = terms
        .iter()
        .map(|&(rank, shift)| match right(rank) {
            Some(right) if right == shift => format!("rank {rank}"),
            Some(right) => format!("rank {rank} moved by {}", shift - right),
            None => format!("rank {rank}, which does not belong there"),
        })
        .collect();
    format!("hold the contributions of {}", terms.join(", "))
}

fn finish_error(at: At, start: usize, end: usize, reason: &'static str) -> PlanError {
    PlanError::Finish { rank: at.rank, step: at.step, start, end, reason }
}
