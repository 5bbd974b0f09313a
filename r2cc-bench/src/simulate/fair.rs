//! Who gets how much of which NIC direction: weighted max-min fairness by progressive filling.
//!
//! Owns the arithmetic only: ports with a capacity, subflows that each load two ports. Start at [`Ports::share`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Shares that differ by less are equal.
const EQUAL: f64 = 1e-12;

/// A part of a message on its way: its sender's and its receiver's port.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Subflow {
    /// Port of the sender.
    pub out: u32,
    /// Port of the receiver.
    pub into: u32,
    /// How much it gets beside others; above 0.
    pub weight: f64,
}

/// What is left of each port, and room to calculate.
#[derive(Debug)]
pub struct Ports {
    left: Vec<f64>,
    /// Subflows of each port without a rate, and their weights.
    waiting: Vec<u32>,
    weights: Vec<f64>,
    /// Subflows of each port: ranges of `members`.
    start: Vec<u32>,
    members: Vec<u32>,
    used: Vec<u32>,
    heap: BinaryHeap<Reverse<(Share, u32)>>,
}

/// A share of a port; never NaN, so it has an order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Share(f64);

impl Eq for Share {}

impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Share {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Ports {
    /// `count` ports without capacity.
    pub fn new(count: usize) -> Self {
        Self {
            left: vec![0.0; count],
            waiting: vec![0; count],
            weights: vec![0.0; count],
            start: vec![0; count + 1],
            members: Vec::new(),
            used: Vec::new(),
            heap: BinaryHeap::new(),
        }
    }

    /// Gives every port all of its capacity again, in bytes a second.
    pub fn fill(&mut self, capacity: &[f64]) {
        self.left.copy_from_slice(capacity);
    }

    /// Shares what is left among `flows` and takes it away: no subflow can have more for its weight unless one that
    /// has no more than it gets less. `rates` receives one rate a subflow, in bytes a second.
    pub fn share(&mut self, flows: &[Subflow], rates: &mut Vec<f64>) {
        rates.clear();
        rates.resize(flows.len(), -1.0);
        self.gather(flows);
        self.heap.clear();
        for &port in &self.used {
            let share = self.left[port as usize] / self.weights[port as usize];
            self.heap.push(Reverse((Share(share), port)));
        }
        while let Some(Reverse((Share(share), port))) = self.heap.pop() {
            let at = port as usize;
            if self.waiting[at] == 0 {
                continue;
            }
            // Rounding may leave nothing of the last weight.
            let now = (self.left[at] / self.weights[at].max(f64::MIN_POSITIVE)).max(0.0);
            if now > share * (1.0 + EQUAL) + f64::MIN_POSITIVE {
                self.heap.push(Reverse((Share(now), port)));
                continue;
            }
            for member in self.start[at]..self.start[at] + self.waiting_total(at) {
                let flow = self.members[member as usize] as usize;
                if rates[flow] >= 0.0 {
                    continue;
                }
                let Subflow { out, into, weight } = flows[flow];
                rates[flow] = now * weight;
                for end in [out, into] {
                    self.left[end as usize] = (self.left[end as usize] - rates[flow]).max(0.0);
                    self.waiting[end as usize] -= 1;
                    self.weights[end as usize] -= weight;
                }
            }
        }
        self.used.clear();
    }

    fn waiting_total(&self, port: usize) -> u32 {
        self.start[port + 1] - self.start[port]
    }

    /// Lists the subflows of each port. Entries of ports that no subflow uses are never read.
    fn gather(&mut self, flows: &[Subflow]) {
        self.used.clear();
        for flow in flows {
            for port in [flow.out, flow.into] {
                if self.waiting[port as usize] == 0 {
                    self.used.push(port);
                    self.weights[port as usize] = 0.0;
                }
                self.waiting[port as usize] += 1;
                self.weights[port as usize] += flow.weight;
            }
        }
        self.start.fill(0);
        for &port in &self.used {
            self.start[port as usize + 1] = self.waiting[port as usize];
        }
        for port in 1..self.start.len() {
            self.start[port] += self.start[port - 1];
        }
        self.members.clear();
        self.members.resize(2 * flows.len(), 0);
        let mut next: Vec<u32> = self.start.clone();
        for (number, flow) in flows.iter().enumerate() {
            for port in [flow.out, flow.into] {
                self.members[next[port as usize] as usize] = number as u32;
                next[port as usize] += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(capacity: &[f64], flows: &[(u32, u32)]) -> Vec<f64> {
        weighted(capacity, &flows.iter().map(|&(out, into)| (out, into, 1.0)).collect::<Vec<_>>())
    }

    fn weighted(capacity: &[f64], flows: &[(u32, u32, f64)]) -> Vec<f64> {
        let flows: Vec<Subflow> = flows.iter().map(|&(out, into, weight)| Subflow { out, into, weight }).collect();
        let mut ports = Ports::new(capacity.len());
        ports.fill(capacity);
        let mut rates = Vec::new();
        ports.share(&flows, &mut rates);
        rates
    }

    #[test]
    fn what_one_cannot_use_the_others_get() {
        // Two into a narrow port, one of them beside a third at the sender.
        assert_eq!(shared(&[1.0, 1.0, 0.5, 1.0], &[(0, 2), (1, 2), (1, 3)]), [0.25, 0.25, 0.75]);
    }

    #[test]
    fn equal_flows_have_equal_rates_and_none_exceeds_a_port() {
        assert_eq!(shared(&[3.0, 9.0], &[(0, 1), (0, 1), (0, 1)]), [1.0; 3]);
    }

    #[test]
    fn weights_decide_where_all_want_more_and_what_one_cannot_use_goes_by_the_others_weights() {
        assert_eq!(weighted(&[4.0, 9.0], &[(0, 1, 3.0), (0, 1, 1.0)]), [3.0, 1.0]);
        assert_eq!(weighted(&[8.0, 2.0, 9.0], &[(0, 1, 4.0), (0, 2, 1.0), (0, 2, 2.0)]), [2.0, 2.0, 4.0]);
    }

    #[test]
    fn a_second_class_takes_what_the_first_left() {
        let mut ports = Ports::new(2);
        ports.fill(&[1.0, 0.75]);
        let mut rates = Vec::new();
        ports.share(&[Subflow { out: 0, into: 1, weight: 1.0 }], &mut rates);
        assert_eq!(rates, [0.75]);
        ports.share(&[Subflow { out: 0, into: 1, weight: 1.0 }], &mut rates);
        assert_eq!(rates, [0.0]);
    }
}
