//! The tables that NCCL looks up by name, and the functions behind them. A panic never reaches C: it becomes an
//! internal error.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;

use r2cc::transport::Side;

use crate::abi::*;
use crate::comm::{Comm, Request};
use crate::worker::{Command, Memory};
use crate::{NAME, hub, log};

/// Runs the body of an exported function.
fn guard(body: impl FnOnce() -> Result<(), Status>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Status::Success,
        Ok(Err(status)) => status,
        Err(_) => {
            log::warn("internal error: a panic in the network plugin");
            Status::InternalError
        }
    }
}

/// Writes an out-parameter.
///
/// # Safety
/// `place` is null or NCCL's, of type `T`.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Status> {
    if place.is_null() {
        return Err(Status::InvalidArgument);
    }
    // SAFETY: not null, so NCCL's place for such a value.
    unsafe { place.write(value) };
    Ok(())
}

fn as_pointer(number: usize) -> Ptr {
    std::ptr::without_provenance_mut(number)
}

unsafe extern "C" fn init_once(log_function: Option<LogFn>) -> Status {
    guard(|| hub::init(log_function))
}

unsafe extern "C" fn init_profiled(log_function: Option<LogFn>, _profiler: ProfilerFn) -> Status {
    guard(|| hub::init(log_function))
}

unsafe extern "C" fn init_context(
    context: Out,
    _comm_id: u64,
    _config: *const CommConfig,
    log_function: Option<LogFn>,
    _profiler: ProfilerFn,
) -> Status {
    guard(|| {
        hub::init(log_function)?;
        // SAFETY: NCCL's place for the context.
        unsafe { put(context, as_pointer(hub::open_context() as usize)) }
    })
}

unsafe extern "C" fn finalize(context: Ptr) -> Status {
    guard(|| {
        hub::close_context(context.addr() as u64);
        Ok(())
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    // SAFETY: NCCL's place for the count.
    guard(|| unsafe { put(count, c_int::from(hub::device().is_ok())) })
}

unsafe extern "C" fn get_properties<T: for<'a> From<&'a Facts>>(device: c_int, properties: *mut T) -> Status {
    guard(|| {
        if device != 0 {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: NCCL's place for the properties of the version whose table this function is in.
        unsafe { put(properties, T::from(&hub::device()?.facts())) }
    })
}

fn listen_for(context: u64, device: c_int, handle: Ptr, comm: Out) -> Status {
    guard(|| {
        if device != 0 || handle.is_null() {
            return Err(Status::InvalidArgument);
        }
        let (pointer, bytes) = hub::listen(context)?;
        // SAFETY: NCCL's buffer for a handle has this length.
        unsafe { handle.cast::<[u8; HANDLE_BYTES]>().write(bytes) };
        // SAFETY: NCCL's place for the pointer.
        unsafe { put(comm, as_pointer(pointer)) }
    })
}

unsafe extern "C" fn listen(device: c_int, handle: Ptr, comm: Out) -> Status {
    listen_for(0, device, handle, comm)
}

unsafe extern "C" fn listen_context(context: Ptr, device: c_int, handle: Ptr, comm: Out) -> Status {
    listen_for(context.addr() as u64, device, handle, comm)
}

fn connect_for(context: u64, device: c_int, handle: Ptr, comm: Out) -> Status {
    guard(|| {
        if device != 0 || handle.is_null() {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: NCCL's buffer for a handle has this length.
        let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().read() };
        let pointer = hub::connect(context, &bytes)?.unwrap_or(0);
        // SAFETY: NCCL's place for the pointer.
        unsafe { put(comm, as_pointer(pointer)) }
    })
}

unsafe extern "C" fn connect(device: c_int, handle: Ptr, comm: Out) -> Status {
    connect_for(0, device, handle, comm)
}

unsafe extern "C" fn connect_device(device: c_int, handle: Ptr, comm: Out, _offload: Out) -> Status {
    connect_for(0, device, handle, comm)
}

unsafe extern "C" fn connect_config(
    device: c_int,
    _config: *const CommConfig,
    handle: Ptr,
    comm: Out,
    _offload: Out,
) -> Status {
    connect_for(0, device, handle, comm)
}

unsafe extern "C" fn connect_context(context: Ptr, device: c_int, handle: Ptr, comm: Out, _offload: Out) -> Status {
    connect_for(context.addr() as u64, device, handle, comm)
}

unsafe extern "C" fn accept(listener: Ptr, comm: Out) -> Status {
    guard(|| {
        let pointer = hub::accept(listener.addr())?.unwrap_or(0);
        // SAFETY: NCCL's place for the pointer.
        unsafe { put(comm, as_pointer(pointer)) }
    })
}

unsafe extern "C" fn accept_device(listener: Ptr, comm: Out, _offload: Out) -> Status {
    // SAFETY: NCCL's arguments, passed on.
    unsafe { accept(listener, comm) }
}

unsafe extern "C" fn reg_mr<Size>(_comm: Ptr, _data: Ptr, _size: Size, kind: c_int, mhandle: Out) -> Status {
    guard(|| {
        if kind != PTR_HOST {
            log::warn("memory of the GPU cannot be registered: this network takes host memory");
            return Err(Status::InvalidArgument);
        }
        // Nothing to register; NCCL only wants it not to be null.
        // SAFETY: NCCL's place for the pointer.
        unsafe { put(mhandle, as_pointer(1)) }
    })
}

unsafe extern "C" fn dereg_mr(_comm: Ptr, _mhandle: Ptr) -> Status {
    Status::Success
}

/// # Safety
/// `comm` is null or a communicator that NCCL has and has not closed.
unsafe fn comm_of<'a>(comm: Ptr) -> Result<&'a Comm, Status> {
    // SAFETY: it was made by `Arc::as_ptr` and the hub keeps it until NCCL closes it.
    unsafe { comm.cast::<Comm>().as_ref() }.ok_or(Status::InvalidArgument)
}

/// # Safety
/// As for [`comm_of`]; `data` is memory of `bytes` bytes that stays NCCL's until the request is done.
unsafe fn post(comm: Ptr, side: Side, data: Ptr, bytes: usize, request: Out) -> Status {
    guard(|| {
        // SAFETY: as promised.
        let comm = unsafe { comm_of(comm)? };
        if comm.side != side || (data.is_null() && bytes > 0) {
            return Err(Status::InvalidArgument);
        }
        comm.ending()?;
        let mut pointer = std::ptr::null_mut();
        if let Some(slot) = comm.take_slot() {
            // An empty message has no memory, but its place must be a pointer.
            let at = if data.is_null() { std::ptr::dangling_mut() } else { data.cast::<u8>() };
            let (stripe, memory) = (comm.next_stripe(), Memory { at, bytes });
            let number = stripe.number;
            let command = match side {
                Side::Send => Command::Send { number, slot: slot.slot(), memory },
                Side::Recv => Command::Receive { number, slot: slot.slot(), memory },
            };
            if !stripe.worker.submit(command) {
                slot.give_back();
                return Err(Status::InternalError);
            }
            pointer = std::ptr::from_ref(slot).cast_mut().cast();
        }
        // SAFETY: NCCL's place for the request, which may hold a hint and is always overwritten.
        unsafe { put(request, pointer) }
    })
}

unsafe extern "C" fn isend<Size: TryInto<usize>>(
    comm: Ptr,
    data: Ptr,
    size: Size,
    _tag: c_int,
    _mhandle: Ptr,
    request: Out,
) -> Status {
    let Ok(bytes) = size.try_into() else { return Status::InvalidArgument };
    // SAFETY: NCCL's arguments, passed on.
    unsafe { post(comm, Side::Send, data, bytes, request) }
}

unsafe extern "C" fn isend_profiled(
    comm: Ptr,
    data: Ptr,
    size: usize,
    tag: c_int,
    mhandle: Ptr,
    _profiled: Ptr,
    request: Out,
) -> Status {
    // SAFETY: NCCL's arguments, passed on.
    unsafe { isend(comm, data, size, tag, mhandle, request) }
}

unsafe extern "C" fn irecv<Size: TryInto<usize> + Copy>(
    comm: Ptr,
    count: c_int,
    data: *const Ptr,
    sizes: *const Size,
    _tags: *const c_int,
    _mhandles: *const Ptr,
    request: Out,
) -> Status {
    if count != 1 || data.is_null() || sizes.is_null() {
        return Status::InvalidArgument;
    }
    // SAFETY: arrays of one element each, as `count` says.
    let (data, size) = unsafe { (*data, *sizes) };
    let Ok(bytes) = size.try_into() else { return Status::InvalidArgument };
    // SAFETY: NCCL's arguments, passed on.
    unsafe { post(comm, Side::Recv, data, bytes, request) }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
unsafe extern "C" fn irecv_profiled(
    comm: Ptr,
    count: c_int,
    data: *const Ptr,
    sizes: *const usize,
    tags: *const c_int,
    mhandles: *const Ptr,
    _profiled: *const Ptr,
    request: Out,
) -> Status {
    // SAFETY: NCCL's arguments, passed on.
    unsafe { irecv(comm, count, data, sizes, tags, mhandles, request) }
}

/// What lands in host memory is visible when its request is done: nothing to flush.
unsafe extern "C" fn iflush(
    _comm: Ptr,
    _count: c_int,
    _data: *const Ptr,
    _sizes: *const c_int,
    _mhandles: *const Ptr,
    request: Out,
) -> Status {
    // SAFETY: NCCL's place for the request.
    guard(|| unsafe { put(request, std::ptr::null_mut()) })
}

unsafe extern "C" fn test(request: Ptr, done: *mut c_int, sizes: *mut c_int) -> Status {
    guard(|| {
        // SAFETY: NCCL's place for the answer.
        unsafe { put(done, 0)? };
        // SAFETY: null, or a request of a communicator that NCCL has not closed.
        let request = unsafe { request.cast::<Request>().as_ref() }.ok_or(Status::InvalidArgument)?;
        if let Some(bytes) = request.test()? {
            if !sizes.is_null() {
                // SAFETY: room for the one size of a request.
                unsafe { sizes.write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
            }
            // SAFETY: as above.
            unsafe { put(done, 1)? };
        }
        Ok(())
    })
}

unsafe extern "C" fn close(object: Ptr) -> Status {
    guard(|| {
        hub::close_object(object.addr());
        Ok(())
    })
}

/// Exports the tables. What they have in common stands here, what differs in their lines.
macro_rules! export {
    ($($(#[$doc:meta])* $symbol:ident: $table:ident {
        $init:ident, $listen:ident, $connect:ident, $accept:ident, $isend:expr, $irecv:expr $(, $tail:ident: $value:expr)*
    })+) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name that NCCL looks up")]
        static $symbol: $table = $table {
            name: NAME.as_ptr(),
            init: $init,
            devices,
            get_properties,
            listen: $listen,
            connect: $connect,
            accept: $accept,
            reg_mr,
            reg_mr_dma_buf: null::<c_void>(),
            dereg_mr,
            isend: $isend,
            irecv: $irecv,
            iflush,
            test,
            close_send: close,
            close_recv: close,
            close_listen: close,
            $($tail: $value,)*
        };
    )+};
}

export! {
    /// NCCL 2.13 to 2.29.
    ncclNetPlugin_v6: NetV6 { init_once, listen, connect, accept, isend::<c_int>, irecv::<c_int> }
    /// NCCL 2.19 on.
    ncclNetPlugin_v7: NetV7 { init_once, listen, connect_device, accept_device, isend::<c_int>, irecv::<c_int>,
        get_device_mr: null(), irecv_consumed: null() }
    /// NCCL 2.20 on.
    ncclNetPlugin_v8: NetV8 { init_once, listen, connect_device, accept_device, isend::<c_int>, irecv::<c_int>,
        get_device_mr: null(), irecv_consumed: null() }
    /// NCCL 2.24 on.
    ncclNetPlugin_v9: NetV9 { init_once, listen, connect_device, accept_device, isend::<usize>, irecv::<usize>,
        get_device_mr: null(), irecv_consumed: null(), make_v_device: null() }
    /// NCCL 2.26 on.
    ncclNetPlugin_v10: NetV10 { init_profiled, listen, connect_config, accept_device, isend_profiled, irecv_profiled,
        get_device_mr: null(), irecv_consumed: null(), make_v_device: null() }
    /// NCCL 2.28 on: a context for each communicator.
    ncclNetPlugin_v11: NetV11 { init_context, listen_context, connect_context, accept_device, isend_profiled,
        irecv_profiled, get_device_mr: null(), irecv_consumed: null(), make_v_device: null(), finalize: finalize,
        set_net_attr: null() }
    /// NCCL 2.30 on.
    ncclNetPlugin_v12: NetV12 { init_context, listen_context, connect_context, accept_device, isend_profiled,
        irecv_profiled, get_device_mr: null(), irecv_consumed: null(), make_v_device: null(), finalize: finalize,
        set_net_attr: null() }
}
