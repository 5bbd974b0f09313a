//! Link down and rate through the command line: undone in every way a fault can end.
//! Needs root.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use r2cc_inject::{
    process::Process,
    watcher::{Record, sweep},
};
use support::{Holder, Lab, ip, wait_until};

struct Site {
    lab: Lab,
    holder: Holder,
    folder: tempfile::TempDir,
}

fn program() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("r2cc-inject"));
    command.env_remove("SSH_CONNECTION").stdin(Stdio::null());
    command
}

impl Site {
    fn new() -> Self {
        let lab = Lab::new(1);
        let (holder, folder) = (lab.holder(), tempfile::tempdir().unwrap());
        std::fs::write(folder.path().join("allow.toml"), "interfaces = [\"node-1/nic0\"]\n").unwrap();
        Self { lab, holder, folder }
    }

    fn command(&self, fault: &str, more: &[&str]) -> Command {
        let mut command = program();
        command.args(["apply", fault, "--node", &format!("node-1={}", self.holder.0.id())]);
        command.arg("--allow").arg(self.folder.path().join("allow.toml"));
        command.arg("--audit-log").arg(self.folder.path().join("audit.jsonl")).args(more);
        command
    }

    /// A running `apply` whose change is made, its record, and its watcher.
    fn applied(&self, fault: &str, more: &[&str]) -> (Holder, PathBuf, Process) {
        let mut child = self.command(fault, more).stdout(Stdio::piped()).spawn().unwrap();
        let path = Record::path_for(Process::of(child.id()).unwrap(), 0);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with("fired")));
        let watcher = Record::read(&path).unwrap().watcher.unwrap();
        (Holder(child), path, watcher)
    }

    fn is_up(&self) -> bool {
        self.lab.shown("ip", "-o link show nic0").contains(",UP")
    }

    fn routes(&self) -> String {
        self.lab.shown("ip", "route show")
    }
}

fn signal(child: &Child, signal: i32) {
    Process::of(child.id()).unwrap().signal(signal).unwrap();
}

fn left_to_nobody(path: &Path, watcher: Process) {
    wait_until("the watcher has ended", || !watcher.is_alive());
    assert!(!path.exists());
}

#[test]
fn a_link_goes_down_and_comes_back_with_its_routes() {
    let site = Site::new();
    ip(&format!("-n {} route add 10.99.0.0/16 via 10.88.0.2", site.lab.here));
    ip(&format!("-n {} route add 10.98.0.0/16 dev nic0 src 10.88.0.1 metric 7", site.lab.here));
    let before = site.routes();
    let (mut apply, path, watcher) = site.applied("link-down@node-1/nic0 from now for 10min", &[]);
    assert!(!site.is_up());
    assert!(!site.routes().contains("10.99"));
    signal(&apply.0, libc::SIGTERM);
    assert_eq!(apply.0.wait().unwrap().code(), Some(130));
    assert!(site.is_up());
    assert_eq!(site.routes(), before);
    left_to_nobody(&path, watcher);
}

#[test]
fn a_link_down_lasts_as_long_as_it_says() {
    let site = Site::new();
    let status = site.command("link-down@node-1/nic0 from now for 300ms", &[]).stdout(Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(site.is_up());
}

#[test]
fn a_link_goes_down_once_the_port_has_received_so_many_bytes() {
    let site = Site::new();
    let fault = "link-down@node-1/nic0 from allreduce#1+100KiB at wire for 10min";
    let stream = site.lab.inbound(0);
    let (mut apply, path, watcher) = site.applied(fault, &[]);
    assert!(!site.is_up());
    signal(&apply.0, libc::SIGTERM);
    assert_eq!(apply.0.wait().unwrap().code(), Some(130));
    left_to_nobody(&path, watcher);
    stream.wait_for_more();
}

#[test]
fn the_watcher_undoes_when_the_controller_is_killed() {
    let site = Site::new();
    let (mut apply, path, watcher) = site.applied("link-down@node-1/nic0 from now for 10min", &["--lease", "1min"]);
    assert!(!site.is_up());
    signal(&apply.0, libc::SIGKILL);
    apply.0.wait().unwrap();
    left_to_nobody(&path, watcher);
    assert!(site.is_up());
}

#[test]
fn the_watcher_undoes_when_the_controller_is_stopped_and_no_sooner() {
    let site = Site::new();
    let (mut apply, path, watcher) = site.applied("link-down@node-1/nic0 from now for 10min", &["--lease", "500ms"]);
    let made = Record::read(&path).unwrap().made_at_ns.unwrap();
    wait_until("two leases are over", || r2cc_inject::monotonic_ns() > made + 1_100_000_000);
    assert!(!site.is_up(), "renewed, it outlives two leases");
    signal(&apply.0, libc::SIGSTOP);
    wait_until("the watcher has undone", || site.is_up());
    wait_until("it says so", || !watcher.is_alive());
    let record = Record::read(&path).unwrap();
    assert_eq!(record.phase, r2cc_inject::Phase::Expired);
    let shown = program().args(["status", "--format", "json"]).output().unwrap();
    let shown: Vec<serde_json::Value> = serde_json::from_slice(&shown.stdout).unwrap();
    let mine = shown.iter().find(|fault| fault["owner_pid"] == apply.0.id()).unwrap();
    assert_eq!(mine["state"], "expired");
    signal(&apply.0, libc::SIGCONT);
    assert_eq!(apply.0.wait().unwrap().code(), Some(70));
    assert!(!path.exists());
}

#[test]
fn the_controller_undoes_when_the_watcher_is_killed() {
    let site = Site::new();
    let (mut apply, path, watcher) = site.applied("link-down@node-1/nic0 from now for 10min", &[]);
    watcher.signal(libc::SIGKILL).unwrap();
    assert_eq!(apply.0.wait().unwrap().code(), Some(0));
    assert!(site.is_up());
    left_to_nobody(&path, watcher);
}

#[test]
fn the_next_start_undoes_what_killed_processes_left() {
    let site = Site::new();
    let (mut apply, path, watcher) = site.applied("link-down@node-1/nic0 from now for 10min", &["--lease", "1min"]);
    // both at once: stopped first, so that neither sees the other die
    watcher.signal(libc::SIGSTOP).unwrap();
    signal(&apply.0, libc::SIGKILL);
    apply.0.wait().unwrap();
    watcher.signal(libc::SIGKILL).unwrap();
    wait_until("both are dead", || Record::read(&path).is_ok_and(|record| record.is_abandoned()));
    assert!(!site.is_up());
    let doctor = program().arg("doctor").arg("--audit-log").arg(site.folder.path().join("a.jsonl")).output().unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    // another test's next start may have swept it meanwhile
    if path.exists() {
        assert_eq!(doctor.status.code(), Some(6), "{said}");
        assert!(said.contains("left behind: link-down@node-1/nic0"), "{said}");
    }
    sweep().unwrap();
    assert!(site.is_up());
    assert!(!path.exists());
}

#[test]
fn a_rate_replaces_a_tbf_and_the_old_one_comes_back() {
    let site = Site::new();
    let tbf =
        format!("-n {} qdisc add dev nic0 root handle 1: tbf rate 200mbit burst 128kb limit 250kb", site.lab.here);
    support::run("tc", &tbf.split(' ').collect::<Vec<_>>());
    let before = site.lab.shown("tc", "qdisc show dev nic0");
    let (apply, path, watcher) = site.applied("rate:20Mbit@node-1/nic0 from now for 10min", &[]);
    let during = site.lab.shown("tc", "qdisc show dev nic0");
    assert!(during.contains("rate 20Mbit"), "{during}");
    drop(apply); // killed
    left_to_nobody(&path, watcher);
    assert_eq!(site.lab.shown("tc", "qdisc show dev nic0"), before);
}

#[test]
fn a_rate_on_a_default_qdisc_leaves_the_default() {
    let site = Site::new();
    let before = site.lab.shown("tc", "qdisc show dev nic0");
    let status = site.command("rate:20Mbit@node-1/nic0 from now for 200ms", &[]).stdout(Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(0));
    assert_eq!(site.lab.shown("tc", "qdisc show dev nic0"), before);
}

#[test]
fn a_qdisc_that_could_not_be_put_back_is_not_replaced() {
    let site = Site::new();
    let htb = format!("-n {} qdisc add dev nic0 root handle 1: htb default 1", site.lab.here);
    support::run("tc", &htb.split(' ').collect::<Vec<_>>());
    let before = site.lab.shown("tc", "qdisc show dev nic0");
    let output = site.command("rate:20Mbit@node-1/nic0 from now for 200ms", &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("root qdisc htb"), "{said}");
    assert_eq!(site.lab.shown("tc", "qdisc show dev nic0"), before);
}

/// A cluster's state file; removed when dropped.
struct StateFile(PathBuf);

impl Drop for StateFile {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

#[test]
fn interfaces_of_a_running_cluster_need_no_allow_file_and_end_with_it() {
    let site = Site::new();
    let id = site.lab.here.clone();
    let state = StateFile(format!("/run/r2cc/cluster-{id}.json").into());
    std::fs::create_dir_all("/run/r2cc").unwrap();
    // the lab's near side plays the switch, its far side the node
    let text = serde_json::json!({
        "id": id, "pid": site.holder.0.id(), "more": "is left alone",
        "nodes": [{"name": "node-1", "netns": format!("/run/netns/{}", site.lab.there),
                   "nics": [{"name": "far0", "rail": "rail-1", "switch_port": "nic0"}]}],
        "switch": {"netns": format!("/run/netns/{}", site.lab.here)},
    });
    std::fs::write(&state.0, text.to_string()).unwrap();
    let plan = |fault: &str, place: &[&str]| {
        let output = program().args(["plan", fault]).args(place).output().unwrap();
        let both = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&both).into_owned())
    };
    let (code, said) = plan("drop@node-1/far0 from now for 1s", &["--cluster", &id]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("made by the emulated cluster {id}")), "{said}");
    let (code, said) = plan("drop@switch/rail-1 from now for 1s", &["--cluster", &id]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("switch/nic0"), "{said}");
    for (fault, wanted) in [
        ("drop@node-1/far9 from now for 1s", "has far0, mgmt0"),
        ("drop@node-2/far0 from now for 1s", "has the nodes node-1"),
        ("drop@switch/rail-9 from now for 1s", "has rail-1"),
    ] {
        let (code, said) = plan(fault, &["--cluster", &id]);
        assert_eq!((code, said.contains(wanted)), (Some(64), true), "{said}");
    }

    let stream = site.lab.inbound(0);
    let mut apply = program()
        .args(["apply", "drop@switch/rail-1 from now for run", "--max", "10min", "--cluster", &id])
        .arg("--audit-log")
        .arg(site.folder.path().join("audit.jsonl"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(apply.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("fired")));
    let mut site = site;
    site.holder.0.kill().unwrap();
    site.holder.0.wait().unwrap();
    assert_eq!(apply.wait().unwrap().code(), Some(0));
    assert!(lines.any(|line| line.unwrap().contains("the cluster has ended")));
    stream.wait_for_more();
    let (code, said) = plan("drop@node-1/far0 from now for 1s", &["--cluster", &id]);
    assert_eq!(code, Some(64), "{said}");
}
