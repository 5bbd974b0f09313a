//! A Monte-Carlo study: failures drawn at random, each schedule's time beside the healthy flat ring's.
//!
//! Owns the cluster asked for, the draws and the sums; [`super::flow`] runs the plans. Start at [`run`].

use r2cc::schedule::{Fabric, FabricNode, Overlap, RankPlan, Schedule, Shape, cost, packing};
use serde::Serialize;

use super::flow::{Settings, SimulateError, Striping, simulate};

/// Draws for one sample before the cluster is said to fall apart.
const DRAWS_MAX: usize = 1000;
/// Ranks above which a segment of a ring is one slice: finer slices change nothing where there is no latency.
const FINE_RANKS: usize = 32;

/// What is studied.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Study {
    /// Nodes.
    pub nodes: usize,
    /// Ranks of each node.
    pub ranks_per_node: usize,
    /// NICs of each node.
    pub nics: usize,
    /// Bits a second of each NIC, each way.
    pub nic_bits_s: f64,
    /// NIC i reaches only NICs i of other nodes; else any reaches any.
    pub rails: bool,
    /// Bytes that each rank reduces.
    pub bytes: usize,
    /// NICs that fail in each sample.
    pub failures: usize,
    /// Samples.
    pub samples: usize,
    /// Chunks of R2CC-AllReduce.
    pub chunks: usize,
    /// Seed of the draws.
    pub seed: u64,
}

/// Times of one schedule over all samples, as multiples of the healthy flat ring's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// The schedule.
    pub schedule: &'static str,
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
    /// Least.
    pub least: f64,
    /// Half of the samples are no higher.
    pub median: f64,
    /// Nineteen of twenty are no higher.
    pub p95: f64,
    /// Most.
    pub most: f64,
}

/// What a study has found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    /// What was asked.
    pub study: Study,
    /// Seconds of the healthy flat ring, which is 1 in the lines.
    pub healthy_seconds: f64,
    /// Draws that left a pair of nodes without a common rail, and were drawn again.
    pub drawn_again: usize,
    /// One line a schedule, the bound last.
    pub lines: Vec<Line>,
}

/// Why there are no findings.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// No draw leaves every pair of nodes a rail.
    #[error("{failures} failures leave some pair of nodes no rail, in each of {draws} draws; hint: fewer --failures")]
    FallsApart {
        /// NICs that fail.
        failures: usize,
        /// Draws tried.
        draws: usize,
    },
    /// More failures than NICs.
    #[error("{failures} failures, but the cluster has {nics} NICs")]
    TooMany {
        /// NICs that fail.
        failures: usize,
        /// NICs there are.
        nics: usize,
    },
    /// A plan does not run: our mistake.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl Study {
    fn fabric(&self, lost: &[usize]) -> Option<Fabric> {
        let speed = self.nic_bits_s / 8.0;
        let node = |node: usize| {
            let of = |nic: usize| if lost.contains(&(node * self.nics + nic)) { 0.0 } else { speed };
            let rails: Vec<f64> = (0..self.nics).map(of).collect();
            let ranks = node * self.ranks_per_node..(node + 1) * self.ranks_per_node;
            FabricNode { ranks: ranks.collect(), rails: if self.rails { rails } else { vec![rails.iter().sum()] } }
        };
        Fabric::new((0..self.nodes).map(node).collect()).ok()
    }

    fn shape(&self) -> Shape {
        let elements = self.bytes / 4;
        let slice_elements = (self.nodes * self.ranks_per_node > FINE_RANKS).then_some(elements.max(1));
        Shape { elements, element_bytes: 4, in_place: true, slice_elements }
    }
}

/// Runs a study; `told` hears of each sample that is done.
///
/// # Errors
/// If the failures cannot be had, or a plan does not run.
pub fn run(study: &Study, mut told: impl FnMut(usize)) -> Result<Findings, StudyError> {
    let nics = study.nodes * study.nics;
    if study.failures > nics {
        return Err(StudyError::TooMany { failures: study.failures, nics });
    }
    let apart = || StudyError::FallsApart { failures: study.failures, draws: DRAWS_MAX };
    let healthy = study.fabric(&[]).ok_or_else(apart)?;
    let shape = study.shape();
    let ring = cost::flat_ring(&healthy);
    let ring_plans = ring.plans(shape);
    // Far below what any message takes; keeps messages that end together apart by rounding only.
    let quantum_s = ring.seconds(&healthy, study.bytes) * 1e-7;
    let seconds = |plans: &[RankPlan], fabric: &Fabric, striping: Striping| {
        let settings = Settings { element_bytes: shape.element_bytes, priority: true, striping, quantum_s };
        simulate(plans, fabric, settings).map(|outcome| outcome.seconds)
    };
    let healthy_seconds = seconds(&ring_plans, &healthy, Striping::Pull)?;
    let mut random = fastrand::Rng::with_seed(study.seed);
    let mut drawn_again = 0;
    let mut times: Vec<(&'static str, Vec<f64>)> = Vec::new();
    for sample in 0..study.samples {
        let mut draws = 0;
        let fabric = loop {
            let lost = random.choose_multiple(0..nics, study.failures);
            match study.fabric(&lost) {
                Some(fabric) => break fabric,
                None if draws + 1 == DRAWS_MAX => return Err(apart()),
                None => draws += 1,
            }
        };
        drawn_again += draws;
        let order = fabric.best_ring();
        // Where any NIC reaches any other, nothing says which is whose backup.
        let on_backup = match study.rails {
            true => Some(seconds(&ring_plans, &fabric, Striping::OneBackup { healthy: &healthy })?),
            false => None,
        };
        let balance = seconds(&ring_plans, &fabric, Striping::Pull)?;
        let r2cc = cost::best_r2cc(&fabric, &order, study.chunks, Overlap::default());
        let r2cc = match r2cc {
            Some(schedule) => seconds(&schedule.plans(shape), &fabric, Striping::Pull)?,
            None => balance,
        };
        let weighted: Schedule = cost::best_weighted(&fabric, &order);
        let weighted = seconds(&weighted.plans(shape), &fabric, Striping::Pull)?;
        let others = [
            ("balance", balance),
            ("r2cc-allreduce", r2cc),
            ("weighted", weighted),
            ("bound", packing::bound(&fabric) * study.bytes as f64),
        ];
        let found: Vec<(&str, f64)> =
            on_backup.map(|seconds| ("ring, one backup NIC", seconds)).into_iter().chain(others).collect();
        if times.is_empty() {
            times = found.iter().map(|(name, _)| (*name, Vec::new())).collect();
        }
        // With one node all is free, and nothing is slower than anything.
        let ratio = |seconds: f64| if healthy_seconds > 0.0 { seconds / healthy_seconds } else { 1.0 };
        times.iter_mut().zip(found).for_each(|((_, all), (_, seconds))| all.push(ratio(seconds)));
        told(sample + 1);
    }
    let lines = times.into_iter().map(|(schedule, times)| Line::new(schedule, times)).collect();
    Ok(Findings { study: study.clone(), healthy_seconds, drawn_again, lines })
}

impl Line {
    fn new(schedule: &'static str, mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let count = times.len() as f64;
        let mean = times.iter().sum::<f64>() / count;
        let variance = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count;
        let at = |part: f64| times[((part * count).ceil() as usize).clamp(1, times.len()) - 1];
        Self {
            schedule,
            mean,
            deviation: variance.sqrt(),
            least: at(0.0),
            median: at(0.5),
            p95: at(0.95),
            most: at(1.0),
        }
    }
}

impl Findings {
    /// A table for people.
    pub fn table(&self) -> String {
        let mut rows = tabled::builder::Builder::default();
        rows.push_record(["schedule", "mean", "deviation", "least", "median", "p95", "most"]);
        for line in &self.lines {
            let figures = [line.mean, line.deviation, line.least, line.median, line.p95, line.most];
            rows.push_record(std::iter::once(line.schedule.to_owned()).chain(figures.map(|f| format!("{f:.4}"))));
        }
        let Study { nodes, ranks_per_node, nics, failures, samples, rails, .. } = &self.study;
        let fabric = if *rails { "rails" } else { "any to any" };
        format!(
            "{nodes} nodes of {ranks_per_node} ranks and {nics} NICs ({fabric}), {failures} NICs lost, {samples} \
             samples; times in multiples of the healthy flat ring's, {:.3} ms\n{}",
            self.healthy_seconds * 1e3,
            rows.build().with(tabled::settings::Style::psql())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn study(failures: usize) -> Study {
        Study {
            nodes: 3,
            ranks_per_node: 2,
            nics: 3,
            nic_bits_s: 1e10,
            rails: true,
            bytes: 64 << 20,
            failures,
            samples: 4,
            chunks: 4,
            seed: 1,
        }
    }

    #[test]
    fn one_lost_nic_gives_the_designs_table() {
        let findings = run(&study(1), |_| ()).unwrap();
        let means: Vec<(&str, f64)> = findings.lines.iter().map(|line| (line.schedule, line.mean)).collect();
        let wanted = [2.0, 1.5, 1.375, 0.9, 0.9];
        for ((name, mean), wanted) in means.iter().zip(wanted) {
            assert!((mean / wanted - 1.0).abs() < 0.03, "{name}: {mean}, not {wanted}");
        }
        assert!(findings.lines.iter().all(|line| line.deviation < 0.01), "{findings:?}");
        assert!(findings.table().contains("r2cc-allreduce"));
    }

    #[test]
    fn the_same_seed_gives_the_same_findings_and_another_one_other_draws() {
        let two = Study { failures: 2, samples: 12, ..study(2) };
        let first = run(&two, |_| ()).unwrap();
        assert_eq!(first, run(&two, |_| ()).unwrap());
        assert_ne!(first.lines, run(&Study { seed: 2, ..two }, |_| ()).unwrap().lines);
        assert!(first.lines[1].most > first.lines[1].least, "different rails or the same: {first:?}");
    }

    #[test]
    fn no_schedule_is_faster_than_the_bound() {
        let findings = run(&Study { nodes: 4, samples: 10, ..study(3) }, |_| ()).unwrap();
        let bound = &findings.lines[4];
        assert!(findings.lines.iter().all(|line| line.least >= bound.least * 0.999), "{findings:?}");
    }

    #[test]
    fn failures_that_cut_nodes_off_are_refused() {
        assert!(matches!(run(&study(9), |_| ()), Err(StudyError::FallsApart { failures: 9, .. })));
        assert!(matches!(run(&study(10), |_| ()), Err(StudyError::TooMany { failures: 10, nics: 9 })));
    }
}
