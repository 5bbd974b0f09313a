//! Half of a round trip of 8 bytes over one TCP connection from one node to another, both ends polling: what no
//! library can be faster than over these sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use r2cc_bench::cluster::{EmulatedCluster, in_netns};

const WARMUP: usize = 200;

/// Median and 99th percentile over `count` round trips between the first NICs of the first two nodes.
pub(crate) fn half_round_trip(cluster: &EmulatedCluster, count: usize) -> Result<(Duration, Duration)> {
    let [first, second, ..] = cluster.nodes() else { anyhow::bail!("a cluster of one node") };
    let address = SocketAddr::from((second.nics[0].addr, 0));
    let listener = in_netns(second.netns.as_fd(), || TcpListener::bind(address))??;
    let address = listener.local_addr()?;
    let near = in_netns(first.netns.as_fd(), || TcpStream::connect(address))??;
    let (far, _) = listener.accept()?;
    for end in [&near, &far] {
        end.set_nodelay(true)?;
        end.set_nonblocking(true)?;
    }
    let echo = std::thread::spawn(move || -> Result<()> {
        let mut message = [0; 8];
        for _ in 0..WARMUP + count {
            read(&far, &mut message)?;
            (&far).write_all(&message)?;
        }
        Ok(())
    });
    let mut nanos = Vec::with_capacity(count);
    for i in 0..WARMUP + count {
        let sent = (i as u64).to_le_bytes();
        let mut got = [0; 8];
        let start = Instant::now();
        (&near).write_all(&sent)?;
        read(&near, &mut got)?;
        if i >= WARMUP {
            nanos.push(start.elapsed().as_nanos() as u64 / 2);
        }
        ensure!(got == sent, "an echo that was not sent");
    }
    echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    nanos.sort_unstable();
    let at = |share: f64| Duration::from_nanos(nanos[((nanos.len() - 1) as f64 * share).round() as usize]);
    Ok((at(0.5), at(0.99)))
}

fn read(mut from: &TcpStream, message: &mut [u8; 8]) -> Result<()> {
    let mut known = 0;
    while known < message.len() {
        match from.read(&mut message[known..]) {
            Ok(0) => anyhow::bail!("the other end has closed"),
            Ok(n) => known += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
