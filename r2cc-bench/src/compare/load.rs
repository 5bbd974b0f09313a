//! From paths to runs: a `summary.json`, a results folder, or a folder of results folders.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::Side;
use crate::report::Summary;

/// Why a path holds no runs.
#[derive(Debug, Error)]
pub enum LoadError {
    /// It cannot be read.
    #[error("{}: cannot be read: {source}\n  hint: give a results folder, its summary.json, or a folder of results folders", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no summary.
    #[error("{}: {source}\n  hint: this is no summary of a run; `r2cc-bench schema summary` says what one holds", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// Nothing is there.
    #[error("{}: no summary.json in it, nor in the folders in it\n  hint: give what `r2cc-bench run` wrote", path.display())]
    Empty {
        /// The folder.
        path: PathBuf,
    },
}

/// Every run at `path`, by suite; a summary of repetitions counts as its runs.
///
/// # Errors
/// If there is none, or one cannot be read.
pub fn load(path: &Path) -> Result<Side, LoadError> {
    let unreadable = |source| LoadError::Unreadable { path: path.to_owned(), source };
    let files = if !fs::metadata(path).map_err(unreadable)?.is_dir() {
        vec![path.to_owned()]
    } else if path.join("summary.json").exists() {
        vec![path.join("summary.json")]
    } else {
        let entries = fs::read_dir(path).map_err(unreadable)?;
        let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path().join("summary.json")).collect();
        found.retain(|file| file.exists());
        found.sort();
        found
    };
    let mut side = Side::new();
    for file in files {
        let text = fs::read_to_string(&file).map_err(|source| LoadError::Unreadable { path: file.clone(), source })?;
        let mut summary: Summary =
            serde_json::from_str(&text).map_err(|source| LoadError::Malformed { path: file.clone(), source })?;
        let runs = std::mem::take(&mut summary.runs);
        side.entry(summary.suite.clone()).or_default().extend(if runs.is_empty() { vec![summary] } else { runs });
    }
    if side.is_empty() { Err(LoadError::Empty { path: path.to_owned() }) } else { Ok(side) }
}
