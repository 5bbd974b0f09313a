//! What the ranks say of themselves: their event files, read after the run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use r2cc::control::{Component, PathHealth, ViewEntry};
use serde::Deserialize;

use crate::check::record::{FaultRecord, FaultViewEntry, RepairRecord, SwitchRecord, TransportRecord};
use crate::report::{Event, Transition};

/// One line of an event file, as far as it is used here.
#[derive(Debug, Deserialize)]
struct Line {
    at_ns: u64,
    event: String,
    peer: Option<u32>,
    nic: Option<String>,
    peer_nic: Option<String>,
    from: Option<String>,
    to: Option<String>,
    cause: Option<String>,
    noticed_ns: Option<u64>,
    replayed_bytes: Option<u64>,
    view: Option<Vec<ViewEntry>>,
    collective: Option<u64>,
    schedule: Option<String>,
    epoch: Option<u64>,
    calls: Option<u64>,
    /// Which of several links to the same peer; the native engine has one.
    link: Option<u64>,
    payload_bytes: Option<u64>,
    paths_suspected: Option<u64>,
    paths_failed: Option<u64>,
    paths_down: Option<u64>,
}

/// What one rank told.
#[derive(Debug, Default)]
pub(super) struct RankStory {
    pub(super) repairs: Vec<RepairRecord>,
    pub(super) transitions: Vec<Event>,
    /// See [`longest_held`].
    pub(super) view: Vec<FaultViewEntry>,
    pub(super) readmissions: u32,
    /// Changes of schedule.
    pub(super) switches: Vec<SwitchRecord>,
    /// Sums of the links that wrote theirs here, as under NCCL; the native engine's ranks report them.
    pub(super) transport: TransportRecord,
}

/// The trouble that a rank saw for the longest time: a fault is told path by path, and so is its end.
fn longest_held(views: Vec<(u64, Vec<FaultViewEntry>)>, end_ns: u64) -> Vec<FaultViewEntry> {
    let ends: Vec<u64> = views.iter().skip(1).map(|(at, _)| *at).chain([end_ns]).collect();
    let held = views.into_iter().zip(ends).filter(|((_, view), _)| !view.is_empty());
    held.max_by_key(|((at, _), end)| end.saturating_sub(*at)).map_or_else(Vec::new, |((_, view), _)| view)
}

/// Reads a rank's event file.
pub(super) fn read(file: &Path, rank: u32, faults: &[FaultRecord]) -> Result<RankStory> {
    let text = fs::read_to_string(file).with_context(|| format!("event file {}", file.display()))?;
    let mut story = RankStory::default();
    // By link, peer and NIC.
    let mut readmitted: BTreeMap<PathKey, u32> = BTreeMap::new();
    let mut owed: BTreeMap<PathKey, u64> = BTreeMap::new();
    let mut resumed: BTreeMap<PathKey, u64> = BTreeMap::new();
    let mut noticed_at: BTreeMap<PathKey, u64> = BTreeMap::new();
    // Links that lose the same NIC towards the same peer are one repair, until it is readmitted.
    let mut open: BTreeMap<(u32, String), usize> = BTreeMap::new();
    // A drop is detected once: what the same path loses after a return is of a later outage, whose first drop nobody
    // has recorded.
    let mut detected: BTreeMap<(u32, String, u64), usize> = BTreeMap::new();
    let mut views: Vec<(u64, Vec<FaultViewEntry>)> = Vec::new();
    let mut end_ns = 0;
    // By epoch: when, and after how many collectives.
    let mut frozen: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut transitions = Vec::new();
    let mut tell = |at_ns: u64, kind: &str, text: String| {
        transitions.push(Event::Transition(Transition { rank, at_ns, kind: kind.into(), text }));
    };
    for (number, line) in text.lines().enumerate() {
        let line: Line = serde_json::from_str(line).with_context(|| format!("{}:{}", file.display(), number + 1))?;
        end_ns = line.at_ns;
        if let Some(view) = &line.view {
            let view: Vec<FaultViewEntry> = view.iter().map(entry).collect();
            if !view.is_empty() {
                tell(line.at_ns, "view", view.iter().map(FaultViewEntry::place).collect::<Vec<_>>().join(", "));
            }
            views.push((line.at_ns, view));
            continue;
        }
        if let ("switch-freeze", Some(epoch), Some(calls)) = (line.event.as_str(), line.epoch, line.calls) {
            frozen.insert(epoch, (line.at_ns, calls));
            continue;
        }
        if let ("switch", Some(epoch), Some(collective), Some(schedule)) =
            (line.event.as_str(), line.epoch, line.collective, &line.schedule)
        {
            tell(line.at_ns, "switch", format!("{schedule} from AllReduce {collective} on"));
            let (frozen_ns, started) = frozen
                .get(&epoch)
                .copied()
                .with_context(|| format!("{}:{}: a switch without a freeze", file.display(), number + 1))?;
            let decided_ns = line.at_ns;
            let schedule = schedule.clone();
            story.switches.push(SwitchRecord { epoch, schedule, collective, started, frozen_ns, decided_ns });
            continue;
        }
        if line.event == "totals" {
            let TransportRecord {
                payload_bytes, replayed_bytes, paths_suspected, paths_failed, paths_down_at_end, ..
            } = &mut story.transport;
            *payload_bytes += line.payload_bytes.unwrap_or(0);
            *replayed_bytes += line.replayed_bytes.unwrap_or(0);
            *paths_suspected += line.paths_suspected.unwrap_or(0);
            *paths_failed += line.paths_failed.unwrap_or(0);
            *paths_down_at_end += line.paths_down.unwrap_or(0);
            continue;
        }
        if let ("resumed", Some(peer), Some(nic)) = (line.event.as_str(), line.peer, &line.nic) {
            tell(line.at_ns, "resume", format!("what {nic} owed rank {peer} has arrived another way"));
            let path = (line.link, peer, nic.clone());
            // The path may have been given up before, or after, the others took over.
            let repair = open.get(&(peer, nic.clone())).map(|at| &mut story.repairs[*at]);
            if let (Some(repair), Some(noticed)) = (repair, noticed_at.remove(&path)) {
                wait_for(repair, line.at_ns.saturating_sub(noticed));
            } else {
                resumed.insert(path, line.at_ns);
            }
            continue;
        }
        let (Some(peer), Some(nic), Some(to)) = (line.peer, &line.nic, &line.to) else { continue };
        let cause = line.cause.clone().unwrap_or_default();
        let text = format!(
            "{nic} to rank {peer} {}: {} -> {to}, {cause}",
            line.peer_nic.as_deref().unwrap_or("?"),
            line.from.as_deref().unwrap_or("?")
        );
        tell(line.at_ns, to, text);
        let path = (line.link, peer, nic.clone());
        *owed.entry(path.clone()).or_default() += line.replayed_bytes.unwrap_or(0);
        match (line.event.as_str(), line.from.as_deref(), to.as_str()) {
            ("path", Some("proving"), "live") => {
                open.remove(&(peer, nic.clone()));
                *readmitted.entry(path).or_default() += 1;
            }
            ("path", Some("live" | "suspect" | "opening"), "failed") => {
                let noticed = line.noticed_ns.unwrap_or(line.at_ns);
                noticed_at.insert(path.clone(), noticed);
                let dropped = faults.iter().filter_map(|f| f.first_drop_ns).filter(|at| *at <= noticed).max();
                let at = *open.entry((peer, nic.clone())).or_insert_with(|| {
                    story.repairs.push(RepairRecord {
                        rank,
                        peer,
                        nic: nic.clone(),
                        cause,
                        noticed_ns: Some(noticed),
                        first_drop_to_detect_ms: None,
                        detect_to_resume_ms: None,
                        replayed_bytes: 0,
                    });
                    story.repairs.len() - 1
                });
                let repair = &mut story.repairs[at];
                repair.replayed_bytes += owed.remove(&path).unwrap_or(0);
                // The first link to notice counts: one that has nothing to send has nothing to notice.
                let dropped = dropped.filter(|ns| *detected.entry((peer, nic.clone(), *ns)).or_insert(at) == at);
                let late = dropped.map(|ns| (noticed - ns) as f64 / 1e6);
                repair.first_drop_to_detect_ms = repair.first_drop_to_detect_ms.or(late);
                if let Some(at) = resumed.remove(&path).filter(|at| *at >= noticed) {
                    noticed_at.remove(&path);
                    wait_for(repair, at - noticed);
                }
            }
            _ => {}
        }
    }
    story.view = longest_held(views, end_ns);
    story.transitions = transitions;
    story.readmissions = readmitted.into_values().max().unwrap_or(0);
    Ok(story)
}

/// Link, peer, local NIC.
type PathKey = (Option<u64>, u32, String);

/// A link of this repair went on so long after its own detection; the slowest counts.
fn wait_for(repair: &mut RepairRecord, ns: u64) {
    let ms = ns as f64 / 1e6;
    repair.detect_to_resume_ms = Some(repair.detect_to_resume_ms.map_or(ms, |known| known.max(ms)));
}

fn entry(entry: &ViewEntry) -> FaultViewEntry {
    let (rail, cause) = (Some(entry.rail.clone()), entry.cause.clone());
    let state = match entry.health {
        PathHealth::Up => "up",
        PathHealth::Slow => "slow",
        PathHealth::Down => "down",
    };
    match &entry.component {
        Component::Nic { node, nic } => {
            FaultViewEntry { node: Some(node.clone()), nic: Some(nic.clone()), rail, state: state.into(), cause }
        }
        Component::Rail => FaultViewEntry { node: None, nic: None, rail, state: state.into(), cause },
        Component::OneOf { candidates } => {
            let state = format!("{state} at {}", candidates.join(" or "));
            FaultViewEntry { node: None, nic: None, rail, state, cause }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_that_was_on_its_way_to_another_does_not_count() {
        let named = |rail: &str| vec![FaultViewEntry { rail: Some(rail.into()), ..FaultViewEntry::default() }];
        let views =
            vec![(10, named("rail-2")), (17, [named("rail-1"), named("rail-2")].concat()), (20, named("rail-3"))];
        assert_eq!(longest_held(views.clone(), 100), named("rail-3"));
        assert_eq!(longest_held([views, vec![(22, Vec::new())]].concat(), 100), named("rail-2"));
        assert_eq!(longest_held(Vec::new(), 100), Vec::new());
    }

    /// One line of an event file, as the net plugin writes it.
    fn path(at_ns: u64, link: u64, from: &str, to: &str, replayed: u64) -> String {
        format!(
            r#"{{"at_ns":{at_ns},"event":"path","link":{link},"peer":1,"nic":"mlx5_2","peer_nic":"mlx5_2","from":"{from}","to":"{to}","cause":"stall","noticed_ns":{at_ns},"replayed_bytes":{replayed}}}"#
        )
    }

    fn resumed(at_ns: u64, link: u64) -> String {
        format!(r#"{{"at_ns":{at_ns},"event":"resumed","link":{link},"peer":1,"nic":"mlx5_2"}}"#)
    }

    fn story(lines: &[String]) -> RankStory {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), lines.join("\n")).unwrap();
        let fault = FaultRecord { first_drop_ns: Some(1_000_000), ..FaultRecord::default() };
        read(file.path(), 0, &[fault]).unwrap()
    }

    #[test]
    fn links_that_lose_the_same_nic_are_one_repair_until_it_is_readmitted() {
        let (ms, link) = (1_000_000, |n| n);
        let lost = vec![
            path(21 * ms, link(1), "live", "suspect", 10),
            path(22 * ms, link(2), "live", "suspect", 20),
            resumed(25 * ms, 1),
            path(80 * ms, link(1), "suspect", "failed", 1),
            path(81 * ms, link(2), "suspect", "failed", 2),
            resumed(90 * ms, 2),
        ];
        let one = story(&lost);
        let [repair] = one.repairs.as_slice() else { panic!("{:?}", one.repairs) };
        assert_eq!((repair.peer, repair.replayed_bytes), (1, 33));
        assert_eq!(repair.first_drop_to_detect_ms, Some(79.0), "of the link that noticed first");
        assert_eq!(repair.detect_to_resume_ms, Some(9.0), "of the link that was slowest");
        let again = [path(200 * ms, 1, "proving", "live", 0), path(300 * ms, 1, "live", "failed", 5)];
        let two = story(&[lost, again.to_vec()].concat());
        assert_eq!(two.repairs.len(), 2, "{:?}", two.repairs);
        assert_eq!((two.repairs[1].replayed_bytes, two.readmissions), (5, 1));
        assert_eq!(two.repairs[1].first_drop_to_detect_ms, None, "it is another outage");
    }

    #[test]
    fn a_switch_is_told_with_the_freeze_that_came_before_it() {
        let freeze = |epoch: u64, at_ns: u64, calls: u64| {
            format!(r#"{{"at_ns":{at_ns},"event":"switch-freeze","epoch":{epoch},"calls":{calls}}}"#)
        };
        let switch = |epoch: u64, at_ns: u64, collective: u64| {
            format!(
                r#"{{"at_ns":{at_ns},"event":"switch","epoch":{epoch},"collective":{collective},"schedule":"weighted"}}"#
            )
        };
        // The first proposal is ended by the second before it is decided.
        let told = story(&[freeze(1, 10, 4), freeze(2, 20, 5), switch(2, 30, 6), freeze(3, 40, 6), switch(3, 50, 8)]);
        let record = |epoch, frozen_ns, started, decided_ns, collective| SwitchRecord {
            epoch,
            schedule: "weighted".into(),
            collective,
            started,
            frozen_ns,
            decided_ns,
        };
        assert_eq!(told.switches, [record(2, 20, 5, 30, 6), record(3, 40, 6, 50, 8)]);
    }

    #[test]
    fn the_sums_of_all_links_are_added() {
        let totals = r#"{"at_ns":1,"event":"totals","link":3,"payload_bytes":100,"replayed_bytes":7,"paths_suspected":2,"paths_failed":1,"paths_down":1}"#;
        let sums = story(&[totals.to_owned(), totals.to_owned()]).transport;
        assert_eq!((sums.payload_bytes, sums.replayed_bytes), (200, 14));
        assert_eq!((sums.paths_suspected, sums.paths_failed, sums.paths_down_at_end), (4, 2, 2));
    }
}
