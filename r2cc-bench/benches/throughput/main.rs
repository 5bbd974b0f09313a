//! Throughput without shaping: an AllReduce of two ranks in two namespaces beside plain sockets that move and add
//! the same bytes with no protocol.
//!
//! `cargo bench -p r2cc-bench --bench throughput [-- --enforce] [--out DIR]`. The baseline's connections, pieces,
//! threads and buffers are the best of a sweep that is printed. That its sockets are used well is shown beside iperf3
//! over as many connections: there the baseline, like iperf3, only receives and looks at nothing. What remains
//! between that and the baseline is memory: iperf3 sends one small buffer again and again, out of the cache.
//! Measurements alternate, and every figure is a ratio within the run. Small-message latency comes last.

mod iperf;
mod orders;
mod plain;
mod ranks;
mod worker;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric};
use serde_json::json;

use orders::Shape;
use ranks::{Ranks, Timing};

/// Least share of the baseline's rate, and of iperf3's where the baseline only receives, that `--enforce` accepts.
const SHARE_LEAST: f64 = 0.9;
const MIB: usize = 1 << 20;
/// Shapes of the sweep that are tried again.
const FINALISTS: usize = 6;

/// Throughput and latency beside plain sockets.
#[derive(Parser)]
#[command(name = "throughput")]
struct Options {
    /// Size of the AllReduce on each rank, MiB.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Rounds of alternating measurements.
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// Use this shape of the baseline instead of a sweep: lanes,piece-KiB,threads,buffer-KiB.
    #[arg(long, value_parser = parse_shape)]
    shape: Option<Shape>,
    /// Leave iperf3 out.
    #[arg(long)]
    no_iperf: bool,
    /// Small AllReduces to time.
    #[arg(long, default_value_t = 2000)]
    small: usize,
    /// Exit with 1 when a share is below 0.9.
    #[arg(long)]
    enforce: bool,
    /// Write `throughput.json` into this folder.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn parse_shape(text: &str) -> Result<Shape, String> {
    let numbers: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
    match numbers.as_deref() {
        Ok(&[lanes_a_nic, piece, threads, buffer]) if lanes_a_nic > 0 && piece > 0 && (1..=2).contains(&threads) => {
            Ok(Shape { lanes_a_nic, piece_bytes: piece << 10, threads, buffer_bytes: buffer << 10 })
        }
        _ => Err("expected lanes,piece-KiB,threads,buffer-KiB, such as 1,256,1,4096".to_owned()),
    }
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let outcome = match (args.next().as_deref(), args.next()) {
        (Some("worker"), Some(config)) => worker::serve(&config).map(|()| true),
        _ => compare(&Options::parse()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Nobody is left to tell when standard error is closed.
            let _ = writeln!(std::io::stderr(), "throughput: {error:#}");
            ExitCode::from(4)
        }
    }
}

/// Runs everything; whether the shares suffice, or were not to be enforced.
fn compare(options: &Options) -> Result<bool> {
    ensure!(options.rounds > 0 && options.mib > 0 && options.small > 0, "counts and sizes must be positive");
    let mut out = std::io::stdout();
    let bytes = options.mib * MIB;
    let spec = ClusterSpec::uniform(2, &["mlx5_0", "mlx5_2", "mlx5_3"], None, Fabric::Rails);
    let cluster = EmulatedCluster::build(&spec)?;
    let mut ranks = Ranks::start(&cluster, bytes)?;
    // Both ranks receive as many bytes as the buffer has.
    let rate = |timing: &Timing| 2.0 * bytes as f64 / timing.seconds;
    writeln!(out, "2 ranks, 3 NICs each, unshaped; {} MiB of f32; MB/s = received by both ranks\n", options.mib)?;

    let (shape, sweep) = match options.shape {
        Some(shape) => (shape, Vec::new()),
        None => sweep(&mut ranks, &mut out, rate)?,
    };
    writeln!(out, "baseline: {}\n", describe(shape))?;
    ranks.connect(shape)?;
    ranks.all_reduce()?;
    ranks.plain(shape)?;

    writeln!(out, "       MB/s                                           share of    MB for a CPU second")?;
    writeln!(out, "round  AllReduce  baseline  receive only  iperf3      baseline    AllReduce  baseline  iperf3")?;
    let economy = |timing: &Timing| 2.0 * bytes as f64 / timing.cpu_seconds;
    let mut rounds = Vec::new();
    for round in 1..=options.rounds {
        let (ours, plain, sink) = (ranks.all_reduce()?, ranks.plain(shape)?, ranks.sink(shape)?);
        let second = Duration::from_secs(1);
        let iperf = if options.no_iperf { None } else { Some(iperf::measure(&cluster, shape.lanes_a_nic, second)?) };
        let mega = |bytes: Option<f64>| bytes.map_or("-".to_owned(), |bytes| format!("{:.0}", bytes / 1e6));
        writeln!(
            out,
            "{round:5}  {:>9}  {:>8}  {:>12}  {:>6}      {:8.3}    {:>9}  {:>8}  {:>6}",
            mega(Some(rate(&ours))),
            mega(Some(rate(&plain))),
            mega(Some(rate(&sink))),
            mega(iperf.map(|i| i.bytes_s)),
            rate(&ours) / rate(&plain),
            mega(Some(economy(&ours))),
            mega(Some(economy(&plain))),
            mega(iperf.map(|i| i.bytes_a_cpu_s)),
        )?;
        rounds.push(Round { ours, plain, sink, iperf });
    }
    let share = spread(rounds.iter().map(|r| rate(&r.ours) / rate(&r.plain)));
    let cpu = spread(rounds.iter().map(|r| economy(&r.ours) / economy(&r.plain)));
    let beside = |rate: &dyn Fn(&Round) -> f64| {
        spread(rounds.iter().filter_map(|r| r.iperf.map(|iperf| rate(r) / iperf.bytes_s)))
    };
    let of_iperf = beside(&|r| rate(&r.sink));
    let plain_of_iperf = beside(&|r| rate(&r.plain));
    let ours = spread(rounds.iter().map(|r| rate(&r.ours)));
    let plain = spread(rounds.iter().map(|r| rate(&r.plain)));
    writeln!(out, "\nAllReduce over baseline   {}; for a CPU second {}", show(share), show(cpu))?;
    if !options.no_iperf {
        writeln!(out, "receive only over iperf3  {}", show(of_iperf))?;
        writeln!(out, "baseline over iperf3      {}", show(plain_of_iperf))?;
    }

    let nanos = ranks.latencies(options.small)?;
    let (median_us, p99_us) = (quantile(&nanos, 0.5) / 1e3, quantile(&nanos, 0.99) / 1e3);
    writeln!(out, "8 B AllReduce             median {median_us:.0} us, p99 {p99_us:.0} us, {} calls", nanos.len())?;
    let (replayed_bytes, paths_suspected) = ranks.finish()?;
    writeln!(out, "replayed {replayed_bytes} bytes, {paths_suspected} suspicions")?;

    if let Some(folder) = &options.out {
        let report = json!({
            "version": 2,
            "bytes": bytes,
            "baseline": shape,
            "sweep": sweep,
            "rounds": rounds,
            "all_reduce_bytes_s": ours, "baseline_bytes_s": plain,
            "share": share, "share_for_cpu": cpu,
            "receive_only_over_iperf3": of_iperf, "baseline_over_iperf3": plain_of_iperf,
            "latency": { "bytes": 8, "calls": nanos.len(), "median_us": median_us, "p99_us": p99_us },
            "replayed_bytes": replayed_bytes, "paths_suspected": paths_suspected,
        });
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        let file = folder.join("throughput.json");
        std::fs::write(&file, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("write {}", file.display()))?;
    }
    let enough = |spread: Option<Spread>| spread.is_none_or(|s| s.median >= SHARE_LEAST);
    let good = enough(share) && enough(of_iperf);
    if !good {
        writeln!(out, "a share is below {SHARE_LEAST}")?;
    }
    Ok(good || !options.enforce)
}

/// Tries every shape of the baseline, then the best of them again in turns, so that a lucky moment chooses none of
/// them. Prints both, and returns the shape with the best median and all that was tried.
fn sweep(
    ranks: &mut Ranks,
    out: &mut impl Write,
    rate: impl Fn(&Timing) -> f64,
) -> Result<(Shape, Vec<serde_json::Value>)> {
    let mut shapes = Vec::new();
    for lanes_a_nic in [1, 2] {
        for piece_bytes in [64 << 10, 256 << 10, MIB] {
            for threads in [1, 2] {
                for buffer_bytes in [0, MIB / 4, MIB, 4 * MIB] {
                    shapes.push(Shape { lanes_a_nic, piece_bytes, threads, buffer_bytes });
                }
            }
        }
    }
    let tried = try_in_turns(ranks, out, &rate, &shapes, 3)?;
    let chosen: Vec<Shape> = tried.iter().take(FINALISTS).map(|(_, shape)| *shape).collect();
    let finals = try_in_turns(ranks, out, &rate, &chosen, 9)?;
    let best = finals.first().context("an empty sweep")?.1;
    let rows = tried.iter().map(|(bytes_s, shape)| json!({ "shape": shape, "bytes_s": bytes_s })).collect();
    Ok((best, rows))
}

/// Median rate of each shape over `turns`, the best first; prints them.
fn try_in_turns(
    ranks: &mut Ranks,
    out: &mut impl Write,
    rate: impl Fn(&Timing) -> f64,
    shapes: &[Shape],
    turns: usize,
) -> Result<Vec<(f64, Shape)>> {
    let mut rates = vec![Vec::new(); shapes.len()];
    for _ in 0..turns {
        for (shape, rates) in shapes.iter().zip(&mut rates) {
            ranks.connect(*shape)?;
            rates.push(rate(&ranks.plain(*shape)?));
        }
    }
    let medians = rates.into_iter().map(|rates| spread(rates.into_iter()).map_or(0.0, |spread| spread.median));
    let mut tried: Vec<(f64, Shape)> = medians.zip(shapes.iter().copied()).collect();
    tried.sort_by(|a, b| b.0.total_cmp(&a.0));
    writeln!(out, "lanes a NIC  piece KiB  threads  buffer KiB  median of {turns}, MB/s")?;
    for (median, shape) in &tried {
        let (lanes, piece, threads) = (shape.lanes_a_nic, shape.piece_bytes >> 10, shape.threads);
        writeln!(out, "{lanes:11}  {piece:9}  {threads:7}  {:>10}  {:16.0}", buffer_of(*shape), median / 1e6)?;
    }
    Ok(tried)
}

fn buffer_of(shape: Shape) -> String {
    if shape.buffer_bytes == 0 { "tuned".to_owned() } else { (shape.buffer_bytes >> 10).to_string() }
}

fn describe(shape: Shape) -> String {
    format!(
        "{} lanes a NIC, pieces of {} KiB, {} thread(s), socket buffers {} KiB",
        shape.lanes_a_nic,
        shape.piece_bytes >> 10,
        shape.threads,
        buffer_of(shape)
    )
}

/// What was measured in turn.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct Round {
    #[serde(rename = "all_reduce")]
    ours: Timing,
    #[serde(rename = "baseline")]
    plain: Timing,
    #[serde(rename = "receive_only")]
    sink: Timing,
    #[serde(rename = "iperf3")]
    iperf: Option<iperf::Received>,
}

/// Median and range.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

fn spread(values: impl Iterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (least, most) = (*values.first()?, *values.last()?);
    let middle = (values.len() - 1) / 2;
    let median = f64::midpoint(values[middle], values[values.len() / 2]);
    Some(Spread { median, least, most })
}

fn show(spread: Option<Spread>) -> String {
    spread.map_or("-".to_owned(), |s| format!("median {:.3}, {:.3} to {:.3}", s.median, s.least, s.most))
}

fn quantile(sorted: &[u64], share: f64) -> f64 {
    let at = ((sorted.len() - 1) as f64 * share).round() as usize;
    sorted[at] as f64
}
