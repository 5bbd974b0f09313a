//! NCCL's network plugin interface, versions 6 to 12: layouts, numbers, function types. No behaviour.
#![allow(missing_docs, reason = "the names are NCCL's; its headers document them")]

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) enum Status {
    Success = 0,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
}

/// Level of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Warn = 2,
    Info = 3,
}

/// `NCCL_INIT | NCCL_NET`.
pub(crate) const LOG_FLAGS: c_ulong = 0x11;
pub(crate) const PTR_HOST: c_int = 1;
/// Bytes of a handle.
pub(crate) const HANDLE_BYTES: usize = 128;
/// Requests of one communicator that NCCL may have outstanding.
pub(crate) const REQUESTS_MAX: usize = 32;

pub(crate) type LogFn = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
/// The profiler's callback; never called.
pub(crate) type ProfilerFn = *const c_void;
pub(crate) type Out = *mut *mut c_void;
pub(crate) type Ptr = *mut c_void;

/// `ncclNetCommConfig_t`.
#[repr(C)]
pub(crate) struct CommConfig {
    pub(crate) traffic_class: c_int,
}

/// `ncclNetVDeviceProps_t`: four devices up to version 11, eight later.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct VirtualDevice<const N: usize> {
    pub(crate) ndevs: c_int,
    pub(crate) devs: [c_int; N],
}

/// Declares a properties struct and how to fill it: every version is a subset of the same facts.
macro_rules! properties {
    ($name:ident, $bytes:literal, { $($field:ident : $type:ty = $value:expr),+ $(,)? }) => {
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),+ }
        const _: () = assert!(size_of::<$name>() == $bytes);
        impl From<&Facts> for $name {
            fn from(facts: &Facts) -> Self {
                let read: fn(&Facts) -> Self = |_f| Self { $($field: ($value)(_f)),+ };
                read(facts)
            }
        }
    };
}

/// What the properties of every version are made of.
pub(crate) struct Facts {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) speed_mbit_s: c_int,
    pub(crate) device: c_int,
}

/// Longest message. NCCL states sizes as `int` in several places.
const MESSAGE_MAX: usize = 1 << 30;
const COMMS_MAX: c_int = 65536;

fn device<const N: usize>(facts: &Facts) -> VirtualDevice<N> {
    let mut devs = [0; N];
    devs[0] = facts.device;
    VirtualDevice { ndevs: 1, devs }
}

properties!(PropertiesV6, 48, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
});
properties!(PropertiesV7, 56, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
    net_device_type: c_int = |_| 0, net_device_version: c_int = |_| 0,
});
properties!(PropertiesV8, 64, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST, reg_is_global: c_int = |_| 0,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
    net_device_type: c_int = |_| 0, net_device_version: c_int = |_| 0,
});
properties!(PropertiesV9, 104, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST, reg_is_global: c_int = |_| 0,
    force_flush: c_int = |_| 0,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
    net_device_type: c_int = |_| 0, net_device_version: c_int = |_| 0,
    virtual_device: VirtualDevice<4> = device::<4>,
    max_p2p_bytes: usize = |_| MESSAGE_MAX, max_coll_bytes: usize = |_| MESSAGE_MAX,
});
properties!(PropertiesV11, 112, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST, reg_is_global: c_int = |_| 0,
    force_flush: c_int = |_| 0,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
    net_device_type: c_int = |_| 0, net_device_version: c_int = |_| 0,
    virtual_device: VirtualDevice<4> = device::<4>,
    max_p2p_bytes: usize = |_| MESSAGE_MAX, max_coll_bytes: usize = |_| MESSAGE_MAX,
    max_multi_request_size: c_int = |_| 1,
});
properties!(PropertiesV12, 128, {
    name: *const c_char = |f: &Facts| f.name, pci_path: *const c_char = |f: &Facts| f.pci_path,
    guid: u64 = |f: &Facts| f.guid, ptr_support: c_int = |_| PTR_HOST, reg_is_global: c_int = |_| 0,
    force_flush: c_int = |_| 0,
    speed: c_int = |f: &Facts| f.speed_mbit_s, port: c_int = |_| 0, latency: f32 = |_| 0.0,
    max_comms: c_int = |_| COMMS_MAX, max_recvs: c_int = |_| 1,
    net_device_type: c_int = |_| 0, net_device_version: c_int = |_| 0,
    virtual_device: VirtualDevice<8> = device::<8>,
    max_p2p_bytes: usize = |_| MESSAGE_MAX, max_coll_bytes: usize = |_| MESSAGE_MAX,
    max_multi_request_size: c_int = |_| 1, rail_id: i16 = |_| -1, plane_id: i16 = |_| -1,
});

pub(crate) type InitOnce = unsafe extern "C" fn(Option<LogFn>) -> Status;
pub(crate) type InitProfiled = unsafe extern "C" fn(Option<LogFn>, ProfilerFn) -> Status;
pub(crate) type InitContext = unsafe extern "C" fn(Out, u64, *const CommConfig, Option<LogFn>, ProfilerFn) -> Status;
pub(crate) type Listen = unsafe extern "C" fn(c_int, Ptr, Out) -> Status;
pub(crate) type ListenContext = unsafe extern "C" fn(Ptr, c_int, Ptr, Out) -> Status;
pub(crate) type Connect = unsafe extern "C" fn(c_int, Ptr, Out) -> Status;
pub(crate) type ConnectDevice = unsafe extern "C" fn(c_int, Ptr, Out, Out) -> Status;
pub(crate) type ConnectConfig = unsafe extern "C" fn(c_int, *const CommConfig, Ptr, Out, Out) -> Status;
pub(crate) type ConnectContext = unsafe extern "C" fn(Ptr, c_int, Ptr, Out, Out) -> Status;
pub(crate) type Accept = unsafe extern "C" fn(Ptr, Out) -> Status;
pub(crate) type AcceptDevice = unsafe extern "C" fn(Ptr, Out, Out) -> Status;
pub(crate) type RegMr<Size> = unsafe extern "C" fn(Ptr, Ptr, Size, c_int, Out) -> Status;
pub(crate) type Isend<Size> = unsafe extern "C" fn(Ptr, Ptr, Size, c_int, Ptr, Out) -> Status;
pub(crate) type IsendProfiled = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, Out) -> Status;
pub(crate) type Irecv<Size> =
    unsafe extern "C" fn(Ptr, c_int, *const Ptr, *const Size, *const c_int, *const Ptr, Out) -> Status;
pub(crate) type IrecvProfiled =
    unsafe extern "C" fn(Ptr, c_int, *const Ptr, *const usize, *const c_int, *const Ptr, *const Ptr, Out) -> Status;

/// Declares the function table of one version, and checks its size: so many pointers.
macro_rules! table {
    ($name:ident, $pointers:literal, $properties:ty, init $init:ty, listen $listen:ty, connect $connect:ty,
     accept $accept:ty, reg_mr $reg_mr:ty, isend $isend:ty, irecv $irecv:ty, { $($tail:ident),* }) => {
        #[repr(C)]
        pub(crate) struct $name {
            pub(crate) name: *const c_char,
            pub(crate) init: $init,
            pub(crate) devices: unsafe extern "C" fn(*mut c_int) -> Status,
            pub(crate) get_properties: unsafe extern "C" fn(c_int, *mut $properties) -> Status,
            pub(crate) listen: $listen,
            pub(crate) connect: $connect,
            pub(crate) accept: $accept,
            pub(crate) reg_mr: $reg_mr,
            pub(crate) reg_mr_dma_buf: *const c_void,
            pub(crate) dereg_mr: unsafe extern "C" fn(Ptr, Ptr) -> Status,
            pub(crate) isend: $isend,
            pub(crate) irecv: $irecv,
            pub(crate) iflush:
                unsafe extern "C" fn(Ptr, c_int, *const Ptr, *const c_int, *const Ptr, Out) -> Status,
            pub(crate) test: unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> Status,
            pub(crate) close_send: unsafe extern "C" fn(Ptr) -> Status,
            pub(crate) close_recv: unsafe extern "C" fn(Ptr) -> Status,
            pub(crate) close_listen: unsafe extern "C" fn(Ptr) -> Status,
            $(pub(crate) $tail: Tail!($tail),)*
        }
        const _: () = assert!(size_of::<$name>() == $pointers * 8);
        // SAFETY: a table is constant; its pointers name functions and a constant string.
        unsafe impl Sync for $name {}
    };
}
/// Functions that later versions append; those that we do not offer are null.
macro_rules! Tail {
    (finalize) => { unsafe extern "C" fn(Ptr) -> Status };
    ($other:ident) => { *const c_void };
}

table!(NetV6, 17, PropertiesV6, init InitOnce, listen Listen, connect Connect, accept Accept,
    reg_mr RegMr<c_int>, isend Isend<c_int>, irecv Irecv<c_int>, {});
table!(NetV7, 19, PropertiesV7, init InitOnce, listen Listen, connect ConnectDevice, accept AcceptDevice,
    reg_mr RegMr<c_int>, isend Isend<c_int>, irecv Irecv<c_int>, { get_device_mr, irecv_consumed });
table!(NetV8, 19, PropertiesV8, init InitOnce, listen Listen, connect ConnectDevice, accept AcceptDevice,
    reg_mr RegMr<usize>, isend Isend<c_int>, irecv Irecv<c_int>, { get_device_mr, irecv_consumed });
table!(NetV9, 20, PropertiesV9, init InitOnce, listen Listen, connect ConnectDevice, accept AcceptDevice,
    reg_mr RegMr<usize>, isend Isend<usize>, irecv Irecv<usize>, { get_device_mr, irecv_consumed, make_v_device });
table!(NetV10, 20, PropertiesV9, init InitProfiled, listen Listen, connect ConnectConfig, accept AcceptDevice,
    reg_mr RegMr<usize>, isend IsendProfiled, irecv IrecvProfiled, { get_device_mr, irecv_consumed, make_v_device });
table!(NetV11, 22, PropertiesV11, init InitContext, listen ListenContext, connect ConnectContext,
    accept AcceptDevice, reg_mr RegMr<usize>, isend IsendProfiled, irecv IrecvProfiled,
    { get_device_mr, irecv_consumed, make_v_device, finalize, set_net_attr });
table!(NetV12, 22, PropertiesV12, init InitContext, listen ListenContext, connect ConnectContext,
    accept AcceptDevice, reg_mr RegMr<usize>, isend IsendProfiled, irecv IrecvProfiled,
    { get_device_mr, irecv_consumed, make_v_device, finalize, set_net_attr });

const _: () = {
    assert!(std::mem::offset_of!(PropertiesV6, latency) == 36);
    assert!(std::mem::offset_of!(PropertiesV8, latency) == 40);
    assert!(std::mem::offset_of!(PropertiesV9, virtual_device) == 64);
    assert!(std::mem::offset_of!(PropertiesV9, max_p2p_bytes) == 88);
    assert!(std::mem::offset_of!(PropertiesV11, max_multi_request_size) == 104);
    assert!(std::mem::offset_of!(PropertiesV12, max_p2p_bytes) == 104);
    assert!(std::mem::offset_of!(PropertiesV12, rail_id) == 124);
    assert!(std::mem::offset_of!(NetV6, close_listen) == 16 * 8);
    assert!(std::mem::offset_of!(NetV11, finalize) == 20 * 8);
};
