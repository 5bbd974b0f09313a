//! Segments of a connection: what is sent when, what an end takes of it, and what is sent again.

use r2cc::repair::Time;

use super::{End, Event, IN_FLIGHT_MAX, Net, Port, QUEUED, RTO, Segment};

impl Net {
    pub(super) fn pump(&mut self, conn: usize, side: usize) {
        let segment = self.plan.segment as u64;
        loop {
            let c = &self.conns[conn];
            let pipe = &c.pipes[side];
            let may_send = c.ends[side] == End::Open || (c.ends[side] == End::Closed && pipe.fin);
            let unsent = pipe.written - pipe.sent;
            let room = (pipe.acked + IN_FLIGHT_MAX).min(pipe.limit).saturating_sub(pipe.sent);
            let len = segment.min(unsent).min(room);
            let owes_fin = pipe.fin && unsent == 0 && !pipe.shut;
            if !may_send || (len == 0 && !owes_fin) {
                break;
            }
            let (from, to) = (c.ports[side], c.ports[1 - side]);
            if pipe.departs > self.now + QUEUED {
                let at = pipe.departs - QUEUED / 2;
                if pipe.pump_at < self.now {
                    self.conns[conn].pipes[side].pump_at = at;
                    self.push(at, Event::Pump { conn, side });
                }
                return;
            }
            let start = pipe.sent;
            let at = (start - pipe.acked) as usize;
            let bytes: Vec<u8> = pipe.buf.range(at..at + len as usize).copied().collect();
            let fin = pipe.fin && len == unsent;
            self.conns[conn].pipes[side].sent += len;
            self.transmit(conn, side, from, to, start, bytes, fin);
            if owes_fin {
                break;
            }
        }
        let pipe = &mut self.conns[conn].pipes[side];
        if pipe.written > pipe.acked && pipe.timer == 0 {
            self.arm(conn, side);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a segment")]
    fn transmit(&mut self, conn: usize, side: usize, from: Port, to: Port, start: u64, bytes: Vec<u8>, fin: bool) {
        let other = &mut self.conns[conn].pipes[1 - side];
        let ack = other.rcv_next;
        let limit = ack + (self.plan.receive_buffer - other.rcv.len()) as u64;
        (other.unacked_segments, other.ack_timer) = (0, other.ack_timer + 1);
        let nic = &mut self.nics[from.host][from.nic];
        let wire = Time::from_nanos((bytes.len() as u64 + 20) * 1_000_000_000 / nic.rate);
        nic.busy_until = nic.busy_until.max(self.now) + wire;
        let depart = nic.busy_until;
        if !bytes.is_empty() {
            self.conns[conn].pipes[side].departs = depart;
        }
        if !self.is_dropped(from, to) {
            let at = depart + self.plan.delay[from.nic];
            self.push(at, Event::Segment(Segment { conn, side, start, bytes, ack, limit, fin }));
        }
    }

    pub(super) fn send_ack(&mut self, conn: usize, side: usize) {
        let c = &self.conns[conn];
        let (from, to, start) = (c.ports[side], c.ports[1 - side], c.pipes[side].sent);
        self.transmit(conn, side, from, to, start, Vec::new(), false);
    }

    pub(super) fn arm(&mut self, conn: usize, side: usize) {
        self.entries += 1;
        let (timer, pipe) = (self.entries, &mut self.conns[conn].pipes[side]);
        pipe.timer = timer;
        let wait = RTO * (1 << pipe.timeouts.min(9));
        self.push(self.now + wait, Event::Timeout { conn, side, timer });
    }

    pub(super) fn handle_segment(&mut self, s: Segment) {
        let (conn, side, here) = (s.conn, s.side, 1 - s.side);
        let (from, to) = (self.conns[conn].ports[side], self.conns[conn].ports[here]);
        if !self.passes(from, to) {
            return;
        }
        let c = &mut self.conns[conn];
        let reads_late = here == 0 && c.reads_late;
        match c.ends[here] {
            End::Open => {}
            End::Closed if reads_late || c.pipes[here].fin => {}
            End::Closed | End::Lost => {
                if !s.bytes.is_empty() && c.ends[side] == End::Open {
                    self.send_small(to, from, Event::Reset { conn, side });
                }
                return;
            }
            End::Waiting => return,
        }
        self.take_ack(conn, here, s.ack, s.limit, s.bytes.is_empty());
        let c = &mut self.conns[conn];
        let unread = c.ends[here] == End::Closed && !reads_late;
        let pipe = &mut c.pipes[side];
        let (start, end) = (s.start, s.start + s.bytes.len() as u64);
        if start <= pipe.rcv_next && end > pipe.rcv_next {
            let room = self.plan.receive_buffer - pipe.rcv.len();
            let fresh = &s.bytes[(pipe.rcv_next - start) as usize..];
            let taken = fresh.len().min(room);
            if !unread {
                pipe.rcv.extend(&fresh[..taken]);
            }
            pipe.rcv_next += taken as u64;
            pipe.unacked_segments += 1;
            if pipe.unacked_segments >= 2 || taken < fresh.len() {
                self.send_ack(conn, here);
            } else {
                let timer = pipe.ack_timer;
                self.push(self.now + Time::from_millis(40), Event::DelayedAck { conn, side: here, timer });
            }
            self.wake_soon(to.host);
        } else if !s.bytes.is_empty() {
            self.send_ack(conn, here);
        }
        let pipe = &mut self.conns[conn].pipes[side];
        if s.fin && end == pipe.rcv_next && !pipe.shut {
            pipe.shut = true;
            self.wake_soon(to.host);
        }
    }

    /// An acknowledgement of what `side` has written.
    fn take_ack(&mut self, conn: usize, side: usize, ack: u64, limit: u64, bare: bool) {
        let pipe = &mut self.conns[conn].pipes[side];
        pipe.limit = pipe.limit.max(limit);
        if ack > pipe.acked {
            let n = (ack - pipe.acked).min(pipe.buf.len() as u64);
            pipe.buf.drain(..n as usize);
            pipe.acked += n;
            pipe.sent = pipe.sent.max(pipe.acked);
            (pipe.repeats, pipe.timeouts, pipe.timer) = (0, 0, 0);
            let host = self.conns[conn].ports[side].host;
            self.wake_soon(host);
        } else if bare && pipe.sent > pipe.acked {
            pipe.repeats += 1;
            if pipe.repeats == 3 {
                pipe.sent = pipe.acked;
            }
        }
        self.pump(conn, side);
    }
}
