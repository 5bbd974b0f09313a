//! The bench's side: one process a rank, started inside its node, killed with the bench.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::liveness::{self, Liveness};
use super::{Order, RankConfig, Report};

/// How often a wait looks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);
/// How long the other ranks have to say what they saw when one is lost.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The ranks did not do what they were told.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The user interrupted.
    #[error("interrupted")]
    Interrupted,
    /// The bound passed.
    #[error("after {seconds:.0} s these ranks had not finished {what}: {waiting:?}{}", stuck_words(stuck))]
    TimedOut {
        /// What they should have finished.
        what: String,
        /// The bound.
        seconds: f64,
        /// The ranks.
        waiting: Vec<usize>,
        /// Those of them that do not run at all, in words: the others wait for them.
        stuck: Vec<String>,
    },
    /// All ranks live, and nothing moves.
    #[error("{what} hangs: every rank is alive and no payload has arrived on any data port for {silent_s:.0} s")]
    Hung {
        /// What never ended.
        what: String,
        /// For how long nothing had moved.
        silent_s: f64,
    },
    /// Ranks ended or failed.
    #[error("{}", told(first, others))]
    Lost {
        /// The rank that was lost first, and how.
        first: (usize, String),
        /// What the others said.
        others: Vec<(usize, String)>,
        /// Whether the machine is at fault, by the first rank's own words.
        environment: bool,
    },
    /// A rank's log cannot be made.
    #[error("{}: cannot be written: {source}\n  hint: free some space there, or give another --out", place.display())]
    Log {
        /// The file.
        place: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A rank could not be started or spoken to.
    #[error("rank {rank}: {source}")]
    Io {
        /// The rank.
        rank: usize,
        /// Why.
        source: io::Error,
    },
}

fn told(first: &(usize, String), others: &[(usize, String)]) -> String {
    let mut text = format!("rank {}: {}", first.0, first.1);
    for (rank, words) in others {
        text.push_str(&format!("\n  rank {rank}: {words}"));
    }
    text
}

fn stuck_words(stuck: &[String]) -> String {
    match stuck {
        [] => "\n  all of them run".to_owned(),
        stuck => stuck.iter().map(|words| format!("\n  {words}")).collect(),
    }
}

#[derive(Debug)]
enum FromRank {
    Report(Report),
    Ended,
}

#[derive(Debug)]
struct Rank {
    child: Child,
    liveness: Liveness,
    orders: Option<ChildStdin>,
    /// Its output is closed: nothing more will be heard of it.
    closed: bool,
    ended: bool,
}

/// The processes of a job. Dropped: killed and reaped.
#[derive(Debug)]
pub struct Job<'a> {
    ranks: Vec<Rank>,
    reports: Receiver<(usize, FromRank)>,
    interrupted: &'a AtomicBool,
    /// When each rank last said that it was about to call the collective.
    calling: Vec<Option<u64>>,
}

impl<'a> Job<'a> {
    /// Starts one process a rank: `command(rank)` enters its node; its talk goes to `rank-N.log` in `logs`.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn start(
        configs: &[RankConfig],
        command: impl Fn(&RankConfig) -> Result<Command, io::Error>,
        logs: &Path,
        interrupted: &'a AtomicBool,
    ) -> Result<Self, JobError> {
        let (sender, reports) = channel();
        let mut job = Self { ranks: Vec::new(), reports, interrupted, calling: vec![None; configs.len()] };
        for config in configs {
            let rank = config.rank;
            let place = logs.join(format!("rank-{rank}.log"));
            let log = File::create(&place).map_err(|source| JobError::Log { place, source })?;
            let started = (|| {
                let mut command = command(config)?;
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
                command.spawn()
            })();
            let mut child = started.map_err(|source| JobError::Io { rank, source })?;
            if let Some(out) = child.stdout.take() {
                let sender = sender.clone();
                thread::spawn(move || read_reports(rank, out, &sender));
            }
            let orders = child.stdin.take();
            let liveness = Liveness::new(child.id(), &config.node);
            job.ranks.push(Rank { child, liveness, orders, closed: false, ended: false });
            job.write(rank, config)?;
        }
        Ok(job)
    }

    /// Process of a rank.
    pub fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].child.id()
    }

    /// When each rank called the collective that is under way, by its own clock.
    pub fn calls(&self) -> &[Option<u64>] {
        &self.calling
    }

    /// Every rank's process and its state as the kernel has it, and whether all of them live.
    pub fn processes(&self) -> (Vec<String>, bool) {
        let of = |(rank, process): (usize, &Rank)| {
            let pid = process.child.id();
            let state = liveness::state(pid);
            (format!("rank {rank}: process {pid} {}", state.unwrap_or('-')), state.is_some_and(|s| !"ZX".contains(s)))
        };
        let (words, alive): (Vec<_>, Vec<_>) = self.ranks.iter().enumerate().map(of).unzip();
        (words, alive.into_iter().all(|alive| alive))
    }

    fn write<T: serde::Serialize>(&mut self, rank: usize, line: &T) -> Result<(), JobError> {
        let Some(orders) = &mut self.ranks[rank].orders else { return Ok(()) };
        let written = serde_json::to_vec(line).map_err(io::Error::from).and_then(|mut bytes| {
            bytes.push(b'\n');
            orders.write_all(&bytes).and_then(|()| orders.flush())
        });
        match written {
            // A rank that has ended is noticed by its closed output, with the reason.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(|source| JobError::Io { rank, source }),
        }
    }

    /// Gives each rank its order.
    ///
    /// # Errors
    /// If a rank cannot be spoken to.
    pub fn order(&mut self, order: impl Fn(usize) -> Order) -> Result<(), JobError> {
        (0..self.ranks.len()).try_for_each(|rank| self.write(rank, &order(rank)))
    }

    /// Waits for one report of every rank, in rank order.
    ///
    /// # Errors
    /// If a rank is lost or fails, the bound passes, or the user interrupts.
    pub fn gather(&mut self, what: &str, bound: Duration) -> Result<Vec<Report>, JobError> {
        self.gather_watched(what, bound, &mut || Ok(()))
    }

    /// [`Job::gather`], asking `watch` every now and then whether to go on.
    ///
    /// # Errors
    /// As [`Job::gather`], and what `watch` answers.
    pub fn gather_watched(
        &mut self,
        what: &str,
        bound: Duration,
        watch: &mut dyn FnMut() -> Result<(), JobError>,
    ) -> Result<Vec<Report>, JobError> {
        let deadline = Instant::now() + bound;
        let mut reports: Vec<Option<Report>> = vec![None; self.ranks.len()];
        if let Some(rank) = self.ranks.iter().position(|rank| rank.closed) {
            return Err(self.lost(rank, None, &reports));
        }
        while reports.iter().any(Option::is_none) {
            match self.next(deadline, watch)? {
                Some((rank, FromRank::Report(Report::Calling { start_ns, .. }))) => self.calling[rank] = Some(start_ns),
                Some((rank, FromRank::Report(Report::Failed { error, environment }))) => {
                    return Err(self.lost(rank, Some((error, environment)), &reports));
                }
                Some((rank, FromRank::Report(report))) => reports[rank] = Some(report),
                Some((rank, FromRank::Ended)) => {
                    self.ranks[rank].closed = true;
                    // One that has finished may end while others still have to report.
                    if reports[rank].is_none() {
                        return Err(self.lost(rank, None, &reports));
                    }
                }
                None => {
                    let waiting = (0..reports.len()).filter(|rank| reports[*rank].is_none()).collect();
                    return Err(self.timed_out(what, bound, waiting));
                }
            }
        }
        Ok(reports.into_iter().flatten().collect())
    }

    /// Next message, or `None` at the deadline.
    fn next(
        &mut self,
        deadline: Instant,
        watch: &mut dyn FnMut() -> Result<(), JobError>,
    ) -> Result<Option<(usize, FromRank)>, JobError> {
        loop {
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(JobError::Interrupted);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.ranks.iter_mut().for_each(|rank| rank.liveness.look());
            watch()?;
            match self.reports.recv_timeout(left.min(LOOK)) {
                Ok(message) => return Ok(Some(message)),
                Err(RecvTimeoutError::Timeout) => {}
                // All readers have ended, so their endings have been received.
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    fn timed_out(&self, what: &str, bound: Duration, waiting: Vec<usize>) -> JobError {
        let stuck = waiting.iter().filter_map(|rank| self.ranks[*rank].liveness.complaint(*rank)).collect();
        JobError::TimedOut { what: what.to_owned(), seconds: bound.as_secs_f64(), waiting, stuck }
    }

    /// How a lost rank ended, and what the others say of it.
    fn lost(&mut self, rank: usize, error: Option<(String, bool)>, reports: &[Option<Report>]) -> JobError {
        let mut words: Vec<Option<(String, bool)>> = vec![None; self.ranks.len()];
        let mut ended: Vec<bool> = self.ranks.iter().map(|rank| rank.closed).collect();
        words[rank] = error;
        let deadline = Instant::now() + LAST_WORDS;
        while !ended.iter().all(|e| *e) {
            match self.next(deadline, &mut || Ok(())) {
                Ok(Some((rank, FromRank::Report(Report::Failed { error, environment })))) => {
                    words[rank] = Some((error, environment));
                }
                Ok(Some((rank, FromRank::Ended))) => ended[rank] = true,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        // A rank that was killed says nothing itself: it is the first cause.
        let silent = (0..words.len()).find(|r| ended[*r] && words[*r].is_none() && reports[*r].is_none());
        let first = silent.unwrap_or(rank);
        let (first_words, environment) = words[first].clone().unwrap_or_else(|| (self.ending(first), false));
        let others = (0..words.len()).filter(|r| *r != first).filter_map(|r| Some((r, words[r].clone()?.0))).collect();
        JobError::Lost { first: (first, first_words), others, environment }
    }

    fn ending(&mut self, rank: usize) -> String {
        match self.ranks[rank].child.wait() {
            Ok(status) => {
                self.ranks[rank].ended = true;
                format!("its process ended without a word ({status})")
            }
            Err(error) => format!("its process ended without a word ({error})"),
        }
    }

    /// Waits for every process to end by itself.
    ///
    /// # Errors
    /// If one ends in error or not within the bound.
    pub fn wait(&mut self, bound: Duration) -> Result<(), JobError> {
        let deadline = Instant::now() + bound;
        for rank in 0..self.ranks.len() {
            loop {
                match self.ranks[rank].child.try_wait() {
                    Ok(Some(status)) if status.success() => break self.ranks[rank].ended = true,
                    Ok(Some(status)) => {
                        self.ranks[rank].ended = true;
                        let first = (rank, format!("{status} while closing"));
                        return Err(JobError::Lost { first, others: vec![], environment: false });
                    }
                    Ok(None) if Instant::now() < deadline => {
                        self.ranks[rank].liveness.look();
                        thread::sleep(Duration::from_millis(2));
                    }
                    Ok(None) => {
                        return Err(self.timed_out("closing", bound, vec![rank]));
                    }
                    Err(source) => return Err(JobError::Io { rank, source }),
                }
            }
        }
        Ok(())
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.orders = None;
            if !rank.ended {
                // It may have ended by itself meanwhile; then there is nothing to kill.
                let _ = rank.child.kill();
                let _ = rank.child.wait();
            }
        }
    }
}

fn read_reports(rank: usize, out: impl io::Read, sender: &Sender<(usize, FromRank)>) {
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        let report = serde_json::from_str(&line).unwrap_or_else(|error| {
            let error = format!("an unreadable report ({error}): {line}");
            Report::Failed { error, environment: false }
        });
        if sender.send((rank, FromRank::Report(report))).is_err() {
            return;
        }
    }
    // A bench that does not listen any more is shutting down.
    let _ = sender.send((rank, FromRank::Ended));
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINISHED: &str = r#"echo '{"report":"finished","payload_bytes":1,"replayed_bytes":0,"paths_suspected":0,"paths_failed":0,"paths_down":0}'"#;
    const BOUND: Duration = Duration::from_secs(60);

    /// A job whose ranks are shell scripts.
    fn with_job<T>(scripts: &[&str], test: impl FnOnce(&mut Job<'_>) -> T) -> T {
        let (logs, interrupted) = (tempfile::tempdir().unwrap(), AtomicBool::new(false));
        let config = |rank: usize| RankConfig {
            rank,
            world: scripts.len(),
            node: "node".into(),
            rendezvous: ([127, 0, 0, 1], 1).into(),
            secret: String::new(),
            nics: vec![],
            events: PathBuf::new(),
            bytes: 0,
            dtype: "f32".into(),
            op: "sum".into(),
            in_place: true,
            link_bound_s: 1,
            settings: r2cc::Settings::default(),
            gpu: None,
        };
        let configs: Vec<_> = (0..scripts.len()).map(config).collect();
        let command = |config: &RankConfig| {
            let mut command = Command::new("sh");
            command.args(["-c", scripts[config.rank]]);
            Ok(command)
        };
        test(&mut Job::start(&configs, command, logs.path(), &interrupted).unwrap())
    }

    #[test]
    fn a_rank_that_has_finished_may_end_before_another_has() {
        let slow = format!("sleep 0.3; {FINISHED}");
        with_job(&[FINISHED, &slow], |job| {
            assert_eq!(job.gather("closing", BOUND).unwrap().len(), 2);
            job.wait(BOUND).unwrap();
        });
    }

    #[test]
    fn a_rank_that_ends_after_its_report_is_missed_at_the_next() {
        let slow = format!("sleep 0.3; {FINISHED}; sleep 60");
        with_job(&[FINISHED, &slow], |job| {
            job.gather("iteration 1", BOUND).unwrap();
            let error = job.gather("iteration 2", BOUND).unwrap_err();
            assert!(matches!(&error, JobError::Lost { first: (0, _), environment: false, .. }), "{error}");
        });
    }

    #[test]
    fn the_rank_that_was_killed_comes_first_whoever_speaks_first() {
        let witness = r#"echo '{"report":"failed","error":"rank 1 is lost","environment":false}'; exit 1"#;
        with_job(&[witness, "sleep 0.2; kill -9 $$"], |job| {
            let error = job.gather("iteration 1", BOUND).unwrap_err().to_string();
            assert!(error.starts_with("rank 1: its process ended without a word (signal: 9"), "{error}");
            assert!(error.ends_with("\n  rank 0: rank 1 is lost"), "{error}");
        });
    }

    #[test]
    fn an_environment_that_is_not_ready_is_told_from_a_lost_rank() {
        let used = r#"echo '{"report":"failed","error":"the port is used","environment":true}'; exit 1"#;
        with_job(&[used], |job| {
            let error = job.gather("joining", BOUND).unwrap_err();
            assert!(matches!(error, JobError::Lost { environment: true, .. }), "{error}");
        });
    }

    #[test]
    fn a_rank_that_is_stopped_is_named_and_those_that_wait_for_it_are_not() {
        let waits = "while :; do sleep 0.05; done";
        with_job(&[waits, "kill -STOP $$", waits], |job| {
            let error = job.gather("iteration 1", Duration::from_secs(6)).unwrap_err();
            let JobError::TimedOut { waiting, stuck, .. } = &error else { panic!("{error}") };
            assert_eq!(waiting, &[0, 1, 2]);
            let [words] = stuck.as_slice() else { panic!("{error}") };
            let pid = job.pid(1);
            assert!(words.starts_with(&format!("rank 1 (node, pid {pid}) has not run for ")), "{words}");
            assert!(words.contains("stopped by a signal"), "{words}");
        });
    }

    #[test]
    fn what_is_no_report_fails_its_rank_by_name() {
        with_job(&["echo hello; sleep 60"], |job| {
            let error = job.gather("joining", BOUND).unwrap_err().to_string();
            assert!(error.starts_with("rank 0: an unreadable report") && error.ends_with("hello"), "{error}");
        });
    }
}
