//! What the backend nccl does otherwise than the native engine: libraries that must be there, the variables that
//! make one machine look like several nodes to NCCL, joining by NCCL's unique id, and a collective in three orders
//! (fill, run, check). A collective that stands still is told from one that is slow by the data ports' counters.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use r2cc_inject::Flow;
use r2cc_inject::fault::Op;

use super::faults::{Called, FaultDriver};
use super::{JOIN_BOUND, Session, Settings, at_ns, lock};
use crate::check::record::{GraphRecord, HangRecord, IterationRecord, Span};
use crate::check::{CheckResult, CheckStatus, RunRecord, figures};
use crate::cluster::EmulatedCluster;
use crate::gpu::{GpuError, GpuFacts, loaded, nccl};
use crate::suite::{MANAGEMENT_NIC, Mode, ScaleRow, Suite, WorkloadKind};
use crate::workload::job::{Job, JobError};
use crate::workload::{Damage, GpuConfig, Order, RankConfig, Report};

/// A collective is given up when no payload has arrived on any data port for so long.
const SILENCE: Duration = Duration::from_secs(10);
/// Frames up to this size carry no payload worth the name: address resolution, window probes, acknowledgements,
/// which a dead port's peers keep sending now and then.
const CONTROL_FRAME_BYTES: u64 = 128;
/// Time for CUDA to start and NCCL to load.
const SURVEY_BOUND: Duration = Duration::from_secs(60);
/// The plugin's file beside the bench, in `../lib`.
const PLUGIN: &str = "libr2cc_nccl.so";
/// Name of the file under which NCCL looks for it.
const PLUGIN_BY_NCCL: &str = "libnccl-net-r2cc.so";
/// Names the plugin, where the command line does not.
const PLUGIN_VARIABLE: &str = "R2CC_NCCL_PLUGIN";

/// Where the libraries of the backend nccl are.
#[derive(Debug, Clone, Default)]
pub struct GpuSettings {
    /// The NCCL library; default: what is loaded, else the search path.
    pub nccl: Option<PathBuf>,
    /// Our net plugin; default: `R2CC_NCCL_PLUGIN`, else `../lib` beside this program.
    pub plugin: Option<PathBuf>,
}

impl GpuSettings {
    /// Where the plugin is looked for.
    pub fn plugin(&self, program: &Path) -> PathBuf {
        let named = self.plugin.clone().or_else(|| env::var_os(PLUGIN_VARIABLE).map(PathBuf::from));
        let beside = || program.parent().and_then(Path::parent).unwrap_or(Path::new("/")).join("lib").join(PLUGIN);
        let path = named.unwrap_or_else(beside);
        path.canonicalize().unwrap_or(path)
    }
}

/// What this machine has, asked in a process of its own: CUDA stays out of the bench.
///
/// # Errors
/// If something is missing; the reason is the process's own.
pub(super) fn survey(suite: &Suite, settings: &Settings, out: &Path, interrupted: &AtomicBool) -> Result<GpuFacts> {
    let command = |_: &RankConfig| {
        let mut command = Command::new(&settings.program);
        command.args(["worker", "gpu-survey"]);
        command.args(settings.gpu.nccl.iter().flat_map(|path| [Path::new("--nccl"), path]));
        Ok(command)
    };
    let mut job = Job::start(&[RankConfig::alone()], command, out, interrupted)?;
    let Some(Report::Loaded { facts, .. }) = job.gather("looking for a GPU and NCCL", SURVEY_BOUND)?.pop() else {
        bail!("the survey told of something else");
    };
    job.wait(SURVEY_BOUND)?;
    let plugin = settings.gpu.plugin(&settings.program);
    if suite.library.mode != Mode::None && !plugin.is_file() {
        let hint = "`make build` puts it there; else name it by --plugin PATH, or run plain NCCL by --library none";
        return Err(GpuError::Missing {
            what: "the net plugin".into(),
            why: format!("{} is not there", plugin.display()),
            hint: hint.into(),
        }
        .into());
    }
    let ranks_per_node = suite.ranks_per_node(ScaleRow::Nccl) as usize;
    if ranks_per_node > facts.gpus {
        return Err(GpuError::Missing {
            what: format!("{ranks_per_node} GPUs, one for each rank of a node"),
            why: format!("this machine has {}", facts.gpus),
            hint: "set scale.nccl.ranks_per_node; nodes may share a GPU, ranks of one node may not".into(),
        }
        .into());
    }
    Ok(facts)
}

/// What explains figures: the GPU and the libraries.
pub(super) fn described(facts: &GpuFacts) -> BTreeMap<String, String> {
    let GpuFacts { gpu, gpus, cuda, libcuda: _, nccl, libnccl } = facts;
    let fact = |name: &str, value: String| (name.to_owned(), value);
    BTreeMap::from([
        fact("gpu", gpu.clone()),
        fact("gpus", gpus.to_string()),
        fact("cuda", cuda.clone()),
        fact("nccl", nccl.clone()),
        fact("nccl_library", libnccl.display().to_string()),
    ])
}

/// Under NCCL a rank knows its own paths and no more, until there is a control mesh: where no rank has a view of the
/// whole, the check has nothing to judge, and says so.
pub(super) fn set_views_aside(record: &RunRecord, checks: &mut [CheckResult]) {
    if record.fault_view.values().any(|view| !view.is_empty()) {
        return;
    }
    for check in checks.iter_mut().filter(|check| check.name == "fault_view") {
        check.status = CheckStatus::Skipped;
        check.actual = "not applicable".into();
        check.detail =
            Some("under NCCL a rank tells of its own paths (see its event file), not of a common view".into());
    }
}

/// A rank's part of the machine.
pub(super) fn config(suite: &Suite, settings: &Settings, rank: usize, facts: &GpuFacts) -> GpuConfig {
    let per_node = suite.ranks_per_node(ScaleRow::Nccl) as usize;
    // Ranks of one node need GPUs of their own; else nodes take them in turn.
    let place = if per_node > 1 { rank % per_node } else { rank };
    GpuConfig {
        ordinal: place % facts.gpus.max(1),
        nccl: settings.gpu.nccl.clone(),
        graph: suite.workload.kind == WorkloadKind::CudaGraph,
    }
}

/// How a program comes by our net plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Loading {
    /// Not at all: NCCL's own sockets.
    None,
    /// By LD_PRELOAD alone; the plugin's constructor does the rest.
    Preload,
    /// By NCCL_NET_PLUGIN alone, its file on the search path.
    Plugin,
}

/// The variables of a rank, with NCCL left to itself where the suite asks for no library.
pub(super) fn variables(suite: &Suite, settings: &Settings, config: &RankConfig) -> Vec<(String, OsString)> {
    let loading = if suite.library.mode == Mode::None { Loading::None } else { Loading::Preload };
    let plugin = settings.gpu.plugin(&settings.program);
    nccl_variables(loading, &plugin, &config.node, &config.nics, config.rank, &config.events)
}

/// What makes NCCL take a namespace for a host with these NICs. What makes the nodes is ours; the rest is the
/// user's, where he has set it.
pub(super) fn nccl_variables(
    loading: Loading,
    plugin: &Path,
    node: &str,
    nics: &[String],
    rank: usize,
    events: &Path,
) -> Vec<(String, OsString)> {
    let listed = format!("={}", nics.join(","));
    let ours = |name: &str, value: &str| (name.to_owned(), OsString::from(value));
    // In front of what the user's own variable says.
    let before = |name: &str, path: &Path| {
        let mut value = path.as_os_str().to_owned();
        if let Some(others) = env::var_os(name).filter(|others| !others.is_empty()) {
            value.push(":");
            value.push(others);
        }
        (name.to_owned(), value)
    };
    let mut all = vec![ours("NCCL_HOSTID", node)];
    let defaults = [
        ("NCCL_IB_DISABLE", "1".to_owned()),
        ("NCCL_NVLS_ENABLE", "0".to_owned()),
        ("NCCL_MNNVL_ENABLE", "0".to_owned()),
        // Ranks share a GPU by time slices: one channel for each NIC, and no more.
        ("NCCL_MIN_NCHANNELS", nics.len().to_string()),
        ("NCCL_MAX_NCHANNELS", nics.len().to_string()),
        ("NCCL_DEBUG", "INFO".to_owned()),
        ("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV".to_owned()),
    ];
    all.extend(defaults.iter().filter(|(name, _)| env::var_os(name).is_none()).map(|(name, value)| ours(name, value)));
    match loading {
        Loading::None => all.extend([
            ours("NCCL_SOCKET_IFNAME", &listed),
            ours("NCCL_NET_PLUGIN", "none"),
            ours("NCCL_NET", "Socket"),
        ]),
        Loading::Preload => all.push(before("LD_PRELOAD", plugin)),
        Loading::Plugin => {
            all.push(ours("NCCL_NET_PLUGIN", "r2cc"));
            all.push(before("LD_LIBRARY_PATH", plugin.parent().unwrap_or(Path::new("."))));
        }
    }
    if loading != Loading::None {
        all.push(("R2CC_EVENTS".into(), events.as_os_str().to_owned()));
        all.push(ours("R2CC_RANK", &rank.to_string()));
        all.extend([ours("NCCL_SOCKET_IFNAME", &format!("={MANAGEMENT_NIC}")), ours("R2CC_IFNAME", &listed)]);
    }
    all
}

/// What faults may count the calls of in a program that uses NCCL: the operation, the library by the begin of its
/// file's name, and the function.
pub(super) const COUNTED: [(Op, &str, &str); 8] = [
    (Op::AllReduce, NCCL_FILE, nccl::ALL_REDUCE),
    (Op::AllGather, NCCL_FILE, "ncclAllGather"),
    (Op::ReduceScatter, NCCL_FILE, "ncclReduceScatter"),
    (Op::Broadcast, NCCL_FILE, "ncclBroadcast"),
    (Op::Reduce, NCCL_FILE, "ncclReduce"),
    (Op::SendRecv, NCCL_FILE, "ncclSend"),
    (Op::AllToAll, NCCL_FILE, "ncclAlltoAll"),
    (Op::GraphLaunch, "libcuda.so", GRAPH_LAUNCH),
];
const NCCL_FILE: &str = "libnccl.so";
const GRAPH_LAUNCH: &str = "cuGraphLaunch";

impl Session<'_> {
    /// Brings the ranks into one communicator; shows which libraries they really use.
    pub(super) fn join_gpus(&mut self, configs: &[RankConfig], job: &mut Job<'_>) -> Result<()> {
        let mut identity = None;
        let mut all: Vec<GpuFacts> = Vec::new();
        for report in job.gather("loading CUDA and NCCL", JOIN_BOUND)? {
            let Report::Loaded { facts, unique_id } = report else { bail!("a rank answered {report:?} at its start") };
            identity = identity.or(unique_id);
            all.push(facts);
        }
        let facts = all.first().context("no rank")?.clone();
        ensure!(all.iter().all(|one| one.libnccl == facts.libnccl), "the ranks use different NCCL libraries: {all:?}");
        let unique_id = identity.context("rank 0 made no unique id")?;
        job.order(|_| Order::Join { unique_id: unique_id.clone() })?;
        let graph = self.suite.workload.kind == WorkloadKind::CudaGraph;
        if graph {
            let (capture_millis, instantiate_millis) = captured(&job.gather("capturing", JOIN_BOUND)?)?;
            self.record.graph = Some(GraphRecord { capture_millis, instantiate_millis, ..GraphRecord::default() });
        } else {
            job.gather("joining", JOIN_BOUND)?;
        }
        for config in configs {
            self.verify_libraries(job.pid(config.rank), config.rank, &facts)?;
        }
        let (op, binary, symbol) = if graph {
            (Op::GraphLaunch, facts.libcuda, GRAPH_LAUNCH)
        } else {
            (Op::AllReduce, facts.libnccl, nccl::ALL_REDUCE)
        };
        self.note(format!("faults count calls of {symbol} in {}", binary.display()))?;
        self.called = Some(Called { op, binary, symbol: symbol.into(), arg0: None });
        let log = fs::read_to_string(self.out.join("rank-0.log")).unwrap_or_default();
        if let Some(network) = network(&log) {
            self.note(format!("NCCL {} uses network {network}", facts.nccl))?;
            self.learnt.insert("nccl_network".into(), network.to_owned());
        }
        Ok(())
    }

    /// By the mappings of a rank's process: the NCCL that it named, and our plugin exactly where it is asked for.
    fn verify_libraries(&mut self, pid: u32, rank: usize, facts: &GpuFacts) -> Result<()> {
        let mapped = loaded::mapped(pid).with_context(|| format!("the mappings of rank {rank}"))?;
        ensure!(mapped.contains(&facts.libnccl), "rank {rank} has not mapped {}", facts.libnccl.display());
        let plugin = mapped.iter().find(|p| [PLUGIN, PLUGIN_BY_NCCL].iter().any(|name| loaded::begins(p, name)));
        match (plugin, self.suite.library.mode) {
            (Some(plugin), Mode::None) => bail!("rank {rank} has mapped {}, and was to run without", plugin.display()),
            (None, mode) if mode != Mode::None => bail!("rank {rank} has not mapped {PLUGIN}"),
            (Some(plugin), _) => drop(self.learnt.insert("plugin".into(), plugin.display().to_string())),
            (None, _) => {}
        }
        Ok(())
    }

    /// One collective on every rank: filled, run, checked.
    pub(super) fn collective_on_gpus(
        &mut self,
        driver: &Mutex<FaultDriver<'_>>,
        job: &mut Job<'_>,
        index: u32,
        number: u64,
        damage: impl Fn(usize) -> Option<Damage>,
    ) -> Result<Vec<Report>> {
        let bound = self.iteration_bound();
        job.order(|_| Order::Prepare { iteration: number })?;
        job.gather(&format!("filling for iteration {index}"), bound)?;
        job.order(|_| Order::Iterate { iteration: number, corrupt: None })?;
        let what = format!("iteration {index}");
        let mut silence = Silence::new(arrived(driver));
        let mut watch = || {
            let silent = silence.after(arrived(driver));
            if silent < SILENCE {
                return Ok(());
            }
            Err(JobError::Hung { what: what.clone(), silent_s: silent.as_secs_f64() })
        };
        let returned = match job.gather_watched(&what, bound, &mut watch) {
            Ok(returned) => returned,
            Err(JobError::Hung { what, silent_s }) => {
                let hang = hang_record(index, &silence, job)?;
                self.note(format!("{what} hangs: {}", hang.processes.join(", ")))?;
                self.record.hang = Some(hang);
                return Err(JobError::Hung { what, silent_s }.into());
            }
            Err(error) => return Err(error.into()),
        };
        job.order(|rank| Order::Check { iteration: number, corrupt: damage(rank) })?;
        let checked = job.gather(&format!("checking iteration {index}"), bound)?;
        let mut reports = Vec::new();
        for (rank, pair) in returned.into_iter().zip(checked).enumerate() {
            match pair {
                (
                    Report::Returned { iteration: ran, start_ns, end_ns },
                    Report::Iterated { iteration, checked, wrong, first_wrong, .. },
                ) if ran == number => {
                    reports.push(Report::Iterated { iteration, start_ns, end_ns, checked, wrong, first_wrong });
                }
                other => bail!("rank {rank} answered {other:?} to iteration {index}"),
            }
        }
        Ok(reports)
    }

    /// Captures the graph again and replays the new one once, under whatever fault is in force.
    pub(super) fn capture_again(
        &mut self,
        cluster: &EmulatedCluster,
        driver: &Mutex<FaultDriver<'_>>,
        job: &mut Job<'_>,
    ) -> Result<()> {
        job.order(|_| Order::Recapture)?;
        let (recapture, reinstantiate) = captured(&job.gather("capturing again", JOIN_BOUND)?)?;
        let index = self.suite.workload.iterations + 1;
        let (replay, _) = self.iterate(cluster, driver, job, index, 1000 + u64::from(index), None)?;
        let baseline = figures::baseline(self.record).context("no baseline")?.median_millis;
        let graph = self.record.graph.get_or_insert_default();
        graph.recapture_millis = Some(recapture);
        graph.reinstantiate_millis = Some(reinstantiate);
        graph.replay_ratio = Some(replay.millis() / baseline);
        graph.replay_wrong = replay.wrong_elements;
        Ok(())
    }
}

/// The slowest rank's times: capture, making it replayable.
fn captured(reports: &[Report]) -> Result<(f64, f64)> {
    let mut slowest = (0.0, 0.0);
    for report in reports {
        let Report::Captured { capture_ms, instantiate_ms } = report else {
            bail!("a rank answered {report:?} to a capture");
        };
        slowest = (f64::max(slowest.0, *capture_ms), f64::max(slowest.1, *instantiate_ms));
    }
    Ok(slowest)
}

/// For how long nothing but control frames has arrived.
struct Silence {
    /// What had arrived when it began.
    at_begin: Flow,
    seen: Flow,
    begin: Instant,
}

impl Silence {
    fn new(arrived: Flow) -> Self {
        Self { at_begin: arrived, seen: arrived, begin: Instant::now() }
    }

    /// Its length, once so much has arrived.
    fn after(&mut self, arrived: Flow) -> Duration {
        let bytes = arrived.bytes.saturating_sub(self.seen.bytes);
        let frames = arrived.packets.saturating_sub(self.seen.packets);
        self.seen = arrived;
        if bytes > frames * CONTROL_FRAME_BYTES {
            *self = Self::new(arrived);
        }
        self.begin.elapsed()
    }
}

/// What has arrived on all data ports: all that a rank could have read.
fn arrived(driver: &Mutex<FaultDriver<'_>>) -> Flow {
    let ports = lock(driver).injector().counters().unwrap_or_default();
    let data = ports.iter().filter(|port| port.nic != MANAGEMENT_NIC);
    data.fold(Flow::default(), |sum, port| Flow {
        packets: sum.packets + port.rx_passed.packets,
        bytes: sum.bytes + port.rx_passed.bytes,
    })
}

fn hang_record(index: u32, silence: &Silence, job: &Job<'_>) -> Result<HangRecord> {
    let (processes, alive) = job.processes();
    ensure!(alive, "nothing moves, and not every rank lives: {}", processes.join(", "));
    let end_ns = at_ns();
    let mut iteration = IterationRecord { index, end_ns, ..IterationRecord::default() };
    for (rank, called) in job.calls().iter().enumerate() {
        let start_ns = called.with_context(|| format!("rank {rank} never called the collective"))?;
        iteration.ranks.insert(rank as u32, Span { start_ns, end_ns });
    }
    iteration.start_ns = iteration.ranks.values().map(|span| span.start_ns).min().unwrap_or(end_ns);
    Ok(HangRecord {
        iteration,
        silent_s: silence.begin.elapsed().as_secs_f64(),
        control_frames: silence.seen.packets - silence.at_begin.packets,
        control_bytes: silence.seen.bytes - silence.at_begin.bytes,
        processes,
    })
}

/// The network that NCCL says it uses.
fn network(log: &str) -> Option<&str> {
    log.lines().find_map(|line| line.split_once("Using network ")).map(|(_, name)| name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_what_nccl_says() {
        let log = "h:1:2 [0] NCCL INFO Assigned NET plugin R2CC to comm\nh:1:2 [0] NCCL INFO Using network R2CC\n";
        assert_eq!(network(log), Some("R2CC"));
        assert_eq!(network("nothing"), None);
    }

    #[test]
    fn control_frames_do_not_break_a_silence_and_payload_does() {
        let flow = |packets, bytes| Flow { packets, bytes };
        let mut silence = Silence::new(flow(10, 15_000));
        silence.begin -= SILENCE;
        assert!(silence.after(flow(10, 15_000)) >= SILENCE);
        assert!(silence.after(flow(13, 15_000 + 42 + 66 + 66)) >= SILENCE);
        assert!(silence.after(flow(15, 15_174 + 66 + 1514)) < SILENCE);
    }
}
