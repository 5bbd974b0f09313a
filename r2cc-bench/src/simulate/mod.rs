//! `r2cc-bench simulate`: the library's own plans on fabrics with random failures, at the level of flows.
//!
//! [`study`] draws the failures and sums up, [`flow`] runs plans, [`fair`] shares NIC directions.

pub mod fair;
pub mod flow;
pub mod study;

pub use flow::{Outcome, Settings, SimulateError, Striping, simulate};
pub use study::{Findings, Study, StudyError};
