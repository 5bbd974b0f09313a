//! The sender's side of one path: its lanes, what is in flight on the current one, and its clocks.

use std::collections::{BTreeMap, VecDeque};

use super::{
    Cause, Chunk, Generation, HEADER_BYTES, Lane, PathId, PathState, RateEstimate, StallDetector, Time, Tuning,
};

/// A point in time that moves when the process could not run, but never further away than the whole wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Time,
    wait: Time,
}

impl Deadline {
    pub(super) fn new(now: Time, wait: Time) -> Self {
        Self { at: now + wait, wait }
    }

    pub(super) fn has_passed(&self, now: Time) -> bool {
        now >= self.at
    }

    fn handle_late_by(&mut self, now: Time, late: Time) {
        self.at = (self.at + late).min(now + self.wait).max(self.at);
    }
}

#[derive(Debug)]
pub(super) struct PathEnd {
    pub(super) id: PathId,
    pub(super) state: PathState,
    /// Lane in use (live, on trial or proving); `None` once it is closed.
    pub(super) current: Option<Generation>,
    /// Last lane that was taken into use.
    pub(super) lane_in_use: Generation,
    pub(super) spare: Option<Generation>,
    pub(super) opening: Option<Generation>,
    pub(super) opening_deadline: Deadline,
    pub(super) last_generation: Generation,
    pub(super) spare_retry_at: Time,
    pub(super) in_flight: VecDeque<(Chunk, Time)>,
    pub(super) in_flight_bytes: u64,
    pub(super) chunks_acked: u64,
    pub(super) rate: RateEstimate,
    /// The window holds a chunk back.
    pub(super) held: bool,
    /// The driver lets no chunk go for now: other links go first.
    pub(super) yields: bool,
    /// Carries nothing while one that does not stand by is live.
    pub(super) stands_by: bool,
    pub(super) stall: StallDetector,
    /// Fences not yet written on the current lane; a later one of a path covers the earlier.
    pub(super) fences_due: BTreeMap<PathId, Generation>,
    pub(super) ping_due: Option<u64>,
    pub(super) awaiting: Option<u64>,
    pub(super) ping_at: Option<Time>,
    pub(super) deadline: Deadline,
    /// When the path last gave or was asked for a sign of life.
    pub(super) heard_at: Time,
    pub(super) good_probes: u8,
    pub(super) live_since: Time,
    pub(super) ramp_from: Option<Time>,
    pub(super) failures: u32,
    failed_at: Time,
    attempts: u32,
    pub(super) hold_until: Time,
    pub(super) next_attempt: Time,
    pub(super) noticed_at: Time,
    pub(super) suspected_for: Cause,
}

impl PathEnd {
    pub(super) fn new(id: PathId, now: Time) -> Self {
        Self {
            id,
            state: PathState::Opening,
            current: None,
            lane_in_use: Generation(0),
            spare: None,
            opening: None,
            opening_deadline: Deadline::new(now, Time::ZERO),
            last_generation: Generation(0),
            spare_retry_at: now,
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            chunks_acked: 0,
            rate: RateEstimate::default(),
            held: false,
            yields: false,
            stands_by: false,
            stall: StallDetector::new(now),
            fences_due: BTreeMap::new(),
            ping_due: None,
            awaiting: None,
            ping_at: None,
            deadline: Deadline::new(now, Time::ZERO),
            heard_at: now,
            good_probes: 0,
            live_since: now,
            ramp_from: None,
            failures: 0,
            failed_at: now,
            attempts: 0,
            hold_until: Time::ZERO,
            next_attempt: now,
            noticed_at: now,
            suspected_for: Cause::Stall,
        }
    }

    pub(super) fn current_lane(&self) -> Option<Lane> {
        self.current.map(|generation| Lane { path: self.id, generation })
    }

    /// A new connection is to be made.
    pub(super) fn open(&mut self, now: Time, tuning: &Tuning) -> Lane {
        let failed = self.state == PathState::Failed;
        let wait = if failed { tuning.proof_deadline } else { tuning.open_deadline };
        self.opening_deadline = Deadline::new(now, wait);
        self.last_generation.0 += 1;
        self.opening = Some(self.last_generation);
        Lane { path: self.id, generation: self.last_generation }
    }

    /// The lane becomes the one in use.
    pub(super) fn take_into_use(&mut self, generation: Generation, now: Time) {
        (self.current, self.lane_in_use) = (Some(generation), generation);
        self.in_flight.clear();
        (self.in_flight_bytes, self.chunks_acked) = (0, 0);
        (self.ping_due, self.awaiting, self.ping_at) = (None, None, None);
        self.fences_due.clear();
        self.stall.handle_new_lane(now);
        self.heard_at = now;
    }

    /// All lanes of a path that goes out of service.
    pub(super) fn drop_lanes(&mut self) -> Vec<Lane> {
        (self.ping_due, self.awaiting, self.ping_at) = (None, None, None);
        let lanes = [self.current.take(), self.spare.take(), self.opening.take()];
        lanes.into_iter().flatten().map(|generation| Lane { path: self.id, generation }).collect()
    }

    pub(super) fn handle_late_by(&mut self, now: Time, late: Time) {
        self.stall.handle_late_by(late);
        self.deadline.handle_late_by(now, late);
        self.opening_deadline.handle_late_by(now, late);
    }

    /// How long a spare has to answer: the peer's host may delay its acknowledgement of a single segment.
    pub(super) fn trial(&self, tuning: &Tuning) -> Time {
        tuning.trial.max(tuning.stall_small).max(self.stall.threshold(tuning))
    }

    /// Bytes in flight with their headers, so that many small chunks are bounded too.
    pub(super) fn occupied_bytes(&self) -> u64 {
        self.in_flight_bytes + (self.in_flight.len() * HEADER_BYTES) as u64
    }

    /// Starts the hold-down: one second, doubling with each failure that is not forgiven.
    pub(super) fn handle_failure(&mut self, now: Time, tuning: &Tuning) {
        let hold = tuning.hold_first * (1 << self.failures.min(16));
        self.hold_until = now + hold.min(tuning.hold_max);
        self.failures += 1;
        (self.failed_at, self.attempts) = (now, 0);
        self.ramp_from = None;
        self.rate = RateEstimate::default();
    }

    /// Wait before the next attempt to reopen.
    pub(super) fn back_off(&mut self, now: Time, tuning: &Tuning) -> Time {
        let wait = tuning.reopen_first * (1 << self.attempts.min(16));
        self.attempts += 1;
        let young = now.saturating_sub(self.failed_at) < tuning.soon;
        wait.min(if young { tuning.reopen_soon } else { tuning.reopen_later })
    }

    /// Bytes that may be in flight now: a readmitted path starts at a quarter and doubles.
    pub(super) fn window_bytes(&self, now: Time, tuning: &Tuning) -> u64 {
        self.ramped(self.rate.window_bytes(tuning), now, tuning)
    }

    /// Bytes that the kernel may hold now, likewise.
    pub(super) fn outstanding_bytes(&self, now: Time, tuning: &Tuning) -> u64 {
        self.ramped(self.rate.outstanding_bytes(tuning), now, tuning)
    }

    fn ramped(&self, full: u64, now: Time, tuning: &Tuning) -> u64 {
        let Some(from) = self.ramp_from else { return full };
        let steps = now.saturating_sub(from).as_nanos() / tuning.ramp_step.as_nanos().max(1);
        match steps {
            0 => full / 4,
            1 => full / 2,
            _ => full,
        }
    }

    /// Nothing more may be sent now: for lack of a window, or of chunks.
    pub(super) fn handle_held(&mut self, held: bool) {
        self.held = held;
        if held {
            self.rate.handle_held();
        }
    }

    pub(super) fn handle_sent(&mut self, chunk: Chunk, now: Time) {
        if self.in_flight.is_empty() {
            self.rate.handle_busy(now);
        }
        self.in_flight.push_back((chunk, now));
        self.in_flight_bytes += u64::from(chunk.len);
    }

    /// The oldest chunk in flight is acknowledged.
    pub(super) fn pop_acked(&mut self, now: Time) -> Option<Chunk> {
        let (chunk, _) = self.in_flight.pop_front()?;
        self.in_flight_bytes -= u64::from(chunk.len);
        self.chunks_acked += 1;
        self.rate.handle_acked(now, u64::from(chunk.len));
        Some(chunk)
    }
}
