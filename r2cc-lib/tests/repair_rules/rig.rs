//! A sender with its clock, a receiver, and short words for what goes between them.

use std::sync::Arc;

use r2cc::repair::{Action, Cause, Chunk, Frame, Generation, Lane, PathId, PathState, Receiver, Sender, Time, Tuning};

pub const MS: Time = Time::from_millis(1);
pub const KIB: u64 = 1 << 10;

pub fn lane(path: u16, generation: u32) -> Lane {
    Lane { path: PathId(path), generation: Generation(generation) }
}

pub fn fence(path: u16, generation: u32) -> Frame {
    Frame::Fence { path: PathId(path), generation: Generation(generation) }
}

pub fn ack(path: u16, generation: u32, chunks: u64) -> Frame {
    Frame::Ack { path: PathId(path), generation: Generation(generation), chunks }
}

/// A sender and its clock.
pub struct Rig {
    pub sender: Sender,
    pub now: Time,
}

impl Rig {
    /// All paths live on generation 1, `messages` granted, no spares asked for yet.
    pub fn live(paths: usize, messages: u64) -> Self {
        let mut rig = Self { sender: Sender::new(Arc::new(Tuning::default()), paths, Time::ZERO), now: MS };
        for path in 0..paths as u16 {
            assert_eq!(rig.sender.poll_action(), Some(Action::Open(lane(path, 1))));
            rig.opened(lane(path, 1));
        }
        rig.hears(lane(0, 1), Frame::Grant { messages });
        rig
    }

    pub fn opened(&mut self, lane: Lane) {
        self.sender.handle_lane_opened(self.now, lane).unwrap();
    }

    pub fn hears(&mut self, lane: Lane, frame: Frame) {
        self.sender.handle_frame(self.now, lane, frame).unwrap();
    }

    pub fn state(&self, path: u16) -> PathState {
        self.sender.path_reports().find(|r| r.path == PathId(path)).unwrap().state
    }

    pub fn frames(&mut self, lane: Lane) -> Vec<Frame> {
        std::iter::from_fn(|| self.sender.poll_frame(self.now, lane)).collect()
    }

    pub fn chunks(&mut self, lane: Lane) -> Vec<Chunk> {
        let frames = self.frames(lane).into_iter();
        frames.filter_map(|f| if let Frame::Data(chunk) = f { Some(chunk) } else { None }).collect()
    }

    pub fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.sender.poll_action()).collect()
    }

    pub fn done(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.sender.poll_done()).map(|m| m.0).collect()
    }

    /// Ticks for `time`; returns what was asked for and when.
    pub fn pass(&mut self, time: Time) -> Vec<(Time, Action)> {
        let (end, mut asked) = (self.now + time, Vec::new());
        while self.now < end {
            self.now = (self.now + MS * 5).min(end);
            self.sender.handle_tick(self.now).unwrap();
            asked.extend(self.actions().into_iter().map(|a| (self.now, a)));
        }
        asked
    }

    pub fn loses(&mut self, lane: Lane) {
        self.sender.handle_lane_lost(self.now, lane, Cause::Connection).unwrap();
    }

    pub fn fails(&mut self, path: u16) {
        self.sender.handle_nic(self.now, PathId(path), false).unwrap();
        self.actions();
    }

    /// Waits for the attempt to reopen a failed path, makes it, and answers its probes; returns the lane.
    pub fn returns(&mut self, path: u16) -> Lane {
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

/// A receiver with these lanes open and `messages` receives of 64 KiB posted.
pub fn receiver(lanes: &[Lane], messages: u64) -> Receiver {
    let mut receiver = Receiver::new(Arc::new(Tuning::default()));
    lanes.iter().for_each(|l| assert!(receiver.handle_lane_opened(Time::ZERO, *l)));
    (0..messages).for_each(|_| {
        receiver.post(64 * KIB);
    });
    receiver
}
