//! `r2cc-bench simulate`: arguments in, a table or JSON out.

use clap::{Args, ValueEnum};
use r2cc_bench::report::ExitCode as Code;
use r2cc_bench::simulate::study::{self, Study, StudyError};

use super::{Format, complain, said};

/// Ranks that a study may have.
const RANKS_MAX: u64 = 1024;

#[derive(Args)]
pub(super) struct SimulateArgs {
    /// Nodes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=128))]
    nodes: u64,
    /// Ranks of each node; 1024 ranks in all at most.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks_per_node: u64,
    /// NICs of each node.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=16))]
    nics: u64,
    /// Gigabits a second of each NIC.
    #[arg(long, default_value_t = 10.0, value_parser = speed)]
    nic_gbit: f64,
    /// Which NICs reach each other.
    #[arg(long, value_enum, default_value_t = FabricArg::Rails)]
    fabric: FabricArg,
    /// Bytes that each rank reduces, as in 256MiB.
    #[arg(long, default_value = "256MiB")]
    bytes: bytesize::ByteSize,
    /// NICs lost in each sample, drawn at random.
    #[arg(long, default_value_t = 1)]
    failures: usize,
    /// Samples.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    samples: u64,
    /// Chunks of R2CC-AllReduce.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1024))]
    chunks: u64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Output form.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum FabricArg {
    /// NIC i of a node reaches NIC i of the others.
    Rails,
    /// Any NIC reaches any other.
    Any,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if speed.is_finite() && speed > 0.0 => Ok(speed),
        _ => Err(format!("{text:?} is no speed in Gbit/s")),
    }
}

pub(super) fn simulate(args: &SimulateArgs) -> Code {
    if args.nodes * args.ranks_per_node > RANKS_MAX {
        let ranks = args.nodes * args.ranks_per_node;
        complain(format!("{ranks} ranks; hint: {RANKS_MAX} at most, so fewer --nodes or --ranks-per-node"));
        return Code::Usage;
    }
    let study = Study {
        nodes: args.nodes as usize,
        ranks_per_node: args.ranks_per_node as usize,
        nics: args.nics as usize,
        nic_bits_s: args.nic_gbit * 1e9,
        rails: matches!(args.fabric, FabricArg::Rails),
        bytes: args.bytes.as_u64() as usize,
        failures: args.failures,
        samples: args.samples as usize,
        chunks: args.chunks as usize,
        seed: args.seed,
    };
    match study::run(&study, |sample| tracing::info!(sample, "done")) {
        Ok(findings) => match args.format {
            Format::Text => said(findings.table(), Code::Pass),
            Format::Json => said(serde_json::to_string_pretty(&findings).unwrap_or_default(), Code::Pass),
        },
        Err(error) => {
            let code = if matches!(error, StudyError::Simulate(_)) { Code::Internal } else { Code::Usage };
            complain(error);
            code
        }
    }
}
