//! R2CC: collective communication that keeps running through NIC and link failures.

pub mod collective;
pub mod dtype;
pub mod repair;
pub mod schedule;
