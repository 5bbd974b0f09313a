//! The injector: owns the kernel programs on a set of ports, arms faults on them, and
//! reads back what happened.
//!
//! Everything that decides about a packet happens in the kernel (`ebpf/fault.bpf.c`).
//! All attachments are `bpf_link`s held by this process, so dropping the [`Injector`],
//! or dying in any way, heals at once. Never touches an interface beyond these links.
//! Start at [`Injector::attach`], then [`Injector::arm`].

mod attach;
mod error;
mod status;

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    time::Duration,
};

use aya::{
    Ebpf,
    maps::Map,
    programs::{
        UProbe,
        links::FdLink,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
    },
};

pub use error::Error;
pub use status::{FaultStatus, Flow, PerDirection, Phase, PortCounters};

pub(crate) use status::{counters_of, status_of};

use crate::{
    fault::Direction,
    kernel::{self, MAP_NAMES, MAX_FAULTS, Maps, monotonic_ns},
    probe::symbol_offset,
};

/// A port to count and, perhaps, to break.
#[derive(Debug, Clone)]
pub struct PortSpec<'a> {
    /// the node it belongs to, as faults name it
    pub node: String,
    /// its name on that node, as faults name it
    pub nic: String,
    /// the network namespace the interface is in; None: the calling thread's
    pub netns: Option<BorrowedFd<'a>>,
    /// the interface's name in that namespace
    pub ifname: String,
}

/// A port of one [`Injector`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortId(usize);

/// A fault armed by one [`Injector`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultId {
    slot: usize,
    generation: u64,
}

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

/// Who the kernel programs and their faults belong to.
pub struct Injector {
    // Closed in this order: attachments first, then programs and maps.
    links: Vec<std::os::fd::OwnedFd>,
    faults: Vec<Option<Armed>>,
    ebpf: Ebpf,
    maps: Maps,
    ports: Vec<(String, String)>,
    generation: u64,
    owner_kind: u64,
}

struct Armed {
    generation: u64,
    probes: Vec<FdLink>,
    ports: Vec<PortId>,
    healed: bool,
}

impl std::fmt::Debug for Injector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Injector").field("ports", &self.ports).field("links", &self.links.len()).finish_non_exhaustive()
    }
}

const RX_BIT: u64 = 1;
const TX_BIT: u64 = 2;

impl Injector {
    /// Attaches to every port, generic XDP on ingress and TCX on egress, and counts its
    /// traffic from then on.
    ///
    /// # Errors
    /// Missing rights or kernel features, an unknown interface, another XDP program on
    /// it, or hardware RDMA that would bypass the programs. Nothing stays attached.
    pub fn attach(ports: &[PortSpec<'_>]) -> Result<Self, Error> {
        let (mut ebpf, links) = attach::load_and_attach(ports)?;
        let mut taken = Vec::with_capacity(MAP_NAMES.len());
        for name in MAP_NAMES {
            match ebpf.take_map(name) {
                Some(Map::Array(map)) => taken.push(map),
                _ => return Err(Error::BrokenObject { part: name }),
            }
        }
        let fds: Vec<BorrowedFd<'_>> = taken.iter().map(|map| map.fd().as_fd()).collect();
        let fds = <[BorrowedFd<'_>; 6]>::try_from(fds).map_err(|_| Error::BrokenObject { part: "shared arrays" })?;
        let maps = Maps::open(fds).map_err(|source| Error::MapMemory { source })?;
        for (watch, port) in maps.watch.iter().zip(ports) {
            kernel::write_text(&watch.name, &format!("{}/{}", port.node, port.nic));
        }
        Ok(Self {
            links,
            faults: (0..MAX_FAULTS).map(|_| None).collect(),
            ebpf,
            maps,
            ports: ports.iter().map(|port| (port.node.clone(), port.nic.clone())).collect(),
            generation: 0,
            owner_kind: 0,
        })
    }

    /// The port that faults call `node`/`nic`.
    #[must_use]
    pub fn port(&self, node: &str, nic: &str) -> Option<PortId> {
        self.ports.iter().position(|(its_node, its_nic)| its_node == node && its_nic == nic).map(PortId)
    }

    /// Tells `r2cc-inject heal --all` that this process heals its faults and ends when
    /// it is sent SIGTERM. For faults armed from now on.
    pub fn stops_on_sigterm(&mut self) {
        self.owner_kind = kernel::OWNER_STOPS_ON_SIGTERM;
    }

    /// Arms a fault. When this returns, its trigger is being watched for in the kernel;
    /// with [`KernelTrigger::Now`] it has fired.
    ///
    /// # Errors
    /// A request that makes no sense, a call point that cannot be probed, or too many
    /// faults at once. Nothing is armed then.
    pub fn arm(&mut self, request: ArmRequest) -> Result<FaultId, Error> {
        self.check(&request)?;
        let slot = self.free_slot()?;
        let (control, rule, state) = (&self.maps.control[slot], &self.maps.rules[slot], &self.maps.states[slot]);
        control.gate.write(kernel::GATE_FREE);
        state.clear();
        for snapshot in &self.maps.snapshots[slot * kernel::MAX_PORTS..][..kernel::MAX_PORTS] {
            snapshot.at_ns.write(0);
        }
        fill_rule(rule, &request);
        kernel::write_text(&control.label, "");
        control.owner_pid.write(u64::from(std::process::id()));
        control.owner_kind.write(self.owner_kind);

        let mut probes = Vec::new();
        if let KernelTrigger::Call { point, .. } = &request.trigger {
            probes.push(self.probe(slot, point, false)?);
        }
        if let Some(point) = &request.until {
            probes.push(self.probe(slot, point, true)?);
        }

        // The gate opens after everything it guards is in place, and the ports look at
        // the fault last.
        let (control, state) = (&self.maps.control[slot], &self.maps.states[slot]);
        let now = monotonic_ns();
        control.expires_ns.write(now + nanos(request.lease));
        match request.trigger {
            KernelTrigger::Call { .. } => {}
            KernelTrigger::Now | KernelTrigger::Wire { .. } => {
                let base = &self.maps.ports[request.ports[0].0].rx_arrived_bytes;
                state.base_bytes.write(base.read());
                state.base_set.write(1);
            }
        }
        control.gate.write(kernel::GATE_ARMED);
        if request.trigger == KernelTrigger::Now {
            self.fire_now(slot);
        }
        for port in &request.ports {
            self.maps.watch[port.0].faults.set_bit(slot_bit(slot));
        }
        self.generation += 1;
        self.faults[slot] = Some(Armed { generation: self.generation, probes, ports: request.ports, healed: false });
        Ok(FaultId { slot, generation: self.generation })
    }

    /// Notes what a fault is, for `r2cc-inject status` in another process.
    ///
    /// # Errors
    /// [`Error::UnknownFault`].
    pub fn label(&self, id: FaultId, text: &str) -> Result<(), Error> {
        self.armed(id)?;
        kernel::write_text(&self.maps.control[id.slot].label, text);
        Ok(())
    }

    /// Makes the fault last `lease` from now; answers with the new expiry.
    ///
    /// # Errors
    /// [`Error::Expired`] once its lease has run out: what has been healed by neglect
    /// stays healed.
    pub fn renew(&self, id: FaultId, lease: Duration) -> Result<u64, Error> {
        self.armed(id)?;
        let expires = &self.maps.control[id.slot].expires_ns;
        loop {
            let (old, now) = (expires.read(), monotonic_ns());
            if old <= now {
                return Err(Error::Expired { late: Duration::from_nanos(now - old) });
            }
            let new = now + nanos(lease);
            if expires.replace(old, new) {
                return Ok(new);
            }
        }
    }

    /// What has become of a fault.
    ///
    /// # Errors
    /// [`Error::UnknownFault`].
    pub fn status(&self, id: FaultId) -> Result<FaultStatus, Error> {
        self.armed(id)?;
        Ok(status_of(&self.maps, id.slot, &self.ports))
    }

    /// The traffic of every port since [`Injector::attach`], in its order.
    ///
    /// # Errors
    /// None today; kept fallible for backends that have to ask a device.
    pub fn counters(&self) -> Result<Vec<PortCounters>, Error> {
        Ok(counters_of(&self.maps, &self.ports))
    }

    /// Ends a fault; from then on its packets pass. Ending it twice is no error.
    ///
    /// # Errors
    /// [`Error::UnknownFault`].
    pub fn heal(&mut self, id: FaultId) -> Result<FaultStatus, Error> {
        self.armed(id)?;
        self.heal_slot(id.slot);
        self.status(id)
    }

    /// Ends all faults and answers with those that were not healed yet.
    ///
    /// # Errors
    /// None today, as [`Injector::counters`].
    pub fn heal_all(&mut self) -> Result<Vec<(FaultId, FaultStatus)>, Error> {
        let ids: Vec<FaultId> = self
            .faults
            .iter()
            .enumerate()
            .filter_map(|(slot, fault)| {
                let fault = fault.as_ref().filter(|fault| !fault.healed)?;
                Some(FaultId { slot, generation: fault.generation })
            })
            .collect();
        ids.into_iter().map(|id| Ok((id, self.heal(id)?))).collect()
    }

    fn heal_slot(&mut self, slot: usize) {
        let Some(fault) = self.faults[slot].as_mut() else {
            return;
        };
        heal_in(&self.maps, slot);
        fault.healed = true;
        fault.probes.clear();
        for port in &fault.ports {
            self.maps.watch[port.0].faults.clear_bit(slot_bit(slot));
        }
    }

    fn armed(&self, id: FaultId) -> Result<&Armed, Error> {
        self.faults
            .get(id.slot)
            .and_then(Option::as_ref)
            .filter(|fault| fault.generation == id.generation)
            .ok_or(Error::UnknownFault)
    }

    /// A slot never used, else the one healed longest ago (its status is forgotten).
    fn free_slot(&self) -> Result<usize, Error> {
        if let Some(slot) = self.faults.iter().position(Option::is_none) {
            return Ok(slot);
        }
        self.faults
            .iter()
            .enumerate()
            .filter_map(|(slot, fault)| fault.as_ref().map(|fault| (slot, fault)))
            .filter(|(_, fault)| fault.healed)
            .min_by_key(|(_, fault)| fault.generation)
            .map(|(slot, _)| slot)
            .ok_or(Error::TooManyFaults { limit: MAX_FAULTS })
    }

    fn check(&self, request: &ArmRequest) -> Result<(), Error> {
        let refuse = |reason: &str| Err(Error::BadRequest { reason: reason.to_owned() });
        if request.ports.is_empty() {
            return refuse("a fault needs at least one port");
        }
        if request.ports.iter().any(|port| port.0 >= self.ports.len()) {
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

    /// Puts the probe of `slot` on a function; the kernel finds the slot in the cookie.
    fn probe(&mut self, slot: usize, point: &CallPoint, is_until: bool) -> Result<FdLink, Error> {
        let offset = symbol_offset(&point.binary, &point.symbol)?;
        let failed = |reason: String| Error::Probe {
            binary: point.binary.clone(),
            symbol: point.symbol.clone(),
            pid: point.pid,
            reason,
        };
        let pid = std::num::NonZeroU32::new(point.pid).ok_or_else(|| failed("0 is no process".to_owned()))?;
        let program: &mut UProbe = self
            .ebpf
            .program_mut("r2cc_call")
            .and_then(|program| program.try_into().ok())
            .ok_or(Error::BrokenObject { part: "r2cc_call" })?;
        // An absolute path, or aya would look a bare name up among the libraries.
        let binary = std::path::absolute(&point.binary).map_err(|e| failed(e.to_string()))?;
        let attach_point = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(offset),
            cookie: Some(slot as u64 | u64::from(is_until) << 8),
        };
        let link = program
            .attach(attach_point, &binary, UProbeScope::OneProcess(pid))
            .and_then(|id| program.take_link(id))
            .map_err(|error| failed(error::chain(&error)))?;
        FdLink::try_from(link).map_err(|error| failed(error::chain(&error)))
    }

    /// Fires in user space: with this trigger there is no position to race for.
    fn fire_now(&self, slot: usize) {
        let (maps, now) = (&self.maps, monotonic_ns());
        for (snapshot, port) in
            maps.snapshots[slot * kernel::MAX_PORTS..].iter().zip(maps.ports.iter().take(self.ports.len()))
        {
            for (to, from) in [
                (&snapshot.rx_passed, &port.rx_passed),
                (&snapshot.rx_dropped, &port.rx_dropped),
                (&snapshot.tx_passed, &port.tx_passed),
                (&snapshot.tx_dropped, &port.tx_dropped),
            ] {
                to.packets.write(from.packets.read());
                to.bytes.write(from.bytes.read());
            }
            snapshot.at_ns.write(monotonic_ns());
        }
        maps.states[slot].snapshot_done.write(1);
        maps.states[slot].fired_ns.write(now);
    }
}

/// Closes the gate of `slot`; also used on another process's maps.
pub(crate) fn heal_in(maps: &Maps, slot: usize) {
    let control = &maps.control[slot];
    let lapsed = control.expires_ns.read() <= monotonic_ns();
    if control.gate.replace(kernel::GATE_ARMED, kernel::GATE_HEALED) && !lapsed {
        maps.states[slot].healed_ns.write_if_zero(monotonic_ns());
    }
}

fn fill_rule(rule: &kernel::RawRule, request: &ArmRequest) {
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
fn nanos(span: Duration) -> u64 {
    const CENTURY: u64 = 100 * 365 * 86_400 * 1_000_000_000;
    u64::try_from(span.as_nanos()).unwrap_or(CENTURY).min(CENTURY)
}

fn slot_bit(slot: usize) -> u32 {
    // Slots are below MAX_FAULTS (32).
    u32::try_from(slot).unwrap_or(u32::MAX)
}
