//! The outgoing links of a rank on a thread of their own. Where sending and receiving are two threads, the kernel
//! can run a sender beside the receiver of its bytes, on one core and with the bytes still in its cache.
//!
//! The engine posts into a queue and never waits for a write. What is small it sends itself, if the thread is not
//! at work: waking the thread would cost more than the write. For a while it can do all of the thread's work.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::{IDLE_TICK, LinkEvent, Links, LinksError, Source, TICK, Valve, now};
use crate::repair::{Time, Tuning};
use crate::topology::Nic;

const WAKE: u64 = 4 << 56;
/// Posts of at most this many bytes in all are sent by the engine itself.
const SMALL_BYTES: usize = 32 << 10;

/// Outgoing links, the thread that drives them, and the way to both.
#[derive(Debug)]
pub(super) struct Sending {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
    /// Bytes posted since the last [`Sending::flush`].
    fresh_bytes: Option<usize>,
}

#[derive(Debug)]
struct Shared {
    /// Locked by the thread except while it waits; taken before `posts` and `events`.
    links: Mutex<Links>,
    posts: Mutex<Vec<(usize, Source)>>,
    events: Mutex<VecDeque<LinkEvent>>,
    valve: Valve,
    /// Wakes the thread.
    wake: EventFd,
    /// Wakes the engine.
    owner: Arc<EventFd>,
    /// The thread waits as if no time had to be kept.
    idle: AtomicBool,
    done: AtomicBool,
}

impl Sending {
    /// Starts the thread; `owner` is written to when there are events.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor or the thread.
    pub(super) fn start(me: usize, nics: Vec<Nic>, tuning: Tuning, owner: Arc<EventFd>) -> Result<Self, LinksError> {
        let refused = |what| move |source: io::Error| LinksError::Io { what, source };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io::Error::from);
        let epoll = Arc::new(epoll.map_err(refused("make an epoll"))?);
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).map_err(io::Error::from);
        let wake = wake.map_err(refused("make an eventfd"))?;
        let watched = epoll.add(wake.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WAKE)).map_err(io::Error::from);
        watched.map_err(refused("watch an eventfd"))?;
        let links = Mutex::new(Links::new(nics, tuning, Arc::clone(&epoll), Vec::new())?);
        let (posts, events) = (Mutex::default(), Mutex::default());
        let (idle, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let valve = Valve::new(epoll);
        let shared = Arc::new(Shared { links, posts, events, valve, wake, owner, idle, done });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("r2cc-send-{me}")).spawn(move || of_thread.run());
        let thread = Some(thread.map_err(refused("start the sending thread"))?);
        Ok(Self { shared, thread, fresh_bytes: None })
    }

    /// The links, once the thread has finished what it is at; it is woken afterwards.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Links) -> T) -> T {
        let outcome = work(&mut lock(&self.shared.links));
        self.shared.wake();
        outcome
    }

    /// The links to be looked at, once the thread has finished what it is at.
    pub(super) fn look<T>(&self, question: impl FnOnce(&Links) -> T) -> T {
        question(&lock(&self.shared.links))
    }

    /// Takes a message for the outgoing link `peer`, which is there; it goes out with the next [`Sending::flush`].
    pub(super) fn post(&mut self, peer: usize, source: Source) {
        *self.fresh_bytes.get_or_insert(0) += source.bytes();
        lock(&self.shared.posts).push((peer, source));
    }

    /// Sees to it that what was posted is sent.
    pub(super) fn flush(&mut self) {
        let Some(bytes) = self.fresh_bytes.take() else { return };
        match self.shared.take_turn(bytes) {
            Some(mut links) => {
                self.shared.drive(&mut links, now());
                drop(links);
                // What is on its way now has deadlines.
                if self.shared.idle.swap(false, Ordering::Relaxed) {
                    self.shared.wake();
                }
            }
            None => self.shared.wake(),
        }
    }

    /// Until then [`Sending::poll`] does the thread's work; it only keeps the time.
    pub(super) fn hold(&self, until: Time) {
        self.shared.valve.hold(until);
    }

    /// The thread works again.
    pub(super) fn release(&self) {
        self.shared.wake();
    }

    /// Does what is to be done now.
    ///
    /// # Errors
    /// If the kernel refuses to say what is ready.
    pub(super) fn poll(&self) -> io::Result<()> {
        match self.shared.links.try_lock() {
            Ok(mut links) => {
                let mut events = [EpollEvent::empty(); 64];
                let ready = self.shared.valve.ready(&mut events)?;
                self.shared.turn(&mut links, now(), ready);
                Ok(())
            }
            // The thread is still at it.
            Err(_) => Ok(()),
        }
    }

    /// Moves the events that there are to the end of `events`.
    pub(super) fn take_events(&self, events: &mut VecDeque<LinkEvent>) {
        events.append(&mut lock(&self.shared.events));
    }

    /// Closes every link: no memory of a caller is read from here on.
    pub(super) fn abandon(&self) {
        let mut links = lock(&self.shared.links);
        lock(&self.shared.posts).clear();
        links.abandon();
    }

    /// Whether the thread has ended, which it does by itself only if it cannot go on.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Release);
        self.shared.wake();
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) => tracing::error!(%error, "sending thread"),
            Some(Err(_)) => tracing::error!("the sending thread panicked"),
            Some(Ok(Ok(()))) | None => {}
        }
    }
}

impl Shared {
    fn run(&self) -> io::Result<()> {
        let (mut last_tick, mut tick) = (now(), IDLE_TICK);
        let mut events = [EpollEvent::empty(); 64];
        while !self.done.load(Ordering::Acquire) {
            self.idle.store(tick == IDLE_TICK, Ordering::Relaxed);
            let ready = self.valve.wait((last_tick + tick).saturating_sub(now()), &mut events)?;
            let mut links = lock(&self.links);
            let at = now();
            if at.saturating_sub(last_tick) >= tick {
                last_tick = at;
                links.handle_tick(at);
            }
            if self.turn(&mut links, at, ready) {
                // A counter that is full wakes the engine just as well.
                let _ = self.owner.write(1);
            }
            tick = if links.needs_tick() { TICK } else { IDLE_TICK };
        }
        Ok(())
    }

    /// Reads what has come, and drives; whether there were events.
    fn turn(&self, links: &mut Links, at: Time, ready: &[EpollEvent]) -> bool {
        for event in ready {
            match event.data() {
                // The counter only wakes us; the messages are in the queue.
                WAKE => drop(self.wake.read()),
                token => links.handle_ready(at, token, event.events().contains(EpollFlags::EPOLLOUT)),
            }
        }
        self.drive(links, at)
    }

    /// The links for the engine to send so many bytes itself, unless the thread is better at it.
    fn take_turn(&self, bytes: usize) -> Option<MutexGuard<'_, Links>> {
        if bytes > SMALL_BYTES {
            return None;
        }
        match self.links.try_lock() {
            Ok(links) => Some(links),
            // A thread that is held only keeps the time, and is through before it could be woken again.
            Err(_) => self.valve.is_held().then(|| lock(&self.links)),
        }
    }

    /// Posts what waits, writes what can be written and hands on the events; whether there were any.
    fn drive(&self, links: &mut Links, at: Time) -> bool {
        for (peer, source) in lock(&self.posts).drain(..) {
            if let Err(error) = links.post_send(peer, source) {
                tracing::error!(%error, "a message for a link that is not there");
            }
        }
        links.flush(at);
        let mut fresh = std::iter::from_fn(|| links.poll_event()).peekable();
        let any = fresh.peek().is_some();
        if any {
            lock(&self.events).extend(fresh);
        }
        any
    }

    fn wake(&self) {
        // A counter that is full wakes the thread just as well.
        let _ = self.wake.write(1);
        self.valve.release();
    }
}

/// A thread that panicked has told of it already; what it left is only closed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
