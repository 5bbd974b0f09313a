//! An I/O thread: owns listeners and links, takes commands from NCCL's threads, tells them of what is done. It
//! starts with the first object that needs it and ends when it has none left.

mod driver;
mod notice;
mod telling;

use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, thread};

use nix::sys::eventfd::{EfdFlags, EventFd};
use r2cc::topology::{Nic, PairOfNics};
use r2cc::transport::handshake::{Key, LinkName};
use r2cc::transport::{Side, listen};

use crate::abi::Status;
use crate::comm::Comm;
use crate::hub;
use driver::Driver;

/// What NCCL's threads ask for.
#[derive(Debug)]
pub(crate) enum Command {
    /// Wait for the sender of an incoming link.
    Expect { comm: Arc<Comm>, number: usize, name: LinkName, key: Key },
    /// Connect an outgoing link.
    Open { comm: Arc<Comm>, number: usize, name: LinkName, key: Key, pairs: Vec<PairOfNics> },
    /// Send from this memory; it stays as it is until the request is done or the link closed.
    Send { number: usize, slot: u8, memory: Memory },
    /// Receive into this memory, under the same terms.
    Receive { number: usize, slot: u8, memory: Memory },
    /// Tell the other end of every link.
    Tell { notice: Arc<[u8]> },
    /// Close a link; answered when its memory will not be touched any more.
    Close { number: usize, done: SyncSender<()> },
}

/// Memory of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) at: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: NCCL lends the memory until the request is done or its communicator closed, to whatever thread.
unsafe impl Send for Memory {}

#[derive(Debug, Default)]
struct Inbox {
    commands: Vec<Command>,
    ended: bool,
}

/// The side of an I/O thread that others see.
#[derive(Debug)]
pub(crate) struct Worker {
    inbox: Mutex<Inbox>,
    /// Links that send and that receive.
    loads: [AtomicUsize; 2],
    /// The thread is in, or on its way into, its wait.
    sleeping: AtomicBool,
    wake: EventFd,
    ports: Vec<u16>,
}

impl Worker {
    /// Listens on every NIC and starts the thread.
    pub(crate) fn start(nics: &[Nic]) -> io::Result<Arc<Self>> {
        let (mut listeners, mut ports) = (Vec::new(), Vec::new());
        for nic in nics {
            let listener = listen(SocketAddrV4::new(nic.addr, 0))?;
            ports.push(listener.local_addr()?.as_socket_ipv4().map_or(0, |addr| addr.port()));
            listeners.push(listener);
        }
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let (inbox, loads, sleeping) = (Mutex::default(), Default::default(), AtomicBool::new(false));
        let worker = Arc::new(Self { inbox, loads, sleeping, wake, ports });
        let driver = Driver::new(Arc::clone(&worker), nics.to_vec(), listeners)?;
        let ours = Arc::clone(&worker);
        thread::Builder::new().name("r2cc-net".into()).spawn(move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| driver.run()));
            let reason = match outcome {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(format!("an I/O thread ended: {error}")),
                Err(_) => Some("an I/O thread panicked".to_owned()),
            };
            // Dropping the commands answers those who wait for a close.
            let abandoned = {
                let mut inbox = ours.inbox();
                inbox.ended = true;
                std::mem::take(&mut inbox.commands)
            };
            drop(abandoned);
            if let Some(reason) = reason {
                hub::end_all(&ours, Status::InternalError, &reason);
            }
            hub::forget(&ours);
        })?;
        Ok(worker)
    }

    /// A link of this side begins to use the thread (true), or ends.
    pub(crate) fn count(&self, side: Side, begins: bool) {
        let load = &self.loads[side as usize];
        if begins {
            load.fetch_add(1, Ordering::Relaxed)
        } else {
            load.fetch_sub(1, Ordering::Relaxed)
        };
    }

    /// What a link of this side would find: those of its own side, and all.
    pub(crate) fn load(&self, side: Side) -> (usize, usize) {
        let [send, recv] = self.loads.each_ref().map(|load| load.load(Ordering::Relaxed));
        (if side == Side::Send { send } else { recv }, send + recv)
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Port of the listener on each NIC.
    pub(crate) fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// Hands a command over; false if the thread has ended.
    pub(crate) fn submit(&self, command: Command) -> bool {
        {
            let mut inbox = self.inbox();
            if inbox.ended {
                return false;
            }
            inbox.commands.push(command);
        }
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // Fails only if the counter is full, and then the thread wakes anyway.
            let _ = self.wake.write(1);
        }
        true
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.inbox().ended
    }

    /// Whether commands wait; if not, [`Worker::submit`] wakes the thread from here on.
    fn begin_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        if self.inbox().commands.is_empty() {
            return true;
        }
        self.sleeping.store(false, Ordering::SeqCst);
        false
    }

    fn end_sleep(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    fn take_commands(&self, into: &mut Vec<Command>) {
        std::mem::swap(&mut self.inbox().commands, into);
    }

    /// Ends the thread's service unless a command has come meanwhile.
    fn end_if_unused(&self) -> bool {
        let mut inbox = self.inbox();
        inbox.ended = inbox.commands.is_empty();
        inbox.ended
    }
}
