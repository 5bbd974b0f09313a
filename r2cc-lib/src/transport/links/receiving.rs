//! Reading: handshakes, control frames, chunks into their places.

use std::io;

use super::super::connection::{Body, Connection, Phase, Progress};
use super::super::handshake::{Hello, Purpose};
use super::{Cause, Damage, End, LinkEvent, Links, LinksError, PATHS_MAX, Side, Sink, Time};
use crate::repair::{Admission, Chunk, Frame, MessageSeq, ReceiverError};
use crate::topology::PairOfNics;

/// Frames read from one connection before the others get their turn.
const FRAMES_MAX: usize = 64;

impl Links {
    /// Posts a receive; what came early is applied.
    ///
    /// # Errors
    /// If there is no such incoming link.
    pub fn post_recv(&mut self, peer: usize, sink: Sink) -> Result<MessageSeq, LinksError> {
        let at = self.find(Side::Recv, peer)?;
        let link = &mut self.links[at];
        link.dirty = true;
        let End::Recv(receiver, posted) = &mut link.end else { unreachable!("recv_from names incoming links") };
        let expected = sink.bytes() as u64;
        posted.push(sink);
        if !std::mem::replace(&mut link.awaited, true) {
            self.awaited.push(at);
        }
        let message = receiver.post(expected);
        let Some(early) = link.early.remove(&message.0) else { return Ok(message) };
        let mut bytes = 0;
        for (chunk, mut incoming) in early.chunks {
            bytes = chunk.message_bytes;
            if self.apply(at, &chunk, Some(&mut incoming)).is_err() {
                // It has been acknowledged and will not come again: the link is of no more use.
                let error = ReceiverError::Length { chunk, expected };
                self.events.push_back(LinkEvent::Broken { peer, error });
                self.retire(at);
                return Ok(message);
            }
        }
        if early.complete {
            self.complete(at, message, bytes);
        }
        Ok(message)
    }

    /// Applies a chunk that counts to the memory of its message: what was staged, or what was read into its place.
    fn apply(&mut self, at: usize, chunk: &Chunk, mut staged: Option<&mut [u8]>) -> io::Result<()> {
        let End::Recv(_, posted) = &mut self.links[at].end else { unreachable!("chunks come on incoming links") };
        let fits = |sink: &&mut Sink| chunk.message_bytes <= sink.bytes() as u64 && sink.accepts(chunk);
        let sink = posted.at(chunk.message).filter(fits).ok_or_else(|| io::Error::other("no sink for a chunk"))?;
        if let Some((corruption, byte)) = Damage::due(&mut self.damage, chunk.len) {
            let dtype = sink.dtype();
            let bytes = match &mut staged {
                Some(bytes) => &mut **bytes,
                None => sink.place(chunk),
            };
            corruption.apply(dtype, byte, bytes);
        }
        if let Some(bytes) = staged {
            sink.apply(chunk, bytes);
        }
        Ok(())
    }

    fn complete(&mut self, at: usize, message: MessageSeq, bytes: u64) {
        let link = &mut self.links[at];
        if let End::Recv(_, posted) = &mut link.end {
            posted.remove(message.0);
        }
        self.events.push_back(LinkEvent::Received { peer: link.peer, message, bytes });
    }

    /// Reads a connection until it is empty or has had its turn; whether that has changed anything.
    pub(super) fn read(&mut self, now: Time, id: u64) -> bool {
        // Taken out, so that the links can be worked on beside it.
        let Some(mut c) = self.connections.remove(&id) else { return false };
        let outcome = if c.is_open() {
            self.read_frames(now, id, &mut c)
        } else {
            self.read_handshake(now, id, &mut c).map(|()| true)
        };
        self.connections.insert(id, c);
        outcome.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                tracing::debug!(%error, "connection lost");
            }
            self.lose(now, id, Cause::Connection);
            true
        })
    }

    /// Reads where the next messages are likely to come, which costs less than to ask which sockets are ready: on the
    /// connections that brought the last ones of the links on which receives are posted. Whether anything came.
    pub fn look(&mut self, now: Time) -> bool {
        let (mut any, mut next) = (false, 0);
        while let Some(&at) = self.awaited.get(next) {
            if !matches!(&self.links[at].end, End::Recv(receiver, _) if receiver.is_busy()) {
                self.links[at].awaited = false;
                self.awaited.swap_remove(next);
                continue;
            }
            if let Some(id) = self.links[at].recent {
                any |= self.read(now, id);
            }
            next += 1;
        }
        any
    }

    fn read_handshake(&mut self, now: Time, id: u64, c: &mut Connection) -> io::Result<()> {
        match &mut c.phase {
            Phase::Connecting(_) => {
                let Some(challenge) = c.read_message()? else { return Ok(()) };
                let phase = std::mem::replace(&mut c.phase, Phase::Open);
                let Phase::Connecting(mut connector) = phase else { unreachable!("matched above") };
                let hello = connector.handle_challenge(&challenge).map_err(io::Error::other)?;
                c.phase = Phase::Greeting(connector);
                c.queue(&hello);
                c.flush().map(|_| ())
            }
            Phase::Greeting(_) => {
                let Some(welcome) = c.read_message()? else { return Ok(()) };
                let Phase::Greeting(connector) = &c.phase else { unreachable!("matched above") };
                connector.handle_welcome(&welcome).map_err(io::Error::other)?;
                (c.phase, c.deadline) = (Phase::Open, None);
                if let Some(link) = c.link.map(|at| &mut self.links[at])
                    && let End::Send(sender, _) = &mut link.end
                {
                    sender.handle_lane_opened(now, c.lane).map_err(io::Error::other)?;
                    link.dirty = true;
                }
                Ok(())
            }
            Phase::Accepting(_) => {
                let Some(message) = c.read_message()? else { return Ok(()) };
                let Phase::Accepting(acceptor) = &c.phase else { unreachable!("matched above") };
                let key = |name| self.incoming.get(&name).map(|at| self.links[*at].key.clone());
                let (hello, welcome) = acceptor.handle_hello(&message, key).map_err(io::Error::other)?;
                let at = self.place_accepted(now, id, c, hello)?;
                (c.link, c.phase, c.deadline) = (Some(at), Phase::Open, None);
                self.pending -= 1;
                c.queue(&welcome);
                self.links[at].dirty = true;
                Ok(())
            }
            Phase::Open => Ok(()),
        }
    }

    /// Finds the link that an authenticated connection belongs to.
    fn place_accepted(&mut self, now: Time, id: u64, c: &mut Connection, hello: Hello) -> io::Result<usize> {
        let refuse = |why: &'static str| Err(io::Error::other(why));
        let (Some(&at), Purpose::Data(lane)) = (self.incoming.get(&hello.name), hello.purpose) else {
            return refuse("a control connection on a data port");
        };
        let link = &mut self.links[at];
        let ends = (c.socket().peer_addr()?.as_socket_ipv4(), c.socket().local_addr()?.as_socket_ipv4());
        let (Some(from), Some(to)) = ends else { return refuse("not an IPv4 connection") };
        if link.left || lane.path.0 >= PATHS_MAX {
            return refuse("a path that this link cannot have");
        }
        let End::Recv(receiver, _) = &mut link.end else { return refuse("not an incoming link") };
        if !receiver.handle_lane_opened(now, lane) {
            return refuse("a lane of a fenced generation");
        }
        let to_nic = self.nics.iter().position(|nic| nic.addr == *to.ip());
        link.pairs.insert(lane.path, PairOfNics { from_nic: None, to_nic, from: *from.ip(), to });
        if link.lanes.is_empty() {
            self.events.push_back(LinkEvent::Joined { peer: link.peer });
        }
        c.lane = lane;
        link.lanes.insert(lane, id);
        Ok(at)
    }

    fn read_frames(&mut self, now: Time, id: u64, c: &mut Connection) -> io::Result<bool> {
        let Some(at) = c.link else { return Ok(false) };
        let (mut frames, mut streams) = (0, false);
        c.begin_turn();
        let outcome = loop {
            let progress = match (&c.body, &mut self.links[at].end) {
                (Body::Direct(chunk), End::Recv(_, posted)) => {
                    let chunk = *chunk;
                    let sink = posted.at(chunk.message).ok_or_else(|| io::Error::other("no sink for a chunk"))?;
                    c.read(Some(sink.place(&chunk)))?
                }
                _ => c.read(None)?,
            };
            match progress {
                Progress::Blocked => break Ok(()),
                Progress::Header(frame) => self.handle_header(now, at, c, frame)?,
                Progress::Payload => {
                    self.links[at].recent = Some(id);
                    streams |= c.payload_bytes() > self.tuning.early_bytes as usize;
                    self.handle_payload(at, c)?;
                }
            }
            // A fence may have closed the very lane it came on.
            if !self.links[at].lanes.contains_key(&c.lane) {
                break Err(io::ErrorKind::UnexpectedEof.into());
            }
            frames += 1;
            // What has been read ahead makes no socket ready.
            if frames >= FRAMES_MAX && c.needs_more() {
                break Ok(());
            }
        };
        c.end_turn();
        if frames == 0 {
            return outcome.map(|()| false);
        }
        self.links[at].dirty = true;
        // The kernel acknowledges a stream of chunks by itself, but a lone small frame only after 40 ms or more.
        if !streams && matches!(c.body, Body::None) {
            c.acknowledge(now);
        }
        outcome.map(|()| true)
    }

    fn handle_header(&mut self, now: Time, at: usize, c: &mut Connection, frame: Frame) -> io::Result<()> {
        let (lane, peer) = (c.lane, self.links[at].peer);
        if let Frame::Gossip { len } = frame {
            c.expect(Body::Gossip, len as usize);
            return Ok(());
        }
        match (&mut self.links[at].end, frame) {
            (End::Send(sender, _), frame) => sender.handle_frame(now, lane, frame).map_err(io::Error::other),
            (End::Recv(receiver, posted), Frame::Data(chunk)) => {
                let admission = receiver.admit(lane, chunk).inspect_err(|error| {
                    self.events.push_back(LinkEvent::Broken { peer, error: *error });
                });
                let body = match admission.map_err(io::Error::other)? {
                    Admission::Duplicate(_) => Body::Discard,
                    Admission::Wanted(chunk) if !receiver.is_posted(MessageSeq(chunk.message)) => Body::Staged,
                    Admission::Wanted(chunk) => {
                        let sink = posted.at(chunk.message).filter(|sink| sink.accepts(&chunk));
                        let sink = sink.ok_or_else(|| io::Error::other("a chunk off element bounds"))?;
                        if sink.is_copy() { Body::Direct(chunk) } else { Body::Staged }
                    }
                };
                c.expect(body, chunk.len as usize);
                Ok(())
            }
            (End::Recv(receiver, _), frame) => {
                receiver.handle_frame(lane, frame).map_err(io::Error::other)?;
                // Fenced lanes are closed before another byte is read from any lane.
                self.act(now, at);
                Ok(())
            }
        }
    }

    fn handle_payload(&mut self, at: usize, c: &mut Connection) -> io::Result<()> {
        let link = &mut self.links[at];
        let (End::Recv(receiver, _), false) = (&mut link.end, matches!(c.body, Body::Gossip)) else {
            self.events.push_back(LinkEvent::Gossip { peer: link.peer, bytes: c.staged().to_vec() });
            c.end_payload();
            return Ok(());
        };
        let landed = receiver.land(c.lane).map_err(io::Error::other)?;
        let (chunk, message) = (landed.chunk, MessageSeq(landed.chunk.message));
        if landed.first && !receiver.is_posted(message) {
            let early = link.early.entry(message.0).or_default();
            early.chunks.push((chunk, c.staged().to_vec()));
            early.complete = landed.message_complete;
        } else if landed.first {
            let staged = if matches!(c.body, Body::Staged) { Some(c.staged()) } else { None };
            self.apply(at, &chunk, staged)?;
            if landed.message_complete {
                self.complete(at, message, chunk.message_bytes);
            }
        }
        c.end_payload();
        Ok(())
    }
}
