//! The virtual network: NICs with rates, delays and faults, and connections made of two in-order byte
//! pipes with what repair depends on: kernel acknowledgements (delayed for a single segment), closed
//! windows, retransmission with back-off, half-open ends, resets, closing while bytes are still on the way.
//! It knows nothing of frames. Start at [`Net::handle`].

mod segments;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use r2cc::repair::{Lane, Time};

use super::draw::Draw;
use super::trace::Trace;

/// A NIC of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    pub host: usize,
    pub nic: usize,
}

/// Limits of the network of a run.
#[derive(Clone, Debug)]
pub struct NetPlan {
    pub delay: Vec<Time>,
    pub rates: Vec<u64>,
    pub segment: usize,
    pub send_buffer: usize,
    pub receive_buffer: usize,
    pub wake: (u64, u64),
}

#[derive(Clone, Debug)]
pub struct Nic {
    pub tx: bool,
    pub rx: bool,
    pub rate: u64,
    pub loss_permille: u64,
    busy_until: Time,
}

#[derive(Clone, Debug, Default)]
pub struct HostClock {
    pub paused_until: Time,
    pub refuses: bool,
    pub deaf: bool,
    wake_at: Option<Time>,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Waiting,
    Open,
    Lost,
    Closed,
}

#[derive(Debug, Default)]
struct Pipe {
    buf: VecDeque<u8>,
    written: u64,
    sent: u64,
    acked: u64,
    limit: u64,
    departs: Time,
    pump_at: Time,
    repeats: u32,
    timeouts: u32,
    timer: u64,
    fin: bool,
    rcv: VecDeque<u8>,
    rcv_next: u64,
    unacked_segments: u32,
    ack_timer: u64,
    shut: bool,
}

/// A connection of a link; side 0 opened it, side 1 accepted it.
#[derive(Debug)]
pub struct Conn {
    pub link: usize,
    pub lane: Lane,
    ports: [Port; 2],
    pub ends: [End; 2],
    pipes: [Pipe; 2],
    /// Bytes that come to the closed end of side 0 are still kept, to be delivered late.
    pub reads_late: bool,
}

#[derive(Debug)]
pub struct Segment {
    conn: usize,
    side: usize,
    start: u64,
    bytes: Vec<u8>,
    ack: u64,
    limit: u64,
    fin: bool,
}

#[derive(Debug)]
pub enum Event {
    Syn { conn: usize, tries: u32 },
    SynArrived { conn: usize },
    Established { conn: usize },
    Segment(Segment),
    Timeout { conn: usize, side: usize, timer: u64 },
    DelayedAck { conn: usize, side: usize, timer: u64 },
    Pump { conn: usize, side: usize },
    Reset { conn: usize, side: usize },
    Wake { host: usize },
    Tick { host: usize },
    Fault(usize),
    Hint { port: Port, up: bool },
    TearDown { link: usize, side: usize },
}

struct Entry(Time, u64, Event);
impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

const RTO: Time = Time::from_millis(200);
const IN_FLIGHT_MAX: u64 = 32 << 10;
/// What one connection may have waiting in its NIC: they take turns.
const QUEUED: Time = Time::from_micros(500);

pub struct Net {
    pub now: Time,
    queue: BinaryHeap<Reverse<Entry>>,
    entries: u64,
    pub draw: Draw,
    pub plan: NetPlan,
    pub nics: Vec<Vec<Nic>>,
    pub hosts: Vec<HostClock>,
    pub cut: BTreeSet<(Port, Port)>,
    pub conns: Vec<Conn>,
    /// Connections that a host has accepted and its process not yet seen: (host, connection).
    pub accepted: Vec<(usize, usize)>,
    pub trace: Trace,
}

impl Net {
    pub fn new(plan: NetPlan, hosts: usize, draw: Draw, trace: Trace) -> Self {
        let nic = |rate: &u64| Nic { tx: true, rx: true, rate: *rate, loss_permille: 0, busy_until: Time::ZERO };
        Self {
            now: Time::ZERO,
            queue: BinaryHeap::new(),
            entries: 0,
            draw,
            nics: (0..hosts).map(|_| plan.rates.iter().map(nic).collect()).collect(),
            hosts: vec![HostClock::default(); hosts],
            cut: BTreeSet::new(),
            conns: Vec::new(),
            accepted: Vec::new(),
            trace,
            plan,
        }
    }

    pub fn push(&mut self, at: Time, event: Event) {
        self.entries += 1;
        self.queue.push(Reverse(Entry(at.max(self.now), self.entries, event)));
    }

    /// The next event; the clock moves to it.
    pub fn pop(&mut self) -> Option<Event> {
        let Reverse(Entry(at, _, event)) = self.queue.pop()?;
        self.now = at;
        Some(event)
    }

    pub fn events(&self) -> u64 {
        self.entries
    }

    /// The process on `host` has something to do at `at`.
    pub fn wake(&mut self, host: usize, at: Time) {
        let at = at.max(self.now).max(self.hosts[host].paused_until);
        if self.hosts[host].wake_at.is_none_or(|due| due > at) {
            self.hosts[host].wake_at = Some(at);
            self.push(at, Event::Wake { host });
        }
    }

    fn wake_soon(&mut self, host: usize) {
        let (least, most) = self.plan.wake;
        let at = self.now + self.draw.micros(least, most);
        self.wake(host, at);
    }

    /// Whether the wake that fired is still wanted and the process can run.
    pub fn is_awake(&mut self, host: usize) -> bool {
        if self.hosts[host].wake_at != Some(self.now) {
            return false;
        }
        self.hosts[host].wake_at = None;
        if self.hosts[host].paused_until > self.now {
            self.wake(host, self.now);
            return false;
        }
        true
    }

    fn passes(&self, from: Port, to: Port) -> bool {
        self.nics[from.host][from.nic].tx && self.nics[to.host][to.nic].rx && !self.cut.contains(&(from, to))
    }

    fn is_dropped(&mut self, from: Port, to: Port) -> bool {
        let permille = self.nics[from.host][from.nic].loss_permille + self.nics[to.host][to.nic].loss_permille;
        !self.passes(from, to) || (permille > 0 && self.draw.below(1000) < permille)
    }

    fn delay(&mut self, from: Port) -> Time {
        self.plan.delay[from.nic] + self.draw.micros(0, 30)
    }

    /// Puts a small packet (no payload) on the wire.
    fn send_small(&mut self, from: Port, to: Port, event: Event) -> bool {
        if self.is_dropped(from, to) {
            return false;
        }
        let at = self.now + self.delay(from);
        self.push(at, event);
        true
    }

    pub fn connect(&mut self, link: usize, lane: Lane, from: Port, to: Port) -> usize {
        let conn = self.conns.len();
        let pipe = || Pipe { limit: self.plan.receive_buffer as u64, ..Pipe::default() };
        let ends = [End::Waiting, End::Waiting];
        let pipes = [pipe(), pipe()];
        self.conns.push(Conn { link, lane, ports: [from, to], ends, pipes, reads_late: false });
        self.push(self.now, Event::Syn { conn, tries: 0 });
        conn
    }

    pub fn space(&self, conn: usize, side: usize) -> usize {
        let c = &self.conns[conn];
        if c.ends[side] == End::Open { self.plan.send_buffer.saturating_sub(c.pipes[side].buf.len()) } else { 0 }
    }

    pub fn write(&mut self, conn: usize, side: usize, bytes: &[u8]) -> usize {
        let n = self.space(conn, side).min(bytes.len());
        let pipe = &mut self.conns[conn].pipes[side];
        pipe.buf.extend(&bytes[..n]);
        pipe.written += n as u64;
        self.pump(conn, side);
        n
    }

    /// Bytes that have come to `side`.
    pub fn read(&mut self, conn: usize, side: usize, into: &mut Vec<u8>, most: usize) {
        let (segment, room) = (self.plan.segment, self.plan.receive_buffer);
        let pipe = &mut self.conns[conn].pipes[1 - side];
        let was_full = room - pipe.rcv.len() < segment;
        let n = pipe.rcv.len().min(most);
        into.extend(pipe.rcv.drain(..n));
        if was_full && n > 0 {
            self.send_ack(conn, side);
        }
    }

    /// What is still on its way to `side`, as if repeated once more and let through.
    pub fn read_ahead(&mut self, conn: usize, side: usize, into: &mut Vec<u8>) {
        let pipe = &mut self.conns[conn].pipes[1 - side];
        let known = (pipe.rcv_next - pipe.acked) as usize;
        into.extend(pipe.buf.range(known.min(pipe.buf.len())..));
        pipe.rcv_next = pipe.rcv_next.max(pipe.written);
    }

    pub fn readable(&self, conn: usize, side: usize) -> usize {
        self.conns[conn].pipes[1 - side].rcv.len()
    }

    /// The other end has closed in good order and all its bytes are read.
    pub fn is_at_end(&self, conn: usize, side: usize) -> bool {
        let pipe = &self.conns[conn].pipes[1 - side];
        pipe.shut && pipe.rcv.is_empty()
    }

    /// Bytes acknowledged by the other host, and bytes written but not acknowledged.
    pub fn progress(&self, conn: usize, side: usize) -> (u64, u64) {
        let pipe = &self.conns[conn].pipes[side];
        (pipe.acked, pipe.written - pipe.acked)
    }

    /// Closes one end: at once (reset) or after what was written.
    pub fn close(&mut self, conn: usize, side: usize, reset: bool) {
        let c = &mut self.conns[conn];
        let before = c.ends[side];
        c.ends[side] = End::Closed;
        if matches!(before, End::Lost | End::Closed) {
            return;
        }
        if reset || before == End::Waiting {
            c.pipes[side].buf.clear();
            (c.pipes[side].written, c.pipes[side].sent) = (c.pipes[side].acked, c.pipes[side].acked);
            let (from, to) = (c.ports[side], c.ports[1 - side]);
            self.send_small(from, to, Event::Reset { conn, side: 1 - side });
        } else {
            c.pipes[side].fin = true;
            self.pump(conn, side);
        }
    }

    /// A reset made by something in between: both ends learn it if they can be reached.
    pub fn break_up(&mut self, conn: usize) {
        for side in 0..2 {
            self.push(self.now, Event::Reset { conn, side });
        }
    }

    /// Network events; the others are the world's.
    pub fn handle(&mut self, event: Event) {
        match event {
            Event::Syn { conn, tries } => self.handle_syn(conn, tries),
            Event::SynArrived { conn } => {
                let c = &mut self.conns[conn];
                let (from, to) = (c.ports[1], c.ports[0]);
                if self.hosts[from.host].refuses {
                    self.send_small(from, to, Event::Reset { conn, side: 0 });
                } else if self.hosts[from.host].deaf {
                    // This attempt is never answered, however often it is repeated.
                    c.ends[1] = End::Lost;
                } else {
                    c.ends[1] = End::Open;
                    self.accepted.push((from.host, conn));
                    self.send_small(from, to, Event::Established { conn });
                }
            }
            Event::Established { conn } if self.conns[conn].ends[0] == End::Waiting => {
                self.conns[conn].ends[0] = End::Open;
                self.wake_soon(self.conns[conn].ports[0].host);
            }
            Event::Segment(segment) => self.handle_segment(segment),
            Event::Timeout { conn, side, timer } => {
                let pipe = &mut self.conns[conn].pipes[side];
                if pipe.timer == timer {
                    pipe.timer = 0;
                    if pipe.written > pipe.acked {
                        pipe.timeouts += 1;
                        (pipe.sent, pipe.limit) = (pipe.acked, pipe.limit.max(pipe.acked + 1));
                        self.pump(conn, side);
                    }
                }
            }
            Event::DelayedAck { conn, side, timer } => {
                let pipe = &self.conns[conn].pipes[1 - side];
                if pipe.ack_timer == timer && pipe.unacked_segments > 0 {
                    self.send_ack(conn, side);
                }
            }
            Event::Pump { conn, side } => {
                self.conns[conn].pipes[side].pump_at = Time::ZERO;
                self.pump(conn, side);
            }
            Event::Reset { conn, side } => {
                // What came before the reset can still be read, as from a kernel's socket.
                if matches!(self.conns[conn].ends[side], End::Open | End::Waiting) {
                    self.conns[conn].ends[side] = End::Lost;
                    self.wake_soon(self.conns[conn].ports[side].host);
                }
            }
            _ => {}
        }
    }

    fn handle_syn(&mut self, conn: usize, tries: u32) {
        let c = &self.conns[conn];
        if c.ends[0] != End::Waiting {
            return;
        }
        let (from, to) = (c.ports[0], c.ports[1]);
        if c.ends[1] == End::Waiting {
            self.send_small(from, to, Event::SynArrived { conn });
        } else if c.ends[1] == End::Open {
            self.send_small(to, from, Event::Established { conn });
        } else if c.ends[1] == End::Closed {
            self.send_small(to, from, Event::Reset { conn, side: 0 });
        }
        let again = self.now + Time::from_secs(1 << tries.min(6));
        self.push(again, Event::Syn { conn, tries: tries + 1 });
    }
}
