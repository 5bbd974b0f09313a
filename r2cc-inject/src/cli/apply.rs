//! Carries a fault out: arms it, renews its lease, ends it, says what it did.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use r2cc_inject::{
    ArmRequest, Effect, Error, FaultId, FaultStatus, Injector, Phase, PortCounters, PortId, PortSpec,
    audit::{Audit, Entry, Event},
    change::{Change, ChangeError, Place, Planned},
    monotonic_ns,
    watcher::{self, Watched},
};
use serde_json::json;

use super::{
    Exit, Failure,
    args::{FaultArgs, Format},
    plan::{Means, Plan},
    say, talk,
};

/// A healthy controller ends its fault itself; the kernel ends it this much later.
const GRACE: Duration = Duration::from_millis(50);
const TICK: Duration = Duration::from_millis(20);
/// While only user space can carry the fault out once the kernel says it is time.
const QUICK_TICK: Duration = Duration::from_millis(1);

/// Why a fault ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Time,
    Cap,
    Call,
    /// healed through the kernel by another process
    Command,
    Expired,
    HolderGone,
    Signal,
}

/// `r2cc-inject apply`
pub(crate) fn apply(args: &FaultArgs, format: Format, log: &Path) -> Result<Exit, Failure> {
    let mut audit = Audit::open(log).map_err(|error| Failure::not_ready(format!("the audit log: {error}")))?;
    let swept = watcher::sweep()?;
    for fault in swept {
        talk(format!("swept: {fault}, left behind by a process that was killed"));
        record(&mut audit, &Entry::new(Event::Swept, &fault))?;
    }
    let plan = Plan::new(args).inspect_err(|failure| {
        let mut entry = Entry::new(Event::Refused, &args.fault);
        entry.detail = Some(failure.text.clone());
        let _told = audit.append(&entry).inspect_err(|error| talk(format!("warning: {error}")));
    })?;
    // Signals are read from a descriptor from here on: none can end this process with a
    // fault half made.
    let signals = Signals::block()?;
    let mut fault = Applied::new(plan, format, audit)?;
    let end = fault.live(&signals);
    fault.finish(end)
}

struct Applied {
    plan: Plan,
    format: Format,
    audit: Audit,
    programs: Option<(Injector, Option<FaultId>)>,
    watched: Option<Watched>,
    made_at_ns: Option<u64>,
    renewed_at_ns: u64,
    holder: Option<OwnedFd>,
}

impl Applied {
    fn new(plan: Plan, format: Format, mut audit: Audit) -> Result<Self, Failure> {
        let mut entry = Entry::new(Event::Armed, &plan.fault.to_string());
        entry.interfaces = plan.interfaces();
        entry.lease_ms = u64::try_from(plan.lease.as_millis()).ok();
        record(&mut audit, &entry)?;
        let programs = if plan.needs_programs() { Some((attach(&plan)?, None)) } else { None };
        let watched = match plan.means {
            Means::Packets(_) => None,
            Means::Change(change) => Some(start_watcher(&plan, change)?),
        };
        let holder = plan.ports.first().and_then(|port| port.holder?.pidfd().ok());
        Ok(Self { plan, format, audit, programs, watched, made_at_ns: None, renewed_at_ns: 0, holder })
    }

    /// Arms, and keeps the fault alive until it is to end.
    fn live(&mut self, signals: &Signals) -> Result<End, Failure> {
        let begin = monotonic_ns() + nanos(self.plan.delay);
        while monotonic_ns() < begin {
            self.renew(u64::MAX)?;
            let left = Duration::from_nanos(begin.saturating_sub(monotonic_ns()));
            if let Some(end) = self.wait(signals, left.min(self.plan.lease / 5)) {
                return Ok(end);
            }
        }
        self.arm()?;
        let armed = monotonic_ns();
        let cap = self.plan.cap.map_or(u64::MAX, |cap| armed + nanos(cap));
        self.event("armed", None);
        let mut told = false;
        loop {
            let status = self.status()?;
            if status.as_ref().is_some_and(|status| status.fired) && self.watched.is_some() && self.made_at_ns.is_none()
            {
                self.make()?;
            }
            let fired = match self.watched {
                Some(_) => self.made_at_ns,
                None => status.as_ref().and_then(|status| status.fired_at_ns),
            };
            if fired.is_some() && !told {
                told = true;
                self.event("fired", status.as_ref());
                let mut entry = Entry::new(Event::Fired, &self.plan.fault.to_string());
                entry.status = status.clone();
                record(&mut self.audit, &entry)?;
            }
            let due = match (fired, self.plan.lasts) {
                (Some(fired), Some(lasts)) => fired + nanos(lasts),
                _ => u64::MAX,
            };
            let now = monotonic_ns();
            if now >= due {
                return Ok(End::Time);
            }
            if now >= cap {
                return Ok(End::Cap);
            }
            match status.as_ref().map(FaultStatus::phase) {
                Some(Phase::Healed) if self.plan.until.is_some() => return Ok(End::Call),
                Some(Phase::Healed) => return Ok(End::Command),
                Some(Phase::Expired) => return Ok(End::Expired),
                _ => {}
            }
            let last = due.min(cap);
            if let Some(end) = self.renew(last.saturating_add(nanos(GRACE)))? {
                return Ok(end);
            }
            let tick = if self.watched.is_some() && fired.is_none() { QUICK_TICK } else { TICK };
            let left = Duration::from_nanos(last.saturating_sub(now));
            if let Some(end) = self.wait(signals, left.min(tick)) {
                return Ok(end);
            }
        }
    }

    fn arm(&mut self) -> Result<(), Failure> {
        let Some((injector, armed)) = &mut self.programs else {
            return self.make();
        };
        let ports = self.plan.ports.iter().filter_map(|port| injector.port(&port.node, &port.nic));
        let id = injector.arm(ArmRequest {
            ports: ports.collect::<Vec<PortId>>(),
            direction: self.plan.direction,
            effect: match self.plan.means {
                Means::Packets(effect) => effect,
                Means::Change(_) => Effect::MarkOnly,
            },
            trigger: self.plan.trigger.clone(),
            until: self.plan.until.clone(),
            lease: self.plan.lease,
        })?;
        injector.label(id, &self.plan.fault.to_string())?;
        *armed = Some(id);
        self.renewed_at_ns = monotonic_ns();
        Ok(())
    }

    fn make(&mut self) -> Result<(), Failure> {
        if let Some(watched) = &mut self.watched {
            self.made_at_ns = Some(watched.make()?);
        }
        Ok(())
    }

    /// Renews what is armed, five times a lease and at least once a second, but not
    /// beyond `last`.
    fn renew(&mut self, last: u64) -> Result<Option<End>, Failure> {
        let often = nanos((self.plan.lease / 5).min(Duration::from_secs(1)));
        if monotonic_ns() < self.renewed_at_ns + often {
            let watched = self.watched.as_mut();
            return Ok(watched.and_then(|watched| watched.has_ended().then(|| how_it_ended(watched))));
        }
        self.renewed_at_ns = monotonic_ns();
        let lease = self.plan.lease.min(Duration::from_nanos(last.saturating_sub(monotonic_ns())));
        if let Some((injector, Some(id))) = &self.programs {
            match injector.renew(*id, lease) {
                Ok(_) => {}
                Err(Error::Expired { .. }) => return Ok(Some(End::Expired)),
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(watched) = &mut self.watched
            && watched.renew(lease).is_err()
        {
            return Ok(Some(how_it_ended(watched)));
        }
        Ok(None)
    }

    fn wait(&self, signals: &Signals, span: Duration) -> Option<End> {
        let mut waited = vec![PollFd::new(signals.0.as_fd(), PollFlags::POLLIN)];
        if let Some(holder) = &self.holder {
            waited.push(PollFd::new(holder.as_fd(), PollFlags::POLLIN));
        }
        let millis = span.as_nanos().div_ceil(1_000_000);
        poll(&mut waited, PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)).ok();
        let ready = |waited: &PollFd<'_>| waited.revents().is_some_and(|events| !events.is_empty());
        if ready(&waited[0]) {
            return Some(End::Signal);
        }
        waited.get(1).is_some_and(ready).then_some(End::HolderGone)
    }

    fn status(&self) -> Result<Option<FaultStatus>, Failure> {
        match &self.programs {
            Some((injector, Some(id))) => Ok(Some(injector.status(*id)?)),
            _ => Ok(None),
        }
    }

    /// Heals, whatever happened, and says what the fault did.
    fn finish(mut self, end: Result<End, Failure>) -> Result<Exit, Failure> {
        let mut left_behind = None;
        if let Some(watched) = self.watched.take()
            && let Err(error) = watched.heal()
        {
            left_behind = Some(error.to_string());
        }
        let mut status = None;
        let mut counters: Vec<PortCounters> = Vec::new();
        if let Some((mut injector, armed)) = self.programs.take() {
            if let Some(id) = armed {
                status = injector.heal(id).ok();
            }
            counters = injector.counters().unwrap_or_default();
        }
        let mut entry = Entry::new(Event::Ended, &self.plan.fault.to_string());
        entry.interfaces = self.plan.interfaces();
        entry.status = status.clone();
        entry.counters = counters;
        entry.detail = Some(match (&left_behind, &end) {
            (Some(error), _) => error.clone(),
            (None, Ok(end)) => end.reason().to_owned(),
            (None, Err(failure)) => failure.text.clone(),
        });
        if left_behind.is_some() {
            entry.event = Event::LeftBehind;
        }
        let logged = record(&mut self.audit, &entry);
        if let Some(error) = left_behind {
            return Err(Failure::new(Exit::LeftBehind, format!("a fault was left behind: {error}")));
        }
        let end = end?;
        self.event("ended", status.as_ref());
        if self.format == Format::Text {
            say(format!("         {}", end.reason()));
        }
        logged?;
        match end {
            End::Signal => Ok(Exit::Interrupted),
            End::Expired => Err(Failure::new(
                Exit::Internal,
                "the lease ran out: this program was stopped, or starved, for longer than --lease",
            )),
            _ => Ok(Exit::Ok),
        }
    }

    fn event(&self, event: &str, status: Option<&FaultStatus>) {
        if self.format == Format::Json {
            say(json!({
                "event": event,
                "fault": self.plan.fault,
                "pid": std::process::id(),
                "at_ns": monotonic_ns(),
                "made_at_ns": self.made_at_ns,
                "status": status,
            }));
            return;
        }
        let stopped = status.map_or(String::new(), |status| {
            let (packets, bytes) = (status.packets_dropped.total(), status.bytes_dropped.total());
            match (event, self.watched.is_some() || self.made_at_ns.is_some(), packets) {
                ("ended", false, 0) => "; it stopped nothing".to_owned(),
                ("ended", false, _) => format!("; it stopped {packets} packets, {bytes} bytes"),
                _ => String::new(),
            }
        });
        say(format!("{event:<8} {}{stopped}", self.plan.fault));
    }
}

impl End {
    fn reason(self) -> &'static str {
        match self {
            Self::Time => "it lasted as long as was asked",
            Self::Cap => "--max has passed",
            Self::Call => "the call that ends it has come, or it was healed from outside",
            Self::Command => "ended from outside: healed, or its watcher killed",
            Self::Expired => "its lease ran out",
            Self::HolderGone => "the cluster has ended",
            Self::Signal => "interrupted",
        }
    }
}

/// A watcher ends by its deadline, told by somebody, or killed. Its record says which;
/// what it left is undone when the fault is finished.
fn how_it_ended(watched: &Watched) -> End {
    let expired = watched.record().is_ok_and(|record| record.phase == Phase::Expired);
    if expired { End::Expired } else { End::Command }
}

fn attach(plan: &Plan) -> Result<Injector, Failure> {
    let mut namespaces = Vec::with_capacity(plan.ports.len());
    for port in &plan.ports {
        let netns = port.place.netns.open();
        namespaces.push(netns.map_err(|error| Failure::not_ready(format!("{}: {error}", port.place)))?);
    }
    let specs: Vec<PortSpec<'_>> = plan
        .ports
        .iter()
        .zip(&namespaces)
        .map(|(port, netns)| PortSpec {
            node: port.node.clone(),
            nic: port.nic.clone(),
            netns: Some(netns.as_fd()),
            ifname: port.place.ifname.clone(),
        })
        .collect();
    let mut injector = Injector::attach(&specs)?;
    injector.stops_on_sigterm();
    Ok(injector)
}

fn start_watcher(plan: &Plan, change: Change) -> Result<Watched, Failure> {
    let places: Vec<&Place> = plan
        .ports
        .iter()
        .flat_map(|port| {
            // A rate holds both ways; a link is down when one end is.
            let far_end = port.far_end.as_ref().filter(|_| matches!(change, Change::Rate { .. }));
            std::iter::once(&port.place).chain(far_end)
        })
        .collect();
    let planned: Result<Vec<Planned>, ChangeError> =
        places.into_iter().map(|place| Planned::new(place.clone(), change)).collect();
    let planned = planned.map_err(Failure::not_ready)?;
    let program = std::env::current_exe().map_err(|error| Failure::new(Exit::Internal, error))?;
    let mut command = std::process::Command::new(program);
    command.arg("watch");
    Ok(Watched::start(command, &plan.fault.to_string(), planned, plan.lease)?)
}

fn record(audit: &mut Audit, entry: &Entry) -> Result<(), Failure> {
    audit.append(entry).map_err(|error| Failure::not_ready(format!("the audit log: {error}")))
}

/// SIGINT, SIGTERM and SIGHUP, read from a descriptor.
struct Signals(SignalFd);

impl Signals {
    fn block() -> Result<Self, Failure> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            set.add(signal);
        }
        set.thread_block()
            .and_then(|()| SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK))
            .map(Self)
            .map_err(|error| Failure::new(Exit::Internal, error))
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX / 4)
}
