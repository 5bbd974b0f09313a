//! Whether this machine can run the bench, found out by doing it.
//!
//! Owns the list of checks: rights and kernel, a small cluster really built, the injector really
//! attached to one of its ports, limits of the machine, and what earlier runs left. Changes
//! nothing that outlives it and repairs nothing: each line says what would. Start at [`examine`].

use std::fs;
use std::path::{Path, PathBuf};

use r2cc_inject::observe;
use r2cc_inject::watcher::Record;
use r2cc_inject::{Injector, Phase, PortSpec};
use serde::{Deserialize, Serialize};

use crate::cluster::{self, ClusterSpec, EmulatedCluster, Fabric};

/// TCX, which the injector attaches to, is this old.
const KERNEL_MIN: (u32, u32) = (6, 6);
/// Bits of `CapEff` in `/proc/self/status`.
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;
const DISK_MIN_BYTES: u64 = 64 << 20;
const DISK_GOOD_BYTES: u64 = 1 << 30;
/// What the kernel sets by default; holds 10 ms of 170 Mbit/s.
const SOCKET_BUFFER_MIN_BYTES: u64 = 212_992;
/// Reading any other clock costs a system call or a slow device access.
const FAST_CLOCKS: [&str; 5] =
    ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "riscv_clocksource"];

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// As it should be.
    Ok,
    /// Runs work, with a limit.
    Warn,
    /// Runs cannot work, or something was left behind.
    Fail,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorLine {
    /// What was looked at.
    pub check: String,
    /// How it came out.
    pub health: Health,
    /// What was found.
    pub found: String,
    /// What to do about it; `None` when nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Examines the machine; `results` is where runs will write.
pub fn examine(results: &Path) -> Vec<DoctorLine> {
    let mut lines = vec![kernel(), rights(), type_information(), uprobes()];
    let cluster = EmulatedCluster::build(&ClusterSpec::uniform(2, &["nic0"], Some(100_000_000), Fabric::Any));
    lines.push(match &cluster {
        Ok(_) => ok("emulated cluster", "namespaces, veth, bridge, tbf and policy routing work"),
        Err(error) => from_error("emulated cluster", error),
    });
    lines.push(injector(cluster.as_ref().ok()));
    drop(cluster);
    lines.extend([disk(results), socket_buffers(), clock(), cores()]);
    lines.extend([leftover_clusters(), leftover_faults()]);
    lines
}

/// The worst of all lines.
pub fn overall(lines: &[DoctorLine]) -> Health {
    lines.iter().map(|line| line.health).max().unwrap_or(Health::Ok)
}

fn kernel() -> DoctorLine {
    let check = "kernel";
    let Some(release) = read("/proc/sys/kernel/osrelease") else {
        return fail(check, "unknown version", "mount /proc");
    };
    match version(&release) {
        Some(version) if version >= KERNEL_MIN => ok(check, format!("Linux {release}")),
        _ => fail(
            check,
            format!("Linux {release}"),
            format!("Linux {}.{} or later, for the injector's TCX programs", KERNEL_MIN.0, KERNEL_MIN.1),
        ),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|byte: char| !byte.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn rights() -> DoctorLine {
    let check = "rights";
    let status = read("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let Some(effective) = effective else {
        return fail(check, "unknown capabilities", "mount /proc");
    };
    let missing = missing_capabilities(effective);
    if missing.is_empty() {
        ok(check, "CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON")
    } else {
        fail(check, format!("missing {}", missing.join(", ")), "run as root; in a container, start it privileged")
    }
}

fn missing_capabilities(effective: u64) -> Vec<&'static str> {
    let has = |bit: u32| effective >> bit & 1 == 1;
    let admin = has(CAP_SYS_ADMIN);
    [
        ("CAP_SYS_ADMIN", admin),
        ("CAP_NET_ADMIN", has(CAP_NET_ADMIN)),
        // The kernel takes CAP_SYS_ADMIN for these two as well.
        ("CAP_BPF", admin || has(CAP_BPF)),
        ("CAP_PERFMON", admin || has(CAP_PERFMON)),
    ]
    .into_iter()
    .filter_map(|(name, held)| (!held).then_some(name))
    .collect()
}

fn type_information() -> DoctorLine {
    let path = "/sys/kernel/btf/vmlinux";
    match fs::metadata(path) {
        Ok(found) => ok("kernel types (BTF)", format!("{} KiB", found.len() / 1024)),
        Err(error) => fail(
            "kernel types (BTF)",
            format!("{path}: {error}"),
            "a kernel with CONFIG_DEBUG_INFO_BTF, and /sys mounted",
        ),
    }
}

fn uprobes() -> DoctorLine {
    let path = "/sys/bus/event_source/devices/uprobe/type";
    match read(path) {
        Some(_) => ok("uprobes", "available: faults can start at an exact call"),
        None => fail("uprobes", format!("no {path}"), "a kernel with CONFIG_UPROBE_EVENTS, and /sys mounted"),
    }
}

fn injector(cluster: Option<&EmulatedCluster>) -> DoctorLine {
    let check = "injector";
    let port = cluster.and_then(|cluster| {
        let node = cluster.nodes().first()?;
        let nic = node.nics.first()?;
        Some(PortSpec {
            node: node.name.clone(),
            nic: nic.name.clone(),
            netns: Some(cluster.switch_netns()),
            ifname: nic.switch_port.clone(),
        })
    });
    match port.map(|port| Injector::attach(&[port])) {
        Some(Ok(_)) => ok(check, "generic XDP and TCX programs load and attach"),
        Some(Err(error)) => from_error(check, &error),
        None => fail(check, "not tried without a cluster", "mend the emulated cluster first"),
    }
}

fn disk(results: &Path) -> DoctorLine {
    let check = "disk";
    let results = std::path::absolute(results).unwrap_or_else(|_| results.to_owned());
    // The folder itself may not exist yet.
    let Some(existing) = results.ancestors().find(|ancestor| ancestor.exists()) else {
        return fail(check, format!("no {}", results.display()), "name another folder with --out");
    };
    match nix::sys::statvfs::statvfs(existing) {
        Ok(space) => free_space(existing, space.blocks_available() * space.fragment_size()),
        Err(errno) => fail(check, format!("{}: {errno}", existing.display()), "name another folder with --out"),
    }
}

fn free_space(folder: &Path, bytes: u64) -> DoctorLine {
    let found = format!("{} MiB free in {}", bytes >> 20, folder.display());
    let fix = "make room, or name another folder with --out";
    match bytes {
        DISK_GOOD_BYTES.. => ok("disk", found),
        DISK_MIN_BYTES.. => warn("disk", found, fix),
        _ => fail("disk", found, fix),
    }
}

fn socket_buffers() -> DoctorLine {
    let limit = |name: &str| read(&format!("/proc/sys/net/core/{name}")).and_then(|text| text.parse().ok());
    match (limit("wmem_max"), limit("rmem_max")) {
        (Some(send), Some(receive)) => buffer_limits(send, receive),
        _ => warn("socket buffers", "unknown limits", "mount /proc"),
    }
}

fn buffer_limits(send: u64, receive: u64) -> DoctorLine {
    let check = "socket buffers";
    let rate_mbit_s = send.min(receive) * 8 * 100 / 1_000_000;
    let found = format!("wmem_max {send}, rmem_max {receive}: 10 ms of a path at {rate_mbit_s} Mbit/s");
    if send.min(receive) >= SOCKET_BUFFER_MIN_BYTES {
        ok(check, found)
    } else {
        warn(check, found, "sysctl -w net.core.wmem_max=4194304 net.core.rmem_max=4194304")
    }
}

fn clock() -> DoctorLine {
    match read("/sys/devices/system/clocksource/clocksource0/current_clocksource") {
        Some(name) if FAST_CLOCKS.contains(&name.as_str()) => ok("clock", name),
        Some(name) => warn("clock", format!("{name}: slow to read"), "boot with clocksource=tsc where it is stable"),
        None => warn("clock", "unknown source", "mount /sys"),
    }
}

fn cores() -> DoctorLine {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => warn("cores", "1", "two or more, or timing checks are advisory only"),
        several => ok("cores", several.to_string()),
    }
}

fn leftover_clusters() -> DoctorLine {
    match cluster::survey() {
        Ok(survey) => clusters_left(&survey),
        Err(error) => from_error("earlier clusters", &error),
    }
}

fn clusters_left(survey: &cluster::Survey) -> DoctorLine {
    let check = "earlier clusters";
    if !survey.orphans.is_empty() {
        let found: Vec<String> = survey
            .orphans
            .iter()
            .map(|orphan| format!("{} (pid {}) in {} of {}", orphan.command, orphan.pid, orphan.node, orphan.cluster))
            .collect();
        let pids: Vec<String> = survey.orphans.iter().map(|orphan| orphan.pid.to_string()).collect();
        let found = format!("processes of benches that are gone: {}", found.join(", "));
        return fail(check, found, format!("end them: kill {}", pids.join(" ")));
    }
    if !survey.stale.is_empty() {
        let files: Vec<String> =
            survey.stale.iter().map(PathBuf::as_path).map(|path| path.display().to_string()).collect();
        return warn(
            check,
            format!("state files of benches that are gone: {}", files.join(", ")),
            "the next run removes them",
        );
    }
    match survey.running.len() {
        0 => ok(check, "none left"),
        running => ok(check, format!("none left; {running} running")),
    }
}

fn leftover_faults() -> DoctorLine {
    match observe::sessions() {
        Ok(sessions) => {
            let seen = sessions.iter().flat_map(observe::Session::faults);
            let mut faults: Vec<OwnedFault> = seen
                .map(|fault| OwnedFault { phase: fault.status.phase(), owner_pid: fault.owner_pid, label: fault.label })
                .collect();
            match changes() {
                Ok(changes) => faults.extend(changes),
                Err(error) => return fail("earlier faults", format!("cannot look: {error}"), "look into /run/r2cc"),
            }
            faults_left(&faults, |pid| Path::new(&format!("/proc/{pid}")).exists())
        }
        Err(error) => fail("earlier faults", format!("cannot look: {error}"), "run as root"),
    }
}

/// Changes by netlink that are made and not undone.
fn changes() -> std::io::Result<Vec<OwnedFault>> {
    let mut changes = Vec::new();
    for (_, record) in Record::all()? {
        let record = record?;
        if record.is_in_force() {
            changes.push(OwnedFault { phase: Phase::Active, owner_pid: record.controller.pid, label: record.fault });
        }
    }
    Ok(changes)
}

/// What decides whether a fault was left behind.
struct OwnedFault {
    label: String,
    owner_pid: u32,
    phase: Phase,
}

fn faults_left(faults: &[OwnedFault], alive: impl Fn(u32) -> bool) -> DoctorLine {
    let check = "earlier faults";
    let told = |wanted: &dyn Fn(&OwnedFault) -> bool| -> Vec<String> {
        let wanted = faults.iter().filter(|fault| wanted(fault));
        wanted.map(|fault| format!("{} (pid {}, {})", fault.label, fault.owner_pid, fault.phase)).collect()
    };
    let is_left = |fault: &OwnedFault| match fault.phase {
        Phase::Healed => false,
        // Its owner should have healed it, renewed it, or gone.
        Phase::Expired => true,
        Phase::Armed | Phase::Active => !alive(fault.owner_pid),
    };
    let left = told(&is_left);
    if !left.is_empty() {
        return fail(check, left.join(", "), "r2cc-inject heal --all");
    }
    let in_use = told(&|fault| matches!(fault.phase, Phase::Armed | Phase::Active));
    match in_use.as_slice() {
        [] => ok(check, "none left"),
        in_use => ok(check, format!("none left; in use: {}", in_use.join(", "))),
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Errors of ours carry their remedy after `hint:`.
fn from_error(check: &str, error: &dyn std::error::Error) -> DoctorLine {
    let text = error.to_string();
    match text.split_once("hint:") {
        Some((found, fix)) => fail(check, found.trim(), fix.trim()),
        None => DoctorLine { check: check.to_owned(), health: Health::Fail, found: text, fix: None },
    }
}

fn ok(check: &str, found: impl Into<String>) -> DoctorLine {
    DoctorLine { check: check.to_owned(), health: Health::Ok, found: found.into(), fix: None }
}

fn warn(check: &str, found: impl Into<String>, fix: impl Into<String>) -> DoctorLine {
    DoctorLine { check: check.to_owned(), health: Health::Warn, found: found.into(), fix: Some(fix.into()) }
}

fn fail(check: &str, found: impl Into<String>, fix: impl Into<String>) -> DoctorLine {
    DoctorLine { health: Health::Fail, ..warn(check, found, fix) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Orphan, Survey};

    #[test]
    fn a_machine_that_runs_these_tests_as_root_can_run_the_bench() {
        let lines = examine(Path::new("results/not-there-yet"));
        for check in ["kernel", "rights", "emulated cluster", "injector", "uprobes", "kernel types (BTF)"] {
            let line = lines.iter().find(|line| line.check == check).unwrap();
            assert_eq!(line.health, Health::Ok, "{line:?}");
            assert_eq!(line.fix, None);
        }
        assert!(lines.iter().filter(|line| line.health != Health::Ok).all(|line| line.fix.is_some()), "{lines:?}");
    }

    #[test]
    fn without_rights_the_failing_lines_say_what_to_do() {
        let lines = std::thread::spawn(|| {
            // SAFETY: the bare system call changes the identity of this thread alone, which ends here.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(changed, 0);
            examine(Path::new("/"))
        });
        let lines = lines.join().unwrap();
        for check in ["emulated cluster", "injector"] {
            let line = lines.iter().find(|line| line.check == check).unwrap();
            assert_eq!(line.health, Health::Fail, "{line:?}");
            assert!(line.fix.is_some(), "{line:?}");
        }
        assert_eq!(overall(&lines), Health::Fail);
    }

    #[test]
    fn kernel_versions_compare_by_number() {
        assert_eq!(version("6.18.44-fc-v595"), Some((6, 18)));
        assert!(version("6.10.1").unwrap() > version("6.6.0").unwrap());
        assert!(version("5.15.0-91-generic").unwrap() < KERNEL_MIN);
        assert_eq!(version("unknown"), None);
    }

    #[test]
    fn missing_capabilities_are_named_and_sys_admin_stands_for_bpf() {
        assert!(missing_capabilities(u64::MAX).is_empty());
        assert!(missing_capabilities(1 << CAP_SYS_ADMIN | 1 << CAP_NET_ADMIN).is_empty());
        let bpf_alone = missing_capabilities(1 << CAP_BPF);
        assert_eq!(bpf_alone, ["CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_PERFMON"]);
    }

    #[test]
    fn limits_turn_at_their_thresholds() {
        let disk = |bytes| free_space(Path::new("/"), bytes).health;
        assert_eq!(disk(DISK_GOOD_BYTES), Health::Ok);
        assert_eq!(disk(DISK_GOOD_BYTES - 1), Health::Warn);
        assert_eq!(disk(DISK_MIN_BYTES - 1), Health::Fail);
        assert_eq!(buffer_limits(SOCKET_BUFFER_MIN_BYTES, u64::MAX / 800).health, Health::Ok);
        assert_eq!(buffer_limits(SOCKET_BUFFER_MIN_BYTES - 1, 1 << 30).health, Health::Warn);
        assert!(buffer_limits(1_250_000, 1_250_000).found.contains("1000 Mbit/s"));
    }

    #[test]
    fn orphans_fail_and_stale_files_warn() {
        let mut survey = Survey::default();
        assert_eq!(clusters_left(&survey).health, Health::Ok);
        survey.stale.push(PathBuf::from("/run/r2cc/cluster-7-1.json"));
        assert_eq!(clusters_left(&survey).health, Health::Warn);
        survey.orphans.push(Orphan {
            cluster: "7-1".to_owned(),
            node: "node-1".to_owned(),
            pid: 4242,
            command: "sleep".to_owned(),
        });
        let line = clusters_left(&survey);
        assert_eq!(line.health, Health::Fail);
        assert_eq!(line.fix.as_deref(), Some("end them: kill 4242"));
    }

    #[test]
    fn a_fault_is_left_when_it_expired_or_its_owner_is_gone() {
        let fault =
            |owner_pid, phase| OwnedFault { label: "drop@node-1/nic0 from now for run".to_owned(), owner_pid, phase };
        let health = |faults: &[OwnedFault]| faults_left(faults, |pid| pid == 1).health;
        assert_eq!(health(&[]), Health::Ok);
        assert_eq!(health(&[fault(1, Phase::Active), fault(2, Phase::Healed)]), Health::Ok);
        assert_eq!(health(&[fault(2, Phase::Active)]), Health::Fail);
        assert_eq!(health(&[fault(1, Phase::Expired)]), Health::Fail);
    }

    #[test]
    fn lines_are_stable_json() {
        let line = warn("clock", "hpet: slow to read", "boot with tsc");
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"check":"clock","health":"warn","found":"hpet: slow to read","fix":"boot with tsc"}"#);
        assert_eq!(serde_json::from_str::<DoctorLine>(&text).unwrap(), line);
    }
}
