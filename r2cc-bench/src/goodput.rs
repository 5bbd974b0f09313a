//! What plain TCP reaches over a cluster's NICs: the yardstick for the baseline iterations.
//!
//! Owns a measurement around the ring of nodes: one plain TCP flow per NIC from each node to the
//! next, each bound to its NIC's address, all at once, counted where they arrive and only once
//! they are steady. One worker process a node, driven over a socket that is its standard input.
//! Knows nothing of collectives. Start at [`measure`]; workers run [`serve`].

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::cluster::{ClusterError, EmulatedCluster, Node};

/// Slow start and the shapers' first burst are over by then.
const WARMUP: Duration = Duration::from_millis(300);
/// Senders go on for this long, so that no flow ends while another is still counted.
const TAIL: Duration = Duration::from_millis(100);
/// Bound of every step that has no duration of its own.
const PATIENCE: Duration = Duration::from_secs(10);
const CHUNK_BYTES: usize = 128 * 1024;

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
pub enum GoodputError {
    /// The cluster is not one to measure.
    #[error("goodput needs two nodes or more with a NIC each on a common rail: {reason}")]
    Shape {
        /// What it lacks.
        reason: String,
    },
    /// A namespace could not be entered.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The worker of a node did not start, answer, or end.
    #[error("goodput worker of {node}: cannot {step}: {source}")]
    Worker {
        /// The node.
        node: String,
        /// What it should have done.
        step: &'static str,
        /// Why it did not.
        source: io::Error,
    },
    /// The worker of a node reported a failure of its own.
    #[error("goodput worker of {node}: {reason}")]
    Reported {
        /// The node.
        node: String,
        /// The worker's words.
        reason: String,
    },
}

/// Steady-state goodput, counted by the receivers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// Each node, in the cluster's order.
    pub nodes: Vec<NodeGoodput>,
}

/// What one node received.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeGoodput {
    /// The node.
    pub node: String,
    /// Sum over its NICs.
    pub received_bits_s: f64,
    /// Each NIC that had a flow; 0 where none arrived.
    pub nics: Vec<NicGoodput>,
}

/// What one NIC received.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NicGoodput {
    /// The NIC.
    pub nic: String,
    /// Payload bits a second.
    pub received_bits_s: f64,
}

impl Goodput {
    /// The node that received least: a ring runs at its pace.
    pub fn slowest_node_bits_s(&self) -> f64 {
        self.nodes.iter().map(|node| node.received_bits_s).fold(f64::INFINITY, f64::min)
    }
}

/// Measures with `program worker goodput` in each node, for `duration` after a warm-up.
pub fn measure(cluster: &EmulatedCluster, program: &Path, duration: Duration) -> Result<Goodput, GoodputError> {
    measure_with(cluster, duration, |node| {
        let mut command = cluster.command(node, program)?;
        command.args(["worker", "goodput"]);
        Ok(command)
    })
}

/// Measures with the given command in each node; it must end up in [`serve`].
pub fn measure_with(
    cluster: &EmulatedCluster,
    duration: Duration,
    command: impl Fn(&str) -> Result<Command, ClusterError>,
) -> Result<Goodput, GoodputError> {
    let nodes = cluster.nodes();
    let flows = ring_flows(nodes)?;
    let mut workers = nodes
        .iter()
        .map(|node| Worker::start(&node.name, command(&node.name)?, duration))
        .collect::<Result<Vec<_>, GoodputError>>()?;

    let arriving = |node: usize| flows.iter().filter(move |flow| flow.to == node);
    for (node, worker) in workers.iter_mut().enumerate() {
        let addrs = arriving(node).map(|flow| flow.target).collect();
        worker.ask(&Request::Listen { addrs })?;
    }
    let mut targets = Vec::with_capacity(flows.len());
    for (node, worker) in workers.iter_mut().enumerate() {
        match worker.answer()? {
            Reply::Listening { ports } if ports.len() == arriving(node).count() => {
                targets.extend(arriving(node).zip(ports));
            }
            other => return Err(worker.unexpected("listen", &other)),
        }
    }
    for (node, worker) in workers.iter_mut().enumerate() {
        let ends = targets
            .iter()
            .filter(|(flow, _)| flow.from == node)
            .map(|(flow, port)| (flow.source, SocketAddrV4::new(flow.target, *port)))
            .collect();
        worker.ask(&Request::Connect { ends })?;
    }
    for worker in &mut workers {
        match worker.answer()? {
            Reply::Connected => {}
            other => return Err(worker.unexpected("connect", &other)),
        }
    }
    for worker in &mut workers {
        worker.ask(&Request::Run { duration })?;
    }
    let mut measured = Vec::with_capacity(workers.len());
    for (node, worker) in workers.iter_mut().enumerate() {
        match worker.answer()? {
            Reply::Measured { bits_s } if bits_s.len() == arriving(node).count() => {
                let nics = arriving(node)
                    .zip(&bits_s)
                    .map(|(flow, bits_s)| NicGoodput { nic: flow.target_nic.to_owned(), received_bits_s: *bits_s });
                measured.push(NodeGoodput {
                    node: worker.node.clone(),
                    received_bits_s: bits_s.iter().sum(),
                    nics: nics.collect(),
                });
            }
            other => return Err(worker.unexpected("measure", &other)),
        }
    }
    Ok(Goodput { nodes: measured })
}

/// One flow of the ring.
#[derive(Debug)]
struct Flow<'a> {
    from: usize,
    to: usize,
    source: Ipv4Addr,
    target: Ipv4Addr,
    target_nic: &'a str,
}

fn ring_flows(nodes: &[Node]) -> Result<Vec<Flow<'_>>, GoodputError> {
    if nodes.len() < 2 {
        return Err(GoodputError::Shape { reason: format!("it has {}", nodes.len()) });
    }
    let mut flows = Vec::new();
    for from in 0..nodes.len() {
        let to = (from + 1) % nodes.len();
        let before = flows.len();
        for source in &nodes[from].nics {
            let target = nodes[to].nics.iter().find(|nic| nic.rail == source.rail);
            flows.extend(target.map(|target| Flow {
                from,
                to,
                source: source.addr,
                target: target.addr,
                target_nic: &target.name,
            }));
        }
        if flows.len() == before {
            return Err(GoodputError::Shape {
                reason: format!("{} and {} share none", nodes[from].name, nodes[to].name),
            });
        }
    }
    Ok(flows)
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    Listen { addrs: Vec<Ipv4Addr> },
    Connect { ends: Vec<(Ipv4Addr, SocketAddrV4)> },
    Run { duration: Duration },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reply {
    Listening { ports: Vec<u16> },
    Connected,
    Measured { bits_s: Vec<f64> },
    Failed { reason: String },
}

/// The orchestrator's side of one worker; kills it when it goes away first.
struct Worker {
    node: String,
    child: Child,
    line: Line,
}

impl Worker {
    fn start(node: &str, mut command: Command, duration: Duration) -> Result<Self, GoodputError> {
        let failed = |step| move |source| GoodputError::Worker { node: node.to_owned(), step, source };
        let (ours, theirs) = UnixStream::pair().map_err(failed("open its socket"))?;
        let patience = WARMUP + duration + TAIL + PATIENCE;
        ours.set_read_timeout(Some(patience))
            .and_then(|()| ours.set_write_timeout(Some(patience)))
            .map_err(failed("bound its socket"))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        let child = command.spawn().map_err(failed("start"))?;
        Ok(Self { node: node.to_owned(), child, line: Line(BufReader::new(ours)) })
    }

    fn ask(&mut self, request: &Request) -> Result<(), GoodputError> {
        self.line.send(request).map_err(|source| self.failed("take a request", source))
    }

    fn answer(&mut self) -> Result<Reply, GoodputError> {
        match self.line.receive() {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(self.failed("answer", io::ErrorKind::UnexpectedEof.into())),
            Err(source) => Err(self.failed("answer", source)),
        }
    }

    fn failed(&self, step: &'static str, source: io::Error) -> GoodputError {
        GoodputError::Worker { node: self.node.clone(), step, source }
    }

    fn unexpected(&self, asked: &str, reply: &Reply) -> GoodputError {
        GoodputError::Reported {
            node: self.node.clone(),
            reason: match reply {
                Reply::Failed { reason } => reason.clone(),
                other => format!("asked to {asked}, it answered {other:?}"),
            },
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Messages as lines of JSON.
struct Line(BufReader<UnixStream>);

impl Line {
    fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(message)?;
        text.push(b'\n');
        self.0.get_mut().write_all(&text)
    }

    /// `None` when the other side has closed.
    fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut text = String::new();
        if self.0.read_line(&mut text)? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&text)?))
    }
}

/// The worker of one node: answers the orchestrator on standard input, which is a socket, until
/// that closes.
pub fn serve() -> io::Result<()> {
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = Line(BufReader::new(stream));
    let mut ends = Ends::default();
    while let Some(request) = line.receive()? {
        let reply = ends.follow(request).unwrap_or_else(|error| Reply::Failed { reason: error.to_string() });
        line.send(&reply)?;
    }
    Ok(())
}

/// The sockets of one worker.
#[derive(Default)]
struct Ends {
    listeners: Vec<Socket>,
    senders: Vec<Socket>,
    receivers: Vec<Socket>,
}

impl Ends {
    fn follow(&mut self, request: Request) -> io::Result<Reply> {
        match request {
            Request::Listen { addrs } => {
                self.listeners = addrs.into_iter().map(listen).collect::<Result<_, _>>()?;
                let ports = self.listeners.iter().map(port).collect::<Result<_, _>>()?;
                Ok(Reply::Listening { ports })
            }
            Request::Connect { ends } => {
                self.senders =
                    ends.into_iter().map(|(source, target)| connect(source, target)).collect::<Result<_, _>>()?;
                self.receivers = self
                    .listeners
                    .drain(..)
                    .map(|listener| listener.accept().map(|(socket, _)| socket))
                    .collect::<Result<_, _>>()?;
                Ok(Reply::Connected)
            }
            Request::Run { duration } => Ok(Reply::Measured { bits_s: self.run(duration) }),
        }
    }

    fn run(&self, duration: Duration) -> Vec<f64> {
        let from = Instant::now() + WARMUP;
        let until = from + duration;
        thread::scope(|scope| {
            for sender in &self.senders {
                scope.spawn(move || fill(sender, until + TAIL));
            }
            let receivers: Vec<_> =
                self.receivers.iter().map(|receiver| scope.spawn(move || drain(receiver, from, until))).collect();
            receivers.into_iter().map(|receiver| receiver.join().unwrap_or(0.0)).collect()
        })
    }
}

fn listen(addr: Ipv4Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((addr, 0)).into())?;
    socket.listen(1)?;
    // Bounds `accept` as well.
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

fn port(listener: &Socket) -> io::Result<u16> {
    let addr = listener.local_addr()?.as_socket();
    Ok(addr.map_or(0, |addr| addr.port()))
}

fn connect(source: Ipv4Addr, target: SocketAddrV4) -> io::Result<Socket> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{source} to {target}: {error}"));
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket
        .bind(&SocketAddr::from((source, 0)).into())
        .and_then(|()| socket.connect_timeout(&SocketAddr::V4(target).into(), PATIENCE))
        .map_err(named)?;
    Ok(socket)
}

/// Sends until `until`, or until the flow stands still or breaks; the receiver then counts less.
fn fill(mut sender: &Socket, until: Instant) {
    let chunk = vec![0x5a; CHUNK_BYTES];
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        let bounded = sender.set_write_timeout(Some(left.max(Duration::from_millis(1))));
        if bounded.is_err() || sender.write(&chunk).is_err() {
            break;
        }
    }
    // A broken flow cannot be shut down any more.
    let _ = sender.shutdown(Shutdown::Write);
}

/// Bits a second between the first reads after `from` and after `until`.
fn drain(mut receiver: &Socket, from: Instant, until: Instant) -> f64 {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut total = 0_u64;
    let mut first = None;
    let mut last = None;
    loop {
        let left = (until + TAIL).saturating_duration_since(Instant::now());
        let bounded = receiver.set_read_timeout(Some(left.max(Duration::from_millis(1))));
        let now = match bounded.and_then(|()| receiver.read(&mut chunk)) {
            Ok(0) | Err(_) => break,
            Ok(read) => {
                total += read as u64;
                Instant::now()
            }
        };
        if now >= until {
            // The rest is read only so that the sender is not held up.
            last.get_or_insert((now, total));
            if now >= until + TAIL {
                break;
            }
        } else if now >= from {
            first.get_or_insert((now, total));
        }
    }
    match (first, last) {
        (Some((start, before)), Some((end, after))) => (after - before) as f64 * 8.0 / (end - start).as_secs_f64(),
        // It stopped on the way: what came, over the whole time.
        (Some((_, before)), None) => (total - before) as f64 * 8.0 / (until - from).as_secs_f64(),
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{ClusterSpec, Fabric};
    use std::env;

    const WORKER: &str = "R2CC_TEST_GOODPUT_WORKER";

    #[test]
    #[ignore = "the worker process of the measurements below, which start it"]
    fn goodput_worker() {
        if env::var_os(WORKER).is_some() {
            serve().unwrap();
        }
    }

    fn measured(cluster: &EmulatedCluster) -> Result<Goodput, GoodputError> {
        measure_with(cluster, Duration::from_secs(1), |node| {
            let mut command = cluster.command(node, &env::current_exe().unwrap())?;
            command.args(["goodput::tests::goodput_worker", "--exact", "--ignored"]).env(WORKER, "1");
            Ok(command)
        })
    }

    #[test]
    fn each_nic_reports_its_own_share_of_the_ring() {
        let mut spec = ClusterSpec::uniform(3, &["mlx5_0", "mlx5_2"], Some(100_000_000), Fabric::Rails);
        for node in &mut spec.nodes {
            node.nics[1].rate_bits_s = Some(50_000_000);
        }
        let cluster = EmulatedCluster::build(&spec).unwrap();
        let goodput = measured(&cluster).unwrap();
        assert_eq!(goodput.nodes.len(), 3);
        for node in &goodput.nodes {
            let [fast, slow] = node.nics.as_slice() else { panic!("{node:?}") };
            // Headers take 4 to 5 percent; nothing comes faster than the rate.
            assert!(fast.received_bits_s < 100_000_000.0, "{goodput:?}");
            assert!(slow.received_bits_s < 50_000_000.0, "{goodput:?}");
            // A busy machine may starve a flow, but not down to the slower one's rate.
            assert!(fast.received_bits_s > 50_000_000.0, "{goodput:?}");
            assert_eq!(node.received_bits_s, fast.received_bits_s + slow.received_bits_s);
        }
        assert!(goodput.slowest_node_bits_s() <= goodput.nodes[0].received_bits_s);
    }

    #[test]
    fn a_ring_of_one_node_is_refused() {
        let spec = ClusterSpec::uniform(1, &["mlx5_0"], None, Fabric::Rails);
        let cluster = EmulatedCluster::build(&spec).unwrap();
        let error = measured(&cluster).unwrap_err();
        assert!(matches!(error, GoodputError::Shape { .. }), "{error}");
    }

    #[test]
    fn a_worker_that_does_not_speak_is_named() {
        let spec = ClusterSpec::uniform(2, &["mlx5_0"], None, Fabric::Rails);
        let cluster = EmulatedCluster::build(&spec).unwrap();
        let error = measure(&cluster, Path::new("/bin/true"), Duration::from_millis(10));
        let error = error.unwrap_err();
        assert!(matches!(&error, GoodputError::Worker { node, .. } if node.starts_with("node-")), "{error}");
    }
}
