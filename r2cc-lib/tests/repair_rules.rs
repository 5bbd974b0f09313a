//! The rules of the repair machines one by one, each in the shortest story that shows it. The simulator
//! (`repair_simulator`) holds them in every order of events.

#![allow(clippy::unwrap_used, reason = "a story that goes another way has failed")]

use std::sync::Arc;

use proptest::prelude::*;
use r2cc::repair::{
    Action, Cause, Chunk, Frame, Generation, HEADER_BYTES, Lane, LaneProgress, Notice, PathId, PathState, Receiver,
    ReceiverAction, Sender, Time, Tuning,
};

const MS: Time = Time::from_millis(1);
const KIB: u64 = 1 << 10;

fn lane(path: u16, generation: u32) -> Lane {
    Lane { path: PathId(path), generation: Generation(generation) }
}

fn fence(path: u16, generation: u32) -> Frame {
    Frame::Fence { path: PathId(path), generation: Generation(generation) }
}

fn ack(path: u16, generation: u32, chunks: u64) -> Frame {
    Frame::Ack { path: PathId(path), generation: Generation(generation), chunks }
}

/// A sender and its clock.
struct Rig {
    sender: Sender,
    now: Time,
}

impl Rig {
    /// All paths live on generation 1, `messages` granted, no spares asked for yet.
    fn live(paths: usize, messages: u64) -> Self {
        let mut rig = Self { sender: Sender::new(Arc::new(Tuning::default()), paths, Time::ZERO), now: MS };
        for path in 0..paths as u16 {
            assert_eq!(rig.sender.poll_action(), Some(Action::Open(lane(path, 1))));
            rig.opened(lane(path, 1));
        }
        rig.hears(lane(0, 1), Frame::Grant { messages });
        rig
    }

    fn opened(&mut self, lane: Lane) {
        self.sender.handle_lane_opened(self.now, lane).unwrap();
    }

    fn hears(&mut self, lane: Lane, frame: Frame) {
        self.sender.handle_frame(self.now, lane, frame).unwrap();
    }

    fn state(&self, path: u16) -> PathState {
        self.sender.path_reports().find(|r| r.path == PathId(path)).unwrap().state
    }

    fn frames(&mut self, lane: Lane) -> Vec<Frame> {
        std::iter::from_fn(|| self.sender.poll_frame(self.now, lane)).collect()
    }

    fn chunks(&mut self, lane: Lane) -> Vec<Chunk> {
        let frames = self.frames(lane).into_iter();
        frames.filter_map(|f| if let Frame::Data(chunk) = f { Some(chunk) } else { None }).collect()
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.sender.poll_action()).collect()
    }

    fn done(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.sender.poll_done()).map(|m| m.0).collect()
    }

    /// Ticks for `time`; returns what was asked for and when.
    fn pass(&mut self, time: Time) -> Vec<(Time, Action)> {
        let (end, mut asked) = (self.now + time, Vec::new());
        while self.now < end {
            self.now = (self.now + MS * 5).min(end);
            self.sender.handle_tick(self.now).unwrap();
            asked.extend(self.actions().into_iter().map(|a| (self.now, a)));
        }
        asked
    }

    fn loses(&mut self, lane: Lane) {
        self.sender.handle_lane_lost(self.now, lane, Cause::Connection).unwrap();
    }

    fn fails(&mut self, path: u16) {
        self.sender.handle_nic(self.now, PathId(path), false).unwrap();
        self.actions();
    }

    /// Waits for the attempt to reopen a failed path, makes it, and answers its probes; returns the lane.
    fn returns(&mut self, path: u16) -> Lane {
        let opened = loop {
            let asked = self.pass(MS * 5);
            let mine = asked.iter().find_map(|(_, a)| match a {
                Action::Open(lane) if lane.path == PathId(path) => Some(*lane),
                _ => None,
            });
            if let Some(lane) = mine {
                break lane;
            }
        };
        self.opened(opened);
        while self.state(path) == PathState::Proving {
            for frame in self.frames(opened) {
                if let Frame::Ping { nonce } = frame {
                    self.hears(opened, Frame::Pong { nonce });
                }
            }
            self.pass(MS * 5);
        }
        assert_eq!(self.state(path), PathState::Live);
        opened
    }
}

#[test]
fn a_fence_precedes_the_replay_on_every_lane() {
    let mut rig = Rig::live(3, 1);
    rig.sender.post(4096 * KIB);
    let owed = rig.chunks(lane(0, 1));
    assert!(!owed.is_empty());
    rig.loses(lane(0, 1));
    for path in 1..3 {
        let frames = rig.frames(lane(path, 1));
        assert_eq!(frames[0], fence(0, 1), "path {path}");
        assert_eq!(frames.iter().filter(|f| matches!(f, Frame::Fence { .. })).count(), 1);
        if path == 1 {
            assert_eq!(frames[1], Frame::Data(owed[0]), "replay goes first and keeps its bounds");
        }
    }
    let bytes: u64 = owed.iter().map(|c| u64::from(c.len)).sum();
    assert_eq!(rig.sender.totals().replayed_bytes, bytes);
}

#[test]
fn a_chain_of_two_deaths_fences_both_lanes() {
    let mut rig = Rig::live(3, 1);
    rig.sender.post(64 * KIB);
    let owed = rig.chunks(lane(0, 1));
    rig.loses(lane(0, 1));
    assert_eq!(rig.chunks(lane(1, 1)), owed);
    rig.loses(lane(1, 1));
    let mut frames = rig.frames(lane(2, 1));
    let replay: Vec<Frame> = frames.split_off(2);
    frames.sort_by_key(|f| format!("{f:?}"));
    assert_eq!(frames, [fence(0, 1), fence(1, 1)]);
    assert_eq!(replay, owed.into_iter().map(Frame::Data).collect::<Vec<_>>());
}

#[test]
fn a_lane_that_comes_into_use_repeats_every_fence() {
    let mut rig = Rig::live(2, 1);
    rig.sender.post(64 * KIB);
    rig.chunks(lane(0, 1));
    rig.fails(0);
    rig.fails(1);
    let back = rig.returns(1);
    let frames = rig.frames(back);
    let first_data = frames.iter().position(|f| matches!(f, Frame::Data(_))).unwrap();
    for (path, least) in [(0, 1), (1, 1)] {
        let fenced = frames[..first_data]
            .iter()
            .any(|f| matches!(f, Frame::Fence { path: p, generation } if *p == PathId(path) && generation.0 >= least));
        assert!(fenced, "path {path} in {frames:?}");
    }
}

#[test]
fn a_path_that_fails_fences_its_spares_too() {
    let mut rig = Rig::live(2, 1);
    rig.pass(MS * 5);
    rig.opened(lane(0, 2));
    rig.fails(0);
    assert_eq!(rig.frames(lane(1, 1)), [fence(0, 2)]);
}

#[test]
fn a_late_ack_is_counted_and_settles_nothing() {
    let mut rig = Rig::live(2, 1);
    rig.sender.post(64 * KIB);
    let owed = rig.chunks(lane(0, 1)).len() as u64;
    rig.loses(lane(0, 1));
    rig.chunks(lane(1, 1));
    rig.hears(lane(1, 1), ack(0, 1, owed));
    assert_eq!((rig.done(), rig.sender.totals().late_acks), (vec![], 1));
    rig.hears(lane(1, 1), ack(1, 1, owed));
    assert_eq!(rig.done(), [0]);
}

#[test]
fn chunks_keep_their_bounds_on_a_path_of_another_speed() {
    let mut rig = Rig::live(2, 2);
    rig.sender.post(8 * KIB);
    assert_eq!(rig.chunks(lane(0, 1)).len(), 1);
    // Path 0 turns out slower than a path is taken for at first: it cuts smaller chunks.
    rig.hears(lane(0, 1), ack(0, 1, 1));
    rig.sender.post(16 << 20);
    let owed = rig.chunks(lane(1, 1));
    let mut acked = 1;
    for _ in 0..20 {
        acked += rig.chunks(lane(0, 1)).len() as u64;
        rig.now += MS * 21;
        rig.hears(lane(0, 1), ack(0, 1, acked));
    }
    let before = rig.chunks(lane(0, 1));
    acked += before.len() as u64;
    assert!(before[0].len < owed[0].len, "path 0 cuts {} KiB", before[0].len >> 10);
    rig.hears(lane(0, 1), ack(0, 1, acked));
    rig.loses(lane(1, 1));
    let replayed = rig.chunks(lane(0, 1));
    assert!(!replayed.is_empty());
    assert_eq!(replayed, owed[..replayed.len()]);
}

#[test]
fn silence_makes_a_path_suspect_and_a_silent_spare_fails_it() {
    let mut rig = Rig::live(2, 1);
    rig.pass(MS * 5);
    rig.opened(lane(0, 2));
    rig.sender.post(64 * KIB);
    rig.chunks(lane(0, 1));
    let busy = LaneProgress { acked: 7, outstanding: true, small: false };
    let began = rig.now;
    while rig.state(0) == PathState::Live {
        rig.sender.handle_progress(rig.now, lane(0, 1), busy).unwrap();
        rig.pass(MS * 5);
    }
    assert!(rig.now - began <= MS * 30, "suspected after {:?}", rig.now - began);
    assert_eq!(rig.sender.current_lane(PathId(0)), Some(lane(0, 2)), "the spare is on trial");
    assert!(matches!(rig.frames(lane(0, 2))[..], [Frame::Ping { .. }]), "and carries nothing but a probe");
    rig.pass(MS * 50);
    assert_eq!(rig.state(0), PathState::Suspect, "an acknowledgement may be delayed by 40 ms");
    rig.pass(MS * 30);
    assert_eq!(rig.state(0), PathState::Failed);
}

#[test]
fn a_spare_that_answers_makes_it_a_false_alarm() {
    for answered_by_kernel in [false, true] {
        let mut rig = Rig::live(1, 1);
        rig.pass(MS * 5);
        rig.opened(lane(0, 2));
        rig.loses(lane(0, 1));
        let Some(Frame::Ping { nonce }) = rig.sender.poll_frame(rig.now, lane(0, 2)) else { panic!("no probe") };
        if answered_by_kernel {
            let idle = LaneProgress { acked: 99, outstanding: false, small: false };
            rig.sender.handle_progress(rig.now, lane(0, 2), idle).unwrap();
        } else {
            rig.hears(lane(0, 2), Frame::Pong { nonce });
        }
        assert_eq!(rig.state(0), PathState::Live);
        assert_eq!(rig.sender.totals().paths_failed, 0);
    }
}

#[test]
fn a_notice_suspects_and_news_of_the_peers_nic_fails() {
    let table = [
        // what the peer tells, of which generation, what becomes of the path
        (Cause::Stall, 1, PathState::Suspect),
        (Cause::Connection, 1, PathState::Suspect),
        (Cause::Carrier, 1, PathState::Failed),
        (Cause::Carrier, 2, PathState::Failed),
        (Cause::Stall, 2, PathState::Live),
        (Cause::Carrier, 0, PathState::Live),
    ];
    for (cause, generation, becomes) in table {
        let mut rig = Rig::live(2, 1);
        rig.pass(MS * 5);
        rig.opened(lane(0, 2));
        rig.hears(lane(1, 1), Frame::Notice(Notice { path: PathId(0), generation: Generation(generation), cause }));
        assert_eq!(rig.state(0), becomes, "{cause:?} of generation {generation}");
    }
}

#[test]
fn loss_of_carrier_fails_a_path_at_once_in_every_state() {
    let mut rig = Rig::live(2, 1);
    rig.fails(0);
    assert_eq!(rig.state(0), PathState::Failed);
    let t = std::iter::from_fn(|| rig.sender.poll_transition()).last().unwrap();
    assert_eq!((t.cause, t.to), (Cause::Carrier, PathState::Failed));
    rig.loses(lane(1, 1));
    assert_eq!(rig.state(1), PathState::Suspect);
    rig.fails(1);
    assert_eq!(rig.state(1), PathState::Failed);
}

#[test]
fn hold_down_doubles_with_each_failure_up_to_its_bound() {
    let mut rig = Rig::live(1, 1);
    for held_s in [1, 2, 4, 8, 16, 32, 60, 60] {
        rig.fails(0);
        let failed_at = rig.now;
        let asked = rig.pass(Time::from_secs(held_s));
        let opens: Vec<Time> = asked.iter().filter(|(_, a)| matches!(a, Action::Open(_))).map(|(at, _)| *at).collect();
        let early = opens.iter().find(|at| **at < failed_at + Time::from_secs(held_s));
        assert_eq!(early, None, "held {held_s} s from {failed_at:?}");
        // Of the attempts from now on the next is answered.
        rig.returns(0);
    }
}

#[test]
fn a_path_that_lived_long_is_forgiven() {
    let mut rig = Rig::live(1, 1);
    for _ in 0..3 {
        rig.fails(0);
        rig.returns(0);
    }
    rig.pass(Time::from_secs(61));
    rig.fails(0);
    let failed_at = rig.now;
    let asked = rig.pass(MS * 1500);
    assert!(asked.iter().any(|(at, a)| matches!(a, Action::Open(_)) && *at <= failed_at + MS * 1010));
}

#[test]
fn a_readmitted_path_gets_a_quarter_then_half_then_all_of_its_window() {
    let mut rig = Rig::live(1, 1);
    rig.fails(0);
    let back = rig.returns(0);
    rig.sender.post(64 << 20);
    let full = 256 * KIB;
    let in_flight = |rig: &mut Rig| {
        rig.chunks(back);
        rig.sender.path_reports().next().unwrap().in_flight_bytes
    };
    for (waited, share) in [(MS, full / 4), (MS * 100, full / 2), (MS * 100, full)] {
        rig.now += waited;
        let bytes = in_flight(&mut rig);
        assert!(bytes <= share && bytes + 65 * KIB > share, "{bytes} of {share}");
    }
}

#[test]
fn a_dark_link_is_told_dead_once_after_its_bound_and_again_after_a_return() {
    let mut rig = Rig::live(2, 1);
    rig.pass(Time::from_secs(5));
    rig.fails(1);
    rig.pass(Time::from_secs(1));
    rig.fails(0);
    for _ in 0..2 {
        let since = rig.now;
        let asked = rig.pass(Time::from_secs(100));
        let dead: Vec<_> = asked.iter().filter(|(_, a)| matches!(a, Action::Dead { .. })).collect();
        assert_eq!(dead.len(), 1, "{dead:?}");
        assert_eq!(dead[0].1, Action::Dead { since });
        assert_eq!(dead[0].0, since + Time::from_secs(30));
        rig.returns(0);
        rig.fails(0);
    }
}

#[test]
fn a_process_that_could_not_run_does_not_take_its_own_absence_for_the_peers() {
    let mut rig = Rig::live(1, 1);
    rig.pass(MS * 5);
    rig.opened(lane(0, 2));
    rig.loses(lane(0, 1));
    rig.now += Time::from_secs(40);
    rig.sender.handle_tick(rig.now).unwrap();
    assert_eq!(rig.state(0), PathState::Suspect, "the trial still has its time");
    assert!(!rig.actions().iter().any(|a| matches!(a, Action::Dead { .. })));
    rig.pass(MS * 65);
    assert_eq!(rig.state(0), PathState::Failed, "but never more than its whole time");
}

#[test]
fn the_window_is_never_passed_however_small_the_messages() {
    let mut rig = Rig::live(1, 100_000);
    let all = 256 * KIB;
    for bytes in [0, 8, 1000, 20_000, 5 << 20] {
        for _ in 0..20_000 {
            rig.sender.post(bytes);
        }
        let mut sent = rig.chunks(lane(0, 1));
        let on_wire: u64 = sent.iter().map(|c| u64::from(c.len) + 40).sum();
        assert!(on_wire <= all + 40, "{on_wire} bytes with headers for messages of {bytes}");
        // All of these are taken before the next size; a window of the last goes on for ever.
        let mut acked = sent.len() as u64;
        while bytes < 5 << 20 && !sent.is_empty() {
            rig.hears(lane(0, 1), ack(0, 1, acked));
            sent = rig.chunks(lane(0, 1));
            acked += sent.len() as u64;
        }
        rig = if bytes < 5 << 20 { Rig::live(1, 100_000) } else { rig };
    }
}

#[test]
fn an_attempt_that_nobody_answers_is_given_up_and_made_again() {
    // The first connection.
    let mut rig = Rig { sender: Sender::new(Arc::new(Tuning::default()), 1, Time::ZERO), now: Time::ZERO };
    assert_eq!(rig.actions(), [Action::Open(lane(0, 1))]);
    let asked = rig.pass(Time::from_secs(5));
    assert!(asked.iter().any(|(at, a)| *a == Action::Close(lane(0, 1)) && *at == Time::from_secs(2)), "{asked:?}");
    assert!(asked.iter().any(|(_, a)| *a == Action::Open(lane(0, 2))));
    // A spare.
    let mut rig = Rig::live(1, 1);
    let asked = rig.pass(Time::from_secs(5));
    let opens = |g| asked.iter().any(|(_, a)| *a == Action::Open(lane(0, g)));
    assert!(opens(2) && opens(3), "{asked:?}");
    assert_eq!(rig.state(0), PathState::Live);
    // A failed path.
    rig.fails(0);
    let asked = rig.pass(Time::from_secs(5));
    assert!(asked.iter().filter(|(_, a)| matches!(a, Action::Open(_))).count() > 4, "{asked:?}");
}

#[test]
fn a_silent_path_is_asked_for_a_sign_of_life_while_messages_wait() {
    let mut rig = Rig::live(2, 0);
    rig.pass(Time::from_secs(1));
    assert_eq!(rig.frames(lane(0, 1)), [], "an idle link is left alone");
    rig.sender.post(KIB);
    rig.pass(MS * 5);
    for path in 0..2 {
        assert!(matches!(rig.frames(lane(path, 1))[..], [Frame::Ping { .. }]), "path {path}");
    }
    rig.pass(MS * 100);
    assert_eq!(rig.frames(lane(0, 1)), [], "not all the time");
}

/// A receiver with these lanes open and `messages` receives of 64 KiB posted.
fn receiver(lanes: &[Lane], messages: u64) -> Receiver {
    let mut receiver = Receiver::new(Arc::new(Tuning::default()));
    lanes.iter().for_each(|l| assert!(receiver.handle_lane_opened(Time::ZERO, *l)));
    (0..messages).for_each(|_| {
        receiver.post(64 * KIB);
    });
    receiver
}

#[test]
fn a_grant_lost_with_its_lane_is_repeated_on_the_others_and_on_later_ones() {
    let grant = Some(Frame::Grant { messages: 3 });
    let mut r = receiver(&[lane(0, 1), lane(1, 1)], 3);
    assert_eq!(r.poll_frame(lane(0, 1)), grant);
    r.handle_lane_lost(lane(0, 1), Cause::Connection);
    let told: Vec<_> = std::iter::from_fn(|| r.poll_frame(lane(1, 1))).collect();
    assert!(told.contains(&Frame::Grant { messages: 3 }), "{told:?}");
    assert!(r.handle_lane_opened(MS, lane(0, 2)));
    assert_eq!(r.poll_frame(lane(0, 2)), grant);
    assert_eq!(r.poll_frame(lane(0, 2)), None, "once a lane");
}

#[test]
fn a_fence_closes_the_lanes_it_names_and_keeps_them_out() {
    let mut r = receiver(&[lane(0, 1), lane(0, 2), lane(0, 3), lane(1, 1)], 1);
    let chunk = Chunk { message: 0, offset: 0, len: 4096, message_bytes: 64 << 10 };
    r.admit(lane(0, 1), chunk).unwrap();
    r.handle_frame(lane(1, 1), fence(0, 2)).unwrap();
    let closed: Vec<_> = std::iter::from_fn(|| r.poll_action()).collect();
    assert_eq!(closed, [ReceiverAction::Close(lane(0, 1)), ReceiverAction::Close(lane(0, 2))]);
    assert!(r.land(lane(0, 1)).is_err(), "half of a chunk on a fenced lane never counts");
    assert_eq!(r.lanes().collect::<Vec<_>>(), [lane(0, 3), lane(1, 1)]);
    assert!(!r.handle_lane_opened(MS, lane(0, 2)));
    assert!(r.handle_lane_opened(MS, lane(0, 4)));
}

#[test]
fn a_replayed_chunk_counts_once_and_is_acknowledged_again() {
    let mut r = receiver(&[lane(0, 1), lane(1, 1)], 1);
    let chunk = Chunk { message: 0, offset: 0, len: 4096, message_bytes: 4096 };
    for (on, first) in [(lane(0, 1), true), (lane(1, 1), false)] {
        r.admit(on, chunk).unwrap();
        let landed = r.land(on).unwrap();
        assert_eq!((landed.first, landed.message_complete), (first, first));
        let told: Vec<_> = std::iter::from_fn(|| r.poll_frame(on)).collect();
        assert!(told.contains(&ack(on.path.0, 1, 1)), "{told:?}");
    }
    assert_eq!(r.duplicates(), 1);
}

#[test]
fn a_stalled_lane_is_told_again_when_there_was_no_other_to_tell_it_on() {
    let mut r = receiver(&[lane(0, 1)], 1);
    let busy = LaneProgress { acked: 7, outstanding: true, small: false };
    for i in 0..20 {
        r.handle_progress(MS * 5 * i, lane(0, 1), busy);
    }
    assert!(r.handle_lane_opened(MS * 100, lane(1, 1)));
    for i in 20..70 {
        r.handle_progress(MS * 5 * i, lane(0, 1), busy);
    }
    let told: Vec<_> = std::iter::from_fn(|| r.poll_frame(lane(1, 1))).collect();
    let notice = Notice { path: PathId(0), generation: Generation(1), cause: Cause::Stall };
    assert_eq!(told.iter().filter(|f| **f == Frame::Notice(notice)).count(), 1, "{told:?}");
}

#[test]
fn news_of_a_nic_is_not_replaced_by_the_silence_of_its_lane() {
    let mut r = receiver(&[lane(0, 1), lane(1, 1)], 0);
    r.handle_path_down(PathId(0), Cause::Carrier);
    r.handle_lane_lost(lane(0, 1), Cause::Connection);
    let told: Vec<_> = std::iter::from_fn(|| r.poll_frame(lane(1, 1))).collect();
    let carrier = Notice { path: PathId(0), generation: Generation(1), cause: Cause::Carrier };
    assert!(told.contains(&Frame::Notice(carrier)), "{told:?}");
}

/// Frames as a broken peer might send them: any numbers behind a known kind, small ones more often.
fn any_frame() -> impl Strategy<Value = Frame> {
    (1u8..=8, any::<[u8; 39]>(), any::<bool>()).prop_filter_map("decodes", |(kind, rest, small)| {
        let mut head = [0; HEADER_BYTES];
        head[0] = kind;
        head[1..].copy_from_slice(&rest);
        if small {
            for (i, byte) in head.iter_mut().enumerate().skip(1) {
                *byte = if [1, 2, 4, 5, 8, 16, 17, 24, 25].contains(&i) { *byte % 4 } else { 0 };
            }
        }
        Frame::decode(&head).ok()
    })
}

proptest! {
    #[test]
    fn no_frame_of_a_broken_peer_breaks_a_sender(frames in proptest::collection::vec((0u16..3, 1u32..4, any_frame()), 0..60)) {
        let mut rig = Rig::live(2, 2);
        for bytes in [0, 5000, 3 << 20] {
            rig.sender.post(bytes);
        }
        let mut sent = 0;
        for (path, generation, frame) in frames {
            let _ = rig.sender.handle_frame(rig.now, lane(path, generation), frame);
            rig.pass(MS * 5);
            sent += rig.chunks(lane(path, generation)).iter().map(|c| u64::from(c.len)).sum::<u64>();
            rig.done();
        }
        // Nothing is sent twice but what a path that was given up owes.
        prop_assert!(sent <= (3 << 20) + 5000 + rig.sender.totals().replayed_bytes);
    }

    #[test]
    fn no_frame_of_a_broken_peer_breaks_a_receiver(frames in proptest::collection::vec((0u16..3, 1u32..3, any_frame(), any::<bool>()), 0..60)) {
        let mut r = receiver(&[lane(0, 1), lane(0, 2), lane(1, 1)], 3);
        let mut first_bytes = 0;
        for (path, generation, frame, whole) in frames {
            let lane = lane(path, generation);
            if let Frame::Data(chunk) = frame {
                let admitted = r.admit(lane, chunk);
                if admitted.is_ok() && whole && let Ok(landed) = r.land(lane) {
                    first_bytes += u64::from(landed.first) * u64::from(landed.chunk.len);
                }
            } else {
                let _ = r.handle_frame(lane, frame);
            }
            while r.poll_frame(lane).is_some() {}
            while r.poll_action().is_some() {}
        }
        prop_assert!(first_bytes <= 3 * 64 * KIB, "{} bytes counted in three receives", first_bytes);
    }
}
