//! The links of a rank of the native engine: numbered by rank and class, with one key, over the NICs that two
//! ranks share. The thread of their owner drives the incoming ones; the outgoing ones have a thread of their own.

mod sending;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;

use nix::sys::epoll::Epoll;
use nix::sys::eventfd::EventFd;
use socket2::Socket;

use super::handshake::{Key, LinkName};
use super::{Corruption, LinkEvent, LinkStatus, Links, LinksError, Sink, Source, now};
use crate::repair::{MessageSeq, Time, Totals, Tuning};
use crate::schedule::Class;
use crate::topology::{self, Member, PairOfNics, paths};
use sending::Sending;

/// [`Links`] whose peers are the ranks of a roster, with a link for each [`Class`] of messages; the links of
/// `Tail` yield to those of `Main`. Outgoing links are made when they are needed.
///
/// Call order as for [`Links`]: `post_*` and `handle_*`, then `flush`, then `poll_event` until it is empty.
#[derive(Debug)]
pub(crate) struct RankLinks {
    me: usize,
    roster: Arc<Vec<Member>>,
    key: Key,
    incoming: Links,
    outgoing: Sending,
    /// Messages posted on each outgoing link, by its number.
    posted: BTreeMap<usize, u64>,
    events: VecDeque<LinkEvent>,
    /// Subnet of each rail.
    subnets: Vec<Ipv4Addr>,
    /// What each rail should carry of the messages to a rank.
    shares: BTreeMap<(usize, Class), Vec<f64>>,
    /// NICs, by node and name, that no path is opened on where there is another.
    avoided: BTreeSet<(String, String)>,
}

impl RankLinks {
    /// Links of rank `me` of `roster`; `listeners` are non-blocking and listed in the roster. `wake` is written to
    /// when something has happened on an outgoing link.
    ///
    /// # Errors
    /// If a listener cannot be watched, or the sending thread not be started.
    pub(crate) fn new(
        (me, roster): (usize, Arc<Vec<Member>>),
        key: Key,
        tuning: Tuning,
        epoll: Arc<Epoll>,
        listeners: Vec<Socket>,
        wake: Arc<EventFd>,
    ) -> Result<Self, LinksError> {
        let nics = &roster[me].nics;
        let outgoing = Sending::start(me, nics.clone(), tuning.clone(), wake)?;
        let mut incoming = Links::new(nics.clone(), tuning, epoll, listeners)?;
        let reached = |peer: &usize| *peer != me && !paths(&roster[*peer], &roster[me]).is_empty();
        let streams = |peer| Class::ALL.map(|class| Stream { peer, class });
        for stream in (0..roster.len()).filter(reached).flat_map(streams) {
            incoming.add_incoming(stream.number(), stream.name(stream.peer, me), key.clone())?;
        }
        let (posted, events, shares) = (BTreeMap::new(), VecDeque::new(), BTreeMap::new());
        let (subnets, avoided) = (topology::rails(&roster), BTreeSet::new());
        Ok(Self { me, roster, key, incoming, outgoing, posted, events, subnets, shares, avoided })
    }

    /// No path of a link that is opened from now on uses these NICs, by node and name, unless it has no other.
    pub(crate) fn avoid(&mut self, nics: BTreeSet<(String, String)>) {
        self.avoided = nics;
    }

    /// The paths that a new link to `peer` has.
    fn pairs(&self, peer: usize) -> Vec<PairOfNics> {
        let (me, peer) = (&self.roster[self.me], &self.roster[peer]);
        let avoided = |member: &Member, nic: Option<usize>| {
            nic.is_some_and(|nic| self.avoided.contains(&(member.node.clone(), member.nics[nic].name.clone())))
        };
        let all = paths(me, peer);
        let usable = |pair: &&PairOfNics| !avoided(me, pair.from_nic) && !avoided(peer, pair.to_nic);
        let left: Vec<PairOfNics> = all.iter().filter(usable).cloned().collect();
        if left.is_empty() { all } else { left }
    }

    /// Opens the outgoing link of a stream if there is none yet.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn open(&mut self, stream: Stream) -> Result<(), LinksError> {
        let number = stream.number();
        if self.posted.contains_key(&number) {
            return Ok(());
        }
        let pairs = self.pairs(stream.peer);
        if pairs.is_empty() {
            return Err(LinksError::NoPath { me: self.me, peer: stream.peer });
        }
        let (name, key) = (stream.name(self.me, stream.peer), self.key.clone());
        self.outgoing.with(|links| {
            links.add_outgoing(now(), number, name, key, pairs)?;
            links.set_yielding(number, stream.class == Class::Tail);
            links.share_paths(number, |pair| self.share(stream, pair));
            Ok::<_, LinksError>(())
        })?;
        self.posted.insert(number, 0);
        Ok(())
    }

    /// From now on messages that are named take the rails in these proportions, all others as they can.
    pub(crate) fn share_rails(&mut self, shares: &BTreeMap<(usize, Class), Vec<f64>>) {
        if self.shares == *shares {
            return;
        }
        let before = std::mem::replace(&mut self.shares, shares.clone());
        let streams: BTreeSet<(usize, Class)> = before.into_keys().chain(shares.keys().copied()).collect();
        self.outgoing.with(|links| {
            for stream in streams.into_iter().map(|(peer, class)| Stream { peer, class }) {
                links.share_paths(stream.number(), |pair| self.share(stream, pair));
            }
        });
    }

    fn share(&self, stream: Stream, pair: &PairOfNics) -> Option<f64> {
        let shares = self.shares.get(&(stream.peer, stream.class))?;
        let subnet = self.roster[self.me].nics[pair.from_nic?].subnet();
        let rail = self.subnets.iter().position(|rail| *rail == subnet)?;
        Some(shares.get(rail).copied().unwrap_or(0.0))
    }

    /// Whether every path of these outgoing links is in service or known not to be.
    pub(crate) fn are_settled(&self, streams: &[Stream]) -> bool {
        self.outgoing.look(|links| streams.iter().all(|stream| links.is_settled(stream.number())))
    }

    /// Whether every path of these outgoing links is in service.
    pub(crate) fn are_whole(&self, streams: &[Stream]) -> bool {
        self.outgoing.look(|links| streams.iter().all(|stream| links.is_whole(stream.number())))
    }

    /// Posts a message.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn post_send(&mut self, stream: Stream, source: Source) -> Result<MessageSeq, LinksError> {
        self.open(stream)?;
        let next = self.posted.entry(stream.number()).or_default();
        // A link numbers its messages from 0 in the order of their posting.
        let message = MessageSeq(*next);
        *next += 1;
        self.outgoing.post(stream.number(), source);
        Ok(message)
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn post_recv(&mut self, stream: Stream, sink: Sink) -> Result<MessageSeq, LinksError> {
        let no_path = |_| LinksError::NoPath { me: self.me, peer: stream.peer };
        self.incoming.post_recv(stream.number(), sink).map_err(no_path)
    }

    /// As [`Links::corrupt`].
    pub(crate) fn corrupt(&mut self, corruption: Corruption, bytes_before: u64) {
        self.incoming.corrupt(corruption, bytes_before);
    }

    /// As [`Links::end_corruption`].
    pub(crate) fn end_corruption(&mut self) {
        self.incoming.end_corruption();
    }

    /// As [`Links::totals`].
    pub(crate) fn totals(&self) -> Totals {
        self.outgoing.look(Links::totals)
    }

    /// As [`Links::refused`].
    pub(crate) fn refused(&self) -> u64 {
        self.incoming.refused()
    }

    /// State of every outgoing link; `peer` is the rank.
    pub(crate) fn status(&self) -> Vec<(Class, LinkStatus)> {
        let of_stream = |status: LinkStatus| {
            let Stream { peer, class } = Stream::of(status.peer);
            (class, LinkStatus { peer, ..status })
        };
        self.outgoing.look(Links::status).into_iter().map(of_stream).collect()
    }

    /// As [`Links::handle_nic`].
    pub(crate) fn handle_nic(&mut self, at: Time, nic: usize, up: bool) {
        self.incoming.handle_nic(at, nic, up);
        self.outgoing.with(|links| links.handle_nic(now(), nic, up));
    }

    /// As [`Links::handle_doubt`].
    pub(crate) fn handle_doubt(&mut self, rail: Ipv4Addr) {
        self.outgoing.with(|links| links.handle_doubt(rail));
    }

    /// Puts a byte on every path of the outgoing links, so that a stall would show.
    pub(crate) fn probe(&mut self) {
        self.outgoing.with(|links| self.subnets.iter().for_each(|rail| links.handle_doubt(*rail)));
    }

    /// As [`Links::gossip`]; what the outgoing links have to say is written at once, as they may be abandoned next.
    pub(crate) fn gossip(&mut self, message: &Arc<[u8]>) {
        self.incoming.gossip(message);
        self.outgoing.with(|links| {
            links.gossip(message);
            links.flush(now());
        });
    }

    /// As [`Links::abandon`].
    pub(crate) fn abandon(&mut self) {
        self.incoming.abandon();
        self.outgoing.abandon();
    }

    /// Whether the incoming links wait for time to pass.
    pub(crate) fn needs_tick(&self) -> bool {
        self.incoming.needs_tick()
    }

    /// As [`Links::handle_tick`], for the incoming links.
    pub(crate) fn handle_tick(&mut self, at: Time) {
        self.incoming.handle_tick(at);
    }

    /// As [`Links::handle_ready`], for the incoming links.
    pub(crate) fn handle_ready(&mut self, at: Time, token: u64, writable: bool) {
        self.incoming.handle_ready(at, token, writable);
    }

    /// As [`Links::look`], for the incoming links.
    pub(crate) fn look(&mut self, at: Time) -> bool {
        self.incoming.look(at)
    }

    /// As [`Links::flush`].
    pub(crate) fn flush(&mut self, at: Time) {
        self.incoming.flush(at);
        self.outgoing.flush();
    }

    /// Until then [`RankLinks::poll_sending`] does the work of the sending thread, which only keeps the time.
    pub(crate) fn hold_sending(&self, until: Time) {
        self.outgoing.hold(until);
    }

    /// The sending thread works again.
    pub(crate) fn release_sending(&self) {
        self.outgoing.release();
    }

    /// Does what is to be done now on the outgoing links.
    ///
    /// # Errors
    /// If the kernel refuses to say what is ready.
    pub(crate) fn poll_sending(&mut self) -> io::Result<()> {
        self.outgoing.poll()
    }

    /// Next event.
    pub(crate) fn poll_event(&mut self) -> Option<LinkEvent> {
        if self.events.is_empty() {
            self.outgoing.take_events(&mut self.events);
        }
        self.incoming.poll_event().or_else(|| self.events.pop_front())
    }

    /// Whether nothing more will be sent, because the sending thread could not go on.
    pub(crate) fn is_broken(&self) -> bool {
        self.outgoing.has_ended()
    }
}

/// One direction of messages of one class between this rank and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stream {
    /// The other rank.
    pub(crate) peer: usize,
    /// Which messages.
    pub(crate) class: Class,
}

impl Stream {
    /// The stream whose links have this number.
    pub(crate) fn of(number: usize) -> Self {
        Self { peer: number / Class::ALL.len(), class: Class::ALL[number % Class::ALL.len()] }
    }

    fn number(self) -> usize {
        self.peer * Class::ALL.len() + self.class as usize
    }

    fn name(self, from: usize, to: usize) -> LinkName {
        let number = |rank| Stream { peer: rank, ..self }.number() as u32;
        LinkName { from: number(from), to: number(to) }
    }
}
