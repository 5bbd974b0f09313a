//! What happened, read from the shared arrays: counters, snapshots, a fault's fate.

use serde::{Deserialize, Serialize};

use crate::kernel::{self, MAX_PORTS, Maps, RawFlow, monotonic_ns};

/// Packets and bytes (with Ethernet headers). With segmentation offload one packet may
/// be a 64 KiB one that the wire would see as many: compare bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Flow {
    /// packets as the kernel handles them
    pub packets: u64,
    /// bytes, Ethernet headers included
    pub bytes: u64,
}

impl RawFlow {
    fn read(&self) -> Flow {
        Flow { packets: self.packets.read(), bytes: self.bytes.read() }
    }
}

/// A number for each direction of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PerDirection {
    /// received
    pub rx: u64,
    /// sent
    pub tx: u64,
}

impl PerDirection {
    /// Both together.
    #[must_use]
    pub fn total(self) -> u64 {
        self.rx + self.tx
    }
}

/// The traffic of one port since it was attached to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PortCounters {
    /// the node
    pub node: String,
    /// the NIC
    pub nic: String,
    /// when this was read, CLOCK_MONOTONIC
    pub at_ns: u64,
    /// received and let through
    pub rx_passed: Flow,
    /// received and dropped by faults
    pub rx_dropped: Flow,
    /// sent and let through
    pub tx_passed: Flow,
    /// sent and dropped by faults
    pub tx_dropped: Flow,
}

/// What has become of a fault. Times are CLOCK_MONOTONIC nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FaultStatus {
    /// whether it has begun
    pub fired: bool,
    /// when the call of its trigger came
    pub call_ns: Option<u64>,
    /// when it began
    pub fired_at_ns: Option<u64>,
    /// when it stopped its first packet
    pub first_drop_ns: Option<u64>,
    /// when a call or a command healed it; None when its lease ran out instead
    pub healed_at_ns: Option<u64>,
    /// bytes received on its first port between the base point (call or arming) and the
    /// firing, the packet that crossed the threshold included: at least the bytes asked
    /// for, at most one packet more. That packet was dropped itself (if the fault drops
    /// what this port receives), so what *passed* since the base point is less.
    pub bytes_before: u64,
    /// packets it stopped
    pub packets_dropped: PerDirection,
    /// bytes it stopped
    pub bytes_dropped: PerDirection,
    /// when its lease ends or ended
    pub expires_at_ns: u64,
    /// whether its lease ran out before it was healed: it drops nothing any more
    pub expired: bool,
    /// packets that passed because its lease had run out
    pub passed_after_expiry: u64,
    /// every port's counters at the firing; empty until then
    pub snapshot: Vec<PortCounters>,
}

impl FaultStatus {
    /// Where the fault stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match (self.healed_at_ns, self.expired, self.fired) {
            (Some(_), ..) => Phase::Healed,
            (None, true, _) => Phase::Expired,
            (None, false, true) => Phase::Active,
            (None, false, false) => Phase::Armed,
        }
    }
}

/// Where a fault stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// waits for its trigger
    Armed,
    /// has begun and lasts
    Active,
    /// its lease ran out
    Expired,
    /// ended by a call or a command
    Healed,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Armed => "armed",
            Self::Active => "active",
            Self::Expired => "expired",
            Self::Healed => "healed",
        })
    }
}

pub(crate) fn status_of(maps: &Maps, slot: usize, ports: &[(String, String)]) -> FaultStatus {
    let (control, state) = (&maps.control[slot], &maps.states[slot]);
    let known = |word: &kernel::Word| Some(word.read()).filter(|ns| *ns != 0);
    let fired_at_ns = known(&state.fired_ns);
    let healed_at_ns = known(&state.healed_ns);
    let expires_at_ns = control.expires_ns.read();
    let snapshot = if state.snapshot_done.read() == 1 {
        maps.snapshots[slot * MAX_PORTS..]
            .iter()
            .zip(ports)
            .map(|(snapshot, (node, nic))| PortCounters {
                node: node.clone(),
                nic: nic.clone(),
                at_ns: snapshot.at_ns.read(),
                rx_passed: snapshot.rx_passed.read(),
                rx_dropped: snapshot.rx_dropped.read(),
                tx_passed: snapshot.tx_passed.read(),
                tx_dropped: snapshot.tx_dropped.read(),
            })
            .collect()
    } else {
        Vec::new()
    };
    let both = |words: &[kernel::Word; 2]| PerDirection { rx: words[0].read(), tx: words[1].read() };
    FaultStatus {
        fired: fired_at_ns.is_some(),
        call_ns: known(&state.call_ns),
        fired_at_ns,
        first_drop_ns: known(&state.first_drop_ns),
        healed_at_ns,
        bytes_before: state.bytes_before.read(),
        packets_dropped: both(&state.dropped_packets),
        bytes_dropped: both(&state.dropped_bytes),
        expires_at_ns,
        expired: healed_at_ns.is_none() && expires_at_ns <= monotonic_ns(),
        passed_after_expiry: state.passed_expired.read(),
        snapshot,
    }
}

pub(crate) fn counters_of(maps: &Maps, ports: &[(String, String)]) -> Vec<PortCounters> {
    maps.ports
        .iter()
        .zip(ports)
        .map(|(port, (node, nic))| PortCounters {
            node: node.clone(),
            nic: nic.clone(),
            at_ns: monotonic_ns(),
            rx_passed: port.rx_passed.read(),
            rx_dropped: port.rx_dropped.read(),
            tx_passed: port.tx_passed.read(),
            tx_dropped: port.tx_dropped.read(),
        })
        .collect()
}
