//! A sweep from nothing to its last row: builds the cluster, starts the ranks, keeps every finished row on disk.
//! Nothing is left when [`run`] returns.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use anyhow::Result;

use super::json::Resumable;
use super::sweep::{Corrupt, Row, Sweep};
use super::text::{self, Device};
use crate::cluster::{self, EmulatedCluster};
use crate::report::{FolderError, ResultsFolder};
use crate::run::Progress;
use crate::suite;
use crate::workload::job::{Job, JobError};
use crate::workload::{Order, RankConfig};

const JOIN_BOUND: Duration = Duration::from_secs(60);
const CLOSE_BOUND: Duration = Duration::from_secs(10);
/// What a NIC that is not shaped is taken to move at least, for the bound of a row.
const UNSHAPED_BITS_S: f64 = 2e8;

/// Name of the document in the results folder.
pub const DOCUMENT: &str = "perf.json";
/// Name of the text in the results folder.
pub const TEXT: &str = "perf.txt";

/// How a sweep is to be run.
#[derive(Debug)]
pub struct Settings {
    /// This program, which also is the ranks' program.
    pub program: PathBuf,
    /// A second copy of the document.
    pub json: Option<PathBuf>,
    /// How long half a row may take; by default what the size and the rate suggest.
    pub timeout: Option<Duration>,
    /// Self-test.
    pub corrupt: Option<Corrupt>,
    /// What the library is asked to do.
    pub library: r2cc::Settings,
}

/// Where finished rows are kept.
struct Keeper<'a> {
    folder: &'a ResultsFolder,
    json: Option<&'a Path>,
    devices: Vec<Device>,
}

impl Keeper<'_> {
    fn keep(&self, state: &Resumable, end_time: Option<&str>, errors: &[String]) -> Result<(), FolderError> {
        let document = state.document(&self.devices, end_time, errors);
        self.folder.write_json(DOCUMENT, &document)?;
        let mut words = text::header(&state.options, &self.devices);
        for row in &state.rows {
            words.push_str(&text::row(row, state.options.per_iteration));
            words.push('\n');
        }
        if end_time.is_some() {
            words.push_str(&text::footer(&state.options, &state.rows));
            words.push('\n');
        }
        self.folder.write(TEXT, words.as_bytes())?;
        let Some(path) = self.json else { return Ok(()) };
        let mut bytes = serde_json::to_vec_pretty(&document).map_err(|error| unwritable(path, error.into()))?;
        bytes.push(b'\n');
        // Written beside its name and renamed, so that what is there is always whole.
        let beside = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
        let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
        if written.is_err() {
            // Best effort: the error that matters is already at hand.
            let _ = fs::remove_file(&beside);
        }
        written.map_err(|error| unwritable(path, error))
    }
}

fn unwritable(place: &Path, source: io::Error) -> FolderError {
    let place = place.to_path_buf();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FolderError::Full { place },
        _ => FolderError::Unwritable { place, source },
    }
}

/// Takes a file name for itself, as nccl-tests does: `NAME`, or where there is one already `NAME.1`, `NAME.2` …
///
/// # Errors
/// If no file can be made there.
pub fn claim(path: &Path) -> Result<PathBuf, FolderError> {
    for number in 0..1000 {
        let name = if number == 0 { path.to_path_buf() } else { PathBuf::from(format!("{}.{number}", path.display())) };
        match OpenOptions::new().write(true).create_new(true).open(&name) {
            Ok(mut file) => {
                // That there is room is known before anything runs.
                let written = file.write_all(&vec![b' '; 1 << 20]).and_then(|()| file.set_len(0));
                if let Err(error) = written {
                    drop(fs::remove_file(&name));
                    return Err(unwritable(&name, error));
                }
                return Ok(name);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(unwritable(&name, error)),
        }
    }
    Err(unwritable(path, io::ErrorKind::AlreadyExists.into()))
}

/// The time of day, RFC 3339.
pub fn time_of_day() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Runs the rows that `state` lacks; `tell` gets the text as it comes. Whatever happens, the folder holds the rows that
/// are finished.
///
/// # Errors
/// If the cluster cannot be built, a rank is lost, or a row cannot be kept.
pub fn run(
    state: &mut Resumable,
    settings: &Settings,
    folder: &ResultsFolder,
    progress: &Progress,
    interrupted: &AtomicBool,
    tell: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<()> {
    let mut keeper = Keeper { folder, json: settings.json.as_deref(), devices: Vec::new() };
    keeper.keep(state, None, &[])?;
    let outcome = rows(state, settings, &mut keeper, progress, interrupted, tell);
    match &outcome {
        Ok(()) => {
            state.complete = true;
            keeper.keep(state, Some(&time_of_day()), &[])?;
            tell(&text::footer(&state.options, &state.rows))?;
        }
        // A disk that is full takes no reason either; the rows before are there.
        Err(error) => drop(keeper.keep(state, None, &[format!("{error:#}")])),
    }
    outcome
}

fn rows(
    state: &mut Resumable,
    settings: &Settings,
    keeper: &mut Keeper<'_>,
    progress: &Progress,
    interrupted: &AtomicBool,
    tell: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<()> {
    let options = state.options.clone();
    let world = (state.cluster.nodes * state.cluster.ranks_per_node) as usize;
    let bound = settings.timeout.unwrap_or_else(|| bound(state));
    let mut sweep = Sweep::new(&options, world, bound)?.with_corruption(settings.corrupt);

    let nics: Vec<&str> = state.cluster.nics.iter().map(String::as_str).collect();
    let fabric = match state.cluster.fabric {
        suite::Fabric::Rails => cluster::Fabric::Rails,
        suite::Fabric::Any => cluster::Fabric::Any,
    };
    let rate = state.nic_rate.map(|rate| rate.0);
    let spec = cluster::ClusterSpec::uniform(state.cluster.nodes as usize, &nics, rate, fabric);
    progress.note(&format!("cluster: {} nodes, NICs {}", spec.nodes.len(), nics.join(", ")));
    let cluster = EmulatedCluster::build(&spec)?;
    let (per_node, out) = (state.cluster.ranks_per_node as usize, keeper.folder.path());
    let configs = RankConfig::of_cluster(&cluster, per_node, &state.cluster.nics, out, &settings.library);
    let command = |config: &RankConfig| {
        let mut command = cluster.command(&config.node, &settings.program).map_err(io::Error::other)?;
        command.args(["worker", "rank"]);
        Ok(command)
    };
    progress.note(&format!("ranks: starting {world}"));
    let mut job = Job::start(&configs, command, out, interrupted)?;
    job.gather("joining", JOIN_BOUND)?;
    keeper.devices = configs
        .iter()
        .map(|c| Device { rank: c.rank, pid: job.pid(c.rank), node: c.node.clone(), nics: c.nics.clone() })
        .collect();
    tell(text::header(&options, &keeper.devices).trim_end())?;
    for row in &state.rows {
        tell(&text::row(row, options.per_iteration))?;
    }
    while options.cycles == 0 || state.rows.len() < sweep.len() * options.cycles as usize {
        let index = state.rows.len() % sweep.len();
        progress.step("row", state.rows.len() + 1, sweep.len() * options.cycles as usize);
        let row: Row = sweep.measure(&mut job, index)?;
        tell(&text::row(&row, options.per_iteration))?;
        state.rows.push(row);
        keeper.keep(state, None, &[])?;
    }
    job.order(|_| Order::Finish)?;
    job.gather("closing", CLOSE_BOUND)?;
    Ok(job.wait(CLOSE_BOUND)?)
}

/// Ten times what all iterations of half a row of the largest size take at the NICs' rate, when every node moves each
/// byte twice, and a minute.
fn bound(state: &Resumable) -> Duration {
    let Resumable { options, cluster, .. } = state;
    let iterations = options.iterations + options.warmup + options.checks;
    let rate = state.nic_rate.map_or(UNSHAPED_BITS_S, |rate| rate.0 as f64) * cluster.nics.len() as f64;
    let bits = options.max_bytes as f64 * 8.0 * 2.0 * f64::from(cluster.ranks_per_node);
    Duration::from_secs_f64(bits / rate * f64::from(iterations) * 10.0 + 60.0)
}

/// Whether the sweep ended for the user's sake.
pub fn is_interrupt(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(JobError::Interrupted))
}
