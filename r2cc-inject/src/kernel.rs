//! The memory shared with the kernel side (`ebpf/fault.bpf.c`): mirrors of its structs,
//! its maps mapped into this process, and the few `bpf(2)` calls that aya lacks.
//!
//! Every field is an aligned 64-bit word that both sides read and write atomically, so
//! arming, renewing and reading cost no system call and never see a torn value.
//! Decides nothing about faults. Start at [`Maps`].

use std::{
    io,
    marker::PhantomData,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
};

/// The kernel object, built from `ebpf/fault.bpf.c` by `ebpf/build.sh`.
pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/ebpf/fault.bpf.o"));

pub(crate) const MAX_PORTS: usize = 64;
pub(crate) const MAX_FAULTS: usize = 32;

pub(crate) const GATE_FREE: u64 = 0;
pub(crate) const GATE_ARMED: u64 = 1;
pub(crate) const GATE_HEALED: u64 = 2;

pub(crate) const EFFECT_MARK: u64 = 0;
pub(crate) const EFFECT_DROP: u64 = 1;
pub(crate) const EFFECT_LOSS: u64 = 2;
pub(crate) const EFFECT_FLAP: u64 = 3;

pub(crate) const TRIGGER_NOW: u64 = 0;
pub(crate) const TRIGGER_CALL: u64 = 1;
pub(crate) const TRIGGER_WIRE: u64 = 2;

/// The owner ends cleanly, healing its faults, when it is sent SIGTERM.
pub(crate) const OWNER_STOPS_ON_SIGTERM: u64 = 1;

/// A 64-bit word that the kernel side also reads or writes.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Word(AtomicU64);

impl Word {
    pub(crate) fn read(&self) -> u64 {
        self.0.load(SeqCst)
    }

    pub(crate) fn write(&self, value: u64) {
        self.0.store(value, SeqCst);
    }

    /// Writes `value` if the word is zero; says whether it was.
    pub(crate) fn write_if_zero(&self, value: u64) -> bool {
        self.0.compare_exchange(0, value, SeqCst, SeqCst).is_ok()
    }

    /// Replaces `expected` by `value`; says whether it was `expected`.
    pub(crate) fn replace(&self, expected: u64, value: u64) -> bool {
        self.0.compare_exchange(expected, value, SeqCst, SeqCst).is_ok()
    }

    pub(crate) fn set_bit(&self, bit: u32) {
        self.0.fetch_or(1 << bit, SeqCst);
    }

    pub(crate) fn clear_bit(&self, bit: u32) {
        self.0.fetch_and(!(1 << bit), SeqCst);
    }
}

/// Text in a shared array, cut at its size, ended by a zero.
pub(crate) fn write_text(words: &[Word], text: &str) {
    let mut bytes = vec![0_u8; words.len() * 8];
    let mut end = text.len().min(bytes.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(chunk);
        word.write(u64::from_ne_bytes(eight));
    }
}

/// The inverse of [`write_text`].
pub(crate) fn read_text(words: &[Word]) -> String {
    let bytes: Vec<u8> =
        words.iter().flat_map(|word| word.read().to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Packets and bytes in the kernel side's arrays.
#[repr(C)]
pub(crate) struct RawFlow {
    pub(crate) packets: Word,
    pub(crate) bytes: Word,
}

/// `struct port`
#[repr(C)]
pub(crate) struct RawPort {
    pub(crate) rx_arrived_bytes: Word,
    pub(crate) rx_passed: RawFlow,
    pub(crate) rx_dropped: RawFlow,
    rx_pad: [Word; 3],
    pub(crate) tx_passed: RawFlow,
    pub(crate) tx_dropped: RawFlow,
    tx_pad: [Word; 4],
}

/// `struct watch`
#[repr(C)]
pub(crate) struct RawWatch {
    pub(crate) faults: Word,
    pub(crate) name: [Word; 15],
}

/// `struct rule`
#[repr(C)]
pub(crate) struct RawRule {
    pub(crate) effect: Word,
    pub(crate) directions: Word,
    pub(crate) ports: Word,
    pub(crate) base_port: Word,
    pub(crate) trigger: Word,
    pub(crate) bytes: Word,
    pub(crate) call_n: Word,
    pub(crate) call_filters_arg0: Word,
    pub(crate) call_arg0: Word,
    pub(crate) until_n: Word,
    pub(crate) until_filters_arg0: Word,
    pub(crate) until_arg0: Word,
    pub(crate) loss_ppm: Word,
    pub(crate) seed: Word,
    pub(crate) down_ns: Word,
    pub(crate) up_ns: Word,
}

/// `struct control`
#[repr(C)]
pub(crate) struct RawControl {
    pub(crate) gate: Word,
    pub(crate) expires_ns: Word,
    pub(crate) owner_pid: Word,
    pub(crate) owner_kind: Word,
    pub(crate) label: [Word; 28],
}

/// `struct state`
#[repr(C)]
pub(crate) struct RawState {
    pub(crate) calls: Word,
    pub(crate) until_calls: Word,
    pub(crate) call_ns: Word,
    pub(crate) base_bytes: Word,
    pub(crate) base_set: Word,
    pub(crate) fired_ns: Word,
    pub(crate) bytes_before: Word,
    pub(crate) snapshot_done: Word,
    pub(crate) first_drop_ns: Word,
    pub(crate) healed_ns: Word,
    pub(crate) judged: [Word; 2],
    pub(crate) dropped_packets: [Word; 2],
    pub(crate) dropped_bytes: [Word; 2],
    pub(crate) passed_expired: Word,
    pad: Word,
}

impl RawState {
    /// Makes the slot ready for a new fault; its gate must be closed.
    pub(crate) fn clear(&self) {
        let words = [
            &self.calls,
            &self.until_calls,
            &self.call_ns,
            &self.base_bytes,
            &self.base_set,
            &self.fired_ns,
            &self.bytes_before,
            &self.snapshot_done,
            &self.first_drop_ns,
            &self.healed_ns,
            &self.passed_expired,
        ];
        for word in words.into_iter().chain(&self.judged).chain(&self.dropped_packets).chain(&self.dropped_bytes) {
            word.write(0);
        }
    }
}

/// `struct snapshot`
#[repr(C)]
pub(crate) struct RawSnapshot {
    pub(crate) at_ns: Word,
    pub(crate) rx_passed: RawFlow,
    pub(crate) rx_dropped: RawFlow,
    pub(crate) tx_passed: RawFlow,
    pub(crate) tx_dropped: RawFlow,
}

const _: () = {
    assert!(size_of::<RawPort>() == 128);
    assert!(size_of::<RawWatch>() == 128);
    assert!(size_of::<RawRule>() == 128);
    assert!(size_of::<RawControl>() == 256);
    assert!(size_of::<RawState>() == 144);
    assert!(size_of::<RawSnapshot>() == 72);
};

/// Only types made of [`Word`]s may lie in a [`Shared`].
///
/// # Safety
/// The type is `repr(C)`, consists of `Word`s alone, and equals the kernel's struct.
pub(crate) unsafe trait Mirror {}
// SAFETY: repr(C), Words only, size checked above against the struct in fault.bpf.c.
unsafe impl Mirror for RawPort {}
// SAFETY: as above.
unsafe impl Mirror for RawWatch {}
// SAFETY: as above.
unsafe impl Mirror for RawRule {}
// SAFETY: as above.
unsafe impl Mirror for RawControl {}
// SAFETY: as above.
unsafe impl Mirror for RawState {}
// SAFETY: as above.
unsafe impl Mirror for RawSnapshot {}

/// A kernel array mapped into this process.
pub(crate) struct Shared<T> {
    start: NonNull<T>,
    count: usize,
    marker: PhantomData<T>,
}

// SAFETY: the mapping holds atomics only and belongs to no thread.
unsafe impl<T: Mirror> Send for Shared<T> {}
// SAFETY: as above; every access goes through an atomic.
unsafe impl<T: Mirror> Sync for Shared<T> {}

impl<T: Mirror> Shared<T> {
    /// Maps the array behind `map`, which has `count` entries of type `T`.
    pub(crate) fn new(map: BorrowedFd<'_>, count: usize) -> io::Result<Self> {
        // SAFETY: a fresh shared mapping of a kernel array; the kernel refuses a length
        // beyond the map, and the address is checked below.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, count, marker: PhantomData })
    }
}

impl<T> Deref for Shared<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` is a live mapping of `count` entries, page-aligned, made of
        // atomics for which every bit pattern is valid (`Mirror`).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; no slice outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * size_of::<T>()) };
    }
}

/// All shared arrays of one loaded kernel object.
pub(crate) struct Maps {
    pub(crate) ports: Shared<RawPort>,
    pub(crate) watch: Shared<RawWatch>,
    pub(crate) rules: Shared<RawRule>,
    pub(crate) control: Shared<RawControl>,
    pub(crate) states: Shared<RawState>,
    pub(crate) snapshots: Shared<RawSnapshot>,
}

/// The arrays' names in the kernel, in the order of [`Maps::open`]'s argument; the
/// kernel keeps fifteen characters of a name.
pub(crate) const MAP_NAMES: [&str; 6] =
    ["r2cc_ports", "r2cc_watch", "r2cc_rules", "r2cc_control", "r2cc_states", "r2cc_snapshots"];

impl Maps {
    pub(crate) fn open<F: AsFd>(fds: [F; 6]) -> io::Result<Self> {
        let [ports, watch, rules, control, states, snapshots] = fds;
        Ok(Self {
            ports: Shared::new(ports.as_fd(), MAX_PORTS)?,
            watch: Shared::new(watch.as_fd(), MAX_PORTS)?,
            rules: Shared::new(rules.as_fd(), MAX_FAULTS)?,
            control: Shared::new(control.as_fd(), MAX_FAULTS)?,
            states: Shared::new(states.as_fd(), MAX_FAULTS)?,
            snapshots: Shared::new(snapshots.as_fd(), MAX_FAULTS * MAX_PORTS)?,
        })
    }
}

/// CLOCK_MONOTONIC in nanoseconds, the clock of `bpf_ktime_get_ns`.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec that lives here; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    // Both parts are non-negative for this clock.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_GET_FD_BY_ID: libc::c_long = 30;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Where a packet program is attached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Generic XDP: ingress, on any driver.
    XdpGeneric,
    /// TCX egress (kernel 6.6).
    TcxEgress,
}

/// `union bpf_attr`, the parts used here; the rest of the kernel's union reads as zero.
#[repr(C)]
#[derive(Default)]
struct BpfAttr([u32; 16]);

fn bpf(command: libc::c_long, attr: &mut BpfAttr) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a live, fully initialised block of the length that is passed.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<BpfAttr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just returned this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Attaches `program` to the interface by a `bpf_link`: closing the descriptor, also by
/// dying, detaches. Unlike aya's `attach` this never falls back to netlink, where a
/// program would outlive its owner.
pub(crate) fn link_create(program: BorrowedFd<'_>, ifindex: u32, hook: Hook) -> io::Result<OwnedFd> {
    const BPF_XDP: u32 = 37;
    const BPF_TCX_EGRESS: u32 = 47;
    const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
    let (attach_type, flags) = match hook {
        Hook::XdpGeneric => (BPF_XDP, XDP_FLAGS_SKB_MODE),
        Hook::TcxEgress => (BPF_TCX_EGRESS, 0),
    };
    let mut attr = BpfAttr::default();
    attr.0[0] = program.as_raw_fd().unsigned_abs();
    attr.0[1] = ifindex;
    attr.0[2] = attach_type;
    attr.0[3] = flags;
    owned(bpf(BPF_LINK_CREATE, &mut attr)?)
}

/// Opens a link by its id.
pub(crate) fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = BpfAttr::default();
    attr.0[0] = id;
    owned(bpf(BPF_LINK_GET_FD_BY_ID, &mut attr)?)
}

/// Detaches a link for good, whoever else holds it.
pub(crate) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = BpfAttr::default();
    attr.0[0] = link.as_raw_fd().unsigned_abs();
    bpf(BPF_LINK_DETACH, &mut attr).map(drop)
}

/// The draw that decides packet `index` of a direction under a loss rule, exactly as
/// the kernel side does; `direction` is 0 for ingress, 1 for egress.
#[must_use]
pub fn loss_drops(seed: u64, parts_per_million: u32, direction: u64, index: u64) -> bool {
    fn splitmix(x: u64) -> u64 {
        let mut x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    let packet = index.wrapping_mul(2).wrapping_add(direction);
    let draw = splitmix(seed ^ splitmix(packet)) >> 32;
    (draw * 1_000_000) >> 32 < u64::from(parts_per_million)
}
