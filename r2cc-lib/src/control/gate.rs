//! The entry of a communicator: counts collectives, holds them back while a switch is under way, and says which
//! schedule each of them takes. The calling thread goes through it; the I/O thread freezes and thaws it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The entry.
#[derive(Debug)]
pub(crate) struct Gate<S> {
    state: Mutex<State<S>>,
    thawed: Condvar,
}

#[derive(Debug)]
struct State<S> {
    calls: u64,
    frozen: bool,
    closed: bool,
    /// Schedules by the first collective that takes them; the first entry holds now.
    schedules: BTreeMap<u64, Arc<S>>,
}

impl<S> Gate<S> {
    /// Open; everything takes `schedule`.
    pub(crate) fn new(schedule: S) -> Self {
        let schedules = BTreeMap::from([(0, Arc::new(schedule))]);
        let state = State { calls: 0, frozen: false, closed: false, schedules };
        Self { state: Mutex::new(state), thawed: Condvar::new() }
    }

    // Nothing panics while it holds the lock, so the state is whole.
    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A collective starts: waits until the gate is open and returns the schedule that it takes.
    pub(crate) fn enter(&self) -> Arc<S> {
        let state = self.state();
        let held = |state: &mut State<S>| state.frozen && !state.closed;
        let mut state = self.thawed.wait_while(state, held).unwrap_or_else(PoisonError::into_inner);
        state.calls += 1;
        let calls = state.calls;
        while state.schedules.keys().nth(1).is_some_and(|from| *from <= calls) {
            state.schedules.pop_first();
        }
        let schedule = state.schedules.first_key_value().map(|(_, schedule)| Arc::clone(schedule));
        schedule.unwrap_or_else(|| unreachable!("one schedule always holds"))
    }

    /// No collective starts from now on; returns the number of those that have.
    pub(crate) fn freeze(&self) -> u64 {
        let mut state = self.state();
        state.frozen = true;
        state.calls
    }

    /// From the collective of this number on, `schedule` holds.
    pub(crate) fn adopt(&self, at: u64, schedule: S) {
        let mut state = self.state();
        let _later = state.schedules.split_off(&at.max(1));
        state.schedules.insert(at, Arc::new(schedule));
    }

    /// Collectives may start again.
    pub(crate) fn thaw(&self) {
        self.state().frozen = false;
        self.thawed.notify_all();
    }

    /// The communicator is over: nobody waits here any more, and what starts now fails elsewhere.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.thawed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_take_the_schedule_that_holds_at_their_number() {
        let gate = Gate::new("ring");
        assert_eq!(*gate.enter(), "ring");
        assert_eq!(gate.freeze(), 1);
        gate.adopt(3, "r2cc");
        gate.thaw();
        assert_eq!([*gate.enter(), *gate.enter(), *gate.enter()], ["ring", "r2cc", "r2cc"]);
        gate.adopt(6, "weighted");
        gate.adopt(5, "ring");
        assert_eq!([*gate.enter(), *gate.enter()], ["ring", "ring"], "a later commit replaces one not reached");
    }

    #[test]
    fn a_frozen_gate_holds_calls_until_it_thaws_or_closes() {
        for release in [Gate::thaw as fn(&Gate<u8>), Gate::close] {
            let gate = Arc::new(Gate::new(1));
            gate.freeze();
            let (entered, inside) = std::sync::mpsc::channel();
            let caller = std::thread::spawn({
                let gate = Arc::clone(&gate);
                move || entered.send(*gate.enter())
            });
            assert_eq!(gate.freeze(), 0, "nobody has passed");
            assert!(inside.try_recv().is_err());
            release(&gate);
            assert_eq!(inside.recv(), Ok(1));
            caller.join().unwrap().unwrap();
        }
    }
}
