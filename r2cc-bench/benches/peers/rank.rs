//! One rank of ours: makes the calls that it is told to make. It checks every element of those that are not timed.

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use r2cc::transport::now;
use r2cc::{Communicator, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::job::{Calls, Line};
use crate::library::Work;

/// From this size on a call starts when every rank is ready; smaller ones follow each other as fast as they can.
const BARRIER_BYTES: usize = 65_536;
const CALLS_BEFORE_IDLE: usize = 1000;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankConfig {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) node: String,
    pub(crate) rendezvous: (Ipv4Addr, u16),
    pub(crate) secret: String,
    pub(crate) nics: Vec<String>,
    pub(crate) work: Work,
}

/// Runs the rank that `config` describes.
pub(crate) fn run(config: &str) -> Result<()> {
    let config: RankConfig = serde_json::from_str(config).context("the rank's configuration")?;
    let mut comm = Communicator::builder()
        .rank(config.rank)
        .world(config.world)
        .node(&config.node)
        .rendezvous(SocketAddr::from(config.rendezvous))
        .secret(config.secret.as_bytes())
        .nics(config.nics)
        .build()?;
    match config.work {
        Work::Timed(all) => all.into_iter().try_for_each(|calls| measure(&mut comm, calls))?,
        Work::Loop(bytes) => run_on(&mut comm, bytes)?,
        Work::Idle(seconds) => idle(&mut comm, Duration::from_secs(seconds))?,
    }
    Ok(comm.close()?)
}

fn say(line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    io::stdout().write_all(&text)
}

fn measure(comm: &mut Communicator, calls: Calls) -> Result<()> {
    let mut buffer = vec![0.0_f32; calls.bytes / size_of::<f32>()];
    let (mut nanos, mut wrong) = (Vec::with_capacity(calls.count), 0);
    for _ in 0..calls.warmup {
        fill(&mut buffer, comm.rank());
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        wrong += count_wrong(&buffer, comm.world());
    }
    // Sums of zeros: what is timed is the calls, and what the processors do is theirs.
    buffer.fill(0.0);
    comm.barrier()?;
    say(&Line::Begin { begin: calls.bytes })?;
    for _ in 0..calls.count {
        if calls.bytes > BARRIER_BYTES {
            comm.barrier()?;
        }
        let start = now();
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        nanos.push((now() - start).as_nanos() as u64);
    }
    Ok(say(&Line::Timed { bytes: calls.bytes, wrong, nanos })?)
}

/// Makes calls that are polled for, then none for a while, and says what processor time that takes.
fn idle(comm: &mut Communicator, time: Duration) -> Result<()> {
    let mut buffer = [0.0_f32; 2];
    for _ in 0..CALLS_BEFORE_IDLE {
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    }
    let busy = || clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from);
    let before = busy()?;
    std::thread::sleep(time);
    let idle = (busy()? - before).as_secs_f64() / time.as_secs_f64();
    comm.barrier()?;
    Ok(say(&Line::Idle { idle })?)
}

fn run_on(comm: &mut Communicator, bytes: usize) -> Result<()> {
    let mut buffer = vec![0.0_f32; bytes / size_of::<f32>()];
    loop {
        fill(&mut buffer, comm.rank());
        let start = now();
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        let seconds = (now() - start).as_secs_f64();
        let wrong = count_wrong(&buffer, comm.world());
        if comm.rank() == 0 || wrong > 0 {
            say(&Line::Called { seconds, wrong })?;
        }
    }
}

fn fill(buffer: &mut [f32], rank: usize) {
    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = (rank + 1) as f32 * (i % 13) as f32);
}

fn count_wrong(buffer: &[f32], world: usize) -> u64 {
    let sum = (world * (world + 1) / 2) as f32;
    buffer.iter().enumerate().filter(|(i, x)| **x != sum * (i % 13) as f32).count() as u64
}
