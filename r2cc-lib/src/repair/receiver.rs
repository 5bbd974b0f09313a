//! The receiving end of a link: grants, the ledgers of posted messages, fences, acknowledgements.
//!
//! It never reduces or places anything itself: the driver asks where a chunk goes ([`Receiver::admit`]),
//! reads the bytes, then asks whether they count ([`Receiver::land`]). Those of an early message, whose receive is
//! not posted yet ([`Receiver::is_posted`]), the driver keeps until it is.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::tuning::planted;
use super::{
    Cause, Chunk, Frame, Generation, Lane, LaneProgress, Ledger, LedgerError, MessageSeq, Notice, PathId,
    StallDetector, Time, Tuning,
};

/// What to do with the bytes behind a data header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// They are wanted: read them for this message.
    Wanted(Chunk),
    /// They have landed before: read and forget them.
    Duplicate(Chunk),
}

/// A chunk has been read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The chunk.
    pub chunk: Chunk,
    /// Only then may it be applied.
    pub first: bool,
    /// With it the message is complete.
    pub message_complete: bool,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Close this lane now, before reading another byte from any lane.
    Close(Lane),
    /// Receives are posted, and no lane has worked for the bound.
    Dead {
        /// When the last one was lost.
        since: Time,
    },
}

/// The peer broke the protocol; its lane must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiverError {
    /// A chunk of a message that has no place to land.
    #[error("chunk {chunk:?} without a grant ({granted} messages granted)")]
    NoGrant {
        /// The chunk.
        chunk: Chunk,
        /// Messages granted so far.
        granted: u64,
    },
    /// A message longer than the receive posted for it, or with changing length.
    #[error("chunk {chunk:?} of a message that should have {expected} bytes")]
    Length {
        /// The chunk.
        chunk: Chunk,
        /// Posted length, or the length stated before.
        expected: u64,
    },
    /// The chunk does not fit what has landed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// Frames on a lane that is unknown or closed.
    #[error("lane {0:?} is not open")]
    UnknownLane(Lane),
    /// A frame that only the receiving end may send.
    #[error("a sender must not send {0:?}")]
    WrongDirection(Frame),
}

/// A message whose receive is posted, or that came early.
#[derive(Debug)]
struct Arrival {
    most_bytes: u64,
    stated_bytes: Option<u64>,
    ledger: Ledger,
    complete: bool,
}

impl Arrival {
    fn new(most_bytes: u64) -> Self {
        Self { most_bytes, stated_bytes: None, ledger: Ledger::default(), complete: false }
    }
}

#[derive(Debug)]
struct LaneEnd {
    taken: u64,
    acked: u64,
    /// Bytes of the chunks that are taken and not acknowledged.
    owed_bytes: u64,
    /// They are to be acknowledged, at the latest with the next chunk if that is of the same message and on its way.
    ack_due: bool,
    /// The message of the last of them.
    owed_message: u64,
    /// Their acknowledgement waits no longer.
    ack_now: bool,
    granted: u64,
    streaming: Option<(Chunk, bool)>,
    pongs: VecDeque<u64>,
    notices: Vec<Notice>,
    stall: StallDetector,
    /// When a stall of this lane was last told.
    noticed_at: Option<Time>,
}

/// A stall of a lane, told to the sender.
#[derive(Debug)]
struct Alarm {
    lane: Lane,
    at: Time,
    stall: StallDetector,
}

/// Chunks of a stream that are acknowledged together; a sender's window holds twice as many.
const CHUNKS_AN_ACK: u64 = 2;
/// Pings of one lane that wait for their answer; more are dropped.
const PONGS_MAX: usize = 16;

/// The receiving end.
#[derive(Debug)]
pub struct Receiver {
    tuning: Arc<Tuning>,
    first: u64,
    arrivals: VecDeque<Arrival>,
    /// Receives posted so far.
    granted: u64,
    /// Messages before this one may be too long to come early: their grants do not wait.
    grant_due: u64,
    fenced: BTreeMap<PathId, Generation>,
    lanes: BTreeMap<Lane, LaneEnd>,
    /// The last stall told of each path whose next lane has not shown yet whether it was one.
    alarms: BTreeMap<PathId, Alarm>,
    actions: VecDeque<ReceiverAction>,
    last_tick: Option<Time>,
    /// The sender has been here.
    joined: bool,
    dark_since: Option<Time>,
    dark_late: Time,
    dead_told: bool,
    duplicates: u64,
    /// Highest grant written on any lane: what a forgetful receiver thinks is known.
    told: u64,
}

impl Receiver {
    /// A link without lanes.
    pub fn new(tuning: Arc<Tuning>) -> Self {
        Self {
            tuning,
            first: 0,
            arrivals: VecDeque::new(),
            granted: 0,
            grant_due: 0,
            fenced: BTreeMap::new(),
            lanes: BTreeMap::new(),
            alarms: BTreeMap::new(),
            actions: VecDeque::new(),
            last_tick: None,
            joined: false,
            dark_since: None,
            dark_late: Time::ZERO,
            dead_told: false,
            duplicates: 0,
            told: 0,
        }
    }

    /// Messages granted so far.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Whether the receive of a message has been posted.
    pub fn is_posted(&self, message: MessageSeq) -> bool {
        message.0 < self.granted
    }

    /// Whether a posted receive has not landed yet.
    pub fn is_busy(&self) -> bool {
        self.first < self.granted
    }

    /// Chunks that arrived again.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// Lanes that are open.
    pub fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        self.lanes.keys().copied()
    }

    /// Posts a receive of at most `most_bytes`; messages land in the order of the posts. One that came early may be
    /// longer: whoever keeps its bytes has to refuse it.
    pub fn post(&mut self, most_bytes: u64) -> MessageSeq {
        let seq = self.granted;
        self.granted += 1;
        if !self.tuning.is_early(most_bytes) {
            self.grant_due = self.granted;
        }
        match self.arrivals.get_mut((seq - self.first) as usize) {
            Some(early) => early.most_bytes = most_bytes,
            None => self.arrivals.push_back(Arrival::new(most_bytes)),
        }
        self.retire();
        MessageSeq(seq)
    }

    /// Forgets the oldest messages that are posted and complete.
    fn retire(&mut self) {
        while self.first < self.granted && self.arrivals.front().is_some_and(|a| a.complete) {
            self.arrivals.pop_front();
            self.first += 1;
        }
    }

    /// Length that the sender stated for a message, once its first chunk came and until it is over.
    pub fn message_bytes(&self, message: MessageSeq) -> Option<u64> {
        self.arrivals.get(usize::try_from(message.0.checked_sub(self.first)?).ok()?)?.stated_bytes
    }

    /// A lane was accepted. False: its generation is fenced, close it.
    pub fn handle_lane_opened(&mut self, now: Time, lane: Lane) -> bool {
        let fenced = self.fenced.get(&lane.path).is_some_and(|g| lane.generation <= *g);
        if (fenced && !planted!(self.tuning, AcceptFenced)) || self.lanes.contains_key(&lane) {
            return false;
        }
        let end = LaneEnd {
            taken: 0,
            acked: 0,
            owed_bytes: 0,
            ack_due: false,
            owed_message: 0,
            ack_now: false,
            granted: 0,
            streaming: None,
            pongs: VecDeque::new(),
            notices: Vec::new(),
            stall: StallDetector::new(now),
            noticed_at: None,
        };
        self.lanes.insert(lane, end);
        self.joined = true;
        true
    }

    /// A lane is gone (closed by the peer or failed). Tells the sender over the others.
    pub fn handle_lane_lost(&mut self, lane: Lane, cause: Cause) {
        if self.lanes.remove(&lane).is_some() {
            self.notify(Notice { path: lane.path, generation: lane.generation, cause });
            if planted!(self.tuning, ForgetLedger) {
                #[cfg(any(test, feature = "mutants"))]
                self.arrivals.iter_mut().filter(|a| !a.complete).for_each(|a| a.ledger.forget());
            }
        }
    }

    /// The local NIC of these paths is down: tell the sender over the others.
    pub fn handle_path_down(&mut self, path: PathId, cause: Cause) {
        let newest = self.lanes.keys().filter(|l| l.path == path).map(|l| l.generation).max();
        if let Some(generation) = newest {
            self.notify(Notice { path, generation, cause });
        }
    }

    fn notify(&mut self, notice: Notice) {
        for (_, end) in self.lanes.iter_mut().filter(|(lane, _)| lane.path != notice.path) {
            // The newest of a path is enough, and bounds the queue of a lane that cannot be written; but
            // news of a NIC outweighs the silence of one of its lanes.
            end.notices.retain(|n| n.path != notice.path || (n.cause == Cause::Carrier && notice.cause != n.cause));
            end.notices.push(notice);
        }
    }

    /// A frame other than `Data` or `Gossip` came in on `lane`.
    ///
    /// # Errors
    /// If the peer broke the protocol.
    pub fn handle_frame(&mut self, lane: Lane, frame: Frame) -> Result<(), ReceiverError> {
        let end = self.lanes.get_mut(&lane).ok_or(ReceiverError::UnknownLane(lane))?;
        match frame {
            Frame::Ping { nonce } => {
                if end.pongs.len() < PONGS_MAX {
                    end.pongs.push_back(nonce);
                }
            }
            Frame::Fence { path, generation } => self.fence(path, generation),
            other => return Err(ReceiverError::WrongDirection(other)),
        }
        Ok(())
    }

    fn fence(&mut self, path: PathId, generation: Generation) {
        let fenced = self.fenced.entry(path).or_default();
        *fenced = (*fenced).max(generation);
        if planted!(self.tuning, NoFence) {
            return;
        }
        let fenced = *fenced;
        let dead: Vec<Lane> = self.lanes.keys().copied().filter(|l| l.path == path && l.generation <= fenced).collect();
        for lane in dead {
            self.lanes.remove(&lane);
            self.actions.push_back(ReceiverAction::Close(lane));
        }
    }

    /// A data header came in on `lane`: where do its bytes go?
    ///
    /// # Errors
    /// If the peer broke the protocol.
    pub fn admit(&mut self, lane: Lane, chunk: Chunk) -> Result<Admission, ReceiverError> {
        let granted = self.granted;
        let end = self.lanes.get_mut(&lane).ok_or(ReceiverError::UnknownLane(lane))?;
        let wanted = if chunk.message < self.first {
            false
        } else {
            if chunk.message >= granted.saturating_add(self.tuning.early_messages) {
                return Err(ReceiverError::NoGrant { chunk, granted });
            }
            let at = (chunk.message - self.first) as usize;
            while self.arrivals.len() <= at {
                self.arrivals.push_back(Arrival::new(self.tuning.early_bytes));
            }
            let arrival = &mut self.arrivals[at];
            let expected = arrival.stated_bytes.unwrap_or(arrival.most_bytes);
            let fits = match arrival.stated_bytes {
                Some(stated) => chunk.message_bytes == stated,
                None => chunk.message_bytes <= arrival.most_bytes,
            };
            if !fits {
                return Err(ReceiverError::Length { chunk, expected });
            }
            arrival.stated_bytes = Some(chunk.message_bytes);
            !arrival.complete && (!arrival.ledger.has(&chunk)? || planted!(self.tuning, AcceptDuplicate))
        };
        if planted!(self.tuning, AckEarly) {
            (end.taken, end.ack_now) = (end.taken + 1, true);
        }
        end.streaming = Some((chunk, wanted));
        Ok(if wanted { Admission::Wanted(chunk) } else { Admission::Duplicate(chunk) })
    }

    /// All bytes of the chunk admitted last on `lane` have been read.
    ///
    /// # Errors
    /// If no chunk was admitted, or another lane landed an overlapping one meanwhile.
    pub fn land(&mut self, lane: Lane) -> Result<Landed, ReceiverError> {
        let end = self.lanes.get_mut(&lane).ok_or(ReceiverError::UnknownLane(lane))?;
        let (chunk, wanted) = end.streaming.take().ok_or(ReceiverError::UnknownLane(lane))?;
        if !planted!(self.tuning, AckEarly) {
            end.taken += 1;
        }
        (end.owed_bytes, end.owed_message) = (end.owed_bytes + u64::from(chunk.len), chunk.message);
        // What is owed must not fill the window of a path that has just been readmitted.
        end.ack_due |= !self.tuning.is_early(chunk.message_bytes) || end.owed_bytes > self.tuning.early_bytes / 2;
        let at = chunk.message.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        let arrival = at.and_then(|at| self.arrivals.get_mut(at)).filter(|a| wanted && !a.complete);
        let Some(arrival) = arrival else {
            self.duplicates += 1;
            let first = planted!(self.tuning, AcceptDuplicate);
            return Ok(Landed { chunk, first, message_complete: false });
        };
        let first = arrival.ledger.land(&chunk)?;
        arrival.complete = arrival.ledger.is_complete(chunk.message_bytes);
        let message_complete = first && arrival.complete;
        end.ack_now |= message_complete && end.ack_due;
        if !first {
            self.duplicates += 1;
        }
        self.retire();
        Ok(Landed { chunk, first: first || planted!(self.tuning, AcceptDuplicate), message_complete })
    }

    /// Next control frame to write on `lane`.
    pub fn poll_frame(&mut self, lane: Lane) -> Option<Frame> {
        let granted = self.granted();
        let forgotten = if planted!(self.tuning, ForgetGrant) { self.told } else { 0 };
        let end = self.lanes.get_mut(&lane)?;
        end.granted = end.granted.max(forgotten);
        if let Some(nonce) = end.pongs.pop_front() {
            return Some(Frame::Pong { nonce });
        }
        if let Some(notice) = end.notices.pop() {
            return Some(Frame::Notice(notice));
        }
        // An early message takes its grant for granted until half of the room for such may be used up.
        let patience = self.tuning.early_messages / 2;
        if end.granted < self.grant_due || granted.saturating_sub(end.granted) > patience {
            end.granted = granted;
            if planted!(self.tuning, ForgetGrant) {
                self.lanes.values_mut().for_each(|other| other.granted = granted);
                self.told = granted;
            }
            return Some(Frame::Grant { messages: granted });
        }
        let owed = end.taken - end.acked;
        let more = end.streaming.is_some_and(|(next, _)| next.message == end.owed_message);
        let due = end.ack_due && (!more || owed >= CHUNKS_AN_ACK);
        if owed > 0 && (due || end.ack_now || owed > patience.max(CHUNKS_AN_ACK)) {
            (end.acked, end.owed_bytes, end.ack_due, end.ack_now) = (end.taken, 0, false, false);
            return Some(Frame::Ack { path: lane.path, generation: lane.generation, chunks: end.taken });
        }
        None
    }

    /// Next thing to do.
    pub fn poll_action(&mut self) -> Option<ReceiverAction> {
        self.actions.pop_front()
    }

    /// A reading of a lane's outgoing bytes. Silence is told to the sender, which decides.
    pub fn handle_progress(&mut self, now: Time, lane: Lane, reading: LaneProgress) {
        let Some(end) = self.lanes.get_mut(&lane) else { return };
        // The path carries on with its next lane: what is slow on it is no stall.
        if self.alarms.get(&lane.path).is_some_and(|alarm| alarm.lane != lane && end.stall.moves(reading))
            && let Some(mut alarm) = self.alarms.remove(&lane.path)
            && now.saturating_sub(alarm.at) < self.tuning.stall_ceiling * 2
        {
            alarm.stall.handle_new_lane(now);
            alarm.stall.handle_false_alarm();
            end.stall = alarm.stall;
        }
        let stalled = end.stall.handle_progress(now, reading, &self.tuning);
        if !stalled {
            end.noticed_at = None;
        } else if end.noticed_at.is_none_or(|at| now.saturating_sub(at) >= self.tuning.stall_ceiling) {
            // Again and again: there may have been no other lane to tell it on.
            end.noticed_at = Some(now);
            self.alarms.insert(lane.path, Alarm { lane, at: now, stall: end.stall.clone() });
            self.notify(Notice { path: lane.path, generation: lane.generation, cause: Cause::Stall });
        }
    }

    /// Time has passed. A tick that comes late moves the deadlines.
    pub fn handle_tick(&mut self, now: Time) {
        let late = late_by(&mut self.last_tick, now, &self.tuning);
        if late > Time::ZERO {
            self.lanes.values_mut().for_each(|end| end.stall.handle_late_by(late));
        }
        self.lanes.values_mut().for_each(|end| end.ack_now |= end.acked < end.taken);
        if !self.is_dark() {
            (self.dark_since, self.dark_late, self.dead_told) = (None, Time::ZERO, false);
            return;
        }
        let since = *self.dark_since.get_or_insert(now);
        self.dark_late = (self.dark_late + late).min(now.saturating_sub(since));
        if now.saturating_sub(since) >= self.tuning.link_deadline + self.dark_late && !self.dead_told {
            self.dead_told = true;
            self.actions.push_back(ReceiverAction::Dead { since });
        }
    }

    /// Whether posted receives wait for a sender that was here and has no lane left, or none whose bytes from here
    /// arrive. One that has nothing to send is not dark, however long it is silent.
    pub fn is_dark(&self) -> bool {
        self.joined && self.is_busy() && self.lanes.values().all(|end| end.noticed_at.is_some())
    }
}

/// How much later than one tick after the last one it is.
pub(super) fn late_by(last: &mut Option<Time>, now: Time, tuning: &Tuning) -> Time {
    let late = last.map_or(Time::ZERO, |last| now.saturating_sub(last).saturating_sub(tuning.tick * 2));
    *last = Some(now);
    late
}
