//! `r2cc-bench run`: suites in, results folders out, the worst exit code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};
use r2cc_bench::check::record::{FaultRecord, IterationRecord};
use r2cc_bench::check::{self, RunRecord};
use r2cc_bench::cluster;
use r2cc_bench::live::{self, Live};
use r2cc_bench::report::{self, Archive, ExitCode as Code, FolderError, Paint, Reference, ResultsFolder, Summary};
use r2cc_bench::run::{self, Cutter, GpuSettings, LEASE, Progress, Settings};
use r2cc_bench::suite::{LibrarySpec, Mode, Run, ScaleRow, Suite, Timing};
use r2cc_bench::workload::support::unsupported;

use super::{Complaint, Format, complain, say, watch_interrupts};

#[derive(Args)]
pub(super) struct RunArgs {
    /// Suite files.
    #[arg(required = true)]
    suites: Vec<PathBuf>,
    /// What runs the collective; default: the first that the suite has a size for, of host and nccl.
    #[arg(long, value_enum)]
    backend: Option<BackendArg>,
    /// The library under test, in place of what the suite says; with `none` a cut makes NCCL hang, which is expected then.
    #[arg(long, value_enum, value_name = "MODE")]
    library: Option<LibraryArg>,
    /// The NCCL library; default: one that is loaded already, else libnccl.so.2 on the search path.
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    /// Our net plugin for NCCL; default: $R2CC_NCCL_PLUGIN, else ../lib/libr2cc_nccl.so beside this program.
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Folder for results; default: results/<suite>-<time>/.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run each suite this often; the worst run's figures are on top of the summary.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Self-test: damage an element that a rank receives in this iteration (`3` flips a bit, `3,nan` writes a NaN); must end in exit code 2.
    #[arg(long, value_name = "ITER[,nan]", value_parser = corruption)]
    corrupt: Option<(u32, bool)>,
    /// Whether failing timing checks count; default: what the suite says.
    #[arg(long, value_enum)]
    timing: Option<TimingArg>,
    /// Judge only checks of this name.
    #[arg(long, value_name = "CHECK")]
    only: Option<String>,
    /// Who blocks a port: our programs in the packet path, or the switch.
    #[arg(long, value_enum, default_value_t = Cutter::Xdp)]
    cutter: Cutter,
    /// Seed of whatever is random: lost packets, damage, where a fault of a range falls; each repetition adds one.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Pack the results folders into this file as well.
    #[arg(long, value_name = "FILE.tar.zst")]
    archive: Option<PathBuf>,
    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// No progress on standard error.
    #[arg(long)]
    quiet: bool,
    /// How long a fault lasts that this process does not renew, at least 100ms.
    #[arg(long, hide = true, value_parser = lease)]
    lease: Option<Duration>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum BackendArg {
    /// The native engine on host memory.
    Host,
    /// NCCL on a GPU.
    Nccl,
}

impl BackendArg {
    pub(super) fn row(self) -> ScaleRow {
        match self {
            Self::Host => ScaleRow::Host,
            Self::Nccl => ScaleRow::Nccl,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum LibraryArg {
    /// Not loaded.
    None,
    /// The load is spread over all surviving NICs.
    Balance,
}

#[derive(Clone, Copy, ValueEnum)]
enum TimingArg {
    Enforced,
    Advisory,
}

fn corruption(text: &str) -> Result<(u32, bool), String> {
    let (iteration, nan) = match text.split_once(',') {
        None => (text, false),
        Some((iteration, "nan")) => (iteration, true),
        Some((_, other)) => return Err(format!("{other:?} after the comma; only `nan` may stand there")),
    };
    match iteration.parse() {
        Ok(n) if n > 0 => Ok((n, nan)),
        _ => Err(format!("{iteration:?} is no iteration; they count from 1")),
    }
}

pub(super) fn lease(text: &str) -> Result<Duration, String> {
    let lease = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if lease < Duration::from_millis(100) {
        return Err("shorter than a busy machine needs to renew it".to_owned());
    }
    Ok(lease)
}

pub(super) fn run_suites(args: &RunArgs) -> Code {
    let suites = match read(args) {
        Ok(suites) => suites,
        Err(code) => return code,
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    if let Err(code) = ready_to_run(&interrupted) {
        return code;
    }
    // Before anything runs: hours of results must not end at a folder that cannot be written.
    let mut archive = match args.archive.as_deref().map(Archive::create).transpose() {
        Ok(archive) => archive,
        Err(error) => {
            complain(error);
            return Code::NotReady;
        }
    };
    let live = Arc::new(Live::start());
    let many = suites.len() > 1;
    let mut codes = Vec::new();
    for (position, (file, suite)) in suites.iter().enumerate() {
        let out = match (&args.out, many) {
            (Some(out), true) => out.join(&suite.name),
            (Some(out), false) => out.clone(),
            (None, _) => ResultsFolder::default_path(&suite.name, SystemTime::now()),
        };
        live.set(|status| {
            status.suite = suite.name.clone();
            status.suites = (position as u32 + 1, suites.len() as u32);
            status.results = std::path::absolute(&out).unwrap_or_else(|_| out.clone());
        });
        let progress = Progress::new(args.quiet, Arc::clone(&live));
        codes.push(run_suite(args, file, suite, &out, &progress, &interrupted).unwrap_or_else(|(code, error)| {
            complain(error);
            code
        }));
        drop(progress);
        if let Some(Err(error)) = archive.as_mut().map(|archive| archive.add(&out)) {
            complain(error);
            codes.push(Code::NotReady);
        }
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    if let Some(Err(error)) = archive.map(Archive::finish) {
        complain(error);
        codes.push(Code::NotReady);
    }
    Code::worst(codes)
}

/// Notes interruptions, and clears away what a bench that was killed has left.
pub(super) fn ready_to_run(interrupted: &Arc<AtomicBool>) -> Result<(), Code> {
    watch_interrupts(interrupted).map_err(|(code, error)| {
        complain(error);
        code
    })?;
    // A bench that was killed earlier leaves its state file, and the records of its changes; nothing else can be left.
    if let Err(error) = cluster::sweep() {
        tracing::warn!(%error, "sweep");
    }
    match r2cc_inject::watcher::sweep() {
        Ok(swept) => swept.iter().for_each(|fault| tracing::warn!("swept {fault}, of a process that was killed")),
        Err(error) => tracing::warn!(%error, "sweep"),
    }
    if let Err(error) = live::sweep() {
        tracing::warn!(%error, "sweep");
    }
    Ok(())
}

/// Reads and judges everything before anything runs; complains about each problem.
fn read(args: &RunArgs) -> Result<Vec<(&Path, Suite)>, Code> {
    let mut suites = Vec::new();
    let mut sound = true;
    let mut refuse = |error: String| {
        complain(error);
        sound = false;
    };
    for file in &args.suites {
        match Suite::load(file) {
            Ok(suite) if args.library.is_some() && !suite.rows.is_empty() => {
                let file = file.display();
                refuse(format!("--library: {file} has rows, each with a library of its own\n  hint: leave it out"));
            }
            Ok(mut suite) => {
                match args.library {
                    Some(LibraryArg::None) => suite.library = LibrarySpec { mode: Mode::None, ..suite.library },
                    Some(LibraryArg::Balance) => suite.library = LibrarySpec { mode: Mode::Balance, ..suite.library },
                    None => {}
                }
                let row = row(args, &suite);
                suites.push((file.as_path(), suite.on_row(row)));
            }
            Err(error) => refuse(error.to_string()),
        }
    }
    for (file, suite) in &suites {
        let file = file.display();
        let mut reasons = Vec::new();
        for run in suite.runs() {
            for reason in unsupported(&run.suite, row(args, suite), args.cutter) {
                if !reasons.contains(&reason) {
                    refuse(format!("{file}: {reason}"));
                    reasons.push(reason);
                }
            }
        }
        let iterations = suite.workload.iterations;
        if let Some((iteration, _)) = args.corrupt.filter(|(iteration, _)| *iteration > iterations) {
            refuse(format!("--corrupt {iteration}: {file} has {iterations} iterations"));
        }
        if let Some(only) = &args.only {
            let names: BTreeSet<String> = suite.runs().iter().flat_map(|run| check_names(&run.suite)).collect();
            if !names.contains(only) {
                refuse(format!(
                    "--only {only}: {file} has no such check\n  hint: it has {}",
                    Vec::from_iter(names).join(", ")
                ));
            }
        }
        let namesakes = suites.iter().filter(|(_, other)| other.name == suite.name).count();
        if namesakes > 1 {
            refuse(format!("{file}: {namesakes} of these suites are named {}: their results would be one", suite.name));
        }
    }
    if sound { Ok(suites) } else { Err(Code::Usage) }
}

/// The row of `scale` that applies.
fn row(args: &RunArgs, suite: &Suite) -> ScaleRow {
    args.backend.map_or_else(|| suite.default_row(), BackendArg::row)
}

/// Names of the checks that a run of `suite` is judged by, once its baseline is measured and its faults have fired.
fn check_names(suite: &Suite) -> BTreeSet<String> {
    let fired = FaultRecord { fired: true, asked_bytes: Some(0), ..FaultRecord::default() };
    let second = IterationRecord { end_ns: 1_000_000_000, ..IterationRecord::default() };
    let record = RunRecord {
        baseline: vec![second; suite.workload.baseline as usize],
        faults: vec![fired; suite.faults.len()],
        ..RunRecord::default()
    };
    let names = check::evaluate(suite, &record, suite.timing).into_iter().flat_map(|check| {
        // As `--only` takes it: whole, or its first word.
        let key = check.name.split(' ').next().unwrap_or_default().to_owned();
        [key, check.name]
    });
    names.collect()
}

fn run_suite(
    args: &RunArgs,
    file: &Path,
    suite: &Suite,
    out: &Path,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<Code, Complaint> {
    let not_ready = |error: FolderError| (Code::NotReady, error.to_string());
    // What a run could not record, it could not record for want of room or rights.
    let unrecorded = |error: anyhow::Error| {
        let code = if error.is::<FolderError>() { Code::NotReady } else { Code::Internal };
        (code, format!("{error:#}"))
    };
    let folder = ResultsFolder::open(out).map_err(not_ready)?;
    // Until this run has a verdict there is none in its folder.
    ["summary.json", "junit.xml", super::report::PAGE]
        .iter()
        .for_each(|name| drop(std::fs::remove_file(out.join(name))));
    let mut log = folder.event_log().map_err(not_ready)?;
    let program = std::env::current_exe().map_err(|error| (Code::Internal, error.to_string()))?;
    let timing = match args.timing {
        Some(TimingArg::Enforced) => Timing::Enforced,
        Some(TimingArg::Advisory) => Timing::Advisory,
        None => suite.timing,
    };
    let mut runs = Vec::new();
    'runs: for repetition in 1..=args.repeat {
        // Healthy iterations of this repetition's rows.
        let mut baselines = BTreeMap::new();
        for Run { row: row_name, against, suite: run } in suite.runs() {
            let settings = Settings {
                program: program.clone(),
                row: row(args, suite),
                gpu: GpuSettings { nccl: args.nccl.clone(), plugin: args.plugin.clone() },
                timing,
                corrupt: args.corrupt,
                only: args.only.clone(),
                cutter: args.cutter,
                seed: args.seed.wrapping_add(u64::from(repetition) - 1),
                lease: args.lease.unwrap_or(LEASE),
                row_name,
                baseline: against.and_then(|row| baselines.get(&row).cloned()),
            };
            progress.live().set(|status| status.repetition = (repetition, args.repeat));
            if args.repeat > 1 {
                progress.note(&format!("{}: run {repetition} of {}", suite.name, args.repeat));
            }
            if let Some(name) = &settings.row_name {
                progress.note(&format!("{}: row {name}", suite.name));
            }
            let (summary, record) =
                run::run(&run, &settings, repetition, folder.path(), &mut log, progress, interrupted)
                    .map_err(unrecorded)?;
            if let Some(name) = settings.row_name {
                baselines.insert(name, record.baseline);
            }
            let stop = [Code::Interrupted, Code::NotReady].iter().any(|code| code.code() == summary.exit_code);
            runs.push(summary);
            if stop {
                break 'runs;
            }
        }
    }
    progress.finish();
    let summary = Summary::of_repeats(suite, runs).ok_or((Code::Internal, "no run".to_owned()))?;
    folder.write_json("summary.json", &summary).map_err(not_ready)?;
    let junit = report::junit(&summary).map_err(|error| (Code::Internal, error.to_string()))?;
    folder.write("junit.xml", junit.as_bytes()).map_err(not_ready)?;
    super::report::write_page(&folder)?;
    tell(args, file, suite, &summary, folder.path())
        .map_err(|error| (Code::NotReady, format!("standard output: {error}")))?;
    Ok(Code::from_code(summary.exit_code).unwrap_or(Code::Internal))
}

fn tell(args: &RunArgs, file: &Path, suite: &Suite, summary: &Summary, out: &Path) -> Result<(), std::io::Error> {
    if let Some(why) = &summary.ended_early {
        complain(format!("{}: the run ended early: {why}", file.display()));
    }
    if args.format == Format::Json {
        return say(serde_json::to_string_pretty(summary)?);
    }
    // A run that measured nothing has no table to show.
    if !summary.baseline.millis.is_empty() || !summary.sweep.is_empty() {
        say(format_args!("{}: {}\n", suite.name, suite.purpose))?;
        say(report::run_text(summary, Paint::for_stdout()))?;
        if let Some(name) = &suite.reference {
            match Reference::load(file, name) {
                Ok(reference) => say(format_args!("beside the published run:\n{}", reference.beside(summary)))?,
                Err(error) => complain(error),
            }
        }
    }
    say(format_args!("results: {}", out.display()))
}
