//! This process's event file (`R2CC_EVENTS`), shared by its worker threads.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use r2cc::control::EventLog;
use r2cc::repair::Time;
use serde::Serialize;

use crate::log;

static EVENTS: Mutex<Option<EventLog>> = Mutex::new(None);

/// Variables that tell a process its rank, the first that is set counts.
const RANK_VARIABLES: [&str; 5] = ["R2CC_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"];

/// The rank as the launcher states it.
pub(crate) fn rank() -> Option<usize> {
    RANK_VARIABLES.iter().find_map(|name| std::env::var(name).ok()).and_then(|rank| rank.parse().ok())
}

/// Opens the file that `R2CC_EVENTS` names; `%p` in it stands for the process number.
pub(crate) fn open() {
    let mut events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    if events.is_some() {
        return;
    }
    let path = std::env::var("R2CC_EVENTS").ok().filter(|path| !path.is_empty());
    *events = Some(match path.map(|path| PathBuf::from(path.replace("%p", &std::process::id().to_string()))) {
        None => EventLog::default(),
        Some(path) => EventLog::create(&path, rank().unwrap_or(0)).unwrap_or_else(|error| {
            log::warn(&format!("cannot make the event file {}: {error}", path.display()));
            EventLog::default()
        }),
    });
}

/// Writes one event.
pub(crate) fn write<T: Serialize>(at: Time, event: &str, body: &T) {
    if let Some(log) = EVENTS.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        log.write(at, event, body);
    }
}
