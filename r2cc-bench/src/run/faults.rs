//! Carries out a suite's faults: arms them in the kernel, has a watcher make what netlink has to do (link down,
//! rate, a port blocked at the switch), renews their leases, ends them on time, and says what became of each.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use r2cc::collective::Collective;
use r2cc::transport::now;
use r2cc_inject::change::{Change, Planned};
use r2cc_inject::fault::{At, Fault, Kind, Offset, Op, Trigger, Until};
use r2cc_inject::netlink::Route;
use r2cc_inject::watcher::Watched;
use r2cc_inject::{ArmRequest, CallPoint, Effect, FaultId, FaultStatus, Injector, KernelTrigger, Phase, PortId};

use super::counters;
use crate::check::record::{FaultRecord, IterationRecord, Means, NodeCounters};
use crate::cluster::{EmulatedCluster, Side};

/// A fault that nobody renews ends after this, unless the run is given another lease.
pub const LEASE: Duration = Duration::from_secs(5);
/// Renewals in a lease: so many must fail in a row before a fault ends too early.
const RENEWALS: u32 = 5;

/// The function whose calls a fault's position counts.
#[derive(Debug, Clone)]
pub(super) struct Called {
    /// What faults call it.
    pub(super) op: Op,
    /// The executable or library that holds it.
    pub(super) binary: PathBuf,
    /// Its symbol.
    pub(super) symbol: String,
    /// Counts only calls with this first argument.
    pub(super) arg0: Option<u64>,
}

impl Called {
    /// What every collective of the native engine calls, in the executable that the ranks run.
    pub(super) fn on_host(program: PathBuf) -> Self {
        let arg0 = Some(Collective::AllReduce as u64);
        Self { op: Op::AllReduce, binary: program, symbol: "r2cc_collective_begin".into(), arg0 }
    }

    /// What a rank of the native engine calls when it freezes its count of collectives.
    pub(super) fn freeze(program: PathBuf) -> Self {
        Self { op: Op::SwitchFreeze, binary: program, symbol: "r2cc_switch_freeze".into(), arg0: None }
    }
}

/// Who blocks a port that a fault drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Cutter {
    /// Programs of our injector in the packet path.
    Xdp,
    /// The switch: its bridge disables the port, by netlink, when the injector marks the position.
    Switch,
}

/// What a fault needs to know of the job.
pub(super) struct JobFacts<'a> {
    /// What the workload calls, one function an operation.
    pub(super) called: Vec<Called>,
    /// Process of the lowest rank of each node.
    pub(super) pids: Vec<(String, u32)>,
    /// Bytes that a port receives in a healthy collective.
    pub(super) healthy: &'a dyn Fn(&str, &str) -> Option<f64>,
    /// Seed of what faults leave to chance.
    pub(super) seed: u64,
}

#[derive(Debug)]
struct Carried {
    fault: Fault,
    places: Vec<(String, String)>,
    request: ArmRequest,
    arm_at: Option<Instant>,
    id: Option<FaultId>,
    asked_bytes: Option<u64>,
    /// What netlink has to do; none: the programs in the packet path do it all.
    change: Option<Change>,
    watched: Option<Watched>,
    made_ns: Option<u64>,
    carrier_lost: Option<bool>,
    ended_ns: Option<u64>,
    end: Ending,
    last: FaultStatus,
    sent_before: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    NotYet,
    Undone,
    LeftBehind,
}

/// The faults of a run.
#[derive(Debug)]
pub(super) struct FaultDriver<'a> {
    cluster: &'a EmulatedCluster,
    injector: Injector,
    program: PathBuf,
    lease: Duration,
    carried: Vec<Carried>,
    renewed: Instant,
}

impl<'a> FaultDriver<'a> {
    /// `program`: this one, which also is the watchers' program.
    pub(super) fn new(cluster: &'a EmulatedCluster, injector: Injector, program: PathBuf, lease: Duration) -> Self {
        Self { cluster, injector, program, lease, carried: Vec::new(), renewed: Instant::now() }
    }

    pub(super) fn injector(&self) -> &Injector {
        &self.injector
    }

    /// Arms every fault; positions count from here.
    pub(super) fn arm(&mut self, faults: &[Fault], cutter: Cutter, facts: &JobFacts<'_>) -> Result<()> {
        for fault in faults {
            let carried = self.prepare(fault, cutter, facts).with_context(|| format!("fault {fault}"))?;
            self.carried.push(carried);
        }
        self.step()
    }

    fn prepare(&self, fault: &Fault, cutter: Cutter, facts: &JobFacts<'_>) -> Result<Carried> {
        let fault = &fault.drawn(facts.seed);
        let places = self.places(fault)?;
        let ports: Vec<PortId> = places
            .iter()
            .map(|(node, nic)| self.injector.port(node, nic).with_context(|| format!("no port {node}/{nic}")))
            .collect::<Result<_>>()?;
        let (node, nic) = places.first().context("a fault without a port")?;
        let pid = facts.pids.iter().find(|(name, _)| name == node || fault.target.is_rail()).map(|(_, pid)| *pid);
        let call = |op: Op, n: u64| -> Result<CallPoint> {
            let called = facts.called.iter().find(|called| called.op == op);
            let Called { binary, symbol, arg0, .. } =
                called.with_context(|| format!("the workload does not call {op}"))?.clone();
            let pid = pid.with_context(|| format!("no rank on {node}"))?;
            Ok(CallPoint { pid, binary, symbol, arg0, n })
        };
        let (mut arm_at, mut asked_bytes) = (Some(Instant::now()), None);
        let trigger = match &fault.from {
            Trigger::Now => KernelTrigger::Now,
            Trigger::After(delay) => {
                arm_at = Some(Instant::now() + *delay);
                KernelTrigger::Now
            }
            Trigger::Position(position) => {
                let healthy = (facts.healthy)(node, nic);
                let volume = || healthy.context("no healthy iteration was measured on this port");
                let bytes = match position.offset {
                    Offset::Start => 0,
                    Offset::MilliPercent(share) => (volume()? * f64::from(share) / 1e5) as u64,
                    Offset::Bytes(bytes) => bytes,
                    Offset::Between { .. } => bail!("no seed has chosen a share"),
                };
                asked_bytes = Some(bytes);
                match position.at {
                    At::Call => KernelTrigger::Call { point: call(position.op, position.n)?, bytes },
                    At::Wire => {
                        let bytes = (volume()? * (position.n - 1) as f64) as u64 + bytes;
                        KernelTrigger::Wire { bytes: bytes.max(1) }
                    }
                }
            }
        };
        let (effect, change) = match fault.kind {
            Kind::Drop if cutter == Cutter::Switch => (Effect::MarkOnly, Some(Change::BlockPort)),
            Kind::Drop => (Effect::Drop, None),
            Kind::Loss { parts_per_million } => (Effect::Loss { parts_per_million, seed: facts.seed }, None),
            Kind::Flap { down, up } => (Effect::Flap { down, up }, None),
            Kind::Rate { bits_per_second } => (Effect::MarkOnly, Some(Change::Rate { bits_per_second })),
            Kind::LinkDown => (Effect::MarkOnly, Some(Change::LinkDown)),
        };
        let until = match &fault.until {
            Until::Call { op, n } => Some(call(*op, *n)?),
            Until::Run | Until::For(_) => None,
        };
        let request = ArmRequest { ports, direction: fault.direction, effect, trigger, until, lease: self.lease };
        Ok(Carried {
            fault: fault.clone(),
            places,
            request,
            arm_at,
            id: None,
            asked_bytes,
            change,
            watched: None,
            made_ns: None,
            carrier_lost: None,
            ended_ns: None,
            end: Ending::NotYet,
            last: FaultStatus::default(),
            sent_before: 0,
        })
    }

    /// The ports that a fault acts on: one NIC, or the NIC of every node on a rail.
    fn places(&self, fault: &Fault) -> Result<Vec<(String, String)>> {
        if !fault.target.is_rail() {
            return Ok(vec![(fault.target.node.clone(), fault.target.nic.clone())]);
        }
        let rail: usize = fault
            .target
            .nic
            .strip_prefix("rail-")
            .and_then(|n| n.parse().ok())
            .with_context(|| format!("no rail {:?}", fault.target.nic))?;
        let of = |node: &crate::cluster::Node| {
            let nics = node.nics.iter().filter(|nic| nic.rail == Some(rail - 1));
            nics.map(|nic| (node.name.clone(), nic.name.clone())).collect::<Vec<_>>()
        };
        Ok(self.cluster.nodes().iter().flat_map(of).collect())
    }

    /// How soon the next step is due.
    pub(super) fn pace(&self) -> Duration {
        let hurry = self.carried.iter().any(|c| {
            let timed = c.id.is_none() || !matches!(c.fault.until, Until::Run);
            (c.change.is_some() && c.made_ns.is_none()) || timed
        });
        if hurry { Duration::from_millis(1) } else { Duration::from_millis(50) }
    }

    /// Does what is due.
    pub(super) fn step(&mut self) -> Result<()> {
        let renew = self.renewed.elapsed() >= self.lease / RENEWALS;
        if renew {
            self.renewed = Instant::now();
        }
        for i in 0..self.carried.len() {
            if self.carried[i].arm_at.is_some_and(|at| Instant::now() >= at) {
                self.carried[i].arm_at = None;
                self.arm_now(i)?;
            }
            let Some(id) = self.carried[i].id else { continue };
            let status = self.injector.status(id)?;
            let ended = status.healed_at_ns.is_some();
            if renew && !ended {
                self.renew(i, id).with_context(|| format!("fault {}", self.carried[i].fault))?;
            }
            if status.fired && self.carried[i].made_ns.is_none() {
                self.make(i)?;
            }
            let over = match (&self.carried[i].fault.until, status.fired_at_ns) {
                (Until::For(span), Some(at)) => now().as_nanos() as u64 >= at + span.as_nanos() as u64,
                _ => false,
            };
            self.carried[i].last = status;
            if ended || over {
                self.carried[i].ended_ns = self.end(i)?;
            }
        }
        Ok(())
    }

    fn arm_now(&mut self, i: usize) -> Result<()> {
        let carried = &mut self.carried[i];
        let named = || format!("fault {}", carried.fault);
        if let Some(change) = carried.change {
            // A rate holds both ways; a link is down, and a port blocked, at the switch.
            let sides: &[Side] =
                if let Change::Rate { .. } = change { &[Side::Node, Side::Switch] } else { &[Side::Switch] };
            let mut planned = Vec::new();
            for (node, nic) in &carried.places {
                for side in sides {
                    planned.push(Planned::new(self.cluster.place(node, nic, *side)?, change).with_context(named)?);
                }
            }
            let mut command = Command::new(&self.program);
            command.args(["worker", "watch"]);
            let watched = Watched::start(command, &carried.fault.to_string(), planned, self.lease);
            carried.watched = Some(watched.with_context(named)?);
        }
        let id = self.injector.arm(carried.request.clone()).with_context(named)?;
        self.injector.label(id, &carried.fault.to_string())?;
        carried.id = Some(id);
        Ok(())
    }

    fn renew(&mut self, i: usize, id: FaultId) -> Result<()> {
        let expires_ns = self.injector.renew(id, self.lease)?;
        let Some(watched) = &mut self.carried[i].watched else { return Ok(()) };
        if watched.renew(self.lease).is_ok() && !watched.has_ended() {
            return Ok(());
        }
        match watched.record()? {
            record if record.phase == Phase::Expired => {
                let late = expires_ns.saturating_sub(record.expires_at_ns);
                Err(r2cc_inject::Error::Expired { late: Duration::from_nanos(late) }.into())
            }
            _ => bail!("the process that watches over it has ended"),
        }
    }

    /// Does what the kernel has marked the time of.
    fn make(&mut self, i: usize) -> Result<()> {
        self.carried[i].sent_before = self.sent_packets(i)?;
        let carried = &mut self.carried[i];
        let Some(watched) = &mut carried.watched else { return Ok(()) };
        carried.made_ns = Some(watched.make().with_context(|| format!("fault {}", carried.fault))?);
        if carried.change == Some(Change::LinkDown) {
            let mut lost = true;
            for (node, nic) in &carried.places {
                let netns = &self.cluster.node(node).with_context(|| format!("no node {node}"))?.netns;
                lost &= !Route::open(netns.as_fd())?.interface(nic)?.has_carrier;
            }
            carried.carrier_lost = Some(lost);
        }
        Ok(())
    }

    fn sent_packets(&self, i: usize) -> Result<u64> {
        let places = &self.carried[i].places;
        let of = |c: &crate::cluster::NicCounters| places.iter().any(|(node, nic)| *node == c.node && *nic == c.nic);
        Ok(self.cluster.counters()?.iter().filter(|c| of(c)).map(|c| c.tx_packets).sum())
    }

    /// Ends a fault: the kernel's part is healed, what was changed is put back. Answers with when that was done.
    fn end(&mut self, i: usize) -> Result<Option<u64>> {
        let id = self.carried[i].id;
        if let Some(id) = id {
            let status = self.injector.heal(id)?;
            self.carried[i].last = status;
        }
        if self.carried[i].end != Ending::NotYet {
            return Ok(self.carried[i].ended_ns);
        }
        let sent = self.sent_packets(i)?.saturating_sub(self.carried[i].sent_before);
        let carried = &mut self.carried[i];
        if carried.made_ns.is_some() && carried.change != Some(Change::LinkDown) {
            // What the node went on sending into a dead port, or through a slow one, is what the fault met.
            carried.last.packets_dropped.tx = sent;
        }
        carried.end = Ending::LeftBehind;
        let record = carried.watched.take().map(Watched::heal).transpose()?;
        carried.end = Ending::Undone;
        Ok(record.and_then(|record| record.ended_at_ns))
    }

    /// Ends every fault and says what became of each. `starts`: the programs' counters when each iteration began.
    pub(super) fn finish(
        &mut self,
        iterations: &[IterationRecord],
        starts: &[NodeCounters],
    ) -> Result<Vec<FaultRecord>> {
        let mut records = Vec::new();
        for i in 0..self.carried.len() {
            if self.carried[i].end == Ending::NotYet {
                // Read before it is healed, so that a fault that lasted for the run has no end of its own.
                let before = self.carried[i].id.map(|id| self.injector.status(id)).transpose()?;
                // One that cannot be ended is told of as left behind; the others are still ended.
                if let Err(error) = self.end(i) {
                    tracing::error!(fault = %self.carried[i].fault, %error, "left behind");
                }
                if let Some(before) = before {
                    let dropped = self.carried[i].last.packets_dropped;
                    self.carried[i].last = FaultStatus { packets_dropped: dropped, ..before };
                }
            }
            records.push(self.record(i, iterations, starts));
        }
        Ok(records)
    }

    fn record(&self, i: usize, iterations: &[IterationRecord], starts: &[NodeCounters]) -> FaultRecord {
        let (carried, status) = (&self.carried[i], &self.carried[i].last);
        let means = if carried.change.is_some() { Means::Change } else { Means::Packets };
        let fired_at_ns = if means == Means::Change { carried.made_ns } else { status.fired_at_ns };
        let hit = fired_at_ns.and_then(|at| iterations.iter().position(|it| it.runs_on_every_rank_at(at)));
        let at_firing = counters::of_programs(&status.snapshot);
        let ports_at_firing = hit.and_then(|hit| starts.get(hit)).map(|start| counters::between(start, &at_firing));
        FaultRecord {
            spec: carried.fault.to_string(),
            fired: status.fired,
            iteration: hit.map(|hit| iterations[hit].index),
            asked_bytes: carried.asked_bytes,
            bytes_before: carried.asked_bytes.map(|_| status.bytes_before),
            packets_dropped: status.packets_dropped.total(),
            bytes_dropped: status.bytes_dropped.total(),
            fired_at_ns,
            first_drop_ns: if means == Means::Change { carried.made_ns } else { status.first_drop_ns },
            healed_at_ns: carried.ended_ns.or(status.healed_at_ns).or(status.expired.then_some(status.expires_at_ns)),
            healed: carried.end == Ending::Undone,
            means,
            carrier_lost: carried.carrier_lost,
            ports_at_firing: ports_at_firing.unwrap_or_default(),
        }
    }
}
