//! The rules that must hold in every run, seen from above both ends of a link: every byte once, done only
//! after landed, bounded windows and lanes, no lane after its fence, transitions of the table, totals that
//! add up, a dead link told once and on time. It also counts what a seed has exercised.

use std::collections::BTreeMap;

use r2cc::repair::{
    Action, Cause, Chunk, Generation, Landed, Lane, MessageSeq, PathEvent, PathId, PathState, Sender, Time, Transition,
    Tuning, next_state,
};

use super::trace::Trace;

/// What a run has exercised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub replay: bool,
    pub late_ack_after_recycle: bool,
    pub second_fault_during_repair: bool,
    pub teardown_during_repair: bool,
    pub flap_with_readmission: bool,
    pub all_paths_gone: bool,
    pub link_dead: bool,
    pub half_frame_cut: bool,
    pub duplicate_chunk: bool,
    pub notice: bool,
    pub false_alarm: bool,
    pub early_message: bool,
}

impl Coverage {
    pub fn rows(&self) -> [(&'static str, bool); 12] {
        [
            ("replay", self.replay),
            ("late ack after recycle", self.late_ack_after_recycle),
            ("second fault during repair", self.second_fault_during_repair),
            ("teardown during repair", self.teardown_during_repair),
            ("flap with readmission", self.flap_with_readmission),
            ("all paths gone", self.all_paths_gone),
            ("link declared dead", self.link_dead),
            ("half-written frame cut", self.half_frame_cut),
            ("duplicate chunk", self.duplicate_chunk),
            ("suspicion by the peer's notice", self.notice),
            ("false alarm", self.false_alarm),
            ("message before its receive", self.early_message),
        ]
    }

    pub fn merge(&mut self, other: Coverage) {
        self.replay |= other.replay;
        self.late_ack_after_recycle |= other.late_ack_after_recycle;
        self.second_fault_during_repair |= other.second_fault_during_repair;
        self.teardown_during_repair |= other.teardown_during_repair;
        self.flap_with_readmission |= other.flap_with_readmission;
        self.all_paths_gone |= other.all_paths_gone;
        self.link_dead |= other.link_dead;
        self.half_frame_cut |= other.half_frame_cut;
        self.duplicate_chunk |= other.duplicate_chunk;
        self.notice |= other.notice;
        self.false_alarm |= other.false_alarm;
        self.early_message |= other.early_message;
    }
}

/// In this time a message gets through as long as one path is sound.
const PROGRESS: Time = Time::from_millis(1000);

#[derive(Debug)]
struct PathView {
    state: PathState,
    was_readmitted: bool,
}

/// The judge of one link.
pub struct Judge {
    name: String,
    /// Judge only what the application can see: contents and completion.
    pub application_only: bool,
    landed: Vec<Vec<u8>>,
    complete: Vec<bool>,
    done: Vec<bool>,
    paths: Vec<PathView>,
    fenced: BTreeMap<PathId, Generation>,
    /// Lanes that each chunk, by message and offset, was written on; and its length.
    written: BTreeMap<(u64, u64), (u32, Vec<Lane>)>,
    /// Fences written on each lane.
    fences: BTreeMap<Lane, BTreeMap<PathId, Generation>>,
    /// Some path of the link is touched by no fault: messages must keep moving.
    sound: bool,
    posted_at: Vec<Option<Time>>,
    granted_at: Vec<Option<Time>>,
    posted_bytes: u64,
    replayed_bytes: u64,
    suspected: u64,
    failed: u64,
    dark_since: Option<Time>,
    dead_told: bool,
    pub coverage: Coverage,
}

impl Judge {
    pub fn new(name: String, sizes: &[usize], paths: usize, application_only: bool, sound: bool) -> Self {
        Self {
            name,
            application_only,
            landed: sizes.iter().map(|n| vec![0; *n]).collect(),
            complete: vec![false; sizes.len()],
            done: vec![false; sizes.len()],
            paths: (0..paths).map(|_| PathView { state: PathState::Opening, was_readmitted: false }).collect(),
            fenced: BTreeMap::new(),
            written: BTreeMap::new(),
            fences: BTreeMap::new(),
            sound,
            posted_at: vec![None; sizes.len()],
            granted_at: vec![None; sizes.len()],
            posted_bytes: 0,
            replayed_bytes: 0,
            suspected: 0,
            failed: 0,
            dark_since: Some(Time::ZERO),
            dead_told: false,
            coverage: Coverage::default(),
        }
    }

    pub fn all_done(&self) -> bool {
        self.done.iter().all(|d| *d) && self.complete.iter().all(|d| *d)
    }

    pub fn is_done(&self, message: u64) -> bool {
        self.done[message as usize]
    }

    pub fn all_live(&self) -> bool {
        self.paths.iter().all(|p| p.state == PathState::Live)
    }

    pub fn is_repairing(&self) -> bool {
        self.paths.iter().any(|p| matches!(p.state, PathState::Suspect | PathState::Failed | PathState::Proving))
    }

    pub fn progress(&self) -> String {
        let count = |list: &[bool]| list.iter().filter(|d| **d).count();
        let states: Vec<PathState> = self.paths.iter().map(|p| p.state).collect();
        format!(
            "{} of {} done, {} complete, paths {states:?}",
            count(&self.done),
            self.done.len(),
            count(&self.complete)
        )
    }

    pub fn handle_posted(&mut self, now: Time, message: MessageSeq, bytes: u64) {
        self.posted_bytes += bytes;
        self.posted_at[message.0 as usize] = Some(now);
    }

    pub fn handle_granted(&mut self, now: Time, message: MessageSeq) {
        self.granted_at[message.0 as usize] = Some(now);
    }

    /// A chunk has been polled: the bytes in flight stay within the window, or are this one chunk.
    pub fn handle_sent(
        &mut self,
        now: Time,
        trace: &mut Trace,
        machine: &Sender,
        tuning: &Tuning,
        lane: Lane,
        chunk: Chunk,
    ) {
        if self.application_only {
            return;
        }
        let Some(report) = machine.path_reports().find(|r| r.path == lane.path) else { return };
        let (least, most) = tuning.window_bytes;
        let measured = report.bytes_s.map(|r| (u128::from(r) * tuning.window_time.as_nanos() / 1_000_000_000) as u64);
        // At most doubled four times, for a peer whose process is late.
        let widest = (measured.unwrap_or(256 << 10).clamp(least, most) << 4).min(most);
        let window = report.window_bytes;
        if window > widest {
            trace.fail(now, format_args!("{}: a window of {window} bytes on {lane:?}, at most {widest}", self.name));
        }
        if report.in_flight_bytes > window.max(u64::from(chunk.len)) {
            let flight = report.in_flight_bytes;
            trace.fail(now, format_args!("{}: {flight} bytes in flight on {lane:?}, window {window}", self.name));
        }
        let aligned = chunk.offset.is_multiple_of(u64::from(tuning.chunk_align));
        let ends = chunk.offset + u64::from(chunk.len);
        if !aligned || (ends != chunk.message_bytes && !ends.is_multiple_of(u64::from(tuning.chunk_align))) {
            trace.fail(now, format_args!("{}: {chunk:?} has bounds off the alignment", self.name));
        }
        if self.paths[usize::from(lane.path.0)].state != PathState::Live {
            trace.fail(now, format_args!("{}: {chunk:?} on {lane:?} that is not live", self.name));
        }
        let (len, before) = self.written.entry((chunk.message, chunk.offset)).or_insert((chunk.len, Vec::new()));
        if *len != chunk.len {
            trace.fail(now, format_args!("{}: {chunk:?} was cut to {len} bytes before", self.name));
        }
        let fences = self.fences.entry(lane).or_default();
        for old in before.iter() {
            if fences.get(&old.path).is_none_or(|g| *g < old.generation) {
                trace.fail(now, format_args!("{}: {chunk:?} replayed on {lane:?} before {old:?} is fenced", self.name));
            }
        }
        before.push(lane);
    }

    pub fn handle_landed(&mut self, now: Time, trace: &mut Trace, lane: Lane, landed: Landed) {
        let chunk = landed.chunk;
        if self.fenced.get(&lane.path).is_some_and(|g| lane.generation <= *g) && !self.application_only {
            trace.fail(now, format_args!("{}: {chunk:?} landed on {lane:?} after its fence", self.name));
        }
        if !landed.first {
            self.coverage.duplicate_chunk = true;
            return;
        }
        let at = chunk.offset as usize..chunk.offset as usize + chunk.len as usize;
        let bytes = &mut self.landed[chunk.message as usize][at];
        bytes.iter_mut().for_each(|n| *n += 1);
        if bytes.iter().any(|n| *n > 1) && !self.application_only {
            trace.fail(now, format_args!("{}: {chunk:?} applied twice", self.name));
        }
        if landed.message_complete {
            let seq = chunk.message as usize;
            if self.landed[seq].contains(&0) {
                trace.fail(now, format_args!("{}: message {seq} called complete with bytes missing", self.name));
            }
            if std::mem::replace(&mut self.complete[seq], true) {
                trace.fail(now, format_args!("{}: message {seq} complete twice", self.name));
            }
        }
    }

    pub fn handle_done(&mut self, now: Time, trace: &mut Trace, message: MessageSeq) {
        let seq = message.0 as usize;
        if !self.complete[seq] && !self.application_only {
            trace.fail(now, format_args!("{}: message {seq} done before all of it has landed", self.name));
        }
        if std::mem::replace(&mut self.done[seq], true) {
            trace.fail(now, format_args!("{}: message {seq} done twice", self.name));
        }
    }

    /// A fence is written on `lane`.
    pub fn handle_fence_sent(&mut self, lane: Lane, path: PathId, generation: Generation) {
        self.fences.entry(lane).or_default().insert(path, generation);
    }

    /// A fence has been read.
    pub fn handle_fence(&mut self, path: PathId, generation: Generation) {
        let fence = self.fenced.entry(path).or_default();
        *fence = (*fence).max(generation);
    }

    pub fn handle_accepted(&mut self, now: Time, trace: &mut Trace, lane: Lane) {
        if self.fenced.get(&lane.path).is_some_and(|g| lane.generation <= *g) && !self.application_only {
            trace.fail(now, format_args!("{}: {lane:?} accepted after its fence", self.name));
        }
    }

    pub fn handle_transition(&mut self, now: Time, trace: &mut Trace, t: Transition, is_busy: bool) {
        use PathEvent as E;
        use PathState as S;
        let repairing = self.is_repairing();
        let path = &mut self.paths[usize::from(t.path.0)];
        let events = [E::Opened, E::Stalled, E::TrialGood, E::Down, E::Proved];
        if path.state != t.from || !events.iter().any(|e| next_state(t.from, *e) == Ok(t.to)) {
            trace.fail(now, format_args!("{}: {t:?} from {:?} is not in the table", self.name, path.state));
        }
        path.state = t.to;
        self.replayed_bytes += t.replayed_bytes;
        self.coverage.replay |= t.replayed_bytes > 0;
        self.suspected += u64::from(t.to == S::Suspect);
        self.failed += u64::from(t.to == S::Failed && matches!(t.from, S::Live | S::Suspect | S::Opening));
        self.coverage.notice |= t.from == S::Live && t.cause == Cause::Peer;
        self.coverage.false_alarm |= t.from == S::Suspect && t.to == S::Live;
        if t.from == S::Live {
            self.coverage.second_fault_during_repair |= repairing && is_busy;
            self.coverage.flap_with_readmission |= path.was_readmitted;
        }
        path.was_readmitted |= t.from == S::Proving && t.to == S::Live;
        if self.paths.iter().any(|p| p.state == S::Live) {
            (self.dark_since, self.dead_told) = (None, false);
        } else if self.dark_since.is_none() {
            self.dark_since = Some(now);
            self.coverage.all_paths_gone = true;
        }
    }

    /// `late`: how long the process has been kept from running since the link went dark, at most.
    pub fn handle_dead(&mut self, now: Time, trace: &mut Trace, action: Action, tuning: &Tuning) {
        let Action::Dead { since } = action else { return };
        self.coverage.link_dead = true;
        if self.dark_since != Some(since) || now < since + tuning.link_deadline || self.dead_told {
            trace.fail(now, format_args!("{}: told dead since {since:?}, dark since {:?}", self.name, self.dark_since));
        }
        self.dead_told = true;
    }

    /// At every tick: sums agree with the transitions seen, and a dark link is told dead on time.
    pub fn handle_tick(&mut self, now: Time, trace: &mut Trace, machine: &Sender, tuning: &Tuning, late: Time) {
        let totals = machine.totals();
        let mine = (self.posted_bytes, self.replayed_bytes, self.suspected, self.failed);
        let told = (totals.payload_bytes, totals.replayed_bytes, totals.paths_suspected, totals.paths_failed);
        if mine != told {
            trace.fail(now, format_args!("{}: totals {told:?}, seen {mine:?}", self.name));
        }
        let oldest = self.done.iter().position(|d| !d).filter(|_| self.sound);
        if let Some(seq) = oldest
            && let (Some(posted), Some(granted)) = (self.posted_at[seq], self.granted_at[seq])
            && now > posted.max(granted) + PROGRESS + late
        {
            trace.fail(now, format_args!("{}: message {seq} does not move on {}", self.name, self.progress()));
        }
        if let Some(since) = self.dark_since
            && !self.dead_told
            && now > since + tuning.link_deadline + tuning.tick * 4 + late
        {
            trace.fail(now, format_args!("{}: dark since {since:?} and not told dead", self.name));
        }
        if machine.has_live_path() != self.paths.iter().any(|p| p.state == PathState::Live) {
            trace.fail(now, format_args!("{}: has_live_path disagrees with the transitions", self.name));
        }
    }

    /// Whether any path was doubted; never without a fault.
    pub fn saw_repair(&self) -> bool {
        self.suspected + self.failed > 0
    }
}
