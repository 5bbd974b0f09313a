//! The command line: arguments in, text and exit code out. Data goes to stdout, talk to stderr.
#![allow(clippy::print_stdout, reason = "standard output is where a command's data belongs")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use clap::{Args, Parser, Subcommand, ValueEnum};
use r2cc_bench::doctor::{self, Health};
use r2cc_bench::report::{self, ExitCode as Code, Paint, Reference, ResultsFolder, Summary};
use r2cc_bench::run::{self, Cutter, Progress, Settings};
use r2cc_bench::suite::{self, Suite, Timing};
use r2cc_bench::{cluster, goodput, workload};

/// Runs suites of collectives through NIC failures and checks every element and every counter.
#[derive(Parser)]
#[command(name = "r2cc-bench", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 pass, 1 an expectation failed, 2 wrong elements, 3 inconclusive, \
4 environment not ready, 5 timed out, 6 a fault was left behind, 64 usage or invalid suite, 70 internal, \
130 interrupted (healed).";

#[derive(Subcommand)]
enum Command {
    /// Run suites and judge them.
    Run(RunArgs),
    /// Say what a suite would do; needs no rights.
    Plan {
        /// Suite files.
        #[arg(required = true)]
        suites: Vec<PathBuf>,
    },
    /// Check suite files and report every problem with its place.
    Validate {
        /// Suite files.
        #[arg(required = true)]
        suites: Vec<PathBuf>,
    },
    /// List the suites of a folder.
    List {
        /// The folder.
        #[arg(default_value = "suites")]
        folder: PathBuf,
    },
    /// Check whether this machine can run the emulated cluster; find leftovers.
    Doctor {
        /// Where results would go.
        #[arg(long, default_value = "results")]
        out: PathBuf,
        /// Output form.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Print the JSON Schema of suite files or of summary.json.
    Schema {
        /// Which schema.
        #[arg(value_enum, default_value_t = SchemaOf::Suite)]
        of: SchemaOf,
    },
    /// Processes that the bench starts itself.
    #[command(hide = true)]
    Worker {
        #[command(subcommand)]
        role: Role,
    },
}

#[derive(Args)]
struct RunArgs {
    /// Suite files.
    #[arg(required = true)]
    suites: Vec<PathBuf>,
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
    /// Seed of whatever is random: lost packets, damage.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// No progress on standard error.
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Clone, Copy, ValueEnum)]
enum SchemaOf {
    Suite,
    Summary,
}

#[derive(Clone, Copy, ValueEnum)]
enum TimingArg {
    Enforced,
    Advisory,
}

#[derive(Subcommand)]
enum Role {
    /// One rank of a job; orders on standard input.
    Rank,
    /// Plain TCP's goodput; orders on standard input.
    Goodput,
    /// Run a command inside a node of a running cluster.
    Enter {
        /// The node.
        node: String,
        /// Identity of the cluster; default: the youngest.
        #[arg(long)]
        cluster: Option<String>,
        /// The command.
        #[arg(last = true, required = true)]
        argv: Vec<String>,
    },
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

pub(crate) fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("R2CC_LOG").unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .init();
    let code = match Cli::try_parse() {
        Ok(cli) => dispatch(cli.command),
        Err(error) => {
            // A closed standard output is no reason for another error.
            let _ = error.print();
            if error.use_stderr() { Code::Usage } else { Code::Pass }
        }
    };
    ExitCode::from(u8::try_from(code.code()).unwrap_or(u8::MAX))
}

fn dispatch(command: Command) -> Code {
    match command {
        Command::Run(args) => run_suites(&args),
        Command::Plan { suites } => with_suites(&suites, |_, suite| print!("{}", suite::plan(suite, suite.default_row()))),
        Command::Validate { suites } => with_suites(&suites, |file, _| println!("{}: valid", file.display())),
        Command::List { folder } => list(&folder),
        Command::Doctor { out, format } => examine(&out, format),
        Command::Schema { of } => {
            let schema = match of {
                SchemaOf::Suite => suite::schema().clone(),
                SchemaOf::Summary => serde_json::to_value(schemars::schema_for!(Summary)).unwrap_or_default(),
            };
            println!("{schema:#}");
            Code::Pass
        }
        Command::Worker { role } => work(role),
    }
}

/// An error for the user.
fn complain(error: impl std::fmt::Display) {
    eprintln!("r2cc-bench: {error}");
}

fn with_suites(files: &[PathBuf], each: impl Fn(&Path, &Suite)) -> Code {
    let mut code = Code::Pass;
    for file in files {
        match Suite::load(file) {
            Ok(suite) => each(file, &suite),
            Err(error) => {
                complain(error);
                code = Code::Usage;
            }
        }
    }
    code
}

fn list(folder: &Path) -> Code {
    let listed = match suite::list(folder) {
        Ok(listed) => listed,
        Err(error) => {
            complain(error);
            return Code::Usage;
        }
    };
    let mut rows = tabled::builder::Builder::default();
    rows.push_record(["file", "purpose"]);
    let mut code = Code::Pass;
    for entry in listed {
        let purpose = match entry.suite {
            Ok(suite) => suite.purpose,
            Err(_) => {
                code = Code::Usage;
                "invalid: see `r2cc-bench validate`".to_owned()
            }
        };
        rows.push_record([entry.file.display().to_string(), purpose]);
    }
    println!("{}", rows.build().with(tabled::settings::Style::blank()));
    code
}

fn examine(out: &Path, format: Format) -> Code {
    let lines = doctor::examine(out);
    match format {
        Format::Json => println!("{}", serde_json::to_string_pretty(&lines).unwrap_or_default()),
        Format::Text => {
            for line in &lines {
                let word = format!("{:?}", line.health).to_lowercase();
                println!("{word:5} {}: {}", line.check, line.found);
                if let Some(fix) = &line.fix {
                    println!("      hint: {fix}");
                }
            }
        }
    }
    if doctor::overall(&lines) == Health::Fail { Code::NotReady } else { Code::Pass }
}

fn work(role: Role) -> Code {
    let outcome = match role {
        Role::Rank => workload::rank::serve(),
        Role::Goodput => goodput::serve().map_err(anyhow::Error::from),
        Role::Enter { node, cluster: id, argv } => {
            cluster::enter(&node, id.as_deref(), &argv).map(|never| match never {}).map_err(anyhow::Error::from)
        }
    };
    match outcome {
        Ok(()) => Code::Pass,
        Err(error) => {
            complain(format!("{error:#}"));
            Code::Failed
        }
    }
}

fn run_suites(args: &RunArgs) -> Code {
    let mut suites = Vec::new();
    for file in &args.suites {
        match Suite::load(file) {
            Ok(suite) => suites.push((file, suite)),
            Err(error) => complain(error),
        }
    }
    if suites.len() < args.suites.len() {
        return Code::Usage;
    }
    if let (Some((iteration, _)), Some((file, suite))) = (args.corrupt, suites.first())
        && suites.iter().any(|(_, suite)| iteration > suite.workload.iterations)
    {
        complain(format!("--corrupt {iteration}: {} has {} iterations", file.display(), suite.workload.iterations));
        return Code::Usage;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        if let Err(error) = signal_hook::flag::register(signal, Arc::clone(&interrupted)) {
            complain(format!("cannot handle signal {signal}: {error}"));
            return Code::Internal;
        }
    }
    // A bench that was killed earlier leaves its state file; nothing else can be left.
    if let Err(error) = cluster::sweep() {
        tracing::warn!(%error, "sweep");
    }
    let many = suites.len() > 1;
    let codes = suites.iter().map(|(file, suite)| {
        let out = match (&args.out, many) {
            (Some(out), true) => out.join(&suite.name),
            (Some(out), false) => out.clone(),
            (None, _) => ResultsFolder::default_path(&suite.name, SystemTime::now()),
        };
        run_suite(args, file, suite, &out, &interrupted).unwrap_or_else(|(code, error)| {
            complain(error);
            code
        })
    });
    Code::worst(codes)
}

type Complaint = (Code, String);

fn run_suite(args: &RunArgs, file: &Path, suite: &Suite, out: &Path, interrupted: &AtomicBool) -> Result<Code, Complaint> {
    let not_ready = |error: report::FolderError| (Code::NotReady, error.to_string());
    let internal = |error: anyhow::Error| (Code::Internal, format!("{error:#}"));
    let folder = ResultsFolder::open(out).map_err(not_ready)?;
    let mut log = folder.event_log().map_err(not_ready)?;
    let program = std::env::current_exe().map_err(|error| (Code::Internal, error.to_string()))?;
    let progress = Progress::new(args.quiet);
    let timing = match args.timing {
        Some(TimingArg::Enforced) => Timing::Enforced,
        Some(TimingArg::Advisory) => Timing::Advisory,
        None => suite.timing,
    };
    let mut runs = Vec::new();
    for repetition in 1..=args.repeat {
        let settings = Settings {
            program: program.clone(),
            timing,
            corrupt: args.corrupt,
            only: args.only.clone(),
            cutter: args.cutter,
            seed: args.seed + u64::from(repetition) - 1,
        };
        if args.repeat > 1 {
            progress.note(&format!("{}: run {repetition} of {}", suite.name, args.repeat));
        }
        let summary =
            run::run(suite, &settings, repetition, folder.path(), &mut log, &progress, interrupted).map_err(internal)?;
        let stop = summary.exit_code == Code::Interrupted.code() || summary.exit_code == Code::NotReady.code();
        runs.push(summary);
        if stop {
            break;
        }
    }
    progress.finish();
    let summary = run::combine(suite, runs).ok_or((Code::Internal, "no run".to_owned()))?;
    folder.write_json("summary.json", &summary).map_err(not_ready)?;
    let junit = report::junit(&summary).map_err(|error| (Code::Internal, error.to_string()))?;
    folder.write("junit.xml", junit.as_bytes()).map_err(not_ready)?;
    match args.format {
        Format::Json => println!("{}", serde_json::to_string_pretty(&summary).unwrap_or_default()),
        Format::Text => {
            println!("{}: {}\n", suite.name, suite.purpose);
            println!("{}", report::run_text(&summary, Paint::for_stdout()));
            if let Some(why) = &summary.ended_early {
                eprintln!("r2cc-bench: the run ended early: {why}");
            }
            if let Some(name) = &suite.reference {
                match Reference::load(file, name) {
                    Ok(reference) => println!("beside the published run:\n{}", reference.beside(&summary)),
                    Err(error) => complain(error),
                }
            }
            println!("results: {}", folder.path().display());
        }
    }
    Ok(Code::from_code(summary.exit_code).unwrap_or(Code::Internal))
}

/// Arguments as the operating system gave them, for tests of the parser.
#[cfg(test)]
fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("r2cc-bench").chain(args.iter().copied()).map(OsString::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn corruption_names_an_iteration_and_perhaps_a_nan() {
        assert_eq!(corruption("3"), Ok((3, false)));
        assert_eq!(corruption("3,nan"), Ok((3, true)));
        for bad in ["0", "x", "3,inf", "", ",nan"] {
            assert!(corruption(bad).is_err(), "{bad:?}");
            assert!(parse(&["run", "a.yaml", "--corrupt", bad]).is_err(), "{bad:?}");
        }
    }
}
