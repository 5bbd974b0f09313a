//! The rank's side: joins, runs one verified collective for each order, reports.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use r2cc::control::RendezvousError;
use r2cc::repair::PathState;
use r2cc::{Communicator, DType, ReduceOp};

use super::{Order, RankConfig, Report};
use crate::elements;
use crate::perf::measure::measure;

/// Buffers aligned for every element type.
pub(crate) struct Buffer {
    words: Vec<u64>,
    bytes: usize,
}

impl Buffer {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// Serves orders until told to finish, or until the bench is gone.
///
/// # Errors
/// If the ranks cannot join or a collective fails; it has been reported then.
pub fn serve() -> Result<()> {
    let outcome = serve_orders();
    if let Err(error) = &outcome {
        // A bench that is gone needs no report.
        let _ = report(&Report::Failed { error: format!("{error:#}"), environment: is_environment(error) });
    }
    outcome
}

fn is_environment(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<r2cc::Error>(),
        Some(
            r2cc::Error::Rendezvous(RendezvousError::Listen { .. }) | r2cc::Error::Topology(_) | r2cc::Error::Io { .. }
        )
    )
}

fn report(report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)?;
    out.flush()
}

fn serve_orders() -> Result<()> {
    let mut lines = io::stdin().lock().lines();
    let first = lines.next().context("no configuration on standard input")??;
    let config: RankConfig = serde_json::from_str(&first).context("the configuration on standard input")?;
    let dtype: DType = config.dtype.parse()?;
    let op: ReduceOp = config.op.parse()?;
    let bytes = usize::try_from(config.bytes)?;
    let mut input = Buffer::new(if config.in_place { 0 } else { bytes });
    let mut output = Buffer::new(bytes);
    let mut comm = Communicator::builder()
        .rank(config.rank)
        .world(config.world)
        .node(&config.node)
        .rendezvous(config.rendezvous)
        .secret(config.secret.as_bytes())
        .nics(config.nics)
        .events(config.events)
        .link_bound(Duration::from_secs(config.link_bound_s))
        .settings(config.settings)
        .build()?;
    report(&Report::Ready)?;
    for line in lines {
        match serde_json::from_str(&line?).context("an order")? {
            Order::Iterate { iteration, corrupt } => {
                let source = if config.in_place { output.as_mut() } else { input.as_mut() };
                elements::fill(source, dtype, op, config.rank, config.world, iteration)?;
                comm.barrier()?;
                // After the barrier, which is a collective too and would take the damage upon itself.
                if let Some(damage) = corrupt {
                    comm.corrupt_next(damage.into())?;
                }
                let start = r2cc::transport::now();
                let from = (!config.in_place).then(|| &*input.as_mut());
                comm.all_reduce_bytes(dtype, op, from, output.as_mut())?;
                let end = r2cc::transport::now();
                // Checking takes the processors that ranks which are not done yet still need.
                comm.barrier()?;
                let seen = elements::check(output.as_mut(), dtype, op, config.world, iteration, 1)?;
                let first_wrong = seen.first_wrong().map(|w| (w.index as u64, w.expected.clone(), w.actual.clone()));
                report(&Report::Iterated {
                    iteration,
                    start_ns: start.as_nanos() as u64,
                    end_ns: end.as_nanos() as u64,
                    checked: seen.checked,
                    wrong: seen.wrong,
                    first_wrong,
                })?;
            }
            Order::Measure(measurement) => report(&measure(&mut comm, measurement)?)?,
            order @ (Order::Join { .. } | Order::Prepare { .. } | Order::Check { .. } | Order::Recapture) => {
                bail!("{order:?} is for ranks on a GPU")
            }
            Order::Finish => {
                let status = comm.status()?;
                let down = status.links.iter().flat_map(|l| &l.paths).filter(|(_, p)| p.state != PathState::Live);
                report(&Report::Finished {
                    payload_bytes: status.totals.payload_bytes,
                    replayed_bytes: status.totals.replayed_bytes,
                    paths_suspected: status.totals.paths_suspected,
                    paths_failed: status.totals.paths_failed,
                    paths_down: down.count() as u64,
                })?;
                return Ok(comm.close()?);
            }
        }
    }
    bail!("the bench closed standard input without an order to finish")
}
