//! Going over to another schedule at the same collective on every rank, without ever waiting for a thread of
//! the application: prepare, freeze, commit.
//!
//! 1. The coordinator proposes a schedule; each rank prepares what it needs and says that it is ready.
//! 2. When all are, the coordinator asks each rank to freeze its count of collectives; a call that comes now
//!    waits at the entry, before anything is sent.
//! 3. When all counts are known, the schedule holds from the highest count + 1 on, and the ranks thaw.
//!
//! Only the coordinator decides. A rank that has frozen does not time out by itself: it learns the outcome, or
//! the communicator fails. A lost coordinator has no successor: a communicator that has lost a rank is over, and who
//! committed by the answers in its place might not know of a later proposal that has thawed others. A later proposal
//! ends an earlier one that has not been committed; because every proposal names the last commit, a rank that hears
//! the messages in another order comes to the same end.
//!
//! A pure state machine: it takes messages in and hands out what to do. Start at [`Switch`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

/// A schedule and the collective from which it holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Commit<S> {
    /// Number of the proposal, from 1.
    pub epoch: u64,
    /// Number of the collective, from 1.
    pub at: u64,
    /// What holds from there on.
    pub schedule: S,
}

/// What ranks tell each other. All messages reach all ranks; those of one rank may overtake each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "step")]
pub enum SwitchMessage<S> {
    /// Coordinator: get ready for this schedule.
    Prepare {
        /// Number of the proposal.
        epoch: u64,
        /// What is proposed.
        schedule: S,
        /// What was committed last.
        last: Option<Commit<S>>,
    },
    /// A rank has what the schedule needs.
    Ready {
        /// Number of the proposal.
        epoch: u64,
    },
    /// Coordinator: all are ready; freeze.
    Freeze {
        /// Number of the proposal.
        epoch: u64,
    },
    /// A rank starts no collective until it hears the outcome.
    Frozen {
        /// Number of the proposal.
        epoch: u64,
        /// Collectives that it has started.
        calls: u64,
    },
    /// Coordinator: it is decided.
    Commit(Commit<S>),
}

/// What the owner of the machine has to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SwitchAction<S> {
    /// Tell every rank, this one included.
    Say(SwitchMessage<S>),
    /// Get ready for a schedule, then call [`Switch::handle_prepared`].
    Prepare {
        /// Number of the proposal.
        epoch: u64,
        /// What is needed.
        schedule: S,
    },
    /// Start no collective from now on, and call [`Switch::handle_frozen`] with the number of those started.
    Freeze {
        /// Number of the proposal.
        epoch: u64,
    },
    /// The schedule is decided: take it over.
    Adopt(Commit<S>),
    /// Collectives may start again.
    Thaw,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Proposal<S> {
    epoch: u64,
    schedule: S,
    ready: BTreeSet<usize>,
    frozen: BTreeMap<usize, u64>,
    decided: bool,
}

/// One rank's side; on the coordinator also the decision.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Switch<S> {
    me: usize,
    world: usize,
    coordinator: usize,
    /// What holds until something is committed.
    first: S,
    /// Newest proposal heard of.
    epoch: u64,
    frozen: bool,
    committed: Option<Commit<S>>,
    proposal: Option<Proposal<S>>,
    actions: VecDeque<SwitchAction<S>>,
}

impl<S: Clone + PartialEq> Switch<S> {
    /// Nothing is under way, and `first` holds. `coordinator` decides for all `world` ranks.
    pub fn new(me: usize, world: usize, coordinator: usize, first: S) -> Self {
        let (committed, proposal, actions) = (None, None, VecDeque::new());
        Self { me, world, coordinator, first, epoch: 0, frozen: false, committed, proposal, actions }
    }

    /// What was committed last.
    pub fn committed(&self) -> Option<&Commit<S>> {
        self.committed.as_ref()
    }

    /// Whether this rank waits for the outcome of a proposal before it starts another collective.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Coordinator: propose a schedule, in place of what is proposed now. Without effect on other ranks, and if
    /// it is what is proposed already, or holds while nothing is.
    pub fn propose(&mut self, schedule: S) {
        if self.me != self.coordinator {
            return;
        }
        let open = self.proposal.as_ref().filter(|proposal| !proposal.decided).map(|proposal| &proposal.schedule);
        let holds = self.committed.as_ref().map_or(&self.first, |commit| &commit.schedule);
        if open.unwrap_or(holds) == &schedule {
            return;
        }
        let epoch = self.proposal.as_ref().map_or(0, |proposal| proposal.epoch) + 1;
        let (ready, frozen) = (BTreeSet::new(), BTreeMap::new());
        self.proposal = Some(Proposal { epoch, schedule: schedule.clone(), ready, frozen, decided: false });
        self.say(SwitchMessage::Prepare { epoch, schedule, last: self.committed.clone() });
    }

    /// A message of rank `from`, this one's own included.
    pub fn handle(&mut self, from: usize, message: SwitchMessage<S>) {
        match message {
            SwitchMessage::Prepare { epoch, schedule, last } => {
                if let Some(commit) = last {
                    self.adopt(commit);
                }
                if epoch > self.epoch {
                    self.epoch = epoch;
                    self.thaw();
                    self.actions.push_back(SwitchAction::Prepare { epoch, schedule });
                }
            }
            SwitchMessage::Freeze { epoch } => {
                if epoch == self.epoch && !self.frozen && self.is_open(epoch) {
                    self.frozen = true;
                    self.actions.push_back(SwitchAction::Freeze { epoch });
                }
            }
            SwitchMessage::Commit(commit) => self.adopt(commit),
            SwitchMessage::Ready { epoch } => {
                self.count(epoch, |proposal, world| proposal.ready.insert(from) && proposal.ready.len() == world)
            }
            SwitchMessage::Frozen { epoch, calls } => self.count(epoch, |proposal, world| {
                proposal.frozen.insert(from, calls).is_none() && proposal.frozen.len() == world
            }),
        }
    }

    /// What [`SwitchAction::Prepare`] asked for is there.
    pub fn handle_prepared(&mut self, epoch: u64) {
        if epoch == self.epoch && self.is_open(epoch) {
            self.say(SwitchMessage::Ready { epoch });
        }
    }

    /// The count of collectives stands still at `calls`.
    pub fn handle_frozen(&mut self, epoch: u64, calls: u64) {
        if epoch == self.epoch && self.frozen {
            self.say(SwitchMessage::Frozen { epoch, calls });
        }
    }

    /// Next thing to do.
    pub fn poll_action(&mut self) -> Option<SwitchAction<S>> {
        self.actions.pop_front()
    }

    /// Coordinator: counts an answer of the proposal under way; with the last one the next step follows.
    fn count(&mut self, epoch: u64, is_last: impl FnOnce(&mut Proposal<S>, usize) -> bool) {
        let Some(proposal) = self.proposal.as_mut().filter(|p| p.epoch == epoch && !p.decided) else { return };
        if !is_last(proposal, self.world) {
            return;
        }
        if proposal.frozen.len() < self.world {
            self.say(SwitchMessage::Freeze { epoch });
            return;
        }
        proposal.decided = true;
        let at = proposal.frozen.values().max().map_or(1, |calls| calls + 1);
        let commit = Commit { epoch, at, schedule: proposal.schedule.clone() };
        self.say(SwitchMessage::Commit(commit));
    }

    /// Whether a proposal has not been committed as far as this rank knows.
    fn is_open(&self, epoch: u64) -> bool {
        self.committed.as_ref().is_none_or(|commit| commit.epoch < epoch)
    }

    fn adopt(&mut self, commit: Commit<S>) {
        if !self.is_open(commit.epoch) {
            return;
        }
        self.committed = Some(commit.clone());
        let over = commit.epoch >= self.epoch;
        self.epoch = self.epoch.max(commit.epoch);
        self.actions.push_back(SwitchAction::Adopt(commit));
        if over {
            self.thaw();
        }
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            self.actions.push_back(SwitchAction::Thaw);
        }
    }

    fn say(&mut self, message: SwitchMessage<S>) {
        self.actions.push_back(SwitchAction::Say(message));
    }
}

crate::marks::mark! {
    /// Marks for tracers that this rank starts no more collectives until it hears from which on another schedule
    /// holds: called once by every freeze, after the count of collectives stands still at `calls` and before anybody
    /// is told.
    r2cc_switch_freeze(epoch, calls)
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    /// Three ranks that hear everything at once, in the order in which it is said.
    struct Job {
        ranks: Vec<Switch<char>>,
        calls: [u64; 3],
        adopted: Vec<Vec<(u64, char)>>,
        frozen: [bool; 3],
    }

    impl Job {
        fn new(calls: [u64; 3]) -> Self {
            let ranks = (0..3).map(|me| Switch::new(me, 3, 0, 'r')).collect();
            Self { ranks, calls, adopted: vec![Vec::new(); 3], frozen: [false; 3] }
        }

        /// `lose` says which messages do not reach a rank.
        fn run(&mut self, mut lose: impl FnMut(usize, &SwitchMessage<char>) -> bool) {
            while let Some((rank, action)) =
                (0..3).find_map(|rank| self.ranks[rank].poll_action().map(|action| (rank, action)))
            {
                match action {
                    SwitchAction::Say(message) => {
                        for (to, other) in self.ranks.iter_mut().enumerate() {
                            if !lose(to, &message) {
                                other.handle(rank, message.clone());
                            }
                        }
                    }
                    SwitchAction::Prepare { epoch, .. } => self.ranks[rank].handle_prepared(epoch),
                    SwitchAction::Freeze { epoch } => {
                        self.frozen[rank] = true;
                        self.ranks[rank].handle_frozen(epoch, self.calls[rank]);
                    }
                    SwitchAction::Adopt(commit) => self.adopted[rank].push((commit.at, commit.schedule)),
                    SwitchAction::Thaw => self.frozen[rank] = false,
                }
            }
        }
    }

    #[test]
    fn all_go_over_after_the_collective_that_the_furthest_has_started() {
        let mut job = Job::new([4, 5, 4]);
        job.ranks[1].propose('x');
        job.ranks[0].propose('a');
        job.ranks[0].propose('a');
        job.run(|_, _| false);
        assert_eq!(job.adopted, vec![vec![(6, 'a')]; 3]);
        assert_eq!(job.frozen, [false; 3]);
        job.ranks[0].propose('a');
        assert_eq!(job.ranks[0].poll_action(), None, "it holds already");
    }

    #[test]
    fn a_later_proposal_ends_one_that_is_stuck_and_thaws_its_ranks() {
        let mut job = Job::new([1, 1, 1]);
        job.ranks[0].propose('a');
        job.run(|_, message| matches!(message, SwitchMessage::Frozen { .. }));
        assert_eq!(job.frozen, [true; 3]);
        job.ranks[0].propose('b');
        job.run(|_, _| false);
        assert_eq!(job.adopted, vec![vec![(2, 'b')]; 3]);
        assert_eq!(job.frozen, [false; 3]);
    }

    /// Why a lost coordinator has no successor, not even one that has every answer.
    #[test]
    fn a_successor_that_commits_by_the_answers_differs_from_a_rank_that_a_later_proposal_has_thawed() {
        let mut job = Job::new([1, 1, 1]);
        job.ranks[0].propose('a');
        let mut answers = BTreeMap::new();
        job.run(|to, message| {
            if let (1, SwitchMessage::Frozen { epoch: 1, calls }) = (to, message) {
                answers.insert(answers.len(), *calls);
            }
            matches!(message, SwitchMessage::Frozen { .. })
        });
        assert_eq!((answers.len(), job.frozen), (3, [true; 3]), "rank 1 has every answer, the coordinator none");
        job.ranks[0].propose('b');
        job.run(|to, _| to == 1);
        assert!(!job.frozen[2], "it may start its second collective, by the old schedule");
        let at = answers.values().max().unwrap() + 1;
        job.ranks[1].handle(1, SwitchMessage::Commit(Commit { epoch: 1, at, schedule: 'a' }));
        job.run(|_, _| false);
        assert_eq!(job.adopted[1], [(2, 'a')], "and rank 1 would start its second by another");
    }

    #[test]
    fn a_commit_that_is_overtaken_by_the_next_proposal_is_learnt_from_it() {
        let mut job = Job::new([1, 2, 1]);
        job.ranks[0].propose('a');
        let mut late = Vec::new();
        job.run(|to, message| {
            let is_late = to == 2 && matches!(message, SwitchMessage::Commit(_));
            late.extend(is_late.then(|| message.clone()));
            is_late
        });
        assert!(job.adopted[2].is_empty());
        job.ranks[0].propose('b');
        job.calls = [5, 4, 2];
        job.run(|_, _| false);
        job.ranks[2].handle(0, late.remove(0));
        job.run(|_, _| false);
        assert_eq!(job.adopted, vec![vec![(3, 'a'), (6, 'b')]; 3]);
    }
}
