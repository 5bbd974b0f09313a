//! Who can tell, and asking them all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::server::{self, Server};
use super::{CommStatus, ProcessStatus, STATUS_VERSION};
use crate::transport::now;

/// How long an I/O thread may take to answer; an idle one looks every 50 ms.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Number of the last question.
static ASKED: AtomicU64 = AtomicU64::new(0);
static SLOTS: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

#[derive(Debug, Default)]
struct Slot {
    /// The question that was answered last, and what was said.
    answer: Mutex<(u64, Vec<CommStatus>)>,
    answered: Condvar,
}

/// An I/O thread's part in the status of its process; while there is one, the socket of `R2CC_STATUS` is open.
#[derive(Debug)]
pub struct Source {
    slot: Arc<Slot>,
    seen: u64,
    _server: Option<Arc<Server>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every write to these values is a single assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Source {
    /// A source of this process; opens the socket if the environment asks for one and nobody has.
    pub fn register() -> Self {
        let slot = Arc::new(Slot::default());
        let mut slots = locked(&SLOTS);
        slots.retain(|slot| slot.strong_count() > 0);
        slots.push(Arc::downgrade(&slot));
        drop(slots);
        Self { slot, seen: ASKED.load(Ordering::Acquire), _server: server::of_process() }
    }

    /// Whether somebody asks; then [`Source::answer`].
    pub fn is_asked(&self) -> bool {
        ASKED.load(Ordering::Relaxed) != self.seen
    }

    /// Tells whoever asks.
    pub fn answer(&mut self, comms: Vec<CommStatus>) {
        self.seen = ASKED.load(Ordering::Acquire);
        *locked(&self.slot.answer) = (self.seen, comms);
        self.slot.answered.notify_all();
    }
}

/// Asks every source, and waits for each a bounded time.
pub(super) fn ask() -> ProcessStatus {
    let question = ASKED.fetch_add(1, Ordering::AcqRel) + 1;
    let until = Instant::now() + ANSWER_TIME;
    let slots: Vec<Arc<Slot>> = locked(&SLOTS).iter().filter_map(Weak::upgrade).collect();
    let mut status =
        ProcessStatus { version: STATUS_VERSION, at_ns: 0, pid: std::process::id(), comms: Vec::new(), silent: 0 };
    for slot in slots {
        let left = until.saturating_duration_since(Instant::now());
        let wait = slot.answered.wait_timeout_while(locked(&slot.answer), left, |answer| answer.0 < question);
        let (answer, _) = wait.unwrap_or_else(PoisonError::into_inner);
        match answer.0 >= question {
            true => status.comms.extend(answer.1.iter().cloned()),
            // One that has ended meanwhile owes nothing.
            false if Arc::strong_count(&slot) > 1 => status.silent += 1,
            false => {}
        }
    }
    status.at_ns = now().as_nanos() as u64;
    status
}
