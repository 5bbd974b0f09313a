//! Runs a suite: builds the cluster, starts the ranks, measures healthy iterations, injects the faults,
//! records everything and has it judged. [`run`] is the whole of it; nothing is left when it returns.

mod counters;
mod environment;
mod faults;
mod gpu;
mod launch;
mod progress;
mod ranks;
mod sweep;

pub use faults::{Cutter, LEASE};
pub use gpu::{GpuSettings, Loading};
pub use launch::{Counted, LaunchSettings, LaunchSummary, Launched, launch};
pub use progress::{BesideBar, Progress, beside};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use r2cc::transport::now;
use r2cc_inject::change::ChangeError;
use r2cc_inject::fault::Fault;
use r2cc_inject::watcher::WatchError;
use r2cc_inject::{Injector, PortSpec};

use crate::check::record::{IterationRecord, NodeCounters, Span, TransportRecord, WrongElement};
use crate::check::{self, CheckResult, RunRecord, figures};
use crate::cluster::{self, ClusterError, EmulatedCluster};
use crate::goodput::{self, GoodputError};
use crate::gpu::{GpuError, GpuFacts};
use crate::report::{Event, EventLog, ExitCode, FolderError, RunContext, Summary};
use crate::suite::{MANAGEMENT_NIC, ScaleRow, Suite, Timing, effect};
use crate::workload::job::{Job, JobError};
use crate::workload::{Damage, LINK_BOUND_S, Order, RankConfig, Report, support};

use faults::{Called, FaultDriver, JobFacts};

/// How long plain TCP is measured.
const GOODPUT_TIME: Duration = Duration::from_secs(1);
/// Baseline iterations when the first few are noisy.
const BASELINE_MOST: u32 = 15;
/// Spread of the baseline, in percent, that counts as noise.
const NOISY_PERCENT: f64 = 1.0;
const JOIN_BOUND: Duration = Duration::from_secs(60);
const CLOSE_BOUND: Duration = Duration::from_secs(10);

/// How a suite is to be run.
#[derive(Debug)]
pub struct Settings {
    /// This program, which also is the ranks' program.
    pub program: PathBuf,
    /// What runs the collective, by its row of `scale`.
    pub row: ScaleRow,
    /// Where the libraries of the backend nccl are.
    pub gpu: GpuSettings,
    /// Whether timing checks count.
    pub timing: Timing,
    /// Damage what a rank receives in this iteration.
    pub corrupt: Option<(u32, bool)>,
    /// Leave only checks of this name.
    pub only: Option<String>,
    /// Who blocks ports.
    pub cutter: Cutter,
    /// Seed of whatever is random.
    pub seed: u64,
    /// How long a fault lasts that nobody renews.
    pub lease: Duration,
    /// The row of the suite that is run, if it has rows.
    pub row_name: Option<String>,
    /// Healthy iterations of another run to compare with, in place of own ones.
    pub baseline: Option<Vec<IterationRecord>>,
}

/// Runs a suite without rows once; `out` gets the ranks' logs and event files. Returns also what was recorded.
///
/// # Errors
/// If nothing could be recorded at all; everything else is in the summary.
pub fn run(
    suite: &Suite,
    settings: &Settings,
    repetition: u32,
    out: &Path,
    log: &mut EventLog,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<(Summary, RunRecord)> {
    let row = settings.row;
    let mut record = RunRecord {
        bytes: suite.scale(row).map_or(0, |scale| scale.bytes.0),
        ranks_per_node: suite.ranks_per_node(row),
        ..RunRecord::default()
    };
    let mut environment = environment::describe();
    let surveyed = match row {
        ScaleRow::Nccl => gpu::survey(suite, settings, out, interrupted).map(Some),
        ScaleRow::Host | ScaleRow::Ssh => Ok(None),
    };
    if let Ok(Some(facts)) = &surveyed {
        environment.extend(gpu::described(facts));
    }
    log.record(
        at_ns(),
        Event::Started {
            row: settings.row_name.clone(),
            repetition,
            suite: Box::new(suite.clone()),
            backend: row.name().into(),
            bytes: record.bytes,
            ranks_per_node: record.ranks_per_node,
            environment: environment.clone(),
        },
    )?;
    let mut context = RunContext { backend: row.name().into(), ended: None, environment };
    let mut session = Session {
        suite,
        settings,
        row,
        out,
        log,
        progress,
        interrupted,
        record: &mut record,
        gpu: None,
        called: None,
        learnt: BTreeMap::new(),
    };
    let outcome = surveyed.and_then(|facts| {
        session.gpu = facts;
        session.conduct()
    });
    context.environment.append(&mut session.learnt);
    if let Err(error) = outcome
        && !(effect::hangs(suite) && matches!(error.downcast_ref(), Some(JobError::Hung { .. })))
    {
        context.ended = Some((exit_code(&error), format!("{error:#}")));
    }
    check::place_faults(suite, &mut record);
    let mut checks = check::evaluate(suite, &record, settings.timing);
    if row == ScaleRow::Nccl {
        gpu::set_views_aside(&record, &mut checks);
    }
    if let Some(name) = &settings.only {
        check::keep_only(&mut checks, name);
    }
    settle(log, &record, &checks)?;
    let summary = Summary { row: settings.row_name.clone(), ..Summary::of_run(suite, row, &record, checks, &context) };
    log.record(at_ns(), Event::Ended { verdict: summary.verdict, exit_code: summary.exit_code })?;
    Ok((summary, record))
}

fn settle(log: &mut EventLog, record: &RunRecord, checks: &[CheckResult]) -> Result<()> {
    for fault in &record.faults {
        log.record(at_ns(), Event::Fault(fault.clone()))?;
    }
    for repair in &record.repairs {
        log.record(at_ns(), Event::Repair(repair.clone()))?;
    }
    for (rank, entries) in &record.fault_view {
        log.record(at_ns(), Event::FaultView { rank: *rank, entries: entries.clone() })?;
    }
    if !record.switch.is_empty() {
        log.record(at_ns(), Event::Switch(record.switch.clone()))?;
    }
    if !record.switches.is_empty() {
        log.record(at_ns(), Event::Switches(record.switches.clone()))?;
    }
    if let Some(hang) = &record.hang {
        log.record(at_ns(), Event::Hang(hang.clone()))?;
    }
    if let Some(graph) = &record.graph {
        log.record(at_ns(), Event::Graph(*graph))?;
    }
    log.record(at_ns(), Event::Transport(record.transport))?;
    checks.iter().try_for_each(|check| Ok(log.record(at_ns(), Event::Check(check.clone()))?))
}

fn at_ns() -> u64 {
    now().as_nanos() as u64
}

/// What an error of a run means for the exit code.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    if let Some(error) = error.downcast_ref::<JobError>() {
        return match error {
            JobError::Interrupted => ExitCode::Interrupted,
            JobError::TimedOut { .. } | JobError::Hung { .. } => ExitCode::TimedOut,
            JobError::Lost { environment: true, .. } | JobError::Log { .. } => ExitCode::NotReady,
            JobError::Lost { .. } => ExitCode::Failed,
            JobError::Io { .. } => ExitCode::Internal,
        };
    }
    let cluster = error.downcast_ref::<ClusterError>().or(match error.downcast_ref::<GoodputError>() {
        Some(GoodputError::Cluster(error)) => Some(error),
        _ => None,
    });
    if error.is::<WatchError>() || error.is::<ChangeError>() {
        return ExitCode::NotReady;
    }
    match error.downcast_ref::<r2cc_inject::Error>() {
        // Nobody renewed it in time: this process was stopped, or starved.
        Some(r2cc_inject::Error::Expired { .. }) => ExitCode::Inconclusive,
        Some(_) => ExitCode::NotReady,
        None if cluster.is_some_and(ClusterError::is_environment) => ExitCode::NotReady,
        None if error.downcast_ref::<GpuError>().is_some_and(GpuError::is_environment) => ExitCode::NotReady,
        None if error.downcast_ref::<FolderError>().is_some() => ExitCode::NotReady,
        None => ExitCode::Internal,
    }
}

struct Session<'a> {
    suite: &'a Suite,
    settings: &'a Settings,
    row: ScaleRow,
    out: &'a Path,
    log: &'a mut EventLog,
    progress: &'a Progress,
    interrupted: &'a AtomicBool,
    record: &'a mut RunRecord,
    /// The GPU and its libraries, for the backend nccl.
    gpu: Option<GpuFacts>,
    /// What faults count, once it is known.
    called: Option<Called>,
    /// Facts of the environment that only the ranks could show.
    learnt: BTreeMap<String, String>,
}

impl Session<'_> {
    fn conduct(&mut self) -> Result<()> {
        let rate = self.suite.scale(self.row).and_then(|scale| scale.nic_rate).map(|rate| rate.0);
        let spec = cluster_spec(self.suite, rate);
        self.note(format!("cluster: {} nodes, NICs {}", spec.nodes.len(), self.suite.cluster.nics.join(", ")))?;
        let cluster = EmulatedCluster::build(&spec)?;

        self.note("plain TCP: measuring goodput".into())?;
        let goodput = goodput::measure(&cluster, &self.settings.program, GOODPUT_TIME)?;
        self.record.goodput_bits_s = goodput.nodes.iter().map(|n| (n.node.clone(), n.received_bits_s)).collect();
        self.log.record(at_ns(), Event::Goodput(self.record.goodput_bits_s.clone()))?;

        let injector = Injector::attach(&ports(&cluster, &self.suite.faults))?;
        let driver =
            Mutex::new(FaultDriver::new(&cluster, injector, self.settings.program.clone(), self.settings.lease));
        let configs = self.configs(&cluster);
        let program = self.settings.program.clone();
        let command = |config: &RankConfig| {
            let mut command = cluster.command(&config.node, &program).map_err(std::io::Error::other)?;
            if let Some(socket) = self.progress.live().rank_socket(config.rank) {
                command.env("R2CC_STATUS", socket);
            }
            command.args(["worker", if config.gpu.is_some() { "gpu-rank" } else { "rank" }]);
            if config.gpu.is_some() {
                command.envs(gpu::variables(self.suite, self.settings, config));
            }
            Ok(command)
        };
        self.note(format!("ranks: starting {}", configs.len()))?;
        // An earlier run in this folder is not this run's story.
        configs.iter().for_each(|config| drop(std::fs::remove_file(&config.events)));
        let mut job = Job::start(&configs, command, self.out, self.interrupted)?;
        let outcome = self.measure(&cluster, &driver, &configs, &mut job);
        // Killed before the story is read, so that no event file grows any more; the first error counts.
        drop(job);
        let told = self.collect_stories(&configs);
        outcome.and(told)
    }

    fn configs(&self, cluster: &EmulatedCluster) -> Vec<RankConfig> {
        let per_node = self.suite.ranks_per_node(self.row) as usize;
        let library = support::settings(self.suite);
        let mut configs = RankConfig::of_cluster(cluster, per_node, &self.suite.cluster.nics, self.out, &library);
        for config in &mut configs {
            config.bytes = self.record.bytes;
            config.dtype = self.suite.workload.dtype.name().into();
            config.op = self.suite.workload.op.name().into();
            config.in_place = self.suite.workload.in_place;
            let rank = config.rank;
            config.gpu = self.gpu.as_ref().map(|facts| gpu::config(self.suite, self.settings, rank, facts));
        }
        configs
    }

    fn measure(
        &mut self,
        cluster: &EmulatedCluster,
        driver: &Mutex<FaultDriver<'_>>,
        configs: &[RankConfig],
        job: &mut Job<'_>,
    ) -> Result<()> {
        match self.row {
            ScaleRow::Nccl => self.join_gpus(configs, job)?,
            ScaleRow::Host | ScaleRow::Ssh => drop(job.gather("joining", JOIN_BOUND)?),
        }
        let mut sweep = self.sweep()?;
        match &mut sweep {
            Some(sweep) => self.healthy_rows(sweep, job)?,
            None => self.baseline(cluster, driver, job)?,
        }
        let pids = configs.iter().fold(Vec::<(String, u32)>::new(), |mut pids, config| {
            if pids.last().is_none_or(|(node, _)| *node != config.node) {
                pids.push((config.node.clone(), job.pid(config.rank)));
            }
            pids
        });
        let record = &*self.record;
        let healthy = |node: &str, nic: &str| figures::healthy_port_rx_bytes(record, node, nic);
        let called = self.called.clone().unwrap_or_else(|| Called::on_host(self.settings.program.clone()));
        let freeze = Called::freeze(self.settings.program.clone());
        let facts = JobFacts { called: vec![called, freeze], pids, healthy: &healthy, seed: self.settings.seed };
        lock(driver).arm(&self.suite.faults, self.settings.cutter, &facts)?;

        let mut starts = Vec::new();
        let stop = AtomicBool::new(false);
        let outcome = thread::scope(|scope| {
            let keeper = scope.spawn(|| keep(driver, &stop));
            let outcome = match &mut sweep {
                Some(sweep) => self.rows_under_faults(sweep, job),
                None => self.iterations(cluster, driver, job, &mut starts),
            };
            stop.store(true, Ordering::Relaxed);
            let kept = keeper.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the fault keeper panicked")));
            outcome.and(kept)
        });
        // Whatever happened: the faults end here.
        self.record.faults = lock(driver).finish(&self.record.iterations, &starts)?;
        outcome?;
        job.order(|_| Order::Finish)?;
        for report in job.gather("closing", CLOSE_BOUND)? {
            let Report::Finished { payload_bytes, replayed_bytes, paths_suspected, paths_failed, paths_down } = report
            else {
                anyhow::bail!("a rank answered {report:?} to the order to finish");
            };
            let TransportRecord { payload_bytes: p, replayed_bytes: r, paths_suspected: s, paths_failed: f, .. } =
                &mut self.record.transport;
            *p += payload_bytes;
            *r += replayed_bytes;
            *s += paths_suspected;
            *f += paths_failed;
            self.record.transport.paths_down_at_end += paths_down;
        }
        Ok(job.wait(CLOSE_BOUND)?)
    }

    fn baseline(
        &mut self,
        cluster: &EmulatedCluster,
        driver: &Mutex<FaultDriver<'_>>,
        job: &mut Job<'_>,
    ) -> Result<()> {
        if let Some(known) = &self.settings.baseline {
            for iteration in known {
                self.log.record(at_ns(), Event::Baseline(iteration.clone()))?;
            }
            self.record.baseline.clone_from(known);
            return Ok(());
        }
        let wanted = self.suite.workload.baseline;
        for index in 1..=wanted.max(BASELINE_MOST) {
            let noisy = || figures::baseline(self.record).is_none_or(|b| b.mad_percent > NOISY_PERCENT);
            if index > wanted && !noisy() {
                break;
            }
            self.progress.iteration("baseline", index, wanted.max(index));
            let (iteration, _) = self.iterate(cluster, driver, job, index, u64::from(index), None)?;
            self.log.record(at_ns(), Event::Baseline(iteration.clone()))?;
            self.record.baseline.push(iteration);
        }
        Ok(())
    }

    fn iterations(
        &mut self,
        cluster: &EmulatedCluster,
        driver: &Mutex<FaultDriver<'_>>,
        job: &mut Job<'_>,
        starts: &mut Vec<NodeCounters>,
    ) -> Result<()> {
        let count = self.suite.workload.iterations;
        for index in 1..=count {
            self.progress.iteration("iteration", index, count);
            let corrupt = self.settings.corrupt.filter(|(at, _)| *at == index).map(|(_, nan)| nan);
            let number = 1000 + u64::from(index);
            let (iteration, start) = self.iterate(cluster, driver, job, index, number, corrupt)?;
            starts.push(start);
            self.log.record(at_ns(), Event::Iteration(iteration.clone()))?;
            self.record.iterations.push(iteration);
        }
        if self.record.graph.is_some() {
            self.capture_again(cluster, driver, job)?;
        }
        Ok(())
    }

    /// One collective on every rank; also returns the programs' counters at its start.
    fn iterate(
        &mut self,
        cluster: &EmulatedCluster,
        driver: &Mutex<FaultDriver<'_>>,
        job: &mut Job<'_>,
        index: u32,
        number: u64,
        corrupt: Option<bool>,
    ) -> Result<(IterationRecord, NodeCounters)> {
        let seed = self.settings.seed;
        let ports = lock(driver).injector().counters()?;
        let before = counters::read(cluster, &ports)?;
        let start = counters::of_programs(&ports);
        let world = self.suite.ranks(self.row) as usize;
        let damage = |rank: usize| {
            let chosen = (seed % world as u64) as usize == rank;
            let position = (seed / world as u64 % 10) as f64 / 10.0 + 0.05;
            corrupt.filter(|_| chosen).map(|nan| Damage { seed, position, nan })
        };
        let what = format!("iteration {index}");
        let reports = match self.row {
            ScaleRow::Nccl => self.collective_on_gpus(driver, job, index, number, damage)?,
            ScaleRow::Host | ScaleRow::Ssh => {
                job.order(|rank| Order::Iterate { iteration: number, corrupt: damage(rank) })?;
                job.gather(&what, self.iteration_bound())?
            }
        };
        let after = counters::read(cluster, &lock(driver).injector().counters()?)?;
        let mut iteration = IterationRecord { index, nics: counters::between(&before, &after), ..Default::default() };
        for (rank, report) in reports.into_iter().enumerate() {
            let Report::Iterated { iteration: told, start_ns, end_ns, checked, wrong, first_wrong } = report else {
                anyhow::bail!("rank {rank} answered {report:?} to an iteration");
            };
            anyhow::ensure!(told == number, "rank {rank} answered for iteration {told}, not {number}");
            iteration.ranks.insert(rank as u32, Span { start_ns, end_ns });
            iteration.checked_elements += checked;
            iteration.wrong_elements += wrong;
            if let (None, Some((element, expected, actual))) = (&iteration.first_wrong, first_wrong) {
                iteration.first_wrong = Some(WrongElement { rank: rank as u32, element, expected, actual });
            }
        }
        iteration.start_ns = iteration.ranks.values().map(|span| span.start_ns).min().unwrap_or(0);
        iteration.end_ns = iteration.ranks.values().map(|span| span.end_ns).max().unwrap_or(0);
        Ok((iteration, start))
    }

    /// From physics: ten times the time at the goodput of plain TCP, and the bound after which ranks give up.
    fn iteration_bound(&self) -> Duration {
        let t0 = figures::t0_millis(self.suite, self.record).unwrap_or(10_000.0);
        Duration::from_secs_f64(t0 / 1e3 * 10.0) + Duration::from_secs(LINK_BOUND_S + 30)
    }

    fn collect_stories(&mut self, configs: &[RankConfig]) -> Result<()> {
        for config in configs.iter().filter(|config| config.events.exists()) {
            let rank = config.rank as u32;
            let story = ranks::read(&config.events, rank, &self.record.faults)?;
            for event in story.transitions {
                self.log.record(at_ns(), event)?;
            }
            self.record.repairs.extend(story.repairs);
            self.record.fault_view.insert(rank, story.view);
            self.record.switch.extend(story.switches.first().map(|switch| (rank, switch.collective)));
            self.record.switches.extend((!story.switches.is_empty()).then_some((rank, story.switches)));
            let sums = &mut self.record.transport;
            sums.payload_bytes += story.transport.payload_bytes;
            sums.replayed_bytes += story.transport.replayed_bytes;
            sums.paths_suspected += story.transport.paths_suspected;
            sums.paths_failed += story.transport.paths_failed;
            sums.paths_down_at_end += story.transport.paths_down_at_end;
            sums.readmissions = sums.readmissions.max(story.readmissions);
        }
        Ok(())
    }

    fn note(&mut self, text: String) -> Result<()> {
        self.progress.note(&text);
        Ok(self.log.record(at_ns(), Event::Note { text })?)
    }
}

/// The cluster that a suite describes, its NICs at this rate.
fn cluster_spec(suite: &Suite, rate_bits_s: Option<u64>) -> cluster::ClusterSpec {
    let nics: Vec<&str> = suite.cluster.nics.iter().map(String::as_str).collect();
    let fabric = match suite.cluster.fabric {
        crate::suite::Fabric::Rails => cluster::Fabric::Rails,
        crate::suite::Fabric::Any => cluster::Fabric::Any,
    };
    cluster::ClusterSpec::uniform(suite.cluster.nodes as usize, &nics, rate_bits_s, fabric)
}

/// Ports to count at and to act on.
fn ports<'c>(cluster: &'c EmulatedCluster, faults: &[Fault]) -> Vec<PortSpec<'c>> {
    use std::os::fd::AsFd;
    let wants_mgmt = faults.iter().any(|fault| fault.target.nic == MANAGEMENT_NIC);
    let of = |node: &'c cluster::Node| {
        let mgmt = wants_mgmt.then_some(&node.mgmt);
        node.nics.iter().chain(mgmt).map(|nic| PortSpec {
            node: node.name.clone(),
            nic: nic.name.clone(),
            netns: Some(node.netns.as_fd()),
            ifname: nic.name.clone(),
        })
    };
    cluster.nodes().iter().flat_map(of).collect()
}

fn lock<'a, 'c>(driver: &'a Mutex<FaultDriver<'c>>) -> std::sync::MutexGuard<'a, FaultDriver<'c>> {
    // A step that panicked leaves a driver that can still end its faults.
    driver.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Renews leases and does what is due, until told to stop.
fn keep(driver: &Mutex<FaultDriver<'_>>, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let pace = {
            let mut driver = lock(driver);
            driver.step()?;
            driver.pace()
        };
        thread::sleep(pace);
    }
    Ok(())
}
