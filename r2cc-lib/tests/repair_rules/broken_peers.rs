//! No frame of a peer that breaks the protocol breaks either end.

use proptest::prelude::*;
use r2cc::repair::{Frame, HEADER_BYTES};

use super::rig::{KIB, MS, Rig, lane, receiver};

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
