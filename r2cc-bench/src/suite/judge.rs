//! What a well-formed suite may still get wrong: names, sizes, iterations and checks that
//! do not fit each other.
//!
//! Pure; collects every problem with the place of the key to blame. Whether a machine can
//! run the suite is not asked here.

mod rows;

use r2cc_inject::fault::{At, Fault, Kind, Offset, Op as FaultOp, Position, Target, Trigger, Until};

use super::effect;
use super::error::{Problem, nearest};
use super::model::{AfterRepair, Fabric, Mode, ScaleRow, Suite, Sync, WorkloadKind};
use super::rows::Row;
use super::tree::{Content, Node};
use super::values::IterationRange;

/// The interface for rendezvous, bootstrap and ssh; every node has it beside its NICs.
pub const MANAGEMENT_NIC: &str = "mgmt0";

/// Longest name that Linux takes for an interface.
const INTERFACE_NAME_MAX: usize = 15;

pub(super) fn problems(suite: &Suite, root: &Node, source: &str) -> Vec<Problem> {
    let whole = Judge { suite, place: Place::Suite, root, source, problems: Vec::new() };
    let mut problems = whole.rows();
    for (position, run) in suite.runs().iter().enumerate() {
        let place = if suite.rows.is_empty() { Place::Suite } else { Place::Row(position, &suite.rows[position]) };
        for problem in (Judge { suite: &run.suite, place, root, source, problems: Vec::new() }).run() {
            // What the suite itself gets wrong is wrong in each row.
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
    }
    problems
}

/// Where what is judged stands in the file.
#[derive(Clone, Copy)]
enum Place<'a> {
    Suite,
    Row(usize, &'a Row),
}

struct Judge<'a> {
    suite: &'a Suite,
    place: Place<'a>,
    root: &'a Node,
    source: &'a str,
    problems: Vec<Problem>,
}

impl Judge<'_> {
    fn run(mut self) -> Vec<Problem> {
        self.identity();
        self.cluster();
        self.scales();
        self.library();
        for (position, fault) in self.suite.faults.iter().enumerate() {
            self.fault(&position.to_string(), fault);
        }
        self.checks_that_need_a_fault();
        self.time_ratios();
        self.node_bytes();
        self.fault_view();
        self.survivors_share();
        self.sweep();
        self.problems
    }

    fn say(&mut self, steps: &[&str], what: impl Into<String>, hint: impl Into<String>) {
        let at = self.find(steps).at;
        self.problems.push(Problem::at(at, self.source, what).hint(hint));
    }

    /// What stands in the file at `steps`: in the row, where the row has its own.
    fn find(&self, steps: &[&str]) -> &Node {
        let own = |row: &Row| match steps.first() {
            Some(&"library") => row.library.is_some(),
            Some(&"faults") => row.faults.is_some(),
            Some(&"checks") => row.checks.is_some(),
            _ => false,
        };
        match self.place {
            Place::Row(position, row) if own(row) => {
                let position = position.to_string();
                self.root.find(&[&["rows", &position], steps].concat())
            }
            _ => self.root.find(steps),
        }
    }

    fn identity(&mut self) {
        if self.suite.version != 1 {
            let what = format!("version {} is not known", self.suite.version);
            self.say(&["version"], what, "this build reads version 1");
        }
        let name = &self.suite.name;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            let what = format!("`{name}` cannot name a results folder");
            self.say(&["name"], what, "use letters, digits, `-`, `_` and `.`");
        }
    }

    fn cluster(&mut self) {
        let nics = &self.suite.cluster.nics;
        if nics.is_empty() {
            self.say(&["cluster", "nics"], "a node needs at least one NIC", "for example [mlx5_0, mlx5_2, mlx5_3]");
        }
        for (position, nic) in nics.iter().enumerate() {
            let step = position.to_string();
            let at = ["cluster", "nics", step.as_str()];
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if nic.is_empty() || nic.len() > INTERFACE_NAME_MAX || !nic.chars().all(plain) {
                let what = format!("`{nic}` cannot name an interface");
                self.say(&at, what, format!("at most {INTERFACE_NAME_MAX} letters, digits, `-`, `_` and `.`"));
            } else if nic == "lo" {
                self.say(&at, "`lo` is the loopback interface of every node", "name only data NICs");
            } else if nic == MANAGEMENT_NIC {
                self.say(&at, format!("`{nic}` is the management interface of every node"), "name only data NICs");
            } else if nics[..position].contains(nic) {
                self.say(&at, format!("NIC `{nic}` is listed twice"), "each NIC of a node has its own name");
            }
        }
    }

    fn scales(&mut self) {
        let suite = self.suite;
        if ScaleRow::ALL.into_iter().all(|row| suite.scale(row).is_none()) {
            self.say(&["scale"], "no backend has a size", "for example host: {bytes: 64MiB, nic_rate: 200Mbit}");
        }
        let element = suite.workload.dtype.size_bytes();
        for row in ScaleRow::ALL {
            let Some(scale) = suite.scale(row) else {
                continue;
            };
            let rest = scale.bytes.0 % element;
            if rest != 0 {
                let what = format!("{} bytes are not a whole number of {}", scale.bytes.0, suite.workload.dtype.name());
                let hint = format!(
                    "an element has {element} bytes: use {} or {}",
                    scale.bytes.0 - rest,
                    scale.bytes.0 - rest + element
                );
                self.say(&["scale", row.name(), "bytes"], what, hint);
            } else if scale.bytes.0 / element < u64::from(suite.ranks(row)) {
                let what = format!("{} elements are fewer than {} ranks", scale.bytes.0 / element, suite.ranks(row));
                self.say(&["scale", row.name(), "bytes"], what, "each rank reduces at least one element");
            }
            if scale.ranks_per_node == Some(0) {
                self.say(
                    &["scale", row.name(), "ranks_per_node"],
                    "a node without ranks has nothing to do",
                    "at least 1",
                );
            }
        }
    }

    fn library(&mut self) {
        let library = &self.suite.library;
        let repairs = matches!(library.mode, Mode::Balance | Mode::R2ccAllreduce | Mode::Weighted);
        if library.after_repair.is_some() && !repairs {
            self.say(
                &["library", "after_repair"],
                "this mode never changes its schedule",
                "after_repair needs mode balance, r2cc-allreduce or weighted",
            );
        }
        let nics = &self.suite.cluster.nics;
        let places: Vec<String> = (self.suite.node_names().iter())
            .flat_map(|node| nics.iter().map(move |nic| format!("{node}/{nic}")))
            .collect();
        let failed = &self.suite.library.failed;
        for (position, place) in failed.iter().enumerate() {
            let step = position.to_string();
            if !places.contains(place) {
                let what = format!("there is no NIC `{place}`");
                self.say(&["library", "failed", &step], what, suggestion(place, &places));
            } else if failed[..position].contains(place) {
                self.say(&["library", "failed", &step], format!("`{place}` is listed twice"), "name each NIC once");
            } else if place.split('/').next() != failed[0].split('/').next() {
                let hint = "a job can be told of one node (`R2CC_FAILED_NODE`)";
                self.say(&["library", "failed", &step], format!("`{place}` is not of the node of the first"), hint);
            }
        }
        if !failed.is_empty() && failed.len() >= nics.len() {
            let what = format!("all {} NICs of the node would be lost", nics.len());
            self.say(&["library", "failed"], what, "leave the node at least one");
        }
    }

    fn fault(&mut self, position: &str, fault: &Fault) {
        let at = ["faults", position];
        self.target(&at, &fault.target);
        if let (Kind::Rate { bits_per_second }, Some(full)) = (&fault.kind, effect::nic_rate(self.suite))
            && *bits_per_second >= full
        {
            let what = format!("rate {bits_per_second} bit/s does not slow a NIC of {full} bit/s");
            self.say(&at, what, "give a rate below scale.nic_rate");
        }
        let begin = match &fault.from {
            Trigger::Position(begin) => begin,
            Trigger::Now | Trigger::After(_) => {
                if let Until::Call { op, n } = &fault.until {
                    self.iteration(&at, *op, *n, "ends");
                }
                return;
            }
        };
        if begin.op == FaultOp::SwitchFreeze {
            self.in_a_freeze(&at, fault, begin);
            return;
        }
        self.iteration(&at, begin.op, begin.n, "begins");
        if begin.at == At::Call && self.suite.workload.sync != Sync::Each {
            let hint = "set workload.sync: each, or place the fault `at wire`";
            self.say(&at, "a fault placed by call is exact only when ranks wait for each other", hint);
        }
        match begin.offset {
            Offset::MilliPercent(share) | Offset::Between { most: share, .. } if share >= 100_000 => {
                self.say(
                    &at,
                    "at 100 % and more of its bytes the collective is over",
                    "place the fault before its end",
                );
            }
            Offset::Bytes(bytes) => {
                let most = effect::port_bytes(self.suite);
                if let Some(most) = most.filter(|most| bytes >= *most) {
                    let what = format!("the port receives about {most} bytes a collective, fewer than {bytes}");
                    self.say(&at, what, "place the fault before the collective's end");
                }
            }
            Offset::Start | Offset::MilliPercent(_) | Offset::Between { .. } => {}
        }
        if let Until::Call { op, n } = &fault.until {
            self.iteration(&at, *op, *n, "ends");
            if *n <= begin.n {
                let what = format!("the fault ends at call {n} and begins at call {}", begin.n);
                self.say(&at, what, "`until OP#N` names a later call");
            }
        }
    }

    /// A fault placed in a freeze: a freeze needs a fault before it, and begins at once or not at all.
    fn in_a_freeze(&mut self, at: &[&str], fault: &Fault, begin: &Position) {
        if !self.suite.faults.iter().any(|other| !effect::in_a_freeze(other)) {
            let hint = "add the fault that makes the ranks go over to another schedule";
            self.say(at, "nothing makes the ranks freeze before this fault", hint);
        }
        let keeps = matches!(self.suite.library.mode, Mode::None | Mode::Off | Mode::HotRepair | Mode::Balance);
        if keeps && matches!(self.suite.library.after_repair, None | Some(AfterRepair::Balance)) {
            let hint = "set library.mode or library.after_repair to r2cc-allreduce or weighted";
            self.say(at, "the library keeps its schedule, so its ranks never freeze", hint);
        }
        if begin.offset != Offset::Start || begin.at != At::Call {
            self.say(at, "a freeze is over before any byte could be counted", "for example `from switch-freeze#1`");
        }
        if let Until::Call { op, n } = &fault.until {
            self.iteration(at, *op, *n, "ends");
        }
    }

    fn target(&mut self, at: &[&str], target: &Target) {
        for (what, hint) in misplaced(self.suite, target) {
            self.say(at, what, hint);
        }
    }

    fn iteration(&mut self, at: &[&str], op: FaultOp, n: u64, verb: &str) {
        let workload = &self.suite.workload;
        let called = match workload.kind {
            WorkloadKind::AllreduceLoop | WorkloadKind::Perf | WorkloadKind::Ddp => FaultOp::AllReduce,
            WorkloadKind::CudaGraph => FaultOp::GraphLaunch,
        };
        if op != called {
            let what = format!("the workload never calls {op}");
            self.say(at, what, format!("it calls {called}"));
        } else if n == 0 || n > u64::from(workload.iterations) {
            let what =
                format!("the fault {verb} at call {n}, and the workload has iterations 1 to {}", workload.iterations);
            self.say(at, what, "calls are counted from the first measured iteration");
        }
    }

    fn checks_that_need_a_fault(&mut self) {
        let checks = &self.suite.checks;
        let asked = [
            ("cut_iteration", checks.cut_iteration.is_some()),
            ("survivors_share", checks.survivors_share.is_some()),
            ("hit_over_ideal_ms", checks.hit_over_ideal_ms.is_some()),
            ("detection_ms", checks.detection_ms.is_some()),
        ];
        for (key, _) in asked.into_iter().filter(|(_, asked)| *asked && self.suite.faults.is_empty()) {
            self.say(
                &["checks", key],
                format!("`{key}` needs a fault, and the suite has none"),
                "add one to `faults`, or drop the check",
            );
        }
        let named: Vec<u64> = self.suite.faults.iter().filter_map(effect::begin_call).collect();
        if let Some(asked) = checks.cut_iteration.filter(|_| !self.suite.faults.is_empty()) {
            if asked == 0 || asked > self.suite.workload.iterations {
                let what = format!("there is no iteration {asked}");
                self.say(
                    &["checks", "cut_iteration"],
                    what,
                    format!("iterations are 1 to {}", self.suite.workload.iterations),
                );
            } else if let Some(other) = named.iter().find(|n| **n != u64::from(asked)) {
                let what = format!("a fault is placed in iteration {other}, not in {asked}");
                self.say(
                    &["checks", "cut_iteration"],
                    what,
                    "leave the key out to expect each fault where it is placed",
                );
            }
        }
        if checks.baseline_over_t0 < 1.0 {
            self.say(&["checks", "baseline_over_t0"], "no ring is faster than T0", "at least 1.0; the default is 1.06");
        }
    }

    fn range(&mut self, steps: &[&str], range: IterationRange) {
        let last = self.suite.workload.iterations;
        if range.last > last {
            self.say(
                steps,
                format!("iterations {range} reach beyond the workload's {last}"),
                format!("at most {last}"),
            );
        }
    }

    fn time_ratios(&mut self) {
        let is_list = matches!(self.find(&["checks", "time_ratio"]).content, Content::List(_));
        for (position, rule) in self.suite.checks.time_ratio.0.iter().enumerate() {
            let step = position.to_string();
            let mut at = vec!["checks", "time_ratio"];
            if is_list {
                at.push(&step);
            }
            let fits = matches!((rule.value, rule.within, rule.at_most), (Some(_), Some(_), None) | (None, _, Some(_)));
            if !fits {
                let what = "a time ratio has either `value` and `within`, or `at_most`";
                self.say(&at, what, "for example {iterations: 4-10, value: 1.5, within: 2%}");
            }
            if rule.value.or(rule.at_most).is_some_and(|ratio| ratio <= 0.0) {
                self.say(&at, "a time ratio is above zero", "1.0 is the speed of the baseline");
            }
            at.push("iterations");
            self.range(&at, rule.iterations);
        }
    }

    fn node_bytes(&mut self) {
        let nodes = self.suite.node_names();
        for (position, rule) in self.suite.checks.node_bytes.iter().enumerate() {
            let step = position.to_string();
            self.range(&["checks", "node_bytes", &step, "iterations"], rule.iterations);
            if !nodes.contains(&rule.node) {
                let hint = suggestion(&rule.node, &nodes);
                self.say(&["checks", "node_bytes", &step, "node"], format!("there is no node `{}`", rule.node), hint);
            }
        }
    }

    fn fault_view(&mut self) {
        let cluster = &self.suite.cluster;
        let mut places: Vec<String> = (0..cluster.nics.len()).map(Suite::rail_name).collect();
        for node in self.suite.node_names() {
            places.extend(cluster.nics.iter().map(|nic| format!("{node}/{nic}")));
        }
        for (position, place) in self.suite.checks.fault_view.iter().flatten().enumerate() {
            if !places.contains(place) {
                let known: Vec<&str> = places.iter().map(String::as_str).collect();
                let hint = match nearest(place, &known) {
                    Some(close) => format!("did you mean `{close}`?"),
                    None => "a place is NODE/NIC or a rail, as in `node-1/mlx5_2` or `rail-2`".to_string(),
                };
                let what = format!("there is no `{place}` to name");
                self.say(&["checks", "fault_view", &position.to_string()], what, hint);
            }
        }
    }

    fn sweep(&mut self) {
        let suite = self.suite;
        let is_perf = suite.workload.kind == WorkloadKind::Perf;
        let Some(sweep) = suite.workload.sweep.as_ref().filter(|_| is_perf) else {
            if is_perf {
                let hint = "for example sweep: {collectives: [all-reduce], from: 8, factor: 8}";
                self.say(&["workload"], "kind perf without a `sweep`", hint);
            } else if suite.workload.sweep.is_some() {
                self.say(&["workload", "sweep"], "only kind perf sweeps sizes", "set workload.kind: perf");
            }
            for (key, asked) in [
                ("sweep_ratio", !suite.checks.sweep_ratio.is_empty()),
                ("sweep_goodput", suite.checks.sweep_goodput.is_some()),
            ] {
                if asked && !is_perf {
                    self.say(&["checks", key], "only kind perf sweeps sizes", "set workload.kind: perf");
                }
            }
            return;
        };
        if sweep.collectives.is_empty() {
            self.say(&["workload", "sweep", "collectives"], "nothing to measure", "for example [all-reduce]");
        }
        for row in ScaleRow::ALL {
            if suite.scale(row).is_some_and(|scale| scale.bytes < sweep.from) {
                let what = format!("sizes from {} to {}", sweep.from, suite.scale(row).map_or(0, |s| s.bytes.0));
                self.say(&["workload", "sweep", "from"], what, format!("at most scale.{}.bytes", row.name()));
            }
        }
        for (position, fault) in suite.faults.iter().enumerate() {
            let placed = matches!(fault.from, Trigger::Position(_)) || !matches!(fault.until, Until::Run);
            if placed {
                let what = "the faults of a sweep begin by time and last for the run";
                self.say(&["faults", &position.to_string()], what, "for example `from after 200ms for run`");
            }
        }
        let checks = &suite.checks;
        for (key, asked) in [
            ("cut_iteration", checks.cut_iteration.is_some()),
            ("survivors_share", checks.survivors_share.is_some()),
            ("time_ratio", !checks.time_ratio.is_empty()),
            ("hit_over_ideal_ms", checks.hit_over_ideal_ms.is_some()),
            ("node_bytes", !checks.node_bytes.is_empty()),
        ] {
            if asked {
                let what = format!("`{key}` looks at iterations, and a sweep has sizes");
                self.say(&["checks", key], what, "sweep_ratio compares times by size");
            }
        }
        for (position, rule) in checks.sweep_ratio.iter().enumerate() {
            let step = position.to_string();
            let at = ["checks", "sweep_ratio", step.as_str()];
            if suite.faults.is_empty() {
                self.say(&at, "there are no times under faults", "add one to `faults`, or drop the check");
            }
            let fits =
                matches!((rule.value, rule.within, rule.at_most), (Some(_), Some(_), None) | (None, None, Some(_)));
            if !fits {
                let what = "a ratio has either `value` and `within`, or `at_most`";
                self.say(&at, what, "for example {from: 16MiB, value: 1.5, within: 3%}");
            }
        }
    }

    fn survivors_share(&mut self) {
        let Some(share) = self.suite.checks.survivors_share else {
            return;
        };
        for node in self.suite.node_names() {
            let nics = self.suite.cluster.nics.len();
            let left = nics - effect::dead_nics(self.suite, &node).len();
            if left == nics || left == 0 {
                continue;
            }
            let equal = 1.0 / left as f64;
            if (equal / share.value - 1.0).abs() > share.within.0 {
                let what =
                    format!("{left} of {nics} NICs survive on {node}, so each carries {equal:.3}, not {}", share.value);
                self.say(&["checks", "survivors_share"], what, format!("value: {equal:.3}"));
                return;
            }
        }
    }
}

/// What is wrong with the place of a fault, each with a hint; empty when the suite's cluster has that port or rail.
pub(crate) fn misplaced(suite: &Suite, target: &Target) -> Vec<(String, String)> {
    let cluster = &suite.cluster;
    let mut found = Vec::new();
    if target.is_rail() {
        let rails: Vec<String> = (0..cluster.nics.len()).map(Suite::rail_name).collect();
        if cluster.fabric == Fabric::Any {
            let what = "a fabric where every NIC reaches every other has no rails to cut";
            found.push((what.to_string(), "set cluster.fabric: rails, or name a NIC of a node".to_string()));
        } else if !rails.contains(&target.nic) {
            let what = format!("the switch has no rail `{}`", target.nic);
            found.push((what, suggestion(&target.nic, &rails)));
        }
        return found;
    }
    let nodes = suite.node_names();
    if !nodes.contains(&target.node) {
        let mut known = nodes;
        known.push(Target::SWITCH.to_string());
        found.push((format!("there is no node `{}`", target.node), suggestion(&target.node, &known)));
    }
    let mut nics = cluster.nics.clone();
    nics.push(MANAGEMENT_NIC.to_string());
    if !nics.contains(&target.nic) {
        found.push((format!("nodes have no NIC `{}`", target.nic), suggestion(&target.nic, &nics)));
    }
    found
}

fn suggestion(text: &str, known: &[String]) -> String {
    let words: Vec<&str> = known.iter().map(String::as_str).collect();
    match nearest(text, &words) {
        Some(close) => format!("did you mean `{close}`? known: {}", known.join(", ")),
        None => format!("known: {}", known.join(", ")),
    }
}
