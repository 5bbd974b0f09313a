//! A job of one library on the emulated cluster: its processes, and the lines of JSON that they print.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use r2cc_bench::cluster::EmulatedCluster;
use serde::{Deserialize, Serialize};

/// AllReduces of one size: some that are not timed, then those that are.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Calls {
    pub(crate) bytes: usize,
    pub(crate) warmup: usize,
    pub(crate) count: usize,
}

/// What a process prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Line {
    /// The timed calls of a size begin.
    Begin { begin: usize },
    /// They are over: the time of each, of this rank or the slowest.
    Timed { bytes: usize, wrong: u64, nanos: Vec<u64> },
    /// One call of an endless loop.
    Called { seconds: f64, wrong: u64 },
    /// The processor time that a process took while it called nothing, as a share of that time.
    Idle { idle: f64 },
}

/// The calls of one size.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    pub(crate) bytes: usize,
    /// Wrong elements of all ranks and calls.
    pub(crate) wrong: u64,
    /// Time of each call on its slowest rank.
    pub(crate) nanos: Vec<u64>,
    /// Time that the machine's processors were busy from the first rank's begin to the last one's end.
    pub(crate) busy: Duration,
}

/// Processes of a job; whatever is left in the nodes is killed when it is dropped.
pub(crate) struct Job<'a> {
    cluster: &'a EmulatedCluster,
    children: Vec<Child>,
    lines: Receiver<(usize, String)>,
}

impl<'a> Job<'a> {
    /// Starts commands made by [`EmulatedCluster::command`].
    pub(crate) fn start(cluster: &'a EmulatedCluster, commands: Vec<Command>) -> Result<Self> {
        let (sender, lines) = channel();
        let mut job = Self { cluster, children: Vec::new(), lines };
        for (i, mut command) in commands.into_iter().enumerate() {
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn().with_context(|| format!("start {}", command.get_program().display()))?;
            let out = child.stdout.take().context("a process without a pipe")?;
            job.children.push(child);
            let sender = sender.clone();
            std::thread::spawn(move || {
                // A job that nobody listens to any more is killed.
                BufReader::new(out).lines().map_while(Result::ok).all(|line| sender.send((i, line)).is_ok())
            });
        }
        Ok(job)
    }

    /// The next line of JSON and the process that printed it; none after `most`, or when all have closed.
    pub(crate) fn line(&mut self, most: Duration) -> Result<Option<(usize, Line)>> {
        let until = Instant::now() + most;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((process, text)) if text.starts_with('{') => {
                    let line = serde_json::from_str(&text).with_context(|| format!("a line of a process: {text}"))?;
                    return Ok(Some((process, line)));
                }
                Ok((_, text)) => tracing::debug!(text, "printed"),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    /// Every size, one after the other, once all processes have ended.
    pub(crate) fn timed(mut self, most: Duration) -> Result<Vec<Timed>> {
        let until = Instant::now() + most;
        let mut all: Vec<Timed> = Vec::new();
        // The ranks of a job begin and end a little apart.
        let mut begun = BTreeMap::new();
        while let Some((_, line)) = self.line(until.saturating_duration_since(Instant::now()))? {
            match line {
                Line::Begin { begin } => drop(begun.entry(begin).or_insert(busy()?)),
                Line::Timed { bytes, wrong, nanos } => {
                    let before = begun.get(&bytes).context("the times of a size that did not begin")?;
                    let busy = busy()?.saturating_sub(*before);
                    match all.iter_mut().find(|timed| timed.bytes == bytes) {
                        Some(timed) => timed.merge(wrong, &nanos, busy),
                        None => all.push(Timed { bytes, wrong, nanos, busy }),
                    }
                }
                Line::Called { .. } | Line::Idle { .. } => bail!("a line that nobody asked for"),
            }
        }
        ensure!(Instant::now() < until, "the processes had not ended after {most:?}");
        for child in &mut self.children {
            let status = child.wait()?;
            ensure!(status.success(), "a process ended with {status}");
        }
        Ok(all)
    }

    /// What each process took while it was idle.
    pub(crate) fn idle(mut self, most: Duration) -> Result<Vec<f64>> {
        let mut shares = Vec::new();
        while shares.len() < self.children.len() {
            match self.line(most)? {
                Some((_, Line::Idle { idle })) => shares.push(idle),
                Some(_) => bail!("a line that nobody asked for"),
                None => bail!("no word from the idle processes for {most:?}"),
            }
        }
        Ok(shares)
    }

    /// Whether each process has ended, and how.
    pub(crate) fn ended(&mut self) -> Result<Vec<Option<std::process::ExitStatus>>> {
        Ok(self.children.iter_mut().map(Child::try_wait).collect::<Result<_, _>>()?)
    }
}

impl Timed {
    fn merge(&mut self, wrong: u64, nanos: &[u64], busy: Duration) {
        self.wrong += wrong;
        self.busy = self.busy.max(busy);
        self.nanos.iter_mut().zip(nanos).for_each(|(slowest, own)| *slowest = (*own).max(*slowest));
    }

    /// The time that a share of the calls does not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let mut sorted = self.nanos.clone();
        sorted.sort_unstable();
        let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
        Duration::from_nanos(sorted.get(at).copied().unwrap_or(0))
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for child in &mut self.children {
            // One that has ended has no group any more, but those that it started may be there.
            let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
            let _ = child.wait();
        }
        if let Err(error) = clear(self.cluster) {
            tracing::warn!(%error, "processes may be left in a node");
        }
    }
}

/// Kills what is left in the nodes, which are the cluster's own: MPI's daemons are children of nobody here.
fn clear(cluster: &EmulatedCluster) -> Result<()> {
    let place = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let of_node = |fd: i32| place(&Path::new("/proc/self/fd").join(fd.to_string()));
    let nodes = cluster.nodes().iter().map(|node| of_node(node.netns.as_raw_fd())).collect::<Result<Vec<_>, _>>()?;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_string_lossy().parse::<i32>();
        if let Ok(pid) = pid
            && place(&entry.path().join("ns/net")).is_ok_and(|found| nodes.contains(&found))
        {
            // It may have ended by itself since.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    Ok(())
}

/// Time that all processors have been busy since the start of the machine, interrupts included.
fn busy() -> Result<Duration> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks = fields.map(str::parse).collect::<Result<Vec<u64>, _>>().context("the first line of /proc/stat")?;
    // user, nice, system, idle, iowait, irq, softirq, steal
    let [user, nice, system, _, _, irq, softirq, ..] = ticks[..] else { bail!("a short line in /proc/stat") };
    // The kernel counts in hundredths of a second towards user space.
    Ok(Duration::from_millis((user + nice + system + irq + softirq) * 10))
}
