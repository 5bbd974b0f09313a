//! What a run leaves behind: results on disk and text on the terminal.
//!
//! Owns the formats (`summary.json`, `run.jsonl`, JUnit, the table) and the rule that turns
//! check results into an exit code. Never measures and never judges a figure. Start at
//! [`Summary`].

mod event;
mod exit;
mod summary;

pub use event::{EVENT_VERSION, Event, EventLine};
pub use exit::{ExitCode, Verdict, judge};
pub use summary::{
    BaselineSummary, ClusterSummary, FaultSummary, IterationSummary, RunContext, SUMMARY_VERSION, Summary,
};
