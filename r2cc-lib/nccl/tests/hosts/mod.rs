//! Processes on two emulated nodes that call the plugin as NCCL does: `examples/net-host`.
#![allow(clippy::unwrap_used, reason = "whoever cannot go on has failed")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric};
use serde_json::{Value, json};

pub(crate) const NICS: [&str; 3] = ["mlx5_0", "mlx5_2", "mlx5_3"];

/// Where cargo puts what it builds: this test is in `deps` below it.
fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let file = own.parent().unwrap().join(name);
    assert!(file.exists(), "{} is not built: run cargo test -p r2cc-nccl without --test", file.display());
    file
}

pub(crate) fn script(version: u32) -> Value {
    json!({
        "plugin": built("libr2cc_nccl.so"), "version": version, "comms": 2, "messages": 100, "in_flight": 32,
        "bytes": null, "check": true, "abandon": null, "rounds": 1,
    })
}

pub(crate) fn with(mut script: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        script[key] = value.clone();
    }
    script
}

pub(crate) fn cluster(rate_bits_s: Option<u64>) -> EmulatedCluster {
    EmulatedCluster::build(&ClusterSpec::uniform(2, &NICS, rate_bits_s, Fabric::Rails)).unwrap()
}

/// A process on a node that runs a script.
pub(crate) struct Host {
    pub(crate) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Host {
    pub(crate) fn start(cluster: &EmulatedCluster, node: &str, script: &Value, env: &[(&str, &str)]) -> Self {
        let mut command = cluster.command(node, &built("../examples/net-host")).unwrap();
        command.arg(script.to_string()).env("NCCL_SOCKET_IFNAME", "=mgmt0").envs(env.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Next line that starts with one of these words.
    pub(crate) fn until(&mut self, words: &[&str]) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the host ended before it said {words:?}");
            if words.iter().any(|word| line.starts_with(word)) {
                return line;
            }
        }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        self.input.write_all(line.as_bytes()).unwrap();
    }

    pub(crate) fn outcome(&mut self) -> (bool, Value) {
        let line = self.until(&["done", "failed"]);
        let (word, report) = line.split_once(' ').unwrap();
        (word == "done", serde_json::from_str(report).unwrap())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Two hosts that have exchanged their handles.
pub(crate) fn pair(cluster: &EmulatedCluster, scripts: [&Value; 2], env: &[(&str, &str)]) -> [Host; 2] {
    let mut hosts = ["0", "1"].map(|rank| {
        let i: usize = rank.parse().unwrap();
        let env: Vec<(&str, &str)> = env.iter().copied().chain([("R2CC_RANK", rank)]).collect();
        Host::start(cluster, &cluster.nodes()[i].name, scripts[i], &env)
    });
    exchange(&mut hosts);
    hosts
}

pub(crate) fn exchange(hosts: &mut [Host; 2]) {
    let handles = [hosts[0].until(&["handles"]), hosts[1].until(&["handles"])];
    hosts[0].tell(&handles[1]);
    hosts[1].tell(&handles[0]);
}
