//! The socket: whoever connects gets a line and the end of the stream.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::board;

/// How long a reader may take to take a line, or a writer to write it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest status that is read.
const LINE_MAX: u64 = 16 << 20;

/// Answers on a Unix socket, until dropped; the socket goes with it.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path`, for this user alone, and answers each connection with what `tell` returns.
    ///
    /// # Errors
    /// If another process answers there, something that is no socket is in the way, or the path is longer than the
    /// 107 bytes that the kernel takes.
    pub fn start(path: &Path, tell: impl Fn() -> String + Send + 'static) -> io::Result<Self> {
        clear(path)?;
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let serve = move || {
            for reader in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let Ok(mut reader) = reader else { continue };
                let line = tell();
                // A reader that has gone, or does not read, is not waited for.
                let _ = reader.set_write_timeout(Some(PATIENCE));
                let _ = reader.write_all(format!("{line}\n").as_bytes());
            }
        };
        let thread = thread::Builder::new().name("r2cc-status".into()).spawn(serve)?;
        Ok(Self { path: path.to_path_buf(), over, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let woken = UnixStream::connect(&self.path);
        let _ = fs::remove_file(&self.path);
        // Where nobody could wake it, it ends with the process.
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Removes a socket that nobody answers any more.
fn clear(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket is in the way"));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process answers there")),
        Err(_) => fs::remove_file(path),
    }
}

/// Reads the line that a server at `path` gives.
///
/// # Errors
/// If nobody answers, or not in time.
pub fn read(path: &Path) -> io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.take(LINE_MAX).read_to_string(&mut text)?;
    match text.strip_suffix('\n') {
        Some(line) => Ok(line.to_owned()),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer ends in the middle")),
    }
}

/// The server that `R2CC_STATUS` asks for, one for the process; what goes wrong is a warning, never an error.
pub(super) fn of_process() -> Option<Arc<Server>> {
    static SERVER: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    static WATCH: Once = Once::new();
    let path = std::env::var("R2CC_STATUS").ok().filter(|path| !path.is_empty())?;
    let path = PathBuf::from(path.replace("%p", &std::process::id().to_string()));
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = server.upgrade() {
        return Some(server);
    }
    let tell = || serde_json::to_string(&board::ask()).unwrap_or_default();
    match Server::start(&path, tell) {
        Ok(started) => {
            let started = Arc::new(started);
            *server = Arc::downgrade(&started);
            WATCH.call_once(|| {
                // Nothing can be done about a standard error that is gone.
                let tell = || drop(write!(io::stderr(), "{}", board::ask()));
                if let Err(error) = tell_on_signal(tell) {
                    tracing::warn!(%error, "SIGUSR1 is not watched");
                }
            });
            Some(started)
        }
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "R2CC_STATUS: no status socket");
            None
        }
    }
}

/// Has SIGUSR1 call `tell` on a thread of its own, unless the program uses the signal itself.
///
/// # Errors
/// If the kernel refuses a thread, or what wakes it.
pub fn tell_on_signal(tell: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut present = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the kernel writes the present action into memory that is large enough; none is set.
    let asked = unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), present.as_mut_ptr()) };
    // SAFETY: an action of zeroes is a valid one, so it is initialised whatever the call did.
    if asked != 0 || unsafe { present.assume_init() }.sa_sigaction != libc::SIG_DFL {
        return Ok(());
    }
    let (mut waits, wakes) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(libc::SIGUSR1, wakes)?;
    thread::Builder::new().name("r2cc-signal".into()).spawn(move || {
        let mut byte = [0];
        while waits.read_exact(&mut byte).is_ok() {
            tell();
        }
    })?;
    Ok(())
}
