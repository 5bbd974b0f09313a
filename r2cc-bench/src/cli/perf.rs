//! `r2cc-bench perf`: nccl-tests' options in, its columns out.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use clap::Args;
use r2cc_bench::live::Live;
use r2cc_bench::perf::json::Resumable;
use r2cc_bench::perf::options::{Average, Options, bytes_of, dtypes_of, ops_of};
use r2cc_bench::perf::session::{self, DOCUMENT};
use r2cc_bench::perf::sweep::Corrupt;
use r2cc_bench::perf::{Collective, parse};
use r2cc_bench::report::{ExitCode as Code, FolderError, ResultsFolder};
use r2cc_bench::run::{Progress, exit_code};
use r2cc_bench::suite::{BitRate, ClusterKind, ClusterSpec, Fabric, Suite};
use r2cc_bench::{cluster, perf};

use super::{Complaint, Format, complain, say, watch_interrupts};

#[derive(Args)]
#[command(
    after_help = "Sizes take K, M, G as powers of 1024. Exit codes: 0 done, 2 wrong elements, 4 environment not \
ready, 5 timed out, 64 usage, 130 interrupted. A killed sweep goes on with --resume DIR."
)]
pub(super) struct PerfArgs {
    /// What is measured; nccl-tests' program names are known too.
    #[arg(value_enum, default_value_t = Collective::AllReduce, hide_possible_values = false)]
    collective: Collective,
    /// First size.
    #[arg(short = 'b', long, default_value = "32M", value_parser = bytes_of)]
    minbytes: u64,
    /// Last size.
    #[arg(short = 'e', long, default_value = "32M", value_parser = bytes_of)]
    maxbytes: u64,
    /// Bytes from one size to the next.
    #[arg(short = 'i', long, default_value = "1M", value_parser = bytes_of)]
    stepbytes: u64,
    /// Factor from one size to the next, instead of -i.
    #[arg(short = 'f', long, default_value_t = 1)]
    stepfactor: u64,
    /// Timed iterations.
    #[arg(short = 'n', long, default_value_t = 20)]
    iters: u32,
    /// Iterations before them.
    #[arg(short = 'w', long, default_value_t = 1)]
    warmup_iters: u32,
    /// Iterations after them whose result is compared, element by element; 0: none.
    #[arg(short = 'c', long, default_value_t = 1)]
    check: u32,
    /// Compare the result of the timed iterations too; each then starts on all ranks at once.
    #[arg(long)]
    verify: bool,
    /// Reduction: sum, prod, min, max, avg or all.
    #[arg(short = 'o', long, default_value = "sum", value_parser = |o: &str| ops_of(o).map(Names))]
    op: Names,
    /// Element type, by nccl-tests' or our name, or all.
    #[arg(short = 'd', long, default_value = "float", value_parser = |d: &str| dtypes_of(d).map(Names))]
    datatype: Names,
    /// Root; -1: all in turn.
    #[arg(short = 'r', long, default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    root: i64,
    /// 1: ranks wait for each other after each iteration.
    #[arg(short = 'z', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    blocking: u8,
    /// How often the sweep is run; 0: for ever.
    #[arg(short = 'N', long, default_value_t = 1)]
    run_cycles: u32,
    /// How the ranks' times become one: 0 rank 0's, 1 mean, 2 least, 3 most.
    #[arg(short = 'a', long, value_enum, default_value_t = Average::Mean)]
    average: Average,
    /// 1: times of each iteration.
    #[arg(short = 'I', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    iter_times: u8,
    /// Seconds that half a row may take.
    #[arg(short = 'T', long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Write the JSON there too; where there is such a file already, to FILE.1, FILE.2 and so on.
    #[arg(short = 'J', long, value_name = "FILE")]
    output_file: Option<PathBuf>,
    /// A suite whose cluster is used.
    #[arg(long, value_name = "SUITE")]
    cluster: Option<PathBuf>,
    /// Number of nodes.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: Option<u32>,
    /// Ranks on each node.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks_per_node: Option<u32>,
    /// NICs of each node, by commas.
    #[arg(long, value_delimiter = ',')]
    nics: Option<Vec<String>>,
    /// Rate of each NIC, `200Mbit`, or `none`.
    #[arg(long, value_parser = rate)]
    nic_rate: Option<Rate>,
    /// Folder for results; default: results/<program>-<time>/.
    #[arg(long, conflicts_with = "resume")]
    out: Option<PathBuf>,
    /// Go on with the sweep in this results folder: its options hold, its finished rows stay.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Read an output of nccl-tests or of this command, text or JSON, and print its rows as JSON; runs nothing.
    #[arg(long, value_name = "FILE")]
    read: Option<PathBuf>,
    /// Self-test: damage what a rank receives in this row; must end in exit code 2.
    #[arg(long, value_name = "ROW", value_parser = clap::value_parser!(u32).range(1..))]
    corrupt: Option<u32>,
    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// No progress on standard error.
    #[arg(long)]
    quiet: bool,
}

/// Names that one argument stands for.
#[derive(Clone)]
struct Names(Vec<String>);

/// A rate, or none.
#[derive(Clone, Copy)]
struct Rate(Option<BitRate>);

fn rate(text: &str) -> Result<Rate, String> {
    match text {
        "none" => Ok(Rate(None)),
        _ => {
            text.parse().map(|rate| Rate(Some(rate))).map_err(|error: r2cc_bench::suite::ValueError| error.to_string())
        }
    }
}

pub(super) fn perf(args: &PerfArgs) -> Code {
    if let Some(file) = &args.read {
        return read(file);
    }
    run(args).unwrap_or_else(|(code, error)| {
        complain(error);
        code
    })
}

fn read(file: &Path) -> Code {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            complain(format!("{}: {error}", file.display()));
            return Code::Usage;
        }
    };
    match parse::read(&text) {
        Ok(sweep) => super::said(serde_json::to_string_pretty(&sweep).unwrap_or_default(), Code::Pass),
        Err(error) => {
            complain(format!("{}: {error}", file.display()));
            Code::Usage
        }
    }
}

/// The cluster of suite 01, without a suite that says otherwise.
fn default_cluster() -> (ClusterSpec, Option<BitRate>) {
    let nics = ["mlx5_0", "mlx5_2", "mlx5_3"].map(str::to_owned).to_vec();
    let spec = ClusterSpec { kind: ClusterKind::Emulated, nodes: 3, ranks_per_node: 2, nics, fabric: Fabric::Rails };
    (spec, Some(BitRate(200_000_000)))
}

fn cluster_of(args: &PerfArgs) -> Result<(ClusterSpec, Option<BitRate>), Complaint> {
    let (mut spec, mut nic_rate) = match &args.cluster {
        None => default_cluster(),
        Some(file) => {
            let suite = Suite::load(file).map_err(|error| (Code::Usage, error.to_string()))?;
            if suite.cluster.kind != ClusterKind::Emulated {
                let what = format!("{}: its cluster is not emulated\n  hint: this build has no other", file.display());
                return Err((Code::Usage, what));
            }
            let scale = suite.scale.host.as_ref();
            let mut spec = suite.cluster.clone();
            spec.ranks_per_node = suite.ranks_per_node(r2cc_bench::suite::ScaleRow::Host);
            (spec, scale.and_then(|scale| scale.nic_rate))
        }
    };
    spec.nodes = args.nodes.unwrap_or(spec.nodes);
    spec.ranks_per_node = args.ranks_per_node.unwrap_or(spec.ranks_per_node);
    if let Some(nics) = &args.nics {
        spec.nics.clone_from(nics);
    }
    if let Some(rate) = args.nic_rate {
        nic_rate = rate.0;
    }
    let nics: Vec<&str> = spec.nics.iter().map(String::as_str).collect();
    let built =
        cluster::ClusterSpec::uniform(spec.nodes as usize, &nics, nic_rate.map(|r| r.0), cluster::Fabric::Rails);
    built.validate().map_err(|error| (Code::Usage, error.to_string()))?;
    Ok((spec, nic_rate))
}

fn options_of(args: &PerfArgs, world: usize) -> Options {
    Options {
        collective: args.collective,
        min_bytes: args.minbytes,
        max_bytes: args.maxbytes.max(if args.maxbytes == 32 << 20 { args.minbytes } else { 0 }),
        step_factor: args.stepfactor,
        step_bytes: args.stepbytes,
        iterations: args.iters,
        warmup: args.warmup_iters,
        checks: args.check,
        verify: args.verify,
        dtypes: args.datatype.0.clone(),
        ops: args.op.0.clone(),
        roots: usize::try_from(args.root).map_or_else(|_| (0..world).collect(), |root| vec![root]),
        blocking: args.blocking == 1,
        cycles: args.run_cycles,
        average: args.average,
        per_iteration: args.iter_times == 1,
    }
}

fn fresh(args: &PerfArgs) -> Result<Resumable, Complaint> {
    let (cluster, nic_rate) = cluster_of(args)?;
    let world = (cluster.nodes * cluster.ranks_per_node) as usize;
    let options = options_of(args, world);
    options.validate(world).map_err(|error| (Code::Usage, error.to_string()))?;
    Ok(Resumable {
        version: Resumable::VERSION,
        options,
        cluster,
        nic_rate,
        rows: Vec::new(),
        complete: false,
        args: std::env::args().collect(),
        start_time: session::time_of_day(),
    })
}

fn resumed(folder: &Path) -> Result<Resumable, Complaint> {
    let file = folder.join(DOCUMENT);
    let text = fs::read_to_string(&file).map_err(|error| {
        let hint = "a results folder of `r2cc-bench perf` has this file";
        (Code::Usage, format!("{}: {error}\n  hint: {hint}", file.display()))
    })?;
    let state = Resumable::from_document(&text).map_err(|error| {
        let hint = "it is written by `r2cc-bench perf`, and not to be changed";
        (Code::Usage, format!("{}: {error}\n  hint: {hint}", file.display()))
    })?;
    let world = (state.cluster.nodes * state.cluster.ranks_per_node) as usize;
    let sound = state.options.validate(world).map_err(|error| error.to_string());
    sound.map_err(|error| (Code::Usage, format!("{}: {error}", file.display())))?;
    Ok(state)
}

fn run(args: &PerfArgs) -> Result<Code, Complaint> {
    let not_ready = |error: FolderError| (Code::NotReady, error.to_string());
    let library = r2cc::Settings::from_env().map_err(|error| (Code::Usage, error.to_string()))?;
    let (mut state, out) = match &args.resume {
        Some(folder) => (resumed(folder)?, folder.clone()),
        None => {
            let state = fresh(args)?;
            let default = || ResultsFolder::default_path(state.options.collective.program(), SystemTime::now());
            let out = args.out.clone().unwrap_or_else(default);
            (state, out)
        }
    };
    // Proved to be writable before anything runs.
    let folder = ResultsFolder::open(&out).map_err(not_ready)?;
    let json = args.output_file.as_deref().map(session::claim).transpose().map_err(not_ready)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    watch_interrupts(&interrupted)?;
    let program = std::env::current_exe().map_err(|error| (Code::Internal, error.to_string()))?;
    let settings = session::Settings {
        program,
        json,
        timeout: args.timeout.map(Duration::from_secs),
        corrupt: args.corrupt.map(|row| Corrupt { row: row as usize, seed: 1 }),
        library,
    };
    let live = Live::start();
    live.set(|status| {
        status.suite = format!("perf {}", state.options.collective.name());
        status.results = std::path::absolute(&out).unwrap_or_else(|_| out.clone());
    });
    let progress = Progress::new(args.quiet, Arc::new(live));
    let text = args.format == Format::Text;
    let finished = state.rows.len();
    if args.resume.is_some() {
        progress.note(&format!("resumed: {finished} rows are finished"));
    }
    let mut tell = |line: &str| if text { progress.suspend(|| say(line)) } else { Ok(()) };
    let outcome = if state.complete {
        state
            .rows
            .iter()
            .try_for_each(|row| tell(&perf::text::row(row, state.options.per_iteration)))
            .map_err(Into::into)
    } else {
        session::run(&mut state, &settings, &folder, &progress, &interrupted, &mut tell)
    };
    progress.finish();
    if let Err(error) = outcome {
        let hint = format!(
            "\n  hint: `r2cc-bench perf --resume {}` goes on after its {} finished rows",
            out.display(),
            state.rows.len()
        );
        return Err((exit_code(&error), format!("{error:#}{}", if state.rows.is_empty() { "" } else { &hint })));
    }
    let code = if state.rows.iter().any(|row| row.wrong() > 0) { Code::WrongElements } else { Code::Pass };
    for row in state.rows.iter().filter(|row| row.wrong() > 0) {
        let first = row.halves().find_map(|half| half.first_wrong.as_ref());
        let place = first.map_or_else(String::new, |w| {
            format!(", first on rank {}, element {}: expected {}, found {}", w.rank, w.element, w.expected, w.actual)
        });
        complain(format!(
            "{} of {} bytes: {} wrong elements{place}",
            state.options.collective.name(),
            row.size,
            row.wrong()
        ));
    }
    let written = if text {
        say(format_args!("# results: {}", out.display()))
    } else {
        let document = fs::read_to_string(out.join(DOCUMENT));
        document.and_then(|document| say(document.trim_end()))
    };
    written.map_err(|error| (Code::NotReady, format!("standard output: {error}")))?;
    Ok(code)
}
