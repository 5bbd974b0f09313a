//! Checks what this machine can do, by doing it in a namespace made for the purpose, and
//! that no fault was left behind.

use std::path::Path;

use nix::sched::{CloneFlags, unshare};
use r2cc_inject::{
    Injector, Phase, PortSpec,
    policy::{ALLOW_PATH, Allow, Cluster},
    watcher::Record,
};

use super::{Exit, Failure, say, survey};

struct Checks(Vec<(bool, String)>);

impl Checks {
    fn add(&mut self, what: &str, result: Result<String, String>) {
        match result {
            Ok(found) => self.0.push((true, format!("{what}: {found}"))),
            Err(problem) => self.0.push((false, format!("{what}: {problem}"))),
        }
    }
}

/// `r2cc-inject doctor`
pub(crate) fn doctor(allow: Option<&Path>, log: &Path) -> Result<Exit, Failure> {
    let mut checks = Checks(Vec::new());
    checks.add("kernel", kernel());
    checks.add("packet programs", packet_programs());
    checks.add("call probes", call_probes());
    checks.add("audit log", audit_log(log));
    for path in [Some(Path::new(ALLOW_PATH)), allow].into_iter().flatten() {
        let is_given = allow == Some(path);
        if is_given || path.exists() {
            let read = Allow::read(path).map_err(|error| error.to_string());
            checks.add(
                "allow file",
                read.map(|file| format!("{}, {} interfaces", path.display(), file.interfaces.len())),
            );
        }
    }
    let clusters = Cluster::all().map_err(|error| error.to_string());
    checks.add("emulated clusters", clusters.map(|all| format!("{} running", all.len())));
    let ready = checks.0.iter().all(|(good, _)| *good);

    let left = left_behind()?;
    for (good, line) in &checks.0 {
        say(format!("{} {line}", if *good { "ok  " } else { "FAIL" }));
    }
    for fault in survey::known()? {
        if matches!(fault.state, Phase::Armed | Phase::Active) {
            say(format!("note {} is {}, owner {}", fault.fault, fault.state, fault.owner_pid));
        }
    }
    for fault in &left {
        say(format!("FAIL left behind: {fault}\n  hint: r2cc-inject heal --all"));
    }
    if !left.is_empty() {
        return Ok(Exit::LeftBehind);
    }
    say("ok   no fault was left behind");
    Ok(if ready { Exit::Ok } else { Exit::NotReady })
}

/// Changes on record whose owners are dead. Programs cannot be left: they end with them.
fn left_behind() -> Result<Vec<String>, Failure> {
    let all = Record::all().map_err(Failure::not_ready)?;
    Ok(all
        .into_iter()
        .filter_map(|(path, record)| match record {
            Ok(record) if record.is_abandoned() && record.ended_at_ns.is_none() => Some(record.fault),
            Ok(_) => None,
            Err(error) => Some(format!("{}: {error}", path.display())),
        })
        .collect())
}

fn kernel() -> Result<String, String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|error| error.to_string())?;
    let release = release.trim();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 6) {
        return Err(format!("Linux {release}; TCX needs 6.6"));
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err(format!("Linux {release} without BTF (CONFIG_DEBUG_INFO_BTF)"));
    }
    Ok(format!("Linux {release} with BTF"))
}

fn packet_programs() -> Result<String, String> {
    let attach = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|error| format!("cannot make a network namespace: {error}; run as root"))?;
        let port = PortSpec { node: "doctor".into(), nic: "lo".into(), netns: None, ifname: "lo".into() };
        Injector::attach(&[port]).map(drop).map_err(|error| error.to_string())
    };
    std::thread::spawn(attach).join().unwrap_or_else(|_| Err("the check itself failed".to_owned()))?;
    Ok("load and attach, XDP and TCX".to_owned())
}

fn call_probes() -> Result<String, String> {
    let path = "/sys/bus/event_source/devices/uprobe/type";
    std::fs::read_to_string(path)
        .map(|_| "uprobes are there".to_owned())
        .map_err(|error| format!("no uprobes in this kernel ({path}: {error}); faults cannot wait for a call"))
}

fn audit_log(log: &Path) -> Result<String, String> {
    r2cc_inject::audit::Audit::open(log)
        .map(|_| format!("{} can be written", log.display()))
        .map_err(|error| error.to_string())
}
