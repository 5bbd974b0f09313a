//! The results folder: one bench at a time, files whole or not at all.
//!
//! The folder is proved writable before anything runs. Files are written beside their name
//! and renamed; `run.jsonl` alone grows, a line at a time. Knows nothing of what is in them.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use thiserror::Error;

use super::event::{EVENT_VERSION, Event, EventLine};

const LOCK: &str = ".r2cc-bench.lock";

/// Room that must be there before a run: its events, summary and report.
const ROOM_BYTES: usize = 1 << 20;

/// Why results cannot be kept.
#[derive(Debug, Error)]
pub enum FolderError {
    /// Another bench writes to the folder.
    #[error("{}: another bench is writing its results there\n  hint: give this one its own --out", folder.display())]
    Busy {
        /// The folder.
        folder: PathBuf,
    },
    /// No space is left.
    #[error("{}: no space left on the disk\n  hint: free at least 1 MiB there, or give another --out", place.display())]
    Full {
        /// The file that did not fit.
        place: PathBuf,
    },
    /// The folder or a file in it cannot be written.
    #[error("{}: cannot be written: {source}\n  hint: give another --out", place.display())]
    Unwritable {
        /// The folder or file.
        place: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn failed(place: &Path) -> impl FnOnce(io::Error) -> FolderError {
    let place = place.to_path_buf();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FolderError::Full { place },
        _ => FolderError::Unwritable { place, source },
    }
}

/// A folder that this bench alone writes to, until dropped.
#[derive(Debug)]
pub struct ResultsFolder {
    path: PathBuf,
    // Holds the lock; the kernel releases it when the process ends, however it ends.
    _lock: File,
}

impl ResultsFolder {
    /// `results/<suite>-<time>`, where results go without `--out`.
    pub fn default_path(suite: &str, at: SystemTime) -> PathBuf {
        let time = humantime::format_rfc3339_seconds(at).to_string().replace([':', '-'], "");
        Path::new("results").join(format!("{suite}-{time}"))
    }

    /// Makes the folder if need be, takes it for this process and proves that there is room.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        fs::create_dir_all(path).map_err(failed(path))?;
        let lock_path = path.join(LOCK);
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path).map_err(failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(FolderError::Busy { folder: path.to_path_buf() }),
            Err(TryLockError::Error(source)) => return Err(failed(&lock_path)(source)),
        }
        let folder = Self { path: path.to_path_buf(), _lock: lock };
        folder.prove_room()?;
        Ok(folder)
    }

    fn prove_room(&self) -> Result<(), FolderError> {
        let probe = self.path.join(".room");
        let written = fs::write(&probe, vec![0x55; ROOM_BYTES]).map_err(failed(&probe));
        // A probe that was cut short must not stay either.
        let removed = fs::remove_file(&probe).map_err(failed(&probe));
        written.and(removed)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one file whole: under a temporary name, synced, then renamed.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, FolderError> {
        let path = self.path.join(name);
        let temporary = self.path.join(format!(".{name}.{}", std::process::id()));
        let written = (|| {
            let mut file = File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        })();
        if written.is_err() {
            // Best effort: the error that matters is already at hand.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(failed(&path))?;
        Ok(path)
    }

    /// Writes one value as JSON, indented.
    pub fn write_json<T: Serialize>(&self, name: &str, value: &T) -> Result<PathBuf, FolderError> {
        let path = self.path.join(name);
        let mut text = serde_json::to_string_pretty(value).map_err(|error| failed(&path)(error.into()))?;
        text.push('\n');
        self.write(name, text.as_bytes())
    }

    /// Starts `run.jsonl` afresh.
    pub fn event_log(&self) -> Result<EventLog, FolderError> {
        let path = self.path.join("run.jsonl");
        let file = File::create(&path).map_err(failed(&path))?;
        Ok(EventLog { path, file })
    }
}

impl Drop for ResultsFolder {
    fn drop(&mut self) {
        // The lock is still held here, so no other bench relies on this file.
        let _ = fs::remove_file(self.path.join(LOCK));
    }
}

/// `run.jsonl`: every event is on the disk's way before the next one happens.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Appends one event in one write.
    pub fn record(&mut self, at_ns: u64, event: Event) -> Result<(), FolderError> {
        let line = EventLine { version: EVENT_VERSION, at_ns, event };
        let mut text = serde_json::to_vec(&line).map_err(|error| failed(&self.path)(error.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).and_then(|()| self.file.flush()).map_err(failed(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_bench_at_a_time_and_is_free_again_after_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("out");
        let first = ResultsFolder::open(&path).unwrap();
        assert!(matches!(ResultsFolder::open(&path), Err(FolderError::Busy { folder }) if folder == path));
        drop(first);
        drop(ResultsFolder::open(&path).unwrap());
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "").unwrap();
        let error = ResultsFolder::open(&file.join("out")).unwrap_err();
        assert!(error.to_string().contains(&file.display().to_string()), "{error}");
        assert!(error.to_string().contains("hint:"), "{error}");
    }

    #[test]
    fn a_full_disk_names_the_file_and_leaves_no_half_file() {
        // Writes to this device fail as on a full disk.
        let error = fs::write("/dev/full", vec![0; 10]).map_err(failed(Path::new("results/summary.json"))).unwrap_err();
        assert!(matches!(&error, FolderError::Full { place } if place.ends_with("summary.json")), "{error}");

        let place = tempfile::tempdir().unwrap();
        let folder = ResultsFolder::open(place.path()).unwrap();
        fs::create_dir(place.path().join("summary.json")).unwrap();
        assert!(folder.write("summary.json", b"{}").is_err(), "a folder is in the way");
        let names: Vec<_> = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!names.iter().any(|name| name.to_string_lossy().starts_with(".summary")), "{names:?}");
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let place = tempfile::tempdir().unwrap();
        let folder = ResultsFolder::open(place.path()).unwrap();
        folder.write("a.txt", b"a much longer text").unwrap();
        let path = folder.write("a.txt", b"short").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "short");
    }

    #[test]
    fn every_event_is_a_line_that_reads_back() {
        let place = tempfile::tempdir().unwrap();
        let folder = ResultsFolder::open(place.path()).unwrap();
        let mut log = folder.event_log().unwrap();
        log.record(7, Event::Note { text: "one\ntwo".into() }).unwrap();
        log.record(8, Event::Transport(crate::check::record::TransportRecord::default())).unwrap();
        let text = fs::read_to_string(place.path().join("run.jsonl")).unwrap();
        let lines: Vec<EventLine> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[0].version, lines[0].at_ns), (EVENT_VERSION, 7));
        assert_eq!(lines[0].event, Event::Note { text: "one\ntwo".into() });
    }

    #[test]
    fn the_default_folder_carries_the_suite_and_the_time() {
        let path = ResultsFolder::default_path("01-hot", SystemTime::UNIX_EPOCH);
        assert_eq!(path, Path::new("results/01-hot-19700101T000000Z"));
    }
}
