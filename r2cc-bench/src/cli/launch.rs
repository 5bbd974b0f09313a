//! `r2cc-bench launch`: any program, one process a rank, on the emulated cluster.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use clap::Args;
use r2cc_bench::check::record::FaultRecord;
use r2cc_bench::report::{ExitCode as Code, ResultsFolder};
use r2cc_bench::run::{Counted, Cutter, GpuSettings, LEASE, LaunchSettings, LaunchSummary, Loading, launch};
use r2cc_bench::suite::{BitRate, Suite};
use r2cc_inject::fault::{Fault, Op};

use super::run::{BackendArg, lease, ready_to_run};
use super::{complain, say};

#[derive(Args)]
pub(super) struct LaunchArgs {
    /// The suite whose cluster is built: its nodes, NICs and fabric, and the NIC rate and ranks a node of its scale.
    #[arg(long, value_name = "SUITE")]
    cluster: PathBuf,
    /// Which row of the suite's scale counts; default: the first that it has, of host and nccl.
    #[arg(long, value_enum)]
    backend: Option<BackendArg>,
    /// Rate of the NICs in place of the suite's; `none` leaves them unshaped.
    #[arg(long, value_name = "RATE", value_parser = nic_rate)]
    nic_rate: Option<Rate>,
    /// A fault, as suites write it; may be given several times. Calls are counted of the node's first rank, from when
    /// it has loaded the library.
    #[arg(long = "fault", value_name = "FAULT")]
    faults: Vec<Fault>,
    /// The function whose calls count as OP, in place of NCCL's own; may be given several times.
    #[arg(long = "count", value_name = "OP=FILE:SYMBOL", value_parser = counted)]
    counted: Vec<Counted>,
    /// How the program comes by our net plugin for NCCL.
    #[arg(long, value_enum, default_value_t = Loading::None)]
    library: Loading,
    /// Our net plugin for NCCL; default: $R2CC_NCCL_PLUGIN, else ../lib/libr2cc_nccl.so beside this program.
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// A variable of every rank; may be given several times.
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    variables: Vec<(String, OsString)>,
    /// Longest that the program may take, as in 90s; then it is killed and the exit code is 5.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// How long the others may go on once a rank has ended in error.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    grace: Duration,
    /// Folder for logs, event files and launch.json; default: results/launch-<time>/.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Who blocks a port: our programs in the packet path, or the switch.
    #[arg(long, value_enum, default_value_t = Cutter::Xdp)]
    cutter: Cutter,
    /// Seed of random faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave what the ranks print to their logs.
    #[arg(long)]
    quiet: bool,
    /// How long a fault lasts that this process does not renew, at least 100ms.
    #[arg(long, hide = true, value_parser = lease)]
    lease: Option<Duration>,
    /// The program and its arguments, after `--`. It finds its place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    /// MASTER_PORT, and in Open MPI's names.
    #[arg(last = true, required = true)]
    argv: Vec<OsString>,
}

#[derive(Clone, Copy)]
struct Rate(Option<BitRate>);

fn nic_rate(text: &str) -> Result<Rate, String> {
    if text == "none" {
        return Ok(Rate(None));
    }
    text.parse().map(|rate| Rate(Some(rate))).map_err(|error| format!("{error}, or `none`"))
}

fn counted(text: &str) -> Result<Counted, String> {
    let form = || format!("{text:?} has not the form OP=FILE:SYMBOL");
    let (op, place) = text.split_once('=').ok_or_else(form)?;
    let (file, symbol) =
        place.rsplit_once(':').filter(|(file, symbol)| !file.is_empty() && !symbol.is_empty()).ok_or_else(form)?;
    let known = || Op::ALL.map(Op::name).join(", ");
    let op = Op::ALL
        .into_iter()
        .find(|known| known.name() == op)
        .ok_or_else(|| format!("no operation {op:?}; known: {}", known()))?;
    // As a process's mappings name it.
    let binary = PathBuf::from(file).canonicalize().map_err(|error| format!("{file}: {error}"))?;
    Ok(Counted { op, binary, symbol: symbol.to_owned() })
}

fn variable(text: &str) -> Result<(String, OsString), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.into())),
        _ => Err(format!("{text:?} has not the form NAME=VALUE")),
    }
}

pub(super) fn launch_program(args: &LaunchArgs) -> Code {
    let suite = match Suite::load(&args.cluster) {
        Ok(suite) => suite,
        Err(error) => {
            complain(error);
            return Code::Usage;
        }
    };
    let row = args.backend.map_or_else(|| suite.default_row(), BackendArg::row);
    let settings = match settings(args, row) {
        Ok(settings) => settings,
        Err(code) => return code,
    };
    let problems = settings.problems(&suite);
    if !problems.is_empty() {
        problems.iter().for_each(complain);
        return Code::Usage;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    if let Err(code) = ready_to_run(&interrupted) {
        return code;
    }
    let out = args.out.clone().unwrap_or_else(|| ResultsFolder::default_path("launch", SystemTime::now()));
    let folder = match ResultsFolder::open(&out) {
        Ok(folder) => folder,
        Err(error) => {
            complain(error);
            return Code::NotReady;
        }
    };
    match launch(&suite, &settings, folder.path(), &interrupted) {
        Ok(summary) => tell(&summary, &folder),
        Err((code, error)) => {
            complain(format!("{error:#}"));
            code
        }
    }
}

fn settings(args: &LaunchArgs, row: r2cc_bench::suite::ScaleRow) -> Result<LaunchSettings, Code> {
    let program = std::env::current_exe().map_err(|error| {
        complain(error);
        Code::Internal
    })?;
    let gpu = GpuSettings { nccl: None, plugin: args.plugin.clone() };
    if args.library != Loading::None {
        let plugin = gpu.plugin(&program);
        if !plugin.is_file() {
            complain(format!(
                "the net plugin: {} is not there\n  hint: `make build` puts it there; else name it by --plugin PATH",
                plugin.display()
            ));
            return Err(Code::NotReady);
        }
    }
    Ok(LaunchSettings {
        program,
        argv: args.argv.clone(),
        row,
        nic_rate: args.nic_rate.map(|rate| rate.0),
        faults: args.faults.clone(),
        counted: args.counted.clone(),
        loading: args.library,
        gpu,
        variables: args.variables.clone(),
        timeout: args.timeout,
        grace: args.grace,
        cutter: args.cutter,
        seed: args.seed,
        lease: args.lease.unwrap_or(LEASE),
        quiet: args.quiet,
    })
}

/// Writes what became of it: to `launch.json`, and for people.
fn tell(summary: &LaunchSummary, folder: &ResultsFolder) -> Code {
    if let Err(error) = folder.write_json("launch.json", summary) {
        complain(error);
        return Code::NotReady;
    }
    if let Some(why) = &summary.ended_early {
        complain(format!("ended early: {why}"));
    }
    let told = lines(summary).iter().try_for_each(say);
    if let Err(error) = told.and_then(|()| say(format_args!("results: {}", folder.path().display()))) {
        complain(format!("standard output: {error}"));
        return Code::NotReady;
    }
    Code::from_code(summary.exit_code).unwrap_or(Code::Internal)
}

fn lines(summary: &LaunchSummary) -> Vec<String> {
    let mut lines = Vec::new();
    for rank in &summary.ranks {
        let how = match (rank.killed, rank.exit, rank.signal) {
            (true, ..) => "killed".to_owned(),
            (_, Some(code), _) => format!("exit {code}"),
            (_, None, signal) => format!("ended by signal {}", signal.unwrap_or_default()),
        };
        lines.push(format!("rank    {} ({}): {how} after {:.1} s", rank.rank, rank.node, rank.seconds));
    }
    lines.extend(summary.faults.iter().map(|fault| format!("fault   {}", told(fault, summary.started_ns))));
    for repair in &summary.repairs {
        let ms = |ms: Option<f64>| ms.map_or_else(|| "?".to_owned(), |ms| format!("{ms:.1}"));
        lines.push(format!(
            "repair  rank {} towards {} on {}: {}; first drop to detection {} ms, to resumption {} ms more, {} bytes replayed",
            repair.rank,
            repair.peer,
            repair.nic,
            repair.cause,
            ms(repair.first_drop_to_detect_ms),
            ms(repair.detect_to_resume_ms),
            repair.replayed_bytes
        ));
    }
    lines
}

fn told(fault: &FaultRecord, started_ns: u64) -> String {
    let since = |at: u64| at.saturating_sub(started_ns) as f64 / 1e9;
    let Some(fired) = fault.fired_at_ns.filter(|_| fault.fired) else {
        return format!("{}: never fired", fault.spec);
    };
    let end = match (fault.healed_at_ns, fault.healed) {
        (Some(at), _) => format!("ended at {:.3} s", since(at)),
        (None, true) => "ended with the program".to_owned(),
        (None, false) => "LEFT BEHIND".to_owned(),
    };
    format!("{}: fired at {:.3} s, {} packets stopped, {end}", fault.spec, since(fired), fault.packets_dropped)
}
