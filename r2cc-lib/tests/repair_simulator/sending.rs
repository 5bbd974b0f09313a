//! The model driver of a sending end: real frames over virtual lanes, buffers recycled the moment the
//! machine says done. Like the TCP driver it does what the machine asks and nothing of its own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use r2cc::repair::{Action, Cause, Chunk, Frame, HEADER_BYTES, Lane, LaneProgress, PathId, Sender, Time, Tuning};

use super::check::Judge;
use super::content;
use super::net::{End, Net};
use super::scenario::LinkPlan;

/// First bytes on a connection, and the answer.
pub const HELLO: u8 = 0x48;
pub const WELCOME: u8 = 0x57;

struct Writing {
    head: [u8; HEADER_BYTES],
    chunk: Option<Chunk>,
    at: usize,
}

struct SendLane {
    conn: usize,
    greeted: bool,
    opened: bool,
    writing: Option<Writing>,
    inbound: Vec<u8>,
    sent: Vec<u64>,
    resume_at: Time,
    /// Until then answers are read but not handled, as when another queue is served first.
    hold_until: Time,
    hold_again_at: Time,
}

/// A lane that is closed while answers on it are still under way to the machine.
struct LateLane {
    lane: Lane,
    conn: usize,
    due: Time,
    inbound: Vec<u8>,
    sent: Vec<u64>,
}

pub struct SendEnd {
    link: usize,
    host: usize,
    pub machine: Sender,
    tuning: Arc<Tuning>,
    lanes: BTreeMap<Lane, SendLane>,
    late: Vec<LateLane>,
    slots: Vec<Vec<u8>>,
    free: Vec<bool>,
    next: u64,
    post_at: Time,
    actions: VecDeque<Action>,
    pub dead: bool,
}

impl SendEnd {
    pub fn new(link: usize, plan: &LinkPlan, tuning: Arc<Tuning>, now: Time) -> Self {
        let most = plan.sizes.iter().copied().max().unwrap_or(0);
        Self {
            link,
            host: plan.from,
            machine: Sender::new(Arc::clone(&tuning), plan.paths.len(), now),
            tuning,
            lanes: BTreeMap::new(),
            late: Vec::new(),
            slots: vec![content::recycled(most); plan.send_slots],
            free: vec![true; plan.send_slots],
            next: 0,
            post_at: plan.start,
            actions: VecDeque::new(),
            dead: false,
        }
    }

    /// Lanes that this end has open or is opening.
    pub fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        self.lanes.keys().copied()
    }

    /// One run of the I/O thread.
    pub fn run(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        let mut lanes: Vec<Lane> = self.lanes.keys().copied().collect();
        if !plan.quiet && !lanes.is_empty() {
            let by = net.draw.index(lanes.len());
            lanes.rotate_left(by);
        }
        self.read_late(net, judge);
        for lane in &lanes {
            self.read(net, judge, plan, *lane);
            self.act(net, judge, plan);
        }
        self.post(net, judge, plan);
        self.finish(net, judge, plan);
        let lanes: Vec<Lane> = self.lanes.keys().copied().collect();
        for lane in lanes {
            self.write(net, judge, plan, lane);
        }
        self.act(net, judge, plan);
        self.finish(net, judge, plan);
    }

    fn read(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane) {
        let now = net.now;
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        net.read(end.conn, 0, &mut end.inbound, usize::MAX);
        if !end.opened && end.inbound.first() == Some(&WELCOME) {
            end.inbound.remove(0);
            end.opened = true;
            net.trace.note(now, format_args!("{} opened {lane:?}", self.link));
            let result = self.machine.handle_lane_opened(now, lane);
            self.must(net, result);
        }
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        if plan.late_answers && end.hold_again_at <= now && net.draw.chance(25) {
            let hold = net.draw.micros(500, 40_000);
            (end.hold_until, end.hold_again_at) = (now + hold, now + hold * 4);
        }
        if end.hold_until <= now {
            let mut inbound = std::mem::take(&mut end.inbound);
            let sent = std::mem::take(&mut end.sent);
            self.frames(net, judge, lane, &mut inbound, &sent);
            let Some(end) = self.lanes.get_mut(&lane) else { return };
            (end.inbound, end.sent) = (inbound, sent);
        }
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        if net.conns[end.conn].ends[0] == End::Lost || net.is_at_end(end.conn, 0) {
            judge.coverage.half_frame_cut |= end.writing.is_some();
            net.close(end.conn, 0, true);
            if let Some(end) = self.lanes.remove(&lane) {
                self.keep_late(net, plan, lane, end);
            }
            net.trace.note(now, format_args!("{} lost {lane:?}", self.link));
            let result = self.machine.handle_lane_lost(now, lane, Cause::Connection);
            self.must(net, result);
        }
    }

    fn frames(&mut self, net: &mut Net, judge: &mut Judge, lane: Lane, inbound: &mut Vec<u8>, sent: &[u64]) {
        let mut at = 0;
        while inbound.len() - at >= HEADER_BYTES {
            let head: [u8; HEADER_BYTES] = inbound[at..at + HEADER_BYTES].try_into().unwrap();
            at += HEADER_BYTES;
            let frame = match Frame::decode(&head) {
                Ok(frame) => frame,
                Err(error) => {
                    net.trace.fail(net.now, format_args!("{} sender reads {error}", self.link));
                    return;
                }
            };
            net.trace.note(net.now, format_args!("{} {lane:?} -> sender {frame:?}", self.link));
            let before = self.machine.totals().late_acks;
            let result = self.machine.handle_frame(net.now, lane, frame);
            self.must(net, result);
            if let Frame::Ack { chunks, .. } = frame
                && self.machine.totals().late_acks > before
            {
                let named = &sent[..sent.len().min(chunks as usize)];
                judge.coverage.late_ack_after_recycle |= named.iter().any(|m| judge.is_done(*m));
            }
        }
        inbound.drain(..at);
    }

    fn read_late(&mut self, net: &mut Net, judge: &mut Judge) {
        let now = net.now;
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.late).into_iter().partition(|l| l.due <= now);
        self.late = rest;
        for mut late in due {
            net.read(late.conn, 0, &mut late.inbound, usize::MAX);
            net.read_ahead(late.conn, 0, &mut late.inbound);
            net.conns[late.conn].reads_late = false;
            let sent = std::mem::take(&mut late.sent);
            self.frames(net, judge, late.lane, &mut late.inbound, &sent);
        }
    }

    fn must<T, E: std::fmt::Display>(&self, net: &mut Net, result: Result<T, E>) {
        if let Err(error) = result {
            net.trace.fail(net.now, format_args!("link {} sender: {error}", self.link));
        }
    }

    fn act(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        self.transitions(net, judge);
        while let Some(action) = self.machine.poll_action() {
            self.actions.push_back(action);
        }
        while let Some(action) = self.actions.pop_front() {
            let now = net.now;
            net.trace.note(now, format_args!("{} sender {action:?}", self.link));
            match action {
                Action::Open(lane) => self.open(net, plan, lane),
                Action::Close(lane) => self.close(net, judge, plan, lane),
                Action::Dead { .. } => {
                    judge.handle_dead(now, &mut net.trace, action, &self.tuning);
                    self.dead = true;
                }
            }
        }
    }

    fn open(&mut self, net: &mut Net, plan: &LinkPlan, lane: Lane) {
        let siblings = self.lanes.keys().filter(|l| l.path == lane.path).count();
        if siblings > 2 || self.lanes.contains_key(&lane) {
            net.trace.fail(net.now, format_args!("link {}: {lane:?} opened beside {siblings} others", self.link));
        }
        let (from, to) = plan.paths[usize::from(lane.path.0)];
        let conn = net.connect(self.link, lane, from, to);
        let (writing, inbound, sent) = (None, Vec::new(), Vec::new());
        let (greeted, opened) = (false, false);
        let (resume_at, hold_until, hold_again_at) = (Time::ZERO, Time::ZERO, Time::ZERO);
        let end = SendLane { conn, greeted, opened, writing, inbound, sent, resume_at, hold_until, hold_again_at };
        self.lanes.insert(lane, end);
    }

    fn close(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane) {
        let Some(end) = self.lanes.remove(&lane) else { return };
        judge.coverage.half_frame_cut |= end.writing.is_some();
        let reset = net.draw.chance(50);
        net.close(end.conn, 0, reset);
        self.keep_late(net, plan, lane, end);
    }

    /// Answers that were under way when the lane went may still reach the machine, as completions do.
    fn keep_late(&mut self, net: &mut Net, plan: &LinkPlan, lane: Lane, end: SendLane) {
        if plan.late_answers && end.opened && net.draw.chance(80) {
            let (least, most) = net.draw.pick(&[(500, 5000), (5000, 40_000), (20_000, 200_000)]);
            let due = net.now + net.draw.micros(least, most);
            net.conns[end.conn].reads_late = true;
            let (inbound, sent) = (end.inbound, end.sent);
            self.late.push(LateLane { lane, conn: end.conn, due, inbound, sent });
            net.wake(self.host, due);
        }
    }

    /// Closes everything, as when the link is torn down.
    pub fn tear_down(&mut self, net: &mut Net) {
        for end in self.lanes.values() {
            let reset = net.draw.chance(50);
            net.close(end.conn, 0, reset);
        }
        self.lanes.clear();
    }

    pub fn transitions(&mut self, net: &mut Net, judge: &mut Judge) {
        while let Some(t) = self.machine.poll_transition() {
            net.trace.note(net.now, format_args!("{} {t:?}", self.link));
            judge.handle_transition(net.now, &mut net.trace, t, self.machine.is_busy());
        }
    }

    fn post(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        while self.next < plan.sizes.len() as u64 && net.now >= self.post_at {
            let slot = (self.next % plan.send_slots as u64) as usize;
            if !self.free[slot] {
                return;
            }
            let bytes = plan.sizes[self.next as usize];
            self.free[slot] = false;
            self.slots[slot][..bytes].copy_from_slice(&content::message(self.link, self.next, bytes));
            let seq = self.machine.post(bytes as u64);
            judge.handle_posted(net.now, seq, bytes as u64);
            net.trace.note(net.now, format_args!("{} posts {seq:?} of {bytes}", self.link));
            if seq.0 != self.next {
                net.trace.fail(net.now, format_args!("link {}: posted {} as {seq:?}", self.link, self.next));
            }
            self.next += 1;
            self.post_at = net.now + net.draw.micros(plan.post_gap.0, plan.post_gap.1);
        }
        if self.next < plan.sizes.len() as u64 && self.post_at > net.now {
            net.wake(self.host, self.post_at);
        }
    }

    fn finish(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        let mut freed = false;
        while let Some(seq) = self.machine.poll_done() {
            net.trace.note(net.now, format_args!("{} done {seq:?}", self.link));
            judge.handle_done(net.now, &mut net.trace, seq);
            let slot = (seq.0 % plan.send_slots as u64) as usize;
            self.slots[slot].fill(0xdd);
            self.free[slot] = true;
            freed = true;
        }
        if freed {
            self.post(net, judge, plan);
            net.wake(self.host, net.now + Time::from_micros(10));
        }
    }

    fn write(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane) {
        let now = net.now;
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        if !end.greeted && net.space(end.conn, 0) > 0 {
            net.write(end.conn, 0, &[HELLO]);
            end.greeted = true;
        }
        if end.resume_at > now || !end.opened {
            return;
        }
        loop {
            let space = net.space(end.conn, 0);
            let Some(writing) = &mut end.writing else {
                if space < if plan.quiet { plan.whole_frame } else { 1 } {
                    return;
                }
                let Some(frame) = self.machine.poll_frame(now, lane) else { return };
                net.trace.note(now, format_args!("{} {lane:?} <- sender {frame:?}", self.link));
                let chunk = if let Frame::Data(chunk) = frame { Some(chunk) } else { None };
                if let Frame::Fence { path, generation } = frame {
                    judge.handle_fence_sent(lane, path, generation);
                }
                if let Some(chunk) = chunk {
                    end.sent.push(chunk.message);
                    judge.handle_sent(now, &mut net.trace, &self.machine, &self.tuning, lane, chunk);
                }
                end.writing = Some(Writing { head: frame.encode(), chunk, at: 0 });
                continue;
            };
            if space == 0 {
                return;
            }
            let piece = if plan.quiet { space } else { space.min(net.draw.range(1, plan.piece) as usize) };
            let whole = HEADER_BYTES + writing.chunk.map_or(0, |c| c.len as usize);
            if writing.at < HEADER_BYTES {
                let to = HEADER_BYTES.min(writing.at + piece);
                writing.at += net.write(end.conn, 0, &writing.head[writing.at..to]);
            } else if let Some(chunk) = writing.chunk {
                let slot = (chunk.message % plan.send_slots as u64) as usize;
                let from = chunk.offset as usize + writing.at - HEADER_BYTES;
                let to = (chunk.offset as usize + chunk.len as usize).min(from + piece);
                writing.at += net.write(end.conn, 0, &self.slots[slot][from..to]);
            }
            if writing.at == whole {
                end.writing = None;
            } else if !plan.quiet && net.draw.chance(4) {
                end.resume_at = now + net.draw.micros(100, 5000);
                net.wake(self.host, end.resume_at);
                return;
            }
        }
    }

    /// A tick of the I/O thread: readings of all lanes, then the clock.
    pub fn tick(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, late: Time) {
        let lanes: Vec<(Lane, usize, bool)> =
            self.lanes.iter().filter(|(_, e)| e.opened).map(|(l, e)| (*l, e.conn, e.writing.is_some())).collect();
        let clock_first = !plan.quiet && net.draw.chance(50);
        if clock_first {
            let result = self.machine.handle_tick(net.now);
            self.must(net, result);
        }
        for (lane, conn, writing) in lanes {
            let (acked, open) = net.progress(conn, 0);
            let small = open <= net.plan.segment as u64;
            let reading = LaneProgress { acked, outstanding: open > 0 || writing, small };
            let result = self.machine.handle_progress(net.now, lane, reading);
            self.must(net, result);
        }
        if !clock_first {
            let result = self.machine.handle_tick(net.now);
            self.must(net, result);
        }
        self.transitions(net, judge);
        judge.handle_tick(net.now, &mut net.trace, &self.machine, &self.tuning, late);
        self.run(net, judge, plan);
    }

    pub fn handle_hint(&mut self, net: &mut Net, judge: &mut Judge, path: PathId, up: bool) {
        let result = self.machine.handle_nic(net.now, path, up);
        self.must(net, result);
        self.transitions(net, judge);
    }
}
