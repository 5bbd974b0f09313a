//! What happened in a run, as lines: hashed always, printed when a seed is replayed, and the first broken rule.

use std::fmt::{Arguments, Write};

use r2cc::repair::Time;
use sha2::{Digest, Sha256};

pub struct Trace {
    hash: Sha256,
    line: String,
    prints: bool,
    pub failure: Option<String>,
}

impl Trace {
    pub fn new(prints: bool) -> Self {
        Self { hash: Sha256::new(), line: String::new(), prints, failure: None }
    }

    pub fn note(&mut self, now: Time, what: Arguments<'_>) {
        self.line.clear();
        writeln!(self.line, "{:.6} {what}", now.as_secs_f64()).unwrap();
        self.hash.update(self.line.as_bytes());
        if self.prints {
            eprint!("{}", self.line);
        }
    }

    /// A rule is broken; the first one counts.
    pub fn fail(&mut self, now: Time, what: Arguments<'_>) {
        self.note(now, format_args!("BROKEN: {what}"));
        self.failure.get_or_insert_with(|| format!("at {:.6} s: {what}", now.as_secs_f64()));
    }

    pub fn digest(&self) -> [u8; 32] {
        self.hash.clone().finalize().into()
    }
}
