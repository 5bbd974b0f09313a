//! The command line: texts, exit codes, default deny, and faults that end in every way.
//! Needs root.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Output, Stdio},
    time::Duration,
};

use r2cc_inject::{FaultStatus, monotonic_ns};
use support::{Holder, Lab, traces, wait_until};

fn program() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("r2cc-inject"));
    command.env_remove("SSH_CONNECTION").stdin(Stdio::null());
    command
}

/// A lab with a process in it, an allow file for all its ports, and an audit log.
struct Site {
    lab: Lab,
    holder: Holder,
    folder: tempfile::TempDir,
}

impl Site {
    fn new(pairs: u32) -> Self {
        let lab = Lab::new(pairs);
        let (holder, folder) = (lab.holder(), tempfile::tempdir().unwrap());
        let names: Vec<String> = (0..pairs).map(|i| format!("\"node-1/nic{i}\"")).collect();
        std::fs::write(folder.path().join("allow.toml"), format!("interfaces = [{}]\n", names.join(", "))).unwrap();
        Self { lab, holder, folder }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("audit.jsonl")
    }

    /// The command for this site, without `--allow`.
    fn denied(&self, command: &str, fault: &str) -> Command {
        let mut all = program();
        all.args([command, fault, "--node", &format!("node-1={}", self.holder.0.id())]);
        all.arg("--audit-log").arg(self.log());
        all
    }

    fn command(&self, command: &str, fault: &str) -> Command {
        let mut all = self.denied(command, fault);
        all.arg("--allow").arg(self.folder.path().join("allow.toml"));
        all
    }

    fn events(&self) -> Vec<String> {
        r2cc_inject::audit::read(&self.log()).unwrap().iter().map(|entry| format!("{:?}", entry.event)).collect()
    }

    fn heal(&self, pid: u32) -> Output {
        let mut heal = program();
        heal.args(["heal", "--pid", &pid.to_string(), "--audit-log"]).arg(self.log());
        heal.output().unwrap()
    }
}

/// A running `apply`; killed when dropped.
struct Apply {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Apply {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Reads its output up to a line that starts so.
    fn wait_for(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            let n = self.lines.read_line(&mut line).unwrap();
            assert!(n > 0, "it ended before it said {start}: {}", self.complaint());
            if line.starts_with(start) {
                return line;
            }
        }
    }

    fn complaint(&mut self) -> String {
        let mut text = String::new();
        std::io::Read::read_to_string(self.child.stderr.as_mut().unwrap(), &mut text).unwrap();
        text
    }

    fn signal(&self, signal: i32) {
        // SAFETY: signals a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), signal) }, 0);
    }

    fn exit_code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// The first fault of this process, as another process sees it.
    fn seen(&self) -> Option<serde_json::Value> {
        let output = program().args(["status", "--format", "json"]).output().unwrap();
        let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        all.into_iter().find(|fault| fault["owner_pid"] == self.child.id())
    }

    fn state(&self) -> String {
        self.seen().map_or("gone".to_owned(), |fault| fault["state"].as_str().unwrap().to_owned())
    }

    fn packet_status(&self) -> FaultStatus {
        serde_json::from_value(self.seen().unwrap()["status"].clone()).unwrap()
    }
}

impl Drop for Apply {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn text(output: &Output) -> (Option<i32>, String) {
    let both = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&both).into_owned())
}

#[test]
fn help_lists_the_commands_and_the_exit_codes() {
    let (code, help) = text(&program().arg("--help").output().unwrap());
    assert_eq!(code, Some(0));
    for word in ["plan", "apply", "status", "heal", "doctor", "audit", "6 a fault was left behind"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    assert!(!help.contains("watch "), "{help}");
    let (_, help) = text(&program().args(["apply", "--help"]).output().unwrap());
    assert!(help.contains("KIND[:ARG]@NODE/NIC[/rx|/tx]"), "{help}");
}

#[test]
fn what_cannot_be_meant_is_usage_and_says_where() {
    for (arguments, wanted) in [
        (vec!["apply"], "<FAULT>"),
        (vec!["plan", "dorp@localhost/x from now for 1s"], "\"drop\""),
        (vec!["plan", "drop@localhost/x from now for run"], "--max DURATION"),
        (vec!["plan", "drop@localhost/x from allreduce#3 for 1s"], "--pid PID"),
        (vec!["plan", "drop@localhost/x from allreduce#3+5% at wire for 1s"], "--collective-bytes"),
        (vec!["plan", "drop@node-7/x from now for 1s"], "no such node"),
        (vec!["plan", "drop@node-7/x from now for 1s", "--cluster", "none-such"], "no cluster none-such"),
        (vec!["plan", "drop@switch/rail-1 from now for 1s"], "--cluster"),
        (vec!["plan", "drop@a/b from now for 1s", "--lease", "1h"], "100ms to 1min"),
        (vec!["heal"], "--all"),
    ] {
        let (code, said) = text(&program().args(&arguments).output().unwrap());
        assert_eq!(code, Some(64), "{arguments:?}: {said}");
        assert!(said.contains(wanted), "{arguments:?}: {said}");
    }
}

#[test]
fn an_interface_that_nothing_allows_is_refused_and_the_refusal_logged() {
    let site = Site::new(1);
    let fault = "drop@node-1/nic0 from now for 1s";
    for command in ["plan", "apply"] {
        let (code, said) = text(&site.denied(command, fault).output().unwrap());
        assert_eq!(code, Some(64), "{said}");
        assert!(said.contains("may not be touched") && said.contains("allow.toml"), "{said}");
    }
    assert_eq!(site.events(), ["Refused"]);
    assert!(!traces(&site.lab).contains("xdp"));
    let (code, said) = text(&site.command("plan", fault).output().unwrap());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("Nothing was changed."), "{said}");
    let (code, said) = text(&site.command("plan", "drop@node-1/far0 from now for 1s").output().unwrap());
    assert_eq!(code, Some(64), "{said}");
}

#[test]
fn the_default_route_and_the_ssh_connection_are_not_cut_unless_forced() {
    let site = Site::new(2);
    support::ip(&format!("-n {} route add default via 10.88.0.2", site.lab.here));
    for (nic, ssh, wanted) in [("nic0", "", "the default route"), ("nic1", "1.2.3.4 5 10.88.1.1 22", "SSH")] {
        let mut plan = site.command("plan", &format!("drop@node-1/{nic} from now for 1s"));
        let (code, said) = text(&plan.env("SSH_CONNECTION", ssh).output().unwrap());
        assert_eq!(code, Some(64), "{said}");
        assert!(said.contains(wanted) && said.contains("--danger-default-route"), "{said}");
        let (code, said) = text(&plan.arg("--danger-default-route").output().unwrap());
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn a_drop_lasts_as_long_as_it_says_and_is_logged_with_its_counters() {
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    let output = site.command("apply", "drop@node-1/nic0 from now for 400ms").output().unwrap();
    let (code, said) = text(&output);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("armed") && said.contains("it stopped"), "{said}");
    assert!(!said.contains("it stopped nothing"), "{said}");
    stream.wait_for_more();
    assert_eq!(site.events(), ["Armed", "Fired", "Ended"]);
    let ended = &r2cc_inject::audit::read(&site.log()).unwrap()[2];
    let status = ended.status.as_ref().unwrap();
    assert!(status.healed_at_ns.unwrap() - status.fired_at_ns.unwrap() >= 400_000_000);
    assert!(status.packets_dropped.rx > 0 && ended.counters[0].rx_passed.packets > 0);
    let mut audit = program();
    let (_, shown) = text(&audit.args(["audit", "--last", "1", "--audit-log"]).arg(site.log()).output().unwrap());
    assert!(shown.contains("ended") && shown.lines().count() == 1, "{shown}");
    assert!(!traces(&site.lab).contains("xdp"));
}

#[test]
fn a_signal_heals_and_exits_130() {
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut apply = Apply::start(site.command("apply", "drop@node-1/nic0 from now for 10min"));
        apply.wait_for("fired");
        assert_eq!(apply.state(), "active");
        apply.signal(signal);
        assert_eq!(apply.exit_code(), Some(130));
        stream.wait_for_more();
        assert!(!traces(&site.lab).contains("xdp"));
    }
}

#[test]
fn a_stopped_controller_s_drop_ends_with_its_lease_and_a_running_one_s_does_not() {
    const LEASE_NS: u64 = 500_000_000;
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    let mut command = site.command("apply", "drop@node-1/nic0 from now for 10min");
    command.args(["--lease", "500ms"]);
    let mut apply = Apply::start(command);
    apply.wait_for("fired");
    let fired = apply.packet_status().fired_at_ns.unwrap();
    // first without the stop: it outlives two leases
    wait_until("two leases are over", || monotonic_ns() > fired + 2 * LEASE_NS + LEASE_NS / 5);
    let before = apply.packet_status();
    assert_eq!(apply.state(), "active");
    assert_eq!(before.passed_after_expiry, 0);
    wait_until("it still drops", || apply.packet_status().packets_dropped.rx > before.packets_dropped.rx);

    apply.signal(libc::SIGSTOP);
    let stopped = monotonic_ns();
    stream.wait_for_more();
    assert_eq!(apply.state(), "expired");
    let status = apply.packet_status();
    assert!(status.expires_at_ns < stopped + LEASE_NS + LEASE_NS / 10);
    assert!(status.passed_after_expiry > 0);
    assert!(traces(&site.lab).contains("xdp"), "the program is still attached");
    let (_, table) = text(&program().arg("status").output().unwrap());
    assert!(table.contains("expired"), "{table}");

    apply.signal(libc::SIGCONT);
    assert_eq!(apply.exit_code(), Some(70));
    assert!(apply.complaint().contains("the lease ran out"));
    stream.wait_for_more();
}

#[test]
fn killing_the_controller_heals_a_drop() {
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    let mut apply = Apply::start(site.command("apply", "drop@node-1/nic0 from now for 10min"));
    apply.wait_for("fired");
    apply.signal(libc::SIGKILL);
    apply.exit_code();
    stream.wait_for_more();
    assert_eq!(apply.state(), "gone");
    assert!(!traces(&site.lab).contains("xdp"));
}

#[test]
fn heal_ends_a_drop_of_a_process_that_is_stopped() {
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    let mut command = site.command("apply", "drop@node-1/nic0 from now for 10min");
    command.args(["--lease", "1min"]);
    let mut apply = Apply::start(command);
    apply.wait_for("fired");
    apply.signal(libc::SIGSTOP);
    let (code, said) = text(&site.heal(apply.child.id()));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("healed   drop@node-1/nic0 from now for 10min"), "{said}");
    stream.wait_for_more();
    assert!(!traces(&site.lab).contains("xdp"));
    apply.signal(libc::SIGCONT);
    assert_eq!(apply.exit_code(), Some(130));
    assert!(site.events().contains(&"HealedAll".to_owned()));
}

#[test]
fn a_position_waits_for_its_bytes() {
    let site = Site::new(1);
    let mut command = site.command("apply", "drop@node-1/nic0 from allreduce#3+50% at wire for 200ms");
    command.args(["--collective-bytes", "100000", "--format", "json"]);
    let mut apply = Apply::start(command);
    apply.wait_for("{");
    assert_eq!(apply.state(), "armed");
    let stream = site.lab.inbound(0);
    let fired: serde_json::Value = serde_json::from_str(&apply.wait_for("{")).unwrap();
    assert_eq!(fired["event"], "fired");
    let status: FaultStatus = serde_json::from_value(fired["status"].clone()).unwrap();
    assert!((250_000..250_000 + 65_600).contains(&status.bytes_before), "{}", status.bytes_before);
    assert_eq!(apply.exit_code(), Some(0));
    stream.wait_for_more();
}

#[test]
fn after_a_time_means_not_before() {
    let site = Site::new(1);
    let begin = monotonic_ns();
    let mut command = site.command("apply", "drop@node-1/nic0 from after 300ms for 100ms");
    let mut apply = Apply::start({
        command.args(["--format", "json"]);
        command
    });
    apply.wait_for("{");
    let fired: serde_json::Value = serde_json::from_str(&apply.wait_for("{")).unwrap();
    assert!(fired["status"]["fired_at_ns"].as_u64().unwrap() - begin >= 300_000_000);
    assert_eq!(apply.exit_code(), Some(0));
    assert!(Duration::from_nanos(monotonic_ns() - begin) >= Duration::from_millis(400));
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn r2cc_inject_cli_test_call(id: u64) -> u64 {
    std::hint::black_box(id)
}

#[test]
fn a_fault_begins_and_ends_at_calls_of_a_process() {
    let site = Site::new(1);
    let stream = site.lab.inbound(0);
    let mut command = site.command("apply", "drop@node-1/nic0 from allreduce#2 until allreduce#4");
    command.args(["--max", "10min", "--symbol", "r2cc_inject_cli_test_call", "--arg0", "1"]);
    command.args(["--pid", &std::process::id().to_string()]);
    let mut apply = Apply::start(command);
    apply.wait_for("armed");
    r2cc_inject_cli_test_call(1);
    stream.wait_for_more();
    assert_eq!(apply.state(), "armed");
    r2cc_inject_cli_test_call(1);
    assert_eq!(apply.state(), "active");
    wait_until("it drops", || apply.packet_status().packets_dropped.rx > 0);
    r2cc_inject_cli_test_call(1);
    assert_eq!(apply.state(), "active");
    r2cc_inject_cli_test_call(1);
    stream.wait_for_more();
    assert_eq!(apply.exit_code(), Some(0));
}
