//! `perf`: sweeps of sizes with nccl-tests' options, columns and JSON, every element of every check compared.
//!
//! [`options`] is what is asked for, [`collective`] what each collective moves and must deliver, [`measure`] the
//! rank's side, [`sweep`] the bench's, [`text`] and [`json`] the output, [`parse`] reads such output back, also
//! nccl-tests' own. Start at [`sweep::Sweep`].

pub mod collective;
pub mod json;
pub mod measure;
pub mod options;
pub mod parse;
pub mod session;
pub mod sweep;
pub mod text;

pub use collective::Collective;
pub use options::{Average, Options};
pub use sweep::{Half, Row};
