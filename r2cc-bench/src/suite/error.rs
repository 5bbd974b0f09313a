//! What is wrong with a suite file, each problem with its place and a hint.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::tree::Place;

/// Why a suite cannot be used.
#[derive(Debug, Error)]
pub enum SuiteError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file says something a suite cannot say; every problem found.
    #[error("{}", shown(file, problems))]
    Invalid {
        /// The file as it was named.
        file: String,
        /// The problems, in the order of the file; never empty.
        problems: Vec<Problem>,
    },
}

impl SuiteError {
    /// The problems of an invalid suite.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Unreadable { .. } => &[],
            Self::Invalid { problems, .. } => problems,
        }
    }
}

/// One thing that is wrong with a suite file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1, in characters.
    pub column: u64,
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// The line of the file.
    pub source_line: String,
}

impl Problem {
    pub(super) fn at(at: Place, source: &str, what: impl Into<String>) -> Self {
        let number = usize::try_from(at.line.max(1) - 1).unwrap_or(usize::MAX);
        Self {
            line: at.line,
            column: at.column,
            what: what.into(),
            hint: None,
            source_line: source.lines().nth(number).unwrap_or_default().to_string(),
        }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn starts_with_quote(&self) -> bool {
        let column = usize::try_from(self.column.max(1) - 1).unwrap_or(usize::MAX);
        matches!(self.source_line.chars().nth(column), Some('"' | '\''))
    }
}

fn shown(file: &str, problems: &[Problem]) -> String {
    let mut text = String::new();
    for problem in problems {
        text.push_str(&format!("{file}:{problem}\n"));
    }
    text.pop();
    text
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, column, what, .. } = self;
        write!(f, "{line}:{column}: {what}")?;
        if !self.source_line.trim().is_empty() {
            let (shown, column) = window(&self.source_line, *column);
            let margin = line.to_string().len();
            write!(f, "\n  {line} | {shown}\n  {:margin$} | {:>column$}", "", "^")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

/// At most 100 characters of a line around a column, and the column within them.
fn window(line: &str, column: u64) -> (String, usize) {
    const WIDTH: usize = 100;
    let column = usize::try_from(column.max(1)).unwrap_or(usize::MAX);
    let skipped = if column > WIDTH * 3 / 4 { column - WIDTH / 2 } else { 0 };
    let shown: String = line.chars().skip(skipped).take(WIDTH).collect();
    (shown.trim_end().to_string(), column - skipped)
}

/// The word of `known` that `text` was probably meant to be.
pub(super) fn nearest<'a>(text: &str, known: &[&'a str]) -> Option<&'a str> {
    let folded = text.to_lowercase().replace('-', "_");
    known
        .iter()
        .map(|word| {
            let distance = strsim::damerau_levenshtein(&folded, &word.to_lowercase().replace('-', "_"));
            (distance, *word)
        })
        .filter(|(distance, word)| *distance <= word.chars().count().div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}
