//! Messages that come before their receives: how many, how long, and what may wait.

use std::sync::Arc;

use r2cc::repair::{Chunk, Frame, Lane, MessageSeq, Receiver, ReceiverError, Sender, Time, Tuning};

use super::rig::{KIB, MS, ack, lane};

const ROOM: u64 = 4;

fn tuning() -> Arc<Tuning> {
    Arc::new(Tuning { early_messages: ROOM, early_bytes: 8 * KIB, ..Tuning::default() })
}

fn receiver() -> Receiver {
    let mut receiver = Receiver::new(tuning());
    assert!(receiver.handle_lane_opened(Time::ZERO, lane(0, 1)));
    receiver
}

fn whole(message: u64, bytes: u64) -> Chunk {
    Chunk { message, offset: 0, len: bytes as u32, message_bytes: bytes }
}

fn takes(receiver: &mut Receiver, chunk: Chunk) {
    receiver.admit(lane(0, 1), chunk).unwrap();
    assert!(receiver.land(lane(0, 1)).unwrap().message_complete);
}

fn told(receiver: &mut Receiver, on: Lane) -> Vec<Frame> {
    std::iter::from_fn(|| receiver.poll_frame(on)).collect()
}

#[test]
fn small_messages_go_before_their_grant_as_far_as_there_is_room_and_long_ones_wait() {
    let mut sender = Sender::new(tuning(), 1, Time::ZERO);
    sender.handle_lane_opened(MS, lane(0, 1)).unwrap();
    for _ in 0..ROOM + 2 {
        sender.post(8);
    }
    sender.post(8 * KIB + 1);
    let cut = |sender: &mut Sender| {
        let frames = std::iter::from_fn(|| sender.poll_frame(MS, lane(0, 1)));
        frames.filter_map(|f| if let Frame::Data(c) = f { Some(c.message) } else { None }).collect::<Vec<_>>()
    };
    assert_eq!(cut(&mut sender), [0, 1, 2, 3]);
    sender.handle_frame(MS, lane(0, 1), Frame::Grant { messages: 1 }).unwrap();
    assert_eq!(cut(&mut sender), [4]);
    sender.handle_frame(MS, lane(0, 1), Frame::Grant { messages: 6 }).unwrap();
    assert_eq!(cut(&mut sender), [5], "the long one has no grant");
    sender.handle_frame(MS, lane(0, 1), Frame::Grant { messages: 7 }).unwrap();
    assert_eq!(cut(&mut sender).first(), Some(&6));
}

#[test]
fn a_receiver_takes_as_many_early_messages_as_it_has_room_for_and_none_that_is_long() {
    let mut r = receiver();
    takes(&mut r, whole(ROOM - 1, 8));
    let beyond = whole(ROOM, 8);
    assert_eq!(r.admit(lane(0, 1), beyond), Err(ReceiverError::NoGrant { chunk: beyond, granted: 0 }));
    let long = whole(0, 8 * KIB + 1);
    assert!(matches!(r.admit(lane(0, 1), long), Err(ReceiverError::Length { .. })));
    assert_eq!(r.post(64 * KIB), MessageSeq(0));
    takes(&mut r, long);
    takes(&mut r, beyond);
}

#[test]
fn an_early_message_counts_once_also_when_it_comes_again_before_or_after_its_receive() {
    let mut r = receiver();
    takes(&mut r, whole(0, 8));
    assert!(!r.is_posted(MessageSeq(0)) && !r.is_busy());
    for posts in [false, true] {
        if posts {
            r.post(8);
            assert!(!r.is_busy(), "it has landed already");
        }
        r.admit(lane(0, 1), whole(0, 8)).unwrap();
        assert!(!r.land(lane(0, 1)).unwrap().first);
    }
    assert_eq!(r.duplicates(), 2);
}

#[test]
fn grants_of_small_receives_wait_until_half_of_the_room_may_be_used_and_those_of_long_ones_do_not() {
    let mut r = receiver();
    for _ in 0..ROOM / 2 {
        r.post(8);
    }
    assert_eq!(told(&mut r, lane(0, 1)), []);
    r.post(8);
    assert_eq!(told(&mut r, lane(0, 1)), [Frame::Grant { messages: 3 }]);
    r.post(8 * KIB + 1);
    assert_eq!(told(&mut r, lane(0, 1)), [Frame::Grant { messages: 4 }]);
}

#[test]
fn acknowledgements_of_small_messages_wait_for_others_for_many_bytes_or_for_the_clock() {
    let mut r = receiver();
    for _ in 0..6 {
        r.post(8 * KIB);
    }
    told(&mut r, lane(0, 1));
    (0..ROOM / 2).for_each(|message| takes(&mut r, whole(message, 8)));
    assert_eq!(told(&mut r, lane(0, 1)), []);
    takes(&mut r, whole(2, 8));
    assert_eq!(told(&mut r, lane(0, 1)), [ack(0, 1, 3)]);
    takes(&mut r, whole(3, 5 * KIB));
    assert_eq!(told(&mut r, lane(0, 1)), [ack(0, 1, 4)]);
    takes(&mut r, whole(4, 8));
    assert_eq!(told(&mut r, lane(0, 1)), []);
    r.handle_tick(MS * 5);
    assert_eq!(told(&mut r, lane(0, 1)), [ack(0, 1, 5)]);
}
