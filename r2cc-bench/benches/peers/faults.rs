//! A NIC dies in silence in the middle of an AllReduce, and comes back or does not: what becomes of each library.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric, Side};
use r2cc_inject::change::{Change, Planned};
use serde::Serialize;

use crate::job::{Job, Line};
use crate::library::{Library, Work};

const BYTES: usize = 64 << 20;
const RANKS: usize = 3;
const NIC_BITS_S: u64 = 200_000_000;
/// Calls before the NIC dies.
const HEALTHY: usize = 4;
const START_MOST: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How long each library is watched after the NIC has died, seconds.
    #[arg(long, default_value_t = 60)]
    watch: u64,
}

/// What became of a library.
#[derive(Debug, Serialize)]
struct Outcome {
    library: String,
    /// Median of the calls before.
    healthy_s: f64,
    /// Calls that ended after the NIC had died.
    calls_after: usize,
    /// Their median, without the first.
    after_s: Option<f64>,
    /// Processes that had ended, of all.
    ended: usize,
    processes: usize,
    wrong: u64,
}

impl Outcome {
    fn text(&self, watch: Duration) -> String {
        let Self { calls_after, after_s, healthy_s, ended, processes, .. } = self;
        match after_s {
            Some(after) => format!("goes on at {:.2} x the healthy time, {calls_after} calls", after / healthy_s),
            None if ended == processes => "ends".to_owned(),
            None => format!(
                "hangs in silence: {calls_after} calls ended in {} s, {ended} of {processes} processes",
                watch.as_secs()
            ),
        }
    }
}

/// Watches each library; whether ours went on with right results.
pub(crate) fn compare(options: &Options, out: Option<&Path>) -> Result<bool> {
    let watch = Duration::from_secs(options.watch);
    let mut text = std::io::stdout();
    writeln!(text, "{} MiB, {RANKS} ranks, 3 NICs of 200 Mbit/s a node; node-1's mlx5_2 goes dead", BYTES >> 20)?;
    let mut outcomes = Vec::new();
    for library in [Library::Ours, Library::OpenMpiRing, Library::OpenMpiSegments, Library::Gloo] {
        let outcome = outcome(library, watch).with_context(|| library.to_string())?;
        writeln!(text, "{library:20}  {}, {} wrong elements", outcome.text(watch), outcome.wrong)?;
        outcomes.push(outcome);
    }
    crate::record(out, "faults.json", &outcomes)?;
    Ok(outcomes[0].after_s.is_some() && outcomes[0].wrong == 0)
}

fn outcome(library: Library, watch: Duration) -> Result<Outcome> {
    let spec = ClusterSpec::uniform(RANKS, &["mlx5_0", "mlx5_2", "mlx5_3"], Some(NIC_BITS_S), Fabric::Rails);
    let cluster = EmulatedCluster::build(&spec)?;
    let mut job = library.start(&cluster, RANKS, &Work::Loop(BYTES))?;
    let mut wrong = 0;
    let until = Instant::now() + START_MOST;
    let healthy = calls(&mut job, until, HEALTHY, &mut wrong)?;
    ensure!(healthy.len() == HEALTHY, "{} calls in {START_MOST:?} before the fault", healthy.len());
    // The first one also opens connections.
    let healthy_s = median(&healthy[1..]).unwrap_or(0.0);
    std::thread::sleep(Duration::from_secs_f64(healthy_s * 0.4));
    // The bridge drops the port's frames; the carrier stays, so that nobody is told.
    let cut = Planned::new(cluster.place("node-1", "mlx5_2", Side::Switch)?, Change::BlockPort)?;
    cut.make()?;
    let after = calls(&mut job, Instant::now() + watch, usize::MAX, &mut wrong)?;
    let ended = job.ended()?;
    Ok(Outcome {
        library: library.to_string(),
        healthy_s,
        calls_after: after.len(),
        // One or two may have had their bytes already.
        after_s: if after.len() > 3 { median(&after[1..]) } else { None },
        ended: ended.iter().flatten().count(),
        processes: ended.len(),
        wrong,
    })
}

/// Times of the next calls, of the rank that tells of each.
fn calls(job: &mut Job<'_>, until: Instant, most: usize, wrong: &mut u64) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    while all.len() < most
        && let Some((_, line)) = job.line(until.saturating_duration_since(Instant::now()))?
    {
        if let Line::Called { seconds, wrong: found } = line {
            all.push(seconds);
            *wrong += found;
        }
    }
    Ok(all)
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}
