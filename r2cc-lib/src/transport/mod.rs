//! Drivers of [`crate::repair`]: they move the bytes. [`Links`] drives TCP links on one thread.

mod connection;
pub mod handshake;
mod links;
mod placement;
mod rank_links;
mod socket;
mod valve;

pub use links::{LinkEvent, LinkStatus, Links, LinksError, Side};
pub use placement::{Corruption, Sink, Source};

pub(crate) use rank_links::{RankLinks, Stream};
pub use socket::listen;
pub(crate) use valve::Valve;

use crate::repair::Time;

/// How often a driver thread lets time pass for its links while any of them waits for that.
pub const TICK: Time = Time::from_millis(5);
/// The same while none does.
pub const IDLE_TICK: Time = Time::from_millis(50);

/// CLOCK_MONOTONIC, the clock of the machines, the event files and the injector.
pub fn now() -> Time {
    match nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC) {
        Ok(time) => std::time::Duration::from(time),
        // Linux always has this clock.
        Err(_) => unreachable!("CLOCK_MONOTONIC exists"),
    }
}
