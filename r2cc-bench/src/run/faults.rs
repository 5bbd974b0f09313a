//! Carries out a suite's faults: arms them in the kernel, renews their leases, does in user space what has to
//! be done there (link down, rate, a port blocked at the switch), ends them on time, and says what became of each.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use r2cc::collective::Collective;
use r2cc::transport::now;
use r2cc_inject::fault::{At, Fault, Kind, Offset, Op, Trigger, Until};
use r2cc_inject::{ArmRequest, CallPoint, Effect, FaultId, FaultStatus, Injector, KernelTrigger, PortId};

use super::counters;
use crate::check::record::{FaultRecord, IterationRecord, NodeCounters};
use crate::cluster::{EmulatedCluster, Side};

/// A fault that nobody renews ends after this, unless the run is given another lease.
pub const LEASE: Duration = Duration::from_secs(5);
/// Renewals in a lease: so many must fail in a row before a fault ends too early.
const RENEWALS: u32 = 5;
/// The function that every collective of the native engine calls.
const HOST_SYMBOL: &str = "r2cc_collective_begin";

/// Who blocks a port that a fault drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Cutter {
    /// Programs of our injector in the packet path.
    Xdp,
    /// The switch: the port leaves its bridge, by netlink, when the injector marks the position.
    Switch,
}

/// What a fault needs to know of the job.
pub(super) struct JobFacts<'a> {
    /// The executable that the ranks run.
    pub(super) program: PathBuf,
    /// Process of the lowest rank of each node.
    pub(super) pids: Vec<(String, u32)>,
    /// Bytes that a port receives in a healthy collective.
    pub(super) healthy: &'a dyn Fn(&str, &str) -> Option<f64>,
    /// Seed of random faults.
    pub(super) seed: u64,
}

#[derive(Debug)]
enum InUserSpace {
    Nothing,
    Rate(u64),
    LinkDown,
    BlockPort,
}

#[derive(Debug)]
struct Carried {
    fault: Fault,
    places: Vec<(String, String)>,
    request: ArmRequest,
    arm_at: Option<Instant>,
    id: Option<FaultId>,
    asked_bytes: Option<u64>,
    user_space: InUserSpace,
    begun: bool,
    begun_ns: Option<u64>,
    undone: bool,
    last: FaultStatus,
    sent_before: u64,
}

/// The faults of a run.
#[derive(Debug)]
pub(super) struct FaultDriver<'a> {
    cluster: &'a EmulatedCluster,
    injector: Injector,
    rate_bits_s: Option<u64>,
    lease: Duration,
    carried: Vec<Carried>,
    renewed: Instant,
}

impl<'a> FaultDriver<'a> {
    pub(super) fn new(
        cluster: &'a EmulatedCluster,
        injector: Injector,
        rate_bits_s: Option<u64>,
        lease: Duration,
    ) -> Self {
        Self { cluster, injector, rate_bits_s, lease, carried: Vec::new(), renewed: Instant::now() }
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
        let places = self.places(fault)?;
        let ports: Vec<PortId> = places
            .iter()
            .map(|(node, nic)| self.injector.port(node, nic).with_context(|| format!("no port {node}/{nic}")))
            .collect::<Result<_>>()?;
        let (node, nic) = places.first().context("a fault without a port")?;
        let pid = facts.pids.iter().find(|(name, _)| name == node || fault.target.is_rail()).map(|(_, pid)| *pid);
        let call = |op: Op, n: u64| -> Result<CallPoint> {
            let Op::AllReduce = op else { bail!("the workload calls allreduce, not {op}") };
            let pid = pid.with_context(|| format!("no rank on {node}"))?;
            let arg0 = Some(Collective::AllReduce as u64);
            Ok(CallPoint { pid, binary: facts.program.clone(), symbol: HOST_SYMBOL.into(), arg0, n })
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
        let (effect, user_space) = match fault.kind {
            Kind::Drop if cutter == Cutter::Switch => (Effect::MarkOnly, InUserSpace::BlockPort),
            Kind::Drop => (Effect::Drop, InUserSpace::Nothing),
            Kind::Loss { parts_per_million } => {
                (Effect::Loss { parts_per_million, seed: facts.seed }, InUserSpace::Nothing)
            }
            Kind::Flap { down, up } => (Effect::Flap { down, up }, InUserSpace::Nothing),
            Kind::Rate { bits_per_second } => (Effect::MarkOnly, InUserSpace::Rate(bits_per_second)),
            Kind::LinkDown => (Effect::MarkOnly, InUserSpace::LinkDown),
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
            user_space,
            begun: false,
            begun_ns: None,
            undone: false,
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
            (!matches!(c.user_space, InUserSpace::Nothing) && !c.begun) || timed
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
                self.carried[i].id = Some(self.injector.arm(self.carried[i].request.clone())?);
            }
            let Some(id) = self.carried[i].id else { continue };
            let status = self.injector.status(id)?;
            let ended = status.healed_at_ns.is_some();
            if renew && !ended {
                let renewed = self.injector.renew(id, self.lease);
                renewed.with_context(|| format!("fault {}", self.carried[i].fault))?;
            }
            if status.fired && !self.carried[i].begun {
                self.begin(i)?;
            }
            let over = match (&self.carried[i].fault.until, status.fired_at_ns) {
                (Until::For(span), Some(at)) => now().as_nanos() as u64 >= at + span.as_nanos() as u64,
                _ => false,
            };
            self.carried[i].last = status;
            if ended || over {
                self.end(i)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, i: usize) -> Result<()> {
        self.carried[i].begun = true;
        self.carried[i].sent_before = self.sent_packets(i)?;
        for (node, nic) in &self.carried[i].places {
            match self.carried[i].user_space {
                InUserSpace::Nothing => {}
                InUserSpace::Rate(bits_s) => self.cluster.set_rate(node, nic, Some(bits_s))?,
                InUserSpace::LinkDown => self.cluster.set_link(node, nic, Side::Switch, false)?,
                InUserSpace::BlockPort => self.cluster.block_port(node, nic, true)?,
            }
        }
        self.carried[i].begun_ns = Some(now().as_nanos() as u64);
        Ok(())
    }

    fn sent_packets(&self, i: usize) -> Result<u64> {
        let places = &self.carried[i].places;
        let of = |c: &crate::cluster::NicCounters| places.iter().any(|(node, nic)| *node == c.node && *nic == c.nic);
        Ok(self.cluster.counters()?.iter().filter(|c| of(c)).map(|c| c.tx_packets).sum())
    }

    /// Ends a fault: the kernel's part is healed, what was done in user space is undone.
    fn end(&mut self, i: usize) -> Result<()> {
        let id = self.carried[i].id;
        if let Some(id) = id {
            let status = self.injector.heal(id)?;
            self.carried[i].last = status;
        }
        if self.carried[i].undone {
            return Ok(());
        }
        if self.carried[i].begun && !matches!(self.carried[i].user_space, InUserSpace::Nothing) {
            let sent = self.sent_packets(i)?.saturating_sub(self.carried[i].sent_before);
            // What the node went on sending into a dead port, or through a slow one, is what the fault met.
            self.carried[i].last.packets_dropped.tx = sent;
            for (node, nic) in &self.carried[i].places {
                match self.carried[i].user_space {
                    InUserSpace::Nothing => {}
                    InUserSpace::Rate(_) => self.cluster.set_rate(node, nic, self.rate_bits_s)?,
                    InUserSpace::LinkDown => self.cluster.set_link(node, nic, Side::Switch, true)?,
                    InUserSpace::BlockPort => self.cluster.block_port(node, nic, false)?,
                }
            }
        }
        self.carried[i].undone = true;
        Ok(())
    }

    /// Ends every fault and says what became of each. `starts`: the programs' counters when each iteration began.
    pub(super) fn finish(
        &mut self,
        iterations: &[IterationRecord],
        starts: &[NodeCounters],
    ) -> Result<Vec<FaultRecord>> {
        let mut records = Vec::new();
        for i in 0..self.carried.len() {
            if !self.carried[i].undone {
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
        let in_user_space = !matches!(carried.user_space, InUserSpace::Nothing);
        let fired_at_ns = if in_user_space { carried.begun_ns } else { status.fired_at_ns };
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
            first_drop_ns: if in_user_space { carried.begun_ns } else { status.first_drop_ns },
            healed_at_ns: status.healed_at_ns.or(status.expired.then_some(status.expires_at_ns)),
            healed: carried.undone,
            ports_at_firing: ports_at_firing.unwrap_or_default(),
        }
    }
}
