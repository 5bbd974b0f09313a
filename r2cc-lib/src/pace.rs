//! Which paths have become slow: compared with what they could do themselves and with their neighbours of the
//! same link, so that neither a busy host nor a slower kind of NIC is taken for a fault.

use std::collections::BTreeMap;

use crate::repair::PathState;
use crate::transport::LinkStatus;

/// Readings in a row that make a path slow, or well again.
const READINGS: u32 = 3;

#[derive(Debug, Default)]
struct Pace {
    best_bytes_s: u64,
    readings: u32,
    slow: bool,
}

/// Rates of all outgoing paths over time.
#[derive(Debug, Default)]
pub(crate) struct PaceWatch {
    paths: BTreeMap<(usize, usize, usize), Pace>,
}

impl PaceWatch {
    /// Takes a reading; returns the paths that changed: peer, local NIC, its NIC, whether slow.
    pub(crate) fn changes(&mut self, links: &[LinkStatus]) -> Vec<(usize, usize, usize, bool)> {
        let mut changes = Vec::new();
        for link in links {
            let busy = |(_, p): &&(_, crate::repair::PathReport)| p.state == PathState::Live && p.in_flight_bytes > 0;
            let mut rates: Vec<u64> = link.paths.iter().filter(busy).filter_map(|(_, p)| p.bytes_s).collect();
            rates.sort_unstable();
            let Some(&fastest) = rates.last().filter(|_| rates.len() > 1) else { continue };
            let of_link = self.paths.iter().filter(|((peer, ..), _)| *peer == link.peer);
            let best_fastest = of_link.map(|(_, pace)| pace.best_bytes_s).max().unwrap_or(0).max(fastest);
            for (pair, report) in link.paths.iter().filter(busy) {
                let (Some(from), Some(to), Some(rate)) = (pair.from_nic, pair.to_nic, report.bytes_s) else { continue };
                let pace = self.paths.entry((link.peer, from, to)).or_default();
                pace.best_bytes_s = pace.best_bytes_s.max(rate);
                let expected = u128::from(pace.best_bytes_s) * u128::from(fastest) / u128::from(best_fastest.max(1));
                let slow = rate < pace.best_bytes_s / 2 && u128::from(rate) < expected / 2;
                pace.readings = if slow == pace.slow { 0 } else { pace.readings + 1 };
                if pace.readings == READINGS {
                    (pace.slow, pace.readings) = (slow, 0);
                    changes.push((link.peer, from, to, slow));
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repair::{PathId, PathReport};
    use crate::topology::PairOfNics;
    use std::net::{Ipv4Addr, SocketAddrV4};

    fn link(rates: &[u64]) -> LinkStatus {
        let path = |(i, rate): (usize, &u64)| {
            let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1);
            let pair = PairOfNics { from_nic: Some(i), to_nic: Some(i), from: Ipv4Addr::LOCALHOST, to };
            let report = PathReport {
                path: PathId(i as u16),
                state: PathState::Live,
                bytes_s: Some(*rate),
                in_flight_bytes: 1,
                window_bytes: 1,
            };
            (pair, report)
        };
        LinkStatus { peer: 7, paths: rates.iter().enumerate().map(path).collect() }
    }

    #[test]
    fn a_path_that_falls_behind_itself_and_its_neighbours_is_told_once_and_told_again_when_well() {
        let mut watch = PaceWatch::default();
        assert!(watch.changes(&[link(&[100, 100, 100])]).is_empty());
        assert!(watch.changes(&[link(&[100, 10, 100])]).is_empty());
        assert!(watch.changes(&[link(&[100, 10, 100])]).is_empty());
        assert_eq!(watch.changes(&[link(&[100, 10, 100])]), [(7, 1, 1, true)]);
        assert!(watch.changes(&[link(&[100, 10, 100])]).is_empty());
        for _ in 0..2 {
            assert!(watch.changes(&[link(&[100, 100, 100])]).is_empty());
        }
        assert_eq!(watch.changes(&[link(&[100, 100, 100])]), [(7, 1, 1, false)]);
    }

    #[test]
    fn a_slower_kind_of_nic_and_a_busy_host_are_no_faults() {
        let mut watch = PaceWatch::default();
        for _ in 0..10 {
            assert!(watch.changes(&[link(&[100, 10])]).is_empty(), "never faster than that");
        }
        for _ in 0..10 {
            assert!(watch.changes(&[link(&[20, 4])]).is_empty(), "all slower together");
        }
    }
}
