//! The table of a suite with rows: one line a run, side by side.

use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Style};

use super::summary::{IterationSummary, Summary};
use super::text::{node_rx_bytes, trimmed};
use crate::check::CheckStatus;
use crate::check::figures::{median, settled_from};

/// One line a row (and repetition): its median time, also over the baseline it is compared with, what each node
/// receives over the first row's, wrong elements and verdict. The iterations are those after the one that a fault
/// hit or after which the schedule changed, all of them where nothing did.
pub fn rows_table(summary: &Summary) -> String {
    let mut builder = Builder::default();
    let mut header: Vec<String> = ["row", "median ms", "x baseline"].map(str::to_owned).into();
    header.extend(summary.cluster.nodes.iter().map(|node| format!("{node}\nx rx bytes")));
    header.extend(["wrong", "verdict"].map(str::to_owned));
    builder.push_record(header);
    let first = summary.runs.first();
    for run in &summary.runs {
        let ratio = |value: Option<f64>, of: Option<f64>| match (value, of) {
            (Some(value), Some(of)) if of > 0.0 => format!("{:.4}", value / of),
            _ => "-".to_owned(),
        };
        let settled = settled(run);
        let millis = median(&settled.iter().map(|iteration| iteration.millis).collect::<Vec<_>>());
        let mut row = vec![run.row.clone().unwrap_or_default()];
        row.push(millis.map_or("-".to_owned(), |millis| format!("{millis:.1}")));
        row.push(ratio(millis, Some(run.baseline.median_millis)));
        for node in &summary.cluster.nodes {
            let received = |run| median_rx_bytes(&self::settled(run), node);
            row.push(ratio(received(run), first.and_then(received)));
        }
        row.push(run.wrong_elements().to_string());
        let failed = run.checks.iter().filter(|check| check.status == CheckStatus::Fail).count();
        row.push(match failed {
            0 => run.verdict.words().to_owned(),
            failed => format!("{}, {failed} checks failed", run.verdict.words()),
        });
        builder.push_record(row);
    }
    let mut table = builder.build();
    table.with(Style::psql());
    table.modify(Columns::new(1..), Alignment::right());
    trimmed(&table)
}

/// Iterations in which nothing changes any more.
fn settled(run: &Summary) -> Vec<&IterationSummary> {
    let hit = run.faults.iter().filter_map(|fault| fault.iteration).max();
    let from = settled_from(hit, &run.switches, run.baseline.millis.len());
    run.iterations.iter().filter(|iteration| iteration.index >= from).collect()
}

fn median_rx_bytes(iterations: &[&IterationSummary], node: &str) -> Option<f64> {
    let bytes: Vec<f64> =
        iterations.iter().filter_map(|iteration| node_rx_bytes(iteration, node)).map(|bytes| bytes as f64).collect();
    median(&bytes)
}
