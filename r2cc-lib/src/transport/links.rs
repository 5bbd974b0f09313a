//! The TCP links of one driver thread. Owns sockets and the memory map of posted messages; decides nothing
//! about paths (that is [`Sender`]'s) and nothing about what messages mean. A link is added and closed at any
//! time; its owner calls its other end by a number of its own, the *peer*.
//!
//! Call order: `post_*` and `handle_*`, then [`Links::flush`], then [`Links::poll_event`] until it is empty.

mod connecting;
mod receiving;
mod sharing;
mod writing;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use socket2::Socket;

use super::connection::Connection;
use super::handshake::{Key, LinkName};
use super::placement::{Corruption, Sink, Source};
use crate::repair::{
    Cause, Chunk, Lane, MessageSeq, PathId, PathReport, PathState, Receiver, ReceiverError, Sender, Time, Totals,
    Transition, Tuning,
};
use crate::topology::{Nic, PairOfNics};

/// Longest that a connection may take to say what it is for.
const ACCEPT_TIME: Time = Time::from_secs(1);
/// Longest that connecting and the handshake may take.
const CONNECT_TIME: Time = Time::from_millis(200);
/// Connections that have not yet said what they are for; more are refused.
const PENDING_MAX: usize = 256;
/// Paths that an incoming link may have; connections of others are refused.
const PATHS_MAX: u16 = 256;

const LISTENER: u64 = 1 << 56;
const CONNECTION: u64 = 2 << 56;
const INDEX: u64 = (1 << 56) - 1;

/// Something that the owner of the links has to know.
#[derive(Debug)]
pub enum LinkEvent {
    /// The message's buffer may be reused: every byte has arrived, or a copy is kept of what may be sent early.
    Sent {
        /// The receiving end.
        peer: usize,
        /// Which message of the link.
        message: MessageSeq,
    },
    /// The message has landed and has been applied.
    Received {
        /// The sending end.
        peer: usize,
        /// Which message of the link.
        message: MessageSeq,
        /// Its length as the sender stated it; at most what was posted.
        bytes: u64,
    },
    /// The first connection of an incoming link is open, or the first again after it had none.
    Joined {
        /// The sending end.
        peer: usize,
    },
    /// The other end of an incoming link breaks the protocol, and will do so again.
    Broken {
        /// The sending end.
        peer: usize,
        /// What it did.
        error: ReceiverError,
    },
    /// A path of an outgoing link changed its state.
    Path {
        /// The receiving end.
        peer: usize,
        /// The path.
        pair: PairOfNics,
        /// The change.
        transition: Transition,
    },
    /// The first bytes that a lost path owed have arrived over another.
    Resumed {
        /// The receiving end.
        peer: usize,
        /// The path that was lost.
        pair: PairOfNics,
        /// When they were acknowledged.
        at: Time,
    },
    /// An outgoing link has had no live path for the bound.
    Dead {
        /// The receiving end.
        peer: usize,
        /// When the last one was lost.
        since: Time,
    },
    /// An incoming link that messages are awaited on has had no working connection for the bound.
    Dark {
        /// The sending end.
        peer: usize,
        /// When the last one was lost.
        since: Time,
    },
    /// A control message came in over a data lane.
    Gossip {
        /// The other end of the link.
        peer: usize,
        /// What it says.
        bytes: Vec<u8>,
    },
}

/// A link cannot be made, or is not there.
#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    /// No rail in common.
    #[error("rank {me} and rank {peer} have no NICs on a common rail")]
    NoPath {
        /// This rank.
        me: usize,
        /// The other.
        peer: usize,
    },
    /// No such link, or one that has been closed.
    #[error("no link on side {side:?} has the number {peer}")]
    Unknown {
        /// Which end was meant.
        side: Side,
        /// The number.
        peer: usize,
    },
    /// Two links with one number or one name.
    #[error("a link {name:?} on side {side:?}, number {peer}, is there already")]
    Taken {
        /// Which end was meant.
        side: Side,
        /// The number.
        peer: usize,
        /// The name.
        name: LinkName,
    },
    /// The kernel refused.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Which end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// We send.
    Send,
    /// We receive.
    Recv,
}

/// State of an outgoing link for a status page.
#[derive(Clone, Debug)]
pub struct LinkStatus {
    /// The receiving end.
    pub peer: usize,
    /// Its paths.
    pub paths: Vec<(PairOfNics, PathReport)>,
}

#[derive(Debug)]
enum End {
    Send(Box<Sender>, Posted<Source>),
    Recv(Box<Receiver>, Posted<Sink>),
}

/// Memory of the messages that are not over yet, by number.
#[derive(Debug)]
struct Posted<T> {
    first: u64,
    places: VecDeque<Option<T>>,
}

impl<T> Posted<T> {
    fn new() -> Self {
        Self { first: 0, places: VecDeque::new() }
    }

    fn push(&mut self, place: T) {
        self.places.push_back(Some(place));
    }

    fn at(&mut self, message: u64) -> Option<&mut T> {
        let at = usize::try_from(message.checked_sub(self.first)?).ok()?;
        self.places.get_mut(at)?.as_mut()
    }

    fn remove(&mut self, message: u64) -> Option<T> {
        let at = message.checked_sub(self.first)?;
        let place = self.places.get_mut(at as usize)?.take();
        while matches!(self.places.front(), Some(None)) {
            self.places.pop_front();
            self.first += 1;
        }
        place
    }
}

/// A message whose receive is not posted yet: its chunks that count.
#[derive(Debug, Default)]
struct Early {
    chunks: Vec<(Chunk, Vec<u8>)>,
    complete: bool,
}

#[derive(Debug)]
struct Link {
    peer: usize,
    name: LinkName,
    key: Key,
    /// Given for an outgoing link, learnt from its connections for an incoming one.
    pairs: BTreeMap<PathId, PairOfNics>,
    end: End,
    /// Messages of an incoming link that came before their receives.
    early: BTreeMap<u64, Early>,
    /// Connections by lane, from the moment they are asked for or accepted.
    lanes: BTreeMap<Lane, u64>,
    /// The connection that the last chunk came on.
    recent: Option<u64>,
    /// Listed in [`Links::awaited`].
    awaited: bool,
    left: bool,
    dirty: bool,
    /// Sends on a NIC only what the links that do not yield leave of it.
    yields: bool,
    /// How much of its NIC a path of an outgoing link takes beside others, if it is told.
    weights: BTreeMap<PathId, f64>,
}

impl Link {
    fn new(peer: usize, name: LinkName, key: Key, pairs: BTreeMap<PathId, PairOfNics>, end: End) -> Self {
        let (early, lanes, weights) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (left, dirty, yields) = (false, true, false);
        Self { peer, name, key, pairs, end, early, lanes, recent: None, awaited: false, left, dirty, yields, weights }
    }
}

/// Damage to do to what is received.
#[derive(Debug)]
struct Damage {
    corruption: Corruption,
    bytes_before: u64,
}

impl Damage {
    /// Counts a chunk that has landed; the damage and its place if it falls into that chunk.
    fn due(pending: &mut Option<Self>, len: u32) -> Option<(Corruption, usize)> {
        let damage = pending.as_mut()?;
        if let Some(left) = damage.bytes_before.checked_sub(u64::from(len)) {
            damage.bytes_before = left;
            return None;
        }
        pending.take().map(|damage| (damage.corruption, damage.bytes_before as usize))
    }
}

/// Every link of one driver thread.
#[derive(Debug)]
pub struct Links {
    nics: Vec<Nic>,
    tuning: Arc<Tuning>,
    epoll: Arc<Epoll>,
    listeners: Vec<Socket>,
    connections: HashMap<u64, Box<Connection>>,
    next_id: u64,
    pending: usize,
    /// Slots; one whose link was closed is used again.
    links: Vec<Link>,
    vacant: Vec<usize>,
    send_to: BTreeMap<usize, usize>,
    recv_from: BTreeMap<usize, usize>,
    incoming: BTreeMap<LinkName, usize>,
    /// Incoming links on which receives have been posted, and may have landed since.
    awaited: Vec<usize>,
    events: VecDeque<LinkEvent>,
    damage: Option<Damage>,
    refused: u64,
}

impl Links {
    /// No links yet. `nics` are the local NICs that pairs refer to; `listeners` are non-blocking.
    ///
    /// # Errors
    /// If a listener cannot be watched.
    pub fn new(nics: Vec<Nic>, tuning: Tuning, epoll: Arc<Epoll>, listeners: Vec<Socket>) -> Result<Self, LinksError> {
        for (i, listener) in listeners.iter().enumerate() {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER | i as u64);
            epoll.add(listener, event).map_err(|e| LinksError::Io { what: "watch a listener", source: e.into() })?;
        }
        Ok(Self {
            nics,
            tuning: Arc::new(tuning),
            epoll,
            listeners,
            connections: HashMap::new(),
            next_id: 0,
            pending: 0,
            links: Vec::new(),
            vacant: Vec::new(),
            send_to: BTreeMap::new(),
            recv_from: BTreeMap::new(),
            incoming: BTreeMap::new(),
            awaited: Vec::new(),
            events: VecDeque::new(),
            damage: None,
            refused: 0,
        })
    }

    /// Whether an epoll token is one of ours.
    pub fn owns(token: u64) -> bool {
        matches!(token & !INDEX, LISTENER | CONNECTION)
    }

    fn find(&self, side: Side, peer: usize) -> Result<usize, LinksError> {
        let known = if side == Side::Send { &self.send_to } else { &self.recv_from };
        known.get(&peer).copied().ok_or(LinksError::Unknown { side, peer })
    }

    /// Whether there is such a link.
    pub fn has(&self, side: Side, peer: usize) -> bool {
        self.find(side, peer).is_ok()
    }

    /// Adds an outgoing link and starts to connect on each pair of NICs: path `i` is the `i`-th pair.
    ///
    /// # Errors
    /// If there is an outgoing link of that number.
    pub fn add_outgoing(
        &mut self,
        now: Time,
        peer: usize,
        name: LinkName,
        key: Key,
        pairs: Vec<PairOfNics>,
    ) -> Result<(), LinksError> {
        if self.send_to.contains_key(&peer) {
            return Err(LinksError::Taken { side: Side::Send, peer, name });
        }
        let end = End::Send(Box::new(Sender::new(Arc::clone(&self.tuning), pairs.len(), now)), Posted::new());
        let pairs = pairs.into_iter().enumerate().map(|(i, pair)| (PathId(i as u16), pair)).collect();
        let at = self.place(Link::new(peer, name, key, pairs, end));
        self.send_to.insert(peer, at);
        Ok(())
    }

    /// Adds an incoming link: connections that state its name and prove its key belong to it.
    ///
    /// # Errors
    /// If there is an incoming link of that number or name.
    pub fn add_incoming(&mut self, peer: usize, name: LinkName, key: Key) -> Result<(), LinksError> {
        if self.recv_from.contains_key(&peer) || self.incoming.contains_key(&name) {
            return Err(LinksError::Taken { side: Side::Recv, peer, name });
        }
        let end = End::Recv(Box::new(Receiver::new(Arc::clone(&self.tuning))), Posted::new());
        let at = self.place(Link::new(peer, name, key, BTreeMap::new(), end));
        self.recv_from.insert(peer, at);
        self.incoming.insert(name, at);
        Ok(())
    }

    fn place(&mut self, link: Link) -> usize {
        match self.vacant.pop() {
            Some(at) => {
                self.links[at] = link;
                at
            }
            None => {
                self.links.push(link);
                self.links.len() - 1
            }
        }
    }

    /// Takes a link away: its connections are closed, and the memory of its messages is not touched again.
    pub fn close_link(&mut self, side: Side, peer: usize) {
        let known = if side == Side::Send { &mut self.send_to } else { &mut self.recv_from };
        let Some(at) = known.remove(&peer) else { return };
        if side == Side::Recv {
            self.incoming.remove(&self.links[at].name);
            self.awaited.retain(|awaited| *awaited != at);
        }
        self.retire(at);
        self.vacant.push(at);
    }

    /// Closes the connections of a link for good.
    fn retire(&mut self, at: usize) {
        let link = &mut self.links[at];
        link.left = true;
        link.early.clear();
        match &mut link.end {
            End::Send(_, posted) => *posted = Posted::new(),
            End::Recv(_, posted) => *posted = Posted::new(),
        }
        let ids: Vec<u64> = std::mem::take(&mut link.lanes).into_values().collect();
        ids.into_iter().for_each(|id| drop(self.take(id)));
    }

    /// Whether an outgoing link has all its paths in service.
    pub fn is_whole(&self, peer: usize) -> bool {
        self.send_to.get(&peer).is_some_and(|at| match &self.links[*at].end {
            End::Send(sender, _) => sender.is_whole(),
            End::Recv(..) => false,
        })
    }

    /// Whether every path of an outgoing link is in service or out of it, and none still opening for the first time.
    pub fn is_settled(&self, peer: usize) -> bool {
        self.send_to.get(&peer).is_some_and(|at| match &self.links[*at].end {
            End::Send(sender, _) => {
                sender.has_live_path() && sender.path_reports().all(|p| p.state != PathState::Opening)
            }
            End::Recv(..) => false,
        })
    }

    /// An outgoing link that yields sends on a NIC only what the others leave of it: nothing while one of them
    /// has chunks to send that its window on that NIC holds back.
    pub fn set_yielding(&mut self, peer: usize, yields: bool) {
        if let Some(at) = self.send_to.get(&peer) {
            self.links[*at].yields = yields;
        }
    }

    /// Whether nothing is owed on a link: every message sent is acknowledged, every receive posted has landed.
    pub fn is_idle(&self, side: Side, peer: usize) -> bool {
        self.find(side, peer).is_ok_and(|at| match &self.links[at].end {
            End::Send(sender, _) => !sender.is_busy(),
            End::Recv(receiver, _) => !receiver.is_busy(),
        })
    }

    /// Connections of a link that are open or being made.
    pub fn lane_count(&self, side: Side, peer: usize) -> usize {
        self.find(side, peer).map_or(0, |at| self.links[at].lanes.len())
    }

    /// Whether bytes written on a link, or waiting to be, are not known to have reached the other host.
    pub fn has_unacknowledged(&self, side: Side, peer: usize) -> bool {
        let owes = |id| self.connections.get(id).is_some_and(|c| c.is_open() && (c.unsettled || c.has_pending()));
        self.find(side, peer).is_ok_and(|at| self.links[at].lanes.values().any(owes))
    }

    /// Damages what comes in when this many payload bytes have landed.
    pub fn corrupt(&mut self, corruption: Corruption, bytes_before: u64) {
        self.damage = Some(Damage { corruption, bytes_before });
    }

    /// Forgets damage that did not come to pass.
    pub fn end_corruption(&mut self) {
        self.damage = None;
    }

    /// Sums over all outgoing links.
    pub fn totals(&self) -> Totals {
        self.links.iter().fold(Totals::default(), |mut sum, link| {
            if let End::Send(sender, _) = &link.end {
                let t = sender.totals();
                sum.payload_bytes += t.payload_bytes;
                sum.replayed_bytes += t.replayed_bytes;
                sum.paths_suspected += t.paths_suspected;
                sum.paths_failed += t.paths_failed;
                sum.late_acks += t.late_acks;
            }
            sum
        })
    }

    /// Sums of one outgoing link, and how many of its paths are out of service.
    pub fn totals_of(&self, peer: usize) -> Option<(Totals, usize)> {
        match &self.links[*self.send_to.get(&peer)?].end {
            End::Send(sender, _) => {
                let down = |p: &PathReport| matches!(p.state, PathState::Failed | PathState::Proving);
                Some((sender.totals(), sender.path_reports().filter(down).count()))
            }
            End::Recv(..) => None,
        }
    }

    /// Connections refused because they were not ours.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// State of every outgoing link.
    pub fn status(&self) -> Vec<LinkStatus> {
        let outgoing = self.send_to.values().map(|at| &self.links[*at]).filter_map(|link| match &link.end {
            End::Send(sender, _) => Some((link, sender)),
            End::Recv(..) => None,
        });
        outgoing
            .map(|(link, sender)| LinkStatus {
                peer: link.peer,
                paths: link.pairs.values().cloned().zip(sender.path_reports()).collect(),
            })
            .collect()
    }

    /// A local NIC lost or regained its carrier or address.
    pub fn handle_nic(&mut self, now: Time, nic: usize, up: bool) {
        for link in self.links.iter_mut().filter(|link| !link.left) {
            let send = matches!(link.end, End::Send(..));
            let concerned = |p: &PairOfNics| (if send { p.from_nic } else { p.to_nic }) == Some(nic);
            for path in link.pairs.iter().filter(|(_, pair)| concerned(pair)).map(|(path, _)| *path) {
                match &mut link.end {
                    End::Send(sender, _) => {
                        if let Err(error) = sender.handle_nic(now, path, up) {
                            tracing::error!(%error, "NIC event");
                        }
                    }
                    End::Recv(receiver, _) if !up => receiver.handle_path_down(path, Cause::Carrier),
                    End::Recv(..) => {}
                }
                link.dirty = true;
            }
        }
    }

    /// Somebody reports trouble on a rail (a subnet): probe our paths on it.
    pub fn handle_doubt(&mut self, rail: std::net::Ipv4Addr) {
        for link in self.links.iter_mut().filter(|link| !link.left) {
            let End::Send(sender, _) = &mut link.end else { continue };
            for (path, pair) in &link.pairs {
                if pair.from_nic.is_some_and(|nic| self.nics[nic].subnet() == rail) {
                    sender.handle_doubt(*path);
                    link.dirty = true;
                }
            }
        }
    }

    /// Closes everything: no memory of a caller is touched from here on.
    pub fn abandon(&mut self) {
        (0..self.links.len()).for_each(|at| self.retire(at));
    }

    /// Sends a control message over every open lane of one link.
    pub fn tell(&mut self, side: Side, peer: usize, message: &Arc<[u8]>) {
        if let Ok(at) = self.find(side, peer) {
            self.tell_link(at, message);
        }
    }

    /// Sends a control message over every open lane.
    pub fn gossip(&mut self, message: &Arc<[u8]>) {
        (0..self.links.len()).for_each(|at| self.tell_link(at, message));
    }

    fn tell_link(&mut self, at: usize, message: &Arc<[u8]>) {
        let link = &mut self.links[at];
        for id in link.lanes.values() {
            if let Some(connection) = self.connections.get_mut(id)
                && connection.is_open()
            {
                connection.queue_gossip(message);
                link.dirty = true;
            }
        }
    }

    /// Whether anything waits for time to pass.
    pub fn needs_tick(&self) -> bool {
        self.connections.values().any(|c| c.unsettled || c.owes_ack || c.deadline.is_some())
            || self.links.iter().any(|link| match &link.end {
                End::Send(sender, _) => !link.left && !sender.is_whole(),
                End::Recv(receiver, _) => !link.left && receiver.is_dark(),
            })
    }

    /// Time has passed: deadlines, kernel progress, the machines' own clocks.
    pub fn handle_tick(&mut self, now: Time) {
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for id in ids {
            let Some(c) = self.connections.get_mut(&id) else { continue };
            if c.deadline.is_some_and(|d| now >= d) {
                self.lose(now, id, Cause::Silence);
                continue;
            }
            if c.owes_ack {
                c.acknowledge(now);
            }
            if !c.unsettled || !c.is_open() {
                continue;
            }
            let (lane, link) = (c.lane, c.link);
            match (c.progress(), link.map(|at| &mut self.links[at])) {
                (Ok((reading, rate)), Some(link)) => match &mut link.end {
                    End::Send(sender, _) => {
                        report(sender.handle_progress(now, lane, reading));
                        if let Some(bound) = rate.and_then(|rate| sender.handle_rate(now, lane, rate)) {
                            c.bound_outstanding(bound);
                        }
                    }
                    End::Recv(receiver, _) => receiver.handle_progress(now, lane, reading),
                },
                (Err(_), _) => self.lose(now, id, Cause::Connection),
                (Ok(_), None) => {}
            }
        }
        self.pace_paths();
        for link in self.links.iter_mut().filter(|link| !link.left) {
            link.dirty = true;
            match &mut link.end {
                End::Send(sender, _) => report(sender.handle_tick(now)),
                End::Recv(receiver, _) => receiver.handle_tick(now),
            }
        }
    }

    /// A socket of ours is ready.
    pub fn handle_ready(&mut self, now: Time, token: u64, writable: bool) {
        let index = token & INDEX;
        if token & !INDEX == LISTENER {
            self.accept(now, index as usize);
            return;
        }
        if writable
            && let Some(c) = self.connections.get_mut(&index)
            && let Some(link) = c.link
        {
            c.full = false;
            self.links[link].dirty = true;
        }
        self.read(now, index);
    }

    /// Next event.
    pub fn poll_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}

/// The machines refuse only what a broken driver does.
fn report<E: std::fmt::Display>(result: Result<(), E>) {
    if let Err(error) = result {
        tracing::error!(%error, "repair machine");
    }
}
