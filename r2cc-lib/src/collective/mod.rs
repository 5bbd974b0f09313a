//! Executes plans over links on host memory.

pub mod kernel;
