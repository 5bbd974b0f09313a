//! An epoll that its own thread waits for, and that another thread can take over without waking it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
    /// Locked while the kernel is told, so that it and this always say the same.
    is_shut: Mutex<bool>,
}

impl Valve {
    /// Nobody holds it.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor.
    pub(crate) fn new(inner: Arc<Epoll>) -> io::Result<Self> {
        let outer = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        outer.add(&inner.0, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { outer, inner, held_until: AtomicU64::new(0), is_shut: Mutex::new(false) })
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
        let mut is_shut = self.is_shut.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *is_shut, shut) != shut {
            let flags = if shut { EpollFlags::empty() } else { EpollFlags::EPOLLIN };
            // Fails only for lack of memory when a descriptor is added, which this is not.
            let _ = self.outer.modify(&self.inner.0, &mut EpollEvent::new(flags, 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

    /// Ends a broken test, decides nothing.
    const BOUND: Duration = Duration::from_secs(20);
    const TURNS: u32 = 5000;

    #[test]
    fn a_thread_that_shuts_the_valve_while_it_is_released_is_woken_all_the_same() {
        let inner = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        inner.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        let valve = Valve::new(inner).unwrap();
        let done = AtomicBool::new(false);
        let (told, woken) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    valve.wait(Time::from_secs(2 * BOUND.as_secs())).unwrap();
                    if wake.read().is_ok() {
                        told.send(()).unwrap();
                    }
                }
            });
            for turn in 0..TURNS {
                valve.hold(now() + Time::from_secs(100));
                wake.write(1).unwrap();
                // The thread wakes, sees the hold and shuts the valve, at about the time of the release.
                (0..turn * 61 % 4096).for_each(|_| std::hint::spin_loop());
                valve.release();
                let outcome = woken.recv_timeout(BOUND);
                done.store(outcome.is_err() || turn + 1 == TURNS, Ordering::SeqCst);
                outcome.unwrap_or_else(|_| panic!("not woken in turn {turn}"));
            }
            wake.write(1).unwrap();
        });
    }
}
