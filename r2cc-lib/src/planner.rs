//! From the roster, the settings and what is known to be broken to a schedule, and from a schedule to the links that
//! it needs. Pure; the engine says when.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::control::{Component, PathHealth, ViewEntry};
use crate::schedule::{Action, Class, Fabric, Policy, Schedule, Shape, choose};
use crate::settings::{Settings, SettingsError};
use crate::topology::Member;
use crate::transport::Stream;

/// Elements of the plan from which the links of a schedule are read off: enough that no part is empty.
const SAMPLE: Shape = Shape { elements: 1 << 20, element_bytes: 4, in_place: true, slice_elements: None };

/// Makes the schedules of one communicator.
#[derive(Debug)]
pub(crate) struct Planner {
    roster: Arc<Vec<Member>>,
    settings: Settings,
    declared: Vec<ViewEntry>,
}

impl Planner {
    /// # Errors
    /// If the settings declare a fault of something that is not there.
    pub(crate) fn new(roster: Arc<Vec<Member>>, settings: Settings) -> Result<Self, SettingsError> {
        let declared = settings.declared_view(&roster)?;
        Ok(Self { roster, settings, declared })
    }

    /// The schedule for what the view holds to be broken, and for what was declared. A rank's view alone does not
    /// decide: one rank's schedule is sent to the others.
    pub(crate) fn schedule(&self, view: &[ViewEntry]) -> Schedule {
        let view: Vec<ViewEntry> = self.declared.iter().chain(view).cloned().collect();
        let faulty = view.iter().any(|entry| entry.health == PathHealth::Down);
        let wishes = self.settings.wishes(faulty);
        let ring = Schedule::Ring { ranks: (0..self.roster.len()).collect() };
        if wishes.policy == Policy::Balance {
            return ring;
        }
        match Fabric::of_members(&self.roster, &view, |_, _| 1.0) {
            Ok(fabric) => choose(&fabric, wishes, usize::MAX),
            Err(error) => {
                tracing::warn!(%error, "no schedule for what is left; the ring stays");
                ring
            }
        }
    }

    /// Node and name of each NIC that was declared to have failed.
    pub(crate) fn declared_nics(&self) -> BTreeSet<(String, String)> {
        let nic = |entry: &ViewEntry| match &entry.component {
            Component::Nic { node, nic } => Some((node.clone(), nic.clone())),
            Component::Rail | Component::OneOf { .. } => None,
        };
        self.declared.iter().filter_map(nic).collect()
    }

    /// The outgoing streams of a rank in a schedule.
    pub(crate) fn streams(&self, schedule: &Schedule, rank: usize) -> Vec<Stream> {
        let mut streams: Vec<Stream> = schedule
            .plan(rank, SAMPLE)
            .steps
            .iter()
            .filter_map(|step| match step.action {
                Action::Send { peer, .. } => Some(Stream { peer, class: step.class }),
                _ => None,
            })
            .collect();
        // Small ones take the ring whatever the schedule.
        let world = self.roster.len();
        if world > 1 {
            streams.push(Stream { peer: (rank + 1) % world, class: Class::Main });
        }
        streams.sort_unstable();
        streams.dedup();
        streams
    }
}
