//! Reading: handshakes, control frames, chunks into their places.

use std::io;

use super::super::connection::{Body, Connection, Phase, Progress};
use super::super::handshake::{Hello, Purpose};
use super::{Cause, Damage, End, LinkEvent, Links, PATHS_MAX, Time};
use crate::repair::{Admission, Frame, MessageSeq};
use crate::topology::PairOfNics;

/// Frames read from one connection before the others get their turn.
const FRAMES_MAX: usize = 64;

impl Links {
    /// Reads a connection until it is empty or has had its turn.
    pub(super) fn read(&mut self, now: Time, id: u64) {
        // Taken out, so that the links can be worked on beside it.
        let Some(mut c) = self.connections.remove(&id) else { return };
        let outcome = if c.is_open() { self.read_frames(now, &mut c) } else { self.read_handshake(now, id, &mut c) };
        self.connections.insert(id, c);
        if let Err(error) = outcome {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                tracing::debug!(%error, "connection lost");
            }
            self.lose(now, id, Cause::Connection);
        }
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

    fn read_frames(&mut self, now: Time, c: &mut Connection) -> io::Result<()> {
        let Some(at) = c.link else { return Ok(()) };
        let (mut frames, mut chunks) = (0, 0);
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
                    self.handle_payload(at, c)?;
                    chunks += 1;
                }
            }
            // A fence may have closed the very lane it came on.
            if !self.links[at].lanes.contains_key(&c.lane) {
                break Err(io::ErrorKind::UnexpectedEof.into());
            }
            frames += 1;
            if frames == FRAMES_MAX {
                break Ok(());
            }
        };
        self.links[at].dirty = true;
        // The kernel acknowledges a stream of chunks by itself, but a lone small frame only after 40 ms or more.
        if chunks == 0 && matches!(c.body, Body::None) {
            c.acknowledge(now);
        }
        outcome
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
        let (End::Recv(receiver, posted), false) = (&mut self.links[at].end, matches!(c.body, Body::Gossip)) else {
            self.events.push_back(LinkEvent::Gossip { peer: self.links[at].peer, bytes: c.staged().to_vec() });
            c.end_payload();
            return Ok(());
        };
        let landed = receiver.land(c.lane).map_err(io::Error::other)?;
        if landed.first {
            let chunk = landed.chunk;
            let sink = posted.at(chunk.message).ok_or_else(|| io::Error::other("no sink for a chunk"))?;
            let staged = matches!(c.body, Body::Staged);
            if let Some((corruption, byte)) = Damage::due(&mut self.damage, chunk.len) {
                let dtype = sink.dtype();
                let bytes = if staged { c.staged() } else { sink.place(&chunk) };
                corruption.apply(dtype, byte, bytes);
            }
            if staged {
                sink.apply(&chunk, c.staged());
            }
            if landed.message_complete {
                posted.remove(chunk.message);
                let (peer, message) = (self.links[at].peer, MessageSeq(chunk.message));
                self.events.push_back(LinkEvent::Received { peer, message, bytes: chunk.message_bytes });
            }
        }
        c.end_payload();
        Ok(())
    }
}
