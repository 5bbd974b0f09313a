//! The rank's side of a row: fills, calls, times, checks. The bench says what, by a [`Measurement`].

use std::ops::Range;

use anyhow::Result;
use r2cc::transport::now;
use r2cc::{Communicator, DType, ReduceOp};
use serde::{Deserialize, Serialize};

use super::Collective;
use crate::elements::{self, ElementCheck};
use crate::workload::rank::Buffer;
use crate::workload::{Damage, Report};

/// One half of a row, for every rank alike but for the damage.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    /// What is measured.
    pub collective: Collective,
    /// Elements of a block.
    pub count: usize,
    /// Element type, as suites name it.
    pub dtype: String,
    /// Reduction, as suites name it.
    pub op: String,
    /// Root.
    pub root: usize,
    /// Input and output are one buffer.
    pub in_place: bool,
    /// Iterations that are not timed.
    pub warmup: u32,
    /// Timed iterations.
    pub iterations: u32,
    /// Checked iterations after them.
    pub checks: u32,
    /// Timed iterations are checked too.
    pub verify: bool,
    /// Ranks wait for each other after each iteration.
    pub blocking: bool,
    /// Number of the first checked iteration, unique in the run: it chooses the inputs.
    pub first: u64,
    /// Damage what this rank receives in the first checked iteration.
    pub damage: Option<Damage>,
}

/// A rank's buffers for one measurement.
struct Buffers {
    measurement: Measurement,
    rank: usize,
    world: usize,
    dtype: DType,
    op: ReduceOp,
    input: Buffer,
    output: Buffer,
}

impl Buffers {
    fn new(measurement: Measurement, rank: usize, world: usize) -> Result<Self> {
        let (dtype, op): (DType, ReduceOp) = (measurement.dtype.parse()?, measurement.op.parse()?);
        let Measurement { collective, count, root, in_place, .. } = measurement;
        let block = count * dtype.size_bytes();
        let (input, output) = collective.blocks(rank, world, root);
        let (input, output) = if in_place { (0, input.max(output)) } else { (input, output) };
        let (input, output) = (Buffer::new(input * block), Buffer::new(output * block));
        Ok(Self { measurement, rank, world, dtype, op, input, output })
    }

    fn bytes_of(&self, elements: Range<usize>) -> Range<usize> {
        let size = self.dtype.size_bytes();
        elements.start * size..elements.end * size
    }

    /// Writes the inputs of an iteration where the input lies.
    fn fill(&mut self, iteration: u64) -> Result<()> {
        let Measurement { collective, count, root, in_place, .. } = self.measurement;
        let (rank, world) = (self.rank, self.world);
        let input = if in_place {
            let blocks = collective.input_in_place(rank, world, root);
            let range = self.bytes_of(blocks.start * count..blocks.end * count);
            &mut self.output.as_mut()[range]
        } else {
            self.input.as_mut()
        };
        Ok(elements::fill(input, self.dtype, self.op, rank, world, iteration)?)
    }

    fn perform(&mut self, comm: &mut Communicator) -> Result<(), r2cc::Error> {
        let Measurement { collective, root, in_place, .. } = self.measurement;
        let operation = collective.operation(self.op, root);
        let input = (!in_place).then(|| &*self.input.as_mut());
        comm.perform(operation, self.dtype, input, self.output.as_mut())
    }

    fn check(&mut self, iteration: u64) -> Result<ElementCheck> {
        let Measurement { collective, count, root, in_place, .. } = self.measurement;
        let mut all = ElementCheck::default();
        for part in collective.expected(self.rank, self.world, root, count, in_place) {
            let begin = part.range.start;
            let range = self.bytes_of(part.range);
            let bytes = &self.output.as_mut()[range];
            let (expected, first) = (part.expected, part.first);
            let seen = elements::check_part(bytes, self.dtype, self.op, self.world, iteration, expected, first, 1)?;
            all.checked += seen.checked;
            all.wrong += seen.wrong;
            if all.reported.is_empty() {
                all.reported = seen.reported;
                all.reported.iter_mut().for_each(|wrong| wrong.index += begin);
            }
        }
        Ok(all)
    }
}

/// Does one half of a row.
///
/// # Errors
/// If a collective fails.
pub fn measure(comm: &mut Communicator, measurement: Measurement) -> Result<Report> {
    let Measurement { warmup, iterations, checks, verify, blocking, first, damage, .. } = measurement;
    let mut buffers = Buffers::new(measurement, comm.rank(), comm.world())?;
    let mut seen = ElementCheck::default();
    let mut damage = damage;
    let mut times_ns = Vec::with_capacity(iterations as usize);
    buffers.fill(first)?;
    for _ in 0..warmup {
        buffers.perform(comm)?;
    }
    // Numbers of checked iterations: the timed ones first.
    let mut number = first;
    let mut checked = |buffers: &mut Buffers, comm: &mut Communicator| -> Result<u64> {
        buffers.fill(number)?;
        comm.barrier()?;
        // After the barrier, which is a collective too and would take the damage upon itself.
        if let Some(damage) = damage.take() {
            comm.corrupt_next(damage.into())?;
        }
        let start = now();
        buffers.perform(comm)?;
        let end = now();
        // Checking takes the processors that ranks which are not done yet still need.
        comm.barrier()?;
        let of = buffers.check(number)?;
        number += 1;
        seen.checked += of.checked;
        seen.wrong += of.wrong;
        if seen.reported.is_empty() {
            seen.reported = of.reported;
        }
        Ok((end - start).as_nanos() as u64)
    };
    if verify {
        for _ in 0..iterations {
            times_ns.push(checked(&mut buffers, comm)?);
        }
    } else {
        comm.barrier()?;
        let mut start = now();
        for _ in 0..iterations {
            buffers.perform(comm)?;
            if blocking {
                comm.barrier()?;
            }
            let end = now();
            times_ns.push((end - start).as_nanos() as u64);
            start = end;
        }
        for _ in 0..checks {
            checked(&mut buffers, comm)?;
        }
    }
    comm.barrier()?;
    let first_wrong = seen.first_wrong().map(|w| (w.index as u64, w.expected.clone(), w.actual.clone()));
    Ok(Report::Measured { times_ns, checked: seen.checked, wrong: seen.wrong, first_wrong })
}
