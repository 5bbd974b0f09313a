//! The rules of the repair machines one by one, each in the shortest story that shows it. The simulator
//! (`repair_simulator`) holds them in every order of events.

#![allow(unreachable_pub, clippy::unwrap_used, reason = "the modules of one test binary")]

mod broken_peers;
mod early;
mod receiving;
mod rig;
mod sending;
