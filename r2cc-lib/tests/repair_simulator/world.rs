//! Runs one scenario: safety phase while faults come and go, then a network without faults in which
//! everything must complete and every path return within a bound.

use r2cc::repair::{Mutant, PathId, Time};

use super::check::{Coverage, Judge};
use super::draw::Draw;
use super::net::{Event, Net, Port};
use super::receiving::ReceiveEnd;
use super::scenario::{Fault, Faults, LinkPlan, Scenario};
use super::sending::SendEnd;
use super::trace::Trace;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub failure: Option<String>,
    pub digest: [u8; 32],
    pub coverage: Coverage,
    pub events: u64,
    pub ended_at: Time,
}

struct Link {
    plan: LinkPlan,
    sender: Option<SendEnd>,
    receiver: Option<ReceiveEnd>,
    judge: Judge,
    over: bool,
}

struct World {
    net: Net,
    links: Vec<Link>,
    scenario: Scenario,
    paused: Vec<Time>,
}

/// How a seed is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mode {
    pub faults: Faults,
    /// Judge only what the application can see: contents, and that everything completes.
    pub application_only: bool,
    pub mutant: Option<Mutant>,
    pub prints: bool,
}

/// Runs a seed.
pub fn run(seed: u64, mode: Mode) -> Outcome {
    let scenario = Scenario::new(seed, mode.faults, mode.mutant);
    let trace = Trace::new(mode.prints);
    let net = Net::new(scenario.net.clone(), scenario.hosts, Draw::new(!seed), trace);
    let links = scenario.links.iter().enumerate().map(|(i, plan)| Link {
        sender: Some(SendEnd::new(i, plan, scenario.tuning.clone(), Time::ZERO)),
        receiver: Some(ReceiveEnd::new(i, plan, scenario.tuning.clone())),
        judge: Judge::new(
            format!("link {i}"),
            &plan.sizes,
            plan.paths.len(),
            mode.application_only,
            scenario.has_sound_path(i),
        ),
        plan: plan.clone(),
        over: false,
    });
    let mut world = World { links: links.collect(), paused: vec![Time::ZERO; scenario.hosts], net, scenario };
    world.start();
    world.drive();
    world.outcome()
}

impl World {
    fn start(&mut self) {
        for host in 0..self.scenario.hosts {
            self.net.wake(host, Time::from_micros(host as u64));
            let at = self.net.draw.micros(0, 5000);
            self.net.push(at, Event::Tick { host });
        }
        for (i, (at, _)) in self.scenario.faults.iter().enumerate() {
            self.net.push(*at, Event::Fault(i));
        }
        for (link, at) in self.links.iter().enumerate().filter_map(|(i, l)| l.plan.tear_down.map(|at| (i, at))) {
            self.net.push(at[0], Event::TearDown { link, side: 0 });
            self.net.push(at[1], Event::TearDown { link, side: 1 });
        }
    }

    fn drive(&mut self) {
        let tuning = self.scenario.tuning.clone();
        let patience = tuning.hold_max + tuning.reopen_later + Time::from_secs(8);
        let mut healed = false;
        let mut settled_at: Option<Time> = None;
        while self.net.trace.failure.is_none() {
            let Some(event) = self.net.pop() else { break };
            if !healed && self.net.now >= self.scenario.heal_at {
                healed = true;
                self.heal();
            }
            self.handle(event);
            if !healed {
                continue;
            }
            let now = self.net.now;
            if self.links.iter().all(|l| self.is_settled(l)) {
                if now >= *settled_at.get_or_insert(now) + Time::from_secs(1) {
                    self.check_lanes();
                    break;
                }
            } else {
                settled_at = None;
            }
            let isolated = if self.scenario.doomed.is_some() { tuning.link_deadline } else { Time::ZERO };
            if now > self.scenario.heal_at + patience + isolated {
                self.complain();
            }
        }
    }

    fn is_doomed(&self, link: &Link) -> bool {
        self.scenario.doomed.is_some_and(|h| h == link.plan.from || h == link.plan.to)
    }

    /// Over, or everything delivered and every path back.
    fn is_settled(&self, link: &Link) -> bool {
        link.over || (link.judge.all_done() && (link.judge.all_live() || self.is_doomed(link)))
    }

    fn complain(&mut self) {
        let stuck: Vec<_> = self.links.iter().enumerate().filter(|(_, l)| !self.is_settled(l)).collect();
        let told: Vec<String> = stuck.iter().map(|(i, l)| format!("link {i}: {}", l.judge.progress())).collect();
        self.net.trace.fail(self.net.now, format_args!("no end in a healed network; {}", told.join("; ")));
    }

    /// Once all is quiet the two ends agree on the lanes.
    fn check_lanes(&mut self) {
        for (i, link) in self.links.iter().enumerate() {
            let (Some(sender), Some(receiver)) = (&link.sender, &link.receiver) else { continue };
            if self.is_doomed(link) || link.judge.application_only {
                continue;
            }
            let known: Vec<_> = sender.lanes().collect();
            for lane in receiver.lanes().filter(|l| !known.contains(l)) {
                self.net
                    .trace
                    .fail(self.net.now, format_args!("link {i}: receiver keeps {lane:?}, sender has {known:?}"));
            }
            if receiver.machine.lanes().ne(receiver.lanes()) {
                self.net.trace.fail(self.net.now, format_args!("link {i}: machine and driver disagree on the lanes"));
            }
            if self.scenario.faults_drawn != Faults::Any && link.judge.saw_repair() {
                self.net.trace.fail(self.net.now, format_args!("link {i}: repair without a fault"));
            }
        }
    }

    fn heal(&mut self) {
        self.net.trace.note(self.net.now, format_args!("all faults healed"));
        self.net.cut.clear();
        for host in 0..self.scenario.hosts {
            (self.net.hosts[host].refuses, self.net.hosts[host].deaf) = (false, false);
            let isolated = self.scenario.doomed == Some(host);
            for nic in 0..self.scenario.nics {
                let rate = self.scenario.net.rates[nic];
                let n = &mut self.net.nics[host][nic];
                (n.tx, n.rx, n.rate, n.loss_permille) = (!isolated, !isolated, rate, 0);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake { host } => {
                if self.net.is_awake(host) {
                    self.run_host(host);
                }
            }
            Event::Tick { host } => self.tick(host),
            Event::Fault(i) => self.fault(self.scenario.faults[i].1),
            Event::Hint { port, up } => self.hint(port, up),
            Event::TearDown { link, side } => self.tear_down(link, side),
            other => self.net.handle(other),
        }
        while let Some((host, conn)) = self.net.accepted.pop() {
            let link = self.net.conns[conn].link;
            match &mut self.links[link].receiver {
                Some(end) => end.accept(conn),
                None => self.net.close(conn, 1, true),
            }
            self.net.wake(host, self.net.now);
        }
    }

    fn run_host(&mut self, host: usize) {
        for link in &mut self.links {
            if let Some(end) = link.sender.as_mut().filter(|_| link.plan.from == host) {
                end.run(&mut self.net, &mut link.judge, &link.plan);
            }
            if let Some(end) = link.receiver.as_mut().filter(|_| link.plan.to == host) {
                end.run(&mut self.net, &mut link.judge, &link.plan);
            }
        }
        self.bury();
    }

    fn tick(&mut self, host: usize) {
        let paused_until = self.net.hosts[host].paused_until;
        if paused_until > self.net.now {
            self.net.push(paused_until, Event::Tick { host });
            return;
        }
        let late = self.paused.iter().sum();
        for link in &mut self.links {
            if let Some(end) = link.sender.as_mut().filter(|_| link.plan.from == host) {
                end.tick(&mut self.net, &mut link.judge, &link.plan, late);
            }
            if let Some(end) = link.receiver.as_mut().filter(|_| link.plan.to == host) {
                end.tick(&mut self.net, &mut link.judge, &link.plan);
            }
        }
        self.bury();
        let tick = self.scenario.tuning.tick;
        let jitter = self.net.draw.micros(0, 400);
        self.net.push(self.net.now + tick + jitter, Event::Tick { host });
    }

    /// A link told dead ends with a typed error at both ends.
    fn bury(&mut self) {
        for i in 0..self.links.len() {
            if !self.links[i].over && self.links[i].sender.as_ref().is_some_and(|s| s.dead) {
                self.links[i].over = true;
                let other = self.net.now + self.net.draw.millis(0, 50);
                self.net.push(self.net.now, Event::TearDown { link: i, side: 0 });
                self.net.push(other, Event::TearDown { link: i, side: 1 });
            }
        }
    }

    fn tear_down(&mut self, link: usize, side: usize) {
        let link = &mut self.links[link];
        self.net.trace.note(self.net.now, format_args!("tear down side {side}"));
        link.over = true;
        if side == 0 {
            if let Some(mut end) = link.sender.take() {
                link.judge.coverage.teardown_during_repair |=
                    !end.dead && end.machine.is_busy() && link.judge.is_repairing();
                end.tear_down(&mut self.net);
            }
        } else if let Some(mut end) = link.receiver.take() {
            end.tear_down(&mut self.net);
        }
    }

    fn hint(&mut self, port: Port, up: bool) {
        for link in &mut self.links {
            for (path, (from, to)) in link.plan.paths.iter().enumerate() {
                let path = PathId(path as u16);
                if let Some(end) = link.sender.as_mut().filter(|_| *from == port) {
                    end.handle_hint(&mut self.net, &mut link.judge, path, up);
                }
                if let Some(end) = link.receiver.as_mut().filter(|_| *to == port && !up) {
                    end.handle_path_down(path);
                }
            }
        }
        self.net.wake(port.host, self.net.now);
    }

    fn fault(&mut self, fault: Fault) {
        let now = self.net.now;
        self.net.trace.note(now, format_args!("{fault:?}"));
        match fault {
            Fault::Nic { port, tx, rx } => {
                if self.scenario.doomed != Some(port.host) || !tx {
                    let nic = &mut self.net.nics[port.host][port.nic];
                    (nic.tx, nic.rx) = (tx, rx);
                }
            }
            Fault::Pair { from, to, passes } => {
                if passes {
                    self.net.cut.remove(&(from, to));
                } else {
                    self.net.cut.insert((from, to));
                }
            }
            Fault::Hint { port, up } => {
                let at = now.max(self.net.hosts[port.host].paused_until);
                self.net.push(at, Event::Hint { port, up });
            }
            Fault::Rate { port, divisor } => {
                self.net.nics[port.host][port.nic].rate = self.scenario.net.rates[port.nic] / divisor;
            }
            Fault::Loss { port, permille } => self.net.nics[port.host][port.nic].loss_permille = permille,
            Fault::Reset { link, path } => {
                let lane = self.links[link].sender.as_ref().and_then(|s| s.machine.current_lane(PathId(path as u16)));
                let conn = self.net.conns.iter().rposition(|c| c.link == link && Some(c.lane) == lane);
                if let Some(conn) = conn {
                    self.net.break_up(conn);
                }
            }
            Fault::Pause { host, time } => {
                self.net.hosts[host].paused_until = self.net.hosts[host].paused_until.max(now + time);
                self.paused[host] += time;
            }
            Fault::Refuse { host, on } => self.net.hosts[host].refuses = on,
            Fault::Deaf { host, on } => self.net.hosts[host].deaf = on,
            Fault::Doubt { link, path } => {
                if let Some(end) = &mut self.links[link].sender {
                    end.machine.handle_doubt(PathId(path as u16));
                }
            }
        }
    }

    fn outcome(self) -> Outcome {
        let mut coverage = Coverage::default();
        self.links.iter().for_each(|l| coverage.merge(l.judge.coverage));
        Outcome {
            digest: self.net.trace.digest(),
            coverage,
            events: self.net.events(),
            ended_at: self.net.now,
            failure: self.net.trace.failure,
        }
    }
}
