//! What one seed means: hosts, NICs, links, sizes, speeds, thresholds, and the faults with their times.

use std::sync::Arc;

use r2cc::repair::{Mutant, Time, Tuning};

use super::draw::Draw;
use super::net::{NetPlan, Port};

/// One fault, or the end of one.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// A NIC silently stops, or resumes, sending and receiving.
    Nic { port: Port, tx: bool, rx: bool },
    /// Nothing passes, or passes again, from one NIC to another.
    Pair { from: Port, to: Port, passes: bool },
    /// The NIC's own host hears that it is down or up.
    Hint { port: Port, up: bool },
    /// Rate as a part of the NIC's own.
    Rate { port: Port, divisor: u64 },
    /// Packets lost, of a thousand.
    Loss { port: Port, permille: u64 },
    /// The current lane of a path is reset by something in between.
    Reset { link: usize, path: usize },
    /// The process does not run for this long.
    Pause { host: usize, time: Time },
    /// New connections are refused.
    Refuse { host: usize, on: bool },
    /// New connections are not answered at all.
    Deaf { host: usize, on: bool },
    /// Somebody has doubts about a path.
    Doubt { link: usize, path: usize },
}

/// Which faults a run may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Faults {
    /// Of every kind.
    #[default]
    Any,
    /// Processes that do not run for a while; the network is sound.
    SlowProcesses,
    /// None, and frames are written and read whole.
    None,
}

/// One link and the application at its ends.
#[derive(Clone, Debug)]
pub struct LinkPlan {
    pub from: usize,
    pub to: usize,
    pub paths: Vec<(Port, Port)>,
    pub sizes: Vec<usize>,
    pub reduces: bool,
    pub send_slots: usize,
    pub receive_slots: usize,
    pub exact_posts: bool,
    pub start: Time,
    pub receive_start: Time,
    pub post_gap: (u64, u64),
    pub consume: (u64, u64),
    pub tear_down: Option<[Time; 2]>,
    /// Frames are written and read whole.
    pub quiet: bool,
    pub whole_frame: usize,
    pub piece: u64,
    pub read_most: u64,
    pub read_gap: Time,
    pub late_answers: bool,
}

/// All of a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub hosts: usize,
    pub nics: usize,
    pub links: Vec<LinkPlan>,
    pub tuning: Arc<Tuning>,
    pub net: NetPlan,
    pub faults: Vec<(Time, Fault)>,
    /// When every fault has ended: the liveness phase starts.
    pub heal_at: Time,
    /// A host whose NICs never come back.
    pub doomed: Option<usize>,
    pub faults_drawn: Faults,
}

const MS: Time = Time::from_millis(1);

impl Scenario {
    pub fn new(seed: u64, faults_drawn: Faults, mutant: Option<Mutant>) -> Self {
        let quiet = faults_drawn == Faults::None;
        let mut draw = Draw::new(seed);
        let hosts = if draw.chance(25) { 3 } else { 2 };
        let nics = draw.pick(&[1, 2, 2, 3, 3, 4]);
        let tuning = Arc::new(tuning(&mut draw, mutant));
        let rates = (0..nics).map(|_| draw.range(800_000, 6_000_000)).collect();
        let delay = (0..nics).map(|_| draw.micros(20, 1500)).collect();
        let segment = draw.pick(&[128, 256, 512]);
        let room = (tuning.window_bytes.1 as usize + 16384) * draw.pick(&[1, 2]);
        // Now and then a receive buffer that a slow process lets fill up, so that the window closes.
        let tight = faults_drawn == Faults::Any && draw.chance(15);
        let net = NetPlan {
            delay,
            rates,
            segment,
            send_buffer: if quiet { room } else { draw.range(512, 16384) as usize },
            receive_buffer: if tight { draw.range(2048, 8192) as usize } else { room },
            wake: (10, draw.pick(&[20, 100, 500])),
        };
        let ends: Vec<(usize, usize)> = match hosts {
            3 => vec![(0, 1), (1, 2), (2, 0)],
            _ if draw.chance(30) => vec![(0, 1), (1, 0)],
            _ => vec![(0, 1)],
        };
        let span_ms = draw.pick(&[60, 200, 400, 800]);
        let shape = Shape { nics, quiet, span_ms };
        let links = ends.into_iter().map(|(from, to)| link(&mut draw, from, to, &shape, &tuning)).collect();
        let heal_at = draw.millis(1500, 3500);
        let faults = Vec::new();
        let mut scenario = Self { hosts, nics, links, tuning, net, faults, heal_at, doomed: None, faults_drawn };
        match faults_drawn {
            Faults::Any => scenario.draw_faults(&mut draw, span_ms),
            Faults::SlowProcesses => scenario.draw_pauses(&mut draw, span_ms),
            Faults::None => {}
        }
        scenario
    }

    fn draw_faults(&mut self, draw: &mut Draw, span_ms: u64) {
        let mut fault_at = Vec::new();
        for _ in 0..draw.range(1, 4) {
            let mut at = draw.millis(1, span_ms);
            self.episode(draw, at);
            fault_at.push(at);
            while draw.chance(45) {
                at += draw.micros(500, 150_000);
                self.episode(draw, at);
            }
        }
        if draw.chance(15) {
            let link = draw.index(self.links.len());
            let first = draw.pick(&fault_at) + draw.millis(1, 150);
            let second = first + draw.millis(0, 100);
            let swap = draw.chance(50);
            self.links[link].tear_down = Some(if swap { [second, first] } else { [first, second] });
        }
        if draw.chance(6) {
            let host = draw.index(self.hosts);
            self.doomed = Some(host);
            let at = draw.millis(1, span_ms);
            for nic in 0..self.nics {
                let skew = draw.millis(0, 60);
                self.faults.push((at + skew, Fault::Nic { port: Port { host, nic }, tx: false, rx: false }));
            }
        }
        let heal_at = self.heal_at;
        self.faults.iter_mut().for_each(|(at, _)| *at = (*at).min(heal_at - MS));
        self.faults.sort_by_key(|(at, _)| *at);
    }

    /// Whether some path of the link is touched by no fault. Not where speeds fall or connections are refused.
    pub fn has_sound_path(&self, link: usize) -> bool {
        let plan = &self.links[link];
        let touches = |path: usize, fault: &Fault| {
            let (from, to) = plan.paths[path];
            match *fault {
                Fault::Nic { port, .. } | Fault::Hint { port, .. } => port == from || port == to,
                Fault::Pair { from: a, to: b, .. } => (a, b) == (from, to) || (b, a) == (from, to),
                Fault::Reset { link: l, path: p } => (l, p) == (link, path),
                Fault::Rate { .. } | Fault::Loss { .. } | Fault::Refuse { .. } | Fault::Deaf { .. } => true,
                Fault::Pause { .. } | Fault::Doubt { .. } => false,
            }
        };
        let is_sound = |path: usize| self.faults.iter().all(|(_, fault)| !touches(path, fault));
        plan.tear_down.is_none() && (0..plan.paths.len()).any(is_sound)
    }

    fn draw_pauses(&mut self, draw: &mut Draw, span_ms: u64) {
        for _ in 0..draw.range(1, 8) {
            let (at, host) = (draw.millis(1, span_ms), draw.index(self.hosts));
            let (least, most) = draw.pick(&[(5, 80), (50, 600)]);
            self.faults.push((at, Fault::Pause { host, time: draw.millis(least, most) }));
        }
        self.faults.sort_by_key(|(at, _)| *at);
    }

    fn episode(&mut self, draw: &mut Draw, at: Time) {
        let host = draw.index(self.hosts);
        let port = Port { host, nic: draw.index(self.nics) };
        let (least, most) = draw.pick(&[(3, 60), (50, 400), (300, 2500)]);
        let until = at + draw.millis(least, most);
        let link = draw.index(self.links.len());
        let path = draw.index(self.links[link].paths.len());
        let (from, to) = self.links[link].paths[path];
        let mut add = |at: Time, fault: Fault| self.faults.push((at, fault));
        match draw.below(100) {
            0..=17 => {
                let (tx, rx) = draw.pick(&[(false, false), (false, false), (true, false), (false, true)]);
                add(at, Fault::Nic { port, tx, rx });
                add(until, Fault::Nic { port, tx: true, rx: true });
            }
            18..=29 => {
                // Link down, told to its own host soon, late, or not; so is its return.
                add(at, Fault::Nic { port, tx: false, rx: false });
                add(at + draw.millis(0, 20), Fault::Hint { port, up: false });
                add(until, Fault::Nic { port, tx: true, rx: true });
                let told = if draw.chance(30) { draw.millis(500, 30_000) } else { draw.millis(0, 30) };
                add(until + told, Fault::Hint { port, up: true });
            }
            30..=41 => {
                let both = draw.chance(40);
                let (from, to) = if draw.chance(50) { (from, to) } else { (to, from) };
                add(at, Fault::Pair { from, to, passes: false });
                add(until, Fault::Pair { from, to, passes: true });
                if both {
                    add(at, Fault::Pair { from: to, to: from, passes: false });
                    add(until, Fault::Pair { from: to, to: from, passes: true });
                }
            }
            42..=51 => {
                let (down, up) = (draw.millis(20, 400), draw.millis(50, 900));
                for i in 0..draw.range(2, 5) as u32 {
                    add(at + (down + up) * i, Fault::Nic { port, tx: false, rx: false });
                    add(at + (down + up) * i + down, Fault::Nic { port, tx: true, rx: true });
                }
            }
            52..=61 => {
                for i in 0..draw.range(1, 4) as u32 {
                    add(at + draw.millis(1, 40) * i, Fault::Reset { link, path });
                }
            }
            62..=67 => {
                add(at, Fault::Rate { port, divisor: draw.pick(&[4, 10, 30]) });
                add(until, Fault::Rate { port, divisor: 1 });
            }
            68..=74 => {
                add(at, Fault::Loss { port, permille: draw.pick(&[10, 10, 50, 200]) });
                add(until, Fault::Loss { port, permille: 0 });
            }
            75..=82 => {
                let (least, most) = draw.pick(&[(5, 80), (50, 600)]);
                add(at, Fault::Pause { host, time: draw.millis(least, most) });
            }
            83..=86 => {
                add(at, Fault::Refuse { host, on: true });
                add(until, Fault::Refuse { host, on: false });
            }
            87..=90 => {
                add(at, Fault::Deaf { host, on: true });
                add(until, Fault::Deaf { host, on: false });
            }
            91..=93 => add(at, Fault::Doubt { link, path }),
            94..=95 => add(at, Fault::Hint { port, up: draw.chance(30) }),
            _ => {
                // All NICs of a host, a little apart.
                for nic in 0..self.nics {
                    let port = Port { host, nic };
                    let (skew, other) = (draw.millis(0, 40), draw.millis(0, 40));
                    self.faults.push((at + skew, Fault::Nic { port, tx: false, rx: false }));
                    self.faults.push((until + other, Fault::Nic { port, tx: true, rx: true }));
                }
            }
        }
    }
}

fn tuning(draw: &mut Draw, mutant: Option<Mutant>) -> Tuning {
    let most = draw.pick(&[1024, 2048, 4096]);
    Tuning {
        tick: draw.millis(2, 8),
        window_bytes: (draw.pick(&[1024, 4096]), draw.pick(&[16 << 10, 48 << 10])),
        chunk_bytes: (draw.pick(&[128, 256, 512]), most),
        chunk_align: 64,
        early_messages: draw.pick(&[0, 0, 1, 4, 16]),
        early_bytes: draw.pick(&[64, 500, 3000]),
        hold_first: draw.pick(&[MS * 50, MS * 200, MS * 1000]),
        hold_max: draw.pick(&[MS * 400, MS * 2000, MS * 4000]),
        forgive: draw.pick(&[MS * 1000, MS * 60_000]),
        soon: draw.pick(&[MS * 500, MS * 60_000]),
        reopen_later: draw.pick(&[MS * 1000, MS * 3000]),
        link_deadline: draw.pick(&[MS * 2000, MS * 5000, MS * 30_000]),
        mutant,
        ..Tuning::default()
    }
}

/// What the links of a run have in common.
struct Shape {
    nics: usize,
    quiet: bool,
    span_ms: u64,
}

fn link(draw: &mut Draw, from: usize, to: usize, shape: &Shape, tuning: &Tuning) -> LinkPlan {
    let Shape { nics, quiet, span_ms } = *shape;
    let cross = draw.chance(30);
    let pair = |i: usize| {
        let (a, b) = (i % nics, (i + i / nics) % nics);
        (Port { host: from, nic: a }, Port { host: to, nic: b })
    };
    let paths = (0..if cross { 2 * nics } else { nics }).map(pair).collect();
    let largest = draw.pick(&[200, 3000, 12_000, 24_000]);
    let size = |draw: &mut Draw| match draw.below(10) {
        0 => 0,
        1 => draw.range(1, 64),
        2 => largest,
        _ => draw.range(1, largest),
    };
    let sizes: Vec<usize> = (0..draw.range(8, 32)).map(|_| size(draw) as usize).collect();
    let gap = 2000 * span_ms / sizes.len() as u64;
    let whole_frame = tuning.chunk_bytes.1 as usize + 64;
    LinkPlan {
        from,
        to,
        paths,
        sizes,
        reduces: draw.chance(50),
        send_slots: draw.pick(&[1, 2, 4]),
        receive_slots: draw.pick(&[1, 2, 3]),
        exact_posts: draw.chance(50),
        start: draw.millis(0, 20),
        receive_start: draw.millis(0, 20),
        post_gap: (0, draw.pick(&[0, gap / 4, gap, gap])),
        consume: (0, draw.pick(&[0, 3000, gap, gap * 2])),
        tear_down: None,
        quiet,
        whole_frame,
        piece: draw.pick(&[100, 1000, 8000]),
        read_most: draw.pick(&[200, 2000, 100_000]),
        read_gap: draw.micros(20, 3000),
        late_answers: !quiet && draw.chance(60),
    }
}
