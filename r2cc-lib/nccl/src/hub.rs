//! The process's one state: NICs, contexts, workers, and every object that NCCL has been given. All calls that are
//! not on the data path come here; none of them blocks for the network.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use r2cc::repair::Tuning;
use r2cc::topology::Nic;
use r2cc::transport::{Side, now};
use serde_json::json;

use crate::abi::{Facts, LogFn, Status};
use crate::comm::Comm;
use crate::handle::{Handle, NICS_MAX, STRIPES_MAX, Secret};
use crate::nics::{self, NicError, Wishes};
use crate::worker::{Command, Worker};
use crate::{events, log};

/// I/O threads of a process; `R2CC_IO_THREADS` sets another number. By default one for every two processors, within
/// these bounds: a thread for each link measures best, and those that wait cost nothing.
const PROCESSORS_OF_WORKER: usize = 2;
const WORKERS: std::ops::RangeInclusive<usize> = 2..=16;
/// A communicator has more than one stripe where its NICs are faster than one thread, and processors are many;
/// `R2CC_STRIPES` sets their number. On slower NICs two links would only stand in each other's way.
const STRIPED_PROCESSORS: usize = 8;
const THREAD_MBIT_S: u64 = 30_000;

/// The one device that NCCL sees: all NICs together.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) nics: Vec<Nic>,
    name: CString,
    pci_path: Option<CString>,
    guid: u64,
    speed_mbit_s: u64,
}

impl Device {
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            name: self.name.as_ptr(),
            pci_path: self.pci_path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr()),
            guid: self.guid,
            speed_mbit_s: c_int::try_from(self.speed_mbit_s).unwrap_or(c_int::MAX),
            device: 0,
        }
    }
}

/// What a pointer that NCCL holds stands for. Kept here, so that closing twice, or closing something that
/// a context has taken with it, is harmless.
#[derive(Debug)]
struct Object {
    context: u64,
    comm: Arc<Comm>,
    listening: bool,
}

#[derive(Debug, Default)]
struct State {
    workers: Vec<Arc<Worker>>,
    next_number: usize,
    next_context: u64,
    /// By the address that NCCL has.
    objects: BTreeMap<usize, Object>,
    connecting: HashMap<Secret, (u64, Arc<Comm>)>,
}

static DEVICE: OnceLock<Device> = OnceLock::new();
static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Locks the state; a panic while it was locked has been turned into an error already.
fn state() -> StateGuard {
    let mut guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_default();
    StateGuard(guard)
}

struct StateGuard(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for StateGuard {
    type Target = State;
    fn deref(&self) -> &State {
        match &*self.0 {
            Some(state) => state,
            None => unreachable!("made when it was locked"),
        }
    }
}

impl std::ops::DerefMut for StateGuard {
    fn deref_mut(&mut self) -> &mut State {
        self.0.get_or_insert_default()
    }
}

/// Finds the NICs once a process.
///
/// # Errors
/// If there are none, or the user's list names none of them.
pub(crate) fn init(log_function: Option<LogFn>) -> Result<(), Status> {
    log::install(log_function);
    if DEVICE.get().is_some() {
        return Ok(());
    }
    events::open();
    let nics = nics::candidates().and_then(|present| nics::choose(&present, &Wishes::from_environment()));
    let mut nics = nics.map_err(|error| {
        log::warn(&error.to_string());
        if matches!(error, NicError::NoMatch { .. }) { Status::InvalidUsage } else { Status::SystemError }
    })?;
    if nics.len() > NICS_MAX {
        log::warn(&format!("{} NICs match, the first {NICS_MAX} are used", nics.len()));
        nics.truncate(NICS_MAX);
    }
    let described: Vec<String> = nics.iter().map(|nic| format!("{} ({})", nic.name, nic.addr)).collect();
    let host = host_name();
    events::write(now(), "start", &json!({ "node": host, "nics": nics }));
    log::info(&format!("version {} on {host}, NICs: {}", env!("CARGO_PKG_VERSION"), described.join(", ")));
    if let [only] = nics.as_slice() {
        log::warn(&format!("only one NIC ({}) carries data: its failure cannot be repaired", only.name));
    }
    let device = Device {
        name: c"r2cc_0".to_owned(),
        pci_path: nics::pci_path(&nics),
        guid: nics::guid(&host, &nics),
        speed_mbit_s: nics::speed_mbit_s(&nics),
        nics,
    };
    // Another thread may have been faster, with the same NICs.
    let _ = DEVICE.set(device);
    Ok(())
}

pub(crate) fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "this host".into())
}

/// The device, once [`init`] has found it.
pub(crate) fn device() -> Result<&'static Device, Status> {
    DEVICE.get().ok_or(Status::InternalError)
}

/// The machines' limits, with what the user sets.
pub(crate) fn tuning() -> Tuning {
    let mut tuning = Tuning::default();
    if let Some(bound) = number("R2CC_LINK_BOUND_MS") {
        tuning.link_deadline = Duration::from_millis(bound);
    }
    tuning
}

/// How long an I/O thread stays awake for what comes next: `by_default` with at least so many processors, else not at
/// all; `R2CC_SPIN_US` sets another time.
pub(crate) fn spin_time(by_default: Duration, processors_least: usize) -> Duration {
    let otherwise = if processors() >= processors_least { by_default } else { Duration::ZERO };
    number("R2CC_SPIN_US").map_or(otherwise, Duration::from_micros)
}

/// A number that the user has set; one that cannot be read is told of and not taken.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.trim().parse().ok();
    if number.is_none() {
        log::warn(&format!("{variable}={text} is not a whole number; it is ignored"));
    }
    number
}

/// Processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A new context; a number that NCCL holds as a pointer. Interfaces without contexts use number 0.
pub(crate) fn open_context() -> u64 {
    let mut state = state();
    state.next_context += 1;
    state.next_context
}

/// Closes everything that belongs to a context.
pub(crate) fn close_context(context: u64) {
    let (objects, connecting) = {
        let mut state = state();
        let left: Vec<usize> = state.objects.iter().filter(|(_, o)| o.context == context).map(|(at, _)| *at).collect();
        let objects: Vec<Object> = left.iter().filter_map(|at| state.objects.remove(at)).collect();
        let half: Vec<Secret> = state.connecting.iter().filter(|(_, c)| c.0 == context).map(|(s, _)| *s).collect();
        (objects, half.iter().filter_map(|secret| state.connecting.remove(secret)).collect::<Vec<_>>())
    };
    objects.into_iter().map(|o| o.comm).chain(connecting.into_iter().map(|c| c.1)).for_each(|comm| close(&comm));
}

/// Links of a communicator that is received from.
fn stripes(device: &Device) -> usize {
    let is_fast = device.speed_mbit_s > THREAD_MBIT_S && processors() >= STRIPED_PROCESSORS;
    let by_default = if is_fast { STRIPES_MAX } else { 1 };
    number("R2CC_STRIPES").map_or(by_default, |asked| (asked as usize).clamp(1, STRIPES_MAX))
}

/// Runs `use_them` with workers for so many links: fresh ones, or of as many as there may be those with the fewest
/// links of this side. It is run again with others if one has just ended.
fn with_workers<T>(
    side: Side,
    links: usize,
    mut use_them: impl FnMut(Vec<(usize, Arc<Worker>)>) -> Option<T>,
) -> Result<T, Status> {
    let device = device()?;
    let most = match number("R2CC_IO_THREADS") {
        Some(asked) => (asked as usize).clamp(1, *WORKERS.end()),
        None => (processors() / PROCESSORS_OF_WORKER).clamp(*WORKERS.start(), *WORKERS.end()),
    };
    // A worker that has nothing to do ends; one made here has not had time to.
    for _ in 0..8 {
        let links: Vec<(usize, Arc<Worker>)> = {
            let mut chosen = Vec::new();
            let mut state = state();
            state.workers.retain(|worker| !worker.has_ended());
            while state.workers.len() < most && chosen.len() < links {
                let worker = Worker::start(&device.nics).map_err(|error| {
                    log::warn(&format!("cannot start an I/O thread: {error}"));
                    Status::SystemError
                })?;
                state.workers.push(Arc::clone(&worker));
                chosen.push(worker);
            }
            let mut others: Vec<Arc<Worker>> = state.workers.clone();
            others.retain(|worker| !chosen.iter().any(|taken| Arc::ptr_eq(taken, worker)));
            others.sort_by_key(|worker| worker.load(side));
            chosen.extend(others);
            // With fewer threads than links, some have more than one.
            let first = state.next_number + 1;
            state.next_number += links;
            chosen.into_iter().cycle().take(links).enumerate().map(|(i, worker)| (first + i, worker)).collect()
        };
        if let Some(done) = use_them(links) {
            return Ok(done);
        }
    }
    Err(Status::InternalError)
}

fn hand_out(context: u64, comm: &Arc<Comm>, listening: bool) -> usize {
    // A listening object and its communicator are one here, but two for NCCL: the odd address is the listener.
    let at = Arc::as_ptr(comm) as usize + usize::from(listening);
    state().objects.insert(at, Object { context, comm: Arc::clone(comm), listening });
    at
}

/// A receiving end that waits for its sender; returns NCCL's pointer and the handle.
///
/// # Errors
/// If the kernel refuses what it takes.
pub(crate) fn listen(context: u64) -> Result<(usize, [u8; crate::abi::HANDLE_BYTES]), Status> {
    let device = device()?;
    let (comm, handle) = with_workers(Side::Recv, stripes(device), |links| {
        let addrs = |(_, worker): &(usize, Arc<Worker>)| {
            let ports = worker.ports().iter();
            device.nics.iter().zip(ports).map(|(nic, port)| SocketAddrV4::new(nic.addr, *port)).collect()
        };
        let handle = Handle::draw(links.iter().map(addrs).collect()).ok()?;
        let comm = Comm::new(Side::Recv, links);
        let names = handle.stripes().map(|(name, _)| name);
        let expect = |number, name| Command::Expect { comm: Arc::clone(&comm), number, name, key: handle.key() };
        start(&comm, names, expect).then_some((comm, handle))
    })?;
    Ok((hand_out(context, &comm, true), handle.encode()))
}

/// Starts or goes on to connect to a handle; NCCL's pointer once a path is in service.
///
/// # Errors
/// If the handle is foreign, or no NIC reached the peer in time.
pub(crate) fn connect(context: u64, bytes: &[u8; crate::abi::HANDLE_BYTES]) -> Result<Option<usize>, Status> {
    let handle = Handle::decode(bytes).map_err(|error| {
        log::warn(&error.to_string());
        Status::InvalidUsage
    })?;
    let known = state().connecting.get(&handle.secret).map(|(_, comm)| Arc::clone(comm));
    let comm = match known {
        Some(comm) => comm,
        None => {
            let nics = &device()?.nics;
            let comm = with_workers(Side::Send, handle.stripes().count(), |links| {
                let comm = Comm::new(Side::Send, links);
                let open = |number, (name, addrs): (_, &[SocketAddrV4])| {
                    let (comm, key, pairs) = (Arc::clone(&comm), handle.key(), nics::pair_up(nics, addrs));
                    Command::Open { comm, number, name, key, pairs }
                };
                start(&comm, handle.stripes(), open).then_some(comm)
            })?;
            state().connecting.insert(handle.secret, (context, Arc::clone(&comm)));
            comm
        }
    };
    let outcome = comm.ending().map(|()| comm.is_usable());
    if outcome != Ok(false) {
        state().connecting.remove(&handle.secret);
    }
    outcome.map(|usable| usable.then(|| hand_out(context, &comm, false)))
}

/// Has each stripe's worker start its link; if one has ended, none is left.
fn start<T>(comm: &Arc<Comm>, of_stripes: impl Iterator<Item = T>, command: impl Fn(usize, T) -> Command) -> bool {
    let mut stripes = comm.stripes().iter().zip(of_stripes);
    let all = stripes.all(|(stripe, of_stripe)| stripe.worker.submit(command(stripe.number, of_stripe)));
    if !all {
        close(comm);
    }
    all
}

/// The receiving end of a listener once its sender is there.
///
/// # Errors
/// If the pointer is none of ours.
pub(crate) fn accept(listener: usize) -> Result<Option<usize>, Status> {
    let (context, comm) = {
        let state = state();
        let object = state.objects.get(&listener).filter(|o| o.listening).ok_or(Status::InvalidArgument)?;
        (object.context, Arc::clone(&object.comm))
    };
    comm.ending()?;
    let taken = state().objects.contains_key(&(Arc::as_ptr(&comm) as usize));
    Ok((comm.is_usable() && !taken).then(|| hand_out(context, &comm, false)))
}

/// Takes an object back. Its memory is not touched any more when this returns.
pub(crate) fn close_object(pointer: usize) {
    let (object, in_use) = {
        let mut state = state();
        let Some(object) = state.objects.remove(&pointer) else { return };
        // A listener that has become a communicator goes alone.
        let in_use = object.listening && state.objects.contains_key(&(pointer - 1));
        (object, in_use)
    };
    if !in_use {
        close(&object.comm);
    }
}

fn close(comm: &Arc<Comm>) {
    let (done, closed) = std::sync::mpsc::sync_channel(comm.stripes().len());
    for stripe in comm.stripes() {
        stripe.worker.submit(Command::Close { number: stripe.number, done: done.clone() });
    }
    drop(done);
    // Ends when each has answered, or its worker ended and its links with it.
    while closed.recv().is_ok() {}
}

/// Tells of a worker's end: its communicators cannot go on.
pub(crate) fn end_all(worker: &Worker, status: Status, text: &str) {
    let state = state();
    let connecting = state.connecting.values().map(|(_, comm)| comm);
    let comms = state.objects.values().map(|object| &object.comm).chain(connecting);
    let uses = |comm: &&Arc<Comm>| comm.stripes().iter().any(|stripe| std::ptr::eq(&*stripe.worker, worker));
    comms.filter(uses).for_each(|comm| comm.end(status, text.into()));
}

/// Has every I/O thread tell the other ends of its links.
pub(crate) fn tell_all(notice: &Arc<[u8]>) {
    let workers = state().workers.clone();
    for worker in workers {
        // One that has ended has no links.
        worker.submit(Command::Tell { notice: Arc::clone(notice) });
    }
}

/// A worker has ended: nothing of it is kept.
pub(crate) fn forget(worker: &Arc<Worker>) {
    state().workers.retain(|known| !Arc::ptr_eq(known, worker));
}
