//! Connections of the control mesh: every rank to rank 0, on the rendezvous network. Framed messages, no
//! meaning. A silent mesh is no failure; a closed connection is how a lost process shows.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use socket2::Socket;

const TOKEN: u64 = 3 << 56;
/// Longest message of the mesh.
pub(super) const MESSAGE_MAX: usize = 8 << 20;
/// Most bytes that wait for a peer that does not read.
const BACKLOG_MAX: usize = 16 << 20;

/// What came in.
#[derive(Debug)]
pub enum MeshEvent {
    /// A message.
    Message(Vec<u8>),
    /// The connection to this rank closed.
    Closed {
        /// The rank.
        rank: usize,
    },
}

/// How a connection came to its end.
#[derive(Debug)]
enum Ending {
    /// The other process closed it, or its kernel did when the process died.
    Process,
    /// It timed out or became unreachable: says something of the network, nothing of the process.
    Network,
}

#[derive(Debug)]
struct Peer {
    rank: usize,
    socket: Socket,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    open: bool,
}

/// The connections of one rank.
#[derive(Debug, Default)]
pub struct Mesh {
    peers: Vec<Peer>,
    events: VecDeque<MeshEvent>,
}

impl Mesh {
    /// Takes over authenticated connections.
    pub(super) fn new(peers: Vec<(usize, Socket)>) -> Self {
        let peer = |(rank, socket)| Peer { rank, socket, incoming: Vec::new(), outgoing: Vec::new(), open: true };
        Self { peers: peers.into_iter().map(peer).collect(), events: VecDeque::new() }
    }

    /// Makes the sockets non-blocking and watches them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn watch(&self, epoll: &Epoll) -> io::Result<()> {
        for (i, peer) in self.peers.iter().enumerate() {
            peer.socket.set_nonblocking(true)?;
            epoll.add(&peer.socket, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN | i as u64))?;
        }
        Ok(())
    }

    /// Whether an epoll token is one of ours.
    pub fn owns(token: u64) -> bool {
        token & (0xff << 56) == TOKEN
    }

    /// A socket of ours is ready.
    pub fn handle_ready(&mut self, epoll: &Epoll, token: u64) {
        let Some(peer) = self.peers.get_mut((token & !TOKEN) as usize) else { return };
        let mut buffer = [0; 16 << 10];
        let ending = loop {
            match peer.socket.read(&mut buffer) {
                Ok(0) => break Some(Ending::Process),
                Ok(n) => peer.incoming.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => break Some(Ending::Process),
                Err(_) => break Some(Ending::Network),
            }
        };
        while let Some(head) = peer.incoming.first_chunk::<4>() {
            let len = u32::from_le_bytes(*head) as usize;
            if len > MESSAGE_MAX {
                peer.incoming.clear();
                break;
            }
            if peer.incoming.len() < 4 + len {
                break;
            }
            let message = peer.incoming[4..4 + len].to_vec();
            peer.incoming.drain(..4 + len);
            if !message.is_empty() {
                self.events.push_back(MeshEvent::Message(message));
            }
        }
        let Some(ending) = ending.filter(|_| peer.open) else { return };
        peer.open = false;
        // Fails only if the socket is not watched, which is what we want.
        let _ = epoll.delete(&peer.socket);
        match ending {
            Ending::Process => self.events.push_back(MeshEvent::Closed { rank: peer.rank }),
            Ending::Network => {
                tracing::warn!(rank = peer.rank, "control network lost; control rides on the data lanes")
            }
        }
    }

    /// Queues a message for every open connection and writes what can be written.
    pub fn broadcast(&mut self, message: &[u8]) {
        for peer in self.peers.iter_mut().filter(|p| p.open) {
            if peer.outgoing.len() + message.len() <= BACKLOG_MAX {
                peer.outgoing.extend_from_slice(&(message.len() as u32).to_le_bytes());
                peer.outgoing.extend_from_slice(message);
            }
        }
        self.flush();
    }

    /// Sends an empty message to every peer that has taken the earlier ones: traffic that keeps firewalls'
    /// and switches' tables fresh and shows in captures.
    pub fn heartbeat(&mut self) {
        for peer in self.peers.iter_mut().filter(|p| p.open && p.outgoing.is_empty()) {
            peer.outgoing.extend_from_slice(&0_u32.to_le_bytes());
        }
        self.flush();
    }

    /// Writes what can be written.
    pub fn flush(&mut self) {
        for peer in self.peers.iter_mut().filter(|p| p.open && !p.outgoing.is_empty()) {
            // An error shows as a closed connection at the next read.
            if let Ok(n) = peer.socket.write(&peer.outgoing) {
                peer.outgoing.drain(..n);
            }
        }
    }

    /// Next event.
    pub fn poll_event(&mut self) -> Option<MeshEvent> {
        self.events.pop_front()
    }
}
