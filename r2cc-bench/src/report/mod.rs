//! What a run leaves behind: results on disk and text on the terminal.
//!
//! Owns the formats (`summary.json`, `run.jsonl`, JUnit, the table) and the rule that turns
//! check results into an exit code. Never measures and never judges a figure. Start at
//! [`Summary`].

mod archive;
mod event;
mod exit;
mod folder;
mod junit;
mod page;
mod rebuild;
mod reference;
mod rows;
mod summary;
#[cfg(test)]
mod tests;
mod text;

pub use archive::{Archive, ArchiveError};
pub use event::{EVENT_VERSION, Event, EventLine, Transition};
pub use exit::{ExitCode, Verdict, judge};
pub use folder::{EventLog, FolderError, ResultsFolder};
pub use junit::junit;
pub use page::{PageError, Report};
pub use rebuild::{RebuildError, RebuiltRun, rebuild};
pub use reference::{Reference, ReferenceError, ReferenceFault};
pub use rows::rows_table;
pub use summary::{
    BaselineSummary, ClusterSummary, FaultSummary, IterationSummary, RunContext, SUMMARY_VERSION, Summary,
};
pub(crate) use text::trimmed;
pub use text::{Paint, baseline_line, check_lines, fault_lines, iteration_table, repair_lines, run_text, verdict_line};

/// The JSON Schema of `summary.json`.
pub fn summary_schema() -> serde_json::Value {
    schemars::schema_for!(Summary).to_value()
}

/// The JSON Schema of a comparison of runs.
pub fn comparison_schema() -> serde_json::Value {
    schemars::schema_for!(crate::compare::Comparison).to_value()
}

/// The JSON Schema of one line of `run.jsonl`.
pub fn event_schema() -> serde_json::Value {
    schemars::schema_for!(EventLine).to_value()
}
