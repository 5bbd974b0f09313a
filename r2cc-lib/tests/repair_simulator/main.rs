//! Seeded simulator of `r2cc::repair`: the very machines that the TCP driver runs, under a virtual network
//! and clock. One seed draws topology, sizes, speeds, thresholds and faults; the same seed gives the same
//! trace. A failure prints the line that replays it.
//!
//! `R2CC_SIM_SEEDS` sets the number of seeds (default 2,000), `R2CC_SIM_SEED` the one that `replay` prints.

#![allow(unreachable_pub, clippy::unwrap_used, reason = "the modules of one test binary")]

mod check;
mod content;
mod draw;
mod net;
mod receiving;
mod scenario;
mod sending;
mod trace;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use r2cc::repair::Mutant;
use scenario::Faults;
use world::{Mode, Outcome, run};

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs `seeds` seeds on all cores; `see` judges each outcome and says whether to go on.
fn run_all(seeds: u64, mode: Mode, see: impl Fn(u64, &Result<Outcome, String>) -> bool + Sync) {
    let next = AtomicU64::new(1);
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds {
                        return;
                    }
                    let outcome = catch_unwind(AssertUnwindSafe(|| run(seed, mode)))
                        .map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "panic".to_owned()));
                    if !see(seed, &outcome) {
                        next.store(seeds + 1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
}

fn broken(outcome: &Result<Outcome, String>) -> Option<&str> {
    match outcome {
        Ok(outcome) => outcome.failure.as_deref(),
        Err(panic) => Some(panic),
    }
}

fn how_to_replay(seed: u64) -> String {
    format!("R2CC_SIM_SEED={seed} cargo test -p r2cc-lib --test repair_simulator -- replay --nocapture")
}

#[test]
fn every_rule_holds_in_every_seed_of_the_simulator() {
    let seeds = number("R2CC_SIM_SEEDS").unwrap_or(2000);
    let started = Instant::now();
    let counts = Mutex::new((Vec::<(&str, u64)>::new(), 0u64, 0u64));
    let failures = Mutex::new(Vec::new());
    run_all(seeds, Mode::default(), |seed, outcome| {
        if let Some(why) = broken(outcome) {
            failures.lock().unwrap().push(format!("seed {seed}: {why}\n  {}", how_to_replay(seed)));
        }
        if let Ok(outcome) = outcome {
            let mut counts = counts.lock().unwrap();
            counts.0.resize(outcome.coverage.rows().len(), ("", 0));
            for (slot, (name, hit)) in counts.0.iter_mut().zip(outcome.coverage.rows()) {
                *slot = (name, slot.1 + u64::from(hit));
            }
            counts.1 += outcome.events;
            counts.2 += outcome.ended_at.as_millis() as u64;
        }
        failures.lock().unwrap().len() < 10
    });
    let failures = failures.into_inner().unwrap();
    let (counts, events, virtual_ms) = counts.into_inner().unwrap();
    let took = started.elapsed().as_secs_f64();
    println!("{seeds} seeds, {events} events, {} s of virtual time in {took:.1} s", virtual_ms / 1000);
    for (name, hits) in &counts {
        println!("{:>6} of 1000 seeds: {name}", hits * 1000 / seeds);
    }
    assert!(failures.is_empty(), "{} seeds broke a rule:\n{}", failures.len(), failures.join("\n"));
    for (name, hits) in &counts {
        assert!(*hits > 0 || seeds < 1000, "no seed of {seeds} had: {name}");
    }
}

/// No path is doubted in `seeds` seeds that have only such faults.
fn needs_no_repair(seeds: u64, faults: Faults) {
    let failures = Mutex::new(Vec::new());
    run_all(seeds, Mode { faults, ..Mode::default() }, |seed, outcome| {
        if let Some(why) = broken(outcome) {
            failures.lock().unwrap().push(format!("seed {seed} with {faults:?}: {why}"));
        }
        true
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_network_without_faults_needs_no_repair() {
    needs_no_repair(200, Faults::None);
}

#[test]
fn a_slow_process_is_never_taken_for_a_dead_path() {
    needs_no_repair(300, Faults::SlowProcesses);
}

#[test]
fn one_seed_gives_one_trace() {
    for seed in 1..=40 {
        let (once, twice) = (run(seed, Mode::default()), run(seed, Mode::default()));
        assert_eq!(once.digest, twice.digest, "seed {seed}");
    }
    assert_ne!(run(1, Mode::default()).digest, run(2, Mode::default()).digest);
}

#[test]
fn replay() {
    let Some(seed) = number("R2CC_SIM_SEED") else { return };
    let faults = match std::env::var("R2CC_SIM_FAULTS").as_deref() {
        Ok("none") => Faults::None,
        Ok("slow") => Faults::SlowProcesses,
        _ => Faults::Any,
    };
    let outcome = run(seed, Mode { faults, prints: true, ..Mode::default() });
    println!("ended at {:?}, {} events, {:?}", outcome.ended_at, outcome.events, outcome.coverage);
    assert_eq!(outcome.failure, None, "seed {seed}");
}

/// The first seed that breaks a rule, and how.
fn first_broken(seeds: u64, mode: Mode) -> Option<(u64, String)> {
    let found = Mutex::new(None::<(u64, String)>);
    run_all(seeds, mode, |seed, outcome| {
        let Some(why) = broken(outcome) else { return true };
        let mut found = found.lock().unwrap();
        if found.as_ref().is_none_or(|(first, _)| seed < *first) {
            *found = Some((seed, why.to_owned()));
        }
        false
    });
    found.into_inner().unwrap()
}

/// Planted faults that contents and completion do not show: the judge alone sees them.
const SEEN_FROM_ABOVE_ONLY: [Mutant; 4] =
    [Mutant::FenceLate, Mutant::AcceptFenced, Mutant::IgnoreWindow, Mutant::NeverDead];

#[test]
fn each_mutant_is_caught_within_a_thousand_seeds() {
    for mutant in Mutant::ALL {
        let mode = Mode { mutant: Some(mutant), ..Mode::default() };
        let caught = first_broken(1000, mode);
        println!("{mutant:?}: {caught:?}");
        assert!(caught.is_some(), "{mutant:?} is not caught in 1000 seeds");
        if !SEEN_FROM_ABOVE_ONLY.contains(&mutant) {
            let by_contents = first_broken(1000, Mode { application_only: true, ..mode });
            println!("    by the application's view alone: {by_contents:?}");
            assert!(by_contents.is_some(), "{mutant:?} is not seen by the application in 1000 seeds");
        }
    }
}

/// Without faults, and with frames written whole, the application sees no mutant: it is the faults that show
/// them. (From above, `AckEarly`, `DoneAtWrite` and `IgnoreWindow` break a rule in any run: by what they do,
/// a message is done before it has landed, or a window is passed, with no fault at all.)
#[test]
fn no_mutant_shows_without_faults() {
    for mutant in Mutant::ALL {
        let above = [Mutant::AckEarly, Mutant::DoneAtWrite, Mutant::IgnoreWindow].contains(&mutant);
        let mode = Mode { mutant: Some(mutant), faults: Faults::None, application_only: above, ..Mode::default() };
        assert_eq!(first_broken(60, mode), None, "{mutant:?}");
    }
}
