//! Suite files: what an experiment is, read from YAML and judged before anything runs.
//!
//! Owns the schema (version 1), its errors with line, column and suggestion, and the plan
//! that a suite implies. Never touches a cluster or needs a right. Start at [`Suite`] and
//! [`Suite::load`].

pub(crate) mod effect;
mod error;
mod expect;
mod judge;
mod load;
mod model;
mod plan;
mod read;
mod rows;
#[cfg(test)]
mod tests;
mod tree;
mod values;

pub use error::{Problem, SuiteError};
pub use expect::{
    Against, Checks, ElementCheck, Near, NodeBytes, Statistic, SweepGoodput, SweepRatio, TimeRatio, TimeRatios,
};
pub use judge::MANAGEMENT_NIC;
pub(crate) use judge::misplaced;
#[cfg(test)]
pub(crate) use load::departures;
pub use load::{Listed, MODELINE, list, schema};
pub use model::{
    AfterRepair, ClusterKind, ClusterSpec, DType, Fabric, LibrarySpec, Mode, Op, Scale, ScaleRow, Scales, Schedule,
    Suite, SweepSpec, Sync, Timing, TypeAndOp, WorkloadKind, WorkloadSpec,
};
pub use plan::plan;
pub use rows::{Row, Run};
pub use values::{BitRate, Bytes, IterationRange, Percent, ValueError};
