//! Executes plans over links on host memory.
