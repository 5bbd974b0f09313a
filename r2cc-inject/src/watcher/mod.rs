//! The process that makes and undoes a change (link down, rate, blocked port), beside the
//! controller that asked for it.
//!
//! It undoes when told to, when its own deadline passes unrenewed (the controller may be
//! stopped), and when the controller ends in any way. If the watcher is killed, the
//! controller undoes; if both are, the next [`sweep`] does, from the [`Record`] that was
//! written before the change. Start at [`Watched::start`] (controller) and [`run`]
//! (watcher).

mod record;

use std::{
    io::{self, BufRead, BufReader, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
pub use record::{Record, STATE_DIR, SweepError, sweep};
pub(crate) use record::{check_owner, files};
use thiserror::Error;

use crate::{
    change::{ChangeError, Planned},
    injector::Phase,
    kernel::monotonic_ns,
    process::Process,
};

/// Changes that this process has asked for so far.
static MADE: AtomicU32 = AtomicU32::new(0);

/// What can go wrong between controller and watcher.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WatchError {
    /// The record cannot be written: no change without one.
    #[error("cannot write {}: {source}\n  hint: needs a writable /run", path.display())]
    Record {
        /// the record
        path: PathBuf,
        /// what the system said
        source: io::Error,
    },
    /// The watcher cannot be started or spoken to.
    #[error("the watcher process does not work: {source}")]
    Watcher {
        /// what the system said
        source: io::Error,
    },
    /// The watcher could not make the change, and undid what it had made of it.
    #[error("{reason}")]
    NotMade {
        /// what it said
        reason: String,
    },
    /// The change is still there.
    #[error(transparent)]
    LeftBehind(#[from] ChangeError),
}

/// A watcher, as its controller sees it. Dropping it heals.
#[derive(Debug)]
pub struct Watched {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    path: PathBuf,
    ended: bool,
}

impl Watched {
    /// Writes the record and starts the watcher: a command that calls [`run`] with its last
    /// argument, which is added here. Makes no change yet.
    ///
    /// # Errors
    /// [`WatchError`]; nothing is left then.
    pub fn start(
        mut command: Command,
        fault: &str,
        changes: Vec<Planned>,
        lease: Duration,
    ) -> Result<Self, WatchError> {
        let controller = Process::current();
        let path = Record::path_for(controller, MADE.fetch_add(1, Ordering::Relaxed));
        let record = Record {
            fault: fault.to_owned(),
            controller,
            watcher: None,
            phase: Phase::Armed,
            expires_at_ns: monotonic_ns() + nanos(lease),
            made_at_ns: None,
            ended_at_ns: None,
            changes,
        };
        record.write(&path).map_err(|source| WatchError::Record { path: path.clone(), source })?;
        let started = command
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Out of the terminal's process group: Ctrl-C is for the controller.
            .process_group(0)
            .spawn();
        let failed = |source| {
            std::fs::remove_file(&path).ok();
            WatchError::Watcher { source }
        };
        let mut child = started.map_err(failed)?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        };
        let mut watched = Self { child, orders, answers: BufReader::new(answers), path: path.clone(), ended: false };
        let answer = watched.answer().map_err(failed)?;
        if answer != "ready" {
            watched.child.wait().ok();
            return Err(failed(io::Error::other(answer)));
        }
        Ok(watched)
    }

    /// Makes the change; answers with when.
    ///
    /// # Errors
    /// [`WatchError::NotMade`].
    pub fn make(&mut self) -> Result<u64, WatchError> {
        self.order("make")?;
        let answer = self.answer().map_err(|source| WatchError::Watcher { source })?;
        match answer.split_once(' ') {
            Some(("made", at)) => Ok(at.parse().unwrap_or_else(|_| monotonic_ns())),
            _ => Err(WatchError::NotMade { reason: answer }),
        }
    }

    /// Makes it last `lease` from now.
    ///
    /// # Errors
    /// The watcher has gone, its deadline may have passed.
    pub fn renew(&mut self, lease: Duration) -> Result<(), WatchError> {
        self.order(&format!("renew {}", monotonic_ns() + nanos(lease)))
    }

    /// Whether the watcher has ended, by its deadline or otherwise.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// What is on record: phase, times.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn record(&self) -> Result<Record, WatchError> {
        Record::read(&self.path).map_err(|source| WatchError::Record { path: self.path.clone(), source })
    }

    /// Undoes the change, through the watcher or without it, and removes the record.
    /// Answers with the last state of it.
    ///
    /// # Errors
    /// [`WatchError::LeftBehind`]: the change is still there, and its record too.
    pub fn heal(mut self) -> Result<Record, WatchError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Record, WatchError> {
        self.ended = true;
        // A watcher that has ended, or was killed, takes no orders; what counts is the
        // record that it leaves.
        let _gone = self.order("heal");
        self.wait_for_end();
        let mut record = self.record()?;
        if record.ended_at_ns.is_none() {
            record.undo()?;
            record.ended_at_ns = Some(monotonic_ns());
            record.phase = Phase::Healed;
        }
        std::fs::remove_file(&self.path).ok();
        Ok(record)
    }

    /// Waits for the watcher to end; one that does not (it may be stopped) is killed, so
    /// that two processes never undo at once.
    fn wait_for_end(&mut self) {
        let patience = monotonic_ns() + nanos(Duration::from_secs(2));
        while monotonic_ns() < patience {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }

    fn order(&mut self, line: &str) -> Result<(), WatchError> {
        writeln!(self.orders, "{line}").map_err(|source| WatchError::Watcher { source })
    }

    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "it has ended"));
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.ended {
            let _logged = self.finish().inspect_err(|error| tracing::error!("{error}"));
        }
    }
}

/// The watcher's whole life: reads orders from stdin, answers on stdout, ends when the
/// change is undone.
///
/// # Errors
/// The change could not be undone and is left behind, on record.
pub fn run(path: &Path) -> Result<(), WatchError> {
    ignore_signals();
    let in_record = |source| WatchError::Record { path: path.to_owned(), source };
    let mut record = Record::read(path).map_err(in_record)?;
    let controller = record.controller.pidfd().map_err(|source| WatchError::Watcher { source })?;
    record.watcher = Some(Process::current());
    record.write(path).map_err(in_record)?;
    answer("ready");
    let mut orders = Orders::default();
    loop {
        let left = Duration::from_nanos(record.expires_at_ns.saturating_sub(monotonic_ns()));
        if left.is_zero() {
            return end(&mut record, path, Phase::Expired);
        }
        // Rounded up: a poll of 0 ms would spin through the last millisecond.
        let wait = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        let stdin = io::stdin();
        let mut waited =
            [PollFd::new(stdin.as_fd(), PollFlags::POLLIN), PollFd::new(controller.as_fd(), PollFlags::POLLIN)];
        poll(&mut waited, wait).ok();
        let ready = |waited: &PollFd<'_>| waited.revents().is_some_and(|events| !events.is_empty());
        if ready(&waited[1]) {
            return end(&mut record, path, Phase::Healed);
        }
        if !ready(&waited[0]) {
            continue;
        }
        let Some(lines) = orders.read(stdin.as_raw_fd()) else {
            return end(&mut record, path, Phase::Healed);
        };
        for line in lines {
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("make", _) => make(&mut record, path)?,
                ("renew", at) => {
                    // A stopped controller's orders may lie in the pipe for long.
                    if monotonic_ns() < record.expires_at_ns
                        && let Ok(at) = at.parse()
                    {
                        record.expires_at_ns = at;
                        record.write(path).map_err(in_record)?;
                    }
                }
                _ => return end(&mut record, path, Phase::Healed),
            }
        }
    }
}

fn make(record: &mut Record, path: &Path) -> Result<(), WatchError> {
    let made = record.changes.iter().try_for_each(Planned::make);
    if let Err(error) = made {
        // one line, as answers are
        answer(&error.to_string().replace('\n', " "));
        return Err(WatchError::NotMade { reason: error.to_string() }).or_else(|not_made: WatchError| {
            end(record, path, Phase::Healed)?;
            Err(not_made)
        });
    }
    let now = monotonic_ns();
    record.made_at_ns = Some(now);
    record.phase = Phase::Active;
    record.write(path).map_err(|source| WatchError::Record { path: path.to_owned(), source })?;
    answer(&format!("made {now}"));
    Ok(())
}

fn end(record: &mut Record, path: &Path, phase: Phase) -> Result<(), WatchError> {
    record.undo()?;
    record.ended_at_ns = Some(monotonic_ns());
    record.phase = phase;
    let written = record.write(path);
    if !record.controller.is_alive() {
        std::fs::remove_file(path).ok();
    }
    written.map_err(|source| WatchError::Record { path: path.to_owned(), source })
}

/// The controller may be gone, then nobody listens.
fn answer(line: &str) {
    let mut out = io::stdout().lock();
    let _unheard = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Only the deadline, the controller's end and its orders end a watcher.
fn ignore_signals() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for ignored in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGPIPE] {
        // SAFETY: ignoring installs no handler.
        let _known_good = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
}

/// Lines from a pipe that is polled: std's buffered stdin would hide some from poll.
#[derive(Default)]
struct Orders(Vec<u8>);

impl Orders {
    /// The lines that have arrived whole; None at the end of the pipe.
    fn read(&mut self, fd: i32) -> Option<Vec<String>> {
        let mut block = [0_u8; 4096];
        // SAFETY: reads at most the block's length into it, from this process's stdin.
        let n = unsafe { libc::read(fd, block.as_mut_ptr().cast(), block.len()) };
        let n = usize::try_from(n).ok().filter(|n| *n > 0)?;
        self.0.extend(&block[..n]);
        let end = self.0.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole: Vec<u8> = self.0.drain(..end).collect();
        Some(String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect())
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX / 4)
}
