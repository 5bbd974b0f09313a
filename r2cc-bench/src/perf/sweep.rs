//! The bench's side of a sweep: one row after another on a job that has joined, and what the ranks' times come to.

use std::time::Duration;

use anyhow::{Result, ensure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Collective;
use super::measure::Measurement;
use super::options::{Average, Options, OptionsError, Point, nccl_name};
use crate::check::record::WrongElement;
use crate::suite::{ScaleRow, Suite, TypeAndOp};
use crate::workload::job::Job;
use crate::workload::{Damage, Order, Report};

/// One half of a row: out of place, or in place.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Half {
    /// Time of an iteration, microseconds.
    pub time_us: f64,
    /// S over the time, GB/s (10^9 bytes).
    pub alg_bw: f64,
    /// The part of it that crosses each rank's link in the bound, GB/s.
    pub bus_bw: f64,
    /// Elements compared, all ranks together; none when unchecked.
    pub checked: Option<u64>,
    /// Elements that differed; none when unchecked.
    pub wrong: Option<u64>,
    /// The first of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<WrongElement>,
    /// Time of each iteration, microseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub times_us: Vec<f64>,
}

/// One row of the output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// S: bytes of the longer buffer.
    pub size: u64,
    /// Elements of a block.
    pub count: u64,
    /// Element type, by nccl-tests' name.
    pub dtype: String,
    /// Reduction, or `none`.
    pub op: String,
    /// Root, or -1.
    pub root: i64,
    /// With two buffers.
    pub out_of_place: Half,
    /// In one; none where it is not defined.
    pub in_place: Option<Half>,
}

impl Row {
    /// Both halves.
    pub fn halves(&self) -> impl Iterator<Item = &Half> {
        std::iter::once(&self.out_of_place).chain(&self.in_place)
    }

    /// Wrong elements of both halves.
    pub fn wrong(&self) -> u64 {
        self.halves().filter_map(|half| half.wrong).sum()
    }
}

/// Self-test: damage what a rank receives in this row, counted from 1.
#[derive(Debug, Clone, Copy)]
pub struct Corrupt {
    /// The row.
    pub row: usize,
    /// Chooses rank and bit.
    pub seed: u64,
}

/// A sweep over the ranks of a job.
#[derive(Debug)]
pub struct Sweep<'o> {
    options: &'o Options,
    world: usize,
    points: Vec<Point>,
    /// Number of the next checked iteration of the run: it chooses the inputs.
    number: u64,
    bound: Duration,
    corrupt: Option<Corrupt>,
}

impl<'o> Sweep<'o> {
    /// A sweep over `world` ranks; `bound`: how long half a row may take.
    ///
    /// # Errors
    /// If the options make no sweep.
    pub fn new(options: &'o Options, world: usize, bound: Duration) -> Result<Self, OptionsError> {
        options.validate(world)?;
        Ok(Self { options, world, points: points(options, world), number: 1, bound, corrupt: None })
    }

    /// Checked iterations are numbered from `number`, which chooses their inputs.
    pub fn numbered_from(mut self, number: u64) -> Self {
        self.number = number;
        self
    }

    /// Number of the next checked iteration.
    pub fn next_number(&self) -> u64 {
        self.number
    }

    /// With damage in one row.
    pub fn with_corruption(mut self, corrupt: Option<Corrupt>) -> Self {
        self.corrupt = corrupt;
        self
    }

    /// Rows of one cycle.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether there is nothing to measure.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Measures row `index` of a cycle.
    ///
    /// # Errors
    /// If a rank is lost or fails, the bound passes, or the user interrupts.
    pub fn measure(&mut self, job: &mut Job<'_>, index: usize) -> Result<Row> {
        let point = self.points[index];
        let Options { collective, .. } = *self.options;
        let (size, count) = self.dimensions(point);
        let out_of_place = self.half(job, index, false)?;
        let in_place = if collective.in_place() { Some(self.half(job, index, true)?) } else { None };
        Ok(Row {
            size,
            count: count as u64,
            dtype: nccl_name(point.dtype).to_owned(),
            op: if collective.reduces() { point.op.to_string() } else { "none".to_owned() },
            root: if collective.has_root() { point.root as i64 } else { -1 },
            out_of_place,
            in_place,
        })
    }

    fn dimensions(&self, point: Point) -> (u64, usize) {
        let (collective, element_bytes) = (self.options.collective, point.dtype.size_bytes());
        let count = collective.count(point.bytes, element_bytes, self.world);
        (collective.size(count, element_bytes, self.world), count)
    }

    /// Measures one half of row `index`.
    ///
    /// # Errors
    /// As [`Sweep::measure`].
    pub fn half(&mut self, job: &mut Job<'_>, index: usize, in_place: bool) -> Result<Half> {
        let point = self.points[index];
        let (size, count) = self.dimensions(point);
        let Options { collective, warmup, iterations, checks, verify, blocking, .. } = *self.options;
        let corrupt = self.corrupt.filter(|corrupt| corrupt.row == index + 1 && !in_place);
        let measurement = Measurement {
            collective,
            count,
            dtype: point.dtype.to_string(),
            op: point.op.to_string(),
            root: point.root,
            in_place,
            warmup,
            iterations,
            checks,
            verify,
            blocking,
            first: self.number,
            damage: None,
        };
        let checked = if verify { iterations } else { checks };
        self.number += u64::from(checked).max(1);
        let damage = |rank: usize| {
            let corrupt = corrupt.filter(|c| rank == collective.receiver(self.world, point.root, c.seed))?;
            Some(Damage { seed: corrupt.seed, position: 0.5, nan: false })
        };
        job.order(|rank| Order::Measure(Measurement { damage: damage(rank), ..measurement.clone() }))?;
        let place = if in_place { "in place" } else { "out of place" };
        let reports = job.gather(&format!("{} of {size} bytes {place}", collective.name()), self.bound)?;
        let mut times: Vec<Vec<u64>> = Vec::new();
        let mut half =
            Half { checked: (checked > 0).then_some(0), wrong: (checked > 0).then_some(0), ..Half::default() };
        for (rank, report) in reports.into_iter().enumerate() {
            let Report::Measured { times_ns, checked, wrong, first_wrong } = report else {
                anyhow::bail!("rank {rank} answered {report:?} to a measurement");
            };
            ensure!(times_ns.len() == iterations as usize, "rank {rank} timed {} iterations", times_ns.len());
            times.push(times_ns);
            half.checked = half.checked.map(|sum| sum + checked);
            half.wrong = half.wrong.map(|sum| sum + wrong);
            if let (None, Some((element, expected, actual))) = (&half.first_wrong, first_wrong) {
                half.first_wrong = Some(WrongElement { rank: rank as u32, element, expected, actual });
            }
        }
        // Of each iteration what the ranks' times come to.
        let of = |k: usize| averaged(self.options.average, times.iter().map(|of_rank| of_rank[k] as f64 / 1e3));
        let times_us: Vec<f64> = (0..iterations as usize).map(of).collect();
        let whole = averaged(self.options.average, times.iter().map(|t| t.iter().sum::<u64>() as f64 / 1e3));
        half.time_us = whole / f64::from(iterations);
        half.alg_bw = size as f64 / half.time_us / 1e3;
        half.bus_bw = half.alg_bw * collective.bus_factor(self.world);
        if self.options.per_iteration || verify {
            half.times_us = times_us;
        }
        Ok(half)
    }
}

/// Rows of one cycle of valid options: sizes that are rounded to the same count are one row.
pub fn points(options: &Options, world: usize) -> Vec<Point> {
    let mut points = options.points().unwrap_or_default();
    let mut seen = Vec::new();
    points.retain(|point| {
        let count = options.collective.count(point.bytes, point.dtype.size_bytes(), world);
        let row = (count, point.dtype, point.op, point.root);
        let new = !seen.contains(&row);
        seen.push(row);
        new
    });
    points
}

/// Elements that all ranks together compare in one checked iteration.
pub fn expected_elements(collective: Collective, count: usize, root: i64, world: usize, in_place: bool) -> u64 {
    let root = usize::try_from(root).unwrap_or(0);
    let of_rank =
        |rank| collective.expected(rank, world, root, count, in_place).into_iter().map(|part| part.range.len());
    (0..world).flat_map(of_rank).map(|len| len as u64).sum()
}

/// The sweeps that a suite of kind perf asks for, in order; every timed iteration is checked. Empty without a sweep or
/// a size.
pub fn of_suite(suite: &Suite, row: ScaleRow) -> Vec<Options> {
    let (Some(sweep), Some(scale)) = (&suite.workload.sweep, suite.scale(row)) else { return Vec::new() };
    let first = TypeAndOp { dtype: suite.workload.dtype, op: suite.workload.op };
    let kinds = || std::iter::once(&first).chain(&sweep.also);
    let of = |collective: Collective, kind: &TypeAndOp| Options {
        collective,
        min_bytes: sweep.from.0,
        max_bytes: scale.bytes.0,
        step_factor: sweep.factor,
        iterations: suite.workload.baseline,
        verify: true,
        dtypes: vec![kind.dtype.name().to_owned()],
        ops: vec![kind.op.name().to_owned()],
        // Ranks start at once, and the slowest decides.
        average: Average::Max,
        ..Options::default()
    };
    sweep.collectives.iter().flat_map(|collective| kinds().map(|kind| of(*collective, kind))).collect()
}

fn averaged(average: Average, mut times: impl Iterator<Item = f64>) -> f64 {
    match average {
        Average::Rank0 => times.next().unwrap_or(0.0),
        Average::Min => times.fold(f64::INFINITY, f64::min),
        Average::Max => times.fold(0.0, f64::max),
        Average::Mean => {
            let times: Vec<f64> = times.collect();
            times.iter().sum::<f64>() / times.len().max(1) as f64
        }
    }
}

/// Statistics of single iterations, microseconds and percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerIteration {
    /// Least.
    pub min_us: f64,
    /// Most.
    pub max_us: f64,
    /// Mean.
    pub avg_us: f64,
    /// Half of them are at most this.
    pub p50_us: f64,
    /// 95 of 100 are at most this.
    pub p95_us: f64,
    /// 99 of 100 are at most this.
    pub p99_us: f64,
    /// Standard deviation (of the whole, not of a sample).
    pub stdev_us: f64,
    /// It, over the mean.
    pub cv_percent: f64,
}

impl PerIteration {
    /// Of these times; none of no times.
    pub fn of(times_us: &[f64]) -> Option<Self> {
        let mut sorted = times_us.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min_us, max_us) = (*sorted.first()?, *sorted.last()?);
        // Nearest rank.
        let percentile = |p: f64| sorted[((p / 100.0 * sorted.len() as f64).ceil() as usize).max(1) - 1];
        let avg_us = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let variance = sorted.iter().map(|t| (t - avg_us).powi(2)).sum::<f64>() / sorted.len() as f64;
        let stdev_us = variance.sqrt();
        Some(Self {
            min_us,
            max_us,
            avg_us,
            p50_us: percentile(50.0),
            p95_us: percentile(95.0),
            p99_us: percentile(99.0),
            stdev_us,
            cv_percent: if avg_us > 0.0 { stdev_us / avg_us * 100.0 } else { 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_times_become_one_as_asked() {
        let of = |average| averaged(average, [3.0, 1.0, 2.0].into_iter());
        assert_eq!([Average::Rank0, Average::Mean, Average::Min, Average::Max].map(of), [3.0, 2.0, 1.0, 3.0]);
    }

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let of = PerIteration::of(&times).unwrap();
        assert_eq!((of.min_us, of.p50_us, of.p95_us, of.p99_us, of.max_us), (1.0, 50.0, 95.0, 99.0, 100.0));
        assert_eq!(of.avg_us, 50.5);
        assert!((of.stdev_us - 28.866).abs() < 0.001, "{}", of.stdev_us);
        let one = PerIteration::of(&[7.0]).unwrap();
        assert_eq!((one.p50_us, one.p99_us, one.cv_percent), (7.0, 7.0, 0.0));
        assert_eq!(PerIteration::of(&[]), None);
    }

    #[test]
    fn sizes_that_are_rounded_to_one_count_are_one_row() {
        let options = Options {
            collective: Collective::AllGather,
            min_bytes: 4,
            max_bytes: 64,
            step_factor: 2,
            ..Options::default()
        };
        // 4 to 32 bytes are less than two elements for each of four ranks; 64 are four.
        let sweep = Sweep::new(&options, 4, Duration::from_secs(1)).unwrap();
        let counts: Vec<usize> = sweep.points.iter().map(|p| sweep.dimensions(*p).1).collect();
        assert_eq!(counts, [1, 2, 4]);
    }
}
