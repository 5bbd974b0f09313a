//! The loop of an I/O thread: commands and sockets in, finished requests out.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use r2cc::control::NicWatch;
use r2cc::repair::{PathState, ReceiverError, Time, Transition};
use r2cc::status::{LastTransition, Source};
use r2cc::topology::{Nic, PairOfNics};
use r2cc::transport::{self, IDLE_TICK, LinkEvent, Links, Side, Sink, TICK, now};
use serde_json::json;
use socket2::Socket;

use super::notice::{Notice, Peer, pass_on};
use super::{Command, Memory, Worker};
use crate::abi::Status;
use crate::comm::Comm;
use crate::view;
use crate::{events, hub, log};

const WAKE: u64 = 4 << 56;
const NETLINK: u64 = 5 << 56;
/// While requests are under way the thread looks for what comes, and does not sleep, for so long after the last thing
/// came: on a fast network waking up takes longer than what it wakes up for. Where processors are few they have better
/// things to do.
const SPIN_TIME: Time = Time::from_micros(500);
const SPIN_PROCESSORS: usize = 8;
/// A thread without links ends after this long.
const UNUSED_TIME: Time = Time::from_millis(100);
/// A closed receiver whose last words the other host has stays this long, should the sender's process be late.
const FAREWELL_TIME: Time = Time::from_millis(200);
/// Longest that a closed sender stays to have its goodbye delivered.
const GOODBYE_TIME: Time = Time::from_secs(1);
/// A NIC's failures are written to the log once in this time, however many links notice.
const LOG_TIME: Time = Time::from_secs(5);

const ALL_DOWN: &str = "all NICs that the two nodes share are down or unreachable";

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) comm: Arc<Comm>,
    pub(super) posted: u64,
    pub(super) posted_bytes: u64,
    pub(super) replayed_bytes: u64,
    pub(super) last_transition: Option<LastTransition>,
    over: u64,
    /// Slot and length of every message under way.
    pub(super) slots: BTreeMap<u64, (u8, u64)>,
    pub(super) peer: Peer,
    /// Messages that the other end has dealt with, once it has said goodbye.
    peer_left: Option<u64>,
    /// When NCCL closed it; what is left is to let the other end know.
    pub(super) closed_at: Option<Time>,
    /// Paths of an outgoing link.
    paths: usize,
    /// How each path that is out of service failed.
    failures: BTreeMap<u16, String>,
}

pub(super) struct Driver {
    worker: Arc<Worker>,
    nics: Vec<Nic>,
    nics_up: Vec<bool>,
    nic_watch: NicWatch,
    epoll: Arc<Epoll>,
    pub(super) links: Links,
    pub(super) entries: HashMap<usize, Entry>,
    /// How many entries NCCL has closed.
    closing: usize,
    bound: Time,
    /// See [`SPIN_TIME`].
    spin: Time,
    last_tick: Time,
    unused_since: Time,
    /// When a NIC's failures (false) and returns (true) were last written to the log.
    logged: BTreeMap<(Option<usize>, bool), Time>,
    pub(super) node: String,
    status: Source,
}

impl Driver {
    pub(super) fn new(worker: Arc<Worker>, nics: Vec<Nic>, listeners: Vec<Socket>) -> io::Result<Self> {
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let nic_watch = NicWatch::new()?;
        epoll.add(worker.wake.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        epoll.add(nic_watch.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, NETLINK))?;
        let tuning = hub::tuning();
        let bound = tuning.link_deadline;
        let links = Links::new(nics.clone(), tuning, Arc::clone(&epoll), listeners).map_err(io::Error::other)?;
        let at = now();
        Ok(Self {
            worker,
            nics_up: vec![true; nics.len()],
            nics,
            nic_watch,
            epoll,
            links,
            entries: HashMap::new(),
            closing: 0,
            bound,
            spin: hub::spin_time(SPIN_TIME, SPIN_PROCESSORS),
            last_tick: at,
            unused_since: at,
            logged: BTreeMap::new(),
            node: hub::host_name(),
            status: Source::register(),
        })
    }

    /// Runs until no links are left.
    pub(super) fn run(mut self) -> io::Result<()> {
        let mut ready = [EpollEvent::empty(); 64];
        let mut commands = Vec::new();
        let (mut tick, mut spin_until) = (TICK, Time::ZERO);
        loop {
            let wait = (self.last_tick + tick).saturating_sub(now());
            // Whoever submits need not wake a thread that is awake.
            let asleep = wait > Time::ZERO && now() >= spin_until && self.worker.begin_sleep();
            let millis = if asleep { wait.as_micros().div_ceil(1000) as i32 } else { 0 };
            let count = match self.epoll.wait(&mut ready, EpollTimeout::try_from(millis).unwrap_or(EpollTimeout::ZERO))
            {
                Ok(count) => count,
                Err(nix::Error::EINTR) => 0,
                Err(e) => return Err(e.into()),
            };
            if asleep {
                self.worker.end_sleep();
            }
            let at = now();
            for event in &ready[..count] {
                self.dispatch(at, event);
            }
            let ticked = at.saturating_sub(self.last_tick) >= tick;
            if ticked {
                self.last_tick = at;
                self.links.handle_tick(at);
                if self.status.is_asked() {
                    let comms = self.told();
                    self.status.answer(comms);
                }
            }
            self.worker.take_commands(&mut commands);
            let idle = count == 0 && commands.is_empty();
            commands.drain(..).for_each(|command| self.handle_command(at, command));
            if idle && !ticked {
                // Nothing has come that anything could follow from. Whoever is to bring it may want this processor.
                std::thread::yield_now();
                continue;
            }
            self.settle(at);
            if self.closing > 0 {
                self.let_go(at);
            }
            if !idle && self.entries.values().any(|entry| !entry.slots.is_empty()) {
                spin_until = at + self.spin;
            }
            tick = if self.links.needs_tick() || self.closing > 0 { TICK } else { IDLE_TICK };
            if !self.entries.is_empty() {
                self.unused_since = at;
            } else if at.saturating_sub(self.unused_since) >= UNUSED_TIME && self.worker.end_if_unused() {
                return Ok(());
            }
        }
    }

    fn dispatch(&mut self, at: Time, event: &EpollEvent) {
        match event.data() {
            // The counter only wakes us; the commands are in the inbox.
            WAKE => drop(self.worker.wake.read()),
            NETLINK => {
                for (nic, up) in self.nic_watch.changes(&self.nics) {
                    if std::mem::replace(&mut self.nics_up[nic], up) != up {
                        events::write(at, "nic", &json!({"nic": self.nics[nic].name, "up": up}));
                        self.links.handle_nic(at, nic, up);
                    }
                }
            }
            token if Links::owns(token) => {
                self.links.handle_ready(at, token, event.events().contains(EpollFlags::EPOLLOUT));
            }
            _ => {}
        }
    }

    fn handle_command(&mut self, at: Time, command: Command) {
        match command {
            Command::Expect { comm, number, name, key } => {
                let outcome = self.links.add_incoming(number, name, key);
                self.enter(&comm, number, 0, outcome.map_err(|error| error.to_string()));
            }
            Command::Open { comm, number, name, key, pairs } => {
                let paths = pairs.len();
                let outcome = self.links.add_outgoing(at, number, name, key, pairs);
                self.enter(&comm, number, paths, outcome.map_err(|error| error.to_string()));
                events::write(at, "open", &json!({"link": number, "paths": paths}));
            }
            Command::Send { number, slot, memory } => {
                self.post(number, slot, memory.bytes, |links| {
                    // SAFETY: NCCL keeps the memory as it is until the request is done or the link closed.
                    let source = unsafe { transport::Source::new(memory.at, memory.bytes) };
                    links.post_send(number, source).map(|message| message.0)
                });
            }
            Command::Receive { number, slot, memory: Memory { at, bytes } } => {
                self.post(number, slot, bytes, |links| {
                    // SAFETY: NCCL leaves the memory to us until the request is done or the link closed.
                    let sink = unsafe { Sink::raw(at, bytes) };
                    links.post_recv(number, sink).map(|message| message.0)
                });
            }
            Command::Tell { notice } => {
                for (number, entry) in &self.entries {
                    self.links.tell(entry.comm.side, *number, &notice);
                }
            }
            Command::Close { number, done } => {
                self.close(at, number);
                // Whoever asked waits for this.
                let _ = done.send(());
            }
        }
    }

    fn enter(&mut self, comm: &Arc<Comm>, number: usize, paths: usize, outcome: Result<(), String>) {
        if let Err(text) = outcome {
            comm.end(Status::InternalError, text);
        }
        let entry = Entry {
            comm: Arc::clone(comm),
            posted: 0,
            posted_bytes: 0,
            replayed_bytes: 0,
            last_transition: None,
            over: 0,
            slots: BTreeMap::new(),
            peer: Peer::default(),
            peer_left: None,
            closed_at: None,
            paths,
            failures: BTreeMap::new(),
        };
        self.entries.insert(number, entry);
    }

    fn post<E>(&mut self, number: usize, slot: u8, bytes: usize, post: impl FnOnce(&mut Links) -> Result<u64, E>) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        // A link that has failed is not there any more; its requests end with it.
        match post(&mut self.links) {
            Ok(message) => {
                entry.slots.insert(message, (slot, bytes as u64));
                entry.posted = message + 1;
                entry.posted_bytes += bytes as u64;
            }
            // One that the other end has left may have been let go before this was posted.
            Err(_) => entry.posted += u64::from(entry.peer_left.is_some()),
        }
        self.check_left(number);
    }

    /// Lets links and their events act on each other until nothing moves. Acknowledgements are written before a
    /// receive is told to be done, because NCCL may then close, and the process end.
    fn settle(&mut self, at: Time) {
        loop {
            self.links.flush(at);
            let mut moved = false;
            while let Some(event) = self.links.poll_event() {
                moved = true;
                self.handle_event(at, event);
            }
            if !moved {
                return;
            }
        }
    }

    fn handle_event(&mut self, at: Time, event: LinkEvent) {
        match event {
            LinkEvent::Sent { peer, message } => self.finish(peer, message.0, None),
            LinkEvent::Received { peer, message, bytes } => self.finish(peer, message.0, Some(bytes)),
            LinkEvent::Joined { peer } => {
                let Some(entry) = self.entries.get(&peer) else { return };
                entry.comm.set_usable(peer);
                let nics = self.nics.iter().map(|nic| nic.name.clone()).collect();
                let here = Notice::Here { rank: events::rank(), node: self.node.clone(), nics };
                self.tell(Side::Recv, peer, &here);
                self.tell_known(Side::Recv, peer);
            }
            LinkEvent::Broken { peer, error } => {
                let status = match error {
                    ReceiverError::Length { .. } => Status::InvalidUsage,
                    _ => Status::RemoteError,
                };
                let reason = format!("the sender broke the protocol: {error}");
                self.tell(Side::Recv, peer, &Notice::Failed { reason: reason.clone() });
                self.fail(at, peer, status, reason);
            }
            LinkEvent::Path { peer, pair, transition } => self.handle_transition(at, peer, &pair, transition),
            LinkEvent::Resumed { peer, pair, at } => {
                let Some(entry) = self.entries.get(&peer) else { return };
                let nic = self.nic_name(pair.from_nic);
                events::write(at, "resumed", &json!({"link": peer, "peer": entry.peer.rank, "nic": nic}));
            }
            LinkEvent::Dead { peer, since } => {
                let Some(entry) = self.entries.get(&peer) else { return };
                let paths: Vec<&str> = entry.failures.values().map(String::as_str).collect();
                let text = format!(
                    "no path to {} for {:.1} s: {}; hint: {ALL_DOWN}",
                    entry.peer.node.as_deref().unwrap_or("the receiver"),
                    at.saturating_sub(since).as_secs_f64(),
                    if paths.is_empty() { "none was ever up".to_owned() } else { paths.join(", ") },
                );
                self.fail(at, peer, Status::RemoteError, text);
            }
            // `check_dark` counts by itself, also while nothing is awaited.
            LinkEvent::Dark { peer, since } => {
                let seconds = at.saturating_sub(since).as_secs_f64();
                let text = format!("no working connection from the sender for {seconds:.1} s; hint: {ALL_DOWN}");
                self.fail(at, peer, Status::RemoteError, text);
            }
            LinkEvent::Gossip { peer, bytes } => self.handle_notice(at, peer, &bytes),
        }
    }

    fn finish(&mut self, number: usize, message: u64, bytes: Option<u64>) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        if let Some((slot, posted_bytes)) = entry.slots.remove(&message) {
            entry.over += 1;
            if entry.closed_at.is_none() {
                entry.comm.finish(slot, bytes.unwrap_or(posted_bytes));
            }
        }
        if entry.peer_left.is_some() {
            self.check_left(number);
        }
    }

    pub(super) fn nic_name(&self, nic: Option<usize>) -> &str {
        nic.and_then(|nic| self.nics.get(nic)).map_or("?", |nic| nic.name.as_str())
    }

    fn handle_transition(&mut self, at: Time, number: usize, pair: &PairOfNics, t: Transition) {
        let nic = self.nic_name(pair.from_nic).to_owned();
        let Some(entry) = self.entries.get_mut(&number) else { return };
        // Connections that end with their communicator are no faults.
        if entry.closed_at.is_some() || entry.peer_left.is_some() {
            return;
        }
        if t.to == PathState::Live {
            entry.comm.set_usable(number);
        }
        let to = pair.to.ip();
        let peer_nic = entry.peer_nic(pair);
        entry.remember(&nic, pair, &t);
        let event = json!({
            "link": number, "peer": entry.peer.rank, "peer_node": entry.peer.node, "nic": nic, "peer_nic": peer_nic,
            "from": t.from.word(), "to": t.to.word(),
            "cause": t.cause.word(), "noticed_ns": t.noticed_at.as_nanos() as u64, "replayed_bytes": t.replayed_bytes,
        });
        events::write(t.at, "path", &event);
        let cause = t.cause.word();
        let place = format!("{nic} ({}) to {peer_nic} ({to})", pair.from);
        match (t.from, t.to) {
            (_, PathState::Live) => drop(entry.failures.remove(&t.path.0)),
            (_, PathState::Failed) => drop(entry.failures.insert(t.path.0, format!("{place}: {cause}"))),
            _ => {}
        }
        let ends = (pair.from_nic.zip(pair.to_nic), entry.peer.rank);
        if let ((Some(nics), Some(rank)), PathState::Live | PathState::Failed) = (ends, t.to) {
            pass_on(view::learn_path(t.at, rank, nics, t.to == PathState::Live, cause));
        }
        let due = |logged: &mut BTreeMap<_, Time>| {
            let key = (pair.from_nic, t.to == PathState::Live);
            let due = logged.get(&key).is_none_or(|last| at.saturating_sub(*last) >= LOG_TIME);
            due.then(|| logged.insert(key, at)).is_some()
        };
        match (t.from, t.to) {
            (PathState::Live | PathState::Suspect | PathState::Opening, PathState::Failed) if due(&mut self.logged) => {
                let left = entry.paths.saturating_sub(entry.failures.len());
                log::warn(&format!("path {place} failed: {cause}; {left} of {} paths left", entry.paths));
            }
            (PathState::Proving, PathState::Live) if due(&mut self.logged) => {
                log::info(&format!("path {place} is back in service"));
            }
            _ => {}
        }
        // Links with nothing to send would notice only when they have: each at its own time, and late.
        if let (PathState::Suspect, Some(nic)) = (t.to, pair.from_nic) {
            self.links.handle_doubt(self.nics[nic].subnet());
        }
    }

    fn handle_notice(&mut self, at: Time, number: usize, bytes: &[u8]) {
        let Ok(notice) = serde_json::from_slice::<Notice>(bytes) else {
            tracing::warn!("a notice that does not parse");
            return;
        };
        let Some(entry) = self.entries.get_mut(&number) else { return };
        match notice {
            Notice::Here { rank, node, nics } => {
                entry.peer = Peer { rank, node: Some(node), nics };
                self.tell_known(Side::Send, number);
            }
            Notice::Known { knowledge } => pass_on(view::learn(at, knowledge)),
            Notice::Bye { messages } => {
                entry.peer_left = Some(messages);
                self.check_left(number);
            }
            Notice::Failed { reason } => {
                let text = format!("the other end failed: {reason}");
                self.fail(at, number, Status::RemoteError, text);
            }
        }
    }

    /// The other end has said goodbye: nothing more than it has dealt with will ever be.
    fn check_left(&mut self, number: usize) {
        let Some(entry) = self.entries.get(&number) else { return };
        let Some(messages) = entry.peer_left else { return };
        let side = entry.comm.side;
        if entry.posted > messages && entry.closed_at.is_none() {
            let text = format!("the {} closed the communicator with messages under way", other_end(side));
            self.fail(now(), number, Status::RemoteError, text);
        } else if self.links.is_idle(side, number) {
            self.retire(side, number);
        }
    }

    /// Closes a link, and leaves its sums in the event file.
    fn retire(&mut self, side: Side, number: usize) {
        if side == Side::Send
            && let Some((sums, paths_down)) = self.links.totals_of(number)
        {
            let body = json!({
                "link": number, "payload_bytes": sums.payload_bytes, "replayed_bytes": sums.replayed_bytes,
                "paths_suspected": sums.paths_suspected, "paths_failed": sums.paths_failed, "paths_down": paths_down,
            });
            events::write(now(), "totals", &body);
        }
        self.links.close_link(side, number);
    }

    fn tell(&mut self, side: Side, number: usize, notice: &Notice) {
        if let Ok(bytes) = serde_json::to_vec(notice) {
            self.links.tell(side, number, &bytes.into());
        }
    }

    fn tell_known(&mut self, side: Side, number: usize) {
        view::all().pieces().for_each(|knowledge| self.tell(side, number, &Notice::Known { knowledge }));
    }

    /// A communicator cannot go on. Its memory is not touched from here on.
    fn fail(&mut self, at: Time, number: usize, status: Status, text: String) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        events::write(at, "failure", &json!({"link": number, "reason": text}));
        entry.slots.clear();
        entry.comm.end(status, text);
        let side = entry.comm.side;
        self.links.flush(at);
        self.retire(side, number);
    }

    /// NCCL closes a communicator.
    fn close(&mut self, at: Time, number: usize) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        if entry.closed_at.is_some() {
            return;
        }
        let side = entry.comm.side;
        if !self.links.has(side, number) {
            self.entries.remove(&number);
            return;
        }
        let messages = entry.over;
        self.tell(side, number, &Notice::Bye { messages });
        self.links.flush(at);
        // A request under way dies with its link; one that is over may have an acknowledgement to deliver.
        if self.links.is_idle(side, number) && self.links.lane_count(side, number) > 0 {
            if let Some(entry) = self.entries.get_mut(&number) {
                entry.closed_at = Some(at);
                self.closing += 1;
            }
        } else {
            self.retire(side, number);
            self.entries.remove(&number);
        }
    }

    /// Lets closed links go that have nothing to tell any more.
    fn let_go(&mut self, at: Time) {
        let links = &self.links;
        let is_over = |number: &usize, entry: &Entry| {
            let Some(closed_at) = entry.closed_at else { return false };
            let (side, age) = (entry.comm.side, at.saturating_sub(closed_at));
            let delivered = !links.has_unacknowledged(side, *number);
            match side {
                Side::Send => delivered || age >= GOODBYE_TIME,
                Side::Recv => entry.peer_left.is_some() || (delivered && age >= FAREWELL_TIME) || age >= self.bound,
            }
        };
        let over: Vec<(usize, Side)> =
            self.entries.iter().filter(|(n, e)| is_over(n, e)).map(|(n, e)| (*n, e.comm.side)).collect();
        for (number, side) in over {
            self.retire(side, number);
            self.entries.remove(&number);
            self.closing -= 1;
        }
    }
}

fn other_end(side: Side) -> &'static str {
    match side {
        Side::Send => "receiver",
        Side::Recv => "sender",
    }
}
