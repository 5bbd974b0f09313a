//! Which chunks are being sent again, and for which path: tells when the link has resumed after a loss.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Chunk, PathId, Time};

/// The first chunk that a path owed has been acknowledged over another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumption {
    /// The path that had been lost.
    pub path: PathId,
    /// When.
    pub at: Time,
}

#[derive(Debug, Default)]
pub(super) struct Replays {
    owed: BTreeMap<Chunk, PathId>,
    waiting: BTreeSet<PathId>,
    resumed: VecDeque<Resumption>,
}

impl Replays {
    /// The path's lane was reset with these chunks outstanding.
    pub(super) fn handle_reset(&mut self, path: PathId, owed: &[Chunk]) {
        if !owed.is_empty() {
            self.waiting.insert(path);
            self.owed.extend(owed.iter().map(|chunk| (*chunk, path)));
        }
    }

    /// A chunk was acknowledged.
    pub(super) fn handle_acked(&mut self, now: Time, chunk: &Chunk) {
        if let Some(path) = self.owed.remove(chunk)
            && self.waiting.remove(&path)
        {
            self.resumed.push_back(Resumption { path, at: now });
        }
    }

    pub(super) fn poll(&mut self) -> Option<Resumption> {
        self.resumed.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_resumes_once_for_each_loss_that_owed_something() {
        let chunk = |offset| Chunk { message: 0, offset, len: 1, message_bytes: 9 };
        let mut replays = Replays::default();
        replays.handle_reset(PathId(1), &[chunk(0), chunk(1)]);
        replays.handle_reset(PathId(2), &[]);
        replays.handle_acked(Time::from_millis(1), &chunk(5));
        assert_eq!(replays.poll(), None);
        let at = Time::from_millis(2);
        replays.handle_acked(at, &chunk(1));
        replays.handle_acked(Time::from_millis(3), &chunk(0));
        assert_eq!(replays.poll(), Some(Resumption { path: PathId(1), at }));
        assert_eq!(replays.poll(), None);
    }
}
