//! The injector: owns the kernel programs on a set of ports, arms faults on them, and
//! reads back what happened.
//!
//! Everything that decides about a packet happens in the kernel (`ebpf/fault.bpf.c`).
//! All attachments are `bpf_link`s held by this process, so dropping the [`Injector`],
//! or dying in any way, heals at once. Never touches an interface beyond these links.
//! Start at [`Injector::attach`], then [`Injector::arm`].

mod attach;
mod error;
mod request;
mod status;

use std::{
    os::fd::{AsFd, BorrowedFd},
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
pub use request::{ArmRequest, CallPoint, Effect, KernelTrigger};
pub use status::{FaultStatus, Flow, PerDirection, Phase, PortCounters};

pub(crate) use status::{counters_of, status_of};

use crate::{
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
        request::check(&request, self.ports.len())?;
        let slot = self.free_slot()?;
        let (control, rule, state) = (&self.maps.control[slot], &self.maps.rules[slot], &self.maps.states[slot]);
        control.gate.write(kernel::GATE_FREE);
        state.clear();
        for snapshot in &self.maps.snapshots[slot * kernel::MAX_PORTS..][..kernel::MAX_PORTS] {
            snapshot.at_ns.write(0);
        }
        request::fill_rule(rule, &request);
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
        control.expires_ns.write(now + request::nanos(request.lease));
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
            let new = now + request::nanos(lease);
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

fn slot_bit(slot: usize) -> u32 {
    // Slots are below MAX_FAULTS (32).
    u32::try_from(slot).unwrap_or(u32::MAX)
}

// A lease is renewed from another thread than the one that arms.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Injector>();
};
