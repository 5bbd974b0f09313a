//! Connections of the links as they come and go: accepted, opened, lost, closed at the machines' request.

use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::super::connection::{Connection, Phase};
use super::super::handshake::{Acceptor, Connector, Hello, Purpose};
use super::super::socket::{self, connect, prepare};
use super::{ACCEPT_TIME, CONNECT_TIME, CONNECTION, Cause, End, Lane, Links, PENDING_MAX, PathId, Time, report};

impl Links {
    pub(super) fn accept(&mut self, now: Time, listener: usize) {
        while let Ok((socket, _)) = self.listeners[listener].accept() {
            let acceptor = Acceptor::new();
            if self.pending >= PENDING_MAX || prepare(&socket).is_err() {
                self.refused += 1;
                continue;
            }
            let Ok(acceptor) = acceptor else { continue };
            let challenge = acceptor.challenge();
            let lane = Lane { path: PathId(0), generation: crate::repair::Generation(0) };
            let mut connection = Connection::new(socket, None, lane, Phase::Accepting(acceptor), now + ACCEPT_TIME);
            connection.queue(&challenge);
            if connection.flush().is_ok() {
                self.pending += 1;
                self.insert(connection);
            }
        }
    }

    pub(super) fn insert(&mut self, connection: Connection) -> Option<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, CONNECTION | id);
        if let Err(error) = self.epoll.add(connection.socket(), event) {
            tracing::error!(%error, "cannot watch a connection");
            return None;
        }
        self.connections.insert(id, Box::new(connection));
        Some(id)
    }

    /// Takes a connection out of service; its socket is closed when the result is dropped.
    pub(super) fn take(&mut self, id: u64) -> Option<Box<Connection>> {
        let connection = self.connections.remove(&id)?;
        if connection.link.is_none() {
            self.pending -= 1;
        }
        // Fails only if the socket is not watched, which is what we want.
        let _ = self.epoll.delete(connection.socket());
        Some(connection)
    }

    /// A connection is gone.
    pub(super) fn lose(&mut self, now: Time, id: u64, cause: Cause) {
        let Some(connection) = self.take(id) else { return };
        let Some(at) = connection.link else {
            self.refused += 1;
            return;
        };
        let (lane, link) = (connection.lane, &mut self.links[at]);
        if link.lanes.get(&lane) == Some(&id) {
            link.lanes.remove(&lane);
            link.dirty = true;
            match &mut link.end {
                End::Send(sender, _) => report(sender.handle_lane_lost(now, lane, cause)),
                End::Recv(receiver, _) => receiver.handle_lane_lost(lane, cause),
            }
        }
        socket::reset(connection.into_socket());
    }

    /// Closes a lane at the machine's request.
    pub(super) fn close(&mut self, at: usize, lane: Lane) {
        if let Some(id) = self.links[at].lanes.remove(&lane)
            && let Some(connection) = self.take(id)
        {
            socket::reset(connection.into_socket());
        }
    }

    pub(super) fn connect(&mut self, now: Time, at: usize, lane: Lane) {
        let link = &self.links[at];
        let pair = &link.pairs[&lane.path];
        // The kernel hands packets to one of our own addresses over the loopback device, whatever NIC they name.
        let within = self.nics.iter().any(|nic| nic.addr == *pair.to.ip());
        let device = pair.from_nic.filter(|_| !within).map(|nic| self.nics[nic].name.as_str());
        let (key, hello) = (link.key.clone(), Hello { name: link.name, purpose: Purpose::Data(lane) });
        let made = connect(device, pair.from, pair.to).ok().and_then(|socket| {
            let phase = Phase::Connecting(Connector::new(key, hello));
            self.insert(Connection::new(socket, Some(at), lane, phase, now + CONNECT_TIME))
        });
        let link = &mut self.links[at];
        match (made, &mut link.end) {
            (Some(id), _) => drop(link.lanes.insert(lane, id)),
            (None, End::Send(sender, _)) => report(sender.handle_lane_lost(now, lane, Cause::Connection)),
            (None, End::Recv(..)) => {}
        }
    }
}
