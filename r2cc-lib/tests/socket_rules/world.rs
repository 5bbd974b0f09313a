//! One end of a link as the driver has it, over real TCP on loopback, and its other end by hand: a test writes
//! and reads the frames itself, and so decides what is late, half written, lost or sent twice.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use r2cc::repair::{Chunk, Frame, Generation, HEADER_BYTES, Lane, Mutant, PathId, Time, Tuning};
use r2cc::topology::PairOfNics;
use r2cc::transport::handshake::{
    Acceptor, CHALLENGE_BYTES, Connector, HELLO_BYTES, Hello, Key, LinkName, Purpose, WELCOME_BYTES,
};
use r2cc::transport::{LinkEvent, Links, listen, now};

/// Bound of everything that should happen soon; generous, since the machine may be busy.
const SOON: Duration = Duration::from_secs(60);
/// Silence after which nothing more is on its way over loopback.
const QUIET_MS: u16 = 20;
/// Messages that may come before their receives, and how long they may be.
const EARLY_MESSAGES: u64 = 4;
pub const EARLY_BYTES: usize = 8 << 10;
/// The number of the link.
pub const PEER: usize = 1;
const NAME: LinkName = LinkName { from: 1, to: 0 };

pub fn lane(path: u16, generation: u32) -> Lane {
    Lane { path: PathId(path), generation: Generation(generation) }
}

fn key() -> Key {
    Key::derive(b"secret", "socket rules", b"")
}

/// The end that the driver has.
pub struct End {
    pub links: Links,
    epoll: Arc<Epoll>,
    /// What the machines are told of the time when it passes.
    clock: Time,
    pub events: Vec<LinkEvent>,
}

impl End {
    fn new(mutant: Option<Mutant>, listeners: Vec<socket2::Socket>) -> Self {
        let (early_messages, early_bytes) = (EARLY_MESSAGES, EARLY_BYTES as u64);
        let tuning = Tuning { mutant, early_messages, early_bytes, ..Tuning::default() };
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let links = Links::new(Vec::new(), tuning, Arc::clone(&epoll), listeners).unwrap();
        Self { links, epoll, clock: now(), events: Vec::new() }
    }

    /// A receiving end, and where it listens.
    pub fn receiving(mutant: Option<Mutant>) -> (Self, SocketAddrV4) {
        let listener = listen(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap().as_socket_ipv4().unwrap();
        let mut end = Self::new(mutant, vec![listener]);
        end.links.add_incoming(PEER, NAME, key()).unwrap();
        (end, addr)
    }

    /// A sending end with as many paths as there are listeners.
    pub fn sending(mutant: Option<Mutant>, listeners: &[TcpListener]) -> Self {
        let mut end = Self::new(mutant, Vec::new());
        let pair = |listener: &TcpListener| {
            let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
            PairOfNics { from_nic: None, to_nic: None, from: Ipv4Addr::LOCALHOST, to }
        };
        end.links.add_outgoing(now(), PEER, NAME, key(), listeners.iter().map(pair).collect()).unwrap();
        end
    }

    /// Moves what can be moved; false when nothing came for a while. Time does not pass for the machines: no
    /// silence of the hand is taken for a stall.
    fn turn(&mut self) -> bool {
        let mut ready = [EpollEvent::empty(); 16];
        self.links.flush(now());
        let count = self.epoll.wait(&mut ready, EpollTimeout::from(QUIET_MS)).unwrap();
        for event in &ready[..count] {
            self.links.handle_ready(now(), event.data(), event.events().contains(EpollFlags::EPOLLOUT));
        }
        self.links.flush(now());
        self.events.extend(std::iter::from_fn(|| self.links.poll_event()));
        count > 0
    }

    /// Moves everything that is on its way.
    pub fn settle(&mut self) {
        let deadline = Instant::now() + SOON;
        while self.turn() {
            assert!(Instant::now() < deadline, "it never comes to rest");
        }
    }

    /// Time passes for the machines, tick by tick, and for nobody else: more than a link may be dark.
    pub fn pass_beyond_the_bound(&mut self) {
        let Tuning { tick, link_deadline, .. } = Tuning::default();
        let ticks = link_deadline.as_nanos() / tick.as_nanos() + 10;
        for _ in 0..ticks {
            self.clock += tick;
            self.links.handle_tick(self.clock);
        }
        self.settle();
    }

    /// Whether the link has been told dark.
    pub fn is_dark(&self) -> bool {
        self.events.iter().any(|event| matches!(event, LinkEvent::Dark { peer: PEER, .. }))
    }

    /// Whether a message has been reported: landed, or acknowledged.
    pub fn has_reported(&self) -> bool {
        self.events.iter().any(|event| matches!(event, LinkEvent::Received { .. } | LinkEvent::Sent { .. }))
    }
}

/// The other end of one lane, by hand.
pub struct Hand {
    stream: TcpStream,
    inbox: Vec<u8>,
    pub lane: Lane,
    pub closed: bool,
    /// Chunks taken from this lane.
    chunks: u64,
}

impl Hand {
    fn new(stream: TcpStream, lane: Lane) -> Self {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, inbox: Vec::new(), lane, closed: false, chunks: 0 }
    }

    /// Connects a lane to a receiving end.
    pub fn connect(end: &mut End, addr: SocketAddrV4, lane: Lane) -> Self {
        let mut hand = Self::new(TcpStream::connect(addr).unwrap(), lane);
        let mut connector = Connector::new(key(), Hello { name: NAME, purpose: Purpose::Data(lane) });
        let hello = connector.handle_challenge(&hand.message::<CHALLENGE_BYTES>(end)).unwrap();
        hand.write(&hello);
        connector.handle_welcome(&hand.message::<WELCOME_BYTES>(end)).unwrap();
        hand
    }

    /// Accepts a lane of a sending end.
    fn accept(end: &mut End, stream: TcpStream) -> Self {
        let mut hand = Self::new(stream, lane(0, 0));
        let acceptor = Acceptor::new().unwrap();
        hand.write(&acceptor.challenge());
        let (hello, welcome) = acceptor.handle_hello(&hand.message::<HELLO_BYTES>(end), |_| Some(key())).unwrap();
        hand.write(&welcome);
        let Purpose::Data(lane) = hello.purpose else { panic!("{hello:?}") };
        hand.lane = lane;
        hand
    }

    /// Accepts what waits at the listeners.
    pub fn accept_all(end: &mut End, listeners: &[TcpListener]) -> Vec<Self> {
        end.settle();
        let mut hands = Vec::new();
        for listener in listeners {
            listener.set_nonblocking(true).unwrap();
            while let Ok((stream, _)) = listener.accept() {
                hands.push(Self::accept(end, stream));
            }
        }
        end.settle();
        hands.sort_by_key(|hand| hand.lane);
        hands
    }

    fn message<const N: usize>(&mut self, end: &mut End) -> [u8; N] {
        let deadline = Instant::now() + SOON;
        while self.inbox.len() < N {
            end.turn();
            self.fill();
            assert!(Instant::now() < deadline && !self.closed, "no handshake");
        }
        self.inbox.drain(..N).collect::<Vec<_>>().try_into().unwrap()
    }

    /// Takes what has arrived, up to `most` bytes altogether.
    fn fill_up_to(&mut self, most: usize) {
        while self.inbox.len() < most {
            let mut block = vec![0; (most - self.inbox.len()).min(64 << 10)];
            match self.stream.read(&mut block) {
                Ok(0) => return self.closed = true,
                Ok(n) => self.inbox.extend(&block[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.closed = true,
            }
        }
    }

    fn fill(&mut self) {
        self.fill_up_to(usize::MAX);
    }

    /// Takes no more than `bytes` bytes: what follows stays half written. Whether they begin with a chunk.
    pub fn begins_with_data(&mut self, bytes: usize) -> bool {
        self.fill_up_to(bytes);
        let header = self.inbox.first_chunk::<HEADER_BYTES>();
        header.is_some_and(|header| matches!(Frame::decode(header), Ok(Frame::Data(_))))
    }

    /// Writes bytes; a lane that the driver has closed swallows them.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.stream.write_all(bytes).is_err() {
            self.closed = true;
        }
    }

    pub fn say(&mut self, frame: Frame) {
        self.write(&frame.encode());
    }

    pub fn send_chunk(&mut self, chunk: Chunk, payload: &[u8]) {
        self.say(Frame::Data(chunk));
        self.write(payload);
    }

    /// The frames that have arrived whole, with their payloads.
    pub fn frames(&mut self) -> Vec<(Frame, Vec<u8>)> {
        self.fill();
        let mut frames = Vec::new();
        while let Some(header) = self.inbox.first_chunk::<HEADER_BYTES>() {
            let frame = Frame::decode(header).unwrap();
            let whole = HEADER_BYTES + frame.payload_bytes();
            if self.inbox.len() < whole {
                break;
            }
            frames.push((frame, self.inbox[HEADER_BYTES..whole].to_vec()));
            self.inbox.drain(..whole);
        }
        frames
    }

    /// The chunks and fences that have arrived whole; they are acknowledged, and pings answered.
    pub fn take_and_acknowledge(&mut self) -> Vec<(Frame, Vec<u8>)> {
        let mut frames = self.frames();
        for (frame, _) in &frames {
            match *frame {
                Frame::Ping { nonce } => self.say(Frame::Pong { nonce }),
                Frame::Data(_) => self.chunks += 1,
                _ => {}
            }
        }
        frames.retain(|(frame, _)| matches!(frame, Frame::Data(_) | Frame::Fence { .. }));
        if frames.iter().any(|(frame, _)| matches!(frame, Frame::Data(_))) {
            let Lane { path, generation } = self.lane;
            self.say(Frame::Ack { path, generation, chunks: self.chunks });
        }
        frames
    }

    /// Chunks that the driver has acknowledged on this lane since this was last asked.
    pub fn acknowledged(&mut self) -> u64 {
        let acks = self.frames().into_iter().filter_map(|(frame, _)| match frame {
            Frame::Ack { chunks, .. } => Some(chunks),
            _ => None,
        });
        acks.max().unwrap_or(0)
    }
}
