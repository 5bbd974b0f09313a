//! Reading suites: one file, a text, or a folder of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;

use super::error::{Problem, SuiteError};
use super::model::{ClusterKind, ScaleRow, Suite};
use super::tree::{self, Place};
use super::{judge, read};

/// First line of every suite file, so that editors check it while it is written.
pub const MODELINE: &str = "# yaml-language-server: $schema=";

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schemars::schema_for!(Suite).to_value());

/// Where `text`, a YAML or JSON document, departs from `schema`.
#[cfg(test)]
pub(crate) fn departures(schema: &Value, text: &str) -> Vec<Problem> {
    match tree::read(text) {
        Ok(root) => read::departures(schema, &root, text),
        Err(error) => vec![unreadable(&error, text)],
    }
}

/// The JSON Schema of suite files.
pub fn schema() -> &'static Value {
    &SCHEMA
}

impl Suite {
    /// Reads and judges one file.
    pub fn load(file: &Path) -> Result<Self, SuiteError> {
        let text =
            fs::read_to_string(file).map_err(|source| SuiteError::Unreadable { file: file.to_path_buf(), source })?;
        Self::parse(&text, &file.display().to_string())
    }

    /// Reads and judges a text; `file` is only the name that errors carry. Every problem that
    /// can be told is in the error.
    pub fn parse(text: &str, file: &str) -> Result<Self, SuiteError> {
        let invalid = |mut problems: Vec<Problem>| {
            problems.sort_by_key(|problem| (problem.line, problem.column));
            SuiteError::Invalid { file: file.to_string(), problems }
        };
        let root = tree::read(text).map_err(|error| invalid(vec![unreadable(&error, text)]))?;
        let departures = read::departures(schema(), &root, text);
        if !departures.is_empty() {
            return Err(invalid(departures));
        }
        let suite: Self = serde_json::from_value(root.to_value())
            .map_err(|error| invalid(vec![Problem::at(root.at, text, error.to_string())]))?;
        let problems = judge::problems(&suite, &root, text);
        if problems.is_empty() { Ok(suite) } else { Err(invalid(problems)) }
    }

    /// The row of `scale` that the suite's own cluster uses by default.
    pub fn default_row(&self) -> ScaleRow {
        let preferred = match self.cluster.kind {
            ClusterKind::Emulated | ClusterKind::SoftRoce => ScaleRow::Host,
            ClusterKind::Ssh => ScaleRow::Ssh,
        };
        let first = ScaleRow::ALL.into_iter().find(|row| self.scale(*row).is_some());
        self.scale(preferred).map(|_| preferred).or(first).unwrap_or(preferred)
    }
}

/// What the YAML reader could not make sense of.
fn unreadable(error: &serde_yaml::Error, text: &str) -> Problem {
    let at = error
        .location()
        .map_or(Place { line: 1, column: 1 }, |location| Place { line: location.line(), column: location.column() });
    let said = error.without_snippet().to_string();
    let what = said.lines().next().unwrap_or("not a YAML document").to_string();
    Problem::at(at, text, what).hint("a suite is one YAML document; see suites/README.md")
}

/// A suite file of a folder and what reading it gave.
#[derive(Debug)]
pub struct Listed {
    /// The file.
    pub file: PathBuf,
    /// The suite, or why it is none.
    pub suite: Result<Suite, SuiteError>,
}

/// The `.yaml` files directly in `folder` and in its `variants/`, by name.
pub fn list(folder: &Path) -> Result<Vec<Listed>, SuiteError> {
    let mut files = Vec::new();
    for folder in [folder.to_path_buf(), folder.join("variants")] {
        let unreadable = |source| SuiteError::Unreadable { file: folder.clone(), source };
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && folder.ends_with("variants") => continue,
            Err(error) => return Err(unreadable(error)),
        };
        let mut here = Vec::new();
        for entry in entries {
            let file = entry.map_err(unreadable)?.path();
            if file.extension().is_some_and(|extension| extension == "yaml") {
                here.push(file);
            }
        }
        here.sort();
        files.extend(here);
    }
    Ok(files.into_iter().map(|file| Listed { suite: Suite::load(&file), file }).collect())
}
