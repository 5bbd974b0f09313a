//! Which thread drives an engine: its own I/O thread; or, for a small collective, the calling thread, which polls for
//! a while instead of sleeping until another has done the work, and hands over what takes longer.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use nix::sys::epoll::EpollEvent;

use super::{Answer, Command, Engine};
use crate::communicator::Error;
use crate::repair::Time;
use crate::transport::{Valve, now};

/// How long the calling thread polls before it sleeps: longer than a small collective takes when every rank is there.
const POLL_TIME: Time = Time::from_millis(1);

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
        let valve = Valve::new(engine.epoll.clone())?;
        Ok(Self { engine: Mutex::new(Some(engine)), valve })
    }

    /// The I/O thread: runs until the communicator closes.
    ///
    /// # Errors
    /// If the kernel refuses to wait.
    pub(crate) fn run(&self) -> io::Result<()> {
        let _end = End(self);
        let mut due = Time::ZERO;
        loop {
            self.valve.wait(due.saturating_sub(now()))?;
            let mut guard = self.lock();
            let Some(engine) = &mut *guard else { return Ok(()) };
            engine.turn(self.valve.ready(&mut [EpollEvent::empty(); 64])?);
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
        self.valve.shut();
        let outcome = match &mut *self.lock() {
            Some(engine) => engine.poll_for(&self.valve, command(answer), &wait),
            None => Some(Err(Error::Ended)),
        };
        self.valve.open();
        outcome.unwrap_or_else(|| wait.recv().map_err(|_| Error::Ended)?)
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
        self.links.take_over_sending();
        let begun = now();
        self.handle_command(begun, command);
        self.settle(begun);
        let outcome = loop {
            match answer.try_recv() {
                Ok(outcome) => break Some(outcome),
                Err(TryRecvError::Disconnected) => break Some(Err(Error::Ended)),
                Err(TryRecvError::Empty) => {}
            }
            if self.state.done || now().saturating_sub(begun) >= POLL_TIME || self.poll(valve).is_err() {
                break None;
            }
            std::thread::yield_now();
        };
        self.links.hand_back_sending(outcome.is_some());
        if outcome.is_none() {
            // The I/O thread keeps the time of what is on its way. A counter that is full wakes it just as well.
            let _ = self.wake.write(1);
        }
        outcome
    }

    /// Does what there is to do now on all links.
    fn poll(&mut self, valve: &Valve) -> io::Result<()> {
        self.links.poll_sending()?;
        self.turn(valve.ready(&mut [EpollEvent::empty(); 64])?);
        Ok(())
    }
}
