//! What every NIC has moved: the interfaces' own counters and those of the injector's programs, together.

use anyhow::Result;
use r2cc_inject::PortCounters;

use crate::check::record::{NicCounters, NodeCounters};
use crate::cluster::EmulatedCluster;

/// Counters so far. Where no program is attached, what passed is what the interface counts.
pub(super) fn read(cluster: &EmulatedCluster, ports: &[PortCounters]) -> Result<NodeCounters> {
    let mut counters = NodeCounters::new();
    for nic in cluster.counters()? {
        let here = NicCounters {
            rx_bytes: nic.rx_bytes,
            tx_bytes: nic.tx_bytes,
            passed_rx_bytes: nic.rx_bytes,
            passed_tx_bytes: nic.tx_bytes,
        };
        counters.entry(nic.node).or_default().insert(nic.nic, here);
    }
    for port in ports {
        if let Some(nic) = counters.get_mut(&port.node).and_then(|nics| nics.get_mut(&port.nic)) {
            nic.passed_rx_bytes = port.rx_passed.bytes;
            nic.passed_tx_bytes = port.tx_passed.bytes;
        }
    }
    Ok(counters)
}

/// The programs' view alone: what was seen and what passed.
pub(super) fn of_programs(ports: &[PortCounters]) -> NodeCounters {
    let mut counters = NodeCounters::new();
    for port in ports {
        let here = NicCounters {
            rx_bytes: port.rx_passed.bytes + port.rx_dropped.bytes,
            tx_bytes: port.tx_passed.bytes + port.tx_dropped.bytes,
            passed_rx_bytes: port.rx_passed.bytes,
            passed_tx_bytes: port.tx_passed.bytes,
        };
        counters.entry(port.node.clone()).or_default().insert(port.nic.clone(), here);
    }
    counters
}

/// What was moved between two readings.
pub(super) fn between(before: &NodeCounters, after: &NodeCounters) -> NodeCounters {
    let mut moved = after.clone();
    for (node, nics) in &mut moved {
        for (nic, now) in nics {
            let then = before.get(node).and_then(|nics| nics.get(nic)).copied().unwrap_or_default();
            now.rx_bytes = now.rx_bytes.saturating_sub(then.rx_bytes);
            now.tx_bytes = now.tx_bytes.saturating_sub(then.tx_bytes);
            now.passed_rx_bytes = now.passed_rx_bytes.saturating_sub(then.passed_rx_bytes);
            now.passed_tx_bytes = now.passed_tx_bytes.saturating_sub(then.passed_tx_bytes);
        }
    }
    moved
}
