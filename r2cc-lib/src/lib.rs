//! R2CC: collective communication that keeps running through NIC and link failures.
//!
//! Start at [`Communicator`]. Below it: [`schedule`] makes plans, [`collective`] executes them, [`transport`]
//! moves the bytes, [`repair`] decides what to do when a path dies, [`control`] is how ranks agree.

pub mod collective;
mod communicator;
pub mod control;
pub mod dtype;
mod engine;
mod marks;
mod pace;
mod planner;
pub mod repair;
pub mod schedule;
mod settings;
pub mod status;
pub mod topology;
pub mod transport;

pub use communicator::{Builder, Communicator, Error, Operation};
pub use control::Failure;
pub use dtype::{DType, Element, ReduceOp};
pub use engine::Status;
pub use settings::{DeclaredFault, Mode, Settings, SettingsError};
