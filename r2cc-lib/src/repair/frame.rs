//! Frames of the link protocol and their encoding. Every frame starts with a header of [`HEADER_BYTES`];
//! only `Data` and `Gossip` are followed by a payload. Little endian.

use super::{Cause, Generation, PathId};

/// Bytes of every frame header.
pub const HEADER_BYTES: usize = 40;
/// Longest payload of a `Data` frame.
const DATA_MAX: u32 = 4 << 20;
/// Longest payload of a `Gossip` frame.
const GOSSIP_MAX: u32 = 64 << 10;

/// A piece of a message; keeps its bounds when it is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chunk {
    /// Position of the message in the link's stream.
    pub message: u64,
    /// Offset within the message, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
    /// Length of the whole message, bytes.
    pub message_bytes: u64,
}

/// What the receiving end saw on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The path.
    pub path: PathId,
    /// The lane's generation.
    pub generation: Generation,
    /// What happened to it.
    pub cause: Cause,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Sender to receiver: the chunk's bytes follow.
    Data(Chunk),
    /// Sender to receiver: lanes of `path` up to `generation` are dead; close them before reading on.
    Fence {
        /// The path.
        path: PathId,
        /// Last dead generation.
        generation: Generation,
    },
    /// Sender to receiver: answer with `Pong` on this lane.
    Ping {
        /// Repeated in the answer.
        nonce: u64,
    },
    /// Receiver to sender: the answer.
    Pong {
        /// As in the `Ping`.
        nonce: u64,
    },
    /// Receiver to sender: this many chunks of that lane have been taken, in order.
    Ack {
        /// The path.
        path: PathId,
        /// The lane's generation.
        generation: Generation,
        /// Chunks taken since the lane opened.
        chunks: u64,
    },
    /// Receiver to sender: messages before this number have a place to land.
    Grant {
        /// Messages granted since the link opened.
        messages: u64,
    },
    /// Receiver to sender: something is wrong with a lane.
    Notice(Notice),
    /// Either way: a control message of this many bytes follows.
    Gossip {
        /// Length of the payload, bytes.
        len: u32,
    },
}

/// Bytes that are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Unknown kind.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// A payload longer than allowed.
    #[error("payload of {len} bytes, at most {most} allowed")]
    Length {
        /// Stated length.
        len: u32,
        /// The limit.
        most: u32,
    },
    /// Unknown cause in a notice.
    #[error("unknown cause {0} in a notice")]
    Cause(u8),
}

impl Frame {
    /// Bytes of payload behind the header.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Frame::Data(chunk) => chunk.len as usize,
            Frame::Gossip { len } => *len as usize,
            _ => 0,
        }
    }

    /// The header: kind, one byte, u16, u32, then four u64 of which each frame uses what it needs.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (kind, byte, short, word, longs): (u8, u8, u16, u32, [u64; 3]) = match *self {
            Frame::Data(c) => (1, 0, 0, c.len, [c.message, c.offset, c.message_bytes]),
            Frame::Fence { path, generation } => (2, 0, path.0, generation.0, [0; 3]),
            Frame::Ping { nonce } => (3, 0, 0, 0, [nonce, 0, 0]),
            Frame::Pong { nonce } => (4, 0, 0, 0, [nonce, 0, 0]),
            Frame::Ack { path, generation, chunks } => (5, 0, path.0, generation.0, [chunks, 0, 0]),
            Frame::Grant { messages } => (6, 0, 0, 0, [messages, 0, 0]),
            Frame::Notice(n) => (7, n.cause.code(), n.path.0, n.generation.0, [0; 3]),
            Frame::Gossip { len } => (8, 0, 0, len, [0; 3]),
        };
        let mut out = [0; HEADER_BYTES];
        (out[0], out[1]) = (kind, byte);
        out[2..4].copy_from_slice(&short.to_le_bytes());
        out[4..8].copy_from_slice(&word.to_le_bytes());
        for (i, long) in longs.iter().enumerate() {
            out[8 + 8 * i..16 + 8 * i].copy_from_slice(&long.to_le_bytes());
        }
        out
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If the bytes are no frame of this protocol or state a payload beyond the limits.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let short = u16::from_le_bytes([bytes[2], bytes[3]]);
        let word = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let long = |i: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[8 + 8 * i..16 + 8 * i]);
            u64::from_le_bytes(eight)
        };
        let limited = |len: u32, most: u32| if len > most { Err(FrameError::Length { len, most }) } else { Ok(len) };
        let (path, generation) = (PathId(short), Generation(word));
        Ok(match bytes[0] {
            1 => Frame::Data(Chunk {
                message: long(0),
                offset: long(1),
                len: limited(word, DATA_MAX)?,
                message_bytes: long(2),
            }),
            2 => Frame::Fence { path, generation },
            3 => Frame::Ping { nonce: long(0) },
            4 => Frame::Pong { nonce: long(0) },
            5 => Frame::Ack { path, generation, chunks: long(0) },
            6 => Frame::Grant { messages: long(0) },
            7 => Frame::Notice(Notice {
                path,
                generation,
                cause: Cause::from_code(bytes[1]).ok_or(FrameError::Cause(bytes[1]))?,
            }),
            8 => Frame::Gossip { len: limited(word, GOSSIP_MAX)? },
            kind => return Err(FrameError::Kind(kind)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let lane = (any::<u16>(), any::<u32>()).prop_map(|(p, g)| (PathId(p), Generation(g)));
        prop_oneof![
            (any::<u64>(), any::<u64>(), 0..=DATA_MAX, any::<u64>()).prop_map(
                |(message, offset, len, message_bytes)| Frame::Data(Chunk { message, offset, len, message_bytes })
            ),
            lane.clone().prop_map(|(path, generation)| Frame::Fence { path, generation }),
            any::<u64>().prop_map(|nonce| Frame::Ping { nonce }),
            any::<u64>().prop_map(|nonce| Frame::Pong { nonce }),
            (lane.clone(), any::<u64>()).prop_map(|((path, generation), chunks)| Frame::Ack {
                path,
                generation,
                chunks
            }),
            any::<u64>().prop_map(|messages| Frame::Grant { messages }),
            lane.prop_map(|(path, generation)| Frame::Notice(Notice { path, generation, cause: Cause::Carrier })),
            (0..=GOSSIP_MAX).prop_map(|len| Frame::Gossip { len }),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_survives_the_wire(frame in frames()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in any::<[u8; HEADER_BYTES]>()) {
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert!(frame.payload_bytes() <= DATA_MAX as usize);
            }
        }
    }
}
