//! The receiving end: grants, fences, ledgers, notices.

use r2cc::repair::{
    Cause, Chunk, Frame, Generation, Lane, LaneProgress, Notice, PathId, Receiver, ReceiverAction, Time, Tuning,
};

use super::rig::{MS, ack, fence, lane, receiver};

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
fn a_path_that_carries_on_after_a_stall_was_told_is_given_twice_the_time() {
    let busy = |acked| LaneProgress { acked, outstanding: true, small: false };
    // The lane moves at 5 ms and is silent from then on; the answer is when its stall was told.
    let told_after = |r: &mut Receiver, on: Lane, from: Time, acked| {
        r.handle_progress(from, on, busy(acked));
        (1..100).map(|i| MS * i).find(|wait| {
            r.handle_progress(from + *wait, on, busy(acked));
            std::iter::from_fn(|| r.poll_frame(lane(1, 1))).any(|f| matches!(f, Frame::Notice(_)))
        })
    };
    let mut r = receiver(&[lane(0, 1), lane(1, 1), lane(0, 2)], 1);
    assert_eq!(told_after(&mut r, lane(0, 1), MS * 5, 7), Some(MS * 20));
    r.handle_frame(lane(1, 1), Frame::Fence { path: PathId(0), generation: Generation(1) }).unwrap();
    assert_eq!(told_after(&mut r, lane(0, 2), MS * 40, 9), Some(MS * 40));
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

/// Ticks of a receiver until it has something to do, or until `until`.
fn ticks(r: &mut Receiver, from: Time, until: Time) -> Option<(Time, ReceiverAction)> {
    let mut now = from;
    while now < until {
        now += MS * 5;
        r.handle_tick(now);
        if let Some(action) = r.poll_action() {
            return Some((now, action));
        }
    }
    None
}

#[test]
fn a_receiver_that_waits_without_any_lane_is_told_dead_once_after_the_bound_and_again_after_a_return() {
    let bound = Tuning::default().link_deadline;
    let mut r = receiver(&[lane(0, 1), lane(1, 1)], 1);
    r.handle_lane_lost(lane(0, 1), Cause::Connection);
    assert_eq!(ticks(&mut r, MS, bound * 2), None, "a lane is left");
    let lost = bound * 2;
    r.handle_lane_lost(lane(1, 1), Cause::Connection);
    let (at, action) = ticks(&mut r, lost, bound * 4).unwrap();
    assert_eq!(action, ReceiverAction::Dead { since: lost + MS * 5 });
    assert!(at >= lost + bound && at <= lost + bound + MS * 20, "{at:?}");
    assert_eq!(ticks(&mut r, at, at + bound * 2), None, "told once");
    let back = at + bound * 2;
    assert!(r.handle_lane_opened(back, lane(0, 2)));
    assert_eq!(ticks(&mut r, back, back + bound * 2), None);
    r.handle_lane_lost(lane(0, 2), Cause::Connection);
    assert!(ticks(&mut r, back + bound * 2, back + bound * 4).is_some());
}

#[test]
fn a_receiver_is_not_dark_before_its_sender_has_come_nor_when_it_waits_for_nothing() {
    let bound = Tuning::default().link_deadline;
    assert_eq!(ticks(&mut receiver(&[], 1), MS, bound * 2), None);
    let mut idle = receiver(&[lane(0, 1)], 0);
    idle.handle_lane_lost(lane(0, 1), Cause::Connection);
    assert_eq!(ticks(&mut idle, MS, bound * 2), None);
}

#[test]
fn lanes_on_which_nothing_of_ours_arrives_are_no_lanes() {
    let bound = Tuning::default().link_deadline;
    let mut r = receiver(&[lane(0, 1)], 1);
    let (mut now, mut dead) = (MS, None);
    while dead.is_none() && now < bound * 2 {
        now += MS * 5;
        r.handle_progress(now, lane(0, 1), LaneProgress { acked: 10, outstanding: true, small: false });
        r.handle_tick(now);
        dead = r.poll_action();
    }
    assert!(matches!(dead, Some(ReceiverAction::Dead { .. })), "{dead:?}");
    assert!(now >= bound && now <= bound + MS * 500, "{now:?}");
}

#[test]
fn the_acknowledgement_of_a_chunk_waits_for_one_more_that_is_on_its_way_or_for_the_clock() {
    let mut r = receiver(&[lane(0, 1)], 1);
    while r.poll_frame(lane(0, 1)).is_some() {}
    let chunk = |i: u64| Chunk { message: 0, offset: i * 4096, len: 4096, message_bytes: 64 << 10 };
    let lands_before_the_next = |r: &mut Receiver, i: u64| {
        r.land(lane(0, 1)).unwrap();
        r.admit(lane(0, 1), chunk(i + 1)).unwrap();
        r.poll_frame(lane(0, 1))
    };
    r.admit(lane(0, 1), chunk(0)).unwrap();
    assert_eq!(lands_before_the_next(&mut r, 0), None);
    assert_eq!(lands_before_the_next(&mut r, 1), Some(ack(0, 1, 2)));
    assert_eq!(lands_before_the_next(&mut r, 2), None);
    r.handle_tick(MS * 5);
    assert_eq!(r.poll_frame(lane(0, 1)), Some(ack(0, 1, 3)));
    r.land(lane(0, 1)).unwrap();
    assert_eq!(r.poll_frame(lane(0, 1)), Some(ack(0, 1, 4)), "nothing more is on its way");
}
