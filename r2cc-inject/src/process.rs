//! A process that is told from a later one with the same id.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use serde::{Deserialize, Serialize};

/// A process by its id and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// its id
    pub pid: u32,
    /// when it started, in clock ticks since boot
    pub start_time: u64,
}

impl Process {
    /// The process that has this id now.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let (state, start_time) = stat(pid)?;
        (state != 'Z').then_some(Self { pid, start_time })
    }

    /// This process.
    #[must_use]
    pub fn current() -> Self {
        let pid = std::process::id();
        Self::of(pid).unwrap_or(Self { pid, start_time: 0 })
    }

    /// Whether it still runs (or is stopped); a zombie does not.
    #[must_use]
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// A descriptor that becomes readable when it ends.
    ///
    /// # Errors
    /// `NotFound` when it has ended.
    pub fn pidfd(self) -> io::Result<OwnedFd> {
        let pid = i32::try_from(self.pid).map_err(io::Error::other)?;
        // SAFETY: pidfd_open takes two integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        if fd < 0 {
            return Err(gone());
        }
        // SAFETY: just returned to us alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Checked after opening: the descriptor cannot come to mean another process.
        if self.is_alive() { Ok(fd) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Sends it a signal, and no other process that may have its id by now.
    ///
    /// # Errors
    /// `NotFound` when it has ended, or missing rights.
    pub fn signal(self, signal: i32) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let fd = self.pidfd()?;
        // SAFETY: a live descriptor, a signal number, no siginfo, no flags.
        let sent = unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), signal, std::ptr::null::<libc::siginfo_t>(), 0)
        };
        if sent < 0 { Err(gone()) } else { Ok(()) }
    }
}

/// The last error; a process that is not there is `NotFound`, which std does not say.
fn gone() -> io::Error {
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ESRCH) => io::ErrorKind::NotFound.into(),
        error => error,
    }
}

/// State and start time.
fn stat(pid: u32) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, also parentheses and blanks.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_it_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(process.is_alive());
        assert!(!Process { start_time: process.start_time + 1, ..process }.is_alive());
        process.signal(libc::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
        assert_eq!(process.signal(0).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(Process::current().is_alive());
    }
}
