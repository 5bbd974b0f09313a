//! The ledger: which bytes of a message have landed. Reducing twice is silent corruption, so a chunk is
//! applied only when the ledger answers *first*.

use super::Chunk;

/// A chunk that cannot belong to the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// It ends after the message.
    #[error("chunk {chunk:?} ends after its message of {message_bytes} bytes")]
    OutOfRange {
        /// The offending chunk.
        chunk: Chunk,
        /// Length of the message.
        message_bytes: u64,
    },
    /// It shares some bytes with a chunk that has landed, but not all.
    #[error("chunk {chunk:?} overlaps bytes {start}..{end} that landed with other bounds")]
    Overlap {
        /// The offending chunk.
        chunk: Chunk,
        /// Start of the landed interval.
        start: u64,
        /// End of the landed interval.
        end: u64,
    },
}

/// Landed intervals of one message: sorted, disjoint, merged where they touch.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    landed: Vec<(u64, u64)>,
    empty_landed: bool,
}

impl Ledger {
    /// Whether the chunk has landed already.
    ///
    /// # Errors
    /// If the chunk lies outside the message or overlaps a landed one partly.
    pub fn has(&self, chunk: &Chunk) -> Result<bool, LedgerError> {
        let (start, end) = (chunk.offset, chunk.offset.saturating_add(u64::from(chunk.len)));
        if end > chunk.message_bytes {
            let message_bytes = chunk.message_bytes;
            return Err(LedgerError::OutOfRange { chunk: *chunk, message_bytes });
        }
        if chunk.len == 0 {
            return Ok(self.empty_landed);
        }
        match self.landed.iter().find(|(s, e)| *s < end && start < *e) {
            None => Ok(false),
            Some(&(s, e)) if s <= start && end <= e => Ok(true),
            Some(&(s, e)) => Err(LedgerError::Overlap { chunk: *chunk, start: s, end: e }),
        }
    }

    /// Records the chunk; true if it is the first time.
    ///
    /// # Errors
    /// As [`Ledger::has`]; the ledger is unchanged then.
    pub fn land(&mut self, chunk: &Chunk) -> Result<bool, LedgerError> {
        if self.has(chunk)? {
            return Ok(false);
        }
        if chunk.len == 0 {
            self.empty_landed = true;
            return Ok(true);
        }
        let (start, end) = (chunk.offset, chunk.offset + u64::from(chunk.len));
        let at = self.landed.partition_point(|(s, _)| *s < start);
        self.landed.insert(at, (start, end));
        if at + 1 < self.landed.len() && self.landed[at].1 == self.landed[at + 1].0 {
            self.landed[at].1 = self.landed[at + 1].1;
            self.landed.remove(at + 1);
        }
        if at > 0 && self.landed[at - 1].1 == self.landed[at].0 {
            self.landed[at - 1].1 = self.landed[at].1;
            self.landed.remove(at);
        }
        Ok(true)
    }

    /// Whether all of a message of `message_bytes` has landed.
    pub fn is_complete(&self, message_bytes: u64) -> bool {
        match message_bytes {
            0 => self.empty_landed,
            n => self.landed.first() == Some(&(0, n)),
        }
    }

    #[cfg(any(test, feature = "mutants"))]
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(offset: u64, len: u32, message_bytes: u64) -> Chunk {
        Chunk { message: 0, offset, len, message_bytes }
    }

    #[test]
    fn a_chunk_is_first_once() {
        let mut ledger = Ledger::default();
        assert!(ledger.land(&chunk(0, 10, 20)).unwrap());
        assert!(!ledger.land(&chunk(0, 10, 20)).unwrap());
        assert!(!ledger.is_complete(20));
        assert!(ledger.land(&chunk(10, 10, 20)).unwrap());
        assert!(ledger.is_complete(20));
    }

    #[test]
    fn an_empty_message_is_complete_after_its_empty_chunk() {
        let mut ledger = Ledger::default();
        assert!(!ledger.is_complete(0));
        assert!(ledger.land(&chunk(0, 0, 0)).unwrap());
        assert!(!ledger.land(&chunk(0, 0, 0)).unwrap());
        assert!(ledger.is_complete(0));
    }

    #[test]
    fn a_partial_overlap_and_an_overrun_are_errors() {
        let mut ledger = Ledger::default();
        ledger.land(&chunk(10, 10, 40)).unwrap();
        assert!(matches!(ledger.land(&chunk(5, 10, 40)), Err(LedgerError::Overlap { .. })));
        assert!(matches!(ledger.land(&chunk(15, 10, 40)), Err(LedgerError::Overlap { .. })));
        assert!(matches!(ledger.land(&chunk(35, 10, 40)), Err(LedgerError::OutOfRange { .. })));
        let huge = chunk(u64::MAX, 10, 40);
        assert!(matches!(ledger.land(&huge), Err(LedgerError::OutOfRange { .. })));
    }

    proptest! {
        #[test]
        fn any_order_with_repeats_completes_once(cuts in proptest::collection::btree_set(1u64..1000, 0..20), seed in any::<u64>()) {
            let mut bounds: Vec<u64> = vec![0];
            bounds.extend(cuts);
            bounds.push(1000);
            let mut order: Vec<usize> = (0..bounds.len() - 1).chain(0..bounds.len() - 1).collect();
            let mut x = seed | 1;
            for i in (1..order.len()).rev() {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                order.swap(i, (x >> 33) as usize % (i + 1));
            }
            let (mut ledger, mut firsts) = (Ledger::default(), 0);
            for i in order {
                let c = chunk(bounds[i], (bounds[i + 1] - bounds[i]) as u32, 1000);
                firsts += u64::from(ledger.land(&c).unwrap()) * u64::from(c.len);
            }
            prop_assert_eq!(firsts, 1000);
            prop_assert!(ledger.is_complete(1000));
        }
    }
}
