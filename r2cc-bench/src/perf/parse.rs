//! Reads what nccl-tests and `perf` print: text of any release, with NCCL's log lines in between, and JSON.
//!
//! Text is read by the heads of its columns, not by position: numbers lose decimals or become powers of ten to fit.
//! nccl-tests prints a row in pieces (size to root, then each half when it is done), so that a log line may come between
//! any two. Start at [`read`].

mod json;
mod text;

use serde::Serialize;

/// What a check said of one half of a row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Nothing was compared.
    Unchecked,
    /// So many elements differed.
    Wrong(u64),
    /// The largest difference (releases before 2.13).
    Deviation(f64),
}

/// One half of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReadHalf {
    /// Time of an iteration, microseconds.
    pub time_us: f64,
    /// GB/s (10^9 bytes).
    pub alg_bw: f64,
    /// GB/s.
    pub bus_bw: f64,
    /// What its check said.
    pub check: Check,
    /// Columns that this reader does not know, by their heads; none where they are `N/A`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<(String, Option<f64>)>,
}

/// One row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReadRow {
    /// S, bytes.
    pub size: u64,
    /// Elements.
    pub count: u64,
    /// Element type.
    pub dtype: String,
    /// Reduction, where the release prints it.
    pub op: Option<String>,
    /// Root, where the release prints it; -1: none.
    pub root: Option<i64>,
    /// Out of place; none where it is not defined.
    pub out_of_place: Option<ReadHalf>,
    /// In place; none where it is not defined.
    pub in_place: Option<ReadHalf>,
}

/// A whole output.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ReadSweep {
    /// Which test, where it is told.
    pub program: Option<String>,
    /// Rows that are complete.
    pub rows: Vec<ReadRow>,
    /// Rows that were begun and never finished.
    pub unfinished: usize,
    /// Failed checks and whether they count as none.
    pub out_of_bounds: Option<(u64, bool)>,
    /// Mean bus bandwidth, GB/s.
    pub average_bus_bw: Option<f64>,
    /// Whether the end was reached. Releases that do not say so: whether the mean was printed.
    pub concluded: bool,
    /// Lines, or ends of lines, of something else.
    pub foreign: usize,
}

impl ReadSweep {
    /// Wrong elements of all rows.
    pub fn wrong(&self) -> u64 {
        let halves = self.rows.iter().flat_map(|row| row.out_of_place.iter().chain(&row.in_place));
        halves.map(|half| if let Check::Wrong(wrong) = half.check { wrong } else { 0 }).sum()
    }
}

/// Output that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Nothing in it looks like a row, nor like the heads of columns.
    #[error(
        "no row of nccl-tests' columns in {lines} lines\n  hint: size, count, type, redop, root, then time, algbw, busbw, #wrong"
    )]
    NoRows {
        /// Lines looked at.
        lines: usize,
    },
    /// It begins like JSON and is not.
    #[error("not nccl-tests' JSON: {0}")]
    Json(String),
}

/// Reads text or JSON.
///
/// # Errors
/// If there is nothing of nccl-tests' in it.
pub fn read(output: &str) -> Result<ReadSweep, ReadError> {
    if output.trim_start().starts_with('{') { json::read(output) } else { text::read(output) }
}

#[cfg(test)]
mod tests;
