//! A communicator as NCCL's threads and the workers share it: its stripes, its requests, and how it ended if it did.
//!
//! A stripe is a link of its own, driven by a worker of its own: messages go to them in turns, so that one thread's
//! share of the work is not the limit.
//!
//! A request is a slot of its communicator. NCCL's thread takes a free slot and hands the memory to the worker;
//! the worker marks it done; NCCL's test frees it. Nothing here blocks.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use r2cc::transport::Side;

use crate::abi::{REQUESTS_MAX, Status};
use crate::log;
use crate::worker::Worker;

const PENDING: u8 = 0;
const DONE: u8 = 1;

/// One outstanding send or receive. NCCL holds its address until a test says that it is done.
#[derive(Debug)]
pub(crate) struct Request {
    state: AtomicU8,
    bytes: AtomicU64,
    slot: u8,
    comm: *const Comm,
}

/// How a communicator ended.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) status: Status,
    pub(crate) text: String,
}

/// A link of a communicator.
#[derive(Debug)]
pub(crate) struct Stripe {
    /// Its number in this process, by which the worker's links know it.
    pub(crate) number: usize,
    pub(crate) worker: Arc<Worker>,
    usable: AtomicBool,
}

/// The shared part of a communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) side: Side,
    stripes: Vec<Stripe>,
    /// Messages posted; each goes to the stripe after the last one's.
    posted: AtomicUsize,
    requests: [Request; REQUESTS_MAX],
    /// Bits of the free slots.
    free: AtomicU32,
    ending: OnceLock<Ending>,
    told: AtomicBool,
}

// SAFETY: the pointers in `requests` name the communicator itself, which outlives them.
unsafe impl Send for Comm {}
// SAFETY: as above; everything else is atomic or immutable.
unsafe impl Sync for Comm {}

impl Comm {
    /// A communicator of links with these numbers on these workers.
    pub(crate) fn new(side: Side, stripes: impl IntoIterator<Item = (usize, Arc<Worker>)>) -> Arc<Self> {
        let stripe = |(number, worker): (usize, Arc<Worker>)| {
            worker.count(side, true);
            Stripe { number, worker, usable: AtomicBool::new(false) }
        };
        let stripes = stripes.into_iter().map(stripe).collect();
        Arc::new_cyclic(|me| {
            let comm = me.as_ptr();
            let request = |slot: usize| Request {
                state: AtomicU8::new(PENDING),
                bytes: AtomicU64::new(0),
                slot: slot as u8,
                comm,
            };
            Self {
                side,
                stripes,
                posted: AtomicUsize::new(0),
                requests: std::array::from_fn(request),
                free: AtomicU32::new(u32::MAX),
                ending: OnceLock::new(),
                told: AtomicBool::new(false),
            }
        })
    }

    /// Takes a free slot, if there is one.
    pub(crate) fn take_slot(&self) -> Option<&Request> {
        let mut free = self.free.load(Ordering::Acquire);
        while free != 0 {
            let slot = free.trailing_zeros();
            match self.free.compare_exchange_weak(free, free & !(1 << slot), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    let request = &self.requests[slot as usize];
                    request.state.store(PENDING, Ordering::Relaxed);
                    return Some(request);
                }
                Err(now) => free = now,
            }
        }
        None
    }

    pub(crate) fn stripes(&self) -> &[Stripe] {
        &self.stripes
    }

    /// The stripe of the next message: both ends count alike. NCCL posts from one thread at a time.
    pub(crate) fn next_stripe(&self) -> &Stripe {
        &self.stripes[self.posted.fetch_add(1, Ordering::Relaxed) % self.stripes.len()]
    }

    /// The message of this slot is over: `bytes` were sent or have landed.
    pub(crate) fn finish(&self, slot: u8, bytes: u64) {
        let request = &self.requests[usize::from(slot)];
        request.bytes.store(bytes, Ordering::Relaxed);
        // What was received is visible to whoever sees the request done.
        request.state.store(DONE, Ordering::Release);
    }

    /// A path of the link with this number is in service.
    pub(crate) fn set_usable(&self, number: usize) {
        if let Some(stripe) = self.stripes.iter().find(|stripe| stripe.number == number) {
            stripe.usable.store(true, Ordering::Release);
        }
    }

    /// NCCL may have the communicator.
    pub(crate) fn is_usable(&self) -> bool {
        self.stripes.iter().all(|stripe| stripe.usable.load(Ordering::Acquire))
    }

    /// The communicator cannot go on; the first reason stays.
    pub(crate) fn end(&self, status: Status, text: String) {
        // A later reason is a consequence of the first.
        let _ = self.ending.set(Ending { status, text });
    }

    /// Why it cannot go on, told to NCCL's log by the first thread that asks.
    pub(crate) fn ending(&self) -> Result<(), Status> {
        let Some(ending) = self.ending.get() else { return Ok(()) };
        if !self.told.swap(true, Ordering::Relaxed) {
            log::warn(&ending.text);
        }
        Err(ending.status)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.stripes.iter().for_each(|stripe| stripe.worker.count(self.side, false));
    }
}

impl Request {
    pub(crate) fn slot(&self) -> u8 {
        self.slot
    }

    /// Gives back the slot of a request that was never handed over.
    pub(crate) fn give_back(&self) {
        self.comm().free.fetch_or(1 << self.slot, Ordering::AcqRel);
    }

    /// The bytes of a request that is done, which then is free again; `None` while it is under way.
    pub(crate) fn test(&self) -> Result<Option<u64>, Status> {
        if self.state.load(Ordering::Acquire) == DONE {
            let bytes = self.bytes.load(Ordering::Relaxed);
            self.give_back();
            return Ok(Some(bytes));
        }
        self.comm().ending().map(|()| None)
    }

    fn comm(&self) -> &Comm {
        // SAFETY: a request is a field of its communicator.
        unsafe { &*self.comm }
    }
}
