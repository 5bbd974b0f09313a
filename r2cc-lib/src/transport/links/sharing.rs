//! Sharing NICs: how much of each a path of an outgoing link takes beside the paths of others.
//!
//! A queue serves flows in proportion to what each has in it. So that a path gets its part of a NIC, its window is
//! what that part of the NIC's rate asks for, and not what its own rate does, which is whatever it had before.

use std::collections::BTreeMap;

use super::{End, Links};
use crate::topology::PairOfNics;

impl Links {
    /// On an outgoing link, paths whose weight is 0 carry chunks only while no other is live; while all are busy, those
    /// of one NIC share it by their weights. Paths without a weight take what they can.
    pub fn share_paths(&mut self, peer: usize, weight: impl Fn(&PairOfNics) -> Option<f64>) {
        let Some(at) = self.send_to.get(&peer) else { return };
        let link = &mut self.links[*at];
        let End::Send(sender, _) = &mut link.end else { return };
        link.weights.clear();
        for (path, pair) in &link.pairs {
            let weight = weight(pair);
            sender.set_standing_by(*path, weight.is_some_and(|weight| weight <= 0.0));
            sender.set_pace(*path, None);
            link.weights.extend(weight.filter(|weight| *weight > 0.0).map(|weight| (*path, weight)));
        }
        link.dirty = true;
    }

    /// Gives each path with a weight its part of what the busy paths of its NIC reach together.
    pub(super) fn pace_paths(&mut self) {
        // Bytes a second and weights, by NIC.
        let mut busy: BTreeMap<Option<usize>, (f64, f64)> = BTreeMap::new();
        for link in self.links.iter().filter(|link| !link.left && !link.weights.is_empty()) {
            let End::Send(sender, _) = &link.end else { continue };
            for report in sender.path_reports().filter(|report| report.in_flight_bytes > 0) {
                if let (Some(weight), Some(bytes_s)) = (link.weights.get(&report.path), report.bytes_s) {
                    let sums = busy.entry(link.pairs[&report.path].from_nic).or_default();
                    *sums = (sums.0 + bytes_s as f64, sums.1 + weight);
                }
            }
        }
        for link in self.links.iter_mut().filter(|link| !link.left) {
            let End::Send(sender, _) = &mut link.end else { continue };
            for (path, weight) in &link.weights {
                if let Some((bytes_s, weights)) = busy.get(&link.pairs[path].from_nic) {
                    sender.set_pace(*path, Some((bytes_s * weight / weights) as u64));
                }
            }
        }
    }
}
