//! An epoll that its own thread waits for, and that another thread can take over without waking it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nix::sys::epoll::{Epoll, EpollEvent, EpollTimeout};

use super::now;
use crate::repair::Time;

/// Stands between an epoll and the thread that waits for it. While another holds it, what is ready wakes nobody; it is
/// still ready when the hold is over. Holding costs nothing: the thread learns of it when it is woken, and then sleeps
/// without the epoll.
#[derive(Debug)]
pub(crate) struct Valve {
    epoll: Arc<Epoll>,
    /// On the clock of [`now`], ns.
    held_until: AtomicU64,
    /// Locked for the last look before the thread sleeps, and for each release.
    sleeping: Mutex<()>,
    released: Condvar,
}

impl Valve {
    /// Nobody holds it.
    pub(crate) fn new(epoll: Arc<Epoll>) -> Self {
        Self { epoll, held_until: AtomicU64::new(0), sleeping: Mutex::new(()), released: Condvar::new() }
    }

    /// Its own thread waits until something is ready and nobody holds it, or for `most`. Returns what is ready; a
    /// hold that begins afterwards is no reason to leave it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn wait<'a>(&self, most: Time, events: &'a mut [EpollEvent]) -> io::Result<&'a [EpollEvent]> {
        let until = now() + most;
        loop {
            let (at, held) = (now(), self.held_until());
            if held > at && at < until {
                self.sleep(held, held.min(until) - at);
                continue;
            }
            if held > at {
                return Ok(&[]);
            }
            let left = until.saturating_sub(at).as_micros().div_ceil(1000) as i32;
            let timeout = EpollTimeout::try_from(left).unwrap_or(EpollTimeout::ZERO);
            let count = self.look(events, timeout)?;
            if count == 0 || !self.is_held() {
                return Ok(&events[..count]);
            }
        }
    }

    /// Until the hold that was seen is over or for `most`.
    fn sleep(&self, held: Time, most: Time) {
        let guard = self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
        if self.held_until() == held {
            drop(self.released.wait_timeout(guard, most));
        }
    }

    fn look(&self, events: &mut [EpollEvent], timeout: EpollTimeout) -> io::Result<usize> {
        match self.epoll.wait(events, timeout) {
            Ok(count) => Ok(count),
            Err(nix::Error::EINTR) => Ok(0),
            Err(e) => Err(e.into()),
        }
    }

    /// What is ready now.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn ready<'a>(&self, events: &'a mut [EpollEvent]) -> io::Result<&'a [EpollEvent]> {
        let count = self.look(events, EpollTimeout::ZERO)?;
        Ok(&events[..count])
    }

    /// Until then the thread is not to be woken: somebody else looks at what is ready.
    pub(crate) fn hold(&self, until: Time) {
        self.held_until.store(until.as_nanos() as u64, Ordering::SeqCst);
    }

    /// The thread is woken again, at once if something is ready.
    pub(crate) fn release(&self) {
        self.held_until.store(0, Ordering::SeqCst);
        let _guard = self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
        self.released.notify_one();
    }

    /// Whether somebody holds it now.
    pub(crate) fn is_held(&self) -> bool {
        self.held_until() > now()
    }

    fn held_until(&self) -> Time {
        Time::from_nanos(self.held_until.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    use nix::sys::epoll::{EpollCreateFlags, EpollFlags};
    use nix::sys::eventfd::EventFd;

    #[test]
    fn a_held_valve_lets_nothing_through_until_it_is_released_or_the_hold_ends() {
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::empty()).unwrap());
        let ready = EventFd::from_value(1).unwrap();
        epoll.add(ready.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 7)).unwrap();
        let valve = Valve::new(epoll);
        let ms = Time::from_millis;
        let waited = |valve: &Valve, most: Time| {
            let begun = now();
            let count = valve.wait(most, &mut [EpollEvent::empty(); 4]).unwrap().len();
            (count, now() - begun)
        };
        assert_eq!(waited(&valve, ms(1000)).0, 1);
        valve.hold(now() + ms(20));
        assert_eq!(waited(&valve, ms(5)).0, 0, "the wait is over before the hold");
        let (count, time) = waited(&valve, ms(1000));
        assert!(count == 1 && time < ms(500), "{count} after {time:?}");
        valve.hold(now() + ms(60_000));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| waited(&valve, ms(30_000)));
            std::thread::sleep(ms(10));
            valve.release();
            let (count, time) = waiter.join().unwrap();
            assert!(count == 1 && time < ms(10_000), "{count} after {time:?}");
        });
    }
}
