//! A run as text: the per-iteration table, faults, repairs, checks and the verdict.
//!
//! Pure functions from a [`Summary`]; the caller prints. Colour only repeats what a word
//! says, and only where [`Paint`] allows it.

use std::env;
use std::io::IsTerminal;

use r2cc_inject::fault::Fault;
use tabled::Table;
use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Style};

use super::exit::Verdict;
use super::rows::rows_table;
use super::summary::{FaultSummary, IterationSummary, Summary};
use crate::check::record::{NicCounters, Phase, SweepRecord};
use crate::check::{CheckResult, CheckStatus, NOT_KNOWN};
use crate::perf::{self, Options, Row};
use crate::suite::MANAGEMENT_NIC;

const MIB: f64 = 1024.0 * 1024.0;

/// Whether text may carry colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    /// Plain text.
    Plain,
    /// Status words in colour.
    Colour,
}

impl Paint {
    /// Colour on a terminal, unless `NO_COLOR` is set.
    pub fn for_stdout() -> Self {
        let wanted = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        if wanted && std::io::stdout().is_terminal() { Self::Colour } else { Self::Plain }
    }

    /// `word` in the colour with this code, where colour is allowed.
    pub fn word(self, word: &str, code: u8) -> String {
        match self {
            Self::Plain => word.to_string(),
            Self::Colour => format!("\u{1b}[{code}m{word}\u{1b}[0m"),
        }
    }
}

/// The whole text of one run.
pub fn run_text(summary: &Summary, paint: Paint) -> String {
    if summary.runs.iter().any(|run| run.row.is_some()) {
        return rows_text(summary, paint);
    }
    let mut text = if summary.sweep.is_empty() {
        format!("{}\n{}\n", baseline_line(summary), iteration_table(summary))
    } else {
        sweep_tables(&summary.sweep)
    };
    let lines = fault_lines(summary)
        .into_iter()
        .chain(hang_line(summary))
        .chain(repair_lines(summary))
        .chain(graph_line(summary))
        .chain(references_line(summary))
        .chain(check_lines(summary, paint));
    for line in lines {
        text.push_str(&line);
        text.push('\n');
    }
    text.push_str(&verdict_line(summary, paint));
    text.push('\n');
    text
}

/// The text of a suite with rows: the table, what is not as it should be, and the verdict.
fn rows_text(summary: &Summary, paint: Paint) -> String {
    let mut text = rows_table(summary);
    text.push('\n');
    for run in &summary.runs {
        let name = run.row.as_deref().unwrap_or_default();
        text.extend(references_line(run).map(|line| format!("{name}: {line}\n")));
        let unwell = |check: &&CheckResult| !matches!(check.status, CheckStatus::Pass | CheckStatus::Skipped);
        for check in run.checks.iter().filter(unwell) {
            text.push_str(&format!("{name}: {}\n", check_line(check, 0, paint)));
        }
        if let Some(why) = &run.ended_early {
            text.push_str(&format!("{name}: the run ended early: {why}\n"));
        }
    }
    text.push_str(&verdict_line(summary, paint));
    text.push('\n');
    text
}

/// Rows of a sweep in nccl-tests' columns, a table for each stretch of one collective, type and operator.
pub(super) fn sweep_tables(records: &[SweepRecord]) -> String {
    let mut text = String::new();
    let alike = |a: &SweepRecord, b: &SweepRecord| {
        (a.phase, a.collective, &a.row.dtype, &a.row.op) == (b.phase, b.collective, &b.row.dtype, &b.row.op)
    };
    for table in records.chunk_by(alike) {
        let rows: Vec<Row> = table.iter().map(|record| record.row.clone()).collect();
        let (first, last) = (&table[0], &rows[rows.len() - 1]);
        let options = Options {
            collective: first.collective,
            min_bytes: first.row.size,
            max_bytes: last.size,
            // Sizes grow by a factor; it is that of the first two.
            step_factor: rows.get(1).map_or(1, |second| second.size / first.row.size.max(1)),
            iterations: first.row.out_of_place.times_us.len() as u32,
            warmup: 1,
            verify: true,
            ..Options::default()
        };
        let phase = match first.phase {
            Phase::Healthy => "before the faults",
            Phase::Hit => "while the faults strike",
            Phase::Degraded => "under the faults",
        };
        text.push_str(&format!("# {} {phase}\n", first.collective.name()));
        text.push_str(&perf::text::header(&options, &[]));
        for row in &rows {
            text.push_str(&perf::text::row(row, false));
            text.push('\n');
        }
        text.push_str(&perf::text::footer(&options, &rows));
        text.push('\n');
    }
    text
}

/// The healthy iterations in one line.
pub fn baseline_line(summary: &Summary) -> String {
    let baseline = &summary.baseline;
    let t0 = match baseline.t0_millis {
        Some(t0) if t0 > 0.0 => format!(", {:.3} x T0 at plain TCP's goodput", baseline.median_millis / t0),
        _ => String::new(),
    };
    format!(
        "baseline: median {:.1} ms of {} iterations, spread {:.2} %{t0}",
        baseline.median_millis,
        baseline.millis.len(),
        baseline.mad_percent
    )
}

/// The per-iteration table: time, ratio to the baseline, MiB received by each NIC of the
/// faulted node and by each node, wrong elements.
pub fn iteration_table(summary: &Summary) -> String {
    let shown_node = faulted_node(summary);
    let nics = &summary.cluster.nics;
    let mut builder = Builder::default();
    let mut header = vec!["iteration".to_string(), "ms".to_string(), "x baseline".to_string()];
    header.extend(nics.iter().map(|nic| format!("{shown_node}\n{nic}\nrx MiB")));
    header.extend(summary.cluster.nodes.iter().map(|node| format!("{node}\nall NICs\nrx MiB")));
    header.push("wrong".to_string());
    builder.push_record(header);
    for iteration in &summary.iterations {
        let hit = summary.faults.iter().any(|fault| fault.iteration == Some(iteration.index));
        let mark = if hit { format!("fault {}", iteration.index) } else { iteration.index.to_string() };
        let ratio = match summary.baseline.median_millis {
            median if median > 0.0 => format!("{:.3}", iteration.millis / median),
            _ => "-".to_string(),
        };
        let mut row = vec![mark, format!("{:.1}", iteration.millis), ratio];
        row.extend(nics.iter().map(|nic| mib(port(iteration, &shown_node, nic).map(|port| port.passed_rx_bytes))));
        row.extend(summary.cluster.nodes.iter().map(|node| mib(node_rx_bytes(iteration, node))));
        row.push(iteration.wrong_elements.to_string());
        builder.push_record(row);
    }
    let mut table = builder.build();
    table.with(Style::psql());
    table.modify(Columns::new(..), Alignment::right());
    trimmed(&table)
}

/// A table without the blanks that end its lines.
pub(crate) fn trimmed(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn mib(bytes: Option<u64>) -> String {
    bytes.map_or("-".to_string(), |bytes| format!("{:.1}", bytes as f64 / MIB))
}

fn port<'a>(iteration: &'a IterationSummary, node: &str, nic: &str) -> Option<&'a NicCounters> {
    iteration.nics.get(node)?.get(nic)
}

/// Bytes that `node` received over its data NICs.
pub(super) fn node_rx_bytes(iteration: &IterationSummary, node: &str) -> Option<u64> {
    let nics = iteration.nics.get(node)?;
    Some(nics.iter().filter(|(nic, _)| *nic != MANAGEMENT_NIC).map(|(_, port)| port.passed_rx_bytes).sum())
}

/// The node whose NICs the table shows: that of the first fault, else the first.
pub(super) fn faulted_node(summary: &Summary) -> String {
    let nodes = &summary.cluster.nodes;
    summary
        .faults
        .iter()
        .filter_map(|fault| fault.spec.parse::<Fault>().ok())
        .map(|fault| fault.target.node)
        .find(|node| nodes.contains(node))
        .or_else(|| nodes.first().cloned())
        .unwrap_or_default()
}

/// One line a fault: where it fell, what it stopped, whether it is gone.
pub fn fault_lines(summary: &Summary) -> Vec<String> {
    summary.faults.iter().map(fault_line).collect()
}

fn fault_line(fault: &FaultSummary) -> String {
    let mut line = format!("fault   {}: ", fault.spec);
    if !fault.fired {
        line.push_str("never fired");
    } else {
        match fault.iteration {
            Some(index) => line.push_str(&format!("fired in iteration {index}")),
            // Asked by time, it was to fall into none.
            None if fault.asked_bytes.is_none() => line.push_str("fired"),
            None => line.push_str("fired outside every iteration"),
        }
        if let (Some(asked), Some(before)) = (fault.asked_bytes, fault.bytes_before) {
            line.push_str(&format!(", asked at {asked} B of the port, at {before} B"));
        }
        line.push_str(&format!(", stopped {} packets", fault.packets_dropped));
    }
    line.push_str(if fault.healed { ", gone" } else { ", LEFT BEHIND" });
    line
}

/// The collective that never ended.
fn hang_line(summary: &Summary) -> Option<String> {
    let hang = summary.hang.as_ref()?;
    Some(format!(
        "hang    iteration {}: given up after {:.1} s, of which {:.1} s without payload on any data port; {}; killed",
        hang.iteration.index,
        hang.iteration.millis() / 1e3,
        hang.silent_s,
        hang.processes.join(", ")
    ))
}

/// What Weighted took beside the flat healthy ring, the healthy hierarchical optimum, and the bound under the faults.
fn references_line(summary: &Summary) -> Option<String> {
    let references = summary.references?;
    let beside =
        |name: &str, millis: f64| format!("{:.3} x {name} ({millis:.1} ms)", references.median_millis / millis);
    let bound = references.bound_millis.map(|millis| beside("the bound under the faults", millis));
    let all = [
        beside("the flat healthy ring", references.flat_ring_millis),
        beside("the healthy hierarchical optimum", references.hierarchical_millis),
    ];
    let all: Vec<String> = all.into_iter().chain(bound).collect();
    Some(format!("weighted median {:.1} ms = {}", references.median_millis, all.join(" = ")))
}

/// What capturing the collective took, and capturing it again.
fn graph_line(summary: &Summary) -> Option<String> {
    let graph = summary.graph?;
    let mut line = format!(
        "graph   captured in {:.2} ms, made replayable in {:.2} ms",
        graph.capture_millis, graph.instantiate_millis
    );
    if let (Some(capture), Some(instantiate)) = (graph.recapture_millis, graph.reinstantiate_millis) {
        line.push_str(&format!("; again after the last iteration: {capture:.2} ms, {instantiate:.2} ms"));
    }
    if let Some(ratio) = graph.replay_ratio {
        line.push_str(&format!(
            "; the new graph's first replay {ratio:.3} x the baseline, {} wrong",
            graph.replay_wrong
        ));
    }
    Some(line)
}

/// One line a repair, and one for the transport's sums.
pub fn repair_lines(summary: &Summary) -> Vec<String> {
    let millis = |value: Option<f64>| value.map_or("-".to_string(), |ms| format!("{ms:.1} ms"));
    let mut lines: Vec<String> = summary
        .repairs
        .iter()
        .map(|repair| {
            format!(
                "repair  rank {} towards {} on {}: {}; first drop to detection {}, to resumption {} more, {:.2} MiB replayed",
                repair.rank,
                repair.peer,
                repair.nic,
                repair.cause,
                millis(repair.first_drop_to_detect_ms),
                millis(repair.detect_to_resume_ms),
                repair.replayed_bytes as f64 / MIB
            )
        })
        .collect();
    let transport = &summary.transport;
    if transport.payload_bytes > 0 {
        lines.push(format!(
            "transport {:.1} MiB of payload, {:.3} % replayed; paths: {} suspected, {} failed, {} down at the end",
            transport.payload_bytes as f64 / MIB,
            transport.replayed_bytes as f64 / transport.payload_bytes as f64 * 100.0,
            transport.paths_suspected,
            transport.paths_failed,
            transport.paths_down_at_end
        ));
    }
    if let Some(hit) = &summary.hit_iteration {
        lines.push(format!(
            "hit     iteration {} took {:.1} ms, its ideal is {:.1} ms: {:+.1} ms",
            hit.index, hit.millis, hit.ideal_millis, hit.over_millis
        ));
    }
    lines
}

/// One line a check: status, name, what came, what was expected.
pub fn check_lines(summary: &Summary, paint: Paint) -> Vec<String> {
    let width = summary.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    summary.checks.iter().map(|check| check_line(check, width, paint)).collect()
}

fn check_line(check: &CheckResult, width: usize, paint: Paint) -> String {
    let word = format!("{:<12}", check.status.word());
    let code = match check.status {
        CheckStatus::Pass => 32,
        CheckStatus::Fail => 31,
        CheckStatus::Inconclusive | CheckStatus::Note => 33,
        CheckStatus::Skipped => 2,
    };
    let unit = match check.unit.as_str() {
        "" => String::new(),
        _ if check.actual == NOT_KNOWN => String::new(),
        unit => format!(" {unit}"),
    };
    let mut line = format!(
        "{} {:<width$}  {}{unit} (expected {})",
        paint.word(&word, code),
        check.name,
        check.actual,
        check.expected
    );
    if let Some(detail) = &check.detail {
        line.push_str("; ");
        line.push_str(detail);
    }
    line
}

/// The last line: the verdict, and with several runs how many passed.
pub fn verdict_line(summary: &Summary, paint: Paint) -> String {
    let code = match summary.verdict {
        Verdict::Pass => 32,
        Verdict::TimingInconclusive | Verdict::Inconclusive => 33,
        _ => 31,
    };
    let mut line = format!("{}  {}", paint.word(summary.verdict.words(), code), summary.suite);
    if !summary.runs.is_empty() {
        let passed = summary.runs.iter().filter(|run| run.verdict == Verdict::Pass).count();
        let shown = if summary.row.is_some() { "" } else { "; the worst is shown" };
        line.push_str(&format!("  {passed} of {} runs passed{shown}", summary.runs.len()));
    }
    if let Some(why) = &summary.ended_early {
        line.push_str(&format!("  {why}"));
    }
    line
}
