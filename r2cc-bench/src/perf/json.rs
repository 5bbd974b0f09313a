//! nccl-tests' JSON (its file version 3), with one object of our own, `r2cc`, from which a sweep resumes.
//!
//! Written whole after each row, so that a sweep that is killed leaves a valid file of the rows that are finished.
//! Booleans are the words "true" and "false", as nccl-tests writes them.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::options::Options;
use super::sweep::{Half, PerIteration, Row};
use super::text::{Device, average_bus_bw, failed_checks};
use crate::suite::{BitRate, ClusterSpec};

/// Version of nccl-tests' file that this is shaped like.
const FILE_VERSION: u32 = 3;

/// What a sweep is resumed from: what was asked for, where, and the rows that are finished.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resumable {
    /// Version of this object.
    pub version: u32,
    /// What was asked for.
    pub options: Options,
    /// The machines.
    pub cluster: ClusterSpec,
    /// Rate of each NIC.
    pub nic_rate: Option<BitRate>,
    /// Rows of all cycles in order.
    pub rows: Vec<Row>,
    /// Whether no row is missing.
    pub complete: bool,
    /// Command line of the first start.
    pub args: Vec<String>,
    /// When it was first started, RFC 3339.
    pub start_time: String,
}

impl Resumable {
    /// Version of [`Resumable`] that this build writes.
    pub const VERSION: u32 = 1;

    /// Reads it back from a document.
    ///
    /// # Errors
    /// If it is no document of a sweep of this version.
    pub fn from_document(text: &str) -> Result<Self, String> {
        let mut document: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
        let own = document.get_mut("r2cc").map(Value::take).ok_or("it has no object `r2cc`")?;
        let version = own["version"].as_u64();
        if version != Some(u64::from(Self::VERSION)) {
            return Err(format!("its version is {}, this build reads {}", own["version"], Self::VERSION));
        }
        serde_json::from_value(own).map_err(|error| format!("its object `r2cc`: {error}"))
    }

    /// The whole document.
    pub fn document(&self, devices: &[Device], end_time: Option<&str>, errors: &[String]) -> Value {
        let Options { min_bytes, max_bytes, step_factor, step_bytes, .. } = self.options;
        let options = &self.options;
        let devices: Vec<Value> = devices
            .iter()
            .map(|d| json!({"rank": d.rank, "pid": d.pid, "host": d.node, "device": null, "device_name": d.nics.join(",")}))
            .collect();
        let mut config = json!({
            "nthreads": 1, "ngpus": 0, "minimum_bytes": min_bytes, "maximum_bytes": max_bytes,
            "warmup_iters": options.warmup, "iterations": options.iterations, "agg_iters": 1,
            "validation": options.checks, "graph": 0, "blocking": u32::from(options.blocking),
            "cycles": options.cycles, "devices": devices,
        });
        match step_factor {
            0 | 1 => config["step_bytes"] = json!(step_bytes),
            factor => config["step_factor"] = json!(factor),
        }
        let failed = failed_checks(&self.rows);
        json!({
            "version": FILE_VERSION,
            "program": options.collective.program(),
            "start_time": self.start_time,
            "args": self.args,
            "env": {},
            "config": config,
            "results": self.rows.iter().map(row).collect::<Vec<_>>(),
            "out_of_bounds": {"count": failed, "okay": word(failed == 0)},
            "average_bus_bandwidth": {"bandwidth": average_bus_bw(&self.rows), "okay": "unchecked"},
            "errors": errors,
            "end_time": end_time,
            "r2cc": self,
        })
    }
}

fn word(truth: bool) -> &'static str {
    if truth { "true" } else { "false" }
}

fn row(row: &Row) -> Value {
    let mut object = json!({
        "size": row.size, "count": row.count, "type": row.dtype, "redop": row.op, "root": row.root.to_string(),
        "out_of_place": half(&row.out_of_place),
        "in_place": row.in_place.as_ref().map(half),
    });
    let halves = [("out_of_place_per_iter", Some(&row.out_of_place)), ("in_place_per_iter", row.in_place.as_ref())];
    for (key, times) in halves {
        if let Some((half, of)) = times.and_then(|half| Some((half, PerIteration::of(&half.times_us)?))) {
            object[key] = json!({
                "min_us": of.min_us, "max_us": of.max_us, "avg_us": of.avg_us, "p50_us": of.p50_us,
                "p95_us": of.p95_us, "p99_us": of.p99_us, "stdev_us": of.stdev_us, "cv_pct": of.cv_percent,
                "times_us": half.times_us,
            });
        }
    }
    object
}

fn half(half: &Half) -> Value {
    let wrong = half.wrong.map_or_else(|| json!("N/A"), |wrong| json!(wrong));
    json!({"time": half.time_us, "alg_bw": half.alg_bw, "bus_bw": half.bus_bw, "nwrong": wrong})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::parse::{self, Check};
    use crate::suite::{ClusterKind, Fabric};

    fn state() -> Resumable {
        let half = |time_us: f64, wrong: Option<u64>| Half {
            time_us,
            alg_bw: 2.0,
            bus_bw: 3.0,
            checked: wrong.map(|_| 100),
            wrong,
            first_wrong: None,
            times_us: vec![time_us, time_us],
        };
        let row = Row {
            size: 64,
            count: 16,
            dtype: "float".into(),
            op: "sum".into(),
            root: -1,
            out_of_place: half(12.3456789, Some(0)),
            in_place: Some(half(11.0, None)),
        };
        let cluster = ClusterSpec {
            kind: ClusterKind::Emulated,
            nodes: 2,
            ranks_per_node: 1,
            nics: vec!["mlx5_0".into()],
            fabric: Fabric::Rails,
        };
        Resumable {
            version: Resumable::VERSION,
            options: Options::default(),
            cluster,
            nic_rate: Some(BitRate(200_000_000)),
            rows: vec![row],
            complete: false,
            args: vec!["r2cc-bench".into()],
            start_time: "2026-11-30T09:00:00Z".into(),
        }
    }

    #[test]
    fn a_sweep_goes_on_from_its_document_to_the_last_bit() {
        let document = state().document(&[], None, &[]).to_string();
        assert_eq!(Resumable::from_document(&document), Ok(state()));
    }

    #[test]
    fn the_document_is_nccl_tests() {
        let sweep = parse::read(&state().document(&[], Some("now"), &[]).to_string()).unwrap();
        assert_eq!((sweep.rows.len(), sweep.concluded, sweep.out_of_bounds), (1, true, Some((0, true))));
        let row = &sweep.rows[0];
        assert_eq!(
            row.out_of_place.as_ref().map(|half| (half.time_us, half.check)),
            Some((12.3456789, Check::Wrong(0)))
        );
        assert_eq!(row.in_place.as_ref().map(|half| half.check), Some(Check::Unchecked));
        assert!(!parse::read(&state().document(&[], None, &[]).to_string()).unwrap().concluded);
    }

    #[test]
    fn what_is_no_sweep_of_this_version_is_refused() {
        for text in ["", "{}", "{\"r2cc\": {\"version\": 99}}", "{\"r2cc\": {\"version\": 1}}"] {
            assert!(Resumable::from_document(text).is_err(), "{text:?}");
        }
    }
}
