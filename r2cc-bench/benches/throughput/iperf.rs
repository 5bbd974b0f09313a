//! What iperf3 receives over the same NICs in both directions at once: one client and server a NIC.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use r2cc_bench::cluster::EmulatedCluster;

use crate::orders::CONGESTION_CONTROL;

const PORT: &str = "5201";

/// Servers of one measurement; killed when dropped.
struct Servers(Vec<Child>);

impl Drop for Servers {
    fn drop(&mut self) {
        for server in &mut self.0 {
            // One that has served its client has ended by itself.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// What both nodes together received, and what it took.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Received {
    pub(crate) bytes_s: f64,
    /// Bytes for each second of user and system time of all clients and servers.
    pub(crate) bytes_a_cpu_s: f64,
}

/// Measures with `lanes_a_nic` flows a NIC and direction.
pub(crate) fn measure(cluster: &EmulatedCluster, lanes_a_nic: usize, duration: Duration) -> Result<Received> {
    let iperf = find()?;
    let (from, to) = (&cluster.nodes()[0], &cluster.nodes()[1]);
    let mut servers = Servers(Vec::new());
    for nic in &to.nics {
        let mut command = cluster.command(&to.name, &iperf)?;
        command.args(["-s", "-1", "-p", PORT, "-B", &nic.addr.to_string()]).stdout(Stdio::null());
        servers.0.push(command.spawn().context("start iperf3 -s")?);
    }
    let clients = from.nics.iter().zip(&to.nics).map(|(source, target)| {
        let mut command = cluster.command(&from.name, &iperf)?;
        let (lanes, seconds) = (lanes_a_nic.to_string(), duration.as_secs().max(1).to_string());
        let (source, target) = (source.addr.to_string(), target.addr.to_string());
        command.args(["-c", &target, "-B", &source, "-p", PORT, "-P", &lanes, "-t", &seconds, "--bidir", "--json"]);
        command.args(["-C", CONGESTION_CONTROL]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    });
    let clients = clients.collect::<Result<Vec<Command>>>()?;
    wait_for_listeners(cluster, to.nics.len())?;
    let clients = clients.into_iter().map(|mut command| command.spawn()).collect::<Result<Vec<_>, _>>()?;
    let (mut sum, mut bytes, mut cpu_seconds) = (0.0, 0.0, 0.0);
    for client in clients {
        let output = client.wait_with_output()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("the report of iperf3")?;
        if let Some(error) = report.get("error") {
            bail!("iperf3: {error}");
        }
        let figure = |group: &str, key: &str| {
            report["end"][group][key].as_f64().with_context(|| format!("iperf3 reported no {group}.{key}"))
        };
        for group in ["sum_received", "sum_received_bidir_reverse"] {
            sum += figure(group, "bits_per_second")? / 8.0;
            bytes += figure(group, "bytes")?;
        }
        let percent =
            figure("cpu_utilization_percent", "host_total")? + figure("cpu_utilization_percent", "remote_total")?;
        cpu_seconds += percent / 100.0 * figure("sum_received", "seconds")?;
    }
    Ok(Received { bytes_s: sum, bytes_a_cpu_s: bytes / cpu_seconds })
}

/// Waits until the servers listen, as the node's own socket table tells.
fn wait_for_listeners(cluster: &EmulatedCluster, count: usize) -> Result<()> {
    let node = &cluster.nodes()[1];
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let table = r2cc_bench::cluster::in_netns(std::os::fd::AsFd::as_fd(&node.netns), || {
            std::fs::read_to_string("/proc/thread-self/net/tcp")
        })??;
        // Port 5201 is 1451 in hex, a listener has state 0A.
        let listening = table.lines().filter(|line| line.contains(":1451 ") && line.contains(" 0A ")).count();
        if listening >= count {
            return Ok(());
        }
        ensure!(Instant::now() < until, "iperf3 -s did not start to listen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn find() -> Result<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("iperf3")).find(|file| file.is_file());
    found.context("no iperf3; hint: `make packages` installs it, or leave it out with --no-iperf")
}
