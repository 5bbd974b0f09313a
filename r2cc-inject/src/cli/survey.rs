//! Looks at, and ends, the faults of all processes on this machine.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use r2cc_inject::{
    FaultStatus, Phase, audit,
    audit::{Audit, Entry, Event},
    monotonic_ns,
    observe::{self, SeenFault, Session},
    process::Process,
    watcher::{self, Record},
};
use serde::Serialize;
use tabled::{
    Table, Tabled,
    settings::{Style, style::HorizontalLine},
};

use super::{Exit, Failure, args::Format, say, talk};

/// A fault of any process, in whichever way it is carried out.
#[derive(Debug, Serialize)]
pub(super) struct Known {
    pub(super) fault: String,
    pub(super) state: Phase,
    pub(super) ports: Vec<String>,
    pub(super) owner_pid: u32,
    pub(super) expires_in_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<FaultStatus>,
}

impl Known {
    fn of_packets(seen: SeenFault) -> Self {
        Self {
            fault: if seen.label.is_empty() { "(not named)".to_owned() } else { seen.label },
            state: seen.status.phase(),
            ports: seen.ports,
            owner_pid: seen.owner_pid,
            expires_in_ms: expires_in_ms(seen.status.expires_at_ns),
            status: Some(seen.status),
        }
    }

    fn of_change(record: Record) -> Self {
        let lapsed = record.phase == Phase::Active && record.is_abandoned();
        Self {
            fault: record.fault.clone(),
            // Made, and nobody left to undo it: the lease is over, the fault is not.
            state: if lapsed { Phase::Active } else { record.phase },
            ports: record.changes.iter().map(|planned| planned.place.to_string()).collect(),
            owner_pid: record.controller.pid,
            expires_in_ms: expires_in_ms(record.expires_at_ns),
            status: None,
        }
    }
}

fn expires_in_ms(at_ns: u64) -> i64 {
    let left = i128::from(at_ns) - i128::from(monotonic_ns());
    i64::try_from(left / 1_000_000).unwrap_or(i64::MAX)
}

/// Every fault on this machine.
pub(super) fn known() -> Result<Vec<Known>, Failure> {
    let mut known = Vec::new();
    for session in sessions()? {
        known.extend(session.faults().into_iter().map(Known::of_packets));
    }
    for record in records()? {
        known.push(Known::of_change(record.1));
    }
    Ok(known)
}

fn sessions() -> Result<Vec<Session>, Failure> {
    observe::sessions()
        .map_err(|error| Failure::not_ready(format!("cannot list the kernel's programs: {error}\n  hint: run as root")))
}

fn records() -> Result<Vec<(std::path::PathBuf, Record)>, Failure> {
    let all = Record::all().map_err(Failure::not_ready)?;
    all.into_iter()
        .map(|(path, record)| {
            let record = record.map_err(|error| Failure::not_ready(format!("{}: {error}", path.display())))?;
            Ok((path, record))
        })
        .collect()
}

#[derive(Tabled)]
#[tabled(rename_all = "UPPERCASE")]
struct Row {
    fault: String,
    state: String,
    owner: u32,
    #[tabled(rename = "LEASE LEFT")]
    lease: String,
    #[tabled(rename = "DROPPED")]
    dropped: String,
    #[tabled(rename = "PASSED SINCE EXPIRY")]
    passed: String,
}

/// `r2cc-inject status`
pub(crate) fn status(format: Format) -> Result<Exit, Failure> {
    let known = known()?;
    if format == Format::Json {
        let text = serde_json::to_string_pretty(&known).map_err(|error| Failure::new(Exit::Internal, error))?;
        say(text);
        return Ok(Exit::Ok);
    }
    if known.is_empty() {
        say("No fault on this machine.");
        return Ok(Exit::Ok);
    }
    let rows = known.into_iter().map(|fault| {
        let ended = matches!(fault.state, Phase::Healed | Phase::Expired);
        let status = fault.status.as_ref();
        let (packets, bytes) = status.map_or((0, 0), |s| (s.packets_dropped.total(), s.bytes_dropped.total()));
        Row {
            fault: if fault.status.is_some() && fault.fault.starts_with('(') {
                format!("{} on {}", fault.fault, fault.ports.join(", "))
            } else {
                fault.fault
            },
            state: fault.state.to_string(),
            owner: fault.owner_pid,
            lease: if ended { "-".to_owned() } else { format!("{} ms", fault.expires_in_ms) },
            dropped: if status.is_some() { format!("{packets} packets, {bytes} B") } else { "-".to_owned() },
            passed: status.map_or("-".to_owned(), |s| format!("{} packets", s.passed_after_expiry)),
        }
    });
    let mut table = Table::new(rows);
    table.with(Style::blank().horizontals([(1, HorizontalLine::empty())]));
    say(table);
    Ok(Exit::Ok)
}

/// `r2cc-inject heal`
pub(crate) fn heal(pid: Option<u32>, log: &Path) -> Result<Exit, Failure> {
    let is_meant = |owner: u32| pid.is_none_or(|pid| pid == owner);
    let mut healed = Vec::new();
    let mut owners = Vec::new();
    // First the kernel's own switch: it needs nobody's help.
    for session in sessions()? {
        let faults = session.faults();
        if !faults.iter().any(|fault| is_meant(fault.owner_pid)) {
            continue;
        }
        session.heal();
        for fault in faults {
            if matches!(fault.status.phase(), Phase::Armed | Phase::Active) {
                healed.push(Known::of_packets(fault.clone()).fault);
            }
            if fault.owner_stops_on_sigterm {
                owners.extend(Process::of(fault.owner_pid));
            }
        }
    }
    let mut left_behind = Vec::new();
    for (_, record) in records()?.into_iter().filter(|(_, record)| is_meant(record.controller.pid)) {
        if record.ended_at_ns.is_none() {
            match record.undo() {
                Ok(()) => healed.push(record.fault.clone()),
                Err(error) => left_behind.push(error.to_string()),
            }
        }
        if record.controller.is_alive() {
            owners.push(record.controller);
        }
    }
    stop(&mut owners);
    // What the stopped owners have not removed themselves.
    let swept = watcher::sweep();
    for fault in &healed {
        say(format!("healed   {fault}"));
    }
    if healed.is_empty() {
        say("There was nothing to heal.");
    }
    if left_behind.is_empty()
        && let Err(error) = swept
    {
        left_behind.push(error.to_string());
    }
    let logged = Audit::open(log).and_then(|mut audit| {
        healed.iter().try_for_each(|fault| audit.append(&Entry::new(Event::HealedAll, fault)))?;
        left_behind.iter().try_for_each(|error| {
            let mut entry = Entry::new(Event::LeftBehind, "");
            entry.detail = Some(error.clone());
            audit.append(&entry)
        })
    });
    if !left_behind.is_empty() {
        return Err(Failure::new(Exit::LeftBehind, left_behind.join("\n")));
    }
    // Healing comes before logging; a log that cannot be written is said all the same.
    logged.map_err(|error| Failure::not_ready(format!("healed, but not logged: {error}")))?;
    Ok(Exit::Ok)
}

/// Asks the owners to end; one that does not (it is stopped itself) loses its programs.
fn stop(owners: &mut Vec<Process>) {
    owners.sort_by_key(|owner| owner.pid);
    owners.dedup();
    for owner in owners.iter() {
        if let Err(error) = owner.signal(libc::SIGTERM)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            talk(format!("warning: process {}: {error}", owner.pid));
        }
    }
    let end = Instant::now() + Duration::from_secs(2);
    while owners.iter().any(|owner| owner.is_alive()) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    owners.retain(|owner| owner.is_alive());
    for owner in owners.iter() {
        talk(format!("note: process {} does not end (is it stopped?); its programs are taken off", owner.pid));
        for session in observe::sessions().unwrap_or_default() {
            if session.faults().iter().any(|fault| fault.owner_pid == owner.pid)
                && let Err(error) = session.detach()
            {
                talk(format!("warning: {error}"));
            }
        }
    }
}

/// `r2cc-inject audit`
pub(crate) fn audit(last: Option<usize>, format: Format, log: &Path) -> Result<Exit, Failure> {
    let entries = audit::read(log).map_err(Failure::not_ready)?;
    let skip = last.map_or(0, |last| entries.len().saturating_sub(last));
    for entry in entries.iter().skip(skip) {
        match format {
            Format::Json => {
                let line = serde_json::to_string(entry).map_err(|error| Failure::new(Exit::Internal, error))?;
                say(line);
            }
            Format::Text => {
                let event = serde_json::to_value(entry.event).unwrap_or_default();
                let event = event.as_str().unwrap_or_default().to_owned();
                let stopped =
                    entry.status.as_ref().filter(|_| entry.event == Event::Ended).map_or_else(String::new, |status| {
                        format!("; stopped {} packets", status.packets_dropped.total())
                    });
                let detail = entry.detail.as_ref().map_or_else(String::new, |detail| format!(": {detail}"));
                say(format!(
                    "{} {event:<10} uid {} pid {} {}{detail}{stopped}",
                    entry.at, entry.uid, entry.pid, entry.fault
                ));
            }
        }
    }
    Ok(Exit::Ok)
}
