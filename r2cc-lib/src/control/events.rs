//! A rank's event file: one JSON object a line, written at once.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::repair::Time;

/// Version of the event lines.
const VERSION: u32 = 1;

/// Writes events; a log without a file forgets them.
#[derive(Debug, Default)]
pub struct EventLog {
    file: Option<File>,
    rank: usize,
}

#[derive(Serialize)]
struct Line<'a, T> {
    version: u32,
    at_ns: u64,
    rank: usize,
    event: &'a str,
    #[serde(flatten)]
    body: &'a T,
}

impl EventLog {
    /// A log of `rank` in a new file at `path`.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn create(path: &Path, rank: usize) -> io::Result<Self> {
        Ok(Self { file: Some(File::create(path)?), rank })
    }

    /// Writes one event. A disk that fills up must not stop the collective: the log ends with a warning.
    pub fn write<T: Serialize>(&mut self, at: Time, event: &str, body: &T) {
        let Some(file) = &mut self.file else { return };
        let line = Line { version: VERSION, at_ns: at.as_nanos() as u64, rank: self.rank, event, body };
        let written = serde_json::to_string(&line).map_err(io::Error::other);
        if let Err(error) = written.and_then(|text| file.write_all(format!("{text}\n").as_bytes())) {
            tracing::warn!(%error, "the event file ends here");
            self.file = None;
        }
    }
}
