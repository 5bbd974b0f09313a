//! One rank: follows the orders on its standard input. Every timed run starts behind a barrier and is checked.

use std::io::{self, BufRead, Write};
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use nix::sys::mman::{MmapAdvise, madvise};
use r2cc::transport::now;
use r2cc::{Communicator, ReduceOp};

use crate::orders::{Order, RankConfig, Reply, Run};
use crate::plain::{Memory, Plain};

const PAGE_BYTES: usize = 4096;

/// Serves until told to finish, or until the benchmark is gone.
pub(crate) fn serve(config: &str) -> Result<()> {
    let outcome = serve_orders(config);
    if let Err(error) = &outcome {
        // A benchmark that is gone needs no reply.
        let _ = say(&Reply::Failed { error: format!("{error:#}") });
    }
    outcome
}

fn say(reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)?;
    out.flush()
}

/// Contribution of a rank; sums of two are exact.
fn contribution(rank: usize, i: usize) -> f32 {
    (i % 8191) as f32 + (rank * 3) as f32
}

struct Rank {
    rank: usize,
    comm: Communicator,
    plain: Plain,
    buffer: Vec<f32>,
    place: Vec<f32>,
}

fn serve_orders(config: &str) -> Result<()> {
    let config: RankConfig = serde_json::from_str(config).context("the rank's configuration")?;
    let comm = Communicator::builder()
        .rank(config.rank)
        .world(2)
        .node(&config.node)
        .rendezvous(config.rendezvous)
        .secret(config.secret.as_bytes())
        .nics(config.nics)
        .build()?;
    let elements = config.bytes / size_of::<f32>();
    let mut rank = Rank {
        rank: config.rank,
        comm,
        plain: Plain::default(),
        buffer: memory(elements)?,
        place: memory(elements / 2)?,
    };
    say(&Reply::Ready)?;
    for line in io::stdin().lock().lines() {
        let reply = match serde_json::from_str(&line?).context("an order")? {
            Order::Listen { addrs, shape } => Reply::Listening { ports: rank.plain.listen(&addrs, shape)? },
            Order::Connect { ends, shape } => {
                rank.plain.connect(&ends, shape)?;
                Reply::Connected
            }
            Order::Plain { shape } => Reply::Ran(rank.move_plainly(shape)?),
            Order::Sink { shape } => Reply::Ran(rank.timed(|rank| Ok(rank.plain.sink(shape, config.bytes)?))?),
            Order::AllReduce => Reply::Ran(rank.all_reduce()?),
            Order::Latency { count } => Reply::Latencies { nanos: rank.latencies(count)? },
            Order::Finish => {
                let totals = rank.comm.status()?.totals;
                rank.comm.close()?;
                let (replayed_bytes, paths_suspected) = (totals.replayed_bytes, totals.paths_suspected);
                return Ok(say(&Reply::Finished { replayed_bytes, paths_suspected })?);
            }
        };
        say(&reply)?;
    }
    Ok(())
}

/// Zeros in huge pages where the system has them: in small ones, walking the page tables would be a good part of
/// what is measured.
fn memory(elements: usize) -> Result<Vec<f32>> {
    let mut zeros = vec![0.0_f32; elements];
    let range = zeros.as_mut_ptr_range();
    let start = range.start.map_addr(|addr| addr.next_multiple_of(PAGE_BYTES));
    let bytes = range.end.addr().saturating_sub(start.addr());
    if let Some(start) = NonNull::new(start.cast()).filter(|_| bytes > 0) {
        // SAFETY: memory of the vector, from a page's start on; the advice does not touch what is in it.
        unsafe { madvise(start, bytes, MmapAdvise::MADV_HUGEPAGE) }.context("ask for huge pages")?;
    }
    Ok(zeros)
}

impl Rank {
    fn fill(&mut self) {
        for (i, x) in self.buffer.iter_mut().enumerate() {
            *x = contribution(self.rank, i);
        }
    }

    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Run> {
        self.comm.barrier()?;
        let (cpu, start) = (cpu_ns()?, now());
        work(self)?;
        let (end, cpu_end) = (now(), cpu_ns()?);
        Ok(Run { start_ns: start.as_nanos() as u64, end_ns: end.as_nanos() as u64, cpu_ns: cpu_end - cpu })
    }

    fn all_reduce(&mut self) -> Result<Run> {
        self.fill();
        let run = self.timed(|rank| Ok(rank.comm.all_reduce_in_place(&mut rank.buffer, ReduceOp::Sum)?))?;
        let sum = |i: usize| contribution(0, i) + contribution(1, i);
        let wrong = self.buffer.iter().enumerate().filter(|(i, x)| **x != sum(*i)).count();
        ensure!(wrong == 0, "{wrong} wrong sums of the AllReduce on rank {}", self.rank);
        Ok(run)
    }

    fn move_plainly(&mut self, shape: crate::orders::Shape) -> Result<Run> {
        self.fill();
        let (me, half) = (self.rank, self.buffer.len() / 2);
        let run = self.timed(|rank| {
            let (low, high) = rank.buffer.split_at_mut(half);
            let (own, other) = if me == 0 { (low, high) } else { (high, low) };
            let mut memory = Memory { own, other: &other[..half], place: &mut rank.place };
            Ok(rank.plain.run(shape, &mut memory)?)
        })?;
        // The other rank sends its half of ours, twice.
        let start = me * half;
        let own = &self.buffer[start..start + half];
        let sum = |i: usize| contribution(0, i) + contribution(1, i);
        let wrong = own.iter().enumerate().filter(|(i, x)| **x != sum(start + i)).count();
        let sent = |i: usize| contribution(1 - me, start + i);
        let misplaced = self.place.iter().enumerate().filter(|(i, x)| **x != sent(*i)).count();
        ensure!(wrong + misplaced == 0, "{wrong} wrong sums and {misplaced} misplaced elements of the baseline");
        Ok(run)
    }

    fn latencies(&mut self, count: usize) -> Result<Vec<u64>> {
        let mut nanos = Vec::with_capacity(count);
        for i in 0..count {
            let mut pair = [i as f32, self.rank as f32];
            let start = now();
            self.comm.all_reduce_in_place(&mut pair, ReduceOp::Sum)?;
            nanos.push((now() - start).as_nanos() as u64);
            ensure!(pair == [2.0 * i as f32, 1.0], "wrong sum of a small AllReduce");
        }
        Ok(nanos)
    }
}

/// User and system time of this process.
fn cpu_ns() -> io::Result<u64> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID)?;
    Ok(std::time::Duration::from(time).as_nanos() as u64)
}
