//! Stall: bytes outstanding and no progress. Progress is counted in bytes by the kernel of the other
//! host, so a peer whose process is slow is never taken for a dead path.

use super::{Time, Tuning};

/// What the driver knows of a lane's outgoing bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneProgress {
    /// Any counter that moves when the peer's host acknowledges bytes (for TCP: `tcpi_bytes_acked` + `tcpi_delivered`).
    pub acked: u64,
    /// Whether bytes handed to the lane are not yet acknowledged by the peer's host.
    pub outstanding: bool,
    /// Whether that is at most one segment, whose acknowledgement the peer's host may delay by 40 ms.
    pub small: bool,
}

/// Watches one lane. The threshold adapts to the longest gap between two steps of progress.
#[derive(Clone, Debug)]
pub struct StallDetector {
    acked: u64,
    moved_at: Time,
    busy: bool,
    small: bool,
    longest_gap: Time,
    false_alarms: u32,
    /// Steps of progress with short gaps since the last false alarm was counted or forgotten.
    calm_steps: u32,
}

/// Such steps after which a false alarm is forgotten.
const CALM_STEPS: u32 = 20;

impl StallDetector {
    /// A lane opened at `now`.
    pub fn new(now: Time) -> Self {
        Self {
            acked: 0,
            moved_at: now,
            busy: false,
            small: false,
            longest_gap: Time::ZERO,
            false_alarms: 0,
            calm_steps: 0,
        }
    }

    /// Starts anew on the next lane of the path; what was learnt of its gaps stays.
    pub fn handle_new_lane(&mut self, now: Time) {
        (self.acked, self.moved_at, self.busy) = (0, now, false);
    }

    /// The lane was suspected and its path turned out to be alive.
    pub fn handle_false_alarm(&mut self) {
        (self.false_alarms, self.calm_steps) = ((self.false_alarms + 1).min(4), 0);
    }

    /// The detector itself ran late: every deadline moves.
    pub fn handle_late_by(&mut self, late: Time) {
        self.moved_at += late;
    }

    /// Whether a reading shows progress since the last one.
    pub fn moves(&self, reading: LaneProgress) -> bool {
        reading.acked != self.acked
    }

    /// Takes a reading; true if the lane has stalled.
    pub fn handle_progress(&mut self, now: Time, reading: LaneProgress, tuning: &Tuning) -> bool {
        // However late a tick came, the wait that is left is never more than a whole one.
        self.moved_at = self.moved_at.min(now);
        if self.moves(reading) || !reading.outstanding || !self.busy {
            if self.busy && reading.outstanding {
                let gap = now.saturating_sub(self.moved_at);
                self.longest_gap = gap.max(self.longest_gap.mul_f64(0.99));
            }
            if self.moves(reading) && self.longest_gap < tuning.stall_floor / 2 {
                self.calm_steps += 1;
                if self.calm_steps >= CALM_STEPS {
                    (self.false_alarms, self.calm_steps) = (self.false_alarms.saturating_sub(1), 0);
                }
            }
            (self.acked, self.moved_at, self.busy) = (reading.acked, now, reading.outstanding);
            self.small = reading.small;
            return false;
        }
        // The wait so far was for one delayed acknowledgement; what has joined it gets a whole wait.
        if self.small && !reading.small {
            self.moved_at = now;
        }
        self.small = reading.small;
        let least = if reading.small { tuning.stall_small } else { Time::ZERO };
        now.saturating_sub(self.moved_at) >= self.threshold(tuning).max(least)
    }

    /// Silence that counts as a stall: a quarter more than the longest seen lately. A false alarm costs a spare
    /// connection and few bytes; a true one is noticed the sooner.
    pub fn threshold(&self, tuning: &Tuning) -> Time {
        let adaptive = (self.longest_gap * 5 / 4).max(tuning.stall_floor) * (1 << self.false_alarms);
        adaptive.min(tuning.stall_ceiling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Time = Time::from_millis(1);

    fn busy(acked: u64) -> LaneProgress {
        LaneProgress { acked, outstanding: true, small: false }
    }

    #[test]
    fn silence_with_bytes_outstanding_is_a_stall_at_the_threshold() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        assert!(!d.handle_progress(MS, busy(1), &tuning));
        assert!(!d.handle_progress(MS * 20, busy(1), &tuning));
        assert!(d.handle_progress(MS * 21, busy(1), &tuning));
    }

    #[test]
    fn an_idle_lane_never_stalls() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        let idle = LaneProgress { acked: 5, outstanding: false, small: false };
        assert!(!d.handle_progress(MS, idle, &tuning));
        assert!(!d.handle_progress(MS * 500, idle, &tuning));
        assert!(!d.handle_progress(MS * 501, busy(5), &tuning), "the wait starts with the first outstanding byte");
        assert!(d.handle_progress(MS * 521, busy(5), &tuning));
    }

    #[test]
    fn a_delayed_acknowledgement_of_one_segment_is_no_stall() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        let small = LaneProgress { small: true, ..busy(1) };
        assert!(!d.handle_progress(MS, small, &tuning));
        assert!(!d.handle_progress(MS * 60, small, &tuning));
        assert!(d.handle_progress(MS * 61, small, &tuning));
    }

    #[test]
    fn bytes_that_join_a_delayed_acknowledgement_get_a_whole_wait() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        let small = LaneProgress { small: true, ..busy(1) };
        assert!(!d.handle_progress(MS, small, &tuning));
        assert!(!d.handle_progress(MS * 31, small, &tuning));
        assert!(!d.handle_progress(MS * 32, busy(1), &tuning), "the many bytes are new");
        assert!(!d.handle_progress(MS * 51, busy(1), &tuning));
        assert!(d.handle_progress(MS * 52, busy(1), &tuning));
    }

    #[test]
    fn a_late_tick_never_leaves_more_than_a_whole_wait() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        d.handle_progress(MS * 1000, busy(1), &tuning);
        d.handle_late_by(MS * 990);
        assert!(!d.handle_progress(MS * 1001, busy(1), &tuning));
        assert!(d.handle_progress(MS * 1021, busy(1), &tuning));
    }

    #[test]
    fn a_late_tick_moves_the_deadline() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        d.handle_progress(MS, busy(1), &tuning);
        d.handle_late_by(MS * 100);
        assert!(!d.handle_progress(MS * 110, busy(1), &tuning));
        assert!(d.handle_progress(MS * 121, busy(1), &tuning));
    }

    #[test]
    fn slow_progress_and_false_alarms_raise_the_threshold() {
        let tuning = Tuning::default();
        let mut d = StallDetector::new(Time::ZERO);
        d.handle_progress(MS, busy(1), &tuning);
        d.handle_progress(MS * 25, busy(2), &tuning);
        assert_eq!(d.threshold(&tuning), MS * 30);
        d.handle_false_alarm();
        assert_eq!(d.threshold(&tuning), MS * 60);
        for _ in 0..9 {
            d.handle_false_alarm();
        }
        assert_eq!(d.threshold(&tuning), tuning.stall_ceiling);
    }
}
