//! The sending end: fences before replays, suspicion, failure, return, windows.

use std::sync::Arc;

use r2cc::repair::{Action, Cause, Frame, Generation, LaneProgress, Notice, PathId, PathState, Sender, Time, Tuning};

use super::rig::{KIB, MS, Rig, ack, fence, lane};

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
