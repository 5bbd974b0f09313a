//! One non-blocking socket of a link: handshake, then frames. Owns the partly read and the partly written
//! frame; knows nothing of links. A frame half written dies with its connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::Arc;

use socket2::{MaybeUninitSlice, MsgHdr, Socket};

use super::handshake::{Acceptor, CHALLENGE_BYTES, Connector, HELLO_BYTES, WELCOME_BYTES};
use super::socket::{self, KernelProgress};
use crate::repair::{Chunk, DeliveryRate, Frame, HEADER_BYTES, Lane, LaneProgress, Time};

/// A body of which more than this is missing wakes its reader once so much more has come, or all of it, and not for
/// every segment. No more, so that the bytes are still in the processor's caches and the kernel has room for them.
const WAKE_BYTES: std::ops::RangeInclusive<usize> = 8 << 10..=60 << 10;
/// A chunk of at most so many bytes travels by itself. The kernel would put those of a slow NIC together into segments of
/// 64 KiB, which a queue that holds 10 ms of that NIC's bytes drops, and of which nothing is heard until all is through.
const ALONE_BYTES: usize = 32 << 10;
/// Least time between two acknowledgements that the kernel is told to send.
const ACKNOWLEDGE_TIME: Time = Time::from_millis(2);
/// The same while bytes of ours wait to be written, whose segments acknowledge what has come.
const ACKNOWLEDGE_TIME_BUSY: Time = Time::from_millis(20);
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
    /// Bytes read and not used yet: `ahead[ahead_start..ahead_end]`.
    ahead: [u8; AHEAD_BYTES],
    ahead_start: usize,
    ahead_end: usize,
    /// The last read brought less than was asked for: the socket is empty.
    drained: bool,
    pub(super) body: Body,
    body_read: usize,
    body_len: usize,
    staging: Vec<u64>,
    out: Vec<u8>,
    out_written: usize,
    payload: Option<Outgoing>,
    /// Nothing that is written later joins the segment of what is queued.
    alone: bool,
    pub(super) gossip: VecDeque<Arc<[u8]>>,
    /// Bytes were written since the kernel last said that nothing is outstanding.
    pub(super) unsettled: bool,
    /// The kernel tells when it has room.
    pub(super) wants_write: bool,
    /// It had none when it was last asked, and has not told of any since.
    pub(super) full: bool,
    /// What the kernel was told to hold at most.
    outstanding_bound: u64,
    /// Bytes that have to be there before the socket counts as readable.
    wakes_at: usize,
    /// When the kernel was last told to acknowledge at once.
    acknowledged_at: Time,
    /// Small frames have come since then.
    pub(super) owes_ack: bool,
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
            ahead: [0; AHEAD_BYTES],
            ahead_start: 0,
            ahead_end: 0,
            drained: false,
            body: Body::None,
            body_read: 0,
            body_len: 0,
            staging: Vec::new(),
            out: Vec::new(),
            out_written: 0,
            payload: None,
            alone: false,
            gossip: VecDeque::new(),
            unsettled: false,
            wants_write: false,
            full: false,
            outstanding_bound: 0,
            wakes_at: 1,
            acknowledged_at: Time::ZERO,
            owes_ack: false,
        }
    }

    /// Small frames have been read, and the other side takes silence for a stall. Where they come one after the
    /// other, one acknowledgement in a while is enough: if `owes_ack` is set, this is due again at the next tick.
    pub(super) fn acknowledge(&mut self, now: Time) {
        let least = if self.has_pending() { ACKNOWLEDGE_TIME_BUSY } else { ACKNOWLEDGE_TIME };
        self.owes_ack = now.saturating_sub(self.acknowledged_at) < least;
        if !self.owes_ack {
            self.acknowledged_at = now;
            socket::acknowledge_now(&self.socket);
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

    /// Reads one handshake message of `N` bytes if it is all there, and nothing beyond it.
    pub(super) fn read_message<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        const { assert!(N <= AHEAD_BYTES) };
        while self.ahead_end < N {
            match receive(&self.socket, &mut self.ahead[self.ahead_end..N], &mut [])? {
                0 => return Ok(None),
                n => self.ahead_end += n,
            }
        }
        self.ahead_end = 0;
        let mut message = [0; N];
        message.copy_from_slice(&self.ahead[..N]);
        Ok(Some(message))
    }

    /// The socket is ready again.
    pub(super) fn begin_turn(&mut self) {
        self.drained = false;
    }

    /// Reads on until something is complete or the socket is empty. One system call fetches the rest of a payload
    /// and the header behind it; a short read ends the turn, because the next event comes if there is more.
    pub(super) fn read(&mut self, direct: Option<&mut [u8]>) -> io::Result<Progress> {
        if matches!(self.body, Body::None) {
            return self.read_header();
        }
        let (socket, len) = (&self.socket, self.body_len);
        let place = match (&self.body, direct) {
            (Body::Direct(_), Some(place)) => &mut place[..len],
            (Body::Direct(_), None) => return Err(io::Error::other("no destination for a chunk")),
            _ => &mut as_bytes_mut(&mut self.staging)[..len],
        };
        let known = (self.ahead_end - self.ahead_start).min(len - self.body_read);
        let from = &self.ahead[self.ahead_start..self.ahead_start + known];
        place[self.body_read..self.body_read + known].copy_from_slice(from);
        self.ahead_start += known;
        self.body_read += known;
        while self.body_read < len {
            if self.drained {
                return Ok(Progress::Blocked);
            }
            let rest = len - self.body_read;
            let read = receive(socket, &mut place[self.body_read..], &mut self.ahead)?;
            self.drained = read < rest + AHEAD_BYTES;
            self.body_read += read.min(rest);
            (self.ahead_start, self.ahead_end) = (0, read.saturating_sub(rest));
        }
        Ok(Progress::Payload)
    }

    fn read_header(&mut self) -> io::Result<Progress> {
        while self.ahead_end - self.ahead_start < HEADER_BYTES {
            if self.drained {
                return Ok(Progress::Blocked);
            }
            self.ahead.copy_within(self.ahead_start..self.ahead_end, 0);
            (self.ahead_start, self.ahead_end) = (0, self.ahead_end - self.ahead_start);
            let read = receive(&self.socket, &mut self.ahead[self.ahead_end..], &mut [])?;
            self.ahead_end += read;
            self.drained = self.ahead_end < AHEAD_BYTES;
        }
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&self.ahead[self.ahead_start..self.ahead_start + HEADER_BYTES]);
        self.ahead_start += HEADER_BYTES;
        Frame::decode(&header).map(Progress::Header).map_err(io::Error::other)
    }

    /// Bytes of the payload that is being read which have not been read.
    fn missing(&self) -> usize {
        if matches!(self.body, Body::None) { 0 } else { self.body_len - self.body_read }
    }

    /// Whether what has been read ahead completes nothing.
    pub(super) fn needs_more(&self) -> bool {
        let next = if matches!(self.body, Body::None) { HEADER_BYTES } else { self.missing() };
        self.ahead_end - self.ahead_start < next
    }

    /// The socket is left for now: says when it is to be read again.
    pub(super) fn end_turn(&mut self) {
        let missing = self.missing();
        let wakes_at = if missing > *WAKE_BYTES.start() { missing.min(*WAKE_BYTES.end()) } else { 1 };
        if wakes_at != self.wakes_at {
            self.wakes_at = wakes_at;
            socket::wake_at(&self.socket, wakes_at);
        }
    }

    /// A payload of `len` bytes follows the header just read.
    pub(super) fn expect(&mut self, body: Body, len: usize) {
        if !matches!(body, Body::Direct(_)) && self.staging.len() * 8 < len {
            self.staging.resize(len.div_ceil(8), 0);
        }
        (self.body, self.body_len, self.body_read) = (body, len, 0);
    }

    /// Length of the payload that is being read.
    pub(super) fn payload_bytes(&self) -> usize {
        self.body_len
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
        self.alone = payload.is_some_and(|p| p.len() <= ALONE_BYTES);
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
            let alone = if self.alone { libc::MSG_EOR } else { 0 };
            let mut written = match self.socket.sendmsg(&message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | alone) {
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

    /// What the kernel says of our outgoing bytes, and the delivery rate that it measured.
    pub(super) fn progress(&mut self) -> io::Result<(LaneProgress, Option<DeliveryRate>)> {
        let KernelProgress { acked, unacked_segments, few_bytes, unsent_bytes, closed, delivery } =
            socket::progress(&self.socket)?;
        let pending = self.has_pending();
        self.unsettled = pending || unacked_segments > 0 || unsent_bytes > 0;
        // A peer whose process does not read is no dead path.
        let outstanding = self.unsettled && !closed;
        let small = !pending && (unacked_segments <= 1 || few_bytes) && unsent_bytes == 0;
        Ok((LaneProgress { acked, outstanding, small }, delivery.filter(|_| outstanding)))
    }

    /// Bounds what the kernel may hold for us, if that differs much from what it was told last.
    pub(super) fn bound_outstanding(&mut self, bytes: u64) {
        if bytes.abs_diff(self.outstanding_bound) > bytes / 8 {
            self.outstanding_bound = bytes;
            tracing::trace!(lane = ?self.lane, bytes, "bound of what the kernel may hold");
            socket::bound_outstanding(&self.socket, bytes);
        }
    }
}

/// Bytes that may be read beyond what is needed; holds every handshake message, and several control frames.
const AHEAD_BYTES: usize = 256;
const _: () = assert!(AHEAD_BYTES >= HEADER_BYTES && AHEAD_BYTES >= HELLO_BYTES);
const _: () = assert!(AHEAD_BYTES >= CHALLENGE_BYTES && AHEAD_BYTES >= WELCOME_BYTES);

/// Reads what is there into `first`, then into `second`; 0 when the socket is empty.
fn receive(socket: &Socket, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
    // SAFETY: initialised bytes may be written as maybe-uninitialised ones; `recv` only stores bytes.
    let [first, second] = unsafe { [uninit(first), uninit(second)] };
    loop {
        let outcome = if second.is_empty() {
            socket.recv_with_flags(first, libc::MSG_DONTWAIT)
        } else {
            let mut slices = [MaybeUninitSlice::new(first), MaybeUninitSlice::new(second)];
            socket.recv_vectored_with_flags(&mut slices, libc::MSG_DONTWAIT).map(|(n, _)| n)
        };
        match outcome {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(e) => return Err(e),
        }
    }
}

/// # Safety
/// Nothing may be written through the result but initialised bytes.
unsafe fn uninit(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    // SAFETY: same layout; the caller keeps the bytes initialised.
    unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
}

fn as_bytes_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: every byte pattern is a valid u8 and u64; the length in bytes is exact.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
