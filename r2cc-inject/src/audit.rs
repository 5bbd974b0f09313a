//! The audit log: one JSON line an event, appended in one write, never rewritten. Who
//! did what to which interface, when, under which lease, and what it stopped.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use crate::injector::{FaultStatus, PortCounters};

/// Where it is kept unless said otherwise.
pub const DEFAULT_PATH: &str = "/var/log/r2cc/audit.jsonl";

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// a fault was refused
    Refused,
    /// a fault was armed
    Armed,
    /// it began
    Fired,
    /// it ended: healed, expired
    Ended,
    /// somebody ended faults of other processes
    HealedAll,
    /// changes of dead processes were undone
    Swept,
    /// a fault could not be undone
    LeftBehind,
}

/// One line of the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    /// when, RFC 3339, UTC
    pub at: String,
    /// what
    pub event: Event,
    /// whose right: real user id
    pub uid: u32,
    /// which process
    pub pid: u32,
    /// the fault, printed
    pub fault: String,
    /// the interfaces it acts on
    #[serde(default)]
    pub interfaces: Vec<String>,
    /// the lease it was given
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// why, or what went wrong
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// what has become of it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<FaultStatus>,
    /// the traffic of its ports
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<PortCounters>,
}

impl Entry {
    /// An entry of this process, now.
    #[must_use]
    pub fn new(event: Event, fault: &str) -> Self {
        Self {
            at: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            event,
            // SAFETY: asks for a number.
            uid: unsafe { libc::getuid() },
            pid: std::process::id(),
            fault: fault.to_owned(),
            interfaces: Vec::new(),
            lease_ms: None,
            detail: None,
            status: None,
            counters: Vec::new(),
        }
    }
}

/// The log, open for appending.
#[derive(Debug)]
pub struct Audit {
    file: File,
    path: PathBuf,
}

impl Audit {
    /// Opens it, making it and its folder.
    ///
    /// # Errors
    /// What the system says, with the path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let open = || {
            if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                std::fs::create_dir_all(folder)?;
            }
            OpenOptions::new().append(true).create(true).mode(0o640).open(path)
        };
        let file = open().map_err(|error| with_path(path, &error))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Appends one entry.
    ///
    /// # Errors
    /// What the system says, with the path.
    pub fn append(&mut self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        // One write of one line: entries of several processes do not mix.
        self.file.write_all(&line).map_err(|error| with_path(&self.path, &error))
    }
}

/// Reads a log; a line that is no entry is an error naming it.
///
/// # Errors
/// What the system says, or the first broken line.
pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.map_err(|error| with_path(path, &error))?,
    };
    BufReader::new(file)
        .lines()
        .enumerate()
        .map(|(index, line)| {
            serde_json::from_str(&line?).map_err(|error| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{}:{}: {error}", path.display(), index + 1))
            })
        })
        .collect()
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_appended_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log/audit.jsonl");
        assert!(read(&path).unwrap().is_empty());
        for event in [Event::Armed, Event::Ended] {
            let mut entry = Entry::new(event, "drop@n/x from now for 1s");
            entry.lease_ms = Some(5000);
            Audit::open(&path).unwrap().append(&entry).unwrap();
        }
        let entries = read(&path).unwrap();
        assert_eq!(entries.iter().map(|entry| entry.event).collect::<Vec<_>>(), [Event::Armed, Event::Ended]);
        assert_eq!(entries[0].pid, std::process::id());
        std::fs::write(&path, "{}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("audit.jsonl:1:"));
    }
}
