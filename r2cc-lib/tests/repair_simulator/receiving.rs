//! The model driver of a receiving end. Payload goes where the machine said when the header came: straight
//! into the posted buffer (place) or into a staging area that is added when the chunk counts (reduce) or kept
//! until its receive is posted (early).
//! Buffers are overwritten and posted again after completion, and must not change in between.

use std::collections::BTreeMap;
use std::sync::Arc;

use r2cc::repair::{
    Admission, Cause, Chunk, Frame, HEADER_BYTES, Lane, LaneProgress, PathId, Receiver, ReceiverAction, Time, Tuning,
};

use super::check::Judge;
use super::content;
use super::net::{End, Net};
use super::scenario::LinkPlan;
use super::sending::{HELLO, WELCOME};

struct Body {
    chunk: Chunk,
    wanted: bool,
    /// Its bytes do not go straight into the buffer.
    is_staged: bool,
    at: usize,
    staged: Vec<u8>,
}

struct ReceiveLane {
    conn: usize,
    head: Vec<u8>,
    body: Option<Body>,
    out: Vec<u8>,
}

/// Chunks of a message that came before its receive.
#[derive(Default)]
struct Early {
    chunks: Vec<(Chunk, Vec<u8>)>,
    complete: bool,
}

enum Slot {
    Posted,
    /// Complete, with the application until then; must still hold these bytes.
    Consumed {
        until: Time,
        holds: Vec<u8>,
    },
}

pub struct ReceiveEnd {
    link: usize,
    host: usize,
    pub machine: Receiver,
    lanes: BTreeMap<Lane, ReceiveLane>,
    greeting: Vec<usize>,
    buffers: Vec<Vec<u8>>,
    slots: Vec<Slot>,
    early: BTreeMap<u64, Early>,
    next: u64,
}

impl ReceiveEnd {
    pub fn new(link: usize, plan: &LinkPlan, tuning: Arc<Tuning>) -> Self {
        let most = plan.sizes.iter().copied().max().unwrap_or(0);
        let holds = content::recycled(most);
        let slots = (0..plan.receive_slots).map(|_| Slot::Consumed { until: plan.receive_start, holds: holds.clone() });
        Self {
            link,
            host: plan.to,
            machine: Receiver::new(tuning),
            lanes: BTreeMap::new(),
            greeting: Vec::new(),
            buffers: vec![holds.clone(); plan.receive_slots],
            slots: slots.collect(),
            early: BTreeMap::new(),
            next: 0,
        }
    }

    pub fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        self.lanes.keys().copied()
    }

    pub fn accept(&mut self, conn: usize) {
        self.greeting.push(conn);
    }

    pub fn run(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        self.greet(net, judge);
        self.post(net, judge, plan);
        let mut lanes: Vec<Lane> = self.lanes.keys().copied().collect();
        if !plan.quiet && !lanes.is_empty() {
            let by = net.draw.index(lanes.len());
            lanes.rotate_left(by);
        }
        for lane in lanes {
            self.read(net, judge, plan, lane);
        }
        self.post(net, judge, plan);
        let lanes: Vec<Lane> = self.lanes.keys().copied().collect();
        for lane in lanes {
            self.write(net, lane);
        }
    }

    fn greet(&mut self, net: &mut Net, judge: &mut Judge) {
        for conn in std::mem::take(&mut self.greeting) {
            if net.conns[conn].ends[1] != End::Open {
                continue;
            }
            if net.readable(conn, 1) == 0 {
                if net.is_at_end(conn, 1) {
                    net.close(conn, 1, true);
                } else {
                    self.greeting.push(conn);
                }
                continue;
            }
            let mut hello = Vec::new();
            net.read(conn, 1, &mut hello, 1);
            let lane = net.conns[conn].lane;
            let taken = hello == [HELLO] && self.machine.handle_lane_opened(net.now, lane);
            net.trace.note(net.now, format_args!("{} receiver accepts {lane:?}: {taken}", self.link));
            if !taken {
                net.close(conn, 1, true);
                continue;
            }
            judge.handle_accepted(net.now, &mut net.trace, lane);
            net.write(conn, 1, &[WELCOME]);
            self.lanes.insert(lane, ReceiveLane { conn, head: Vec::new(), body: None, out: Vec::new() });
        }
    }

    /// Takes back buffers that the application has finished with and posts them, in order.
    fn post(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        while self.next < plan.sizes.len() as u64 {
            let at = (self.next % plan.receive_slots as u64) as usize;
            let Slot::Consumed { until, holds } = &self.slots[at] else { return };
            if *until > net.now {
                net.wake(self.host, *until);
                return;
            }
            if self.buffers[at] != *holds {
                net.trace.fail(net.now, format_args!("link {}: a recycled buffer was written to", self.link));
            }
            let (len, size) = (self.buffers[at].len(), plan.sizes[self.next as usize]);
            self.buffers[at] = content::before(self.link, self.next, len);
            self.slots[at] = Slot::Posted;
            let most = if plan.exact_posts { size } else { len };
            let seq = self.machine.post(most as u64);
            net.trace.note(net.now, format_args!("{} receiver posts {seq:?}", self.link));
            judge.handle_granted(net.now, seq);
            self.next += 1;
            let Some(early) = self.early.remove(&seq.0) else { continue };
            judge.coverage.early_message = true;
            early.chunks.iter().for_each(|(chunk, bytes)| self.apply(plan, chunk, bytes));
            if early.complete {
                self.complete(net, plan, seq.0);
            }
        }
    }

    fn read(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane) {
        let Some(end) = self.lanes.get(&lane) else { return };
        let conn = end.conn;
        let most = if plan.quiet { usize::MAX } else { net.draw.range(64, plan.read_most) as usize };
        let mut bytes = Vec::new();
        net.read(conn, 1, &mut bytes, most);
        if net.readable(conn, 1) > 0 {
            net.wake(self.host, net.now + plan.read_gap);
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let Some(end) = self.lanes.get_mut(&lane) else { return };
            if let Some(body) = &mut end.body {
                let left = body.chunk.len as usize - body.at;
                let (now, later) = rest.split_at(left.min(rest.len()));
                rest = later;
                if body.wanted && body.is_staged {
                    body.staged.extend_from_slice(now);
                } else if body.wanted {
                    let at = body.chunk.offset as usize + body.at;
                    let slot = (body.chunk.message % plan.receive_slots as u64) as usize;
                    self.buffers[slot][at..at + now.len()].copy_from_slice(now);
                }
                body.at += now.len();
            } else {
                let (now, later) = rest.split_at((HEADER_BYTES - end.head.len()).min(rest.len()));
                rest = later;
                end.head.extend_from_slice(now);
            }
            self.whole(net, judge, plan, lane);
        }
        let Some(end) = self.lanes.get(&lane) else { return };
        if net.conns[end.conn].ends[1] == End::Lost || net.is_at_end(end.conn, 1) {
            judge.coverage.half_frame_cut |= end.body.is_some() || !end.head.is_empty();
            net.close(end.conn, 1, true);
            self.lanes.remove(&lane);
            net.trace.note(net.now, format_args!("{} receiver lost {lane:?}", self.link));
            self.machine.handle_lane_lost(lane, Cause::Connection);
        }
    }

    /// Acts on a header or a payload once it is whole.
    fn whole(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane) {
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        if end.body.is_none() && end.head.len() == HEADER_BYTES {
            let head: [u8; HEADER_BYTES] = end.head.as_slice().try_into().unwrap();
            end.head.clear();
            match Frame::decode(&head) {
                Ok(Frame::Data(chunk)) => match self.machine.admit(lane, chunk) {
                    Ok(admission) => {
                        let wanted = matches!(admission, Admission::Wanted(_));
                        let is_staged = plan.reduces || chunk.message >= self.next;
                        end.body = Some(Body { chunk, wanted, is_staged, at: 0, staged: Vec::new() });
                    }
                    Err(error) => net.trace.fail(net.now, format_args!("link {} receiver: {error}", self.link)),
                },
                Ok(frame) => self.control(net, judge, lane, frame),
                Err(error) => net.trace.fail(net.now, format_args!("link {} receiver reads {error}", self.link)),
            }
        }
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        if end.body.as_ref().is_some_and(|b| b.at == b.chunk.len as usize)
            && let Some(body) = end.body.take()
        {
            self.landed(net, judge, plan, lane, body);
        }
    }

    fn control(&mut self, net: &mut Net, judge: &mut Judge, lane: Lane, frame: Frame) {
        net.trace.note(net.now, format_args!("{} {lane:?} -> receiver {frame:?}", self.link));
        if let Err(error) = self.machine.handle_frame(lane, frame) {
            net.trace.fail(net.now, format_args!("link {} receiver: {error}", self.link));
        }
        if let Frame::Fence { path, generation } = frame {
            judge.handle_fence(path, generation);
        }
        self.close_what_is_asked(net, judge);
    }

    pub fn close_what_is_asked(&mut self, net: &mut Net, judge: &mut Judge) {
        while let Some(action) = self.machine.poll_action() {
            // The sender's end is asked whether a dark link is told dead.
            let ReceiverAction::Close(lane) = action else { continue };
            net.trace.note(net.now, format_args!("{} receiver closes {lane:?}", self.link));
            if let Some(end) = self.lanes.remove(&lane) {
                judge.coverage.half_frame_cut |= end.body.is_some();
                net.close(end.conn, 1, true);
            }
        }
    }

    fn landed(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan, lane: Lane, body: Body) {
        let landed = match self.machine.land(lane) {
            Ok(landed) => landed,
            Err(error) => {
                net.trace.fail(net.now, format_args!("link {} receiver: {error}", self.link));
                return;
            }
        };
        net.trace.note(net.now, format_args!("{} {lane:?} landed {landed:?}", self.link));
        judge.handle_landed(net.now, &mut net.trace, lane, landed);
        let seq = landed.chunk.message;
        if seq >= self.next {
            if landed.first {
                let early = self.early.entry(seq).or_default();
                early.chunks.push((landed.chunk, body.staged));
                early.complete |= landed.message_complete;
            }
            return;
        }
        if landed.first && body.is_staged {
            self.apply(plan, &landed.chunk, &body.staged);
        }
        if landed.message_complete {
            self.complete(net, plan, seq);
        }
    }

    /// Adds a chunk that was staged to its buffer, or puts it there.
    fn apply(&mut self, plan: &LinkPlan, chunk: &Chunk, staged: &[u8]) {
        let slot = (chunk.message % plan.receive_slots as u64) as usize;
        for (to, from) in self.buffers[slot][chunk.offset as usize..].iter_mut().zip(staged) {
            *to = if plan.reduces { to.wrapping_add(*from) } else { *from };
        }
    }

    /// All of a message is in its buffer, which the application has for a while now.
    fn complete(&mut self, net: &mut Net, plan: &LinkPlan, seq: u64) {
        let slot = (seq % plan.receive_slots as u64) as usize;
        let len = self.buffers[slot].len();
        let holds = content::expected(self.link, seq, plan.sizes[seq as usize], len, plan.reduces);
        if self.buffers[slot] != holds {
            net.trace.fail(net.now, format_args!("link {}: message {seq} has wrong contents", self.link));
        }
        let until = net.now + net.draw.micros(plan.consume.0, plan.consume.1);
        self.slots[slot] = Slot::Consumed { until, holds };
        net.wake(self.host, until);
    }

    fn write(&mut self, net: &mut Net, lane: Lane) {
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        loop {
            if end.out.is_empty() {
                if net.space(end.conn, 1) == 0 {
                    return;
                }
                let Some(frame) = self.machine.poll_frame(lane) else { return };
                net.trace.note(net.now, format_args!("{} {lane:?} <- receiver {frame:?}", self.link));
                end.out.extend_from_slice(&frame.encode());
            }
            let n = net.write(end.conn, 1, &end.out);
            end.out.drain(..n);
            if !end.out.is_empty() {
                return;
            }
        }
    }

    pub fn tick(&mut self, net: &mut Net, judge: &mut Judge, plan: &LinkPlan) {
        let lanes: Vec<(Lane, usize, bool)> = self.lanes.iter().map(|(l, e)| (*l, e.conn, !e.out.is_empty())).collect();
        for (lane, conn, writing) in lanes {
            let (acked, open) = net.progress(conn, 1);
            let reading =
                LaneProgress { acked, outstanding: open > 0 || writing, small: open <= net.plan.segment as u64 };
            self.machine.handle_progress(net.now, lane, reading);
        }
        self.machine.handle_tick(net.now);
        self.close_what_is_asked(net, judge);
        self.run(net, judge, plan);
    }

    pub fn handle_path_down(&mut self, path: PathId) {
        self.machine.handle_path_down(path, Cause::Carrier);
    }

    /// Closes everything. Buffers nobody has been told about must be untouched after their last message.
    pub fn tear_down(&mut self, net: &mut Net) {
        for slot in 0..self.slots.len() {
            if let Slot::Consumed { holds, .. } = &self.slots[slot]
                && self.buffers[slot] != *holds
            {
                net.trace.fail(net.now, format_args!("link {}: a recycled buffer was written to", self.link));
            }
        }
        for end in self.lanes.values() {
            net.close(end.conn, 1, true);
        }
        for conn in std::mem::take(&mut self.greeting) {
            net.close(conn, 1, true);
        }
        self.lanes.clear();
    }
}
