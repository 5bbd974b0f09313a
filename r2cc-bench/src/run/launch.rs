//! Runs any program as one process a rank on the emulated cluster, with faults by time or by the calls of a library
//! that the program loads. Judges nothing of what the program does but how its processes end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use r2cc_inject::Injector;
use r2cc_inject::fault::{At, Fault, Offset, Op, Position, Trigger, Until};
use serde::Serialize;

use super::faults::{Called, Cutter, FaultDriver, JobFacts};
use super::gpu::{COUNTED, Loading, nccl_variables};
use super::{GpuSettings, cluster_spec, counters, exit_code, ports, ranks};
use crate::check::record::{FaultRecord, NodeCounters, RepairRecord};
use crate::cluster::EmulatedCluster;
use crate::gpu::loaded;
use crate::report::ExitCode;
use crate::suite::{BitRate, MANAGEMENT_NIC, ScaleRow, Suite, misplaced};
use crate::workload::RENDEZVOUS_PORT;

/// How often the processes are looked at.
const LOOK: Duration = Duration::from_millis(10);
/// Longest that processes which have been killed may take to be gone.
const KILLED_BOUND: Duration = Duration::from_secs(5);

/// A function whose calls faults count, in place of those known for NCCL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted {
    /// What faults call it.
    pub op: Op,
    /// The executable or library; its ranks must load this very file.
    pub binary: PathBuf,
    /// The function.
    pub symbol: String,
}

/// What to launch, and how.
#[derive(Debug)]
pub struct LaunchSettings {
    /// This program, which also is the watchers' program.
    pub program: PathBuf,
    /// The user's program and its arguments.
    pub argv: Vec<OsString>,
    /// The row of the suite's `scale` that gives the NICs' rate and the ranks of a node.
    pub row: ScaleRow,
    /// The NICs' rate in place of the suite's; `Some(None)` leaves them unshaped.
    pub nic_rate: Option<Option<BitRate>>,
    /// Faults; the suite's own are not carried out.
    pub faults: Vec<Fault>,
    /// Functions whose calls they count.
    pub counted: Vec<Counted>,
    /// How the program comes by our net plugin for NCCL.
    pub loading: Loading,
    /// Where the plugin is.
    pub gpu: GpuSettings,
    /// Variables of every rank, after ours.
    pub variables: Vec<(String, OsString)>,
    /// Longest that the program may take.
    pub timeout: Option<Duration>,
    /// How long the others may go on once a rank has failed.
    pub grace: Duration,
    /// Who blocks ports.
    pub cutter: Cutter,
    /// Seed of random faults.
    pub seed: u64,
    /// How long a fault lasts that nobody renews.
    pub lease: Duration,
    /// Leave the ranks' standard output to their logs.
    pub quiet: bool,
}

/// How a rank's process ended.
#[derive(Debug, Clone, Serialize)]
pub struct Launched {
    /// The rank.
    pub rank: usize,
    /// Its node.
    pub node: String,
    /// Its exit status; none: a signal ended it.
    pub exit: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether that was ours.
    pub killed: bool,
    /// From its start to its end.
    pub seconds: f64,
    /// What it printed.
    pub log: PathBuf,
}

/// What became of a launch.
#[derive(Debug, Clone, Serialize)]
pub struct LaunchSummary {
    /// Version of this form.
    pub version: u32,
    /// The number of `exit_code` is the command's.
    pub exit_code: i32,
    /// Why the launch ended before its program did.
    pub ended_early: Option<String>,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// How our plugin was loaded.
    pub loading: String,
    /// When the ranks were started, CLOCK_MONOTONIC.
    pub started_ns: u64,
    /// The ranks.
    pub ranks: Vec<Launched>,
    /// The faults.
    pub faults: Vec<FaultRecord>,
    /// Repairs that the ranks' event files tell of.
    pub repairs: Vec<RepairRecord>,
    /// Readmissions of a NIC, on the rank that made most.
    pub readmissions: u32,
    /// What every NIC moved.
    pub nics: NodeCounters,
}

impl LaunchSettings {
    /// What cannot be carried out on this suite's cluster, each with a hint. Asked before anything is started.
    pub fn problems(&self, suite: &Suite) -> Vec<String> {
        let mut found = Vec::new();
        for fault in &self.faults {
            let mut say = |what: &str, hint: &str| found.push(format!("--fault {fault}: {what}\n  hint: {hint}"));
            misplaced(suite, &fault.target).iter().for_each(|(what, hint)| say(what, hint));
            if let Trigger::Position(Position { offset: Offset::MilliPercent(_) | Offset::Between { .. }, .. }) =
                fault.from
            {
                say("the bytes of one call are not known here", "place it by bytes, as in `allreduce#3+4MiB`");
            }
            if let Trigger::Position(Position { at: At::Wire, n, .. }) = fault.from
                && n > 1
            {
                say(
                    "the bytes of one call are not known here",
                    "`at wire` counts from arming: `allreduce#1+64MiB at wire`",
                );
            }
        }
        found
    }
}

/// Operations whose calls a fault counts.
fn ops(fault: &Fault) -> Vec<Op> {
    let from = match &fault.from {
        Trigger::Position(Position { op, at: At::Call, .. }) => Some(*op),
        _ => None,
    };
    let until = if let Until::Call { op, .. } = &fault.until { Some(*op) } else { None };
    from.into_iter().chain(until).collect()
}

/// Launches the program once; `out` gets the ranks' logs and event files. The second is the reason of an early end.
///
/// # Errors
/// If the cluster or a process could not be made, or a fault not be armed: the code says whose doing that is.
pub fn launch(
    suite: &Suite,
    settings: &LaunchSettings,
    out: &Path,
    interrupted: &AtomicBool,
) -> Result<LaunchSummary, (ExitCode, anyhow::Error)> {
    conduct(suite, settings, out, interrupted).map_err(|error| match error.downcast_ref::<io::Error>() {
        // Of the program to be launched; everything else has a type of its own.
        Some(_) => (ExitCode::Usage, error),
        None => (exit_code(&error), error),
    })
}

fn conduct(suite: &Suite, settings: &LaunchSettings, out: &Path, interrupted: &AtomicBool) -> Result<LaunchSummary> {
    let rate = suite.scale(settings.row).and_then(|scale| scale.nic_rate);
    let rate = settings.nic_rate.unwrap_or(rate).map(|rate| rate.0);
    let cluster = EmulatedCluster::build(&cluster_spec(suite, rate))?;
    let injector = Injector::attach(&ports(&cluster, &settings.faults))?;
    let driver = FaultDriver::new(&cluster, injector, settings.program.clone(), settings.lease);
    let before = counters::read(&cluster, &driver.injector().counters()?)?;
    let started_ns = super::at_ns();
    let processes = Processes::start(suite, settings, &cluster, out)?;
    let mut launch = Launch { settings, driver, processes, waiting: settings.faults.clone() };
    let ended = launch.attend(interrupted);
    let killed = launch.processes.kill_all(&cluster);
    let after = counters::read(&cluster, &launch.driver.injector().counters()?)?;
    let mut faults = launch.driver.finish(&[], &[])?;
    faults.extend(launch.waiting.iter().map(never_armed));
    let ended_early = match (ended, killed) {
        (Ok(early), Ok(())) => early,
        (Ok(_), Err(error)) | (Err(error), _) => return Err(error),
    };
    let mut codes: Vec<ExitCode> = ended_early.iter().map(|(code, _)| *code).collect();
    codes.extend(faults.iter().filter(|fault| !fault.healed).map(|_| ExitCode::FaultLeftBehind));
    let idle = |fault: &&FaultRecord| fault.packets_dropped == 0 && fault.carrier_lost != Some(true);
    codes.extend(faults.iter().filter(|f| !f.fired || idle(f)).map(|_| ExitCode::Inconclusive));
    let ranks = launch.processes.ended();
    codes.extend(ranks.iter().filter(|rank| rank.exit != Some(0)).map(|_| ExitCode::Failed));
    let mut summary = LaunchSummary {
        version: 1,
        exit_code: ExitCode::worst(codes).code(),
        ended_early: ended_early.map(|(_, why)| why),
        argv: settings.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        loading: format!("{:?}", settings.loading).to_lowercase(),
        started_ns,
        ranks,
        faults,
        repairs: Vec::new(),
        readmissions: 0,
        nics: counters::between(&before, &after),
    };
    for rank in 0..summary.ranks.len() {
        let events = events_file(out, rank);
        if events.exists() {
            let story = ranks::read(&events, rank as u32, &summary.faults)?;
            summary.repairs.extend(story.repairs);
            summary.readmissions = summary.readmissions.max(story.readmissions);
        }
    }
    Ok(summary)
}

/// A fault whose library no rank had loaded when the program ended.
fn never_armed(fault: &Fault) -> FaultRecord {
    FaultRecord { spec: fault.to_string(), healed: true, ..FaultRecord::default() }
}

fn events_file(out: &Path, rank: usize) -> PathBuf {
    out.join(format!("events-rank-{rank}.jsonl"))
}

struct Launch<'a> {
    settings: &'a LaunchSettings,
    driver: FaultDriver<'a>,
    processes: Processes,
    /// Faults that are not armed yet, because nobody has loaded what they count.
    waiting: Vec<Fault>,
}

impl Launch<'_> {
    /// Until all ranks have ended; a reason if they were not left to end by themselves.
    fn attend(&mut self, interrupted: &AtomicBool) -> Result<Option<(ExitCode, String)>> {
        let begin = Instant::now();
        loop {
            self.arm()?;
            self.driver.step()?;
            if self.processes.look()? {
                return Ok(None);
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(Some((ExitCode::Interrupted, "interrupted".to_owned())));
            }
            if let Some(bound) = self.settings.timeout.filter(|bound| begin.elapsed() >= *bound) {
                let left = self.processes.running();
                let why = format!("ranks {left:?} had not ended after {} s", bound.as_secs_f64());
                return Ok(Some((ExitCode::TimedOut, why)));
            }
            if let Some((rank, since)) = self.processes.first_failure
                && since.elapsed() >= self.settings.grace
            {
                let left = self.processes.running();
                let why = format!("rank {rank} had failed; ranks {left:?} were given {:?} more", self.settings.grace);
                return Ok(Some((ExitCode::Failed, why)));
            }
            thread::sleep(self.driver.pace().min(LOOK));
        }
    }

    /// Arms every fault whose library has been loaded by the node's first rank.
    fn arm(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let pids = self.processes.first_of_each_node();
        let mut ready = Vec::new();
        let mut called = Vec::new();
        for fault in std::mem::take(&mut self.waiting) {
            let found: Option<Vec<Called>> =
                ops(&fault).into_iter().map(|op| counted(op, &fault, &pids, &self.settings.counted)).collect();
            match found {
                Some(found) => {
                    called.extend(found.into_iter().filter(|new| {
                        // One entry an operation.
                        !ready.iter().any(|known: &Fault| ops(known).contains(&new.op))
                    }));
                    ready.push(fault);
                }
                None => self.waiting.push(fault),
            }
        }
        let facts = JobFacts { called, pids, healthy: &|_, _| None, seed: self.settings.seed };
        self.driver.arm(&ready, self.settings.cutter, &facts)
    }
}

/// Where the calls of `op` are counted for this fault; `None` while its process has not loaded that.
fn counted(op: Op, fault: &Fault, pids: &[(String, u32)], named: &[Counted]) -> Option<Called> {
    let (_, pid) = pids.iter().find(|(node, _)| fault.target.is_rail() || *node == fault.target.node)?;
    // A process that has ended has loaded nothing.
    let mapped = loaded::mapped(*pid).ok()?;
    let (binary, symbol) = match named.iter().find(|named| named.op == op) {
        Some(named) => (mapped.into_iter().find(|file| *file == named.binary)?, named.symbol.clone()),
        None => {
            let (_, file, symbol) = COUNTED.iter().find(|(known, ..)| *known == op)?;
            (mapped.into_iter().find(|path| loaded::begins(path, file))?, (*symbol).to_owned())
        }
    };
    Some(Called { op, binary, symbol, arg0: None })
}

struct Process {
    node: String,
    child: Child,
    log: PathBuf,
    begin: Instant,
    ended: Option<(ExitStatus, Duration)>,
    killed: bool,
}

struct Processes {
    all: Vec<Process>,
    /// The first rank that ended in error, and when.
    first_failure: Option<(usize, Instant)>,
}

impl Processes {
    fn start(suite: &Suite, settings: &LaunchSettings, cluster: &EmulatedCluster, out: &Path) -> Result<Self> {
        let per_node = suite.ranks_per_node(settings.row) as usize;
        let world = suite.ranks(settings.row) as usize;
        let plugin = settings.gpu.plugin(&settings.program);
        let (program, arguments) = settings.argv.split_first().context("no program")?;
        let mut processes = Self { all: Vec::new(), first_failure: None };
        for rank in 0..world {
            let node = &cluster.nodes()[rank / per_node];
            let place = Placed { rank, world, local: rank % per_node, per_node, node: rank / per_node };
            let (log, events) = (out.join(format!("rank-{rank}.log")), events_file(out, rank));
            // An earlier launch in this folder is not this one's story.
            let _ = fs::remove_file(&events);
            drop(File::create(&log).with_context(|| log.display().to_string()).map_err(own)?);
            let file = OpenOptions::new().append(true).open(&log).with_context(|| log.display().to_string());
            let file = file.map_err(own)?;
            let mut command = cluster.command(&node.name, Path::new(program))?;
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
            command.stderr(file.try_clone().map_err(|error| own(error.into()))?);
            command.envs(place.variables(&cluster.nodes()[0].mgmt.addr.to_string()));
            let nics = &suite.cluster.nics;
            command.envs(nccl_variables(settings.loading, &plugin, &node.name, nics, rank, &events));
            command.envs(settings.variables.iter().map(|(name, value)| (name, value)));
            let spawned = command.spawn();
            let mut child = match spawned {
                Ok(child) => child,
                Err(error) => {
                    let what = format!("cannot run {}\n  hint: name a program, or its path", program.to_string_lossy());
                    processes.kill_all(cluster)?;
                    return Err(anyhow::Error::from(error).context(what));
                }
            };
            if let Some(printed) = child.stdout.take() {
                let quiet = settings.quiet;
                thread::spawn(move || relay(rank, printed, file, quiet));
            }
            let begin = Instant::now();
            processes.all.push(Process { node: node.name.clone(), child, log, begin, ended: None, killed: false });
        }
        Ok(processes)
    }

    /// Notes who has ended; whether all have.
    fn look(&mut self) -> Result<bool> {
        for (rank, process) in self.all.iter_mut().enumerate().filter(|(_, process)| process.ended.is_none()) {
            let status = process.child.try_wait().map_err(|error| own(error.into()))?;
            process.ended = status.map(|status| (status, process.begin.elapsed()));
            if status.is_some_and(|status| !status.success()) {
                self.first_failure.get_or_insert((rank, Instant::now()));
            }
        }
        Ok(self.all.iter().all(|process| process.ended.is_some()))
    }

    fn running(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|rank| self.all[*rank].ended.is_none()).collect()
    }

    fn first_of_each_node(&self) -> Vec<(String, u32)> {
        let mut pids = BTreeMap::new();
        for process in &self.all {
            pids.entry(process.node.clone()).or_insert_with(|| process.child.id());
        }
        pids.into_iter().collect()
    }

    /// Ends every process of the cluster: the ranks, and whatever they have left running on its nodes.
    fn kill_all(&mut self, cluster: &EmulatedCluster) -> Result<()> {
        for process in self.all.iter_mut().filter(|process| process.ended.is_none()) {
            process.killed = true;
            // A group that has ended meanwhile has nothing to kill.
            let _ = killpg(Pid::from_raw(process.child.id() as i32), Signal::SIGKILL);
        }
        let deadline = Instant::now() + KILLED_BOUND;
        loop {
            let left = inhabitants(cluster)?;
            for pid in &left {
                // One that has ended meanwhile has nothing to kill.
                let _ = kill(*pid, Signal::SIGKILL);
            }
            if self.look()? && left.is_empty() {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "processes {left:?} of the cluster cannot be killed");
            thread::sleep(LOOK);
        }
    }

    fn ended(&self) -> Vec<Launched> {
        let of = |(rank, process): (usize, &Process)| {
            let (status, took) = process.ended.unwrap_or_default();
            Launched {
                rank,
                node: process.node.clone(),
                exit: status.code(),
                signal: status.signal(),
                killed: process.killed,
                seconds: took.as_secs_f64(),
                log: process.log.clone(),
            }
        };
        self.all.iter().enumerate().map(of).collect()
    }
}

/// An error of this machine, not of the user's program.
fn own(error: anyhow::Error) -> anyhow::Error {
    anyhow::anyhow!("{error:#}")
}

/// Processes that live on the cluster's nodes.
fn inhabitants(cluster: &EmulatedCluster) -> Result<Vec<Pid>> {
    let mut namespaces = Vec::new();
    for node in cluster.nodes() {
        let stat = nix::sys::stat::fstat(node.netns.as_fd())?;
        namespaces.push((stat.st_dev, stat.st_ino));
    }
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").map_err(|error| self::own(error.into()))?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| *name != own).and_then(|name| name.parse().ok()) else { continue };
        // A process that is gone, or that is dead and not waited for yet, has no namespace.
        let Ok(place) = fs::metadata(entry.path().join("ns/net")) else { continue };
        if namespaces.contains(&(place.dev(), place.ino())) {
            found.push(Pid::from_raw(pid));
        }
    }
    Ok(found)
}

/// Copies what a rank prints to its log, and to our standard output with its number.
fn relay(rank: usize, printed: impl io::Read, mut log: File, quiet: bool) {
    for line in BufReader::new(printed).split(b'\n') {
        let Ok(mut line) = line else { return };
        if !quiet {
            // A reader that has gone away wants no more of it.
            let _ = writeln!(io::stdout().lock(), "[{rank}] {}", String::from_utf8_lossy(&line));
        }
        line.push(b'\n');
        if log.write_all(&line).is_err() {
            return;
        }
    }
}

/// Where a rank stands in the job.
struct Placed {
    rank: usize,
    world: usize,
    local: usize,
    per_node: usize,
    node: usize,
}

impl Placed {
    /// As torchrun and Open MPI name it.
    fn variables(&self, master: &str) -> Vec<(&'static str, String)> {
        let Self { rank, world, local, per_node, node } = self;
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", per_node.to_string()),
            ("GROUP_RANK", node.to_string()),
            ("NODE_RANK", node.to_string()),
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", world.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", local.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", per_node.to_string()),
            // The host's name need not resolve there.
            ("GLOO_SOCKET_IFNAME", MANAGEMENT_NIC.to_owned()),
            ("MASTER_ADDR", master.to_owned()),
            ("MASTER_PORT", RENDEZVOUS_PORT.to_string()),
        ]
    }
}
