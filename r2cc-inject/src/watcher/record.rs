//! What is written down about a change before it is made, so that anybody can undo it.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    change::{ChangeError, Planned},
    injector::Phase,
    process::Process,
};

/// Where running clusters and changes are written down.
pub const STATE_DIR: &str = "/run/r2cc";

/// A change on record. Times are CLOCK_MONOTONIC nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// the fault, printed
    pub fault: String,
    /// who asked for it, and renews it
    pub controller: Process,
    /// who makes and undoes it
    pub watcher: Option<Process>,
    /// where it stands
    pub phase: Phase,
    /// when it is undone unless renewed
    pub expires_at_ns: u64,
    /// when it was made
    pub made_at_ns: Option<u64>,
    /// when it was undone
    pub ended_at_ns: Option<u64>,
    /// its parts
    pub changes: Vec<Planned>,
}

impl Record {
    /// The file for the `number`th change, from 0, of a process.
    #[must_use]
    pub fn path_for(controller: Process, number: u32) -> PathBuf {
        let name = format!("change-{}-{}-{number}.json", controller.pid, controller.start_time);
        Path::new(STATE_DIR).join(name)
    }

    /// Writes it whole, or not at all.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        let partial = path.with_extension(format!("partial-{}", std::process::id()));
        let text = serde_json::to_vec_pretty(self)?;
        fs::write(&partial, text).and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
            fs::remove_file(&partial).ok();
        })
    }

    /// Reads it back.
    ///
    /// # Errors
    /// What the system says; a file that another user wrote is refused.
    pub fn read(path: &Path) -> io::Result<Self> {
        check_owner(path)?;
        serde_json::from_slice(&fs::read(path)?).map_err(io::Error::other)
    }

    /// All changes on record.
    ///
    /// # Errors
    /// What the system says. A file that cannot be read is an entry of its own.
    pub fn all() -> io::Result<Vec<(PathBuf, io::Result<Self>)>> {
        let mut found = Vec::new();
        for path in files("change-")? {
            let record = Self::read(&path);
            // its owner may have removed it meanwhile
            if !matches!(&record, Err(error) if error.kind() == io::ErrorKind::NotFound) {
                found.push((path, record));
            }
        }
        Ok(found)
    }

    /// Whether neither the process that asked for it nor its watcher lives.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        !self.controller.is_alive() && !self.watcher.is_some_and(Process::is_alive)
    }

    /// Whether the change is still made.
    #[must_use]
    pub fn is_in_force(&self) -> bool {
        self.made_at_ns.is_some() && self.ended_at_ns.is_none()
    }

    /// Undoes all its parts; tries each, however others fare.
    ///
    /// # Errors
    /// The first part that could not be undone.
    pub fn undo(&self) -> Result<(), ChangeError> {
        let mut result = Ok(());
        for planned in self.changes.iter().rev() {
            let undone = planned.undo();
            result = result.and(undone);
        }
        result
    }
}

/// Undoes every change whose owners are dead, and removes its record. Answers with the
/// faults undone.
///
/// # Errors
/// A record that cannot be read, or a change that cannot be undone: it is left behind.
pub fn sweep() -> Result<Vec<String>, SweepError> {
    let mut undone = Vec::new();
    for (path, record) in Record::all().map_err(|source| SweepError::Unreadable { path: STATE_DIR.into(), source })? {
        let record = record.map_err(|source| SweepError::Unreadable { path: path.clone(), source })?;
        if !record.is_abandoned() {
            continue;
        }
        // A record without an end may be of a change that was made a moment before its
        // watcher was killed: undoing what was not made does no harm.
        if record.ended_at_ns.is_none() {
            record.undo().map_err(|source| SweepError::LeftBehind { path: path.clone(), source })?;
            undone.push(record.fault);
        }
        fs::remove_file(&path).map_err(|source| SweepError::Unreadable { path, source })?;
    }
    Ok(undone)
}

/// Why a sweep did not finish.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// A record that cannot be read or removed.
    #[error("{}: {source}\n  hint: a change may be on record there that was not undone", path.display())]
    Unreadable {
        /// the record
        path: PathBuf,
        /// what the system said
        source: io::Error,
    },
    /// A change that cannot be undone.
    #[error("a fault was left behind, see {}: {source}", path.display())]
    LeftBehind {
        /// its record
        path: PathBuf,
        /// why
        source: ChangeError,
    },
}

/// Files of the state folder whose names start so and end in .json, by name.
pub(crate) fn files(prefix: &str) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(STATE_DIR) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(".json"))
        })
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    Ok(paths)
}

/// Refuses a file that somebody else than root or this user could have written.
pub(crate) fn check_owner(path: &Path) -> io::Result<()> {
    let facts = fs::metadata(path)?;
    // SAFETY: asks for a number.
    let me = unsafe { libc::geteuid() };
    if (facts.uid() != 0 && facts.uid() != me) || facts.mode() & 0o022 != 0 {
        let text = format!("{} may be written by other users: not trusted", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(())
}
