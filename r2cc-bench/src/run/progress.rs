//! Progress for people: a bar on a terminal, plain lines elsewhere. Everything goes to standard error; whatever else
//! is written there while a bar is up goes through [`beside`], so that neither garbles the other.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::live::Live;

static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Writes to standard error beside the bar that is up, if one is.
pub fn beside<T>(write: impl FnOnce() -> T) -> T {
    let bar = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Standard error for logs: each write goes beside the bar.
#[derive(Debug, Clone, Copy, Default)]
pub struct BesideBar;

impl Write for BesideBar {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        beside(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Where a run stands.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    lines: bool,
    live: Arc<Live>,
}

impl Progress {
    /// A bar on a terminal, lines in a pipe, nothing when `quiet`; `live` is told in any case.
    pub fn new(quiet: bool, live: Arc<Live>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal && !quiet { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        // A message that is wider than the terminal is cut, not wrapped.
        if let Ok(style) = ProgressStyle::with_template("{spinner} [{elapsed}] {wide_msg}") {
            bar.set_style(style);
        }
        if terminal && !quiet {
            bar.enable_steady_tick(Duration::from_millis(100));
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        }
        Self { bar, lines: !terminal && !quiet, live }
    }

    /// What tells others where this bench stands.
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// A step of setting up or tearing down.
    pub fn note(&self, text: &str) {
        self.live.set(|status| {
            status.step = text.to_owned();
            status.iteration = None;
        });
        self.show(text);
    }

    /// Iteration `index` of `count` begins.
    pub fn iteration(&self, phase: &str, index: u32, count: u32) {
        self.live.set(|status| status.iteration = Some((phase.to_owned(), index, count)));
        self.show(&format!("{phase} {index}/{count}"));
    }

    fn show(&self, text: &str) {
        self.bar.set_message(text.to_owned());
        if self.lines {
            eprintln!("{text}");
        }
    }

    /// Step `number` of `count` begins; of no known count: 0.
    pub fn step(&self, what: &str, number: usize, count: usize) {
        let of = if count > 0 { format!("/{count}") } else { String::new() };
        self.bar.set_message(format!("{what} {number}{of}"));
    }

    /// Prints something while the bar is away.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Takes the bar away before anything is printed.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
        SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
