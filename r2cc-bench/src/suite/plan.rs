//! `plan`: what a run of a suite would do, in words, without doing any of it.
//!
//! Needs no rights and looks at no machine. The expected times come from `effect`.

use std::collections::BTreeSet;
use std::time::Duration;

use r2cc_inject::fault::{At, Fault, Kind, Offset, Op, Trigger, Until};

use super::effect;
use super::expect::Statistic;
use super::model::{AfterRepair, ClusterKind, Fabric, Mode, ScaleRow, Schedule, Suite, Timing};
use super::rows::Run;
use super::values::Bytes;

/// Setting up and tearing down an emulated cluster, the goodput measurement included.
const SETUP_SECONDS: f64 = 6.0;

/// Wire bytes per payload byte of TCP with an MTU of 1500, acknowledgements aside.
const HEADER_OVERHEAD: f64 = 1.045;

/// The expanded case of `suite` under `row`: machines, faults, what they should do to the
/// times, what is checked, which rights and how long it takes, and how it heals.
pub fn plan(suite: &Suite, row: ScaleRow) -> String {
    let of_run = |run: &Run| match (&run.row, &run.against) {
        (None, _) => plan_run(&run.suite, row),
        (Some(name), None) => format!("row {name}\n{}", plan_run(&run.suite, row)),
        (Some(name), Some(against)) => {
            format!("row {name}, compared with the healthy iterations of row {against}\n{}", plan_run(&run.suite, row))
        }
    };
    suite.runs().iter().map(of_run).collect::<Vec<_>>().join("\n")
}

fn plan_run(suite: &Suite, row: ScaleRow) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        text.push_str(&words);
        text.push('\n');
    };
    line(format!("{}: {}", suite.name, suite.purpose));
    line(String::new());
    for words in machines(suite, row).into_iter().chain(job(suite, row)) {
        line(words);
    }
    line("faults".to_string());
    for (number, fault) in suite.faults.iter().enumerate() {
        line(format!("  {}. {fault}", number + 1));
        for words in fault_words(suite, row, fault) {
            line(format!("     {words}"));
        }
    }
    if suite.faults.is_empty() {
        line("  none".to_string());
    }
    for words in expected(suite, row).into_iter().chain(checked(suite)) {
        line(words);
    }
    line("rights".to_string());
    line(format!("  {}", rights(suite)));
    line("time".to_string());
    line(format!("  {}", duration(suite, row)));
    text
}

fn machines(suite: &Suite, row: ScaleRow) -> Vec<String> {
    let cluster = &suite.cluster;
    let ranks_per_node = suite.ranks_per_node(row);
    let wiring = match cluster.fabric {
        Fabric::Rails => "each NIC reaches the NICs of its own rail",
        Fabric::Any => "every NIC reaches every other",
    };
    let mut lines = vec![format!(
        "cluster   {}, {} nodes x {ranks_per_node} ranks x {} NICs; {wiring}",
        cluster.kind.name(),
        cluster.nodes,
        cluster.nics.len()
    )];
    let nics: Vec<String> =
        cluster.nics.iter().enumerate().map(|(rail, nic)| format!("{nic} ({})", Suite::rail_name(rail))).collect();
    for (position, node) in suite.node_names().iter().enumerate() {
        let first = position as u32 * ranks_per_node;
        let ranks: Vec<String> = (first..first + ranks_per_node).map(|rank| rank.to_string()).collect();
        lines.push(format!("  {node}  ranks {}; {}, mgmt0", ranks.join(" "), nics.join(", ")));
    }
    let rate = match suite.scale(row).and_then(|scale| scale.nic_rate) {
        Some(rate) => format!("each NIC shaped to {rate}/s both ways; mgmt0 is not shaped and carries no payload"),
        None => "NICs run as they are".to_string(),
    };
    lines.push(format!("  {rate}"));
    lines
}

fn job(suite: &Suite, row: ScaleRow) -> Vec<String> {
    let workload = &suite.workload;
    let Some(scale) = suite.scale(row) else {
        return vec![format!("workload  scale.{} is not in the suite: it cannot run on this backend", row.name())];
    };
    let place = if workload.in_place { "in place" } else { "out of place" };
    let told = match suite.library.failed.as_slice() {
        [] => String::new(),
        failed => format!(", {} taken for failed from the start", failed.join(", ")),
    };
    let library = format!("library   mode {}, schedule {}{told}", mode_name(suite.library.mode), schedule_name(suite));
    if let Some(sweep) = &workload.sweep {
        let names: Vec<&str> = sweep.collectives.iter().map(|collective| collective.name()).collect();
        let mut kinds = vec![format!("{} ({})", workload.dtype.name(), workload.op.name())];
        kinds.extend(sweep.also.iter().map(|also| format!("{} ({})", also.dtype.name(), also.op.name())));
        let under = if suite.faults.is_empty() {
            String::new()
        } else {
            format!(", then {} x under the faults", workload.iterations)
        };
        let counts = format!("each {} x healthy{under}", workload.baseline);
        return vec![
            format!(
                "workload  {} of {} on {} ranks, out of place and in place, {} to {} by a factor of {}; {counts}",
                names.join(", "),
                kinds.join(", "),
                suite.ranks(row),
                sweep.from,
                scale.bytes,
                sweep.factor
            ),
            library,
        ];
    }
    vec![
        format!(
            "workload  {} x AllReduce of {} {} ({}) on {} ranks, {place}, after {} healthy ones",
            workload.iterations,
            scale.bytes,
            workload.dtype.name(),
            workload.op.name(),
            suite.ranks(row),
            workload.baseline
        ),
        library,
    ]
}

fn fault_words(suite: &Suite, row: ScaleRow, fault: &Fault) -> Vec<String> {
    let target = &fault.target;
    let port = if target.is_rail() {
        format!("every port of {} on the switch", target.nic)
    } else {
        format!("port {} of {}", target.nic, target.node)
    };
    let what = match &fault.kind {
        Kind::Drop => "drops every packet",
        Kind::Loss { .. } => "drops a seeded part of the packets",
        Kind::Flap { .. } => "is dead and alive in turn",
        Kind::Rate { .. } => "is shaped down",
        Kind::LinkDown => "is set down",
    };
    let owner = match suite.cluster.kind {
        ClusterKind::Emulated => "; made by this run, and nothing of the host is touched",
        ClusterKind::Ssh => "; on the host of the inventory, which must allow it",
        ClusterKind::SoftRoce => "; inside the virtual machine",
    };
    let begins = match &fault.from {
        Trigger::Now => "when it is armed".to_string(),
        Trigger::After(delay) => format!("{} after it is armed", seconds(delay.as_secs_f64())),
        Trigger::Position(at) => {
            let tie = match at.at {
                At::Call => "counted from the call",
                At::Wire => "counted on the wire since arming",
            };
            let per_port = effect::node_bytes(suite, row).map(|bytes| bytes / suite.cluster.nics.len().max(1) as f64);
            match (at.offset, per_port) {
                (Offset::Start, _) if at.op == Op::SwitchFreeze => {
                    format!("when its first rank freezes, for the {}. time", at.n)
                }
                (Offset::Start, _) => format!("at {} call {}", at.op, at.n),
                (Offset::Between { least, most }, _) => format!(
                    "in {} call {}, after a share of the bytes it receives that the seed chooses, {} % to {} %, {tie}",
                    at.op,
                    at.n,
                    f64::from(least) / 1000.0,
                    f64::from(most) / 1000.0
                ),
                (Offset::Bytes(bytes), _) => format!("in {} call {}, {bytes} received bytes in, {tie}", at.op, at.n),
                (Offset::MilliPercent(share), Some(bytes)) => format!(
                    "in {} call {}, after about {:.1} MiB of the {:.1} MiB it receives, {tie}",
                    at.op,
                    at.n,
                    bytes * f64::from(share) / 100_000.0 / MIB,
                    bytes / MIB
                ),
                (Offset::MilliPercent(share), None) => {
                    format!("in {} call {}, {} % in, {tie}", at.op, at.n, f64::from(share) / 1000.0)
                }
            }
        }
    };
    let heals = match &fault.until {
        Until::Run => "at the end of the run".to_string(),
        Until::For(span) => format!("after {}", seconds(span.as_secs_f64())),
        Until::Call { op, n } => format!("at {op} call {n}"),
    };
    vec![
        format!("{port} {what}{owner}"),
        format!("begins {begins}"),
        format!("heals {heals}, and by itself when its lease is not renewed, also when the bench is killed"),
    ]
}

const MIB: f64 = 1024.0 * 1024.0;

fn expected(suite: &Suite, row: ScaleRow) -> Vec<String> {
    let mut lines = vec!["expected (times relative to the healthy flat ring)".to_string()];
    if let Some(t0) = effect::t0_seconds(suite, row) {
        lines.push(format!(
            "  healthy: {} an iteration = 2(P-1)/P x D / B, B being {} NICs at line rate, {:.1} % of headers included",
            seconds(t0 * HEADER_OVERHEAD),
            suite.cluster.nics.len(),
            (HEADER_OVERHEAD - 1.0) * 100.0
        ));
    }
    let repairs = match suite.library.mode {
        Mode::None | Mode::Off => {
            lines.push("  without the library a cut NIC ends the job, or stalls it until a time-out".to_string());
            return lines;
        }
        mode => mode,
    };
    if suite.workload.sweep.is_some() {
        let faults: Vec<&Fault> = suite.faults.iter().collect();
        let slow = effect::balance_factor(suite, &faults, false);
        if slow > 1.0 {
            lines.push(format!("  under the faults: {} x by Balance{}", ratio(slow), reason(suite, &faults, slow)));
        }
        if let Some((schedule, factor)) = effect::scheduled_factor(suite, row, slow).filter(|_| slow > 1.0) {
            let least = Bytes(r2cc::Settings::default().min_bytes as u64);
            lines.push(format!("    AllReduces from {least} on: {} x by {schedule}", ratio(factor)));
        }
        return lines;
    }
    for (first, last, faults) in effect::stretches(suite) {
        let range = match last {
            0 => format!("iteration {first}"),
            last if last == first => format!("iteration {first}"),
            last => format!("iterations {first}-{last}"),
        };
        if last == 0 {
            lines.push(format!("  {range}: a fault begins or ends within it"));
            continue;
        }
        let slow = effect::balance_factor(suite, &faults, false);
        let fast = effect::balance_factor(suite, &faults, true);
        let words = if slow.is_infinite() {
            "two nodes no longer reach each other: every rank ends with the same error".to_string()
        } else if repairs == Mode::HotRepair && slow > 1.0 {
            format!("{} x (one backup NIC carries the load of two)", ratio(effect::one_backup_factor(suite, &faults)))
        } else if (slow - fast).abs() > 1e-9 {
            format!("{} x to {} x, with the NIC and without", ratio(fast), ratio(slow))
        } else if slow > 1.0 {
            format!("{} x by Balance{}", ratio(slow), reason(suite, &faults, slow))
        } else {
            "1 x".to_string()
        };
        lines.push(format!("  {range}: {words}"));
        if slow > 1.0
            && let Some((schedule, factor)) = effect::scheduled_factor(suite, row, slow)
        {
            lines.push(format!("    then {} x by {schedule}", ratio(factor)));
        }
    }
    lines
}

/// Where Balance's factor comes from.
fn reason(suite: &Suite, faults: &[&Fault], factor: f64) -> String {
    let nics = suite.cluster.nics.len() as f64;
    let nodes: BTreeSet<&str> = faults.iter().map(|fault| fault.target.node.as_str()).collect();
    let left = ratio(nics / factor);
    match (nodes.len(), suite.cluster.fabric) {
        (1, _) => format!(" (X = {}: 1/(1-X); {left} of {} NICs left)", ratio(1.0 - 1.0 / factor), nics),
        (_, Fabric::Rails) => format!(" (worst ring edge: {left} of {nics} rails in common)"),
        (_, Fabric::Any) => format!(" (weakest node: {left} of {nics} NICs left)"),
    }
}

fn checked(suite: &Suite) -> Vec<String> {
    let checks = &suite.checks;
    let timing = match suite.timing {
        Timing::Enforced => "enforced",
        Timing::Advisory => "shown as notes",
    };
    let mut lines = vec![format!("checks (timing {timing})")];
    let mut ask = |words: String| lines.push(format!("  {words}"));
    ask("every output element of every rank and iteration, exactly".to_string());
    if suite.workload.sweep.is_some() {
        if !suite.faults.is_empty() {
            ask("each fault stops packets, and is gone at the end".to_string());
        }
    } else if !suite.faults.is_empty() {
        let cut = checks.cut_iteration.map_or("where it is placed".to_string(), |n| format!("in iteration {n}"));
        ask(format!("each fault fires {cut} on every rank, stops packets, and is gone at the end"));
    }
    if let Some(share) = checks.survivors_share {
        ask(format!("surviving NICs of a cut node carry {} of its bytes each, within {}", share.value, share.within));
    }
    for rule in &checks.node_bytes {
        ask(format!(
            "{} receives {} x its healthy bytes in iterations {}, within {}",
            rule.node, rule.value, rule.iterations, rule.within
        ));
    }
    if let Some(places) = &checks.fault_view {
        let names = if places.is_empty() { "nothing".to_string() } else { places.join(", ") };
        ask(format!("every rank's fault view names {names}"));
    }
    if let Some(most) = checks.readmissions_at_most {
        ask(format!("at most {most} readmissions of a NIC"));
    }
    if let Some(most) = checks.paths_failed_at_most {
        ask(format!("at most {most} paths failed"));
    }
    if let Some(most) = checks.paths_down_at_end_at_most {
        ask(format!("at most {most} paths down at the end"));
    }
    if let Some(most) = checks.replayed_at_most {
        ask(format!("replayed bytes at most {most} of the payload"));
    }
    if let Some(rule) = &checks.sweep_goodput {
        ask(format!(
            "timing: from {} on healthy bus bandwidth is at least {} of plain TCP's",
            rule.from, rule.at_least
        ));
    }
    for rule in &checks.sweep_ratio {
        let limit = match (rule.value, rule.within) {
            (Some(value), Some(within)) => format!("{} x its healthy time, within {within}", ratio(value)),
            _ => format!("at most {} x its healthy time", ratio(rule.at_most.unwrap_or(f64::NAN))),
        };
        ask(format!("timing: under the faults each size of {} takes {limit}", rule.sizes()));
    }
    if suite.workload.sweep.is_some() {
        return lines;
    }
    ask(format!("timing: baseline median at most {} x T0 at plain TCP's goodput", checks.baseline_over_t0));
    for rule in &checks.time_ratio.0 {
        let of = match rule.of {
            Statistic::Each => "each of iterations",
            Statistic::Median => "the median of iterations",
        };
        let limit = match (rule.value, rule.within, rule.at_most) {
            (Some(value), Some(within), _) => format!("{value} x within {within}"),
            (_, Some(within), Some(most)) => format!("at most {most} x + {within}"),
            (_, None, Some(most)) => format!("at most {most} x"),
            _ => "unlimited".to_string(),
        };
        ask(format!("timing: {of} {} at {limit} of the baseline median", rule.iterations));
    }
    if let Some(most) = checks.hit_over_ideal_ms {
        ask(format!("timing: the hit iteration at most {most} ms over its ideal"));
    }
    if let Some(most) = checks.detection_ms {
        ask(format!("timing: detection at most {most} ms after the first dropped packet"));
    }
    lines
}

fn rights(suite: &Suite) -> &'static str {
    match suite.cluster.kind {
        ClusterKind::Emulated => "root, or CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON; this plan needs none",
        ClusterKind::Ssh => "a login on every host, and there the rights to attach the injector; this plan needs none",
        ClusterKind::SoftRoce => "access to /dev/kvm; this plan needs none",
    }
}

fn duration(suite: &Suite, row: ScaleRow) -> String {
    let Some(t0) = effect::t0_seconds(suite, row) else {
        return "not known: the NICs are not shaped".to_string();
    };
    let healthy = t0 * HEADER_OVERHEAD;
    if let Some(sweep) = &suite.workload.sweep {
        // A geometric series, with both places and everything that is measured beside.
        let series = 1.0 / (1.0 - 1.0 / sweep.factor as f64);
        let rows = 2.0 * (sweep.collectives.len() * (1 + sweep.also.len())) as f64 * series;
        let faults: Vec<&Fault> = suite.faults.iter().collect();
        let under = if faults.is_empty() { 0.0 } else { effect::balance_factor(suite, &faults, false) };
        let times = f64::from(suite.workload.baseline) + f64::from(suite.workload.iterations) * under;
        return format!("at most about {} a repetition", seconds(SETUP_SECONDS + rows * times * healthy));
    }
    let mut total = SETUP_SECONDS + f64::from(suite.workload.baseline) * healthy;
    for (first, last, faults) in effect::stretches(suite) {
        let factor = effect::balance_factor(suite, &faults, false);
        let factor = if factor.is_finite() { factor } else { 1.0 };
        total += f64::from(last.max(first) - first + 1) * factor * healthy;
    }
    format!("about {} a repetition", seconds(total))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::None => "none",
        Mode::Off => "off",
        Mode::HotRepair => "hot-repair",
        Mode::Balance => "balance",
        Mode::R2ccAllreduce => "r2cc-allreduce",
        Mode::Weighted => "weighted",
    }
}

fn schedule_name(suite: &Suite) -> String {
    let first = match suite.library.schedule {
        Schedule::Ring => "ring",
        Schedule::Weighted => "weighted",
    };
    match suite.library.after_repair {
        None => first.to_string(),
        Some(AfterRepair::Balance) => format!("{first}, kept after the repair"),
        Some(AfterRepair::R2ccAllreduce) => format!("{first}, r2cc-allreduce after the repair"),
        Some(AfterRepair::Weighted) => format!("{first}, weighted after the repair"),
    }
}

/// A ratio with at most three decimals.
fn ratio(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn seconds(value: f64) -> String {
    match Duration::try_from_secs_f64(value) {
        Ok(span) if span < Duration::from_secs(1) => format!("{:.0} ms", value * 1e3),
        Ok(span) if span < Duration::from_secs(120) => format!("{value:.1} s"),
        _ => format!("{:.1} min", value / 60.0),
    }
}
