//! 8 bytes: median and 99th percentile beside Open MPI's, beside half of a TCP round trip, and what waiting costs.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric};
use serde::Serialize;

use crate::job::Calls;
use crate::library::{Library, Work};
use crate::tcp;

const BYTES: usize = 8;
const NODES: usize = 3;
/// Most that our median may be of Open MPI's, with one rank a node and with two.
const LIMITS: [(usize, f64); 2] = [(NODES, 1.5), (2 * NODES, 2.0)];
/// Most of one processor that a rank may take while nothing is called.
const IDLE_MOST: f64 = 0.01;
const IDLE_S: u64 = 4;
const JOB_MOST: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Jobs of each library, which take turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Calls of each job.
    #[arg(long, default_value_t = 5000)]
    count: usize,
    /// Ranks; 3 and 6 without it.
    #[arg(long)]
    ranks: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Figures {
    p50_us: f64,
    p99_us: f64,
}

#[derive(Debug, Serialize)]
struct Round {
    ours: Figures,
    open_mpi: Figures,
    tcp_half_round_trip: Figures,
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    ranks: usize,
    rounds: Vec<Round>,
    /// Median of the rounds' ratios of medians.
    ratio: f64,
    most: f64,
}

/// Runs everything; whether the limits are met.
pub(crate) fn compare(options: &Options, out: Option<&Path>) -> Result<bool> {
    ensure!(options.rounds > 0 && options.count > 0, "counts must be positive");
    let mut text = std::io::stdout();
    let spec = ClusterSpec::uniform(NODES, &["mlx5_0", "mlx5_2", "mlx5_3"], None, Fabric::Rails);
    let cluster = EmulatedCluster::build(&spec)?;
    let wanted = |(ranks, _): &(usize, f64)| options.ranks.is_none_or(|wanted| wanted == *ranks);
    let mut rows = Vec::new();
    for (ranks, most) in LIMITS.into_iter().filter(wanted) {
        writeln!(text, "{BYTES} bytes, {ranks} ranks on {NODES} nodes, {} calls a job; us", options.count)?;
        writeln!(text, "round   R2CC p50      p99   Open MPI p50      p99   TCP half p50      p99   R2CC / Open MPI")?;
        let mut rounds = Vec::new();
        for number in 1..=options.rounds {
            let round = round(&cluster, ranks, options.count)?;
            let Round { ours, open_mpi, tcp_half_round_trip: tcp, ratio } = &round;
            writeln!(
                text,
                "{number:5}   {:8.1} {:8.1}   {:12.1} {:8.1}   {:12.1} {:8.1}   {ratio:15.2}",
                ours.p50_us, ours.p99_us, open_mpi.p50_us, open_mpi.p99_us, tcp.p50_us, tcp.p99_us,
            )?;
            rounds.push(round);
        }
        let mut ratios: Vec<f64> = rounds.iter().map(|round| round.ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        let (least, worst) = (ratios[0], ratios[ratios.len() - 1]);
        let verdict = crate::verdict(ratio <= most);
        writeln!(text, "{verdict}    ratio {ratio:.2} ({least:.2} to {worst:.2}), at most {most}\n")?;
        rows.push(Row { ranks, rounds, ratio, most });
    }
    crate::record(out, "latency.json", &rows)?;
    let shares = Library::Ours.start(&cluster, NODES, &Work::Idle(IDLE_S))?.idle(JOB_MOST)?;
    let idle = shares.into_iter().fold(0.0, f64::max);
    let verdict = crate::verdict(idle <= IDLE_MOST);
    let (idle_percent, most_percent) = (idle * 100.0, IDLE_MOST * 100.0);
    writeln!(
        text,
        "{verdict}    idle for {IDLE_S} s: {idle_percent:.2} % of a processor a rank, at most {most_percent} %"
    )?;
    Ok(idle <= IDLE_MOST && rows.iter().all(|row| row.ratio <= row.most))
}

fn round(cluster: &EmulatedCluster, ranks: usize, count: usize) -> Result<Round> {
    let measure = |library: Library| {
        let work = Work::Timed(vec![Calls { bytes: BYTES, warmup: count / 10, count }]);
        let timed = library.start(cluster, ranks, &work)?.timed(JOB_MOST).with_context(|| library.to_string())?;
        let timed = timed.first().with_context(|| format!("{library} measured nothing"))?;
        ensure!(timed.wrong == 0, "{} wrong elements of {library}", timed.wrong);
        Ok(figures(timed.quantile(0.5), timed.quantile(0.99)))
    };
    let (open_mpi, ours) = (measure(Library::OpenMpi)?, measure(Library::Ours)?);
    let (p50, p99) = tcp::half_round_trip(cluster, count)?;
    Ok(Round { ratio: ours.p50_us / open_mpi.p50_us, ours, open_mpi, tcp_half_round_trip: figures(p50, p99) })
}

fn figures(p50: Duration, p99: Duration) -> Figures {
    Figures { p50_us: p50.as_secs_f64() * 1e6, p99_us: p99.as_secs_f64() * 1e6 }
}
