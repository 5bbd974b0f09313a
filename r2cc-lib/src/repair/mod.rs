//! HotRepair: pure state machines. No socket, no clock, no thread: every method takes `now`, bytes and
//! events, and answers with frames and actions, so the same types run under the drivers in
//! [`crate::transport`] and under the seeded simulator in the tests.
//!
//! A *link* is the ordered message stream from one rank to another. Its sending end is a [`Sender`],
//! its receiving end a [`Receiver`]. A link owns several *paths*, one per pair of NICs; each path has at
//! most one current *lane* (a connection, numbered by a *generation*) and one spare. Call order:
//! inputs (`post`, `handle_*`), then `poll_frame` for each lane that can be written, then `poll_action`
//! and `poll_done` until they are empty.

mod frame;
mod ledger;
mod path;
mod path_end;
mod rate;
mod receiver;
mod replays;
mod sender;
mod stall;
mod tuning;

pub use frame::{Chunk, Frame, FrameError, HEADER_BYTES, Notice};
pub use ledger::{Ledger, LedgerError};
pub use path::{Cause, Forbidden, PathEvent, PathState, Transition, next_state};
pub use rate::{DeliveryRate, RateEstimate};
pub use receiver::{Admission, Landed, Receiver, ReceiverAction, ReceiverError};
pub use replays::Resumption;
pub use sender::{Action, PathReport, Sender, SenderError, Totals};
pub use stall::{LaneProgress, StallDetector};
#[cfg(any(test, feature = "mutants"))]
pub use tuning::Mutant;
pub use tuning::Tuning;

/// Time since an origin that the driver chooses (monotonic).
pub type Time = std::time::Duration;

/// Index of a path within its link: one pair of local and remote NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u16);

/// Number of a connection within its path; a later one replaces an earlier one. Starts at 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u32);

/// One connection of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane {
    /// The path it belongs to.
    pub path: PathId,
    /// Which connection of that path.
    pub generation: Generation,
}

/// Position of a message in its link's stream, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageSeq(pub u64);
