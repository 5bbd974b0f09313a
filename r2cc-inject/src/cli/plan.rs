//! What a fault comes down to on this machine: interfaces, effect, trigger, end.

use std::{path::PathBuf, time::Duration};

use r2cc_inject::{
    CallPoint, Direction, Effect, Fault, KernelTrigger,
    change::Change,
    fault::{At, Kind, Offset, Op, ParseError, Trigger, Until},
    policy::{self, Permitted, Where},
    probe,
};
use serde_json::json;

use super::{
    Exit, Failure,
    args::{FaultArgs, Format},
    say,
};

/// How a fault is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Means {
    /// by programs in the packet path
    Packets(Effect),
    /// by changing interfaces
    Change(Change),
}

/// A fault, ready to be carried out.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) fault: Fault,
    pub(super) ports: Vec<Permitted>,
    pub(super) direction: Direction,
    pub(super) means: Means,
    /// waits so long before it arms
    pub(super) delay: Duration,
    pub(super) trigger: KernelTrigger,
    /// ends so long after the firing
    pub(super) lasts: Option<Duration>,
    pub(super) until: Option<CallPoint>,
    /// ends so long after arming
    pub(super) cap: Option<Duration>,
    pub(super) lease: Duration,
}

impl Plan {
    pub(super) fn new(args: &FaultArgs) -> Result<Self, Failure> {
        let fault: Fault = args
            .fault
            .parse()
            .map_err(|error: ParseError| Failure::usage(format!("{error}\n{}", error.pointed(&args.fault))))?;
        let fault = fault.drawn(args.seed);
        let (delay, trigger) = trigger(&fault, args)?;
        let (lasts, until) = match &fault.until {
            Until::Run => (None, None),
            Until::For(span) => (Some(*span), None),
            Until::Call { op, n } => (None, Some(call_point(*op, *n, args)?)),
        };
        if lasts.is_none() && args.max.is_none() {
            return Err(Failure::usage(format!(
                "\"{}\" has no end that this program could see to\n  hint: say for DURATION, or add --max DURATION",
                fault.until
            )));
        }
        let means = match fault.kind {
            Kind::Drop => Means::Packets(Effect::Drop),
            Kind::Loss { parts_per_million } => Means::Packets(Effect::Loss { parts_per_million, seed: args.seed }),
            Kind::Flap { down, up } => Means::Packets(Effect::Flap { down, up }),
            Kind::Rate { bits_per_second } => Means::Change(Change::Rate { bits_per_second }),
            Kind::LinkDown => Means::Change(Change::LinkDown),
        };
        let place = Where {
            cluster: args.cluster.clone(),
            nodes: args.nodes.clone(),
            allow: args.allow.clone(),
            danger_default_route: args.danger_default_route,
        };
        let ports = policy::resolve(&fault.target, &place)?;
        Ok(Self {
            direction: fault.direction,
            fault,
            ports,
            means,
            delay,
            trigger,
            lasts,
            until,
            cap: args.max,
            lease: args.lease,
        })
    }

    /// Whether programs must be in the packet path: to drop, or to see a position.
    pub(super) fn needs_programs(&self) -> bool {
        matches!(self.means, Means::Packets(_)) || self.trigger != KernelTrigger::Now || self.until.is_some()
    }

    /// The interfaces, for logs.
    pub(super) fn interfaces(&self) -> Vec<String> {
        self.ports.iter().map(|port| format!("{}/{}: {}", port.node, port.nic, port.place)).collect()
    }

    fn backend(&self) -> &'static str {
        match self.means {
            Means::Packets(_) => "generic XDP on ingress, TCX on egress",
            Means::Change(Change::LinkDown) => "netlink: link down, undone by a watcher process",
            Means::Change(Change::Rate { .. }) => "netlink: tbf, undone by a watcher process",
            Means::Change(Change::BlockPort) => "netlink: bridge port disabled, undone by a watcher process",
        }
    }

    /// What the fault does not do although one might think so.
    fn limits(&self) -> Vec<String> {
        let mut limits = Vec::new();
        for port in &self.ports {
            if matches!(self.means, Means::Change(Change::Rate { .. })) && port.far_end.is_none() {
                limits.push(format!(
                    "{}/{}: only what it sends is shaped; the other end of its cable is not known here",
                    port.node, port.nic
                ));
            }
        }
        if self.means == Means::Change(Change::LinkDown) {
            limits.push("IPv6 addresses and routes set by hand are not put back".to_owned());
        }
        limits
    }
}

/// `r2cc-inject plan`
pub(crate) fn show(args: &FaultArgs, format: Format) -> Result<Exit, Failure> {
    let plan = Plan::new(args)?;
    let trigger = match &plan.trigger {
        KernelTrigger::Now if plan.delay.is_zero() => "at once".to_owned(),
        KernelTrigger::Now => format!("after {}", humantime::format_duration(plan.delay)),
        KernelTrigger::Wire { bytes } => format!("{bytes} bytes received after arming"),
        KernelTrigger::Call { point, bytes } => {
            format!("{bytes} bytes received after call {} of {} in process {}", point.n, point.symbol, point.pid)
        }
    };
    let mut ends = Vec::new();
    if let Some(lasts) = plan.lasts {
        ends.push(format!("{} after it began", humantime::format_duration(lasts)));
    }
    if let Some(point) = &plan.until {
        ends.push(format!("at call {} of {} in process {}", point.n, point.symbol, point.pid));
    }
    if let Some(cap) = plan.cap {
        ends.push(format!("{} after arming at the latest", humantime::format_duration(cap)));
    }
    ends.push(format!("{} after this program was last heard of", humantime::format_duration(plan.lease)));
    match format {
        Format::Json => say(json!({
            "fault": plan.fault,
            "interfaces": plan.ports.iter().map(|port| json!({
                "node": port.node, "nic": port.nic, "ifname": port.place.ifname,
                "netns_inode": port.place.netns.inode, "allowed": port.because.to_string(),
            })).collect::<Vec<_>>(),
            "backend": plan.backend(),
            "begins": trigger,
            "ends": ends,
            "limits": plan.limits(),
        })),
        Format::Text => {
            say(format!("fault    {}", plan.fault));
            for port in &plan.ports {
                say(format!("port     {}/{}: {}; {}", port.node, port.nic, port.place, port.because));
            }
            say(format!("backend  {}", plan.backend()));
            say(format!("begins   {trigger}"));
            for end in ends {
                say(format!("ends     {end}"));
            }
            for limit in plan.limits() {
                say(format!("limit    {limit}"));
            }
            say("Nothing was changed.");
        }
    }
    Ok(Exit::Ok)
}

fn trigger(fault: &Fault, args: &FaultArgs) -> Result<(Duration, KernelTrigger), Failure> {
    let position = match &fault.from {
        Trigger::Now => return Ok((Duration::ZERO, KernelTrigger::Now)),
        Trigger::After(delay) => return Ok((*delay, KernelTrigger::Now)),
        Trigger::Position(position) => position,
    };
    let whole = || {
        args.collective_bytes.ok_or_else(|| {
            Failure::usage(format!(
                "\"{position}\" needs to know how many bytes the port receives in one {}\n  hint: --collective-bytes BYTES, measured on a healthy run",
                position.op
            ))
        })
    };
    let too_far = || Failure::usage(format!("\"{position}\" is beyond 2^64 bytes"));
    let inside = match position.offset {
        Offset::Start => 0,
        Offset::Bytes(bytes) => bytes,
        Offset::MilliPercent(share) => {
            let bytes = u128::from(whole()?) * u128::from(share) / 100_000;
            u64::try_from(bytes).map_err(|_| too_far())?
        }
        Offset::Between { .. } => return Err(Failure::usage(format!("\"{position}\": no seed has chosen a share"))),
    };
    let trigger = match position.at {
        At::Call => KernelTrigger::Call { point: call_point(position.op, position.n, args)?, bytes: inside },
        At::Wire => {
            let before = match position.n - 1 {
                0 => 0,
                n => whole()?.checked_mul(n).ok_or_else(too_far)?,
            };
            match before.checked_add(inside).ok_or_else(too_far)? {
                0 => KernelTrigger::Now,
                bytes => KernelTrigger::Wire { bytes },
            }
        }
    };
    Ok((Duration::ZERO, trigger))
}

fn call_point(op: Op, n: u64, args: &FaultArgs) -> Result<CallPoint, Failure> {
    let pid = args
        .pid
        .ok_or_else(|| Failure::usage(format!("{op}#{n} counts calls of a process\n  hint: --pid PID names it")))?;
    let binary = args.binary.clone().unwrap_or_else(|| PathBuf::from(format!("/proc/{pid}/exe")));
    let point = |symbol: &str, arg0| CallPoint { pid, binary: binary.clone(), symbol: symbol.to_owned(), arg0, n };
    let find = |symbol: &str| {
        let found = probe::symbol_offset(&binary, symbol);
        found.map_err(|error| Failure::from(r2cc_inject::Error::from(error)))
    };
    if let Some(symbol) = &args.symbol {
        find(symbol)?;
        return Ok(point(symbol, args.arg0));
    }
    let Err(failure) = find(symbol_of(op)) else {
        return Ok(point(symbol_of(op), args.arg0));
    };
    match host_number(op) {
        Some(number) if find(HOST_SYMBOL).is_ok() => Ok(point(HOST_SYMBOL, args.arg0.or(Some(number)))),
        _ => Err(failure),
    }
}

/// The host engine's one function for all collectives; its first argument says which.
const HOST_SYMBOL: &str = "r2cc_collective_begin";

fn host_number(op: Op) -> Option<u64> {
    match op {
        Op::AllReduce => Some(1),
        Op::Broadcast => Some(2),
        _ => None,
    }
}

/// What NCCL, the driver and our library call it.
fn symbol_of(op: Op) -> &'static str {
    match op {
        Op::AllReduce => "ncclAllReduce",
        Op::AllGather => "ncclAllGather",
        Op::ReduceScatter => "ncclReduceScatter",
        Op::Broadcast => "ncclBroadcast",
        Op::Reduce => "ncclReduce",
        Op::SendRecv => "ncclSend",
        Op::AllToAll => "ncclAlltoAll",
        Op::GraphLaunch => "cuGraphLaunch",
        Op::SwitchFreeze => "r2cc_switch_freeze",
    }
}
