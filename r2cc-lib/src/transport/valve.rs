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
            if held > at {
                if at >= until {
                    return Ok(&[]);
                }
                self.sleep(held, held.min(until) - at);
                continue;
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
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use nix::sys::epoll::{EpollCreateFlags, EpollFlags};
    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

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

    #[test]
    fn a_thread_that_sees_a_hold_while_it_is_released_is_woken_all_the_same() {
        const TURNS: u32 = 5000;
        /// Ends a broken test, decides nothing.
        const BOUND: Duration = Duration::from_secs(20);
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        let valve = Valve::new(epoll);
        let done = AtomicBool::new(false);
        let (told, woken) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    valve.wait(BOUND * 2, &mut [EpollEvent::empty()]).unwrap();
                    if wake.read().is_ok() {
                        told.send(()).unwrap();
                    }
                }
            });
            for turn in 0..TURNS {
                valve.hold(now() + BOUND * 5);
                wake.write(1).unwrap();
                // The thread wakes and sees the hold at about the time of the release.
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
