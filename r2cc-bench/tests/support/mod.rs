//! Small suites, and benches under test as child processes: what they print, which processes and namespaces
//! are theirs, and whether anything of them is left. Clusters are the benches' own; needs root.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(unreachable_pub, reason = "shared by the test files beside it")]
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use r2cc_bench::cluster::{self, ClusterState};
use r2cc_inject::observe::{self, SeenFault};
use r2cc_inject::watcher::Record;

/// Bound of everything that should happen soon; generous, since the machine may be busy.
pub const SOON: Duration = Duration::from_secs(60);
/// Bound of "gone within seconds".
pub const GONE: Duration = Duration::from_secs(20);

/// The program under test.
pub fn program() -> PathBuf {
    assert_cmd::cargo::cargo_bin!("r2cc-bench").to_path_buf()
}

/// A suite: 3 nodes with a rank each, two NICs, four iterations of 4 MiB, `node-1/mlx5_2` cut in the second.
#[derive(Clone, Debug)]
pub struct SmallSuite {
    pub name: &'static str,
    pub bytes: &'static str,
    pub iterations: u32,
    pub faults: &'static str,
}

impl Default for SmallSuite {
    fn default() -> Self {
        Self { name: "small", bytes: "4MiB", iterations: 4, faults: "drop@node-1/mlx5_2 from allreduce#2+25% for run" }
    }
}

impl SmallSuite {
    pub fn text(&self) -> String {
        let Self { name, bytes, iterations, faults } = self;
        format!(
            "version: 1
name: {name}
purpose: one NIC dies
cluster: {{kind: emulated, nodes: 3, ranks_per_node: 1, nics: [mlx5_0, mlx5_2], fabric: rails}}
scale:
  host: {{bytes: {bytes}, nic_rate: 200Mbit}}
workload: {{kind: allreduce-loop, iterations: {iterations}, baseline: 3}}
library: {{mode: balance}}
faults: [\"{faults}\"]
timing: advisory
"
        )
    }

    pub fn write(&self, folder: &Path) -> PathBuf {
        write_suite(folder, &self.text())
    }
}

pub fn write_suite(folder: &Path, text: &str) -> PathBuf {
    let file = folder.join("suite.yaml");
    fs::write(&file, text).unwrap();
    file
}

/// What a command said and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// A rank was killed, and every rank of `others` names it.
    #[track_caller]
    pub fn expect_rank_lost(self, rank: usize, node: &str, others: [usize; 2]) -> Self {
        let told = others.map(|other| format!("rank {other}: rank {rank} on {node} is lost"));
        let ended = format!("rank {rank}: its process ended without a word (signal: 9");
        self.expect_code(1).expect_words(&[&ended, &told[0], &told[1]])
    }

    #[track_caller]
    pub fn expect_words(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.stdout.contains(word) || self.stderr.contains(word), "{word:?} is not in {self:#?}");
        }
        self
    }
}

/// Runs the program to its end.
pub fn bench(args: &[&str]) -> Ended {
    run(Command::new(program()).args(args))
}

pub fn run(command: &mut Command) -> Ended {
    let output = command.env("NO_COLOR", "1").stdin(Stdio::null()).output().unwrap();
    Ended {
        code: output.status.code(),
        signal: output.status.signal(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Lets the command see a small disk of its own at `place`; nobody else does.
pub fn with_disk<'a>(
    command: &'a mut Command,
    place: &Path,
    options: &'static CStr,
    flags: MsFlags,
) -> &'a mut Command {
    let place = std::ffi::CString::new(place.to_str().unwrap()).unwrap();
    // SAFETY: between fork and exec only system calls are made, on strings that exist already.
    unsafe {
        command.pre_exec(move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            let (nothing, tmpfs): (Option<&CStr>, &CStr) = (None, c"tmpfs");
            mount(nothing, c"/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)?;
            mount(Some(tmpfs), place.as_c_str(), Some(tmpfs), flags, Some(options)).map_err(io::Error::from)
        })
    }
}

/// Waits for something to appear.
#[track_caller]
pub fn wait_for<T>(what: &str, bound: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + bound;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "after {bound:?} still waiting for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A process, told from a later one with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    start: u64,
}

impl Process {
    fn find(pid: i32) -> Option<(Self, i32)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().collect();
        let alive = !matches!(*fields.first()?, "Z" | "X");
        let (parent, start) = (fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?);
        alive.then_some((Self { pid, start }, parent))
    }

    /// The process that has this number now.
    pub fn of(pid: i32) -> Self {
        Self::find(pid).unwrap().0
    }

    pub fn is_alive(self) -> bool {
        Self::find(self.pid).is_some_and(|(found, _)| found == self)
    }

    pub fn signal(self, signal: Signal) {
        assert!(self.is_alive(), "{self:?} is gone already");
        kill(Pid::from_raw(self.pid), signal).unwrap();
    }
}

/// A bench that runs while the test looks and meddles. Dropped: killed.
#[derive(Debug)]
pub struct Running {
    child: Child,
    talk: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<String>>,
    pub out: PathBuf,
}

impl Running {
    /// Starts `run SUITE --out OUT` and more arguments.
    pub fn start(suite: &Path, out: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.arg("run").arg(suite).arg("--out").arg(out).args(args);
        Self::spawn(command, out)
    }

    pub fn spawn(mut command: Command, out: &Path) -> Self {
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A group of its own, so that a signal to the group reaches what a terminal's Ctrl-C would.
        command.process_group(0);
        let mut child = command.spawn().unwrap();
        let talk = Arc::new(Mutex::new(Vec::new()));
        let (mut stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let lines = Arc::clone(&talk);
        let readers = vec![
            thread::spawn(move || {
                let mut text = String::new();
                stdout.read_to_string(&mut text).unwrap();
                text
            }),
            thread::spawn(move || {
                let mut text = String::new();
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    text.push_str(&line);
                    text.push('\n');
                    lines.lock().unwrap().push(line);
                }
                text
            }),
        ];
        Self { child, talk, readers, out: out.to_owned() }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// As Ctrl-C on a terminal: to the foreground process group.
    pub fn ctrl_c(&self) {
        kill(Pid::from_raw(-self.pid()), Signal::SIGINT).unwrap();
    }

    /// Waits until a line of progress contains `text`.
    #[track_caller]
    pub fn wait_for_line(&mut self, text: &str) {
        let talk = Arc::clone(&self.talk);
        let child = &mut self.child;
        wait_for(&format!("the bench to say {text:?}"), SOON, || {
            if talk.lock().unwrap().iter().any(|line| line.contains(text)) {
                return Some(());
            }
            let over = child.try_wait().unwrap();
            assert!(over.is_none(), "the bench ended ({over:?}) and said only {:#?}", talk.lock().unwrap());
            None
        });
    }

    /// The state of its cluster.
    #[track_caller]
    pub fn cluster(&self) -> ClusterState {
        wait_for("the cluster's state file", SOON, || {
            cluster::survey().unwrap().running.into_iter().find(|state| state.pid == self.pid())
        })
    }

    /// Its one fault, as the kernel has it.
    pub fn fault(&self) -> Option<SeenFault> {
        let sessions = observe::sessions().unwrap();
        sessions.iter().flat_map(|session| session.faults()).find(|fault| fault.owner_pid == self.child.id())
    }

    /// Waits until its fault has fired and dropped something.
    #[track_caller]
    pub fn wait_for_cut(&self) -> SeenFault {
        wait_for("the cut", SOON, || self.fault().filter(|fault| fault.status.first_drop_ns.is_some()))
    }

    /// Its one change by netlink, as it is on record, once it is made.
    #[track_caller]
    pub fn wait_for_change(&self) -> Record {
        let path = Record::path_for(r2cc_inject::process::Process::of(self.child.id()).unwrap(), 0);
        wait_for("the change", SOON, || Record::read(&path).ok().filter(|record| record.made_at_ns.is_some()))
    }

    /// Its worker processes.
    pub fn workers(&self) -> Vec<Process> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
        let found = pids.filter_map(Process::find);
        found.filter(|(_, parent)| *parent == self.pid()).map(|(process, _)| process).collect()
    }

    /// The one worker inside a node of its cluster.
    #[track_caller]
    pub fn worker_in(&self, node: &str) -> Process {
        let state = self.cluster();
        let inode = state.nodes.iter().find(|known| known.name == node).unwrap().netns_inode;
        let inside = |process: &Process| {
            fs::metadata(format!("/proc/{}/ns/net", process.pid)).is_ok_and(|namespace| namespace.ino() == inode)
        };
        wait_for("a rank in the node", SOON, || self.workers().into_iter().find(inside))
    }

    /// Waits for its end.
    #[track_caller]
    pub fn end(mut self, bound: Duration) -> Ended {
        let status = wait_for("the bench to end", bound, || self.child.try_wait().unwrap());
        let mut texts = self.readers.drain(..).map(|reader| reader.join().unwrap());
        let (stdout, stderr) = (texts.next().unwrap(), texts.next().unwrap());
        drop(texts);
        Ended { code: status.code(), signal: status.signal(), stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `work` inside a network namespace that a state file names.
pub fn inside<T: Send>(netns: &Path, work: impl FnOnce() -> T + Send) -> T {
    let netns = File::open(netns).unwrap();
    cluster::in_netns(netns.as_fd(), work).unwrap()
}

/// What of the host a bench must not change: its interfaces and its named namespaces.
pub fn host() -> BTreeSet<String> {
    let names = |folder: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
    };
    // Test packages elsewhere in the workspace name namespaces and make interfaces while these tests run.
    let foreign = |name: &String| name.contains("/r2t");
    ["/sys/class/net", "/run/netns"].into_iter().flat_map(names).filter(|name| !foreign(name)).collect()
}

fn namespaces(state: &ClusterState) -> impl Iterator<Item = u64> + use<> {
    let mut inodes: Vec<u64> = state.nodes.iter().map(|node| node.netns_inode).collect();
    inodes.push(state.switch.netns_inode);
    inodes.into_iter()
}

/// What a bench held while it ran, to look for afterwards.
#[derive(Debug)]
pub struct Held {
    bench: u32,
    processes: Vec<Process>,
    namespaces: BTreeSet<u64>,
    state: PathBuf,
    host: BTreeSet<String>,
}

impl Held {
    /// `host`: as it was before the bench started.
    #[track_caller]
    pub fn by(bench: &Running, host: BTreeSet<String>) -> Self {
        let state = bench.cluster();
        let processes = bench.workers();
        assert!(!processes.is_empty(), "no workers to look for");
        let namespaces = namespaces(&state).collect();
        let state = Path::new("/run/r2cc").join(format!("cluster-{}.json", state.id));
        Self { bench: bench.child.id(), processes, namespaces, state, host }
    }

    /// Waits until no process, namespace with a process, fault or program of it is left, and the host is as it was.
    /// The state file may stay for the next sweep when the bench was killed.
    #[track_caller]
    pub fn expect_gone(&self, state_file_too: bool) {
        wait_for("the ranks to be gone", GONE, || {
            self.processes.iter().all(|process| !process.is_alive()).then_some(())
        });
        wait_for("the faults to be gone", GONE, || {
            let sessions = observe::sessions().unwrap();
            let mut faults = sessions.iter().flat_map(|session| session.faults());
            faults.all(|fault| fault.owner_pid != self.bench).then_some(())
        });
        wait_for("the changes on record to be gone", GONE, || {
            let changes = Record::all().unwrap();
            let mine = |change: &Record| change.controller.pid == self.bench;
            (!changes.iter().any(|(_, change)| change.as_ref().is_ok_and(mine))).then_some(())
        });
        // The inode of a namespace that is gone may serve a younger cluster, which has a state file.
        let survey = cluster::survey().unwrap();
        let younger: BTreeSet<u64> = survey.running.iter().flat_map(namespaces).collect();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let inside: Vec<_> = processes
            .filter(|process| {
                fs::metadata(process.path().join("ns/net"))
                    .is_ok_and(|found| self.namespaces.contains(&found.ino()) && !younger.contains(&found.ino()))
            })
            .map(|process| process.path())
            .collect();
        assert!(inside.is_empty(), "{inside:?} are still inside the cluster's namespaces");
        if state_file_too {
            assert!(!self.state.exists(), "{} is left", self.state.display());
        }
        assert_eq!(host(), self.host);
    }
}
