//! The states of a path as a table. Data that goes with a state (generations, deadlines) lives with the
//! sender; this module only says which event leads where.

/// Where a path stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathState {
    /// Its first connection is being made.
    Opening,
    /// Carries chunks.
    Live,
    /// Its lane went silent and was reset; a spare connection is on trial.
    Suspect,
    /// Out of service; tried again with fresh connections.
    Failed,
    /// A fresh connection is up and has to answer several probes.
    Proving,
}

impl PathState {
    /// The state in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Live => "live",
            Self::Suspect => "suspect",
            Self::Failed => "failed",
            Self::Proving => "proving",
        }
    }
}

/// What can happen to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathEvent {
    /// A connection is up.
    Opened,
    /// Bytes outstanding and no progress, or the current lane was lost.
    Stalled,
    /// The spare answered.
    TrialGood,
    /// The path is gone for certain: no carrier, no address, the spare is silent or lost.
    Down,
    /// All probes were answered.
    Proved,
}

/// An event that cannot happen in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event {event:?} is impossible in path state {state:?}")]
pub struct Forbidden {
    /// State of the path.
    pub state: PathState,
    /// The event.
    pub event: PathEvent,
}

/// The table.
///
/// # Errors
/// If the event cannot happen in this state.
pub fn next_state(state: PathState, event: PathEvent) -> Result<PathState, Forbidden> {
    use PathEvent as E;
    use PathState as S;
    Ok(match (state, event) {
        (S::Opening, E::Opened) => S::Live,
        (S::Live, E::Stalled) => S::Suspect,
        (S::Suspect, E::TrialGood) => S::Live,
        (S::Opening | S::Live | S::Suspect | S::Proving | S::Failed, E::Down) => S::Failed,
        (S::Failed, E::Opened) => S::Proving,
        (S::Proving, E::Proved) => S::Live,
        (state, event) => return Err(Forbidden { state, event }),
    })
}

/// Why a path changed its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Bytes outstanding and no progress.
    Stall,
    /// The connection was closed or failed.
    Connection,
    /// The local NIC lost its carrier or its address.
    Carrier,
    /// The peer said so.
    Peer,
    /// A trial or a probe was not answered.
    Silence,
    /// The path answered again.
    Answered,
    /// The peer closed the link in good order.
    Closed,
}

impl Cause {
    const ALL: [Cause; 7] =
        [Self::Stall, Self::Connection, Self::Carrier, Self::Peer, Self::Silence, Self::Answered, Self::Closed];

    pub(super) fn code(self) -> u8 {
        self as u8
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The word used in event files.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Stall => "stall",
            Cause::Connection => "connection",
            Cause::Carrier => "carrier",
            Cause::Peer => "peer",
            Cause::Silence => "silence",
            Cause::Answered => "answered",
            Cause::Closed => "closed",
        }
    }
}

/// One change of a path's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// When.
    pub at: super::Time,
    /// Which path.
    pub path: super::PathId,
    /// State before.
    pub from: PathState,
    /// State after.
    pub to: PathState,
    /// Why. A path that fails after a suspicion keeps the suspicion's cause.
    pub cause: Cause,
    /// When the trouble was first seen (equal to `at` but for a failure after a suspicion).
    pub noticed_at: super::Time,
    /// Bytes queued for replay by this change.
    pub replayed_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_as_documented() {
        use PathEvent as E;
        use PathState as S;
        let states = [S::Opening, S::Live, S::Suspect, S::Failed, S::Proving];
        let events = [E::Opened, E::Stalled, E::TrialGood, E::Down, E::Proved];
        let table: Vec<String> = states
            .iter()
            .flat_map(|s| {
                events.iter().filter_map(move |e| next_state(*s, *e).ok().map(|n| format!("{s:?} {e:?} {n:?}")))
            })
            .collect();
        assert_eq!(
            table,
            [
                "Opening Opened Live",
                "Opening Down Failed",
                "Live Stalled Suspect",
                "Live Down Failed",
                "Suspect TrialGood Live",
                "Suspect Down Failed",
                "Failed Opened Proving",
                "Failed Down Failed",
                "Proving Down Failed",
                "Proving Proved Live",
            ]
        );
    }

    #[test]
    fn causes_survive_their_code() {
        for cause in Cause::ALL {
            assert_eq!(Cause::from_code(cause.code()), Some(cause));
        }
        assert_eq!(Cause::from_code(Cause::ALL.len() as u8), None);
    }
}
