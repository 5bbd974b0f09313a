//! Which thread drives an engine: its own I/O thread; or, for a small collective, the calling thread, which polls for
//! a while instead of sleeping until another has done the work, and hands over what takes longer.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::{fmt, io};

use nix::sys::epoll::EpollEvent;

use super::{Answer, Command, Engine};
use crate::communicator::Error;
use crate::repair::Time;
use crate::transport::{TICK, Valve, now};

/// How long the calling thread polls before it sleeps: longer than a small collective takes when every rank is there.
const POLL_TIME: Time = Time::from_millis(1);
/// How long the other threads stay out of the way after a call: the next one is often not far.
const HOLD_TIME: Time = Time::from_millis(2);
/// Looks at the connections that brought the last messages for each look everywhere: at the others, and at the outgoing
/// links, where grants and acknowledgements come. Small messages hardly ever wait for those.
const LOOKS: u32 = 16;

/// An engine and the way to drive it.
pub(crate) struct Driving {
    /// None once the I/O thread has ended, so that whoever waits for an answer gets none.
    engine: Mutex<Option<Engine>>,
    valve: Valve,
}

impl fmt::Debug for Driving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driving").field("valve", &self.valve).finish_non_exhaustive()
    }
}

/// Ends the engine with the I/O thread, however that ends.
struct End<'a>(&'a Driving);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if let Some(engine) = self.0.lock().take() {
            engine.gate.close();
        }
    }
}

impl Driving {
    /// Nobody drives it yet.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor, or to watch one.
    pub(crate) fn new(mut engine: Engine) -> io::Result<Self> {
        engine.start()?;
        let valve = Valve::new(engine.epoll.clone());
        Ok(Self { engine: Mutex::new(Some(engine)), valve })
    }

    /// The I/O thread: runs until the communicator closes.
    ///
    /// # Errors
    /// If the kernel refuses to wait.
    pub(crate) fn run(&self) -> io::Result<()> {
        let _end = End(self);
        let (mut due, mut events) = (Time::ZERO, [EpollEvent::empty(); 64]);
        loop {
            let ready = self.valve.wait(due.saturating_sub(now()), &mut events)?;
            let mut guard = match self.engine.try_lock() {
                // Who polls keeps the time too; one that waits for the lock would have to be woken after each call.
                Err(TryLockError::WouldBlock) if self.valve.is_held() => {
                    due = now() + TICK;
                    continue;
                }
                Err(TryLockError::WouldBlock) => self.lock(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Ok(guard) => guard,
            };
            let Some(engine) = &mut *guard else { return Ok(()) };
            engine.turn(ready);
            if engine.state.done {
                return Ok(());
            }
            due = engine.state.last_tick + engine.tick();
        }
    }

    /// On the calling thread: carries out a command, polling for a bounded time, then waiting.
    ///
    /// # Errors
    /// What the command's answer says.
    pub(crate) fn call(&self, command: impl FnOnce(Answer) -> Command) -> Result<(), Error> {
        let (answer, wait) = sync_channel(1);
        self.valve.hold(now() + POLL_TIME + HOLD_TIME);
        let outcome = match &mut *self.lock() {
            Some(engine) => engine.poll_for(&self.valve, command(answer), &wait),
            None => Some(Err(Error::Ended)),
        };
        if outcome.is_none() {
            self.release();
        }
        outcome.unwrap_or_else(|| wait.recv().map_err(|_| Error::Ended)?)
    }

    /// The I/O thread is to look at what there is.
    pub(crate) fn release(&self) {
        self.valve.release();
    }

    /// A thread that panicked has told of it already.
    fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Carries out a command until its answer is there, or for [`POLL_TIME`].
    fn poll_for(
        &mut self,
        valve: &Valve,
        command: Command,
        answer: &Receiver<Result<(), Error>>,
    ) -> Option<Result<(), Error>> {
        let begun = now();
        self.links.hold_sending(begun + POLL_TIME + HOLD_TIME);
        self.handle_command(begun, command);
        self.settle(begun);
        let mut looks = 0_u32;
        let outcome = loop {
            match answer.try_recv() {
                Ok(outcome) => break Some(outcome),
                Err(TryRecvError::Disconnected) => break Some(Err(Error::Ended)),
                Err(TryRecvError::Empty) => {}
            }
            looks += 1;
            if self.state.done || now().saturating_sub(begun) >= POLL_TIME {
                break None;
            }
            match self.poll(valve, looks.is_multiple_of(LOOKS)) {
                Ok(true) => {}
                Ok(false) => std::thread::yield_now(),
                Err(_) => break None,
            }
        };
        if outcome.is_none() {
            self.links.release_sending();
            // The I/O thread keeps the time of what is on its way. A counter that is full wakes it just as well.
            let _ = self.wake.write(1);
        }
        outcome
    }

    /// Does what there is to do now: where the next messages are likely to come, or everywhere. Whether there was any.
    fn poll(&mut self, valve: &Valve, everywhere: bool) -> io::Result<bool> {
        if !everywhere {
            let at = now();
            let any = self.links.look(at);
            if any {
                self.settle(at);
            }
            return Ok(any);
        }
        self.links.poll_sending()?;
        let mut events = [EpollEvent::empty(); 64];
        let ready = valve.ready(&mut events)?;
        self.turn(ready);
        Ok(!ready.is_empty())
    }
}
