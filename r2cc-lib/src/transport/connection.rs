//! One non-blocking socket of a link: handshake, then frames. Owns the partly read and the partly written
//! frame; knows nothing of links. A frame half written dies with its connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::Arc;

use socket2::{MsgHdr, Socket};

use super::handshake::{Acceptor, CHALLENGE_BYTES, Connector, HELLO_BYTES, WELCOME_BYTES};
use super::socket::{self, KernelProgress};
use crate::repair::{Chunk, Frame, HEADER_BYTES, Lane, LaneProgress, Time};

/// Control messages waiting on one connection; older ones are dropped, as every one is also sent elsewhere.
const GOSSIP_MAX: usize = 256;

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    /// TCP handshake under way, then ours.
    Connecting(Connector),
    /// Our hello is out.
    Greeting(Connector),
    /// The challenge is out.
    Accepting(Acceptor),
    /// Carries frames of this link's lane.
    Open,
}

/// Where the payload that is being read goes.
#[derive(Debug)]
pub(super) enum Body {
    /// No payload: a header is being read.
    None,
    /// Into this connection's staging buffer.
    Staged,
    /// Straight into the destination of the message.
    Direct(Chunk),
    /// Nowhere: it has landed before.
    Discard,
    /// A control message.
    Gossip,
}

/// A payload being written: the driver keeps the memory valid while the lane is open.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    ptr: *const u8,
    len: usize,
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    pub(super) link: Option<usize>,
    pub(super) lane: Lane,
    pub(super) phase: Phase,
    pub(super) deadline: Option<Time>,
    header: [u8; HEADER_MAX],
    header_read: usize,
    pub(super) body: Body,
    body_read: usize,
    body_len: usize,
    staging: Vec<u64>,
    out: Vec<u8>,
    out_written: usize,
    payload: Option<Outgoing>,
    pub(super) gossip: VecDeque<Arc<[u8]>>,
    /// Bytes were written since the kernel last said that nothing is outstanding.
    pub(super) unsettled: bool,
    pub(super) wants_write: bool,
}

// SAFETY: `Outgoing` points into a `Source`, which may move between threads.
unsafe impl Send for Connection {}

/// What a read brought.
#[derive(Debug)]
pub(super) enum Progress {
    /// Nothing more for now.
    Blocked,
    /// A frame header.
    Header(Frame),
    /// The payload announced before is whole.
    Payload,
}

impl Connection {
    pub(super) fn new(socket: Socket, link: Option<usize>, lane: Lane, phase: Phase, deadline: Time) -> Self {
        Self {
            socket,
            link,
            lane,
            phase,
            deadline: Some(deadline),
            header: [0; HEADER_MAX],
            header_read: 0,
            body: Body::None,
            body_read: 0,
            body_len: 0,
            staging: Vec::new(),
            out: Vec::new(),
            out_written: 0,
            payload: None,
            gossip: VecDeque::new(),
            unsettled: false,
            wants_write: false,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn into_socket(self) -> Socket {
        self.socket
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    /// Reads one handshake message of `N` bytes if it is all there.
    pub(super) fn read_message<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        while self.header_read < N {
            match read_into(&self.socket, &mut self.header[self.header_read..N])? {
                0 => return Ok(None),
                n => self.header_read += n,
            }
        }
        self.header_read = 0;
        let mut message = [0; N];
        message.copy_from_slice(&self.header[..N]);
        Ok(Some(message))
    }

    /// Reads on until something is complete or the socket is empty.
    pub(super) fn read(&mut self, direct: Option<&mut [u8]>) -> io::Result<Progress> {
        if matches!(self.body, Body::None) {
            while self.header_read < HEADER_BYTES {
                match read_into(&self.socket, &mut self.header[self.header_read..HEADER_BYTES])? {
                    0 => return Ok(Progress::Blocked),
                    n => self.header_read += n,
                }
            }
            self.header_read = 0;
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&self.header[..HEADER_BYTES]);
            return Frame::decode(&header).map(Progress::Header).map_err(io::Error::other);
        }
        let (len, mut read) = (self.body_len, self.body_read);
        let socket = &self.socket;
        let done = match (&self.body, direct) {
            (Body::Direct(_), Some(place)) => read_all(socket, &mut place[..len], &mut read),
            (Body::Direct(_), None) => Err(io::Error::other("no destination for a chunk")),
            _ => read_all(socket, &mut as_bytes_mut(&mut self.staging)[..len], &mut read),
        };
        self.body_read = read;
        Ok(if done? { Progress::Payload } else { Progress::Blocked })
    }

    /// A payload of `len` bytes follows the header just read.
    pub(super) fn expect(&mut self, body: Body, len: usize) {
        if !matches!(body, Body::Direct(_)) && self.staging.len() * 8 < len {
            self.staging.resize(len.div_ceil(8), 0);
        }
        (self.body, self.body_len, self.body_read) = (body, len, 0);
    }

    /// The payload has been dealt with: on to the next header.
    pub(super) fn end_payload(&mut self) {
        self.body = Body::None;
    }

    /// The payload in the staging buffer.
    pub(super) fn staged(&mut self) -> &mut [u8] {
        let len = self.body_len;
        &mut as_bytes_mut(&mut self.staging)[..len]
    }

    /// Queues bytes to be written.
    pub(super) fn queue(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Queues a frame, and the chunk's bytes behind a data header.
    pub(super) fn queue_frame(&mut self, frame: Frame, payload: Option<&[u8]>) {
        self.queue(&frame.encode());
        self.payload = payload.map(|p| Outgoing { ptr: p.as_ptr(), len: p.len() });
    }

    /// Whether another frame may be queued: none is half written, and not much is waiting.
    pub(super) fn has_room(&self) -> bool {
        self.payload.is_none() && self.out.len() < 4096
    }

    pub(super) fn queue_gossip(&mut self, message: &Arc<[u8]>) {
        if self.gossip.len() == GOSSIP_MAX {
            self.gossip.pop_front();
        }
        self.gossip.push_back(Arc::clone(message));
    }

    /// Whether bytes wait to be written.
    pub(super) fn has_pending(&self) -> bool {
        self.out_written < self.out.len() || self.payload.is_some()
    }

    /// Writes what is queued; true when nothing is left.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while self.has_pending() {
            let payload: &[u8] = match &self.payload {
                // SAFETY: the driver keeps the source of an open lane valid (see `Source::new`).
                Some(p) => unsafe { std::slice::from_raw_parts(p.ptr, p.len) },
                None => &[],
            };
            let slices = [IoSlice::new(&self.out[self.out_written..]), IoSlice::new(payload)];
            let message = MsgHdr::new().with_buffers(&slices);
            let mut written = match self.socket.sendmsg(&message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            };
            self.unsettled = true;
            let head = written.min(self.out.len() - self.out_written);
            self.out_written += head;
            written -= head;
            if self.out_written == self.out.len() {
                self.out.clear();
                self.out_written = 0;
            }
            if let Some(p) = &mut self.payload {
                // SAFETY: `written` bytes of the payload are out; the rest is still inside it.
                p.ptr = unsafe { p.ptr.add(written) };
                p.len -= written;
                if p.len == 0 && self.out.is_empty() {
                    self.payload = None;
                }
            }
        }
        Ok(true)
    }

    /// What the kernel says of our outgoing bytes.
    pub(super) fn progress(&mut self) -> io::Result<LaneProgress> {
        let KernelProgress { acked, unacked_segments, unsent_bytes } = socket::progress(&self.socket)?;
        let pending = self.has_pending();
        let outstanding = pending || unacked_segments > 0 || unsent_bytes > 0;
        self.unsettled = outstanding;
        Ok(LaneProgress { acked, outstanding, small: !pending && unacked_segments <= 1 && unsent_bytes == 0 })
    }
}

const HEADER_MAX: usize = {
    let sizes = [HEADER_BYTES, HELLO_BYTES, CHALLENGE_BYTES, WELCOME_BYTES];
    let (mut most, mut i) = (0, 0);
    while i < sizes.len() {
        if sizes[i] > most {
            most = sizes[i];
        }
        i += 1;
    }
    most
};

/// Reads what is there; 0 when the socket is empty.
fn read_into(socket: &Socket, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: initialised bytes may be written as maybe-uninitialised ones; `recv` only stores bytes.
    let buffer = unsafe { &mut *(std::ptr::from_mut(buffer) as *mut [MaybeUninit<u8>]) };
    loop {
        match socket.recv_with_flags(buffer, libc::MSG_DONTWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(e) => return Err(e),
        }
    }
}

/// Reads until `buffer` is full (true) or the socket is empty.
fn read_all(socket: &Socket, buffer: &mut [u8], read: &mut usize) -> io::Result<bool> {
    while *read < buffer.len() {
        match read_into(socket, &mut buffer[*read..])? {
            0 => return Ok(false),
            n => *read += n,
        }
    }
    Ok(true)
}

fn as_bytes_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: every byte pattern is a valid u8 and u64; the length in bytes is exact.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
