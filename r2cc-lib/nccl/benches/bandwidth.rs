//! What the plugin moves between two nodes without shaping, called as NCCL calls it, beside plain sockets that carry
//! the same messages: both directions at once, `--comms` communicators of each, as many requests under way as NCCL has.
//!
//! `cargo bench -p r2cc-nccl --all-features --bench bandwidth`. `R2CC_IO_THREADS`, `R2CC_STRIPES` and
//! `R2CC_SPIN_US` apply. Needs root.

#[path = "../tests/hosts/mod.rs"]
mod hosts;

use std::io::Write;

use clap::Parser;
use hosts::{cluster, pair, script, with};
use serde_json::{Value, json};

/// Plugin and plain sockets in turns; GB/s that both processes received.
#[derive(Parser)]
struct Options {
    /// Communicators of each direction.
    #[arg(long, default_value_t = 4)]
    comms: usize,
    /// Length of a message, KiB; NCCL's with the Simple protocol are 512.
    #[arg(long, default_value_t = 512)]
    kib: usize,
    /// Messages of a communicator.
    #[arg(long, default_value_t = 4000)]
    messages: usize,
    /// Requests of a communicator under way.
    #[arg(long, default_value_t = 8)]
    in_flight: usize,
    /// Measurements of each.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let options = Options::parse();
    let cluster = cluster(None);
    let script = with(
        script(11),
        json!({
            "comms": options.comms, "bytes": options.kib << 10, "messages": options.messages,
            "in_flight": options.in_flight, "check": false,
        }),
    );
    let plain = with(script.clone(), json!({"plain": true}));
    writeln!(out, "round  plugin  plain  GB/s     share  plugin  plain  GB for a CPU second")?;
    for round in 1..=options.rounds {
        let measure = |script: &Value| {
            let mut hosts = pair(&cluster, [script, script], &[]);
            let reports = hosts.each_mut().map(|host| {
                let (done, report) = host.outcome();
                assert!(done, "{report}");
                report
            });
            let sum = |key: &str| reports.iter().filter_map(|r| r[key].as_f64()).sum::<f64>();
            let seconds = reports.iter().filter_map(|r| r["seconds"].as_f64()).fold(0.0, f64::max);
            (sum("received_bytes") / seconds / 1e9, sum("received_bytes") / sum("cpu_seconds") / 1e9)
        };
        let (ours, baseline) = (measure(&script), measure(&plain));
        let share = ours.0 / baseline.0;
        writeln!(
            out,
            "{round:5}  {:6.2}  {:5.2}           {share:5.2}  {:6.2}  {:5.2}",
            ours.0, baseline.0, ours.1, baseline.1
        )?;
    }
    Ok(())
}
