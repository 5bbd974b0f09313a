//! The engine of a communicator: drives the incoming links, the mesh and one plan at a time, and commands the
//! outgoing links, which have a thread of their own. One thread at a time drives it; [`Driving`] says which.

mod driving;
mod switching;
mod telling;

pub(crate) use driving::Driving;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::eventfd::EventFd;
use serde_json::json;

use crate::collective::{Buffers, Execution, Prepared};
use crate::communicator::Error;
use crate::control::{
    EventLog, Failure, FaultView, Gate, Gossip, Mesh, MeshEvent, NicWatch, PathFact, PathHealth, Statement, Switch,
};
use crate::dtype::{DType, ReduceOp};
use crate::pace::PaceWatch;
use crate::planner::Planner;
use crate::repair::{PathState, Time, Totals, Transition};
use crate::schedule::{Class, Schedule};
use crate::status::LastTransition;
use crate::topology::{Member, PairOfNics};
use crate::transport::{Corruption, IDLE_TICK, LinkEvent, LinkStatus, Links, RankLinks, Stream, TICK, now};

const WAKE: u64 = 4 << 56;
const NETLINK: u64 = 5 << 56;
/// How long a rank that closes waits for the goodbyes of the others.
const GOODBYE_TIME: Time = Time::from_secs(2);
/// How long a goodbye may take to come another way once a rank's control connection has closed.
const FAREWELL_TIME: Time = Time::from_millis(200);
/// Control messages remembered for each origin, to pass each on once.
const SEEN_MAX: usize = 4096;

/// A fault view is settled when it has not changed for this long.
const VIEW_TIME: Time = Time::from_millis(100);
/// Longest that a proposed schedule waits for its links; it works without those that are not there, only later.
const LINKS_TIME: Time = Time::from_secs(2);
/// How often a rank shows on the mesh that it is there; nobody counts on it, so a dead control network harms nothing.
const HEARTBEAT_TIME: Time = Time::from_millis(500);
/// How often the rates of paths are compared.
const PACE_TIME: Time = Time::from_millis(200);

/// Where the outcome of a request goes.
type Answer = SyncSender<Result<(), Error>>;

/// A request of the calling thread.
pub(crate) enum Command {
    /// Run a plan; the memory stays valid until the answer.
    Run { plan: Arc<Prepared>, buffers: Buffers, dtype: DType, op: ReduceOp, answer: Answer },
    /// Open the outgoing links of these streams and answer when all their paths are in service, or at the deadline.
    Connect { streams: Vec<Stream>, deadline: Time, answer: Answer },
    /// Damage what the next plan receives.
    Corrupt(Corruption),
    /// Sums and link states.
    Status(SyncSender<Status>),
    /// Finish in good order.
    Close(Answer),
}

/// What the engine tells about itself.
#[derive(Clone, Debug)]
pub struct Status {
    /// Sums over all outgoing links.
    pub totals: Totals,
    /// Outgoing links and their paths.
    pub links: Vec<LinkStatus>,
    /// Connections refused because they were not of this job.
    pub refused_connections: u64,
}

pub(crate) struct Engine {
    pub(crate) me: usize,
    pub(crate) roster: Arc<Vec<Member>>,
    pub(crate) epoll: Arc<Epoll>,
    pub(crate) links: RankLinks,
    pub(crate) mesh: Mesh,
    pub(crate) nic_watch: NicWatch,
    pub(crate) wake: Arc<EventFd>,
    pub(crate) commands: Receiver<Command>,
    pub(crate) log: EventLog,
    pub(crate) status: crate::status::Source,
    pub(crate) link_bound: Time,
    pub(crate) planner: Planner,
    pub(crate) gate: Arc<Gate<Schedule>>,
    pub(crate) state: State,
}

/// What changes while the engine runs.
pub(crate) struct State {
    running: Option<(Execution, Answer)>,
    /// Plans that have begun.
    begun: u64,
    last_transition: Option<LastTransition>,
    connecting: Option<(Vec<Stream>, Time, Answer)>,
    switch: Switch<Schedule>,
    /// Links that a proposed schedule needs, and when it has to do without those that are not there.
    preparing: Option<(u64, Vec<Stream>, Time)>,
    closing: Option<(Time, Answer)>,
    corruption: Option<Corruption>,
    failure: Option<Failure>,
    view: FaultView,
    view_told: String,
    view_due: Option<Time>,
    left: BTreeSet<usize>,
    /// Ranks whose control connection closed, and when they count as lost unless a goodbye has come.
    missed: BTreeMap<usize, Time>,
    seen: BTreeMap<usize, BTreeSet<u64>>,
    gossip_number: u64,
    nics_up: Vec<bool>,
    last_tick: Time,
    pace: PaceWatch,
    pace_due: Time,
    heartbeat_due: Time,
    done: bool,
}

impl State {
    /// `first` is the schedule that holds at the start.
    pub(crate) fn new(roster: &[Member], me: usize, first: Schedule) -> Self {
        Self {
            running: None,
            begun: 0,
            last_transition: None,
            connecting: None,
            switch: Switch::new(me, roster.len(), 0, first),
            preparing: None,
            closing: None,
            corruption: None,
            failure: None,
            view: FaultView::new(roster),
            view_told: String::new(),
            view_due: None,
            left: BTreeSet::new(),
            missed: BTreeMap::new(),
            seen: BTreeMap::new(),
            gossip_number: 0,
            nics_up: vec![true; roster[me].nics.len()],
            last_tick: Time::ZERO,
            pace: PaceWatch::default(),
            pace_due: Time::ZERO,
            heartbeat_due: Time::ZERO,
            done: false,
        }
    }
}

impl Engine {
    /// Watches what is to be watched.
    ///
    /// # Errors
    /// If the kernel refuses to watch a descriptor.
    fn start(&mut self) -> io::Result<()> {
        self.epoll.add(self.wake.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        self.epoll.add(self.nic_watch.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, NETLINK))?;
        self.mesh.watch(&self.epoll)?;
        self.log.write(now(), "start", &json!({"world": self.roster.len(), "members": *self.roster}));
        Ok(())
    }

    fn tick(&self) -> Time {
        if self.links.needs_tick() || self.state.closing.is_some() { TICK } else { IDLE_TICK }
    }

    /// Does what there is to do now: what is ready, what is due, what was asked for.
    fn turn(&mut self, ready: &[EpollEvent]) {
        let at = now();
        for event in ready {
            self.dispatch(at, event);
        }
        let waited = at.saturating_sub(self.state.last_tick);
        if waited >= TICK && waited >= self.tick() {
            self.state.last_tick = at;
            self.links.handle_tick(at);
            self.mesh.flush();
            if at >= self.state.heartbeat_due {
                self.state.heartbeat_due = at + HEARTBEAT_TIME;
                self.mesh.heartbeat();
                // No collective is under way by which it would show that the coordinator's host is gone.
                if self.state.switch.is_frozen() {
                    self.links.probe();
                }
            }
            self.check_deadlines(at);
            self.check_preparing(at);
            self.check_pace(at);
            self.tell_view(at);
            if self.status.is_asked() {
                self.status.answer(vec![self.told()]);
            }
        }
        self.read_commands(at);
        self.settle(at);
    }

    fn dispatch(&mut self, at: Time, event: &EpollEvent) {
        match event.data() {
            // The counter only wakes us; the commands are in the channel.
            WAKE => drop(self.wake.read()),
            NETLINK => {
                for (nic, up) in self.nic_watch.changes(&self.roster[self.me].nics) {
                    if std::mem::replace(&mut self.state.nics_up[nic], up) != up {
                        self.links.handle_nic(at, nic, up);
                        self.say(at, Statement::Nic { nic, up });
                    }
                }
            }
            token if Links::owns(token) => {
                self.links.handle_ready(at, token, event.events().contains(EpollFlags::EPOLLOUT));
            }
            token if Mesh::owns(token) => self.mesh.handle_ready(&self.epoll, token),
            _ => {}
        }
    }

    fn read_commands(&mut self, at: Time) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.handle_command(at, command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    // The communicator was dropped without a goodbye: the others must not wait for us.
                    self.state.done = true;
                    return;
                }
            }
        }
    }

    fn handle_command(&mut self, at: Time, command: Command) {
        // An answer nobody waits for any more may be dropped.
        match command {
            Command::Run { answer, .. } | Command::Connect { answer, .. } if self.state.failure.is_some() => {
                drop(answer.send(self.failed()));
            }
            Command::Run { plan, buffers, dtype, op, answer } => {
                self.links.share_rails(&plan.plan.shares);
                let execution = Execution::new(plan, buffers, dtype, op, self.roster.len());
                if let Some(corruption) = self.state.corruption.take() {
                    let bytes = execution.received_bytes() as f64 * corruption.position;
                    self.links.corrupt(corruption, bytes as u64);
                }
                self.state.running = Some((execution, answer));
                self.state.begun += 1;
            }
            Command::Connect { streams, deadline, answer } => {
                for stream in &streams {
                    if let Err(error) = self.links.open(*stream) {
                        drop(answer.send(Err(error.into())));
                        return;
                    }
                }
                self.state.connecting = Some((streams, deadline, answer));
            }
            Command::Corrupt(corruption) => self.state.corruption = Some(corruption),
            Command::Status(answer) => drop(answer.send(Status {
                totals: self.links.totals(),
                links: self.links.status().into_iter().map(|(_, status)| status).collect(),
                refused_connections: self.links.refused(),
            })),
            Command::Close(answer) => {
                self.say(at, Statement::Bye);
                self.state.left.insert(self.me);
                self.state.closing = Some((at + GOODBYE_TIME, answer));
            }
        }
    }

    fn failed(&self) -> Result<(), Error> {
        self.state.failure.clone().map_or(Ok(()), |failure| Err(Error::Failed(failure)))
    }

    fn check_deadlines(&mut self, at: Time) {
        self.state.missed.retain(|rank, _| !self.state.left.contains(rank));
        if let Some((&rank, _)) = self.state.missed.iter().find(|(_, due)| at >= **due) {
            let node = self.roster[rank].node.clone();
            self.give_up(at, Failure::RankLost { rank, node });
        }
        if self.links.is_broken() {
            self.give_up(at, Failure::RankFailed { rank: self.me, reason: "the sending thread has ended".into() });
        }
        let everybody = self.state.left.len() == self.roster.len();
        let over = self.state.failure.is_some() || everybody;
        if let Some((_, answer)) = self.state.closing.take_if(|(deadline, _)| over || at >= *deadline) {
            let t = self.links.totals();
            let totals = json!({
                "payload_bytes": t.payload_bytes, "replayed_bytes": t.replayed_bytes,
                "paths_suspected": t.paths_suspected, "paths_failed": t.paths_failed, "late_acks": t.late_acks,
                "refused_connections": self.links.refused(),
            });
            self.log.write(at, "close", &totals);
            drop(answer.send(self.failed()));
            self.state.done = true;
        }
        if let Some((streams, deadline, _)) = &self.state.connecting
            && (at >= *deadline || self.links.are_whole(streams))
            && let Some((_, _, answer)) = self.state.connecting.take()
        {
            drop(answer.send(Ok(())));
        }
    }

    /// Tells of paths that have become slow, or are no longer.
    fn check_pace(&mut self, at: Time) {
        if at < self.state.pace_due {
            return;
        }
        self.state.pace_due = at + PACE_TIME;
        let main = self.links.status().into_iter().filter(|(class, _)| *class == Class::Main);
        let main: Vec<LinkStatus> = main.map(|(_, status)| status).collect();
        for (peer, from_nic, to_nic, slow) in self.state.pace.changes(&main) {
            let health = if slow { PathHealth::Slow } else { PathHealth::Up };
            let fact = PathFact { from: self.me, to: peer, from_nic, to_nic, health, cause: "rate".into() };
            self.say(at, Statement::Path(fact));
        }
    }

    /// Lets events, plan and links act on each other until nothing moves.
    fn settle(&mut self, at: Time) {
        loop {
            if let Some((execution, _)) = &mut self.state.running
                && let Err(error) = execution.advance(&mut self.links)
            {
                self.give_up(at, Failure::RankFailed { rank: self.me, reason: error.to_string() });
            }
            self.links.flush(at);
            let mut moved = false;
            while let Some(event) = self.links.poll_event() {
                moved = true;
                self.handle_link_event(at, event);
            }
            while let Some(event) = self.mesh.poll_event() {
                moved = true;
                match event {
                    MeshEvent::Message(bytes) => self.hear(at, &bytes),
                    MeshEvent::Closed { rank } if self.state.left.contains(&rank) => {}
                    // Its goodbye may be on its way over the data lanes.
                    MeshEvent::Closed { rank } => drop(self.state.missed.insert(rank, at + FAREWELL_TIME)),
                }
            }
            moved |= self.act_on_switch(at);
            if self.state.running.as_ref().is_some_and(|(execution, _)| execution.is_complete())
                && let Some((_, answer)) = self.state.running.take()
            {
                self.links.end_corruption();
                drop(answer.send(Ok(())));
            }
            if !moved {
                return;
            }
        }
    }

    fn handle_link_event(&mut self, at: Time, event: LinkEvent) {
        match event {
            LinkEvent::Sent { peer: link, message } => {
                if let Some((execution, _)) = &mut self.state.running {
                    execution.handle_sent(Stream::of(link), message);
                }
            }
            LinkEvent::Received { peer: link, message, .. } => {
                if let Some((execution, _)) = &mut self.state.running {
                    execution.handle_received(Stream::of(link), message);
                }
            }
            LinkEvent::Path { peer: link, pair, transition } => {
                self.handle_transition(at, Stream::of(link).peer, &pair, transition);
            }
            LinkEvent::Resumed { peer: link, pair, at } => {
                let event = json!({"peer": Stream::of(link).peer, "nic": self.nic_name(self.me, pair.from_nic)});
                self.log.write(at, "resumed", &event);
            }
            LinkEvent::Dead { peer: link, .. } => self.handle_dead(at, self.me, Stream::of(link).peer),
            LinkEvent::Dark { peer: link, .. } => self.handle_dead(at, Stream::of(link).peer, self.me),
            LinkEvent::Gossip { bytes, .. } => self.hear(at, &bytes),
            LinkEvent::Joined { .. } => {}
            LinkEvent::Broken { peer: link, error } => {
                tracing::error!(peer = Stream::of(link).peer, %error, "protocol")
            }
        }
    }

    /// A link of this rank has had no working path for the bound. Nothing, if the other end has left.
    fn handle_dead(&mut self, at: Time, from: usize, to: usize) {
        let peer = if from == self.me { to } else { from };
        if self.state.left.contains(&peer) {
            return;
        }
        let node = |rank: usize| self.roster[rank].node.clone();
        let seconds = self.link_bound.as_secs();
        let failure = Failure::LinkDead { from, from_node: node(from), to, to_node: node(to), seconds };
        self.give_up(at, failure);
    }

    fn nic_name(&self, rank: usize, nic: Option<usize>) -> &str {
        nic.map_or("lo", |nic| self.roster[rank].nics[nic].name.as_str())
    }

    fn handle_transition(&mut self, at: Time, peer: usize, pair: &PairOfNics, t: Transition) {
        if self.state.left.contains(&peer) {
            return;
        }
        let event = json!({
            "peer": peer, "nic": self.nic_name(self.me, pair.from_nic), "peer_nic": self.nic_name(peer, pair.to_nic),
            "from": t.from.word(), "to": t.to.word(),
            "cause": t.cause.word(), "noticed_ns": t.noticed_at.as_nanos() as u64, "replayed_bytes": t.replayed_bytes,
        });
        self.log.write(t.at, "path", &event);
        self.remember(peer, pair, &t);
        let (Some(from_nic), Some(to_nic)) = (pair.from_nic, pair.to_nic) else { return };
        let health = match (t.from, t.to) {
            (PathState::Live | PathState::Suspect | PathState::Opening, PathState::Failed) => PathHealth::Down,
            (PathState::Proving, PathState::Live) => PathHealth::Up,
            _ => return,
        };
        let fact = PathFact { from: self.me, to: peer, from_nic, to_nic, health, cause: t.cause.word().into() };
        self.say(at, Statement::Path(fact));
    }

    /// Tells everybody, ourselves included.
    fn say(&mut self, at: Time, statement: Statement) {
        self.state.gossip_number += 1;
        let gossip = Gossip { origin: self.me, number: self.state.gossip_number, statement };
        self.take_in(at, gossip);
    }

    fn hear(&mut self, at: Time, bytes: &[u8]) {
        match serde_json::from_slice::<Gossip>(bytes) {
            Ok(gossip) if gossip.origin < self.roster.len() => self.take_in(at, gossip),
            Ok(_) => tracing::warn!("a control message of a rank outside the job"),
            Err(error) => tracing::warn!(%error, "a control message that does not parse"),
        }
    }

    fn take_in(&mut self, at: Time, gossip: Gossip) {
        let seen = self.state.seen.entry(gossip.origin).or_default();
        if seen.len() >= SEEN_MAX {
            seen.pop_first();
        }
        if !seen.insert(gossip.number) {
            return;
        }
        if let Ok(bytes) = serde_json::to_vec(&gossip) {
            self.mesh.broadcast(&bytes);
            self.links.gossip(&bytes.into());
        }
        match gossip.statement {
            Statement::Path(fact) => {
                if fact.health == PathHealth::Down
                    && let Some(nic) = self.roster.get(fact.from).and_then(|m| m.nics.get(fact.from_nic))
                {
                    self.links.handle_doubt(nic.subnet());
                }
                self.state.view.handle_path(&fact);
                self.state.view_due = Some(at + VIEW_TIME);
            }
            Statement::Nic { nic, up } => {
                self.state.view.handle_nic(gossip.origin, nic, up);
                self.state.view_due = Some(at + VIEW_TIME);
            }
            Statement::Switch(message) => self.state.switch.handle(gossip.origin, *message),
            Statement::Bye => drop(self.state.left.insert(gossip.origin)),
            Statement::Abort(failure) => self.fail(at, failure),
        }
    }

    /// Writes the fault view down once it has settled: a fault is told path by path, and half of that story
    /// may point at the wrong component.
    fn tell_view(&mut self, at: Time) {
        if self.state.view_due.take_if(|due| at >= *due).is_none() {
            return;
        }
        let entries = self.state.view.entries();
        let text = serde_json::to_string(&entries).unwrap_or_default();
        if text != self.state.view_told {
            self.state.view_told = text;
            self.log.write(at, "fault-view", &json!({ "view": entries }));
            self.replan(&entries);
        }
    }

    /// This rank cannot go on: tell everybody why.
    fn give_up(&mut self, at: Time, failure: Failure) {
        if self.state.failure.is_none() {
            self.say(at, Statement::Abort(failure));
        }
    }

    /// The job is over. The first failure counts; memory is given back only when no lane can touch it.
    fn fail(&mut self, at: Time, failure: Failure) {
        if self.state.failure.is_some() {
            return;
        }
        self.log.write(at, "failure", &failure);
        self.links.flush(at);
        self.state.failure = Some(failure);
        self.gate.close();
        self.links.abandon();
        if let Some((_, answer)) = self.state.running.take() {
            drop(answer.send(self.failed()));
        }
        if let Some((_, _, answer)) = self.state.connecting.take() {
            drop(answer.send(self.failed()));
        }
    }
}
