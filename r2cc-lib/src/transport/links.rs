//! All TCP links of one rank, driven on one thread. Owns sockets and the memory map of posted messages;
//! decides nothing about paths (that is [`Sender`]'s) and nothing about what messages mean.
//!
//! Call order: `post_*` and `handle_*`, then [`Links::flush`], then [`Links::poll_event`] until it is empty.

mod connecting;
mod receiving;
mod writing;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use socket2::Socket;

use super::connection::Connection;
use super::handshake::Key;
use super::placement::{Corruption, Sink, Source};
use crate::repair::{
    Cause, Lane, MessageSeq, PathId, PathReport, PathState, Receiver, Sender, Time, Totals, Transition, Tuning,
};
use crate::topology::{Member, PairOfNics, paths};

/// Longest that a connection may take to say what it is for.
const ACCEPT_TIME: Time = Time::from_secs(1);
/// Longest that connecting and the handshake may take.
const CONNECT_TIME: Time = Time::from_millis(200);
/// Connections that have not yet said what they are for; more are refused.
const PENDING_MAX: usize = 256;

const LISTENER: u64 = 1 << 56;
const CONNECTION: u64 = 2 << 56;
const INDEX: u64 = (1 << 56) - 1;

/// Something that the owner of the links has to know.
#[derive(Debug)]
pub enum LinkEvent {
    /// The message's buffer may be reused.
    Sent {
        /// Receiving rank.
        peer: usize,
        /// Which message of the link.
        message: MessageSeq,
    },
    /// The message has landed and has been applied.
    Received {
        /// Sending rank.
        peer: usize,
        /// Which message of the link.
        message: MessageSeq,
    },
    /// A path of an outgoing link changed its state.
    Path {
        /// Receiving rank.
        peer: usize,
        /// The path.
        pair: PairOfNics,
        /// The change.
        transition: Transition,
    },
    /// The first bytes that a lost path owed have arrived over another.
    Resumed {
        /// Receiving rank.
        peer: usize,
        /// The path that was lost.
        pair: PairOfNics,
        /// When they were acknowledged.
        at: Time,
    },
    /// An outgoing link has had no live path for the bound.
    Dead {
        /// Receiving rank.
        peer: usize,
        /// When the last one was lost.
        since: Time,
    },
    /// A control message came in over a data lane.
    Gossip(Vec<u8>),
}

/// The memory map of a link's messages does not fit what was asked.
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
    /// Receiving rank.
    pub peer: usize,
    /// Its paths.
    pub paths: Vec<(PairOfNics, PathReport)>,
}

#[derive(Debug)]
enum End {
    Send(Box<Sender>, Posted<Source>),
    Recv(Receiver, Posted<Sink>),
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

    fn remove(&mut self, message: u64) {
        if let Some(at) = message.checked_sub(self.first)
            && let Some(place) = self.places.get_mut(at as usize)
        {
            *place = None;
        }
        while matches!(self.places.front(), Some(None)) {
            self.places.pop_front();
            self.first += 1;
        }
    }
}

#[derive(Debug)]
struct Link {
    peer: usize,
    pairs: Vec<PairOfNics>,
    end: End,
    /// Connections by lane, from the moment they are asked for or accepted.
    lanes: BTreeMap<Lane, u64>,
    left: bool,
    dirty: bool,
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

/// Every link of a rank.
#[derive(Debug)]
pub struct Links {
    me: usize,
    roster: Arc<Vec<Member>>,
    key: Key,
    tuning: Arc<Tuning>,
    epoll: Arc<Epoll>,
    listeners: Vec<Socket>,
    connections: HashMap<u64, Connection>,
    next_id: u64,
    pending: usize,
    links: Vec<Link>,
    send_to: BTreeMap<usize, usize>,
    recv_from: BTreeMap<usize, usize>,
    events: VecDeque<LinkEvent>,
    damage: Option<Damage>,
    refused: u64,
}

impl Links {
    /// Links of rank `me` of `roster`; `listeners` are non-blocking and listed in the roster.
    ///
    /// # Errors
    /// If a listener cannot be watched.
    pub fn new(
        me: usize,
        roster: Arc<Vec<Member>>,
        key: Key,
        tuning: Tuning,
        epoll: Arc<Epoll>,
        listeners: Vec<Socket>,
    ) -> Result<Self, LinksError> {
        for (i, listener) in listeners.iter().enumerate() {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER | i as u64);
            epoll.add(listener, event).map_err(|e| LinksError::Io { what: "watch a listener", source: e.into() })?;
        }
        Ok(Self {
            me,
            roster,
            key,
            tuning: Arc::new(tuning),
            epoll,
            listeners,
            connections: HashMap::new(),
            next_id: 0,
            pending: 0,
            links: Vec::new(),
            send_to: BTreeMap::new(),
            recv_from: BTreeMap::new(),
            events: VecDeque::new(),
            damage: None,
            refused: 0,
        })
    }

    /// Whether an epoll token is one of ours.
    pub fn owns(token: u64) -> bool {
        matches!(token & !INDEX, LISTENER | CONNECTION)
    }

    fn link(&mut self, side: Side, peer: usize, now: Time) -> Result<usize, LinksError> {
        let known = if side == Side::Send { &self.send_to } else { &self.recv_from };
        if let Some(&at) = known.get(&peer) {
            return Ok(at);
        }
        let (me, roster) = (&self.roster[self.me], &self.roster);
        let pairs = if side == Side::Send { paths(me, &roster[peer]) } else { paths(&roster[peer], me) };
        if pairs.is_empty() {
            return Err(LinksError::NoPath { me: self.me, peer });
        }
        let end = match side {
            Side::Send => End::Send(Box::new(Sender::new(Arc::clone(&self.tuning), pairs.len(), now)), Posted::new()),
            Side::Recv => End::Recv(Receiver::new(Arc::clone(&self.tuning)), Posted::new()),
        };
        let at = self.links.len();
        self.links.push(Link { peer, pairs, end, lanes: BTreeMap::new(), left: false, dirty: true });
        if side == Side::Send {
            self.send_to.insert(peer, at)
        } else {
            self.recv_from.insert(peer, at)
        };
        Ok(at)
    }

    /// Opens the outgoing link to `peer` if there is none yet.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub fn open(&mut self, now: Time, peer: usize) -> Result<(), LinksError> {
        self.link(Side::Send, peer, now).map(|_| ())
    }

    /// Whether the outgoing link to `peer` has all its paths in service.
    pub fn is_whole(&self, peer: usize) -> bool {
        self.send_to.get(&peer).is_some_and(|at| match &self.links[*at].end {
            End::Send(sender, _) => sender.path_reports().all(|p| p.state == PathState::Live),
            End::Recv(..) => false,
        })
    }

    /// Posts a message to `peer`.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub fn post_send(&mut self, now: Time, peer: usize, source: Source) -> Result<MessageSeq, LinksError> {
        let at = self.link(Side::Send, peer, now)?;
        let link = &mut self.links[at];
        link.dirty = true;
        match &mut link.end {
            End::Send(sender, posted) => {
                posted.push(source);
                Ok(sender.post(source.bytes() as u64))
            }
            End::Recv(..) => unreachable!("send_to names outgoing links"),
        }
    }

    /// Posts a receive from `peer`.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub fn post_recv(&mut self, now: Time, peer: usize, sink: Sink) -> Result<MessageSeq, LinksError> {
        let at = self.link(Side::Recv, peer, now)?;
        let link = &mut self.links[at];
        link.dirty = true;
        match &mut link.end {
            End::Recv(receiver, posted) => {
                posted.push(sink);
                Ok(receiver.post(sink.bytes() as u64))
            }
            End::Send(..) => unreachable!("recv_from names incoming links"),
        }
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

    /// Connections refused because they were not ours.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// State of every outgoing link.
    pub fn status(&self) -> Vec<LinkStatus> {
        let outgoing = self.links.iter().filter_map(|link| match &link.end {
            End::Send(sender, _) => Some((link, sender)),
            End::Recv(..) => None,
        });
        outgoing
            .map(|(link, sender)| LinkStatus {
                peer: link.peer,
                paths: link.pairs.iter().cloned().zip(sender.path_reports()).collect(),
            })
            .collect()
    }

    /// A local NIC lost or regained its carrier or address.
    pub fn handle_nic(&mut self, now: Time, nic: usize, up: bool) {
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            let concerned = |p: &PairOfNics, send: bool| (if send { p.from_nic } else { p.to_nic }) == Some(nic);
            let send = matches!(link.end, End::Send(..));
            let hit: Vec<PathId> =
                (0..link.pairs.len()).filter(|i| concerned(&link.pairs[*i], send)).map(|i| PathId(i as u16)).collect();
            for path in hit {
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
        let me = &self.roster[self.me];
        for link in &mut self.links {
            let End::Send(sender, _) = &mut link.end else { continue };
            for (i, pair) in link.pairs.iter().enumerate() {
                if pair.from_nic.is_some_and(|nic| me.nics[nic].subnet() == rail) {
                    sender.handle_doubt(PathId(i as u16));
                    link.dirty = true;
                }
            }
        }
    }

    /// The peer has left in good order: its links need no repair any more.
    pub fn handle_left(&mut self, peer: usize) {
        for at in 0..self.links.len() {
            if self.links[at].peer == peer {
                self.links[at].left = true;
                let ids: Vec<u64> = std::mem::take(&mut self.links[at].lanes).into_values().collect();
                ids.into_iter().for_each(|id| drop(self.take(id)));
            }
        }
    }

    /// Closes everything: no memory of a caller is touched from here on.
    pub fn abandon(&mut self) {
        let peers: Vec<usize> = self.links.iter().map(|link| link.peer).collect();
        peers.into_iter().for_each(|peer| self.handle_left(peer));
    }

    /// Sends a control message over every open lane.
    pub fn gossip(&mut self, message: &Arc<[u8]>) {
        for link in &mut self.links {
            for id in link.lanes.values() {
                if let Some(connection) = self.connections.get_mut(id)
                    && connection.is_open()
                {
                    connection.queue_gossip(message);
                    link.dirty = true;
                }
            }
        }
    }

    /// Whether anything waits for time to pass.
    pub fn needs_tick(&self) -> bool {
        self.connections.values().any(|c| c.unsettled || c.deadline.is_some())
            || self.links.iter().any(|link| match &link.end {
                End::Send(sender, _) => !link.left && sender.path_reports().any(|p| p.state != PathState::Live),
                End::Recv(..) => false,
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
        if writable && let Some(link) = self.connections.get(&index).and_then(|c| c.link) {
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
