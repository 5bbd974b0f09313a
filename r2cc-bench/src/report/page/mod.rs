//! The HTML page of a run: one file that needs no network and opens from a folder.
//!
//! The page holds `summary.json`, the suite and the ranks' transitions as data and draws everything from them in the
//! browser; each number carries in `data-at` the expression over that data which it shows. Start at [`Report`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

use super::event::Transition;
use super::exit::ExitCode;
use super::rebuild::{RebuildError, RebuiltRun, rebuild};
use super::summary::{RunContext, Summary};
use super::text::{Paint, run_text};
use crate::check::evaluate;
use crate::suite::{ScaleRow, Suite};

#[cfg(test)]
mod tests;

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPTS: [&str; 3] = [include_str!("figures.js"), include_str!("page.js"), include_str!("timeline.js")];

/// Why there is no report of a folder.
#[derive(Debug, Error)]
pub enum PageError {
    /// A file of the run cannot be read.
    #[error("{}: cannot be read: {source}\n  hint: give the folder that a run wrote, with its summary.json or run.jsonl", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `summary.json` is not one.
    #[error("{}: {source}\n  hint: this is no summary of a run; `r2cc-bench schema summary` says what one holds", file.display())]
    NoSummary {
        /// The file.
        file: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// `run.jsonl` is not one.
    #[error("{}: {source}", folder.display())]
    NoEvents {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: RebuildError,
    },
    /// A run that was killed before it began.
    #[error("{}: run.jsonl tells of no run\n  hint: the bench was stopped before it had started one", folder.display())]
    Empty {
        /// The folder.
        folder: PathBuf,
    },
}

/// What a results folder tells of its run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its summary; of a bench that was killed, what its events still say.
    pub summary: Summary,
    /// The suite, if the events are there.
    pub suite: Option<Suite>,
    /// The transitions of each run of the summary.
    pub stories: Vec<Vec<Transition>>,
}

impl Report {
    /// Reads `summary.json` and `run.jsonl` of `folder`; one of them is enough.
    ///
    /// # Errors
    /// When neither is there, or one is not what it should be.
    pub fn read(folder: &Path) -> Result<Self, PageError> {
        let (summary_file, events_file) = (folder.join("summary.json"), folder.join("run.jsonl"));
        let summary = read(&summary_file)?
            .map(|text| serde_json::from_str::<Summary>(&text))
            .transpose()
            .map_err(|source| PageError::NoSummary { file: summary_file.clone(), source })?;
        let runs = match read(&events_file)? {
            Some(text) => rebuild(&text).map_err(|source| PageError::NoEvents { folder: folder.into(), source })?,
            None if summary.is_some() => Vec::new(),
            None => return Err(PageError::Unreadable { file: summary_file, source: io::ErrorKind::NotFound.into() }),
        };
        let suite = runs.first().map(|run| run.suite.clone());
        let summary = match (summary, &suite) {
            (Some(summary), _) => summary,
            (None, Some(suite)) => Summary::of_repeats(suite, runs.iter().map(left_by_a_killed_bench).collect())
                .ok_or_else(|| PageError::Empty { folder: folder.into() })?,
            (None, None) => return Err(PageError::Empty { folder: folder.into() }),
        };
        let stories = runs.into_iter().map(|run| run.transitions).collect();
        Ok(Self { summary, suite, stories })
    }

    /// The page.
    ///
    /// # Errors
    /// When the data cannot be written as JSON.
    pub fn page(&self) -> Result<String, serde_json::Error> {
        // Inside a script element only `<` could end the data early.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        let title = format!("{}: {}", self.summary.verdict.words(), self.summary.suite);
        // The data comes last, so that nothing in it is taken for a place to fill.
        Ok(HTML
            .replace("{{title}}", &escaped(&title))
            .replace("{{style}}", STYLE)
            .replace("{{script}}", &SCRIPTS.concat())
            .replace("{{text}}", &escaped(&run_text(&self.summary, Paint::Plain)))
            .replace("{{data}}", &data))
    }
}

fn read(file: &Path) -> Result<Option<String>, PageError> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PageError::Unreadable { file: file.into(), source }),
    }
}

fn left_by_a_killed_bench(run: &RebuiltRun) -> Summary {
    let row = ScaleRow::from_name(&run.backend).unwrap_or_else(|| run.suite.default_row());
    let (checks, ended) = match run.ended {
        Some(_) => (run.checks.clone(), None),
        None => {
            let why = "the bench ended before it gave a verdict; this is what it had recorded";
            (evaluate(&run.suite, &run.record, run.suite.timing), Some((ExitCode::Internal, why.to_owned())))
        }
    };
    let context = RunContext { backend: run.backend.clone(), ended, environment: run.environment.clone() };
    let summary = Summary::of_run(&run.suite, row, &run.record, checks, &context);
    match run.ended {
        Some((verdict, exit_code)) => Summary { verdict, exit_code, ..summary },
        None => summary,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('{', "&#123;")
}
