//! What a fault is asked to do, whether that makes sense, and how it is written down for
//! the kernel side.

use std::{path::PathBuf, time::Duration};

use super::{Error, PortId};
use crate::{fault::Direction, kernel};

/// What a fault does to the packets of its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// drops them all, ARP included: a dead NIC is dead
    Drop,
    /// drops a fraction, decided by a hash of the seed and the packet's index in its
    /// direction ([`crate::loss_drops`]): the same seed drops the same indices
    Loss {
        /// packets dropped out of a million
        parts_per_million: u32,
        /// chooses which
        seed: u64,
    },
    /// drops all for `down`, none for `up`, and so on, counted from the firing
    Flap {
        /// how long the port is dead
        down: Duration,
        /// how long it is alive in between
        up: Duration,
    },
    /// drops nothing: fires and takes the snapshot, for faults that user space carries
    /// out (link down, rate)
    MarkOnly,
}

/// A call of a function by one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPoint {
    /// the process; all its threads count
    pub pid: u32,
    /// the executable or library that holds the function
    pub binary: PathBuf,
    /// the function
    pub symbol: String,
    /// counts only calls whose first argument equals this
    pub arg0: Option<u64>,
    /// which matching call since the fault was armed, from 1
    pub n: u64,
}

/// When a fault fires; decided in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelTrigger {
    /// while it is being armed
    Now,
    /// at a call, or so many bytes after it
    Call {
        /// the call
        point: CallPoint,
        /// bytes received on `ports[0]` since that call; 0: at the call itself
        bytes: u64,
    },
    /// so many bytes after arming
    Wire {
        /// bytes received on `ports[0]` since arming; at least 1
        bytes: u64,
    },
}

/// A fault to arm.
#[derive(Debug, Clone)]
pub struct ArmRequest {
    /// the ports it acts on; the first one's received bytes count for positions
    pub ports: Vec<PortId>,
    /// the directions it acts on
    pub direction: Direction,
    /// what it does
    pub effect: Effect,
    /// when it fires
    pub trigger: KernelTrigger,
    /// a call that heals it
    pub until: Option<CallPoint>,
    /// how long it lasts unless renewed
    pub lease: Duration,
}

const RX_BIT: u64 = 1;
const TX_BIT: u64 = 2;

pub(super) fn check(request: &ArmRequest, port_count: usize) -> Result<(), Error> {
    let refuse = |reason: &str| Err(Error::BadRequest { reason: reason.to_owned() });
    if request.ports.is_empty() {
        return refuse("a fault needs at least one port");
    }
    if request.ports.iter().any(|port| port.0 >= port_count) {
        return refuse("a port of another injector");
    }
    if request.lease.is_zero() {
        return refuse("a lease of zero would end before it begins");
    }
    let calls = match &request.trigger {
        KernelTrigger::Call { point, .. } => [Some(point), request.until.as_ref()],
        KernelTrigger::Wire { bytes: 0 } => {
            return refuse("0 bytes after arming is now: use that trigger");
        }
        _ => [None, request.until.as_ref()],
    };
    if calls.into_iter().flatten().any(|point| point.n == 0) {
        return refuse("calls are counted from 1");
    }
    match request.effect {
        Effect::Loss { parts_per_million, .. } if parts_per_million > 1_000_000 => {
            refuse("loss above 1,000,000 parts per million")
        }
        Effect::Flap { down, up } if down.is_zero() || up.is_zero() => {
            refuse("a flap needs both a time down and a time up")
        }
        _ => Ok(()),
    }
}

pub(super) fn fill_rule(rule: &kernel::RawRule, request: &ArmRequest) {
    let directions = match request.direction {
        Direction::Both => RX_BIT | TX_BIT,
        Direction::Rx => RX_BIT,
        Direction::Tx => TX_BIT,
    };
    rule.directions.write(directions);
    let ports = request.ports.iter().fold(0, |mask, port| mask | 1_u64 << port.0);
    rule.ports.write(ports);
    rule.base_port.write(request.ports[0].0 as u64);

    let (mut loss, mut seed, mut down, mut up) = (0, 0, Duration::ZERO, Duration::ZERO);
    rule.effect.write(match request.effect {
        Effect::MarkOnly => kernel::EFFECT_MARK,
        Effect::Drop => kernel::EFFECT_DROP,
        Effect::Loss { parts_per_million, seed: chosen } => {
            (loss, seed) = (u64::from(parts_per_million), chosen);
            kernel::EFFECT_LOSS
        }
        Effect::Flap { down: dead, up: alive } => {
            (down, up) = (dead, alive);
            kernel::EFFECT_FLAP
        }
    });
    rule.loss_ppm.write(loss);
    rule.seed.write(seed);
    rule.down_ns.write(nanos(down));
    rule.up_ns.write(nanos(up));

    let (trigger, bytes, call) = match &request.trigger {
        KernelTrigger::Now => (kernel::TRIGGER_NOW, 0, None),
        KernelTrigger::Call { point, bytes } => (kernel::TRIGGER_CALL, *bytes, Some(point)),
        KernelTrigger::Wire { bytes } => (kernel::TRIGGER_WIRE, *bytes, None),
    };
    rule.trigger.write(trigger);
    rule.bytes.write(bytes);
    let filter = |point: Option<&CallPoint>| {
        let arg0 = point.and_then(|point| point.arg0);
        (point.map_or(0, |point| point.n), u64::from(arg0.is_some()), arg0.unwrap_or(0))
    };
    let (n, filters, arg0) = filter(call);
    rule.call_n.write(n);
    rule.call_filters_arg0.write(filters);
    rule.call_arg0.write(arg0);
    let (n, filters, arg0) = filter(request.until.as_ref());
    rule.until_n.write(n);
    rule.until_filters_arg0.write(filters);
    rule.until_arg0.write(arg0);
}

/// Nanoseconds, at most a century, so that a sum with the clock cannot overflow.
pub(super) fn nanos(span: Duration) -> u64 {
    const CENTURY: u64 = 100 * 365 * 86_400 * 1_000_000_000;
    u64::try_from(span.as_nanos()).unwrap_or(CENTURY).min(CENTURY)
}
