//! What moves a sender's paths between their states: suspicion, failure, trial, proof, readmission, and the
//! clock. Every change goes through the table of [`next_state`], and every lane that may have carried chunks
//! is fenced before they are written elsewhere.

use std::sync::Arc;

use super::super::path_end::Deadline;
use super::super::receiver::late_by;
use super::super::tuning::planted;
use super::{Action, Sender, SenderError};
use crate::repair::{Cause, Chunk, Generation, Lane, PathEvent, PathId, PathState, Time, Transition, next_state};

impl Sender {
    /// Time has passed. Call about every [`tick`](crate::repair::Tuning::tick); one that comes late moves the deadlines.
    ///
    /// # Errors
    /// Never in practice: the transitions that it makes are in the table.
    pub fn handle_tick(&mut self, now: Time) -> Result<(), SenderError> {
        self.handle_clock(now);
        let tuning = Arc::clone(&self.tuning);
        for i in 0..self.paths.len() {
            let id = PathId(i as u16);
            self.close_unanswered(now, id)?;
            let busy = self.is_busy();
            let path = &mut self.paths[i];
            match path.state {
                PathState::Suspect if path.deadline.has_passed(now) => self.fail(now, id, Cause::Silence)?,
                PathState::Proving if path.awaiting.is_some() && path.deadline.has_passed(now) => {
                    self.fail(now, id, Cause::Silence)?;
                }
                PathState::Proving if path.ping_at.is_some_and(|at| now >= at) => {
                    path.ping_at = None;
                    self.ping(id, Deadline::new(now, tuning.proof_deadline));
                }
                PathState::Failed
                    if path.opening.is_none() && now >= path.next_attempt && !planted!(tuning, NoReopen) =>
                {
                    self.actions.push_back(Action::Open(path.open(now, &tuning)));
                }
                PathState::Live => {
                    if path.spare.is_none() && path.opening.is_none() && now >= path.spare_retry_at {
                        self.actions.push_back(Action::Open(path.open(now, &tuning)));
                    }
                    if path.failures > 0 && now.saturating_sub(path.live_since) >= tuning.forgive {
                        path.failures = 0;
                    }
                    // Waiting for a grant or an acknowledgement that died on its way would last for ever:
                    // with nothing outstanding no stall can show.
                    let quiet = busy && !planted!(tuning, NoIdleProbe);
                    if quiet && now.saturating_sub(path.heard_at) >= tuning.idle_probe {
                        path.heard_at = now;
                        self.handle_doubt(id);
                    }
                }
                _ => {}
            }
        }
        if let Some(since) = self.dark_since
            && now.saturating_sub(since) >= self.tuning.link_deadline + self.dark_late
            && !self.dead_told
            && !planted!(self.tuning, NeverDead)
        {
            self.dead_told = true;
            self.actions.push_back(Action::Dead { since });
        }
        Ok(())
    }

    /// The probe outstanding on the current lane reached the other host.
    pub(super) fn answered(&mut self, now: Time, path: PathId) -> Result<(), SenderError> {
        let (gap, proofs) = (self.tuning.proof_gap, self.tuning.proof_probes);
        let end = self.path_mut(path)?;
        end.awaiting = None;
        match end.state {
            PathState::Suspect => {
                end.stall.handle_false_alarm();
                self.admit(now, path, PathEvent::TrialGood, Cause::Answered)
            }
            PathState::Proving => {
                end.good_probes += 1;
                if end.good_probes >= proofs {
                    end.ramp_from = Some(now);
                    self.admit(now, path, PathEvent::Proved, Cause::Answered)
                } else {
                    end.ping_at = Some(now + gap);
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    /// A process that could not run sees everything late: what it waits for gets that much longer.
    pub(super) fn handle_clock(&mut self, now: Time) {
        let late = late_by(&mut self.last_tick, now, &self.tuning);
        if late > Time::ZERO {
            self.paths.iter_mut().for_each(|path| path.handle_late_by(now, late));
            let dark = self.dark_since.map_or(Time::ZERO, |since| now.saturating_sub(since));
            self.dark_late = (self.dark_late + late).min(dark);
        }
    }

    /// Gives up a connection attempt that nobody answers.
    pub(super) fn close_unanswered(&mut self, now: Time, path: PathId) -> Result<(), SenderError> {
        let for_ever = planted!(self.tuning, NoOpenDeadline);
        let end = self.path_mut(path)?;
        if let Some(generation) = end.opening.filter(|_| !for_ever).filter(|_| end.opening_deadline.has_passed(now)) {
            let lane = Lane { path, generation };
            self.actions.push_back(Action::Close(lane));
            self.handle_lane_lost(now, lane, Cause::Silence)?;
        }
        Ok(())
    }

    /// The path goes into service.
    pub(super) fn admit(&mut self, now: Time, path: PathId, event: PathEvent, cause: Cause) -> Result<(), SenderError> {
        let generation = self.path_mut(path)?.lane_in_use;
        // Every earlier lane of the path is closed here, though the peer may not have noticed.
        self.fence(path, Generation(generation.0.saturating_sub(1)));
        let fences = self.fences.clone();
        let end = self.path_mut(path)?;
        end.fences_due = fences;
        end.live_since = now;
        end.spare_retry_at = now;
        self.dark_since = None;
        self.dead_told = false;
        self.step(now, path, event, cause)
    }

    /// The lane went silent: reset it, replay what it owes, put the spare on trial.
    pub(super) fn suspect(&mut self, now: Time, path: PathId, cause: Cause) -> Result<(), SenderError> {
        let replayed_bytes = self.reset(path)?;
        self.totals.paths_suspected += 1;
        let tuning = Arc::clone(&self.tuning);
        let end = self.path_mut(path)?;
        let from = end.state;
        end.state = next_state(from, PathEvent::Stalled)?;
        (end.noticed_at, end.suspected_for) = (now, cause);
        end.deadline = Deadline::new(now, end.trial(&tuning));
        let to = end.state;
        let spare = end.spare.take();
        let open = (spare.is_none() && end.opening.is_none()).then(|| end.open(now, &tuning));
        if let Some(generation) = spare {
            end.take_into_use(generation, now);
            let deadline = end.deadline;
            self.ping(path, deadline);
        }
        self.actions.extend(open.map(Action::Open));
        self.transitions.push_back(Transition { at: now, path, from, to, cause, noticed_at: now, replayed_bytes });
        self.note_dark(now);
        Ok(())
    }

    /// The path is out of service.
    pub(super) fn fail(&mut self, now: Time, path: PathId, cause: Cause) -> Result<(), SenderError> {
        let replayed_bytes = self.reset(path)?;
        let tuning = Arc::clone(&self.tuning);
        let end = self.path_mut(path)?;
        let from = end.state;
        end.state = next_state(from, PathEvent::Down)?;
        let (noticed_at, cause) =
            if from == PathState::Suspect { (end.noticed_at, end.suspected_for) } else { (now, cause) };
        let lanes = end.drop_lanes();
        let last = end.last_generation;
        if matches!(from, PathState::Live | PathState::Suspect | PathState::Opening) {
            end.handle_failure(now, &tuning);
            self.totals.paths_failed += 1;
        }
        let end = self.path_mut(path)?;
        end.next_attempt = (now + end.back_off(now, &tuning)).max(end.hold_until);
        self.actions.extend(lanes.into_iter().map(Action::Close));
        self.fence(path, last);
        let to = PathState::Failed;
        self.transitions.push_back(Transition { at: now, path, from, to, cause, noticed_at, replayed_bytes });
        self.note_dark(now);
        Ok(())
    }

    pub(super) fn note_dark(&mut self, now: Time) {
        if self.live_paths() == 0 && self.dark_since.is_none() {
            (self.dark_since, self.dark_late) = (Some(now), Time::ZERO);
        }
    }

    pub(super) fn step(&mut self, now: Time, path: PathId, event: PathEvent, cause: Cause) -> Result<(), SenderError> {
        let end = self.path_mut(path)?;
        let from = end.state;
        end.state = next_state(from, event)?;
        let to = end.state;
        self.transitions.push_back(Transition { at: now, path, from, to, cause, noticed_at: now, replayed_bytes: 0 });
        Ok(())
    }

    /// Fences and closes the current lane of a live path; its chunks go to the replay queue.
    pub(super) fn reset(&mut self, path: PathId) -> Result<u64, SenderError> {
        let no_replay = planted!(self.tuning, NoReplay);
        let end = self.path_mut(path)?;
        if end.state != PathState::Live {
            return Ok(0);
        }
        let dead = end.lane_in_use;
        let owed: Vec<Chunk> = end.in_flight.drain(..).map(|(chunk, _)| chunk).collect();
        end.in_flight_bytes = 0;
        if end.current.take().is_some() {
            self.actions.push_back(Action::Close(Lane { path, generation: dead }));
        }
        self.fence(path, dead);
        self.replays.handle_reset(path, &owed);
        let bytes = owed.iter().map(|c| u64::from(c.len)).sum();
        self.totals.replayed_bytes += bytes;
        if !no_replay {
            self.replay.extend(owed);
            self.replay.make_contiguous().sort_unstable();
        }
        Ok(bytes)
    }

    /// Lanes of `path` up to `generation` are dead: every live path says so before its next chunk.
    pub(super) fn fence(&mut self, path: PathId, generation: Generation) {
        if generation <= self.fences.get(&path).copied().unwrap_or_default() {
            return;
        }
        self.fences.insert(path, generation);
        for end in self.paths.iter_mut().filter(|p| p.state == PathState::Live) {
            end.fences_due.insert(path, generation);
        }
    }

    pub(super) fn ping(&mut self, path: PathId, deadline: Deadline) {
        let nonce = self.next_nonce;
        self.next_nonce += 1;
        let end = &mut self.paths[usize::from(path.0)];
        (end.ping_due, end.awaiting, end.deadline) = (Some(nonce), Some(nonce), deadline);
    }
}
