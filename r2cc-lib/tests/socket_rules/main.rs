//! Rules of the repair protocol on real sockets, with the driver that every engine uses: late bytes, half-written
//! frames, doubled reductions. Each scenario runs with the rule, where it must hold, and with the planted fault
//! that takes the rule away, where it must not: so each of these tests can fail.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "the modules of one test binary")]

mod world;

use std::net::TcpListener;

use r2cc::repair::{Chunk, Frame, Mutant};
use r2cc::transport::{LinkEvent, Sink, Source};
use r2cc::{DType, ReduceOp};
use world::{EARLY_BYTES, End, Hand, PEER, lane};

const CHUNK: usize = 64 << 10;

/// The two chunks of a message.
fn chunk(place: usize) -> Chunk {
    Chunk { message: 0, offset: (place * CHUNK) as u64, len: CHUNK as u32, message_bytes: 2 * CHUNK as u64 }
}

/// Memory of the caller, at a place that stays.
struct Memory(Box<[u8]>);

impl Memory {
    fn filled(bytes: usize, with: u8) -> Self {
        Self(vec![with; bytes].into())
    }

    fn of_floats(value: f32) -> Self {
        Self(floats(value).repeat(2).into())
    }

    fn ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// A message that lands here as it is.
    fn copied(&mut self) -> Sink {
        // SAFETY: each test drops its links, or has its message reported, before it looks at or drops the memory.
        unsafe { Sink::raw(self.ptr(), self.0.len()) }
    }

    /// A message that is added to what is here.
    fn summed(&mut self) -> Sink {
        let (ptr, bytes) = (self.ptr(), self.0.len());
        // SAFETY: as in `copied`; boxed bytes of this size are aligned for floats by every allocator Rust runs on.
        unsafe { Sink::reduce(ptr, bytes, DType::F32, ReduceOp::Sum, ptr, None) }
    }
}

/// A chunk of one value.
fn floats(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(CHUNK / 4)
}

fn fence(path: u16, generation: u32) -> Frame {
    let dead = lane(path, generation);
    Frame::Fence { path: dead.path, generation: dead.generation }
}

/// A receiving end with two lanes, by hand.
fn receiver(mutant: Option<Mutant>, sink: Sink) -> (End, Hand, Hand) {
    let (mut end, addr) = End::receiving(mutant);
    end.links.post_recv(PEER, sink).unwrap();
    let (first, second) = (Hand::connect(&mut end, addr, lane(0, 1)), Hand::connect(&mut end, addr, lane(1, 1)));
    end.settle();
    (end, first, second)
}

/// Half of the first chunk arrives on a lane; all of it on another, behind the fence of that lane; then the rest on the
/// first lane, garbage by now. The bytes that are there at last.
fn late_bytes(mutant: Option<Mutant>) -> Memory {
    let mut memory = Memory::filled(2 * CHUNK, 0);
    let (mut end, mut slow, mut other) = receiver(mutant, memory.copied());
    slow.say(Frame::Data(chunk(0)));
    slow.write(&[1; CHUNK / 2]);
    end.settle();
    other.say(fence(0, 1));
    other.send_chunk(chunk(0), &[1; CHUNK]);
    end.settle();
    slow.write(&[9; CHUNK / 2]);
    end.settle();
    other.send_chunk(chunk(1), &[1; CHUNK]);
    end.settle();
    assert!(end.has_reported(), "{:?}", end.events);
    drop(end);
    memory
}

#[test]
fn late_bytes_of_a_fenced_lane_do_not_touch_what_has_landed() {
    assert!(late_bytes(None).0.iter().all(|byte| *byte == 1));
    assert!(late_bytes(Some(Mutant::NoFence)).0.contains(&9), "without the fence late bytes land");
}

/// As [`late_bytes`], but the late bytes come when the message has been reported and the caller uses the memory for
/// something else. Whether the lane was closed when it was reported, and whether anything of the late bytes landed.
fn late_bytes_after_recycling(mutant: Option<Mutant>) -> (bool, bool) {
    let mut memory = Memory::filled(2 * CHUNK, 0);
    let (mut end, mut slow, mut other) = receiver(mutant, memory.copied());
    slow.say(Frame::Data(chunk(0)));
    slow.write(&[1; CHUNK / 2]);
    end.settle();
    other.say(fence(0, 1));
    other.send_chunk(chunk(0), &[1; CHUNK]);
    other.send_chunk(chunk(1), &[1; CHUNK]);
    end.settle();
    assert!(end.has_reported());
    slow.frames();
    let closed = slow.closed;
    memory.0.fill(0xEE);
    slow.write(&[9; CHUNK / 2]);
    end.settle();
    drop(end);
    (closed, memory.0.iter().any(|byte| *byte != 0xEE))
}

#[test]
fn a_lane_is_closed_before_the_buffer_that_it_was_writing_to_is_recycled() {
    assert_eq!(late_bytes_after_recycling(None), (true, false));
    let (closed, _) = late_bytes_after_recycling(Some(Mutant::NoFence));
    assert!(!closed, "without the fence a lane that owes bytes is still open when the buffer is given back");
}

/// Half of a frame arrives on a lane that then dies; the chunk is replayed on another. Acknowledgements of the half
/// frame, and the sum at last.
fn half_a_frame(mutant: Option<Mutant>) -> (u64, Memory) {
    let mut memory = Memory::of_floats(10.0);
    let (mut end, mut dying, mut other) = receiver(mutant, memory.summed());
    dying.say(Frame::Data(chunk(0)));
    dying.write(&floats(1.0)[..CHUNK / 2]);
    end.settle();
    let acknowledged = dying.acknowledged();
    drop(dying);
    end.settle();
    assert!(!end.has_reported());
    other.say(fence(0, 1));
    other.send_chunk(chunk(0), &floats(1.0));
    other.send_chunk(chunk(1), &floats(2.0));
    end.settle();
    assert!(end.has_reported());
    drop(end);
    (acknowledged, memory)
}

#[test]
fn half_a_frame_on_a_lane_that_dies_is_neither_acknowledged_nor_added() {
    let (acknowledged, memory) = half_a_frame(None);
    assert_eq!(acknowledged, 0);
    assert_eq!(*memory.0, *[floats(11.0), floats(12.0)].concat());
    let (acknowledged, _) = half_a_frame(Some(Mutant::AckEarly));
    assert_eq!(acknowledged, 1, "a receiver that acknowledges early acknowledges half a frame");
}

/// A chunk lands and is added; its acknowledgement is lost with its lane, so it is replayed on another.
fn replayed_chunk(mutant: Option<Mutant>) -> Memory {
    let mut memory = Memory::of_floats(10.0);
    let (mut end, mut dying, mut other) = receiver(mutant, memory.summed());
    dying.send_chunk(chunk(0), &floats(1.0));
    end.settle();
    assert_eq!(dying.acknowledged(), 1);
    drop(dying);
    end.settle();
    other.say(fence(0, 1));
    other.send_chunk(chunk(0), &floats(1.0));
    other.send_chunk(chunk(1), &floats(2.0));
    end.settle();
    assert!(end.has_reported());
    drop(end);
    memory
}

#[test]
fn a_chunk_that_is_replayed_is_added_once() {
    assert_eq!(*replayed_chunk(None).0, *[floats(11.0), floats(12.0)].concat());
    let twice = replayed_chunk(Some(Mutant::AcceptDuplicate));
    assert_eq!(*twice.0, *[floats(12.0), floats(12.0)].concat(), "without the ledger it is added twice");
}

/// What a receiver by hand saw of a message one of whose lanes died with a frame half taken.
struct Seen {
    /// Whether the fence of the dead lane came before everything that was sent after its death.
    fenced_first: bool,
    /// The message, as far as it arrived.
    bytes: Vec<Option<u8>>,
    /// Whether the sender reported the message while a lane had not acknowledged anything, and at last.
    reported: (bool, bool),
}

impl Seen {
    fn take(&mut self, chunk: Chunk, payload: &[u8]) {
        let place = chunk.offset as usize..chunk.offset as usize + payload.len();
        self.bytes[place].iter_mut().zip(payload).for_each(|(at, byte)| *at = Some(*byte));
    }
}

/// Sends a message of ones over two paths to a receiver by hand, which takes half a frame from one lane and everything
/// from the other, and then cuts the first.
fn half_written(mutant: Option<Mutant>) -> Seen {
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let mut end = End::sending(mutant, &listeners);
    let mut hands = Hand::accept_all(&mut end, &listeners);
    let mut memory = Memory::filled(CHUNK, 1);
    // SAFETY: the links are dropped before the memory, which nobody changes.
    let source = unsafe { Source::new(memory.ptr(), CHUNK) };
    end.links.post_send(PEER, source).unwrap();
    hands.iter_mut().for_each(|hand| hand.say(Frame::Grant { messages: 1 }));
    end.settle();
    let busy = hands.iter_mut().position(|hand| hand.begins_with_data(1000)).unwrap();
    let dying = hands.remove(busy);
    let dead = dying.lane;
    // The other lanes of its path are silent from here on, as if the NIC were dead.
    let silent: Vec<Hand> = hands.extract_if(.., |hand| hand.lane.path == dead.path).collect();

    let mut seen = Seen { fenced_first: true, bytes: vec![None; CHUNK], reported: (false, false) };
    let mut exchange = |end: &mut End, seen: &mut Seen, is_after: bool| {
        let (mut fenced, mut quiet) = (false, 0);
        while quiet < 3 {
            end.settle();
            quiet += 1;
            for (frame, payload) in hands.iter_mut().flat_map(Hand::take_and_acknowledge) {
                quiet = 0;
                match frame {
                    Frame::Fence { path, .. } => fenced |= path == dead.path,
                    Frame::Data(chunk) => {
                        seen.fenced_first &= fenced || !is_after;
                        seen.take(chunk, &payload);
                    }
                    _ => {}
                }
            }
        }
    };
    exchange(&mut end, &mut seen, false);
    seen.reported.0 = end.has_reported();
    if seen.reported.0 {
        // The caller may have freed the memory by now: there is nothing left to replay from.
        drop(end);
        return seen;
    }
    drop(dying);
    exchange(&mut end, &mut seen, true);
    seen.reported.1 = end.has_reported();
    drop((end, silent));
    seen
}

#[test]
fn half_a_frame_is_replayed_whole_behind_the_fence_of_its_lane() {
    let seen = half_written(None);
    assert!(seen.fenced_first);
    assert!(seen.bytes.iter().all(|byte| *byte == Some(1)));
    assert_eq!(seen.reported, (false, true));
    let seen = half_written(Some(Mutant::NoReplay));
    assert!(seen.bytes.contains(&None) && !seen.reported.1, "without replay the chunk is lost");
    assert!(!half_written(Some(Mutant::FenceLate)).fenced_first);
}

#[test]
fn a_buffer_is_given_back_only_when_nothing_can_be_replayed_from_it_any_more() {
    assert!(!half_written(None).reported.0);
    let early = half_written(Some(Mutant::DoneAtWrite)).reported.0;
    assert!(early, "a sender that reports what it has written gives a buffer back that it still owes");
}

/// A receiving end with a lane, by hand, over which a message of floats has come before its receive.
fn early(value: f32) -> (End, Hand) {
    let (mut end, addr) = End::receiving(None);
    let mut hand = Hand::connect(&mut end, addr, lane(0, 1));
    end.settle();
    let payload = &floats(value)[..EARLY_BYTES];
    let len = EARLY_BYTES as u32;
    hand.send_chunk(Chunk { message: 0, offset: 0, len, message_bytes: u64::from(len) }, payload);
    end.settle();
    (end, hand)
}

#[test]
fn a_message_that_comes_before_its_receive_is_added_once_when_that_is_posted() {
    let mut memory = Memory::of_floats(1.0);
    let (mut end, mut hand) = early(2.0);
    assert!(!end.has_reported());
    let again = Chunk { message: 0, offset: 0, len: EARLY_BYTES as u32, message_bytes: EARLY_BYTES as u64 };
    hand.send_chunk(again, &floats(2.0)[..EARLY_BYTES]);
    end.settle();
    end.links.post_recv(PEER, memory.summed()).unwrap();
    end.settle();
    assert!(end.has_reported(), "{:?}", end.events);
    drop(end);
    assert_eq!(memory.0[..EARLY_BYTES], floats(3.0)[..EARLY_BYTES]);
    assert_eq!(memory.0[EARLY_BYTES..2 * EARLY_BYTES], floats(1.0)[..EARLY_BYTES]);
}

#[test]
fn a_message_that_was_too_long_for_its_receive_ends_the_link_and_touches_nothing() {
    let mut memory = Memory::filled(EARLY_BYTES / 2, 7);
    let (mut end, _hand) = early(2.0);
    end.links.post_recv(PEER, memory.copied()).unwrap();
    end.settle();
    assert!(end.events.iter().any(|event| matches!(event, LinkEvent::Broken { peer: PEER, .. })), "{:?}", end.events);
    assert!(!end.has_reported());
    drop(end);
    assert!(memory.0.iter().all(|byte| *byte == 7));
}

#[test]
fn a_small_message_is_reported_at_once_and_sent_from_a_copy() {
    let listeners = [TcpListener::bind("127.0.0.1:0").unwrap()];
    let mut end = End::sending(None, &listeners);
    let mut memory = Memory::filled(EARLY_BYTES, 1);
    // SAFETY: the links read it before this returns, and not again.
    let source = unsafe { Source::new(memory.ptr(), EARLY_BYTES) };
    end.links.post_send(PEER, source).unwrap();
    let sent = |end: &End| end.events.iter().filter(|event| matches!(event, LinkEvent::Sent { .. })).count();
    end.events.extend(end.links.poll_event());
    assert_eq!(sent(&end), 1, "before there is any connection");
    memory.0.fill(9);
    drop(memory);
    let mut hands = Hand::accept_all(&mut end, &listeners);
    let mut payloads = Vec::new();
    for _ in 0..3 {
        end.settle();
        payloads.extend(hands.iter_mut().flat_map(Hand::take_and_acknowledge).map(|(_, payload)| payload));
    }
    payloads.retain(|payload| !payload.is_empty());
    assert_eq!(payloads.concat(), [1; EARLY_BYTES]);
    assert_eq!(sent(&end), 1, "the acknowledgement is no news");
}

#[test]
fn a_receiver_whose_connections_are_all_gone_says_so_after_the_bound_and_not_while_one_is_left() {
    let mut memory = Memory::filled(2 * CHUNK, 0);
    let (mut end, first, second) = receiver(None, memory.copied());
    drop(first);
    end.settle();
    end.pass_beyond_the_bound();
    assert!(!end.is_dark(), "{:?}", end.events);
    drop(second);
    end.settle();
    end.pass_beyond_the_bound();
    assert!(end.is_dark(), "{:?}", end.events);
}
