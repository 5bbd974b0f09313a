//! Whether the processes of a job run at all: what to say of ranks that have not done what they were told.

use std::fs;
use std::time::{Duration, Instant};

/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// A rank's I/O thread wakes many times a second, whatever it waits for: one that has not run for so long cannot.
const SILENT: Duration = Duration::from_secs(2);

/// One process, looked at now and then.
#[derive(Debug)]
pub(super) struct Liveness {
    pid: u32,
    node: String,
    looked: Instant,
    /// Time on a processor, all threads together.
    ran_ns: u64,
    ran_at: Instant,
}

impl Liveness {
    pub(super) fn new(pid: u32, node: &str) -> Self {
        let now = Instant::now();
        Self { pid, node: node.to_owned(), looked: now, ran_ns: 0, ran_at: now }
    }

    /// Looks whether it has run since the last look.
    pub(super) fn look(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.looked) < LOOK {
            return;
        }
        self.looked = now;
        let ran_ns = ran_ns(self.pid);
        if ran_ns != self.ran_ns {
            (self.ran_ns, self.ran_at) = (ran_ns, now);
        }
    }

    /// What is wrong with it, if it has not run for long.
    pub(super) fn complaint(&self, rank: usize) -> Option<String> {
        let silent = self.looked.duration_since(self.ran_at);
        let state = state(self.pid)?;
        let words = match state {
            'T' => "stopped by a signal; hint: kill -CONT lets it go on",
            't' => "stopped by a debugger",
            'D' => "waiting in the kernel",
            'Z' | 'X' => "dead",
            'R' => "ready, but given no processor",
            _ => "asleep",
        };
        let Self { pid, node, .. } = self;
        (silent >= SILENT)
            .then(|| format!("rank {rank} ({node}, pid {pid}) has not run for {} s: {words}", silent.as_secs()))
    }
}

/// The letter of `ps`; none when it has gone.
pub(super) fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    stat.get(stat.rfind(')')? + 1..)?.trim_start().chars().next()
}

fn ran_ns(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of = |thread: fs::DirEntry| -> Option<u64> {
        let told = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        told.split_whitespace().next()?.parse().ok()
    };
    threads.filter_map(of).sum()
}
