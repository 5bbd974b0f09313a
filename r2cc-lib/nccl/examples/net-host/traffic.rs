//! One communicator of each direction, driven as a progress thread of NCCL drives it.

use std::collections::VecDeque;

use crate::Script;
use crate::plugin::{Plugin, Ptr};

/// A reproducible sequence (splitmix64).
#[derive(Clone, Copy)]
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Sizes at which something changes, and sizes that are no multiple of anything.
const SIZES: [usize; 14] =
    [0, 1, 7, 8, 120, 4095, 4096, 4097, 65_536, 131_072, 524_288, 1 << 20, (3 << 20) + 5, 4 << 20];

fn size(script: &Script, comm: usize, message: u64) -> usize {
    let drawn = Draw(comm as u64 * 1_000_003 + message).next() as usize;
    // Large messages are rarer: one in four is among the larger half.
    let at = if drawn.is_multiple_of(4) { 7 + drawn / 4 % 7 } else { drawn / 4 % 8 };
    script.bytes.unwrap_or(SIZES[at])
}

fn word(comm: usize, message: u64, at: usize) -> u64 {
    let seed = (comm as u64) << 56 | message << 24;
    (seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

fn fill(bytes: &mut [u8], comm: usize, message: u64) {
    for (at, place) in bytes.chunks_mut(8).enumerate() {
        let len = place.len();
        place.copy_from_slice(&word(comm, message, at).to_le_bytes()[..len]);
    }
}

fn wrong(bytes: &[u8], comm: usize, message: u64) -> u64 {
    let differing = |(at, place): (usize, &[u8])| {
        let right = word(comm, message, at).to_le_bytes();
        if *place == right[..place.len()] { 0 } else { place.iter().zip(&right).filter(|(a, b)| a != b).count() as u64 }
    };
    bytes.chunks(8).enumerate().map(differing).sum()
}

struct Message {
    number: u64,
    bytes: usize,
    buffer: Vec<u8>,
    request: Ptr,
}

/// What became of it.
pub(crate) struct Outcome {
    pub(crate) status: Option<i32>,
    pub(crate) received_bytes: u64,
    pub(crate) wrong_bytes: u64,
    /// Buffers of requests that were not over.
    pub(crate) under_way: Vec<Vec<u8>>,
}

/// Sends and receives the script's messages.
pub(crate) struct Traffic<'a> {
    script: &'a Script,
    plugin: Plugin,
    comm: usize,
    send: Ptr,
    receive: Ptr,
    draw: Draw,
    sends: VecDeque<Message>,
    receives: VecDeque<Message>,
    spare: Vec<Vec<u8>>,
    sent: u64,
    posted: u64,
    received: u64,
    received_bytes: u64,
    wrong_bytes: u64,
}

impl<'a> Traffic<'a> {
    pub(crate) fn new(script: &'a Script, plugin: Plugin, comm: usize, send: Ptr, receive: Ptr) -> Self {
        Self {
            script,
            plugin,
            comm,
            send,
            receive,
            draw: Draw(comm as u64),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            spare: Vec::new(),
            sent: 0,
            posted: 0,
            received: 0,
            received_bytes: 0,
            wrong_bytes: 0,
        }
    }

    pub(crate) fn run(mut self) -> Outcome {
        let status = self.progress().err();
        let under_way = self.sends.into_iter().chain(self.receives).map(|m| m.buffer).collect();
        Outcome { status, received_bytes: self.received_bytes, wrong_bytes: self.wrong_bytes, under_way }
    }

    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let at = self.spare.iter().position(|buffer| buffer.len() == bytes);
        at.map_or_else(|| vec![0; bytes], |at| self.spare.swap_remove(at))
    }

    fn progress(&mut self) -> Result<(), i32> {
        let (total, most) = (self.script.messages, self.script.in_flight);
        let sends = if self.script.receive_only { 0 } else { total };
        let receives = if self.script.send_only { 0 } else { total };
        let mut told = 0;
        let mut started = 0;
        while self.sent < sends || self.received < receives {
            while self.receives.len() < most && self.posted < receives && self.post_receive()? {}
            while self.sends.len() < most && started < sends && self.post_send(started)? {
                started += 1;
            }
            let idle = !self.test_sends()? & !self.test_receives()?;
            if self.received >= told + 16 {
                told = self.received;
                println!("progress {told}");
            }
            if self.script.abandon.is_some_and(|at| self.received.max(self.sent) >= at) {
                return Ok(());
            }
            if idle {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn post_receive(&mut self) -> Result<bool, i32> {
        let number = self.posted;
        let bytes = size(self.script, self.comm, number);
        // The buffer may be larger than the message, and often is.
        let room = match self.script.short {
            Some(short) if short == number => bytes - 1,
            _ if self.script.bytes.is_some() => bytes,
            _ => bytes + (self.draw.next() % 3 * 2048) as usize,
        };
        let mut buffer = self.buffer(room);
        let mhandle = self.plugin.reg_mr(self.receive, buffer.as_mut_ptr(), room);
        let request = self.plugin.irecv(self.receive, buffer.as_mut_ptr(), room, mhandle)?;
        if request.is_null() {
            return Ok(false);
        }
        self.posted += 1;
        self.receives.push_back(Message { number, bytes, buffer, request });
        Ok(true)
    }

    fn post_send(&mut self, number: u64) -> Result<bool, i32> {
        let bytes = size(self.script, self.comm, number);
        let mut buffer = self.buffer(bytes);
        if self.script.check {
            fill(&mut buffer, self.comm, number);
        }
        let mhandle = self.plugin.reg_mr(self.send, buffer.as_mut_ptr(), bytes);
        let request = self.plugin.isend(self.send, buffer.as_mut_ptr(), bytes, mhandle)?;
        if request.is_null() {
            return Ok(false);
        }
        self.sends.push_back(Message { number, bytes, buffer, request });
        Ok(true)
    }

    /// Tests requests out of order; whether any was over.
    fn test_sends(&mut self) -> Result<bool, i32> {
        let mut any = false;
        for _ in 0..self.sends.len() {
            let at = self.draw.next() as usize % self.sends.len();
            let Some(bytes) = self.plugin.test(self.sends[at].request)? else { continue };
            if let Some(mut message) = self.sends.remove(at) {
                assert_eq!(bytes, message.bytes);
                // The buffer is ours again: whatever is sent from it now is wrong.
                if self.script.check {
                    message.buffer.fill(0xdb);
                }
                self.spare.push(message.buffer);
                self.sent += 1;
                any = true;
            }
            if self.sends.is_empty() {
                break;
            }
        }
        Ok(any)
    }

    fn test_receives(&mut self) -> Result<bool, i32> {
        let mut any = false;
        for _ in 0..self.receives.len() {
            let at = self.draw.next() as usize % self.receives.len();
            let Some(bytes) = self.plugin.test(self.receives[at].request)? else { continue };
            if let Some(mut message) = self.receives.remove(at) {
                assert_eq!(bytes, message.bytes, "the size that was sent");
                self.received += 1;
                self.received_bytes += bytes as u64;
                if self.script.check {
                    self.wrong_bytes += wrong(&message.buffer[..bytes], self.comm, message.number);
                    message.buffer.fill(0xdb);
                }
                self.spare.push(message.buffer);
                any = true;
            }
            if self.receives.is_empty() {
                break;
            }
        }
        Ok(any)
    }
}
