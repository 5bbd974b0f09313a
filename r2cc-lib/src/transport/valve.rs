//! An epoll that its own thread waits for, and that another thread can take over without waking it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::now;
use crate::repair::Time;

/// Stands between an epoll and the thread that waits for it. While another holds it, what is ready wakes nobody; it is
/// still ready when the hold is over. Holding costs nothing: the thread learns of it when it is woken, and then shuts
/// the valve itself.
#[derive(Debug)]
pub(crate) struct Valve {
    outer: Epoll,
    inner: Arc<Epoll>,
    /// On the clock of [`now`], ns.
    held_until: AtomicU64,
    is_shut: AtomicBool,
}

impl Valve {
    /// Nobody holds it.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor.
    pub(crate) fn new(inner: Arc<Epoll>) -> io::Result<Self> {
        let outer = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        outer.add(&inner.0, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { outer, inner, held_until: AtomicU64::new(0), is_shut: AtomicBool::new(false) })
    }

    /// Its own thread waits until something is ready and nobody holds it, until a hold ends, or for `most`.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn wait(&self, most: Time) -> io::Result<()> {
        let until = now() + most;
        loop {
            let (at, held) = (now(), self.held_until());
            let holds = held > at;
            self.shut(holds);
            if holds && self.held_until() != held {
                // Released since it was looked at, or held for longer.
                continue;
            }
            let left = if holds { held.min(until) } else { until }.saturating_sub(at);
            let timeout = EpollTimeout::try_from(left.as_micros().div_ceil(1000) as i32).unwrap_or(EpollTimeout::ZERO);
            let ready = match self.outer.wait(&mut [EpollEvent::empty()], timeout) {
                Ok(count) => count > 0,
                Err(nix::Error::EINTR) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            let at = now();
            if at >= until || ((ready || holds) && self.held_until() <= at) {
                return Ok(());
            }
        }
    }

    /// What is ready now.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn ready<'a>(&self, events: &'a mut [EpollEvent]) -> io::Result<&'a [EpollEvent]> {
        match self.inner.wait(events, EpollTimeout::ZERO) {
            Ok(count) => Ok(&events[..count]),
            Err(nix::Error::EINTR) => Ok(&[]),
            Err(e) => Err(e.into()),
        }
    }

    /// Until then the thread is not to be woken: somebody else looks at what is ready.
    pub(crate) fn hold(&self, until: Time) {
        self.held_until.store(until.as_nanos() as u64, Ordering::SeqCst);
    }

    /// The thread is woken again, at once if something is ready.
    pub(crate) fn release(&self) {
        self.held_until.store(0, Ordering::SeqCst);
        self.shut(false);
    }

    /// Whether somebody holds it now.
    pub(crate) fn is_held(&self) -> bool {
        self.held_until() > now()
    }

    fn held_until(&self) -> Time {
        Time::from_nanos(self.held_until.load(Ordering::SeqCst))
    }

    fn shut(&self, shut: bool) {
        if self.is_shut.swap(shut, Ordering::SeqCst) != shut {
            let flags = if shut { EpollFlags::empty() } else { EpollFlags::EPOLLIN };
            // Fails only for lack of memory when a descriptor is added, which this is not.
            let _ = self.outer.modify(&self.inner.0, &mut EpollEvent::new(flags, 0));
        }
    }
}
