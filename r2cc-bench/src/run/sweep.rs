//! A suite of kind perf: every row healthy, then, with faults, the largest while they strike, then every row again.

use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::{Session, at_ns};
use crate::check::record::{Phase, SweepRecord};
use crate::perf::Options;
use crate::perf::sweep::{Row, Sweep, of_suite};
use crate::report::Event;
use crate::suite::WorkloadKind;
use crate::workload::job::Job;

/// How long the ranks have to settle after the faults have struck: a fault view settles in a tenth of a second, the
/// links of another schedule are waited for two seconds at most.
const SETTLE: Duration = Duration::from_secs(3);
/// Iterations of the row that is hit.
const HIT_ITERATIONS: u32 = 3;

/// The sweeps of a suite, and the number of the next checked iteration.
pub(super) struct Sweeps {
    options: Vec<Options>,
    world: usize,
    bound: Duration,
    number: u64,
}

impl Session<'_> {
    /// What a suite of kind perf measures.
    pub(super) fn sweep(&self) -> Result<Option<Sweeps>> {
        if self.suite.workload.kind != WorkloadKind::Perf {
            return Ok(None);
        }
        let options = of_suite(self.suite, self.row);
        let world = self.suite.ranks(self.row) as usize;
        for options in &options {
            options.validate(world)?;
        }
        let iterations = self.suite.workload.iterations.max(self.suite.workload.baseline);
        let bound = self.iteration_bound() * (iterations + 1);
        Ok(Some(Sweeps { options, world, bound, number: 1 }))
    }

    pub(super) fn healthy_rows(&mut self, sweeps: &mut Sweeps, job: &mut Job<'_>) -> Result<()> {
        self.rows(sweeps, job, Phase::Healthy, self.suite.workload.baseline)
    }

    /// The faults are armed. Without any there is nothing more to measure.
    pub(super) fn rows_under_faults(&mut self, sweeps: &mut Sweeps, job: &mut Job<'_>) -> Result<()> {
        if self.suite.faults.is_empty() {
            return Ok(());
        }
        if let Some(first) = sweeps.options.first() {
            let largest = Options { min_bytes: first.max_bytes, iterations: HIT_ITERATIONS, ..first.clone() };
            self.rows_of(sweeps, job, Phase::Hit, &largest)?;
        }
        thread::sleep(SETTLE);
        self.rows(sweeps, job, Phase::Degraded, self.suite.workload.iterations)
    }

    fn rows(&mut self, sweeps: &mut Sweeps, job: &mut Job<'_>, phase: Phase, iterations: u32) -> Result<()> {
        for options in sweeps.options.clone() {
            self.rows_of(sweeps, job, phase, &Options { iterations, ..options })?;
        }
        Ok(())
    }

    fn rows_of(&mut self, sweeps: &mut Sweeps, job: &mut Job<'_>, phase: Phase, options: &Options) -> Result<()> {
        let mut sweep = Sweep::new(options, sweeps.world, sweeps.bound)?.numbered_from(sweeps.number);
        for index in 0..sweep.len() {
            let name = format!("{phase:?} {}", options.collective.name()).to_lowercase();
            self.progress.iteration(&name, index as u32 + 1, sweep.len() as u32);
            let row: Row = sweep.measure(job, index)?;
            let record = SweepRecord { collective: options.collective, phase, row };
            self.log.record(at_ns(), Event::Sweep(record.clone()))?;
            self.record.sweep.push(record);
        }
        sweeps.number = sweep.next_number();
        Ok(())
    }
}
