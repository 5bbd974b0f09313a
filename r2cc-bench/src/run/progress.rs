//! Progress for people: a bar on a terminal, plain lines elsewhere. Everything goes to standard error.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Where a run stands.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    lines: bool,
}

impl Progress {
    /// A bar on a terminal, lines in a pipe, nothing when `quiet`.
    pub fn new(quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal && !quiet { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar, lines: !terminal && !quiet }
    }

    /// A step of setting up or tearing down.
    pub fn note(&self, text: &str) {
        self.bar.set_message(text.to_owned());
        if self.lines {
            eprintln!("{text}");
        }
    }

    /// Iteration `index` of `count` begins.
    pub fn iteration(&self, phase: &str, index: u32, count: u32) {
        self.bar.set_message(format!("{phase} {index}/{count}"));
        if self.lines {
            eprintln!("{phase} {index}/{count}");
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
