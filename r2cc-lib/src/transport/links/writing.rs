//! Writing: what the machines ask for, and every frame that a lane can take.

use std::collections::BTreeSet;
use std::io;

use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::{CONNECTION, Cause, End, Lane, LinkEvent, Links, LinksError, Side, Source, Time};
use crate::repair::{Action, Frame, MessageSeq, ReceiverAction};

impl Links {
    /// Posts a message. One that may be sent early is copied, and [`LinkEvent::Sent`] comes at once.
    ///
    /// # Errors
    /// If there is no such outgoing link.
    pub fn post_send(&mut self, peer: usize, source: Source) -> Result<MessageSeq, LinksError> {
        let at = self.find(Side::Send, peer)?;
        let link = &mut self.links[at];
        link.dirty = true;
        let End::Send(sender, posted) = &mut link.end else { unreachable!("send_to names outgoing links") };
        let bytes = source.bytes() as u64;
        let message = sender.post(bytes);
        if self.tuning.is_early(bytes) {
            posted.push(source.into_copy());
            self.events.push_back(LinkEvent::Sent { peer, message });
        } else {
            posted.push(source);
        }
        Ok(message)
    }

    /// Carries out what the machines ask for and writes what can be written.
    pub fn flush(&mut self, now: Time) {
        let mut again = true;
        while again {
            again = self.flush_links(now, false);
            if self.links.iter().any(|link| link.yields) {
                self.yield_nics();
                again |= self.flush_links(now, true);
            }
        }
    }

    /// Writes on the links that yield, or on those that do not; whether any has more to say already.
    fn flush_links(&mut self, now: Time, yields: bool) -> bool {
        let mut again = false;
        for at in 0..self.links.len() {
            if self.links[at].dirty && !self.links[at].left && self.links[at].yields == yields {
                self.links[at].dirty = false;
                self.act(now, at);
                self.pump(now, at);
                self.act(now, at);
                again |= self.links[at].dirty;
            }
        }
        again
    }

    /// On each NIC that a link wants for waiting chunks, the links that yield send none.
    fn yield_nics(&mut self) {
        let mut wanted = BTreeSet::new();
        for link in self.links.iter().filter(|link| !link.yields && !link.left) {
            if let End::Send(sender, _) = &link.end {
                wanted
                    .extend(link.pairs.iter().filter(|(path, _)| sender.wants(**path)).map(|(_, pair)| pair.from_nic));
            }
        }
        for link in self.links.iter_mut().filter(|link| link.yields && !link.left) {
            if let End::Send(sender, _) = &mut link.end {
                for (path, pair) in &link.pairs {
                    link.dirty |= sender.set_yielding(*path, wanted.contains(&pair.from_nic));
                }
            }
        }
    }

    pub(super) fn act(&mut self, now: Time, at: usize) {
        loop {
            let link = &mut self.links[at];
            let action = match &mut link.end {
                End::Send(sender, posted) => {
                    while let Some(message) = sender.poll_done() {
                        if posted.remove(message.0).is_some_and(|source| !source.is_copy()) {
                            self.events.push_back(LinkEvent::Sent { peer: link.peer, message });
                        }
                    }
                    while let Some(transition) = sender.poll_transition() {
                        let pair = link.pairs[&transition.path].clone();
                        self.events.push_back(LinkEvent::Path { peer: link.peer, pair, transition });
                    }
                    while let Some(resumption) = sender.poll_resumption() {
                        let pair = link.pairs[&resumption.path].clone();
                        self.events.push_back(LinkEvent::Resumed { peer: link.peer, pair, at: resumption.at });
                    }
                    sender.poll_action()
                }
                End::Recv(receiver, _) => match receiver.poll_action() {
                    Some(ReceiverAction::Dead { since }) => {
                        self.events.push_back(LinkEvent::Dark { peer: link.peer, since });
                        continue;
                    }
                    Some(ReceiverAction::Close(lane)) => Some(Action::Close(lane)),
                    None => None,
                },
            };
            match action {
                None => return,
                Some(Action::Close(lane)) => self.close(at, lane),
                Some(Action::Open(lane)) => self.connect(now, at, lane),
                Some(Action::Dead { since }) => {
                    self.events.push_back(LinkEvent::Dead { peer: self.links[at].peer, since });
                }
            }
        }
    }

    /// Writes on the lanes of a link, one chunk at a time on the one that will be through first, until each blocks or
    /// has nothing to say. A message thus ends on all its paths at about the same time.
    fn pump(&mut self, now: Time, at: usize) {
        let mut lanes: Vec<(Lane, u64)> = self.links[at].lanes.iter().map(|(lane, id)| (*lane, *id)).collect();
        while !lanes.is_empty() {
            let first = match &self.links[at].end {
                End::Send(sender, _) if lanes.len() > 1 => {
                    let through = |place: &usize| sender.time_to_drain(lanes[*place].0.path);
                    (0..lanes.len()).min_by_key(through).unwrap_or(0)
                }
                _ => 0,
            };
            let (lane, id) = lanes[first];
            let outcome = self.write_one(now, at, lane, id);
            if matches!(outcome, Ok(Written::Chunk)) {
                continue;
            }
            lanes.remove(first);
            let Some(c) = self.connections.get_mut(&id) else { continue };
            let blocked = matches!(outcome, Ok(Written::Blocked));
            c.full = blocked;
            if blocked != c.wants_write {
                c.wants_write = blocked;
                let flags = if blocked { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
                // Fails only if the socket is gone, which its next read reports.
                let _ = self.epoll.modify(c.socket(), &mut EpollEvent::new(flags, CONNECTION | id));
            }
            if outcome.is_err() {
                self.lose(now, id, Cause::Connection);
            }
        }
    }

    /// Writes what waits on a lane, the control frames it has to carry, and at most one chunk.
    fn write_one(&mut self, now: Time, at: usize, lane: Lane, id: u64) -> io::Result<Written> {
        let Some(c) = self.connections.get_mut(&id) else { return Ok(Written::Nothing) };
        let end = &mut self.links[at].end;
        // The kernel says when it has room again, and then for a good part of what it may hold: asking sooner costs a
        // call, and what little it takes travels in more pieces.
        if c.full || !c.flush()? {
            return Ok(Written::Blocked);
        }
        let mut chunk_queued = false;
        while c.has_room() && c.is_open() {
            if let Some(message) = c.gossip.pop_front() {
                c.queue_frame(Frame::Gossip { len: message.len() as u32 }, None);
                c.queue(&message);
                continue;
            }
            let frame = match &mut *end {
                End::Send(sender, _) => sender.poll_frame(now, lane),
                End::Recv(receiver, _) => receiver.poll_frame(lane),
            };
            let Some(frame) = frame else { break };
            match (frame, &mut *end) {
                (Frame::Data(chunk), End::Send(_, posted)) => match posted.at(chunk.message) {
                    Some(source) => {
                        c.queue_frame(frame, Some(source.chunk(&chunk)));
                        chunk_queued = true;
                    }
                    None => unreachable!("the sender cuts chunks of posted messages only"),
                },
                _ => c.queue_frame(frame, None),
            }
        }
        let room_was_left = c.has_room();
        if !c.flush()? {
            return Ok(Written::Blocked);
        }
        // Without room left, control frames may wait for more.
        Ok(if chunk_queued || !room_was_left { Written::Chunk } else { Written::Nothing })
    }
}

/// What became of a turn to write.
enum Written {
    /// All of it; there may be more to say.
    Chunk,
    /// Nothing more to say.
    Nothing,
    /// The kernel takes no more now.
    Blocked,
}
