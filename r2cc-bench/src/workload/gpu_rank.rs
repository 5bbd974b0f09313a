//! The rank's side on a GPU: NCCL as an application uses it, whatever net plugin it has been given. One order, one
//! step: fill, call, check; the bench keeps the ranks in step, since NCCL itself has no barrier that moves no bytes.
//!
//! Standard output belongs to the reports alone: NCCL and CUDA print to file descriptor 1 what they like, which
//! goes to the log.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use r2cc::transport::now;
use r2cc::{DType, ReduceOp};

use super::{GpuConfig, Order, RankConfig, Report};
use crate::gpu::nccl::{Communicator, Nccl, UniqueId};
use crate::gpu::{self, Buffer, Device, Elements, GpuError, GpuFacts, Graph};

/// How often a wait looks whether the GPU is done.
const LOOK: Duration = Duration::from_micros(50);
/// How often it asks NCCL for errors of its threads.
const ASK: Duration = Duration::from_millis(10);

/// Where reports go.
struct Reports(File);

impl Reports {
    /// Takes standard output for the reports, and gives whatever else is printed there to standard error.
    fn take() -> io::Result<Self> {
        let own = io::stdout().as_fd().try_clone_to_owned()?;
        // SAFETY: both are open descriptors of this process; nothing else runs yet.
        if unsafe { libc::dup2(io::stderr().as_raw_fd(), io::stdout().as_raw_fd()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(File::from(own)))
    }

    fn tell(&mut self, report: &Report) -> io::Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        self.0.write_all(&line)
    }
}

/// Serves orders until told to finish, or until the bench is gone.
///
/// # Errors
/// If something is missing, the ranks cannot join or a collective fails; it has been reported then.
pub fn serve() -> Result<()> {
    reporting(serve_orders)
}

/// Reports what this machine has, and ends.
///
/// # Errors
/// If something is missing; it has been reported then.
pub fn survey(nccl: Option<&Path>) -> Result<()> {
    reporting(|reports| {
        let (.., facts) = gpu::survey(0, nccl)?;
        Ok(reports.tell(&Report::Loaded { facts, unique_id: None })?)
    })
}

fn reporting(work: impl FnOnce(&mut Reports) -> Result<()>) -> Result<()> {
    let mut reports = Reports::take()?;
    let outcome = work(&mut reports);
    if let Err(error) = &outcome {
        let environment = error.downcast_ref::<GpuError>().is_some_and(GpuError::is_environment);
        // A bench that is gone needs no report.
        let _ = reports.tell(&Report::Failed { error: format!("{error:#}"), environment });
    }
    outcome
}

/// The next order.
fn next(lines: &mut impl Iterator<Item = io::Result<String>>) -> Result<Order> {
    let line = lines.next().context("the bench closed standard input without an order to finish")??;
    serde_json::from_str(&line).context("an order")
}

fn serve_orders(reports: &mut Reports) -> Result<()> {
    let mut lines = io::stdin().lock().lines();
    let first = lines.next().context("no configuration on standard input")??;
    let config: RankConfig = serde_json::from_str(&first).context("the configuration on standard input")?;
    let Some(GpuConfig { ordinal, nccl, graph }) = config.gpu.clone() else { bail!("no GPU in the configuration") };
    let (device, library, facts): (Device, Nccl, GpuFacts) = gpu::survey(ordinal, nccl.as_deref())?;
    let (dtype, op): (DType, ReduceOp) = (config.dtype.parse()?, config.op.parse()?);
    let mut elements = Elements::new(&device, dtype, op, config.world)?;
    elements.prove(&device)?;
    let unique_id = if config.rank == 0 { Some(library.unique_id()?.to_hex()) } else { None };
    reports.tell(&Report::Loaded { facts, unique_id })?;

    let Order::Join { unique_id } = next(&mut lines)? else { bail!("an order before the one to join") };
    let id = UniqueId::from_hex(&unique_id).context("a malformed unique id")?;
    let comm = library.join(id, config.rank, config.world)?;
    let bytes = usize::try_from(config.bytes)?;
    let output = device.buffer(bytes)?;
    let input = if config.in_place { output } else { device.buffer(bytes)? };
    let mut rank = GpuRank { config, device, elements, comm, input, output, dtype, op, graph: None };
    match rank.work(graph, reports, &mut lines) {
        Ok(()) => rank.end(reports),
        Err(error) => Err(rank.abort(error)),
    }
}

struct GpuRank<'a> {
    config: RankConfig,
    device: Device,
    elements: Elements,
    comm: Communicator<'a>,
    input: Buffer,
    output: Buffer,
    dtype: DType,
    op: ReduceOp,
    graph: Option<Graph>,
}

impl GpuRank<'_> {
    fn work(
        &mut self,
        graph: bool,
        reports: &mut Reports,
        lines: &mut impl Iterator<Item = io::Result<String>>,
    ) -> Result<()> {
        // NCCL connects at the first collective: the first measured one must not pay for that.
        self.elements.fill(&self.device, self.input, self.config.rank, 0)?;
        self.enqueue()?;
        self.wait()?;
        if graph {
            self.capture(reports)?;
        } else {
            reports.tell(&Report::Ready)?;
        }
        loop {
            match next(lines)? {
                Order::Prepare { iteration } => {
                    self.elements.fill(&self.device, self.input, self.config.rank, iteration)?;
                    reports.tell(&Report::Prepared { iteration })?;
                }
                Order::Iterate { iteration, .. } => {
                    reports.tell(&Report::Calling { iteration, start_ns: now().as_nanos() as u64 })?;
                    let start = now();
                    match &self.graph {
                        Some(graph) => graph.replay(&self.device)?,
                        None => self.enqueue()?,
                    }
                    self.wait()?;
                    let end = now();
                    let (start_ns, end_ns) = (start.as_nanos() as u64, end.as_nanos() as u64);
                    reports.tell(&Report::Returned { iteration, start_ns, end_ns })?;
                }
                Order::Check { iteration, corrupt } => {
                    if let Some(damage) = corrupt {
                        let elements = self.output.bytes() / self.dtype.size_bytes();
                        let index = ((elements as f64 * damage.position) as usize).min(elements - 1);
                        self.elements.damage(&self.device, self.output, index, damage.seed, damage.nan)?;
                    }
                    let seen = self.elements.check(&self.device, self.output, iteration)?;
                    let first_wrong =
                        seen.first_wrong().map(|w| (w.index as u64, w.expected.clone(), w.actual.clone()));
                    reports.tell(&Report::Iterated {
                        iteration,
                        start_ns: 0,
                        end_ns: 0,
                        checked: seen.checked,
                        wrong: seen.wrong,
                        first_wrong,
                    })?;
                }
                Order::Recapture => self.capture(reports)?,
                Order::Finish => return Ok(()),
                Order::Join { .. } => bail!("a second order to join"),
                Order::Measure(_) => bail!("a sweep is for ranks on host memory"),
            }
        }
    }

    fn enqueue(&self) -> Result<(), GpuError> {
        let count = self.output.bytes() / self.dtype.size_bytes();
        let (from, to, stream) = (self.input.as_ptr(), self.output.as_ptr(), self.device.stream());
        // SAFETY: both buffers hold the elements, are this GPU's and are never freed.
        unsafe { self.comm.all_reduce(from, to, count, self.dtype, self.op, stream.cast()) }
    }

    /// Captures the collective, in place of what was captured before.
    fn capture(&mut self, reports: &mut Reports) -> Result<()> {
        if let Some(old) = self.graph.take() {
            old.destroy()?;
        }
        let graph = Graph::capture(&self.device, || self.enqueue())?;
        let millis = |span: Duration| span.as_secs_f64() * 1e3;
        let (capture_ms, instantiate_ms) = (millis(graph.captured_in), millis(graph.instantiated_in));
        self.graph = Some(graph);
        Ok(reports.tell(&Report::Captured { capture_ms, instantiate_ms })?)
    }

    /// Waits for the GPU, or for an error of NCCL's threads: a collective that cannot go on never ends by itself.
    fn wait(&self) -> Result<(), GpuError> {
        let mut asked = Instant::now();
        while !self.device.is_idle()? {
            if asked.elapsed() >= ASK {
                self.comm.async_error()?;
                asked = Instant::now();
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn end(mut self, reports: &mut Reports) -> Result<()> {
        if let Some(graph) = self.graph.take() {
            graph.destroy()?;
        }
        self.comm.destroy()?;
        // The transport's own sums are in the plugin's event file, if there is a plugin.
        Ok(reports.tell(&Report::Finished {
            payload_bytes: 0,
            replayed_bytes: 0,
            paths_suspected: 0,
            paths_failed: 0,
            paths_down: 0,
        })?)
    }

    /// Ends the communicator after an error, and says how long that took.
    fn abort(self, error: anyhow::Error) -> anyhow::Error {
        let begin = Instant::now();
        let outcome = self.comm.abort();
        let took = begin.elapsed();
        let ended = outcome.map_or_else(|error| format!("failed: {error}"), |()| "returned".to_owned());
        error.context(format!("ncclCommAbort {ended} after {} ms", took.as_millis()))
    }
}
