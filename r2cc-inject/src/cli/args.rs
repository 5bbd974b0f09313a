//! The arguments and their help.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use r2cc_inject::{Fault, audit};

const EXAMPLES: &str = "\
Examples:
  r2cc-inject plan  'drop@node-1/mlx5_2 from now for 10s' --cluster latest
  r2cc-inject apply 'drop@node-1/mlx5_2 from now for 10s' --cluster latest
  r2cc-inject apply 'flap:300ms/1s@node-2/eth3 from after 2s for 1min' --node node-2=4711 --allow allow.toml
  r2cc-inject status
  r2cc-inject heal --all

Exit codes: 0 done, 4 environment not ready, 6 a fault was left behind, 64 usage, 70 internal,
130 interrupted (healed).";

/// Blocks a NIC of a running job at an exact point, and cannot leave it blocked.
#[derive(Debug, Parser)]
#[command(name = "r2cc-inject", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// The audit log, one JSON line an event
    #[arg(long, global = true, value_name = "FILE", default_value = audit::DEFAULT_PATH)]
    pub(crate) audit_log: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Say what a fault would do, and whether it may; changes nothing
    Plan {
        #[command(flatten)]
        fault: FaultArgs,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Carry a fault out; ends when the fault does
    Apply {
        #[command(flatten)]
        fault: FaultArgs,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Show every fault on this machine, whoever made it and whether they answer or not
    Status {
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// End faults of other processes, without their help
    Heal {
        /// Every fault on this machine
        #[arg(long, required_unless_present = "pid")]
        all: bool,
        /// Only those of this process
        #[arg(long, conflicts_with = "all")]
        pid: Option<u32>,
    },
    /// Check what this machine can do, and that no fault was left behind
    Doctor {
        /// Check this allow file too
        #[arg(long, value_name = "FILE")]
        allow: Option<PathBuf>,
    },
    /// Show the audit log
    Audit {
        /// Only so many entries, the latest
        #[arg(long, value_name = "N")]
        last: Option<usize>,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// The process that undoes a change; started by apply
    #[command(hide = true)]
    Watch { record: PathBuf },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct FaultArgs {
    #[arg(help = format!("{}\nKIND: drop, loss:1%, flap:300ms/1s (down/up), rate:20Mbit, link-down", Fault::GRAMMAR))]
    pub(crate) fault: String,
    /// The emulated cluster that the node belongs to
    #[arg(long, value_name = "ID|latest")]
    pub(crate) cluster: Option<String>,
    /// A node by a process in its network namespace
    #[arg(long = "node", alias = "netns-pid", value_name = "NAME=PID", value_parser = named_pid)]
    pub(crate) nodes: Vec<(String, u32)>,
    /// A file naming interfaces that may be touched
    #[arg(long, value_name = "FILE")]
    pub(crate) allow: Option<PathBuf>,
    /// Touch also what carries the default route or this SSH connection
    #[arg(long)]
    pub(crate) danger_default_route: bool,
    /// The fault ends so long after this program was last heard of
    #[arg(long, default_value = "5s", value_parser = lease)]
    pub(crate) lease: Duration,
    /// End the fault so long after arming, whatever else; needed unless it says for DURATION
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub(crate) max: Option<Duration>,
    /// Which packets a loss drops, and which share of +P%..P% is taken
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The process whose calls OP#N counts
    #[arg(long)]
    pub(crate) pid: Option<u32>,
    /// The executable or library with the function [default: the process's executable]
    #[arg(long, requires = "pid", value_name = "FILE")]
    pub(crate) binary: Option<PathBuf>,
    /// The function that is OP [default: ncclAllReduce and so on, or r2cc_collective_begin]
    #[arg(long, requires = "pid")]
    pub(crate) symbol: Option<String>,
    /// Count only calls whose first argument is this
    #[arg(long, requires = "pid", value_name = "NUMBER")]
    pub(crate) arg0: Option<u64>,
    /// Bytes that the port receives in one healthy collective; for +P% and `at wire`
    #[arg(long, value_name = "BYTES")]
    pub(crate) collective_bytes: Option<u64>,
}

fn named_pid(text: &str) -> Result<(String, u32), String> {
    let (name, pid) = text.split_once('=').ok_or("expected NAME=PID")?;
    let pid = pid.parse().map_err(|_| format!("\"{pid}\" is no process id"))?;
    if name.is_empty() { Err("expected NAME=PID".to_owned()) } else { Ok((name.to_owned(), pid)) }
}

/// Shorter leases could not be renewed in time on a busy machine; longer ones are none.
fn lease(text: &str) -> Result<Duration, String> {
    let lease = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&lease) {
        Ok(lease)
    } else {
        Err("a lease is 100ms to 1min".to_owned())
    }
}
