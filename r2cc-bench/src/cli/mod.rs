//! The command line: arguments in, text and exit code out. Data goes to stdout, talk to stderr.
//! [`run`] is the command that runs suites.

mod compare;
mod launch;
mod perf;
mod replay;
mod report;
mod run;
mod simulate;
mod status;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use r2cc_bench::doctor::{self, Health};
use r2cc_bench::report::{ExitCode as Code, comparison_schema, event_schema, summary_schema};
use r2cc_bench::run::{BesideBar, beside};
use r2cc_bench::suite::{self, Suite};
use r2cc_bench::{cluster, goodput, workload};

use run::RunArgs;

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
    /// Measure one collective over a sweep of sizes, with nccl-tests' options and output.
    Perf(perf::PerfArgs),
    /// Run any program as one process a rank on the emulated cluster, through faults.
    Launch(Box<launch::LaunchArgs>),
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
    /// Make the HTML page of a run again, from the folder it left; of a killed run too.
    Report(report::ReportArgs),
    /// Tell a recorded run again, event by event.
    Replay(replay::ReplayArgs),
    /// Compare two recorded runs, or two sets of them: slower, faster, new and fixed failures.
    Compare(compare::CompareArgs),
    /// Say what benches on this machine, and processes that use the library, are doing right now.
    Status(status::StatusArgs),
    /// Run the schedules' plans on a simulated cluster with random NIC failures, beside the bound.
    Simulate(simulate::SimulateArgs),
    /// Print the JSON Schema of suite files, or of what the bench writes.
    Schema {
        /// Which schema.
        #[arg(value_enum, default_value_t = SchemaOf::Suite)]
        of: SchemaOf,
    },
    /// Print what completes this command line in a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Processes that the bench starts itself.
    #[command(hide = true)]
    Worker {
        #[command(subcommand)]
        role: Role,
    },
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
    /// One line of run.jsonl.
    Event,
    /// What `compare --format json` prints.
    Comparison,
}

#[derive(Subcommand)]
enum Role {
    /// One rank of a job; orders on standard input.
    Rank,
    /// One rank of a job on a GPU; orders on standard input.
    GpuRank,
    /// What this machine has for ranks on GPUs.
    GpuSurvey {
        /// The NCCL library.
        #[arg(long)]
        nccl: Option<PathBuf>,
    },
    /// Plain TCP's goodput; orders on standard input.
    Goodput,
    /// Makes and undoes a change, beside the bench that asked for it; orders on standard input.
    Watch {
        /// The change on record.
        record: PathBuf,
    },
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

pub(crate) fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("R2CC_LOG").unwrap_or_else(|_| "warn".into()))
        .with_writer(BesideBar::default)
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
        Command::Run(args) => run::run_suites(&args),
        Command::Perf(args) => perf::perf(&args),
        Command::Launch(args) => launch::launch_program(&args),
        Command::Plan { suites } => {
            with_suites(&suites, |_, suite| suite::plan(suite, suite.default_row()).trim_end().to_owned())
        }
        Command::Validate { suites } => with_suites(&suites, |file, _| format!("{}: valid", file.display())),
        Command::List { folder } => list(&folder),
        Command::Doctor { out, format } => examine(&out, format),
        Command::Report(args) => report::report(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Status(args) => status::status(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "r2cc-bench", &mut script);
            said(String::from_utf8_lossy(&script).trim_end(), Code::Pass)
        }
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Schema { of } => {
            let schema = match of {
                SchemaOf::Suite => suite::schema().clone(),
                SchemaOf::Summary => summary_schema(),
                SchemaOf::Event => event_schema(),
                SchemaOf::Comparison => comparison_schema(),
            };
            said(format_args!("{schema:#}"), Code::Pass)
        }
        Command::Worker { role } => work(role),
    }
}

/// What ends a command before its time: an exit code, and what the user is told.
type Complaint = (Code, String);

/// Has the signals that ask for an end set a flag, so that whatever was made is undone.
fn watch_interrupts(interrupted: &Arc<AtomicBool>) -> Result<(), Complaint> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(interrupted))
            .map_err(|error| (Code::Internal, format!("cannot handle signal {signal}: {error}")))?;
    }
    Ok(())
}

/// An error for the user.
fn complain(error: impl std::fmt::Display) {
    beside(|| eprintln!("r2cc-bench: {error}"));
}

fn with_suites(files: &[PathBuf], each: impl Fn(&Path, &Suite) -> String) -> Code {
    let mut code = Code::Pass;
    for file in files {
        match Suite::load(file) {
            Ok(suite) => code = said(each(file, &suite), code),
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
    said(rows.build().with(tabled::settings::Style::blank()), code)
}

fn examine(out: &Path, format: Format) -> Code {
    let lines = doctor::examine(out);
    let text = match format {
        Format::Json => serde_json::to_string_pretty(&lines).unwrap_or_default(),
        Format::Text => {
            let told = lines.iter().map(|line| {
                let word = format!("{:?}", line.health).to_lowercase();
                let hint = line.fix.as_ref().map_or_else(String::new, |fix| format!("\n      hint: {fix}"));
                format!("{word:5} {}: {}{hint}", line.check, line.found)
            });
            told.collect::<Vec<_>>().join("\n")
        }
    };
    said(text, if doctor::overall(&lines) == Health::Fail { Code::NotReady } else { Code::Pass })
}

fn work(role: Role) -> Code {
    let outcome = match role {
        Role::Rank => workload::rank::serve(),
        Role::GpuRank => workload::gpu_rank::serve(),
        Role::GpuSurvey { nccl } => workload::gpu_rank::survey(nccl.as_deref()),
        Role::Goodput => goodput::serve().map_err(anyhow::Error::from),
        Role::Watch { record } => r2cc_inject::watcher::run(&record).map_err(anyhow::Error::from),
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

/// Writes data to standard output; a reader that has gone away wants no more of it.
fn say(text: impl std::fmt::Display) -> Result<(), std::io::Error> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// [`say`], where nothing follows but the exit code.
fn said(text: impl std::fmt::Display, code: Code) -> Code {
    match say(text) {
        Ok(()) => code,
        Err(error) => {
            complain(format!("standard output: {error}"));
            Code::NotReady
        }
    }
}

/// Arguments as the operating system gave them, for tests of the parser.
#[cfg(test)]
fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("r2cc-bench").chain(args.iter().copied()).map(std::ffi::OsString::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn corruption_names_an_iteration_and_perhaps_a_nan() {
        for good in ["3", "3,nan"] {
            assert!(parse(&["run", "a.yaml", "--corrupt", good]).is_ok(), "{good:?}");
        }
        for bad in ["0", "x", "3,inf", "", ",nan"] {
            assert!(parse(&["run", "a.yaml", "--corrupt", bad]).is_err(), "{bad:?}");
        }
    }
}
