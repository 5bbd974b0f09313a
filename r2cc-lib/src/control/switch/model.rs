//! Every state that three ranks with two communicators can reach while they switch, searched without exception.
//!
//! The ranks call the two communicators in opposite order and never wait for each other inside a call (a GPU does
//! that), a fault may come at any moment and another one after it, any message may overtake any other, and in some
//! searches a rank is lost at any moment, the coordinator too. Owns the world around [`Switch`]: threads, gates,
//! messages on their way, and planted faults in them. No state may hang, no two ranks may take different schedules
//! for one collective. Start at [`search`].

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

const RANKS: usize = 3;
/// Collectives of each rank on each communicator.
const CALLS: u64 = 1;
/// Reaching it means that the search is not finite.
const STATES_MAX: usize = 8_000_000;

type Message = SwitchMessage<char>;

/// A fault that is planted in the world around the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// A rank answers with its count, but its gate stays open.
    GateStaysOpen,
    /// A commit is for the highest count, not for the one after it.
    CommitOneEarly,
    /// The coordinator answers the freeze for all.
    DoesNotWaitForAnswers,
    /// A rank answers a freeze only when no collective of its own is under way.
    WaitsForCollectives,
    /// A rank that has frozen does not thaw when a commit ends it.
    StaysFrozen,
    /// A rank decides by itself: it thaws once it has answered.
    ThawsByItself,
    /// A proposal does not say what was committed last.
    ForgetsLastCommit,
    /// A lost rank is not told to the others.
    LossIsNotTold,
}

/// What a search looks at.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    /// Faults that the coordinator of each communicator may notice, one after the other.
    faults: [usize; 2],
    /// Whether a rank, any one, may be lost.
    loss: bool,
    planted: Planted,
}

/// A communicator on one rank.
#[derive(Debug, Clone, Hash)]
struct End {
    switch: Switch<char>,
    frozen: bool,
    calls: u64,
    adopted: Vec<(u64, char)>,
    /// Answers a freeze when no collective is under way: a planted fault.
    answers_later: Option<u64>,
}

#[derive(Debug, Clone, Hash)]
struct Rank {
    ends: [End; 2],
    /// Next of its calls.
    at: usize,
    lost: bool,
    failed: bool,
}

#[derive(Debug, Clone, Hash)]
struct State {
    ranks: Vec<Rank>,
    /// Communicator, from, to, message; sorted, for the order means nothing.
    flying: Vec<(usize, usize, usize, Message)>,
    /// Faults not yet noticed.
    faults: [usize; 2],
    /// Schedule of each collective, by communicator, as the first rank to start it took it.
    taken: [Vec<char>; 2],
    told: bool,
}

/// What a search has found.
#[derive(Debug, Default)]
struct Found {
    states: usize,
    /// States that nothing leaves.
    ends: usize,
    /// Ends in which some collective took a new schedule.
    switched: usize,
    /// Ends with a typed error.
    failures: usize,
    /// States in which a call waited at a frozen gate.
    waited: usize,
    wrong: Option<String>,
}

fn coordinator(communicator: usize) -> usize {
    communicator
}

/// The communicator of a rank's n-th call: rank 1 has the opposite order of the others.
fn called(rank: usize, at: usize) -> usize {
    (at + usize::from(rank == 1)) % 2
}

impl State {
    fn new(scenario: Scenario) -> Self {
        let end = |me: usize, communicator: usize| End {
            switch: Switch::new(me, RANKS, coordinator(communicator), 'r'),
            frozen: false,
            calls: 0,
            adopted: Vec::new(),
            answers_later: None,
        };
        let rank = |me: usize| Rank { ends: [end(me, 0), end(me, 1)], at: 0, lost: false, failed: false };
        Self {
            ranks: (0..RANKS).map(rank).collect(),
            flying: Vec::new(),
            faults: scenario.faults,
            taken: [Vec::new(), Vec::new()],
            told: false,
        }
    }

    fn alive(&self, rank: usize) -> bool {
        !self.ranks[rank].lost && !self.ranks[rank].failed
    }

    fn has_finished(&self, rank: usize) -> bool {
        self.ranks[rank].at as u64 == 2 * CALLS
    }

    /// Carries out what the machine of this rank asks for.
    fn act(&mut self, communicator: usize, rank: usize, planted: Planted) {
        while let Some(action) = self.ranks[rank].ends[communicator].switch.poll_action() {
            let end = &mut self.ranks[rank].ends[communicator];
            match action {
                SwitchAction::Say(message) => self.say(communicator, rank, message, planted),
                SwitchAction::Prepare { epoch, .. } => end.switch.handle_prepared(epoch),
                SwitchAction::Freeze { epoch } => {
                    end.frozen = planted != Planted::GateStaysOpen;
                    if planted == Planted::WaitsForCollectives {
                        end.answers_later = Some(epoch);
                    } else {
                        end.switch.handle_frozen(epoch, end.calls);
                    }
                    if planted == Planted::ThawsByItself {
                        end.frozen = false;
                    }
                }
                SwitchAction::Adopt(commit) => end.adopted.push((commit.at, commit.schedule)),
                SwitchAction::Thaw => {
                    end.answers_later = None;
                    end.frozen = end.frozen && planted == Planted::StaysFrozen;
                }
            }
        }
    }

    fn say(&mut self, communicator: usize, from: usize, mut message: Message, planted: Planted) {
        match (&mut message, planted) {
            (SwitchMessage::Prepare { last, .. }, Planted::ForgetsLastCommit) => *last = None,
            (SwitchMessage::Commit(commit), Planted::CommitOneEarly) => commit.at = commit.at.saturating_sub(1).max(1),
            _ => {}
        }
        // Only the coordinator listens to answers.
        let is_answer = matches!(message, SwitchMessage::Ready { .. } | SwitchMessage::Frozen { .. });
        let decides = coordinator(communicator);
        for to in (0..RANKS).filter(|&to| to != from && (!is_answer || to == decides)) {
            self.flying.push((communicator, from, to, message.clone()));
        }
        self.flying.sort_by_cached_key(fingerprint);
        let forges = planted == Planted::DoesNotWaitForAnswers && from == decides;
        let others = (0..RANKS).filter(|&other| other == from || forges);
        for other in others.collect::<Vec<_>>() {
            if other == from || matches!(message, SwitchMessage::Frozen { .. }) {
                self.ranks[from].ends[communicator].switch.handle(other, message.clone());
            }
        }
    }

    /// A collective is under way that this rank has started and another has not.
    fn is_under_way(&self, communicator: usize, rank: usize) -> bool {
        let calls = |rank: &Rank| rank.ends[communicator].calls;
        self.ranks.iter().any(|other| calls(other) < calls(&self.ranks[rank]))
    }

    /// The next call of a rank starts; tells whether two ranks differ.
    fn call(&mut self, rank: usize) -> Result<(), String> {
        let communicator = called(rank, self.ranks[rank].at);
        let caller = &mut self.ranks[rank];
        caller.at += 1;
        let end = &mut caller.ends[communicator];
        end.calls += 1;
        let number = end.calls;
        let schedule = end.adopted.iter().rev().find(|(at, _)| *at <= number).map_or('r', |(_, schedule)| *schedule);
        let taken = &mut self.taken[communicator];
        match taken.get(number as usize - 1) {
            None => taken.push(schedule),
            Some(first) if *first != schedule => {
                return Err(format!("communicator {communicator} call {number}: {first} and {schedule}"));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// All states that one event away; an error where ranks differ.
    fn next(&self, scenario: Scenario) -> Vec<Result<State, String>> {
        let planted = scenario.planted;
        let mut next = Vec::new();
        for rank in (0..RANKS).filter(|&rank| self.alive(rank)) {
            let communicator = called(rank, self.ranks[rank].at);
            if !self.has_finished(rank) && !self.ranks[rank].ends[communicator].frozen {
                let mut state = self.clone();
                next.push(state.call(rank).map(|()| state));
            }
            for communicator in 0..2 {
                if let Some(epoch) = self.ranks[rank].ends[communicator].answers_later
                    && !self.is_under_way(communicator, rank)
                {
                    let mut state = self.clone();
                    let end = &mut state.ranks[rank].ends[communicator];
                    end.answers_later = None;
                    end.switch.handle_frozen(epoch, end.calls);
                    state.act(communicator, rank, planted);
                    next.push(Ok(state));
                }
            }
            if self.ranks.iter().any(|other| other.lost) && planted != Planted::LossIsNotTold {
                let mut state = self.clone();
                state.ranks[rank].failed = true;
                state.flying.retain(|(_, _, to, _)| *to != rank);
                next.push(Ok(state));
            }
        }
        for communicator in 0..2 {
            let decides = coordinator(communicator);
            if self.faults[communicator] > 0 && self.alive(decides) {
                let mut state = self.clone();
                let schedule = ['z', 'b', 'a'][state.faults[communicator].min(2)];
                state.faults[communicator] -= 1;
                state.ranks[decides].ends[communicator].switch.propose(schedule);
                state.act(communicator, decides, planted);
                next.push(Ok(state));
            }
        }
        for i in 0..self.flying.len() {
            let mut state = self.clone();
            let (communicator, from, to, message) = state.flying.remove(i);
            state.ranks[to].ends[communicator].switch.handle(from, message);
            state.act(communicator, to, planted);
            next.push(Ok(state));
        }
        if scenario.loss && !self.told {
            for rank in 0..RANKS {
                let mut state = self.clone();
                state.told = true;
                state.ranks[rank].lost = true;
                state.flying.retain(|(_, _, to, _)| *to != rank);
                next.push(Ok(state));
            }
        }
        next
    }

    /// What is wrong with a state that nothing leaves.
    fn hang(&self) -> Option<String> {
        for (rank, it) in self.ranks.iter().enumerate().filter(|(_, it)| !it.lost && !it.failed) {
            if !self.has_finished(rank) {
                return Some(format!("rank {rank} waits for ever before its call {}", it.at + 1));
            }
            if it.ends.iter().any(|end| end.frozen) {
                return Some(format!("rank {rank} is through, and a gate of its is shut for ever"));
            }
            let lost = self.ranks.iter().any(|other| other.lost);
            if lost {
                return Some(format!("rank {rank} never learns that another is lost"));
            }
        }
        let adopted = |rank: &Rank| rank.ends.each_ref().map(|end| end.adopted.clone());
        let mut alive = self.ranks.iter().filter(|it| !it.lost && !it.failed).map(adopted);
        let first = alive.next()?;
        alive.any(|other| other != first).then(|| "ranks end with different schedules".to_owned())
    }
}

fn fingerprint(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Visits every state; stops at the first that is wrong.
fn search(scenario: Scenario) -> Found {
    let mut found = Found::default();
    let start = State::new(scenario);
    // Of a million states two share a fingerprint once in ten million searches.
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut open = vec![start];
    while let Some(state) = open.pop() {
        found.states += 1;
        assert!(found.states < STATES_MAX, "{scenario:?} has too many states");
        let next = state.next(scenario);
        found.waited += usize::from((0..RANKS).any(|rank| {
            let its = &state.ranks[rank];
            state.alive(rank) && !state.has_finished(rank) && its.ends[called(rank, its.at)].frozen
        }));
        if next.is_empty() {
            found.ends += 1;
            found.switched += usize::from(state.taken.iter().flatten().any(|schedule| *schedule != 'r'));
            found.failures += usize::from(state.ranks.iter().any(|rank| rank.failed));
            found.wrong = state.hang();
        }
        for next in next {
            match next {
                Ok(next) => {
                    if seen.insert(fingerprint(&next)) {
                        open.push(next);
                    }
                }
                Err(differ) => found.wrong = Some(differ),
            }
        }
        if found.wrong.is_some() {
            return found;
        }
    }
    found
}

fn sound(faults: [usize; 2], loss: bool) -> Found {
    let scenario = Scenario { faults, loss, planted: Planted::Nothing };
    let found = search(scenario);
    assert_eq!(found.wrong, None, "{scenario:?} after {} states", found.states);
    println!("{scenario:?}: {found:?}");
    found
}

#[test]
fn no_state_hangs_and_no_two_ranks_differ_with_a_fault_in_each_phase() {
    let found = sound([1, 1], false);
    assert!(found.switched > 0 && found.waited > 0 && found.ends > found.switched, "{found:?}");
    let found = sound([2, 1], false);
    assert!(found.switched > 0 && found.waited > 0, "{found:?}");
}

/// Of one communicator the coordinator is lost, of the other another rank, or the third of both.
#[test]
fn with_a_rank_lost_at_any_moment_every_other_gets_its_error() {
    for faults in [[1, 1], [2, 0]] {
        let found = sound(faults, true);
        assert!(found.failures > 0 && found.waited > 0, "{found:?}");
    }
}

#[test]
fn every_planted_fault_is_found() {
    for (planted, faults, loss) in [
        (Planted::GateStaysOpen, [1, 0], false),
        (Planted::CommitOneEarly, [1, 0], false),
        (Planted::DoesNotWaitForAnswers, [1, 0], false),
        (Planted::WaitsForCollectives, [1, 1], false),
        (Planted::StaysFrozen, [1, 0], false),
        (Planted::ThawsByItself, [1, 0], false),
        (Planted::ForgetsLastCommit, [2, 0], false),
        (Planted::LossIsNotTold, [1, 0], true),
    ] {
        let found = search(Scenario { faults, loss, planted });
        assert!(found.wrong.is_some(), "{planted:?} went unseen in {} states", found.states);
        println!("{planted:?}: {:?} after {} states", found.wrong, found.states);
    }
}
