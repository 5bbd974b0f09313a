//! What a bench is doing right now, for `r2cc-bench status`: a folder of sockets under `/run/r2cc`, one of the bench
//! and one of each of its ranks. Gone with the bench; of one that was killed, with the next sweep.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use r2cc::status::{ProcessStatus, Server, read, tell_on_signal};
use r2cc::transport::now;
use serde::{Deserialize, Serialize};

use crate::cluster;
use crate::run::beside;

const STATE_DIR: &str = "/run/r2cc";
const BENCH: &str = "bench";

/// Version of the bench's status line.
pub const BENCH_STATUS_VERSION: u32 = 1;

/// What a bench does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenchStatus {
    /// Version of the line; always 1.
    pub version: u32,
    /// When it was told, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The bench.
    pub pid: u32,
    /// The suite under way.
    pub suite: String,
    /// Folder of its results.
    pub results: PathBuf,
    /// Which suite of how many.
    pub suites: (u32, u32),
    /// Which repetition of how many.
    pub repetition: (u32, u32),
    /// The step, in words; beside iterations empty.
    pub step: String,
    /// `baseline` or `iteration`, which one, and of how many.
    pub iteration: Option<(String, u32, u32)>,
    /// When the bench started.
    pub started_ns: u64,
}

impl BenchStatus {
    /// In one line.
    pub fn line(&self) -> String {
        let part = |(index, count): (u32, u32), what: &str| match count {
            0 | 1 => String::new(),
            _ => format!(", {what} {index} of {count}"),
        };
        let doing = match &self.iteration {
            Some((phase, index, count)) => format!("{phase} {index} of {count}"),
            None => self.step.clone(),
        };
        let seconds = self.at_ns.saturating_sub(self.started_ns) as f64 / 1e9;
        format!(
            "bench {}: {}{}{}: {doing}; running for {seconds:.0} s, results in {}",
            self.pid,
            self.suite,
            part(self.suites, "suite"),
            part(self.repetition, "run"),
            self.results.display()
        )
    }
}

/// This bench's entry among those that run.
#[derive(Debug)]
pub struct Live {
    folder: Option<PathBuf>,
    status: Arc<Mutex<BenchStatus>>,
    server: Option<Server>,
}

fn locked(status: &Mutex<BenchStatus>) -> MutexGuard<'_, BenchStatus> {
    // Whatever a thread that panicked had written, the rest is as good as before.
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    /// Opens the sockets' folder; a bench that cannot, runs all the same and cannot be asked.
    pub fn start() -> Self {
        let started_ns = now().as_nanos() as u64;
        let pid = std::process::id();
        let first = BenchStatus { version: BENCH_STATUS_VERSION, pid, started_ns, ..BenchStatus::default() };
        let status = Arc::new(Mutex::new(first));
        let folder = Path::new(STATE_DIR).join(format!("live-{pid}"));
        let told = Arc::clone(&status);
        let present = move || BenchStatus { at_ns: now().as_nanos() as u64, ..locked(&told).clone() };
        let in_words = present.clone();
        if let Err(error) = tell_on_signal(move || beside(|| eprintln!("{}", in_words().line()))) {
            tracing::warn!(%error, "SIGUSR1 is not watched");
        }
        let tell = move || serde_json::to_string(&present()).unwrap_or_default();
        match fs::create_dir_all(&folder).and_then(|()| Server::start(&folder.join(BENCH), tell)) {
            Ok(server) => Self { folder: Some(folder), status, server: Some(server) },
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "this bench cannot be asked for its status");
                Self { folder: None, status, server: None }
            }
        }
    }

    /// Notes what the bench does now.
    pub fn set(&self, change: impl FnOnce(&mut BenchStatus)) {
        change(&mut locked(&self.status));
    }

    /// Where a rank answers, for its `R2CC_STATUS`.
    pub fn rank_socket(&self, rank: usize) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("rank-{rank:04}")))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.server = None;
        if let Some(folder) = &self.folder {
            // What remains, the next sweep takes away.
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// A process that could be asked.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Told {
    /// A bench.
    Bench(BenchStatus),
    /// A process that uses the library.
    Process(ProcessStatus),
}

/// Asks whoever answers at `socket`.
///
/// # Errors
/// If nobody does, or what answers is something else.
pub fn ask(socket: &Path) -> io::Result<Told> {
    let line = read(socket)?;
    let process = serde_json::from_str(&line).map(Told::Process);
    process.or_else(|_| serde_json::from_str(&line).map(Told::Bench)).map_err(io::Error::other)
}

/// Sockets of every bench that runs on this machine, each bench before its ranks.
///
/// # Errors
/// If the folder cannot be read.
pub fn sockets() -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for (folder, alive) in folders()? {
        if alive {
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            let mut sockets: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            sockets.sort();
            found.extend(sockets);
        }
    }
    Ok(found)
}

/// Removes what killed benches left.
///
/// # Errors
/// If a folder cannot be removed.
pub fn sweep() -> io::Result<()> {
    folders()?.into_iter().filter(|(_, alive)| !alive).try_for_each(|(folder, _)| fs::remove_dir_all(folder))
}

/// Every bench's folder, oldest process first, and whether its bench lives.
fn folders() -> io::Result<Vec<(PathBuf, bool)>> {
    let entries = match fs::read_dir(STATE_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found: Vec<(i32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.strip_prefix("live-")?.parse().ok()?;
            Some((pid, entry.path()))
        })
        .collect();
    found.sort();
    Ok(found.into_iter().map(|(pid, folder)| (folder, cluster::is_running(pid))).collect())
}
