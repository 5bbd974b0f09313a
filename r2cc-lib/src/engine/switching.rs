//! Going over to another schedule: the engine's side of [`crate::control::Switch`].

use serde_json::json;

use super::{Engine, LINKS_TIME};
use crate::control::{Statement, SwitchAction, ViewEntry, r2cc_switch_freeze};
use crate::repair::Time;
use crate::transport::now;

impl Engine {
    /// The fault view has settled: on the coordinator, propose the schedule for it.
    pub(super) fn replan(&mut self, view: &[ViewEntry]) {
        if self.me == 0 && self.state.failure.is_none() && self.state.left.is_empty() {
            self.state.switch.propose(self.planner.schedule(view));
        }
    }

    /// Does what the switch asks for. Its messages come back to it through `say`, so this goes on until it is
    /// quiet. Whether there was anything to do.
    pub(super) fn act_on_switch(&mut self, at: Time) -> bool {
        let mut moved = false;
        while let Some(action) = self.state.switch.poll_action() {
            moved = true;
            match action {
                SwitchAction::Say(message) => self.say(at, Statement::Switch(Box::new(message))),
                SwitchAction::Prepare { epoch, schedule } => {
                    let streams = self.planner.streams(&schedule, self.me);
                    for stream in &streams {
                        if let Err(error) = self.links.open(*stream) {
                            tracing::warn!(%error, "a link that the next schedule needs");
                        }
                    }
                    self.log.write(at, "switch-prepare", &json!({"epoch": epoch, "schedule": schedule.name()}));
                    self.state.preparing = Some((epoch, streams, at + LINKS_TIME));
                }
                SwitchAction::Freeze { epoch } => {
                    let calls = self.gate.freeze();
                    // The time of the turn may be long past: what happens in a freeze is told by these two events.
                    self.log.write(now(), "switch-freeze", &json!({"epoch": epoch, "calls": calls}));
                    r2cc_switch_freeze(epoch, calls);
                    self.state.switch.handle_frozen(epoch, calls);
                }
                SwitchAction::Adopt(commit) => {
                    let event = json!({
                        "epoch": commit.epoch, "collective": commit.at, "schedule": commit.schedule.name(),
                    });
                    self.log.write(now(), "switch", &event);
                    self.gate.adopt(commit.at, commit.schedule);
                }
                SwitchAction::Thaw => self.gate.thaw(),
            }
        }
        moved
    }

    /// Ready once every link that the proposed schedule needs has paths in service, and no path is still coming up.
    pub(super) fn check_preparing(&mut self, at: Time) {
        let links = &self.links;
        let due = |(_, streams, deadline): &mut (u64, Vec<_>, Time)| at >= *deadline || links.are_settled(streams);
        if let Some((epoch, ..)) = self.state.preparing.take_if(due) {
            self.log.write(at, "switch-ready", &json!({ "epoch": epoch }));
            self.state.switch.handle_prepared(epoch);
        }
    }
}
