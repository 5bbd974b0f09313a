//! Suites that are several runs: their rows, and what each row runs.

use r2cc_inject::fault::Fault;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::expect::Checks;
use super::model::{LibrarySpec, Suite};

/// One run of a suite that has several: what it has in place of the suite's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Its name in the table, unique in the suite.
    pub name: String,
    /// An earlier row whose healthy iterations are this row's baseline; without it the row runs its own. Ranks that
    /// take a NIC for failed from the start have no healthy iterations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// How the library under test is set, in place of the suite's `library`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<LibrarySpec>,
    /// The faults, in place of the suite's `faults`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faults: Option<Vec<Fault>>,
    /// What must hold, in place of the suite's `checks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checks: Option<Checks>,
}

/// One run of a suite.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The row that asks for it; `None` for the run of a suite without rows.
    pub row: Option<String>,
    /// The row whose healthy iterations are its baseline.
    pub against: Option<String>,
    /// What is run: a suite without rows.
    pub suite: Suite,
}

impl Suite {
    /// The runs that the suite asks for: one for each row, or itself.
    pub fn runs(&self) -> Vec<Run> {
        if self.rows.is_empty() {
            return vec![Run { row: None, against: None, suite: self.clone() }];
        }
        let run = |row: &Row| {
            let mut suite = Self { rows: Vec::new(), ..self.clone() };
            if let Some(library) = &row.library {
                suite.library = library.clone();
            }
            if let Some(faults) = &row.faults {
                suite.faults = faults.clone();
            }
            if let Some(checks) = &row.checks {
                suite.checks = checks.clone();
            }
            Run { row: Some(row.name.clone()), against: row.against.clone(), suite }
        };
        self.rows.iter().map(run).collect()
    }
}
