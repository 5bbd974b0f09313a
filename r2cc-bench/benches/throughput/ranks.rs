//! The two ranks as the benchmark sees them: processes inside their nodes, killed with it.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, Result, bail};
use r2cc_bench::cluster::EmulatedCluster;

use crate::orders::{Order, RankConfig, Reply, Run, Shape};

/// Any free port: the node is the run's own.
const RENDEZVOUS_PORT: u16 = 29_500;

struct Rank {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended by itself already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    fn tell(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        Ok(self.orders.write_all(&line)?)
    }

    fn hear(&mut self) -> Result<Reply> {
        let mut line = String::new();
        if self.replies.read_line(&mut line)? == 0 {
            bail!("a rank has ended");
        }
        match serde_json::from_str(&line)? {
            Reply::Failed { error } => bail!("a rank failed: {error}"),
            reply => Ok(reply),
        }
    }
}

/// One timed run of both ranks.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct Timing {
    /// From the first start to the last end.
    pub(crate) seconds: f64,
    /// User and system time of both processes.
    pub(crate) cpu_seconds: f64,
}

/// Both ranks.
pub(crate) struct Ranks {
    ranks: Vec<Rank>,
    addrs: Vec<Vec<Ipv4Addr>>,
}

impl Ranks {
    /// Starts one rank in each of the cluster's two nodes and waits until they have joined.
    pub(crate) fn start(cluster: &EmulatedCluster, bytes: usize) -> Result<Self> {
        let program = std::env::current_exe()?;
        let nodes = cluster.nodes();
        let rendezvous = SocketAddr::from((nodes[0].mgmt.addr, RENDEZVOUS_PORT));
        let mut ranks = Vec::new();
        for (rank, node) in nodes.iter().enumerate() {
            let config = RankConfig {
                rank,
                node: node.name.clone(),
                rendezvous,
                secret: format!("throughput-{}", cluster.id()),
                nics: node.nics.iter().map(|nic| nic.name.clone()).collect(),
                bytes,
            };
            let mut command = cluster.command(&node.name, &program)?;
            command.arg("worker").arg(serde_json::to_string(&config)?).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().context("start a rank")?;
            let (Some(orders), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
                bail!("a rank without pipes");
            };
            ranks.push(Rank { child, orders, replies: BufReader::new(out) });
        }
        let addrs = nodes.iter().map(|node| node.nics.iter().map(|nic| nic.addr).collect()).collect();
        let mut ranks = Self { ranks, addrs };
        ranks.expect_all("join", |reply| matches!(reply, Reply::Ready).then_some(()))?;
        Ok(ranks)
    }

    fn expect_all<T>(&mut self, what: &str, take: impl Fn(Reply) -> Option<T>) -> Result<Vec<T>> {
        let replies = self.ranks.iter_mut().map(|rank| {
            let reply = rank.hear()?;
            take(reply).with_context(|| format!("an unexpected reply to: {what}"))
        });
        replies.collect()
    }

    fn order_all(&mut self, order: &Order) -> Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.tell(order))
    }

    /// Opens plain connections of this shape in both directions.
    pub(crate) fn connect(&mut self, shape: Shape) -> Result<()> {
        for (rank, addrs) in self.ranks.iter_mut().zip(&self.addrs) {
            rank.tell(&Order::Listen { addrs: addrs.clone(), shape })?;
        }
        let ports = self.expect_all("listen", |reply| match reply {
            Reply::Listening { ports } => Some(ports),
            _ => None,
        })?;
        for (me, rank) in self.ranks.iter_mut().enumerate() {
            let targets = self.addrs[1 - me].iter().zip(&ports[1 - me]);
            let ends = targets.zip(&self.addrs[me]).map(|((to, port), from)| (*from, SocketAddrV4::new(*to, *port)));
            rank.tell(&Order::Connect { ends: ends.collect(), shape })?;
        }
        self.expect_all("connect", |reply| matches!(reply, Reply::Connected).then_some(())).map(drop)
    }

    fn run(&mut self, order: &Order) -> Result<Timing> {
        self.order_all(order)?;
        let runs: Vec<Run> = self.expect_all("run", |reply| match reply {
            Reply::Ran(run) => Some(run),
            _ => None,
        })?;
        let start = runs.iter().map(|run| run.start_ns).min().unwrap_or(0);
        let end = runs.iter().map(|run| run.end_ns).max().unwrap_or(0);
        let cpu: u64 = runs.iter().map(|run| run.cpu_ns).sum();
        Ok(Timing { seconds: (end - start) as f64 / 1e9, cpu_seconds: cpu as f64 / 1e9 })
    }

    /// One AllReduce of the library.
    pub(crate) fn all_reduce(&mut self) -> Result<Timing> {
        self.run(&Order::AllReduce)
    }

    /// The same bytes over the plain connections opened last.
    pub(crate) fn plain(&mut self, shape: Shape) -> Result<Timing> {
        self.run(&Order::Plain { shape })
    }

    /// As many bytes as iperf3 moves them: none is looked at.
    pub(crate) fn sink(&mut self, shape: Shape) -> Result<Timing> {
        self.run(&Order::Sink { shape })
    }

    /// Times of small AllReduces on rank 0, sorted, ns.
    pub(crate) fn latencies(&mut self, count: usize) -> Result<Vec<u64>> {
        self.order_all(&Order::Latency { count })?;
        let mut both = self.expect_all("small AllReduces", |reply| match reply {
            Reply::Latencies { nanos } => Some(nanos),
            _ => None,
        })?;
        let mut nanos = both.swap_remove(0);
        nanos.sort_unstable();
        Ok(nanos)
    }

    /// Ends both; returns the bytes that were sent again and the suspicions, which ought to be none.
    pub(crate) fn finish(mut self) -> Result<(u64, u64)> {
        self.order_all(&Order::Finish)?;
        let sums = self.expect_all("finish", |reply| match reply {
            Reply::Finished { replayed_bytes, paths_suspected } => Some((replayed_bytes, paths_suspected)),
            _ => None,
        })?;
        Ok(sums.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
    }
}
