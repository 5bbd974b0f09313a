//! An epoll that its own thread waits for, and that another thread can take over without waking it.

use std::io;
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::repair::Time;

/// Stands between an epoll and the thread that waits for it. What is ready while it is shut is ready when it opens.
#[derive(Debug)]
pub(crate) struct Valve {
    outer: Epoll,
    inner: Arc<Epoll>,
}

impl Valve {
    /// Open.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor.
    pub(crate) fn new(inner: Arc<Epoll>) -> io::Result<Self> {
        let outer = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        outer.add(&inner.0, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { outer, inner })
    }

    /// Waits until something is ready and the valve open, or for `most`.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn wait(&self, most: Time) -> io::Result<()> {
        let timeout = EpollTimeout::try_from(most.as_micros().div_ceil(1000) as i32).unwrap_or(EpollTimeout::ZERO);
        match self.outer.wait(&mut [EpollEvent::empty()], timeout) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(e) => Err(e.into()),
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

    /// From now on the thread is not woken.
    pub(crate) fn shut(&self) {
        self.set(EpollFlags::empty());
    }

    /// It is woken again, at once if something is ready.
    pub(crate) fn open(&self) {
        self.set(EpollFlags::EPOLLIN);
    }

    fn set(&self, flags: EpollFlags) {
        // Fails only for lack of memory when a descriptor is added, which this is not.
        let _ = self.outer.modify(&self.inner.0, &mut EpollEvent::new(flags, 0));
    }
}
