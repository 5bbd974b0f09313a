//! Suite files: what an experiment is, read from YAML and judged before anything runs.
//!
//! Owns the schema (version 1), its errors with line, column and suggestion, and the plan
//! that a suite implies. Never touches a cluster or needs a right. Start at [`Suite`].

mod model;
mod values;

pub use model::*;
pub use values::{BitRate, Bytes, IterationRange, Percent, ValueError};
