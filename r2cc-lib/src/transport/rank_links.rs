//! The links of a rank of the native engine: numbered by rank and class, with one key, over the NICs that two
//! ranks share.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use nix::sys::epoll::Epoll;
use socket2::Socket;

use super::handshake::{Key, LinkName};
use super::{LinkStatus, Links, LinksError, Side, Sink, Source};
use crate::repair::{MessageSeq, Time, Tuning};
use crate::schedule::Class;
use crate::topology::{Member, paths};

/// [`Links`] whose peers are the ranks of a roster, with a link for each [`Class`] of messages; the links of
/// `Tail` yield to those of `Main`. Outgoing links are made when they are needed.
#[derive(Debug)]
pub(crate) struct RankLinks {
    me: usize,
    roster: Arc<Vec<Member>>,
    key: Key,
    links: Links,
}

impl RankLinks {
    /// Links of rank `me` of `roster`; `listeners` are non-blocking and listed in the roster.
    ///
    /// # Errors
    /// If a listener cannot be watched.
    pub(crate) fn new(
        me: usize,
        roster: Arc<Vec<Member>>,
        key: Key,
        tuning: Tuning,
        epoll: Arc<Epoll>,
        listeners: Vec<Socket>,
    ) -> Result<Self, LinksError> {
        let mut links = Links::new(roster[me].nics.clone(), tuning, epoll, listeners)?;
        let reached = |peer: &usize| *peer != me && !paths(&roster[*peer], &roster[me]).is_empty();
        let streams = |peer| Class::ALL.map(|class| Stream { peer, class });
        for stream in (0..roster.len()).filter(reached).flat_map(streams) {
            links.add_incoming(stream.number(), stream.name(stream.peer, me), key.clone())?;
        }
        Ok(Self { me, roster, key, links })
    }

    /// Opens the outgoing link of a stream if there is none yet.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn open(&mut self, now: Time, stream: Stream) -> Result<(), LinksError> {
        if self.links.has(Side::Send, stream.number()) {
            return Ok(());
        }
        let pairs = paths(&self.roster[self.me], &self.roster[stream.peer]);
        if pairs.is_empty() {
            return Err(LinksError::NoPath { me: self.me, peer: stream.peer });
        }
        let name = stream.name(self.me, stream.peer);
        self.links.add_outgoing(now, stream.number(), name, self.key.clone(), pairs)?;
        self.links.set_yielding(stream.number(), stream.class == Class::Tail);
        Ok(())
    }

    /// Whether every path of an outgoing link is in service or known not to be.
    pub(crate) fn is_settled(&self, stream: Stream) -> bool {
        self.links.is_settled(stream.number())
    }

    /// Whether every path of an outgoing link is in service.
    pub(crate) fn is_whole(&self, stream: Stream) -> bool {
        self.links.is_whole(stream.number())
    }

    /// Posts a message.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn post_send(&mut self, now: Time, stream: Stream, source: Source) -> Result<MessageSeq, LinksError> {
        self.open(now, stream)?;
        self.links.post_send(stream.number(), source)
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// If the two ranks have no rail in common.
    pub(crate) fn post_recv(&mut self, stream: Stream, sink: Sink) -> Result<MessageSeq, LinksError> {
        let no_path = |_| LinksError::NoPath { me: self.me, peer: stream.peer };
        self.links.post_recv(stream.number(), sink).map_err(no_path)
    }

    /// State of every outgoing link of a class; `peer` is the rank.
    pub(crate) fn status_of(&self, class: Class) -> Vec<LinkStatus> {
        let streams = self.links.status().into_iter().map(|status| (Stream::of(status.peer), status));
        let of_class = streams.filter(|(stream, _)| stream.class == class);
        of_class.map(|(stream, status)| LinkStatus { peer: stream.peer, ..status }).collect()
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

impl Deref for RankLinks {
    type Target = Links;

    fn deref(&self) -> &Links {
        &self.links
    }
}

impl DerefMut for RankLinks {
    fn deref_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}
