//! The links of a rank of the native engine: numbered by rank, with one key, over the NICs that two ranks share.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use nix::sys::epoll::Epoll;
use socket2::Socket;

use super::handshake::{Key, LinkName};
use super::{Links, LinksError, Side, Sink, Source};
use crate::repair::{MessageSeq, Time, Tuning};
use crate::topology::{Member, paths};

/// [`Links`] whose peers are the ranks of a roster. Outgoing links are made when they are needed.
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
        for peer in (0..roster.len()).filter(reached) {
            links.add_incoming(peer, LinkName { from: peer as u32, to: me as u32 }, key.clone())?;
        }
        Ok(Self { me, roster, key, links })
    }

    /// Opens the outgoing link to `peer` if there is none yet.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub(crate) fn open(&mut self, now: Time, peer: usize) -> Result<(), LinksError> {
        if self.links.has(Side::Send, peer) {
            return Ok(());
        }
        let pairs = paths(&self.roster[self.me], &self.roster[peer]);
        if pairs.is_empty() {
            return Err(LinksError::NoPath { me: self.me, peer });
        }
        let name = LinkName { from: self.me as u32, to: peer as u32 };
        self.links.add_outgoing(now, peer, name, self.key.clone(), pairs)
    }

    /// Posts a message to `peer`.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub(crate) fn post_send(&mut self, now: Time, peer: usize, source: Source) -> Result<MessageSeq, LinksError> {
        self.open(now, peer)?;
        self.links.post_send(peer, source)
    }

    /// Posts a receive from `peer`.
    ///
    /// # Errors
    /// If the two have no rail in common.
    pub(crate) fn post_recv(&mut self, peer: usize, sink: Sink) -> Result<MessageSeq, LinksError> {
        self.links.post_recv(peer, sink).map_err(|_| LinksError::NoPath { me: self.me, peer })
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
