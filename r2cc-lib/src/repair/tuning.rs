//! Every bound and threshold of the repair machines in one place.

use super::Time;

/// Limits and thresholds. The defaults suit a LAN with NICs from 10 Mbit/s to 100 Gbit/s.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// How often the driver calls `handle_tick` while bytes are outstanding.
    pub tick: Time,
    /// Shortest silence with bytes outstanding that makes a path suspect.
    pub stall_floor: Time,
    /// Longest that the adaptive threshold grows.
    pub stall_ceiling: Time,
    /// The same where only one segment is outstanding, whose acknowledgement may be delayed.
    pub stall_small: Time,
    /// How long a spare connection has to show that its path is alive, at least [`Tuning::stall_small`].
    pub trial: Time,
    /// How long a first or spare connection may take to be made; on a failed path `proof_deadline` counts.
    pub open_deadline: Time,
    /// A live path of a busy link that has been silent for this long is asked for a sign of life.
    pub idle_probe: Time,
    /// Bytes outstanding on a path, as time at its measured rate.
    pub window_time: Time,
    /// Bounds of the bytes outstanding on a path.
    pub window_bytes: (u64, u64),
    /// A window of this many bytes grows further only as far as `window_fast` at the path's rate asks for: what
    /// is outstanding has to stay in the processor's caches.
    pub window_plenty: u64,
    /// See `window_plenty`.
    pub window_fast: Time,
    /// Most bytes that may be sent and not taken by a peer whose process is late, where the path asks for less.
    pub window_late: u64,
    /// The same as time at the path's rate: what a message at its end may have to wait for on a slow path.
    pub window_late_time: Time,
    /// Size of a chunk, as time at the path's measured rate.
    pub chunk_time: Time,
    /// Bounds of the chunk size, bytes.
    pub chunk_bytes: (u32, u32),
    /// Chunk bounds fall on multiples of this many bytes of the message, so LL and LL128 lines stay whole.
    pub chunk_align: u32,
    /// Messages that may be sent before their receives are posted, beyond those that are granted: the receiving
    /// end keeps room for so many. Grants and acknowledgements of such messages may wait for a while. None: 0. Both
    /// ends have to have the same.
    pub early_messages: u64,
    /// Longest of them, bytes.
    pub early_bytes: u64,
    /// First wait before a failed path is tried again; doubles up to `reopen_soon`.
    pub reopen_first: Time,
    /// Longest wait between attempts while the failure is younger than `soon`.
    pub reopen_soon: Time,
    /// Longest wait between attempts later.
    pub reopen_later: Time,
    /// Age of a failure at which `reopen_later` replaces `reopen_soon`.
    pub soon: Time,
    /// Good probes in a row before a path is readmitted.
    pub proof_probes: u8,
    /// Time between those probes.
    pub proof_gap: Time,
    /// How long each has to be answered.
    pub proof_deadline: Time,
    /// A readmitted path starts at a quarter of its window and doubles after each such time.
    pub ramp_step: Time,
    /// A failed path stays out at least this long; doubles with each failure.
    pub hold_first: Time,
    /// Longest hold-down.
    pub hold_max: Time,
    /// A path that lived this long is forgiven its earlier failures.
    pub forgive: Time,
    /// With no live path for this long the link is dead.
    pub link_deadline: Time,
    /// A planted fault.
    #[cfg(any(test, feature = "mutants"))]
    pub mutant: Option<Mutant>,
}

impl Default for Tuning {
    fn default() -> Self {
        let ms = Time::from_millis;
        Self {
            tick: ms(5),
            stall_floor: ms(20),
            stall_ceiling: ms(200),
            stall_small: ms(60),
            trial: ms(20),
            open_deadline: ms(2000),
            idle_probe: ms(200),
            window_time: ms(10),
            window_bytes: (32 << 10, 4 << 20),
            window_plenty: 512 << 10,
            window_fast: Time::from_micros(250),
            window_late: 1 << 20,
            window_late_time: ms(40),
            chunk_time: Time::from_micros(2500),
            chunk_bytes: (16 << 10, 512 << 10),
            chunk_align: 4 << 10,
            early_messages: 0,
            early_bytes: 0,
            reopen_first: ms(50),
            reopen_soon: ms(500),
            reopen_later: ms(5000),
            soon: ms(60_000),
            proof_probes: 4,
            proof_gap: ms(50),
            proof_deadline: ms(200),
            ramp_step: ms(100),
            hold_first: ms(1000),
            hold_max: ms(60_000),
            forgive: ms(60_000),
            link_deadline: ms(30_000),
            #[cfg(any(test, feature = "mutants"))]
            mutant: None,
        }
    }
}

impl Tuning {
    /// Whether a message of so many bytes may be sent before its receive is posted.
    pub(crate) fn is_early(&self, bytes: u64) -> bool {
        self.early_messages > 0 && bytes <= self.early_bytes
    }

    /// Whether the planted fault `m` is on; always false in a normal build.
    #[cfg(any(test, feature = "mutants"))]
    pub(super) fn planted(&self, m: Mutant) -> bool {
        self.mutant == Some(m)
    }
}

/// Planted faults: the simulator must catch each of them.
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The receiver acknowledges a chunk when its header arrives.
    AckEarly,
    /// The ledger answers *first* to every chunk.
    AcceptDuplicate,
    /// The receiver leaves fenced lanes open.
    NoFence,
    /// The ledger of a message is emptied when a lane is lost.
    ForgetLedger,
    /// The sender drops outstanding chunks of a reset lane instead of replaying them.
    NoReplay,
    /// The sender counts acknowledgements of an old generation.
    CountLateAcks,
    /// Grants lost with their lane are not repeated.
    ForgetGrant,
    /// A message is reported done when it has been written.
    DoneAtWrite,
    /// Fences are written after the chunks that they should precede.
    FenceLate,
    /// The receiver accepts a lane whose generation is fenced.
    AcceptFenced,
    /// Chunks are sent whatever is in flight.
    IgnoreWindow,
    /// Silence is never taken for a stall.
    NoStall,
    /// A silent path of a busy link is not asked for a sign of life.
    NoIdleProbe,
    /// A connection attempt may last for ever.
    NoOpenDeadline,
    /// A failed path is not tried again.
    NoReopen,
    /// A dark link is not told dead.
    NeverDead,
}

#[cfg(any(test, feature = "mutants"))]
impl Mutant {
    /// All of them.
    pub const ALL: [Mutant; 16] = [
        Self::AckEarly,
        Self::AcceptDuplicate,
        Self::NoFence,
        Self::ForgetLedger,
        Self::NoReplay,
        Self::CountLateAcks,
        Self::ForgetGrant,
        Self::DoneAtWrite,
        Self::FenceLate,
        Self::AcceptFenced,
        Self::IgnoreWindow,
        Self::NoStall,
        Self::NoIdleProbe,
        Self::NoOpenDeadline,
        Self::NoReopen,
        Self::NeverDead,
    ];
}

/// Whether a planted fault is on. Expands to `false` in a normal build.
macro_rules! planted {
    ($tuning:expr, $mutant:ident) => {{
        #[cfg(any(test, feature = "mutants"))]
        let on = $tuning.planted($crate::repair::Mutant::$mutant);
        #[cfg(not(any(test, feature = "mutants")))]
        let on = false;
        on
    }};
}
pub(super) use planted;
