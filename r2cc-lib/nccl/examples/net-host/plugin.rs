//! Calls a net plugin as NCCL does: by the name of its table, and by position in it. Layouts are written down here
//! once more, from the interface, so that a mistake in the plugin's own is not shared.
#![allow(clippy::expect_used, reason = "a host that cannot call the plugin has failed")]

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

pub(crate) type Ptr = *mut c_void;
type Function = *const c_void;

pub(crate) const SUCCESS: c_int = 0;

/// Warnings that the plugin has written.
pub(crate) static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// NCCL's logger takes more arguments as the format says; the plugin passes one string, which arrives like this.
extern "C" fn log(level: c_int, _: c_ulong, _: *const c_char, _: c_int, format: *const c_char, text: *const c_char) {
    // SAFETY: both are C strings of the plugin.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert!(format.to_bytes().ends_with(b"%s"));
    let text = text.to_string_lossy().into_owned();
    eprintln!("[{}] {level} {text}", std::process::id());
    if level == 2 {
        WARNINGS.lock().expect("no panic while locked").push(text);
    }
}

/// One loaded plugin, seen through one version of its interface.
#[derive(Clone, Copy)]
pub(crate) struct Plugin {
    version: u32,
    library: usize,
    table: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
union Words {
    words: [u64; 16],
    bytes: [u8; 128],
}

impl Plugin {
    pub(crate) fn load(path: &str, version: u32) -> Self {
        let name = CString::new(path).expect("a path without a zero");
        let symbol = CString::new(format!("ncclNetPlugin_v{version}")).expect("a name without a zero");
        // SAFETY: loads the plugin under test; its constructor only sets variables.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: the loader's text on what has just failed, for this thread.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            panic!("cannot load {path}: {}", why.to_string_lossy());
        }
        // SAFETY: the handle is open.
        let table = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        assert!(!table.is_null(), "{path} has no table of version {version}");
        Self { version, library: library as usize, table: table as usize }
    }

    pub(crate) fn unload(self) {
        // SAFETY: opened by `load`, used no more.
        unsafe { libc::dlclose(self.library as *mut c_void) };
    }

    fn at(self, position: usize) -> Function {
        // SAFETY: every table has at least as many pointers as its version's positions that are asked for here.
        unsafe { *(self.table as *const Function).add(position) }
    }

    pub(crate) fn name(self) -> String {
        // SAFETY: the first pointer of every table is a C string.
        unsafe { CStr::from_ptr(self.at(0).cast()) }.to_string_lossy().into_owned()
    }

    /// Initialises; the context, null below version 11.
    pub(crate) fn init(self, comm_id: u64) -> Result<Ptr, c_int> {
        let (mut context, config): (Ptr, c_int) = (null_mut(), -1);
        // SAFETY: the signatures of the versions' first function.
        let status = unsafe {
            match self.version {
                ..=9 => std::mem::transmute::<Function, extern "C" fn(Function) -> c_int>(self.at(1))(log as Function),
                10 => std::mem::transmute::<Function, extern "C" fn(Function, Function) -> c_int>(self.at(1))(
                    log as Function,
                    null(),
                ),
                _ => std::mem::transmute::<
                    Function,
                    extern "C" fn(*mut Ptr, u64, *const c_int, Function, Function) -> c_int,
                >(self.at(1))(
                    &raw mut context, comm_id, &raw const config, log as Function, null()
                ),
            }
        };
        if status == SUCCESS { Ok(context) } else { Err(status) }
    }

    pub(crate) fn finalize(self, context: Ptr) {
        if self.version >= 11 {
            // SAFETY: the signature of the function at this position.
            let finalize: extern "C" fn(Ptr) -> c_int = unsafe { std::mem::transmute(self.at(20)) };
            assert_eq!(finalize(context), SUCCESS);
        }
    }

    /// Number of devices, and what must hold of the properties of the first.
    pub(crate) fn check_device(self) {
        // SAFETY: the signature of the function at this position.
        let devices: extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(self.at(2)) };
        // SAFETY: as above; the properties are written through the pointer.
        let properties: extern "C" fn(c_int, Ptr) -> c_int = unsafe { std::mem::transmute(self.at(3)) };
        let mut count = 0;
        assert_eq!((devices(&raw mut count), count), (SUCCESS, 1));
        let mut place = Words { bytes: [0xa5; 128] };
        assert_eq!(properties(0, (&raw mut place).cast()), SUCCESS);
        // SAFETY: plain integers.
        let words = unsafe { place.words };
        // SAFETY: plain bytes.
        let bytes = unsafe { place.bytes };
        let int = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        // SAFETY: the first word is the name.
        let name = unsafe { CStr::from_ptr(words[0] as *const c_char) };
        assert!(!name.is_empty() && words[2] != 0, "name and guid");
        // ptrSupport, then speed, port, latency, maxComms, maxRecvs behind what the versions put between.
        let speed = 28 + 4 * [0, 1, 2][usize::from(self.version >= 8) + usize::from(self.version >= 9)];
        assert_eq!((int(24), int(speed + 16)), (1, 1), "host pointers, one receive a request");
        assert!(int(speed) > 0 && int(speed + 12) > 0, "speed and communicators");
        if self.version >= 7 {
            assert_eq!((int(speed + 20), int(speed + 24)), (0, 0), "a device of the host");
        }
        let end: usize = match self.version {
            6 => 48,
            7 => 56,
            8 => 60,
            9 | 10 => 104,
            11 => 108,
            _ => 128,
        };
        if self.version >= 9 {
            assert_eq!((int(64), int(68)), (1, 0), "one physical device, itself");
            let sizes = if self.version >= 12 { 13 } else { 11 };
            let most = 1 << 40;
            assert!((1..=most).contains(&words[sizes]) && (1..=most).contains(&words[sizes + 1]));
        }
        if self.version >= 12 {
            assert_eq!(int(124), -1, "no rail, no plane");
        }
        assert!(bytes[end.max(60).next_multiple_of(8)..].iter().all(|b| *b == 0xa5), "written beyond the struct");
    }

    pub(crate) fn listen(self, context: Ptr) -> Result<([u8; 128], Ptr), c_int> {
        let (mut handle, mut comm) = ([0; 128], null_mut());
        // SAFETY: the signatures of the function at this position.
        let status = unsafe {
            if self.version < 11 {
                let listen: extern "C" fn(c_int, Ptr, *mut Ptr) -> c_int = std::mem::transmute(self.at(4));
                listen(0, handle.as_mut_ptr().cast(), &raw mut comm)
            } else {
                let listen: extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> c_int = std::mem::transmute(self.at(4));
                listen(context, 0, handle.as_mut_ptr().cast(), &raw mut comm)
            }
        };
        if status == SUCCESS && !comm.is_null() { Ok((handle, comm)) } else { Err(status) }
    }

    /// One attempt; null: again later.
    pub(crate) fn connect(self, context: Ptr, handle: &mut [u8; 128]) -> Result<Ptr, c_int> {
        let (mut comm, mut offload, config): (Ptr, Ptr, c_int) = (null_mut(), null_mut(), -1);
        let (handle, comm_at, offload) = (handle.as_mut_ptr().cast(), &raw mut comm, &raw mut offload);
        // SAFETY: the signatures of the function at this position.
        let status = unsafe {
            let at = self.at(5);
            match self.version {
                6 => std::mem::transmute::<Function, extern "C" fn(c_int, Ptr, *mut Ptr) -> c_int>(at)(
                    0, handle, comm_at,
                ),
                7..=9 => std::mem::transmute::<Function, extern "C" fn(c_int, Ptr, *mut Ptr, *mut Ptr) -> c_int>(at)(
                    0, handle, comm_at, offload,
                ),
                10 => std::mem::transmute::<
                    Function,
                    extern "C" fn(c_int, *const c_int, Ptr, *mut Ptr, *mut Ptr) -> c_int,
                >(at)(0, &raw const config, handle, comm_at, offload),
                _ => std::mem::transmute::<Function, extern "C" fn(Ptr, c_int, Ptr, *mut Ptr, *mut Ptr) -> c_int>(at)(
                    context, 0, handle, comm_at, offload,
                ),
            }
        };
        if status == SUCCESS { Ok(comm) } else { Err(status) }
    }

    pub(crate) fn accept(self, listener: Ptr) -> Result<Ptr, c_int> {
        let (mut comm, mut offload): (Ptr, Ptr) = (null_mut(), null_mut());
        // SAFETY: the signatures of the function at this position.
        let status = unsafe {
            if self.version == 6 {
                let accept: extern "C" fn(Ptr, *mut Ptr) -> c_int = std::mem::transmute(self.at(6));
                accept(listener, &raw mut comm)
            } else {
                let accept: extern "C" fn(Ptr, *mut Ptr, *mut Ptr) -> c_int = std::mem::transmute(self.at(6));
                accept(listener, &raw mut comm, &raw mut offload)
            }
        };
        if status == SUCCESS { Ok(comm) } else { Err(status) }
    }

    pub(crate) fn reg_mr(self, comm: Ptr, data: *mut u8, bytes: usize) -> Ptr {
        let mut handle = null_mut();
        // SAFETY: the signatures of the function at this position.
        let status = unsafe {
            if self.version < 8 {
                let reg: extern "C" fn(Ptr, Ptr, c_int, c_int, *mut Ptr) -> c_int = std::mem::transmute(self.at(7));
                reg(comm, data.cast(), bytes as c_int, 1, &raw mut handle)
            } else {
                let reg: extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> c_int = std::mem::transmute(self.at(7));
                reg(comm, data.cast(), bytes, 1, &raw mut handle)
            }
        };
        assert_eq!(status, SUCCESS);
        handle
    }

    pub(crate) fn dereg_mr(self, comm: Ptr, handle: Ptr) {
        // SAFETY: the signature of the function at this position.
        let dereg: extern "C" fn(Ptr, Ptr) -> c_int = unsafe { std::mem::transmute(self.at(9)) };
        assert_eq!(dereg(comm, handle), SUCCESS);
    }

    /// A request, or null: again later. The place of the request holds NCCL's hint before.
    pub(crate) fn isend(self, comm: Ptr, data: *mut u8, bytes: usize, mhandle: Ptr) -> Result<Ptr, c_int> {
        let (data, mut request) = (data.cast(), std::ptr::without_provenance_mut(1));
        // SAFETY: the signatures of the function at this position.
        let status =
            unsafe {
                let at = self.at(10);
                match self.version {
                    ..=8 => std::mem::transmute::<
                        Function,
                        extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> c_int,
                    >(at)(comm, data, bytes as c_int, 0, mhandle, &raw mut request),
                    9 => {
                        std::mem::transmute::<Function, extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr) -> c_int>(
                            at,
                        )(comm, data, bytes, 0, mhandle, &raw mut request)
                    }
                    _ => std::mem::transmute::<
                        Function,
                        extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> c_int,
                    >(at)(comm, data, bytes, 0, mhandle, null_mut(), &raw mut request),
                }
            };
        if status == SUCCESS { Ok(request) } else { Err(status) }
    }

    /// As [`Plugin::isend`].
    pub(crate) fn irecv(self, comm: Ptr, data: *mut u8, bytes: usize, mhandle: Ptr) -> Result<Ptr, c_int> {
        let (data, size, tag, mut request): (Ptr, c_int, c_int, Ptr) =
            (data.cast(), bytes as c_int, 0, std::ptr::without_provenance_mut(1));
        let (data, size, bytes, tag) = (&raw const data, &raw const size, &raw const bytes, &raw const tag);
        let (mhandle, request_at) = (&raw const mhandle, &raw mut request);
        type Short = extern "C" fn(Ptr, c_int, *const Ptr, *const c_int, *const c_int, *const Ptr, *mut Ptr) -> c_int;
        type Long = extern "C" fn(Ptr, c_int, *const Ptr, *const usize, *const c_int, *const Ptr, *mut Ptr) -> c_int;
        type Profiled = extern "C" fn(
            Ptr,
            c_int,
            *const Ptr,
            *const usize,
            *const c_int,
            *const Ptr,
            *const Ptr,
            *mut Ptr,
        ) -> c_int;
        // SAFETY: the signatures of the function at this position.
        let status = unsafe {
            let at = self.at(11);
            match self.version {
                ..=8 => std::mem::transmute::<Function, Short>(at)(comm, 1, data, size, tag, mhandle, request_at),
                9 => std::mem::transmute::<Function, Long>(at)(comm, 1, data, bytes, tag, mhandle, request_at),
                _ => std::mem::transmute::<Function, Profiled>(at)(
                    comm,
                    1,
                    data,
                    bytes,
                    tag,
                    mhandle,
                    null(),
                    request_at,
                ),
            }
        };
        if status == SUCCESS { Ok(request) } else { Err(status) }
    }

    /// Bytes of a request that is done.
    pub(crate) fn test(self, request: Ptr) -> Result<Option<usize>, c_int> {
        // SAFETY: the signature of the function at this position.
        let test: extern "C" fn(Ptr, *mut c_int, *mut c_int) -> c_int = unsafe { std::mem::transmute(self.at(13)) };
        let (mut done, mut size) = (7, -1);
        match test(request, &raw mut done, &raw mut size) {
            SUCCESS => {
                assert!(done == 0 || done == 1, "done must be written");
                Ok((done == 1).then_some(size as usize))
            }
            status => Err(status),
        }
    }

    fn close(self, position: usize, object: Ptr) {
        // SAFETY: the signature of the functions at these positions.
        let close: extern "C" fn(Ptr) -> c_int = unsafe { std::mem::transmute(self.at(position)) };
        assert_eq!(close(object), SUCCESS);
    }

    pub(crate) fn close_send(self, comm: Ptr) {
        self.close(14, comm);
    }

    pub(crate) fn close_recv(self, comm: Ptr) {
        self.close(15, comm);
    }

    pub(crate) fn close_listen(self, comm: Ptr) {
        self.close(16, comm);
    }
}
