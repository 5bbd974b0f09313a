//! Published figures of the same experiment, shown beside ours as ratios, never enforced.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tabled::builder::Builder;
use tabled::settings::{Alignment, Style, object::Columns};
use thiserror::Error;

use super::summary::Summary;
use super::text::{faulted_node, trimmed};
use crate::check::figures::median;

/// Why published figures cannot be shown.
#[derive(Debug, Error)]
pub enum ReferenceError {
    /// No such file near the suite or the working folder.
    #[error("reference-logs/{name}: not found in any folder above {}", suite.display())]
    Missing {
        /// As the suite names it.
        name: String,
        /// The suite's file.
        suite: PathBuf,
    },
    /// The file is not readable as figures.
    #[error("{}: {why}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
}

/// The figures of one published run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Where it was run.
    pub testbed: String,
    /// The suite it belongs to.
    pub suite: String,
    /// Bytes of the collective on each rank.
    pub bytes: crate::suite::Bytes,
    /// Ranks on each node.
    pub ranks_per_node: u32,
    /// What was cut.
    pub fault: ReferenceFault,
    /// The iterations before the cut, which ratios refer to.
    pub healthy_iterations: Vec<usize>,
    /// Time of each iteration.
    pub time_ms: Vec<f64>,
    /// MiB that each port of the cut node received, by iteration.
    pub faulted_node_rx_mib: BTreeMap<String, Vec<f64>>,
    /// MiB that each node received, by iteration.
    pub node_rx_mib: BTreeMap<String, Vec<f64>>,
    /// Wrong elements of the run.
    pub wrong_elements: u64,
}

/// What was cut in a published run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceFault {
    /// The node.
    pub node: String,
    /// The NIC.
    pub nic: String,
    /// The iteration.
    pub iteration: u32,
}

impl Reference {
    /// Finds `reference-logs/NAME` in a folder above the suite's file, or above the working
    /// folder, and reads it.
    pub fn load(suite_file: &Path, name: &str) -> Result<Self, ReferenceError> {
        let below = Path::new("reference-logs").join(name);
        let above = |start: Option<PathBuf>| -> Vec<PathBuf> {
            start.iter().flat_map(|path| path.ancestors()).map(Path::to_path_buf).collect()
        };
        let starts = [fs::canonicalize(suite_file).ok(), std::env::current_dir().ok()];
        let file = starts
            .into_iter()
            .flat_map(above)
            .map(|folder| folder.join(&below))
            .find(|file| file.is_file())
            .ok_or_else(|| ReferenceError::Missing { name: name.to_string(), suite: suite_file.to_path_buf() })?;
        let unreadable = |why: String| ReferenceError::Unreadable { file: file.clone(), why };
        let text = fs::read_to_string(&file).map_err(|error| unreadable(error.to_string()))?;
        let reference: Self = serde_yaml::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
        let iterations = reference.time_ms.len();
        let mut columns = reference.faulted_node_rx_mib.values().chain(reference.node_rx_mib.values());
        let healthy = &reference.healthy_iterations;
        if columns.any(|column| column.len() != iterations) {
            return Err(unreadable(format!("every list must have {iterations} iterations, as time_ms has")));
        }
        if healthy.is_empty() || healthy.iter().any(|index| !(1..=iterations).contains(index)) {
            return Err(unreadable(format!("healthy_iterations must be among 1 to {iterations}")));
        }
        Ok(reference)
    }

    /// Ours beside the published run, both relative to their own healthy iterations.
    pub fn beside(&self, summary: &Summary) -> String {
        let node = faulted_node(summary);
        let mut builder = Builder::default();
        let mut header = vec!["iteration".to_string(), "time\nours".to_string(), "time\npublished".to_string()];
        for nic in self.faulted_node_rx_mib.keys() {
            header.push(format!("{nic}\nours"));
            header.push(format!("{nic}\npublished"));
        }
        builder.push_record(header);
        for (position, millis) in self.time_ms.iter().enumerate() {
            let ours = summary.iterations.iter().find(|iteration| iteration.index as usize == position + 1);
            let time = ours.and_then(|iteration| over(iteration.millis, summary.baseline.median_millis));
            let mut row = vec![
                (position + 1).to_string(),
                shown(time),
                shown(self.healthy(&self.time_ms).and_then(|h| over(*millis, h))),
            ];
            for (nic, mib) in &self.faulted_node_rx_mib {
                let ports = ours.and_then(|iteration| iteration.nics.get(&node));
                let share = ports.and_then(|ports| {
                    let all: u64 = self
                        .faulted_node_rx_mib
                        .keys()
                        .filter_map(|nic| ports.get(nic))
                        .map(|p| p.passed_rx_bytes)
                        .sum();
                    over(ports.get(nic)?.passed_rx_bytes as f64, all as f64)
                });
                let all: f64 = self.faulted_node_rx_mib.values().map(|mib| mib[position]).sum();
                row.push(shown(share));
                row.push(shown(over(mib[position], all)));
            }
            builder.push_record(row);
        }
        let mut table = builder.build();
        table.with(Style::psql());
        table.modify(Columns::new(..), Alignment::right());
        let table = trimmed(&table);
        format!(
            "beside {} ({} a rank; shown, not enforced)\ntimes over the healthy ones; shares of the bytes that {node} received\n{table}",
            self.testbed, self.bytes
        )
    }

    fn healthy(&self, column: &[f64]) -> Option<f64> {
        let values: Vec<f64> =
            self.healthy_iterations.iter().filter_map(|index| column.get(index - 1)).copied().collect();
        median(&values)
    }
}

fn over(value: f64, base: f64) -> Option<f64> {
    (base > 0.0).then(|| value / base)
}

fn shown(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_string(), |ratio| format!("{ratio:.3}"))
}
