//! A path's delivery rate, and from it the bytes that may be outstanding and the size of a chunk.
//!
//! The kernel's own measurement is preferred: it counts what the other host's kernel acknowledges and leaves
//! out the times when there was nothing to send, so that a process which is late, here or there, does not
//! make its path look slow. A path that looks slow gets less to carry, and would then be slow.

use super::{Time, Tuning};

const SAMPLES: usize = 8;
/// Long enough that a burst of acknowledgements after a late wake-up of the peer does not look like a fast path.
const SAMPLE_TIME: Time = Time::from_millis(20);
/// Readings of the kernel's measurement that are kept, and the fewest that count.
const READINGS: usize = 15;
const READINGS_LEAST: usize = 3;
/// The window grows to at most sixteen times, and never beyond what the tuning allows a late peer to owe.
const SLACK_MAX: u32 = 4;
/// Samples without a reason to grow before it halves again.
const CALM_SAMPLES: u32 = 8;

/// A delivery rate as the kernel measured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryRate {
    /// Bytes per second.
    pub bytes_s: u64,
    /// There was too little to send while it was measured: the path can do at least so much.
    pub limited_by_sender: bool,
}

/// The median of the kernel's last readings; without them the highest of the last eight samples of
/// acknowledged bytes over at least 20 ms each. A maximum, because such a sample is low whenever the
/// application, not the path, was the limit.
#[derive(Clone, Debug)]
pub struct RateEstimate {
    samples: [u64; SAMPLES],
    next: usize,
    started: Option<Time>,
    bytes: u64,
    readings: std::collections::VecDeque<u64>,
    last_shown: Option<DeliveryRate>,
    kernel_bytes_s: Option<u64>,
    acked_at: Option<Time>,
    /// The window held a chunk back since the sample began: a low sample is then the path's doing.
    held: bool,
    /// The kernel had nothing outstanding at some moment of the sample: a low one is not the path's doing.
    drained: bool,
    /// The window is doubled this many times.
    slack: u32,
    calm_samples: u32,
    /// Windows and chunks are made for this rate in place of the measured one.
    pace_bytes_s: Option<u64>,
}

impl Default for RateEstimate {
    fn default() -> Self {
        Self {
            samples: [0; SAMPLES],
            next: 0,
            started: None,
            bytes: 0,
            readings: std::collections::VecDeque::with_capacity(READINGS),
            last_shown: None,
            kernel_bytes_s: None,
            acked_at: None,
            held: false,
            drained: false,
            slack: 0,
            calm_samples: 0,
            pace_bytes_s: None,
        }
    }
}

impl RateEstimate {
    /// The kernel measured this rate while bytes were outstanding. A low one counts only where the path was the
    /// limit: a path that is kept short for looking slow could not show otherwise that it is not.
    pub fn handle_reading(&mut self, rate: DeliveryRate) {
        // It shows a measurement until there is a better one.
        let known = self.last_shown.replace(rate) == Some(rate);
        if known || (rate.limited_by_sender && self.kernel_bytes_s.is_none_or(|known| rate.bytes_s <= known)) {
            return;
        }
        self.take_reading(rate.bytes_s);
    }

    fn take_reading(&mut self, bytes_s: u64) {
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(bytes_s);
        if self.readings.len() >= READINGS_LEAST {
            let mut sorted: Vec<u64> = self.readings.iter().copied().collect();
            sorted.sort_unstable();
            self.kernel_bytes_s = Some(sorted[sorted.len() / 2]);
        }
    }

    /// Bytes have been put on a path that had none outstanding: the time before does not count. No time has
    /// passed where the acknowledgement of the last bytes is what let these go.
    pub fn handle_busy(&mut self, now: Time) {
        if self.acked_at != Some(now) {
            self.begin_sample(now);
        }
    }

    fn begin_sample(&mut self, now: Time) {
        (self.started, self.bytes, self.held, self.drained) = (Some(now), 0, false, false);
    }

    /// The kernel has nothing outstanding.
    pub fn handle_drained(&mut self) {
        self.drained = true;
    }

    /// The window holds a chunk back.
    pub fn handle_held(&mut self) {
        self.held = true;
    }

    /// The window holds a chunk back while nothing is on its way: what is outstanding waits for the peer's
    /// process, and the window must be larger than that delay.
    pub fn handle_idle(&mut self) {
        (self.slack, self.calm_samples) = ((self.slack + 1).min(SLACK_MAX), 0);
    }

    /// `bytes` have been acknowledged.
    pub fn handle_acked(&mut self, now: Time, bytes: u64) {
        let started = *self.started.get_or_insert(now);
        self.bytes += bytes;
        self.acked_at = Some(now);
        let elapsed = now.saturating_sub(started);
        if elapsed < SAMPLE_TIME {
            return;
        }
        let bytes_s = u128::from(self.bytes) * 1_000_000_000 / elapsed.as_nanos();
        let bytes_s = u64::try_from(bytes_s).unwrap_or(u64::MAX);
        // A lower one only tells that there was little to send.
        if self.held || self.bytes_s().is_none_or(|known| bytes_s >= known) {
            self.samples[self.next] = bytes_s;
            self.next = (self.next + 1) % SAMPLES;
        }
        // While the window holds bytes back, the kernel shows only what is faster than before, such as a burst that
        // a shaper let through. What the path really did counts beside that.
        if self.kernel_bytes_s.is_some() && self.held && !self.drained {
            self.take_reading(bytes_s);
        }
        self.begin_sample(now);
        self.calm_samples += 1;
        if self.calm_samples >= CALM_SAMPLES {
            (self.slack, self.calm_samples) = (self.slack.saturating_sub(1), 0);
        }
    }

    /// Bytes per second; `None` before the first sample.
    pub fn bytes_s(&self) -> Option<u64> {
        self.kernel_bytes_s.or_else(|| self.samples.iter().copied().max().filter(|r| *r > 0))
    }

    /// Makes windows and chunks for a rate that is given, not for the measured one.
    pub fn set_pace(&mut self, bytes_s: Option<u64>) {
        self.pace_bytes_s = bytes_s;
    }

    fn bytes_in(&self, time: Time) -> Option<u64> {
        let bytes = u128::from(self.pace_bytes_s.or_else(|| self.bytes_s())?) * time.as_nanos() / 1_000_000_000;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Bytes that may be on the way: handed to the kernel and not acknowledged by the other host's kernel.
    pub fn outstanding_bytes(&self, tuning: &Tuning) -> u64 {
        let (least, most) = tuning.window_bytes;
        let Some(timed) = self.bytes_in(tuning.window_time) else { return (256 << 10).clamp(least, most) };
        let fast = self.bytes_in(tuning.window_fast).unwrap_or(0).max(tuning.window_plenty);
        timed.min(fast).clamp(least, most)
    }

    /// Bytes that may be sent and not yet taken by the peer's process. Where the kernel measures, it also keeps
    /// to [`RateEstimate::outstanding_bytes`], and this only bounds what a late peer may owe: twice as much, and
    /// more while the path idles for it.
    pub fn window_bytes(&self, tuning: &Tuning) -> u64 {
        let outstanding = self.outstanding_bytes(tuning);
        let late = if self.kernel_bytes_s.is_some() { outstanding * 2 } else { outstanding };
        let most = self.bytes_in(tuning.window_late_time).map_or(tuning.window_late, |b| b.min(tuning.window_late));
        (late << self.slack).min(most).max(outstanding).min(tuning.window_bytes.1)
    }

    /// Size of the next chunk of a message of `message_bytes` while `live_paths` share it.
    pub fn chunk_bytes(&self, tuning: &Tuning, message_bytes: u64, live_paths: usize) -> u32 {
        let (least, most) = (u64::from(tuning.chunk_bytes.0), u64::from(tuning.chunk_bytes.1));
        let align = u64::from(tuning.chunk_align);
        let timed = self.bytes_in(tuning.chunk_time).unwrap_or(64 << 10).min(self.outstanding_bytes(tuning) / 2);
        let timed = timed.clamp(least, most);
        let shared = timed.min(message_bytes / (2 * live_paths.max(1) as u64)).max(least);
        u32::try_from(shared / align * align).unwrap_or(u32::MAX).max(tuning.chunk_align)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes_s: u64) -> RateEstimate {
        let mut rate = RateEstimate::default();
        rate.handle_busy(Time::ZERO);
        for i in 1..=SAMPLES as u32 {
            rate.handle_acked(SAMPLE_TIME * i, bytes_s / 50);
        }
        rate
    }

    #[test]
    fn rate_window_and_chunk_follow_the_path() {
        let tuning = Tuning::default();
        let rate = at(25_000_000);
        assert_eq!(rate.bytes_s(), Some(25_000_000));
        assert_eq!(rate.window_bytes(&tuning), 250_000);
        assert_eq!(rate.chunk_bytes(&tuning, 64 << 20, 3), 61_440);
        assert_eq!(at(1_000_000).chunk_bytes(&tuning, 64 << 20, 3), 16 << 10);
        assert_eq!(at(10_000_000_000).chunk_bytes(&tuning, 64 << 20, 3), 512 << 10);
        assert_eq!(at(10_000_000_000).window_bytes(&tuning), 2_500_000);
        assert_eq!(at(1_000_000_000).window_bytes(&tuning), tuning.window_plenty);
    }

    #[test]
    fn a_message_is_cut_for_all_live_paths_but_never_below_the_least() {
        let tuning = Tuning::default();
        let rate = at(10_000_000_000);
        assert_eq!(rate.chunk_bytes(&tuning, 600 << 10, 3), 100 << 10);
        assert_eq!(rate.chunk_bytes(&tuning, 8, 3), 16 << 10);
    }

    #[test]
    fn the_kernels_median_counts_and_leaves_room_for_a_late_peer() {
        let tuning = Tuning::default();
        let mut rate = at(2_000_000);
        for bytes_s in [900_000_000, 24_900_000, 25_000_000, 24_000_000, 25_100_000] {
            rate.handle_reading(DeliveryRate { bytes_s, limited_by_sender: false });
        }
        assert_eq!(rate.bytes_s(), Some(25_000_000));
        assert_eq!(rate.outstanding_bytes(&tuning), 250_000);
        assert_eq!(rate.window_bytes(&tuning), 500_000);
    }

    #[test]
    fn a_low_sample_counts_only_if_the_window_held_something_back() {
        let mut rate = at(25_000_000);
        let mut now = SAMPLE_TIME * 10;
        rate.handle_busy(now);
        for held in [false, true] {
            for _ in 0..SAMPLES {
                if held {
                    rate.handle_held();
                }
                now += SAMPLE_TIME;
                rate.handle_acked(now, 20_000);
            }
            assert_eq!(rate.bytes_s(), Some(if held { 1_000_000 } else { 25_000_000 }));
        }
    }

    #[test]
    fn a_window_that_empties_and_fills_at_once_is_sampled_all_the_same() {
        let mut rate = at(1_000_000);
        let mut now = SAMPLE_TIME * 10;
        for _ in 0..40 {
            rate.handle_busy(now);
            now += SAMPLE_TIME / 4;
            rate.handle_acked(now, 250_000);
        }
        assert!(rate.bytes_s() > Some(40_000_000));
    }

    #[test]
    fn the_window_doubles_for_a_late_peer_and_comes_back() {
        let tuning = Tuning::default();
        let mut rate = at(25_000_000);
        rate.handle_idle();
        rate.handle_idle();
        assert_eq!(rate.window_bytes(&tuning), 1_000_000);
        rate.handle_busy(SAMPLE_TIME * 100);
        for i in 1..=2 * CALM_SAMPLES {
            rate.handle_acked(SAMPLE_TIME * (100 + i), 500_000);
        }
        assert_eq!(rate.window_bytes(&tuning), 250_000);
    }

    #[test]
    fn a_path_kept_short_can_show_that_it_is_faster() {
        let mut rate = RateEstimate::default();
        read(&mut rate, 5_000_000, false);
        read(&mut rate, 4_000_000, true);
        assert_eq!(rate.bytes_s(), Some(5_000_000), "it had little to send");
        read(&mut rate, 25_000_000, true);
        assert_eq!(rate.bytes_s(), Some(25_000_000));
    }

    /// Readings that differ a little, as real ones do.
    fn read(rate: &mut RateEstimate, bytes_s: u64, limited_by_sender: bool) {
        for i in 0..READINGS as u64 {
            rate.handle_reading(DeliveryRate { bytes_s: bytes_s + i % 2, limited_by_sender });
        }
    }

    #[test]
    fn a_path_that_its_window_holds_back_is_as_slow_as_it_was_unless_it_ran_dry() {
        for drained in [true, false] {
            let mut rate = RateEstimate::default();
            read(&mut rate, 25_000_000, false);
            let mut now = SAMPLE_TIME;
            rate.handle_busy(now);
            for i in 0..READINGS as u32 {
                rate.handle_held();
                if drained {
                    rate.handle_drained();
                }
                now += SAMPLE_TIME;
                rate.handle_acked(now, 50_000);
                // A burst now and then; the kernel shows it all the time.
                let bytes_s = 100_000_000 + u64::from(i / 4);
                rate.handle_reading(DeliveryRate { bytes_s, limited_by_sender: true });
            }
            let expected = if drained { 25_000_001 } else { 2_500_000 };
            assert_eq!(rate.bytes_s(), Some(expected), "{rate:?}");
        }
    }

    #[test]
    fn a_pace_decides_on_the_window_and_leaves_the_measured_rate_alone() {
        let tuning = Tuning::default();
        let mut rate = at(25_000_000);
        rate.set_pace(Some(10_000_000));
        assert_eq!((rate.bytes_s(), rate.outstanding_bytes(&tuning)), (Some(25_000_000), 100_000));
        rate.set_pace(None);
        assert_eq!(rate.outstanding_bytes(&tuning), 250_000);
    }

    #[test]
    fn idle_time_does_not_lower_the_rate() {
        let mut rate = at(25_000_000);
        let later = Time::from_secs(10);
        rate.handle_busy(later);
        rate.handle_acked(later + SAMPLE_TIME, 500_000);
        assert_eq!(rate.bytes_s(), Some(25_000_000));
    }
}
