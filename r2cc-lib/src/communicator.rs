//! The public API: a [`Communicator`] over host memory that keeps running through NIC and link failures. Its
//! collectives are in `collectives`.
//!
//! ```no_run
//! # fn main() -> Result<(), r2cc::Error> {
//! let mut comm = r2cc::Communicator::builder()
//!     .rank(0)
//!     .world(2)
//!     .rendezvous("10.0.0.1:29500".parse().expect("an address"))
//!     .secret(b"shared by the ranks of this job")
//!     .build()?;
//! let mut gradients = vec![1.0_f32; 1 << 20];
//! comm.all_reduce_in_place(&mut gradients, r2cc::ReduceOp::Sum)?;
//! comm.close()
//! # }
//! ```

mod collectives;
mod planning;

pub use collectives::Operation;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::collective::Prepared;
use crate::control::{EventLog, Failure, Gate, NicWatch, RendezvousError, join};
use crate::dtype::{DType, ReduceOp};
use crate::engine::{Command, Driving, Engine, State, Status};
use crate::planner::Planner;
use crate::repair::Tuning;
use crate::schedule::{Schedule, Shape, barrier};
use crate::settings::{Settings, SettingsError};
use crate::topology::{Member, TopologyError, by_node, is_complete, local_nics};
use crate::transport::{Corruption, LinksError, RankLinks, Stream, listen, now};

/// Small messages of a link that a rank keeps room for before their receives are posted.
const EARLY_MESSAGES: u64 = 64;

/// A communicator could not be made, or a collective could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The communicator cannot go on; every rank gets the same.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The caller's arguments do not fit together.
    #[error("{what}; hint: {hint}")]
    Argument {
        /// What is wrong.
        what: String,
        /// What would be right.
        hint: &'static str,
    },
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The NICs cannot be used.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A setting makes no sense.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The links cannot be made.
    #[error(transparent)]
    Links(#[from] LinksError),
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The I/O thread is gone.
    #[error("the communicator's I/O thread has ended")]
    Ended,
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}

/// Collects what a rank has to know. [`Builder::rank`], [`Builder::world`], [`Builder::rendezvous`] and
/// [`Builder::secret`] are required.
#[derive(Clone, Debug)]
pub struct Builder {
    rank: Option<usize>,
    world: Option<usize>,
    rendezvous: Option<SocketAddr>,
    secret: Vec<u8>,
    node: Option<String>,
    nics: Vec<String>,
    events: Option<PathBuf>,
    join_bound: Duration,
    settings: Option<Settings>,
    tuning: Tuning,
}

impl Builder {
    /// This process's rank, from 0.
    pub fn rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Number of ranks.
    pub fn world(mut self, world: usize) -> Self {
        self.world = Some(world);
        self
    }

    /// Where rank 0 listens; the control network.
    pub fn rendezvous(mut self, addr: SocketAddr) -> Self {
        self.rendezvous = Some(addr);
        self
    }

    /// A secret that every rank of the job has and nobody else.
    pub fn secret(mut self, secret: &[u8]) -> Self {
        self.secret = secret.to_vec();
        self
    }

    /// Name of this host; ranks with the same name use the loopback device. Default: the host name.
    pub fn node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    /// NICs to use, in order. Default: all that are up, not loopback, and not the rendezvous network.
    pub fn nics<I: IntoIterator<Item = S>, S: Into<String>>(mut self, nics: I) -> Self {
        self.nics = nics.into_iter().map(Into::into).collect();
        self
    }

    /// Write this rank's events to this file, one JSON object a line. Default: `R2CC_EVENTS`, if set.
    pub fn events(mut self, path: impl Into<PathBuf>) -> Self {
        self.events = Some(path.into());
        self
    }

    /// What to do for an AllReduce, healthy and after a fault. Default: the `R2CC_*` variables. Rank 0's hold for all.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// How long to wait for the other ranks. Default: 30 s.
    pub fn join_bound(mut self, bound: Duration) -> Self {
        self.join_bound = bound;
        self
    }

    /// How long a link may be without a live path before every rank gets an error. Default: 30 s.
    pub fn link_bound(mut self, bound: Duration) -> Self {
        self.tuning.link_deadline = bound;
        self
    }

    /// Joins the other ranks and connects to the neighbours in the ring.
    ///
    /// # Errors
    /// If an argument is missing, the NICs cannot be used, or not every rank joins in time.
    pub fn build(self) -> Result<Communicator, Error> {
        let missing = |what: &str| Error::Argument {
            what: format!("the builder was given no {what}"),
            hint: "rank, world, rendezvous and secret are required",
        };
        let rank = self.rank.ok_or_else(|| missing("rank"))?;
        let world = self.world.ok_or_else(|| missing("world"))?;
        let rendezvous = self.rendezvous.ok_or_else(|| missing("rendezvous"))?;
        if self.secret.is_empty() {
            return Err(missing("secret"));
        }
        if rank >= world {
            return Err(Error::Argument {
                what: format!("rank {rank} of a world of {world}"),
                hint: "ranks count from 0 to world - 1",
            });
        }
        let mut nics = local_nics(&self.nics)?;
        if self.nics.is_empty() && nics.len() > 1 {
            let control = |nic: &crate::topology::Nic| match rendezvous.ip() {
                std::net::IpAddr::V4(ip) => crate::topology::Nic { addr: ip, ..nic.clone() }.subnet() == nic.subnet(),
                std::net::IpAddr::V6(_) => false,
            };
            nics.retain(|nic| !control(nic));
        }
        let node = match self.node {
            Some(node) => node,
            None => nix::unistd::gethostname()
                .map_err(|e| io_error("ask for the host name")(e.into()))?
                .to_string_lossy()
                .into_owned(),
        };
        let port = |socket: &socket2::Socket| {
            socket.local_addr().map(|a| a.as_socket_ipv4().map_or(0, |a| a.port())).map_err(io_error("ask for a port"))
        };
        let mut listeners = Vec::new();
        let mut ports = Vec::new();
        for nic in &nics {
            let what = format!("listen on {} ({})", nic.name, nic.addr);
            let listener = listen(SocketAddrV4::new(nic.addr, 0)).map_err(io_error(what))?;
            ports.push(port(&listener)?);
            listeners.push(listener);
        }
        let local =
            listen(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).map_err(io_error("listen on the loopback device"))?;
        let local_port = port(&local)?;
        listeners.push(local);
        let events = self.events.or_else(|| std::env::var_os("R2CC_EVENTS").map(PathBuf::from));
        let log = match events {
            Some(path) => {
                EventLog::create(&path, rank).map_err(io_error(format!("make the event file {}", path.display())))?
            }
            None => EventLog::default(),
        };
        let me = Member { rank, node, nics, ports, local_port };
        let settings = self.settings.map_or_else(Settings::from_env, Ok)?;
        let joined = join(rendezvous, &self.secret, world, &me, &settings, self.join_bound)?;
        for name in settings.differences(&joined.settings) {
            tracing::warn!(name, "this rank's setting differs from rank 0's, which is taken");
        }
        let roster = Arc::new(joined.roster);
        let min_bytes = joined.settings.min_bytes;
        let planner = Planner::new(Arc::clone(&roster), joined.settings)?;
        let schedule = planner.schedule(&[]);
        let streams = planner.streams(&schedule, rank);
        let gate = Arc::new(Gate::new(schedule.clone()));
        let epoll =
            Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|e| io_error("make an epoll")(e.into()))?);
        let link_bound = self.tuning.link_deadline;
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let wake = Arc::new(EventFd::from_flags(flags).map_err(|e| io_error("make an eventfd")(e.into()))?);
        let (of_me, key) = ((rank, Arc::clone(&roster)), joined.lane_key);
        let mut links = RankLinks::new(of_me, key, self.tuning, Arc::clone(&epoll), listeners, Arc::clone(&wake))?;
        links.avoid(planner.declared_nics());
        let is_complete = is_complete(&roster);
        let nodes = by_node(&roster).iter().map(|node| node.iter().map(|member| member.rank).collect()).collect();
        let (sender, commands) = channel();
        let engine = Engine {
            me: rank,
            state: State::new(&roster, rank, schedule),
            roster,
            planner,
            gate: Arc::clone(&gate),
            epoll,
            links,
            mesh: joined.mesh,
            nic_watch: NicWatch::new().map_err(io_error("watch the NICs"))?,
            wake: Arc::clone(&wake),
            commands,
            log,
            status: crate::status::Source::register(),
            link_bound,
        };
        let driving = Arc::new(Driving::new(engine).map_err(io_error("watch the links"))?);
        let of_thread = Arc::clone(&driving);
        let thread = std::thread::Builder::new()
            .name(format!("r2cc-io-{rank}"))
            .spawn(move || of_thread.run())
            .map_err(io_error("start the I/O thread"))?;
        let thread = Some(thread);
        let mut communicator = Communicator {
            rank,
            world,
            commands: sender,
            wake,
            driving,
            is_complete,
            thread,
            gate,
            min_bytes,
            last: None,
            last_small: None,
            nodes,
            scratch: Vec::new(),
        };
        communicator.connect(streams, self.join_bound)?;
        Ok(communicator)
    }
}

/// A group of ranks that call the same collectives in the same order.
#[derive(Debug)]
pub struct Communicator {
    rank: usize,
    world: usize,
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    driving: Arc<Driving>,
    /// Every two ranks have a rail in common.
    is_complete: bool,
    thread: Option<JoinHandle<io::Result<()>>>,
    gate: Arc<Gate<Schedule>>,
    min_bytes: usize,
    /// The plan of the last AllReduce that took a schedule of many plans, and what it was made for.
    last: Option<(Arc<Schedule>, Shape, Arc<Prepared>)>,
    /// The plan of the last small AllReduce, and what it was made for.
    last_small: Option<(Shape, Arc<Prepared>)>,
    /// The ranks of each node.
    nodes: Vec<Vec<usize>>,
    /// Room for partial results; grows to what the largest plan asked for.
    scratch: Vec<u64>,
}

impl Communicator {
    /// Starts to describe a communicator.
    pub fn builder() -> Builder {
        Builder {
            rank: None,
            world: None,
            rendezvous: None,
            secret: Vec::new(),
            node: None,
            nics: Vec::new(),
            events: None,
            join_bound: Duration::from_secs(30),
            settings: None,
            tuning: Tuning {
                early_messages: EARLY_MESSAGES,
                early_bytes: collectives::SMALL_BYTES as u64,
                ..Tuning::default()
            },
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Opens the links of the first schedule, so that the first collective finds every path in service.
    fn connect(&mut self, streams: Vec<Stream>, bound: Duration) -> Result<(), Error> {
        if self.world == 1 {
            return Ok(());
        }
        self.ask(|answer| Command::Connect { streams, deadline: now() + bound.min(Duration::from_secs(5)), answer })??;
        self.barrier()
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// If the communicator has failed.
    pub fn barrier(&mut self) -> Result<(), Error> {
        let plan = barrier(self.rank, self.world);
        self.run(plan.into(), &[], &mut [], DType::F32, ReduceOp::Sum)
    }

    /// A self-test of whoever checks results: damages one received element of the next collective.
    ///
    /// # Errors
    /// If the I/O thread has ended.
    pub fn corrupt_next(&mut self, corruption: Corruption) -> Result<(), Error> {
        self.command(Command::Corrupt(corruption))
    }

    /// Sums and link states.
    ///
    /// # Errors
    /// If the I/O thread has ended.
    pub fn status(&self) -> Result<Status, Error> {
        self.ask(Command::Status)
    }

    /// Finishes in good order: waits, for a bounded time, until the others have finished too.
    ///
    /// # Errors
    /// If the communicator has failed before.
    pub fn close(mut self) -> Result<(), Error> {
        let outcome = self.ask(Command::Close);
        self.join_thread();
        outcome?
    }

    fn command(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Ended)?;
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        // A counter that is full wakes the engine just as well.
        let _ = self.wake.write(1);
        self.driving.release();
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Error> {
        let (answer, wait): (SyncSender<T>, Receiver<T>) = sync_channel(1);
        self.command(command(answer))?;
        wait.recv().map_err(|_| Error::Ended)
    }

    fn join_thread(&mut self) {
        if let Some(thread) = self.thread.take() {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "I/O thread"),
                Err(_) => tracing::error!("the I/O thread panicked"),
            }
        }
    }
}

impl Drop for Communicator {
    /// Without [`Communicator::close`] the others take this rank for lost.
    fn drop(&mut self) {
        let (closed, _) = channel();
        self.commands = closed;
        self.wake();
        self.join_thread();
    }
}
