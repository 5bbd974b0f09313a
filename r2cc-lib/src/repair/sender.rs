//! The sending end of a link: cuts messages into chunks, lets live paths pull them, replays what a dead
//! path owes, and decides which paths are live. The receiving end only advises; there is one decider.

mod states;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::path_end::{Deadline, PathEnd};
use super::replays::{Replays, Resumption};
use super::tuning::planted;
use super::{
    Cause, Chunk, DeliveryRate, Forbidden, Frame, Generation, Lane, LaneProgress, MessageSeq, PathEvent, PathId,
    PathState, Time, Transition, Tuning,
};

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connect; report [`Sender::handle_lane_opened`] or [`Sender::handle_lane_lost`].
    Open(Lane),
    /// Close or stop connecting; a half-written frame dies with the lane.
    Close(Lane),
    /// No path has been live since then; the bound has passed.
    Dead {
        /// When the last live path was lost.
        since: Time,
    },
}

/// Something only a broken peer or driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SenderError {
    /// More chunks acknowledged than were sent on the lane.
    #[error("{acked} chunks acknowledged on {lane:?}, {sent} were sent")]
    AckBeyond {
        /// The lane.
        lane: Lane,
        /// Stated count.
        acked: u64,
        /// Chunks sent on it.
        sent: u64,
    },
    /// A grant for more messages than a peer may have outstanding.
    #[error("grant up to message {messages} from {granted} is beyond the limit of {most} at a time")]
    GrantBeyond {
        /// Stated number.
        messages: u64,
        /// Granted before.
        granted: u64,
        /// Limit of one step.
        most: u64,
    },
    /// A path number that the link does not have.
    #[error("no path {0:?} in this link")]
    UnknownPath(PathId),
    /// A frame that only a sender may send.
    #[error("a receiver must not send {0:?}")]
    WrongDirection(Frame),
    /// A transition that the table forbids.
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
}

/// Messages that one grant may add.
const GRANT_STEP_MAX: u64 = 1 << 20;

#[derive(Debug)]
struct Message {
    bytes: u64,
    cut_to: u64,
    whole_cut: bool,
    chunks_pending: u64,
    done: bool,
}

/// Sums over the life of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Payload bytes of all messages posted.
    pub payload_bytes: u64,
    /// Payload bytes queued for replay.
    pub replayed_bytes: u64,
    /// Suspicions.
    pub paths_suspected: u64,
    /// Failures.
    pub paths_failed: u64,
    /// Acknowledgements that named a lane no longer in use.
    pub late_acks: u64,
}

/// One path as a reader of the status sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathReport {
    /// The path.
    pub path: PathId,
    /// Its state.
    pub state: PathState,
    /// Measured delivery rate, bytes/s.
    pub bytes_s: Option<u64>,
    /// Bytes sent and not acknowledged.
    pub in_flight_bytes: u64,
    /// Most that this may become, once the path has been in service for a while.
    pub window_bytes: u64,
}

/// The sending end.
#[derive(Debug)]
pub struct Sender {
    tuning: Arc<Tuning>,
    first: u64,
    messages: VecDeque<Message>,
    cursor: u64,
    granted: u64,
    replay: VecDeque<Chunk>,
    replays: Replays,
    paths: Vec<PathEnd>,
    fences: BTreeMap<PathId, Generation>,
    actions: VecDeque<Action>,
    done: VecDeque<MessageSeq>,
    transitions: VecDeque<Transition>,
    totals: Totals,
    dark_since: Option<Time>,
    /// Time since then in which the process could not run.
    dark_late: Time,
    dead_told: bool,
    last_tick: Option<Time>,
    next_nonce: u64,
}

impl Sender {
    /// A link with `paths` paths; asks at once for a connection on each.
    pub fn new(tuning: Arc<Tuning>, paths: usize, now: Time) -> Self {
        let mut sender = Self {
            tuning,
            first: 0,
            messages: VecDeque::new(),
            cursor: 0,
            granted: 0,
            replay: VecDeque::new(),
            replays: Replays::default(),
            paths: (0..paths).map(|i| PathEnd::new(PathId(i as u16), now)).collect(),
            fences: BTreeMap::new(),
            actions: VecDeque::new(),
            done: VecDeque::new(),
            transitions: VecDeque::new(),
            totals: Totals::default(),
            dark_since: Some(now),
            dark_late: Time::ZERO,
            dead_told: false,
            last_tick: None,
            next_nonce: 1,
        };
        for path in &mut sender.paths {
            sender.actions.push_back(Action::Open(path.open(now, &sender.tuning)));
        }
        sender
    }

    /// Sums so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Every path's state.
    pub fn path_reports(&self) -> impl Iterator<Item = PathReport> + '_ {
        self.paths.iter().map(|p| PathReport {
            path: p.id,
            state: p.state,
            bytes_s: p.rate.bytes_s(),
            in_flight_bytes: p.in_flight_bytes,
            window_bytes: p.rate.window_bytes(&self.tuning),
        })
    }

    /// Whether every path carries chunks.
    pub fn is_whole(&self) -> bool {
        self.paths.iter().all(|p| p.state == PathState::Live)
    }

    /// Whether any path carries chunks.
    pub fn has_live_path(&self) -> bool {
        self.live_paths() > 0
    }

    /// Whether messages are not done yet.
    pub fn is_busy(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Whether chunks wait for a path with room.
    fn has_backlog(&self) -> bool {
        !self.replay.is_empty() || self.may_cut()
    }

    /// Whether the next message is there and has a place to land: a posted receive, or room kept for early ones.
    fn may_cut(&self) -> bool {
        let next = self.cursor.checked_sub(self.first).and_then(|at| self.messages.get(at as usize));
        next.is_some_and(|message| {
            let room = if self.tuning.is_early(message.bytes) { self.tuning.early_messages } else { 0 };
            self.cursor < self.granted + room
        })
    }

    /// Whether chunks wait that this path would carry.
    pub fn wants(&self, path: PathId) -> bool {
        self.has_backlog() && self.paths.get(usize::from(path.0)).is_some_and(|path| self.is_open_to_chunks(path))
    }

    /// From now on the path stands by: it carries chunks only while no path is live that does not stand by.
    pub fn set_standing_by(&mut self, path: PathId, stands_by: bool) {
        if let Some(path) = self.paths.get_mut(usize::from(path.0)) {
            path.stands_by = stands_by;
        }
    }

    /// From now on the path's window is made for this rate, in bytes a second, or for the one that is measured.
    pub fn set_pace(&mut self, path: PathId, bytes_s: Option<u64>) {
        if let Some(path) = self.paths.get_mut(usize::from(path.0)) {
            path.rate.set_pace(bytes_s);
        }
    }

    fn is_open_to_chunks(&self, path: &PathEnd) -> bool {
        let first = |other: &PathEnd| other.state == PathState::Live && !other.stands_by;
        path.state == PathState::Live && (!path.stands_by || !self.paths.iter().any(first))
    }

    /// From now on the path carries chunks, or none because other links go first. Returns whether that is news.
    pub fn set_yielding(&mut self, path: PathId, yields: bool) -> bool {
        let end = self.paths.get_mut(usize::from(path.0));
        end.is_some_and(|path| std::mem::replace(&mut path.yields, yields) != yields)
    }

    /// How long what is on a path will take at its measured rate; one that is not measured yet counts as the fastest.
    /// Less than the smallest chunk counts as nothing, so that small messages follow each other on one path.
    pub fn time_to_drain(&self, path: PathId) -> Time {
        let fastest = || self.paths.iter().filter_map(|p| p.rate.bytes_s()).max().unwrap_or(1 << 30);
        let little = u64::from(self.tuning.chunk_bytes.0);
        let end = self.paths.get(usize::from(path.0)).filter(|end| end.occupied_bytes() >= little);
        end.map_or(Time::ZERO, |end| {
            let bytes_s = end.rate.bytes_s().unwrap_or_else(fastest).max(1);
            Time::from_nanos((u128::from(end.occupied_bytes()) * 1_000_000_000 / u128::from(bytes_s)) as u64)
        })
    }

    fn live_paths(&self) -> usize {
        self.paths.iter().filter(|p| p.state == PathState::Live).count()
    }

    /// The lane of a path that carries, or would carry, chunks or probes.
    pub fn current_lane(&self, path: PathId) -> Option<Lane> {
        self.paths.get(usize::from(path.0))?.current_lane()
    }

    /// Posts a message of `bytes`. Its buffer is the replay source: it must not change until `poll_done` names it.
    pub fn post(&mut self, bytes: u64) -> MessageSeq {
        let seq = self.first + self.messages.len() as u64;
        self.messages.push_back(Message { bytes, cut_to: 0, whole_cut: false, chunks_pending: 0, done: false });
        self.totals.payload_bytes += bytes;
        MessageSeq(seq)
    }

    fn path_mut(&mut self, path: PathId) -> Result<&mut PathEnd, SenderError> {
        self.paths.get_mut(usize::from(path.0)).ok_or(SenderError::UnknownPath(path))
    }

    /// A connection asked for by [`Action::Open`] is up and its handshake done.
    ///
    /// # Errors
    /// If the link has no such path.
    pub fn handle_lane_opened(&mut self, now: Time, lane: Lane) -> Result<(), SenderError> {
        let tuning = Arc::clone(&self.tuning);
        let path = self.path_mut(lane.path)?;
        if path.opening != Some(lane.generation) {
            self.actions.push_back(Action::Close(lane));
            return Ok(());
        }
        path.opening = None;
        match path.state {
            PathState::Opening => {
                path.take_into_use(lane.generation, now);
                self.admit(now, lane.path, PathEvent::Opened, Cause::Answered)?;
            }
            PathState::Suspect if path.current.is_none() => {
                let wait = path.trial(&tuning);
                path.take_into_use(lane.generation, now);
                self.ping(lane.path, Deadline::new(now, wait));
            }
            PathState::Live | PathState::Suspect => path.spare = Some(lane.generation),
            PathState::Failed => {
                path.take_into_use(lane.generation, now);
                path.good_probes = 0;
                self.step(now, lane.path, PathEvent::Opened, Cause::Answered)?;
                self.ping(lane.path, Deadline::new(now, tuning.proof_deadline));
            }
            PathState::Proving => self.actions.push_back(Action::Close(lane)),
        }
        Ok(())
    }

    /// A connection could not be made, or was lost.
    ///
    /// # Errors
    /// If the link has no such path.
    pub fn handle_lane_lost(&mut self, now: Time, lane: Lane, cause: Cause) -> Result<(), SenderError> {
        let tuning = Arc::clone(&self.tuning);
        let path = self.path_mut(lane.path)?;
        if path.opening == Some(lane.generation) {
            path.opening = None;
            match path.state {
                PathState::Opening => self.fail(now, lane.path, cause)?,
                PathState::Suspect if path.current.is_none() => self.fail(now, lane.path, cause)?,
                PathState::Live | PathState::Suspect | PathState::Proving => {
                    path.spare_retry_at = now + tuning.trial * 5
                }
                PathState::Failed => path.next_attempt = now + path.back_off(now, &tuning),
            }
        } else if path.spare == Some(lane.generation) {
            path.spare = None;
            path.spare_retry_at = now + tuning.trial;
        } else if path.current == Some(lane.generation) {
            path.current = None;
            match path.state {
                PathState::Live => self.suspect(now, lane.path, cause)?,
                _ => self.fail(now, lane.path, cause)?,
            }
        }
        Ok(())
    }

    /// The local NIC of a path lost or regained its carrier or address.
    ///
    /// # Errors
    /// If the link has no such path.
    pub fn handle_nic(&mut self, now: Time, path: PathId, up: bool) -> Result<(), SenderError> {
        let end = self.path_mut(path)?;
        if !up && end.state != PathState::Failed {
            self.fail(now, path, Cause::Carrier)?;
        } else if up && end.state == PathState::Failed {
            end.next_attempt = now.max(end.hold_until);
        }
        Ok(())
    }

    /// Somebody has doubts about a path: put a byte on it, so that a stall would show.
    pub fn handle_doubt(&mut self, path: PathId) {
        let nonce = self.next_nonce;
        if let Some(end) = self.paths.get_mut(usize::from(path.0))
            && end.state == PathState::Live
            && end.ping_due.is_none()
        {
            self.next_nonce += 1;
            end.ping_due = Some(nonce);
        }
    }

    /// A control frame came in; `lane` is the one that it came on.
    ///
    /// # Errors
    /// If the peer broke the protocol: close the lane.
    pub fn handle_frame(&mut self, now: Time, lane: Lane, frame: Frame) -> Result<(), SenderError> {
        let path = self.path_mut(lane.path)?;
        if path.current == Some(lane.generation) {
            path.heard_at = now;
        }
        match frame {
            Frame::Ack { path, generation, chunks } => self.handle_ack(now, Lane { path, generation }, chunks),
            Frame::Grant { messages } => {
                let (granted, most) = (self.granted, GRANT_STEP_MAX);
                if messages.saturating_sub(granted) > most {
                    return Err(SenderError::GrantBeyond { messages, granted, most });
                }
                self.granted = granted.max(messages);
                Ok(())
            }
            Frame::Pong { nonce } => self.handle_pong(now, lane, nonce),
            Frame::Notice(notice) => {
                let path = self.path_mut(notice.path)?;
                // Of a NIC the peer tells the newest lane that it has seen, which may be the spare.
                let concerns = match notice.cause {
                    Cause::Carrier => path.current.is_some_and(|current| current <= notice.generation),
                    _ => path.current == Some(notice.generation),
                };
                if !concerns {
                    return Ok(());
                }
                match (path.state, notice.cause) {
                    (PathState::Live, Cause::Carrier) => self.fail(now, notice.path, Cause::Peer),
                    (PathState::Live, _) => self.suspect(now, notice.path, Cause::Peer),
                    (PathState::Proving | PathState::Suspect, Cause::Carrier) => {
                        self.fail(now, notice.path, Cause::Peer)
                    }
                    _ => Ok(()),
                }
            }
            other => Err(SenderError::WrongDirection(other)),
        }
    }

    fn handle_ack(&mut self, now: Time, lane: Lane, chunks: u64) -> Result<(), SenderError> {
        let count_late = planted!(self.tuning, CountLateAcks);
        let path = self.path_mut(lane.path)?;
        if path.current != Some(lane.generation) {
            self.totals.late_acks += 1;
            for _ in 0..if count_late { chunks } else { 0 } {
                let Some(chunk) = self.paths.iter_mut().find_map(|path| path.pop_acked(now)) else { break };
                self.settle(now, chunk);
            }
            return Ok(());
        }
        let sent = path.chunks_acked + path.in_flight.len() as u64;
        if chunks > sent {
            return Err(SenderError::AckBeyond { lane, acked: chunks, sent });
        }
        while self.paths[usize::from(lane.path.0)].chunks_acked < chunks {
            let Some(chunk) = self.paths[usize::from(lane.path.0)].pop_acked(now) else { break };
            self.settle(now, chunk);
        }
        Ok(())
    }

    /// One chunk of a message is off our hands.
    fn settle(&mut self, now: Time, chunk: Chunk) {
        self.replays.handle_acked(now, &chunk);
        let Some(at) = chunk.message.checked_sub(self.first) else { return };
        let Some(message) = self.messages.get_mut(at as usize) else { return };
        message.chunks_pending = message.chunks_pending.saturating_sub(1);
        self.finish_if_whole(chunk.message);
    }

    fn finish_if_whole(&mut self, seq: u64) {
        let at_write = planted!(self.tuning, DoneAtWrite);
        let Some(message) = self.messages.get_mut((seq - self.first) as usize) else { return };
        if message.whole_cut && (message.chunks_pending == 0 || at_write) && !message.done {
            message.done = true;
            self.done.push_back(MessageSeq(seq));
        }
        while self.messages.front().is_some_and(|m| m.done) {
            self.messages.pop_front();
            self.first += 1;
        }
    }

    fn handle_pong(&mut self, now: Time, lane: Lane, nonce: u64) -> Result<(), SenderError> {
        let path = self.path_mut(lane.path)?;
        if path.current == Some(lane.generation) && path.awaiting == Some(nonce) {
            self.answered(now, lane.path)?;
        }
        Ok(())
    }

    /// A reading of a lane's outgoing bytes (those still in the driver's own buffers count as outstanding).
    ///
    /// # Errors
    /// If the link has no such path.
    pub fn handle_progress(&mut self, now: Time, lane: Lane, reading: LaneProgress) -> Result<(), SenderError> {
        let tuning = Arc::clone(&self.tuning);
        self.handle_clock(now);
        let path = self.path_mut(lane.path)?;
        if path.current != Some(lane.generation) {
            return Ok(());
        }
        let stalled = path.stall.handle_progress(now, reading, &tuning);
        if !reading.outstanding {
            path.rate.handle_drained();
            if path.held {
                path.rate.handle_idle();
            }
        }
        // The peer's kernel has the probe: the path works, however busy the peer's process is.
        if path.awaiting.is_some() && path.ping_due.is_none() && !reading.outstanding {
            return self.answered(now, lane.path);
        }
        if stalled && path.state == PathState::Live && !planted!(tuning, NoStall) {
            return self.suspect(now, lane.path, Cause::Stall);
        }
        Ok(())
    }

    /// The kernel measured the delivery rate of a lane that had bytes outstanding. Returns the bytes that it may
    /// hold for the lane from now on.
    pub fn handle_rate(&mut self, now: Time, lane: Lane, rate: DeliveryRate) -> Option<u64> {
        let path = self.paths.get_mut(usize::from(lane.path.0))?;
        if path.current != Some(lane.generation) || path.state != PathState::Live {
            return None;
        }
        path.rate.handle_reading(rate);
        Some(path.outstanding_bytes(now, &self.tuning))
    }

    /// Next frame to write on `lane`. After [`Frame::Data`] the driver writes the chunk's bytes.
    pub fn poll_frame(&mut self, now: Time, lane: Lane) -> Option<Frame> {
        let path = self.paths.get_mut(usize::from(lane.path.0))?;
        if path.current != Some(lane.generation) {
            return None;
        }
        if let Some(nonce) = path.ping_due.take() {
            return Some(Frame::Ping { nonce });
        }
        if path.state != PathState::Live {
            return None;
        }
        let fence_late = planted!(self.tuning, FenceLate);
        if !fence_late && let Some((path, generation)) = path.fences_due.pop_first() {
            return Some(Frame::Fence { path, generation });
        }
        let window = if planted!(self.tuning, IgnoreWindow) { u64::MAX } else { path.window_bytes(now, &self.tuning) };
        let waits = path.yields || !self.is_open_to_chunks(&self.paths[usize::from(lane.path.0)]);
        if !waits
            && self.paths[usize::from(lane.path.0)].occupied_bytes() < window
            && let Some(chunk) = self.next_chunk(lane.path, window)
        {
            self.paths[usize::from(lane.path.0)].handle_sent(chunk, now);
            return Some(Frame::Data(chunk));
        }
        let held = self.has_backlog();
        let path = &mut self.paths[usize::from(lane.path.0)];
        path.handle_held(held && !waits);
        let (path, generation) = path.fences_due.pop_first().filter(|_| fence_late)?;
        Some(Frame::Fence { path, generation })
    }

    /// The chunk that a path with room pulls: first what must be replayed, then the next of the oldest granted message.
    fn next_chunk(&mut self, path: PathId, window: u64) -> Option<Chunk> {
        let end = &self.paths[usize::from(path.0)];
        let room = window - end.occupied_bytes();
        if let Some(chunk) = self.replay.front() {
            let fits = u64::from(chunk.len) <= room || end.in_flight.is_empty();
            return if fits { self.replay.pop_front() } else { None };
        }
        if !self.may_cut() {
            return None;
        }
        let live = self.paths.iter().filter(|path| self.is_open_to_chunks(path)).count();
        let at = usize::try_from(self.cursor.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(at)?;
        let end = &self.paths[usize::from(path.0)];
        let left = message.bytes - message.cut_to;
        let size = end.rate.chunk_bytes(&self.tuning, message.bytes, live);
        let len = left.min(u64::from(size)) as u32;
        if u64::from(len) > room && !end.in_flight.is_empty() {
            return None;
        }
        let chunk = Chunk { message: self.cursor, offset: message.cut_to, len, message_bytes: message.bytes };
        message.cut_to += u64::from(len);
        message.chunks_pending += 1;
        if message.cut_to == message.bytes {
            message.whole_cut = true;
            self.cursor += 1;
            if planted!(self.tuning, DoneAtWrite) {
                self.finish_if_whole(chunk.message);
            }
        }
        Some(chunk)
    }

    /// Next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Next message whose every chunk is acknowledged.
    pub fn poll_done(&mut self) -> Option<MessageSeq> {
        self.done.pop_front()
    }

    /// Next link that has resumed after the loss of a path.
    pub fn poll_resumption(&mut self) -> Option<Resumption> {
        self.replays.poll()
    }

    /// Next change of a path's state.
    pub fn poll_transition(&mut self) -> Option<Transition> {
        self.transitions.pop_front()
    }
}
