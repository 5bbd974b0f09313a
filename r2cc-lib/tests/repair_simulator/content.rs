//! Contents of messages and buffers, so that a lost, doubled or late byte shows by itself.

use super::draw::mix;

/// The bytes of message `message` of `link`.
pub fn message(link: usize, message: u64, len: usize) -> Vec<u8> {
    stream(mix(link as u64 * 1_000_003 + message) | 1, len)
}

/// What a receive buffer holds when it is posted for `message`.
pub fn before(link: usize, message: u64, len: usize) -> Vec<u8> {
    stream(mix(!(link as u64 * 1_000_003 + message)) | 1, len)
}

/// What a buffer holds while nobody may touch it.
pub fn recycled(len: usize) -> Vec<u8> {
    vec![0xdd; len]
}

/// What a receive buffer must hold when the message is complete.
pub fn expected(link: usize, seq: u64, len: usize, buffer: usize, reduces: bool) -> Vec<u8> {
    let mut want = before(link, seq, buffer);
    let came = message(link, seq, len);
    for (w, c) in want.iter_mut().zip(&came) {
        *w = if reduces { w.wrapping_add(*c) } else { *c };
    }
    want
}

fn stream(seed: u64, len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut x = seed;
    while out.len() < len {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&(x ^ (x >> 29)).to_le_bytes());
    }
    out.truncate(len);
    out
}
