//! Runs plans at the level of flows: how long do they take on a fabric?
//!
//! Each message is a flow over the rails that its two nodes share; NIC directions are shared max-min fairly, by the
//! weights that the plan gives, with class `Tail` behind the others or alike. A message is on its way when it is the
//! first of its stream, its send and its receive are posted, and its bytes are there when they have flowed: no latency,
//! no headers, traffic inside a node takes no time. Runs the very plans that the library executes. Start at [`simulate`].

use std::collections::BTreeMap;

use r2cc::schedule::{Action, Class, Fabric, RankPlan};

use super::fair::{Ports, Subflow};

/// How a message is spread over the rails.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Striping<'a> {
    /// Rails take bytes as they can carry them (Balance).
    Pull,
    /// Each message is cut for the rails of the healthy fabric, in proportion to their speed; a rail that the
    /// two nodes have lost hands its part to one other (hot repair onto a backup NIC).
    OneBackup {
        /// The fabric before the faults.
        healthy: &'a Fabric,
    },
}

/// What is simulated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings<'a> {
    /// Bytes of an element.
    pub element_bytes: usize,
    /// `Tail` behind the others on each NIC direction; else all share alike.
    pub priority: bool,
    /// How messages use rails.
    pub striping: Striping<'a>,
    /// Messages that end within so many seconds are taken to end together, at the end of the last.
    pub quantum_s: f64,
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Seconds until the last rank is through.
    pub seconds: f64,
    /// Bytes that each node received from others.
    pub node_received: Vec<f64>,
}

/// Why there is no outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimulateError {
    /// The plans are not one for each rank of the fabric.
    #[error("{plans} plans for {ranks} ranks")]
    Plans {
        /// Number of plans.
        plans: usize,
        /// Ranks of the fabric.
        ranks: usize,
    },
    /// A stream's sends and receives do not match.
    #[error("ranks {from} and {to}: {sends} sends for {receives} receives; hint: check the plans first")]
    Unmatched {
        /// Sending rank.
        from: usize,
        /// Receiving rank.
        to: usize,
        /// Sends.
        sends: usize,
        /// Receives.
        receives: usize,
    },
    /// Nothing flows, and not everything is done.
    #[error("{steps} steps wait for one another; hint: check the plans first")]
    Stuck {
        /// Steps that are not complete.
        steps: usize,
    },
}

/// Runs `plans`, one a rank, on `fabric`.
///
/// # Errors
/// If the plans are not for this fabric, or are not right.
pub fn simulate(plans: &[RankPlan], fabric: &Fabric, settings: Settings) -> Result<Outcome, SimulateError> {
    let mut run = Run::new(plans, fabric, settings)?;
    run.start();
    while !run.flows.is_empty() {
        run.rate();
        run.advance();
        run.settle();
    }
    if run.open > 0 {
        return Err(SimulateError::Stuck { steps: run.open });
    }
    Ok(Outcome { seconds: run.now, node_received: run.node_received })
}

/// A message: its two steps, by number over all ranks, and its bytes.
#[derive(Debug, Clone, Copy)]
struct Message {
    send: u32,
    receive: u32,
    bytes: f64,
}

#[derive(Debug)]
struct Stream {
    from: usize,
    to: usize,
    class: Class,
    /// What the sender's plan wants each rail to carry; empty: all alike.
    shares: Vec<f64>,
    messages: Vec<Message>,
    next: usize,
    /// Flows of the message under way.
    flowing: usize,
}

/// Bytes on their way over some rails at once.
#[derive(Debug)]
struct Flow {
    stream: usize,
    class: Class,
    left: f64,
    rate: f64,
    /// Ports of the sender and the receiver on each rail used.
    subflows: Vec<Subflow>,
}

struct Run<'a> {
    settings: Settings<'a>,
    rails: usize,
    node_of: Vec<usize>,
    capacity: Vec<f64>,
    fabric: &'a Fabric,
    streams: Vec<Stream>,
    /// Stream of each step; none for a copy.
    stream_of: Vec<u32>,
    waits: Vec<u32>,
    dependents: Vec<u32>,
    dependents_from: Vec<u32>,
    open: usize,
    flows: Vec<Flow>,
    /// Streams whose next message may have become ready, and steps that have just become complete.
    ready: Vec<usize>,
    done: Vec<u32>,
    ports: Ports,
    subflows: Vec<Subflow>,
    rates: Vec<f64>,
    now: f64,
    node_received: Vec<f64>,
}

const NO_STREAM: u32 = u32::MAX;

impl<'a> Run<'a> {
    fn new(plans: &[RankPlan], fabric: &'a Fabric, settings: Settings<'a>) -> Result<Self, SimulateError> {
        if plans.len() != fabric.world() {
            return Err(SimulateError::Plans { plans: plans.len(), ranks: fabric.world() });
        }
        let mut node_of = vec![0; fabric.world()];
        for (i, node) in fabric.nodes().iter().enumerate() {
            node.ranks.iter().for_each(|&rank| node_of[rank] = i);
        }
        let rails = fabric.nodes().first().map_or(0, |node| node.rails.len());
        // For each node: all rails outwards, then all inwards.
        let capacity: Vec<f64> =
            fabric.nodes().iter().flat_map(|node| node.rails.iter().chain(&node.rails)).copied().collect();
        let (streams, stream_of) = streams(plans, settings.element_bytes)?;
        let steps = stream_of.len();
        let mut waits = Vec::with_capacity(steps);
        let mut dependents_from = vec![0u32; steps + 1];
        let mut first = 0u32;
        for plan in plans {
            for step in &plan.steps {
                waits.push(step.after.len() as u32);
                step.after.iter().for_each(|dep| dependents_from[(first + dep) as usize + 1] += 1);
            }
            first += plan.steps.len() as u32;
        }
        for step in 0..steps {
            dependents_from[step + 1] += dependents_from[step];
        }
        let mut next = dependents_from.clone();
        let mut dependents = vec![0; dependents_from[steps] as usize];
        let (mut first, mut number) = (0u32, 0u32);
        for plan in plans {
            for step in &plan.steps {
                for dep in &step.after {
                    let at = &mut next[(first + dep) as usize];
                    dependents[*at as usize] = number;
                    *at += 1;
                }
                number += 1;
            }
            first = number;
        }
        let ready = (0..streams.len()).collect();
        Ok(Self {
            settings,
            rails,
            node_of,
            ports: Ports::new(capacity.len()),
            capacity,
            fabric,
            streams,
            stream_of,
            waits,
            dependents,
            dependents_from,
            open: steps,
            flows: Vec::new(),
            ready,
            done: Vec::new(),
            subflows: Vec::new(),
            rates: Vec::new(),
            now: 0.0,
            node_received: vec![0.0; fabric.nodes().len()],
        })
    }

    fn start(&mut self) {
        let copies = (0..self.stream_of.len() as u32).filter(|&step| self.stream_of[step as usize] == NO_STREAM);
        self.done = copies.filter(|&step| self.waits[step as usize] == 0).collect();
        self.settle();
    }

    /// Completes what is complete and sets off what has become ready, until nothing changes at this instant.
    fn settle(&mut self) {
        loop {
            if let Some(step) = self.done.pop() {
                self.open -= 1;
                let (from, to) =
                    (self.dependents_from[step as usize] as usize, self.dependents_from[step as usize + 1] as usize);
                for at in from..to {
                    let dependent = self.dependents[at] as usize;
                    self.waits[dependent] -= 1;
                    if self.waits[dependent] == 0 {
                        match self.stream_of[dependent] {
                            NO_STREAM => self.done.push(dependent as u32),
                            stream => self.ready.push(stream as usize),
                        }
                    }
                }
            } else if let Some(stream) = self.ready.pop() {
                self.set_off(stream);
            } else {
                return;
            }
        }
    }

    /// Sends the next message of the stream if it can go.
    fn set_off(&mut self, number: usize) {
        let stream = &mut self.streams[number];
        let Some(&message) = stream.messages.get(stream.next).filter(|_| stream.flowing == 0) else { return };
        if self.waits[message.send as usize] > 0 || self.waits[message.receive as usize] > 0 {
            return;
        }
        let (from, to) = (self.node_of[stream.from], self.node_of[stream.to]);
        if from == to || message.bytes == 0.0 {
            self.arrive(number);
            return;
        }
        self.node_received[to] += message.bytes;
        let class = stream.class;
        let before = self.flows.len();
        match self.settings.striping {
            Striping::Pull => {
                let shares = &self.streams[number].shares;
                let weight = |rail: usize| shares.get(rail).copied().unwrap_or(1.0);
                let shared = (0..self.rails).filter(|rail| self.port_speed(from, to, *rail) > 0.0);
                let mut rails: Vec<(usize, f64)> = shared.map(|rail| (rail, weight(rail))).collect();
                if rails.iter().any(|(_, weight)| *weight > 0.0) {
                    rails.retain(|(_, weight)| *weight > 0.0);
                } else {
                    rails.iter_mut().for_each(|(_, weight)| *weight = 1.0);
                }
                let subflows = rails.into_iter().map(|(rail, weight)| self.subflow(from, to, rail, weight)).collect();
                self.flows.push(Flow { stream: number, class, left: message.bytes, rate: 0.0, subflows });
            }
            Striping::OneBackup { healthy } => {
                for (rail, part) in self.stripes(healthy, from, to).into_iter().enumerate() {
                    if part > 0.0 {
                        let subflows = vec![self.subflow(from, to, rail, 1.0)];
                        self.flows.push(Flow {
                            stream: number,
                            class,
                            left: part * message.bytes,
                            rate: 0.0,
                            subflows,
                        });
                    }
                }
            }
        }
        self.streams[number].flowing = self.flows.len() - before;
    }

    fn port_speed(&self, from: usize, to: usize, rail: usize) -> f64 {
        self.fabric.nodes()[from].rails[rail].min(self.fabric.nodes()[to].rails[rail])
    }

    fn subflow(&self, from: usize, to: usize, rail: usize, weight: f64) -> Subflow {
        let port = |node: usize, way: usize| ((2 * node + way) * self.rails + rail) as u32;
        Subflow { out: port(from, 0), into: port(to, 1), weight }
    }

    /// The part of a message that each rail carries.
    fn stripes(&self, healthy: &Fabric, from: usize, to: usize) -> Vec<f64> {
        let mut parts = vec![0.0; self.rails];
        for rail in 0..self.rails {
            let speed = healthy.nodes()[from].rails[rail].min(healthy.nodes()[to].rails[rail]);
            // The rail itself, or the next that works.
            let carries = (0..self.rails)
                .map(|i| (rail + i) % self.rails)
                .find(|&rail| self.port_speed(from, to, rail) > 0.0)
                .unwrap_or(rail);
            parts[carries] += speed / healthy.common(from, to);
        }
        parts
    }

    /// The message under way is there: both its steps are complete, and the next may go.
    fn arrive(&mut self, number: usize) {
        let stream = &mut self.streams[number];
        let message = stream.messages[stream.next];
        stream.next += 1;
        self.done.extend([message.send, message.receive]);
        self.ready.push(number);
    }

    fn rate(&mut self) {
        self.ports.fill(&self.capacity);
        self.flows.iter_mut().for_each(|flow| flow.rate = 0.0);
        let classes: &[&[Class]] =
            if self.settings.priority { &[&[Class::Main, Class::Beside], &[Class::Tail]] } else { &[&Class::ALL] };
        for classes in classes {
            self.subflows.clear();
            let of_class = self.flows.iter().filter(|flow| classes.contains(&flow.class));
            of_class.for_each(|flow| self.subflows.extend(&flow.subflows));
            if self.subflows.is_empty() {
                continue;
            }
            self.ports.share(&self.subflows, &mut self.rates);
            let mut rates = self.rates.iter();
            for flow in self.flows.iter_mut().filter(|flow| classes.contains(&flow.class)) {
                flow.rate = rates.by_ref().take(flow.subflows.len()).sum();
            }
        }
    }

    /// Time goes on to the end of the next message, and of those that end just after it.
    fn advance(&mut self) {
        let ends = |flow: &Flow| if flow.rate > 0.0 { flow.left / flow.rate } else { f64::INFINITY };
        let soonest = self.flows.iter().map(ends).fold(f64::INFINITY, f64::min);
        // A class leaves nothing only where it flows itself, so something always flows.
        let limit = soonest * (1.0 + 1e-9) + self.settings.quantum_s;
        let until = self.flows.iter().map(ends).filter(|&end| end <= limit).fold(soonest, f64::max);
        self.now += until;
        let mut at = 0;
        while let Some(flow) = self.flows.get_mut(at) {
            if ends(flow) <= limit {
                let stream = flow.stream;
                self.flows.swap_remove(at);
                self.streams[stream].flowing -= 1;
                if self.streams[stream].flowing == 0 {
                    self.arrive(stream);
                }
            } else {
                flow.left -= flow.rate * until;
                at += 1;
            }
        }
    }
}

/// The streams of all links, and the stream of each step.
fn streams(plans: &[RankPlan], element_bytes: usize) -> Result<(Vec<Stream>, Vec<u32>), SimulateError> {
    let mut numbers: BTreeMap<(usize, usize, Class), u32> = BTreeMap::new();
    let mut sends: Vec<Vec<(u32, usize)>> = Vec::new();
    let mut receives: Vec<Vec<u32>> = Vec::new();
    let mut stream_of = Vec::new();
    for (rank, plan) in plans.iter().enumerate() {
        for step in &plan.steps {
            let step_number = stream_of.len() as u32;
            let mut stream = |from: usize, to: usize| {
                *numbers.entry((from, to, step.class)).or_insert_with(|| {
                    sends.push(Vec::new());
                    receives.push(Vec::new());
                    sends.len() as u32 - 1
                })
            };
            match step.action {
                Action::Send { peer, src } => {
                    let stream = stream(rank, peer);
                    sends[stream as usize].push((step_number, src.len));
                    stream_of.push(stream);
                }
                Action::Recv { peer, .. } | Action::RecvReduce { peer, .. } => {
                    let stream = stream(peer, rank);
                    receives[stream as usize].push(step_number);
                    stream_of.push(stream);
                }
                Action::Copy { .. } => stream_of.push(NO_STREAM),
            }
        }
    }
    let mut streams = Vec::with_capacity(sends.len());
    let mut keys: Vec<((usize, usize, Class), u32)> = numbers.into_iter().collect();
    keys.sort_by_key(|(_, number)| *number);
    for ((from, to, class), number) in keys {
        let (sends, receives) = (&sends[number as usize], &receives[number as usize]);
        if sends.len() != receives.len() {
            return Err(SimulateError::Unmatched { from, to, sends: sends.len(), receives: receives.len() });
        }
        let messages = sends.iter().zip(receives).map(|(&(send, elements), &receive)| Message {
            send,
            receive,
            bytes: (elements * element_bytes) as f64,
        });
        let shares = plans[from].shares.get(&(to, class)).cloned().unwrap_or_default();
        streams.push(Stream { from, to, class, shares, messages: messages.collect(), next: 0, flowing: 0 });
    }
    Ok((streams, stream_of))
}

#[cfg(test)]
mod tests;
