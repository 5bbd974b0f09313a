//! Network namespaces: entering one for a moment, and naming one so that another
//! process, later, finds the same one or none.

use std::{
    fs::File,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};

/// Runs `work` inside the namespace, on a thread of its own: the caller's thread never
/// leaves its namespace, whatever happens.
pub(crate) fn within<T: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .spawn_scoped(scope, || {
                setns(netns, CloneFlags::CLONE_NEWNET)?;
                Ok(work())
            })?
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A network namespace by its place and its inode. The place may come to mean another
/// one (a process id is used again); the inode tells.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Netns {
    /// a file that opens it, such as `/proc/PID/ns/net`
    pub path: PathBuf,
    /// its inode
    pub inode: u64,
}

impl Netns {
    /// The namespace that `path` opens now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn at(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let inode = std::fs::metadata(&path)?.ino();
        Ok(Self { path, inode })
    }

    /// The calling thread's namespace.
    ///
    /// # Errors
    /// No /proc.
    pub fn current() -> io::Result<Self> {
        let inode = std::fs::metadata("/proc/thread-self/ns/net")?.ino();
        Ok(Self { path: format!("/proc/{}/ns/net", std::process::id()).into(), inode })
    }

    /// Opens it: by its path, else through any process or name that still has it.
    ///
    /// # Errors
    /// `NotFound` when it is gone, and everything in it with it.
    pub fn open(&self) -> io::Result<OwnedFd> {
        if let Ok(file) = self.open_if_same(&self.path) {
            return Ok(file);
        }
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let names = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
        processes
            .map(|entry| entry.path().join("ns/net"))
            .chain(names.map(|entry| entry.path()))
            .find_map(|path| self.open_if_same(&path).ok())
            .ok_or_else(|| {
                let text = format!("network namespace {} ({}) is gone", self.inode, self.path.display());
                io::Error::new(io::ErrorKind::NotFound, text)
            })
    }

    fn open_if_same(&self, path: &Path) -> io::Result<OwnedFd> {
        let file = File::open(path)?;
        if file.metadata()?.ino() != self.inode {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(file.into())
    }
}
