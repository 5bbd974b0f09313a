//! AllReduces beside those of other libraries, on the same emulated cluster and in the same run.
//!
//! `cargo bench -p r2cc-bench --bench peers -- latency`: 8 bytes beside Open MPI, with three ranks and six.
//! `... -- bandwidth`: large buffers beside Open MPI's rings and Gloo, with NICs of 200 Mbit/s and without shaping.
//! `... -- faults`: what becomes of each when a NIC dies. Jobs of the libraries alternate, and every limit is one within
//! the run. `make compare-peers` runs all three.

mod bandwidth;
mod faults;
mod job;
mod latency;
mod library;
mod rank;
mod tcp;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// AllReduces beside those of other libraries.
#[derive(Parser)]
#[command(name = "peers")]
struct Options {
    #[command(subcommand)]
    part: Part,
    /// Exit with 1 when a limit is not met.
    #[arg(long, global = true)]
    enforce: bool,
    /// Write the figures into this folder.
    #[arg(long, global = true)]
    out: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Part {
    /// 8 bytes beside Open MPI.
    Latency(latency::Options),
    /// Large buffers beside Open MPI and Gloo.
    Bandwidth(bandwidth::Options),
    /// A NIC dies under each library.
    Faults(faults::Options),
    /// One rank of ours, as the comparison starts it.
    #[command(hide = true)]
    Rank { config: String },
    /// The remote shell of MPI's launcher.
    #[command(hide = true)]
    Enter {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        argv: Vec<String>,
    },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(filter()).with_writer(std::io::stderr).init();
    let options = Options::parse();
    let out = options.out.as_deref();
    let outcome = match options.part {
        Part::Latency(part) => latency::compare(&part, out),
        Part::Bandwidth(part) => bandwidth::compare(&part, out),
        Part::Faults(part) => faults::compare(&part, out),
        Part::Rank { config } => rank::run(&config).map(|()| true),
        Part::Enter { argv } => enter(&argv),
    };
    match outcome {
        Ok(good) if good || !options.enforce => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            // Nobody is left to tell when standard error is closed.
            let _ = writeln!(std::io::stderr(), "peers: {error:#}");
            ExitCode::from(4)
        }
    }
}

fn filter() -> tracing_subscriber::EnvFilter {
    tracing_subscriber::EnvFilter::try_from_env("R2CC_LOG").unwrap_or_else(|_| "warn".into())
}

/// `enter [options] HOST COMMAND...`, as `ssh` is called: the words of the command are for a shell.
fn enter(argv: &[String]) -> Result<bool> {
    let mut words = argv.iter().skip_while(|word| word.starts_with('-'));
    let host = words.next().context("no host")?;
    let command: Vec<&str> = words.map(String::as_str).collect();
    let cluster = std::env::var(library::CLUSTER).context("started outside a comparison")?;
    let node = library::node_at(host).with_context(|| format!("{host} is no node's address"))?;
    let argv = ["/bin/sh".to_owned(), "-c".to_owned(), command.join(" ")];
    match r2cc_bench::cluster::enter(&node, Some(&cluster), &argv)? {}
}

/// How a limit is printed.
fn verdict(met: bool) -> &'static str {
    if met { "PASS" } else { "FAIL" }
}

/// Writes figures as JSON, if a folder was asked for.
fn record(folder: Option<&Path>, name: &str, figures: &impl serde::Serialize) -> Result<()> {
    let Some(folder) = folder else { return Ok(()) };
    std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let file = folder.join(name);
    std::fs::write(&file, serde_json::to_vec_pretty(figures)?).with_context(|| format!("write {}", file.display()))
}
