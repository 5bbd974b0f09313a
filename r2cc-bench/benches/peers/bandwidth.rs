//! Large buffers: bandwidth by nccl-tests' formula, its share of the NICs' sum, and processor time.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric};
use serde::Serialize;

use crate::job::{Calls, Timed};
use crate::library::{Library, Work};

const NODES: usize = 3;
const NICS: [&str; 3] = ["mlx5_0", "mlx5_2", "mlx5_3"];
const NIC_BITS_S: u64 = 200_000_000;
const MIB: usize = 1 << 20;
/// Least share of the NICs' sum on the flat ring; TCP's headers leave 0.955.
const SHARE_LEAST: f64 = 0.94;
/// Least share, by the same formula, of a plan that reduces inside the nodes first.
const SHARE_BY_NODES_LEAST: f64 = 1.1;
const JOB_MOST: Duration = Duration::from_secs(120);
const PEERS: [Library; 3] = [Library::OpenMpiRing, Library::OpenMpiSegments, Library::Gloo];

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Jobs of each library, which take turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Calls of each size in a job.
    #[arg(long, default_value_t = 3)]
    count: usize,
    /// Only with NICs of 200 Mbit/s, or only without shaping.
    #[arg(long)]
    only: Option<Rate>,
    /// Ranks; 3 and 6 without it.
    #[arg(long)]
    ranks: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Rate {
    Shaped,
    Unshaped,
}

/// One library at one size.
#[derive(Debug, Serialize)]
struct Row {
    rate: Rate,
    ranks: usize,
    bytes: usize,
    library: String,
    #[serde(skip)]
    of: Library,
    /// Median of the rounds; each is the median of a job's calls. 2 (P - 1) / P of the buffer in the time of a call.
    mb_s: f64,
    mb_s_least: f64,
    mb_s_most: f64,
    /// Of the NICs' sum; none without shaping.
    share: Option<f64>,
    /// What the machine's processors did in a call, median of the rounds.
    busy_s: f64,
}

/// Runs everything; whether the limits are met.
pub(crate) fn compare(options: &Options, out: Option<&Path>) -> Result<bool> {
    ensure!(options.rounds > 0 && options.count > 0, "counts must be positive");
    let (mut rows, mut good) = (Vec::new(), true);
    let rates = [(Rate::Shaped, &[64 * MIB][..]), (Rate::Unshaped, &[64 * MIB, 256 * MIB])];
    for (rate, sizes) in rates.into_iter().filter(|(rate, _)| options.only.is_none_or(|only| only == *rate)) {
        let spec = ClusterSpec::uniform(NODES, &NICS, (rate == Rate::Shaped).then_some(NIC_BITS_S), Fabric::Rails);
        let cluster = EmulatedCluster::build(&spec)?;
        let worlds = [NODES, 2 * NODES].into_iter().filter(|world| options.ranks.is_none_or(|only| only == *world));
        for world in worlds {
            let measured = measure(&cluster, rate, world, sizes, options)?;
            good &= judge(&measured)?;
            rows.extend(measured);
        }
    }
    crate::record(out, "bandwidth.json", &rows)?;
    Ok(good)
}

fn measure(
    cluster: &EmulatedCluster,
    rate: Rate,
    world: usize,
    sizes: &[usize],
    options: &Options,
) -> Result<Vec<Row>> {
    let by_nodes = (world > NODES).then_some(Library::OursByNodes);
    let libraries: Vec<Library> = [Library::Ours].into_iter().chain(by_nodes).chain(PEERS).collect();
    let calls = sizes.iter().map(|bytes| Calls { bytes: *bytes, warmup: 1, count: options.count }).collect();
    let work = Work::Timed(calls);
    let mut timed: Vec<Vec<Timed>> = vec![Vec::new(); libraries.len()];
    for _ in 0..options.rounds {
        for (library, timed) in libraries.iter().zip(&mut timed) {
            let job = library.start(cluster, world, &work)?.timed(JOB_MOST).with_context(|| library.to_string())?;
            ensure!(job.len() == sizes.len(), "{library} measured {} sizes of {}", job.len(), sizes.len());
            let wrong: u64 = job.iter().map(|timed| timed.wrong).sum();
            ensure!(wrong == 0, "{wrong} wrong elements of {library}");
            timed.extend(job);
        }
    }
    let rows = sizes.iter().flat_map(|bytes| {
        libraries.iter().zip(&timed).map(|(library, timed)| {
            let of_size: Vec<&Timed> = timed.iter().filter(|timed| timed.bytes == *bytes).collect();
            row(rate, world, *bytes, *library, &of_size)
        })
    });
    Ok(rows.collect())
}

fn row(rate: Rate, ranks: usize, bytes: usize, library: Library, rounds: &[&Timed]) -> Row {
    let factor = 2.0 * (ranks - 1) as f64 / ranks as f64;
    let mut mb_s: Vec<f64> =
        rounds.iter().map(|timed| factor * bytes as f64 / timed.quantile(0.5).as_secs_f64() / 1e6).collect();
    let mut busy_s: Vec<f64> = rounds.iter().map(|timed| timed.busy.as_secs_f64() / timed.nanos.len() as f64).collect();
    mb_s.sort_by(f64::total_cmp);
    busy_s.sort_by(f64::total_cmp);
    let middle = mb_s.len() / 2;
    let sum_mb_s = NICS.len() as f64 * NIC_BITS_S as f64 / 8e6;
    Row {
        rate,
        ranks,
        bytes,
        library: library.to_string(),
        of: library,
        mb_s: mb_s[middle],
        mb_s_least: mb_s[0],
        mb_s_most: mb_s[mb_s.len() - 1],
        share: (rate == Rate::Shaped).then_some(mb_s[middle] / sum_mb_s),
        busy_s: busy_s[middle],
    }
}

/// Prints the rows of one rate and world, and says whether ours meet their limits.
fn judge(rows: &[Row]) -> Result<bool> {
    let mut text = std::io::stdout();
    let mut good = true;
    for sized in rows.chunk_by(|a, b| a.bytes == b.bytes) {
        let first = &sized[0];
        let rate = if first.rate == Rate::Shaped { "3 NICs of 200 Mbit/s a node" } else { "unshaped" };
        writeln!(text, "{} MiB, {} ranks on {NODES} nodes, {rate}", first.bytes / MIB, first.ranks)?;
        writeln!(text, "library                 MB/s   least    most   of NICs   CPU s a call")?;
        for row in sized {
            let share = row.share.map_or("-".to_owned(), |share| format!("{share:.3}"));
            writeln!(
                text,
                "{:20} {:7.1} {:7.1} {:7.1}   {share:>7}   {:12.3}",
                row.library, row.mb_s, row.mb_s_least, row.mb_s_most, row.busy_s
            )?;
        }
        for (met, what) in limits(sized) {
            good &= met;
            writeln!(text, "{}  {what}", crate::verdict(met))?;
        }
        writeln!(text)?;
    }
    Ok(good)
}

/// What ours have to reach beside the peers of the same size, and whether they do.
fn limits(rows: &[Row]) -> Vec<(bool, String)> {
    let mut limits = Vec::new();
    let ours = rows.iter().filter(|row| !PEERS.contains(&row.of));
    let peers = || rows.iter().filter(|row| PEERS.contains(&row.of));
    if rows[0].rate == Rate::Shaped {
        let gloo_s = peers().filter(|row| row.of == Library::Gloo).map(|row| row.busy_s).fold(f64::INFINITY, f64::min);
        for row in ours {
            let least = if row.of == Library::Ours { SHARE_LEAST } else { SHARE_BY_NODES_LEAST };
            let share = row.share.unwrap_or(0.0);
            limits.push((share >= least, format!("{}: {share:.3} of the NICs' sum, at least {least}", row.library)));
            let (busy, name) = (row.busy_s, &row.library);
            limits.push((busy <= gloo_s, format!("{name}: {busy:.3} s of CPU a call, at most Gloo's {gloo_s:.3}")));
        }
    } else {
        let best = peers().map(|row| row.mb_s).fold(0.0, f64::max);
        let most = ours.map(|row| row.mb_s).fold(0.0, f64::max);
        limits.push((most >= best, format!("{most:.0} MB/s, at least the best peer's {best:.0}")));
    }
    limits
}
