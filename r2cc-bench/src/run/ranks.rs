//! What the ranks say of themselves: their event files, read after the run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use r2cc::control::{Component, PathHealth, ViewEntry};
use serde::Deserialize;

use crate::check::record::{FaultRecord, FaultViewEntry, RepairRecord};
use crate::report::Event;

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
}

/// What one rank told.
#[derive(Debug, Default)]
pub(super) struct RankStory {
    pub(super) repairs: Vec<RepairRecord>,
    pub(super) transitions: Vec<Event>,
    /// See [`longest_held`].
    pub(super) view: Vec<FaultViewEntry>,
    pub(super) readmissions: u32,
    /// The AllReduce from which the first new schedule held, counted from the first of the baseline.
    pub(super) switch: Option<u64>,
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
    let mut readmitted: BTreeMap<(u32, String), u32> = BTreeMap::new();
    let mut owed: BTreeMap<(u32, String), u64> = BTreeMap::new();
    let mut resumed: BTreeMap<(u32, String), u64> = BTreeMap::new();
    let mut noticed_at: BTreeMap<(u32, String), u64> = BTreeMap::new();
    let mut views: Vec<(u64, Vec<FaultViewEntry>)> = Vec::new();
    let mut end_ns = 0;
    for (number, line) in text.lines().enumerate() {
        let line: Line = serde_json::from_str(line).with_context(|| format!("{}:{}", file.display(), number + 1))?;
        end_ns = line.at_ns;
        if let Some(view) = &line.view {
            views.push((line.at_ns, view.iter().map(entry).collect()));
            continue;
        }
        if let ("switch", Some(collective), Some(schedule)) = (line.event.as_str(), line.collective, &line.schedule) {
            story.switch.get_or_insert(collective);
            let text = format!("{schedule} from AllReduce {collective} on");
            story.transitions.push(Event::Transition { rank, at_ns: line.at_ns, kind: "switch".into(), text });
            continue;
        }
        if let ("resumed", Some(peer), Some(nic)) = (line.event.as_str(), line.peer, &line.nic) {
            resumed.insert((peer, nic.clone()), line.at_ns);
            // The path may have been given up before, or after, the others took over.
            let open = story.repairs.iter_mut().rev().find(|r| r.peer == peer && r.nic == *nic);
            if let (Some(repair), Some(noticed)) = (open, noticed_at.get(&(peer, nic.clone()))) {
                repair.detect_to_resume_ms.get_or_insert(line.at_ns.saturating_sub(*noticed) as f64 / 1e6);
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
        story.transitions.push(Event::Transition { rank, at_ns: line.at_ns, kind: to.clone(), text });
        let path = (peer, nic.clone());
        *owed.entry(path.clone()).or_default() += line.replayed_bytes.unwrap_or(0);
        match (line.event.as_str(), line.from.as_deref(), to.as_str()) {
            ("path", Some("proving"), "live") => *readmitted.entry(path).or_default() += 1,
            ("path", Some("live" | "suspect" | "opening"), "failed") => {
                let noticed = line.noticed_ns.unwrap_or(line.at_ns);
                noticed_at.insert(path.clone(), noticed);
                let dropped = faults.iter().filter_map(|f| f.first_drop_ns).filter(|at| *at <= noticed).max();
                story.repairs.push(RepairRecord {
                    rank,
                    peer,
                    nic: nic.clone(),
                    cause,
                    first_drop_to_detect_ms: dropped.map(|at| (noticed - at) as f64 / 1e6),
                    detect_to_resume_ms: resumed
                        .remove(&path)
                        .filter(|at| *at >= noticed)
                        .map(|at| (at - noticed) as f64 / 1e6),
                    replayed_bytes: owed.remove(&path).unwrap_or(0),
                });
            }
            _ => {}
        }
    }
    story.view = longest_held(views, end_ns);
    story.readmissions = readmitted.into_values().max().unwrap_or(0);
    Ok(story)
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
}
