//! Faults that netlink carries out: setting a link down, shaping a rate, blocking a switch
//! port. What must
//! be done to undo one is read and written down before it is made. Keeps no watch: that
//! is `watcher`.

use std::{fmt, io, os::fd::AsFd};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    netlink::{Qdisc, Route},
    netns::Netns,
};

/// BR_STATE_DISABLED: the state that the kernel's own bridge leaves alone.
const PORT_DISABLED: u8 = 0;

/// An interface in a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// the namespace
    pub netns: Netns,
    /// the interface
    pub ifname: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in network namespace {}", self.ifname, self.netns.inode)
    }
}

/// What is done to an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// it is set down
    LinkDown,
    /// what it sends is shaped
    Rate {
        /// to this rate
        bits_per_second: u64,
    },
    /// the bridge that it is a port of drops its frames, in and out; the carrier stays
    BlockPort,
}

/// What puts an interface back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Undo {
    /// It goes up, with the IPv4 routes that going down takes from it.
    LinkUp {
        /// as the kernel listed them
        routes: Vec<Vec<u8>>,
    },
    /// Its root qdisc comes back.
    Qdisc {
        /// None: the kernel's default
        previous: Option<Qdisc>,
    },
    /// Its bridge does with its frames what it did.
    PortState {
        /// as the kernel counts them
        previous: u8,
    },
}

/// A change and what undoes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// where
    pub place: Place,
    /// what
    pub change: Change,
    /// the way back
    pub undo: Undo,
}

/// Why a change was not made, or not undone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The system refused.
    #[error("cannot {action} {place}: {source}")]
    Refused {
        /// what was tried
        action: &'static str,
        /// where
        place: Place,
        /// what the system said
        source: io::Error,
    },
    /// The interface is down already: a fault that changes nothing proves nothing.
    #[error("{place} is down already")]
    AlreadyDown {
        /// where
        place: Place,
    },
    /// Its qdisc could not be put back.
    #[error(
        "{place} has a root qdisc {kind} that could not be put back afterwards\n  hint: a rate can replace tbf or the default"
    )]
    ForeignQdisc {
        /// where
        place: Place,
        /// the qdisc
        kind: String,
    },
    /// No bridge forwards its frames.
    #[error("{place} is no port of a bridge that forwards: there is nothing to block")]
    NoPort {
        /// where
        place: Place,
    },
}

impl Planned {
    /// Reads what must be known to undo `change`. Changes nothing.
    ///
    /// # Errors
    /// [`ChangeError`]; the change must not be made then.
    pub fn new(place: Place, change: Change) -> Result<Self, ChangeError> {
        let refused = |source| ChangeError::Refused { action: "read the state of", place: place.clone(), source };
        let mut route = open(&place).map_err(refused)?;
        let interface = route.interface(&place.ifname).map_err(refused)?;
        let undo = match change {
            Change::LinkDown if !interface.is_up => return Err(ChangeError::AlreadyDown { place }),
            Change::LinkDown => Undo::LinkUp { routes: route.own_routes(interface.index).map_err(refused)? },
            Change::Rate { .. } => {
                let previous = route.root_qdisc(interface.index).map_err(refused)?;
                match previous {
                    Some(qdisc) if qdisc.handle != 0 && qdisc.kind != "tbf" => {
                        return Err(ChangeError::ForeignQdisc { place, kind: qdisc.kind });
                    }
                    previous => Undo::Qdisc { previous: previous.filter(|qdisc| qdisc.handle != 0) },
                }
            }
            Change::BlockPort => match interface.port_state {
                None | Some(PORT_DISABLED) => return Err(ChangeError::NoPort { place }),
                Some(previous) => Undo::PortState { previous },
            },
        };
        Ok(Self { place, change, undo })
    }

    /// Makes the change.
    ///
    /// # Errors
    /// [`ChangeError::Refused`].
    pub fn make(&self) -> Result<(), ChangeError> {
        let make = || {
            let mut route = open(&self.place)?;
            let index = route.interface(&self.place.ifname)?.index;
            match self.change {
                Change::LinkDown => route.set_link(index, false),
                Change::Rate { bits_per_second } => route.shape(index, bits_per_second),
                Change::BlockPort => {
                    route.set_port_state(index, PORT_DISABLED)?;
                    match route.interface(&self.place.ifname)?.port_state {
                        Some(PORT_DISABLED) => Ok(()),
                        state => Err(io::Error::other(format!("its bridge has it in state {state:?} all the same"))),
                    }
                }
            }
        };
        make().map_err(|source| ChangeError::Refused { action: "change", place: self.place.clone(), source })
    }

    /// Undoes the change. Undoing twice, or what was never made, is no error; nor is an
    /// interface that is gone, with its namespace or without.
    ///
    /// # Errors
    /// [`ChangeError::Refused`]: the fault is still there.
    pub fn undo(&self) -> Result<(), ChangeError> {
        let refused = |source| ChangeError::Refused { action: "put back", place: self.place.clone(), source };
        let found = open(&self.place).and_then(|mut route| {
            let index = route.interface(&self.place.ifname)?.index;
            Ok((route, index))
        });
        let (mut route, index) = match found {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(refused)?,
        };
        let undone = match &self.undo {
            Undo::LinkUp { routes } => {
                route.set_link(index, true).and_then(|()| routes.iter().try_for_each(|one| route.add_route(one)))
            }
            Undo::Qdisc { previous } => route.restore_qdisc(index, previous.as_ref()),
            Undo::PortState { previous } => route.set_port_state(index, *previous),
        };
        undone.map_err(refused)
    }
}

fn open(place: &Place) -> io::Result<Route> {
    Route::open(place.netns.open()?.as_fd())
}
