//! Our own table of the NCCL functions that a rank calls.
//!
//! An interposer or an NCCL that is loaded already comes first (`RTLD_DEFAULT`), so that what is tested is what an
//! application would get; else the library asked for, else `libnccl.so.2` from the search path, made global as a
//! linked library would be.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use r2cc::{DType, ReduceOp};

use super::GpuError;

/// The function of a collective, which a fault's position counts.
pub const ALL_REDUCE: &str = "ncclAllReduce";
/// Its name on the search path.
const DEFAULT: &str = "libnccl.so.2";

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// What identifies a communicator to those that are to join it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// As text, for a line of JSON.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// From that text.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; 128];
        if text.len() != 2 * bytes.len() || !text.is_ascii() {
            return None;
        }
        for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }
}

type Comm = *mut c_void;
type Stream = *mut c_void;

/// The functions, with their C signatures.
#[derive(Debug, Clone, Copy)]
struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
}

/// An NCCL library in use.
#[derive(Debug, Clone)]
pub struct Nccl {
    functions: Functions,
    path: PathBuf,
    version: c_int,
}

impl Nccl {
    /// Finds the library: what is loaded already, else `asked`, else the search path.
    ///
    /// # Errors
    /// [`GpuError::Missing`] without one, or when a function that is used here is not in it.
    pub fn load(asked: Option<&Path>) -> Result<Self, GpuError> {
        let handle = if find(libc::RTLD_DEFAULT, ALL_REDUCE).is_some() {
            libc::RTLD_DEFAULT
        } else {
            open(asked.unwrap_or(Path::new(DEFAULT)))?
        };
        // SAFETY: functions of NCCL's C interface by their names; each field has its function's signature.
        let functions = unsafe {
            Functions {
                version: function(handle, "ncclGetVersion")?,
                unique_id: function(handle, "ncclGetUniqueId")?,
                init_rank: function(handle, "ncclCommInitRank")?,
                all_reduce: function(handle, ALL_REDUCE)?,
                async_error: function(handle, "ncclCommGetAsyncError")?,
                destroy: function(handle, "ncclCommDestroy")?,
                abort: function(handle, "ncclCommAbort")?,
                error_text: function(handle, "ncclGetErrorString")?,
                last_error: function(handle, "ncclGetLastError")?,
            }
        };
        let path = file_of(functions.all_reduce as *const c_void).ok_or_else(|| {
            GpuError::missing("NCCL", "its functions lie in no file", "it has to be a shared library")
        })?;
        let mut library = Self { functions, path, version: 0 };
        let mut version = 0;
        // SAFETY: writes one int.
        library.judge("ncclGetVersion", unsafe { (functions.version)(&raw mut version) })?;
        library.version = version;
        Ok(library)
    }

    /// The file that `ncclAllReduce` lies in, which is what a fault's probe is put on.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `2.28.9`.
    pub fn version_text(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// A fresh identity; rank 0 makes it, and listens from then on.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub fn unique_id(&self) -> Result<UniqueId, GpuError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        self.judge("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// Joins a communicator; returns when all ranks have.
    ///
    /// # Errors
    /// If NCCL cannot.
    pub fn join(&self, id: UniqueId, rank: usize, world: usize) -> Result<Communicator<'_>, GpuError> {
        let mut comm = std::ptr::null_mut();
        // SAFETY: writes one handle; the calling thread has a current GPU.
        let result = unsafe { (self.functions.init_rank)(&raw mut comm, world as c_int, id, rank as c_int) };
        self.judge("ncclCommInitRank", result)?;
        Ok(Communicator { library: self, comm })
    }

    fn judge(&self, call: &'static str, result: c_int) -> Result<(), GpuError> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL answers any code with a constant text, and a null communicator with the process's last text.
        let (code, last) = unsafe {
            (text((self.functions.error_text)(result)), text((self.functions.last_error)(std::ptr::null_mut())))
        };
        Err(GpuError::Nccl { call, code, last })
    }
}

/// A communicator of this process.
#[derive(Debug)]
pub struct Communicator<'a> {
    library: &'a Nccl,
    comm: Comm,
}

impl Communicator<'_> {
    /// Enqueues an AllReduce of `count` elements on `stream`.
    ///
    /// # Errors
    /// If NCCL refuses.
    ///
    /// # Safety
    /// Both addresses are memory of this rank's GPU with room for the elements, until the stream is done.
    pub unsafe fn all_reduce(
        &self,
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> Result<(), GpuError> {
        let all_reduce = self.library.functions.all_reduce;
        // SAFETY: by the caller; the communicator lives.
        let result = unsafe { all_reduce(from, to, count, type_code(dtype), op_code(op), self.comm, stream) };
        self.library.judge(ALL_REDUCE, result)
    }

    /// What NCCL's own threads met, if it is an error.
    ///
    /// # Errors
    /// That error.
    pub fn async_error(&self) -> Result<(), GpuError> {
        let mut state = SUCCESS;
        // SAFETY: writes one int; the communicator lives.
        let asked = unsafe { (self.library.functions.async_error)(self.comm, &raw mut state) };
        self.library.judge("ncclCommGetAsyncError", asked)?;
        if state == IN_PROGRESS { Ok(()) } else { self.library.judge("a communicator's own threads", state) }
    }

    /// Ends it in good order; nothing of it may be running.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub fn destroy(self) -> Result<(), GpuError> {
        // SAFETY: the communicator lives, and is not used again.
        let result = unsafe { (self.library.functions.destroy)(self.comm) };
        self.library.judge("ncclCommDestroy", result)
    }

    /// Ends it whatever it is doing.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub fn abort(self) -> Result<(), GpuError> {
        // SAFETY: as in `destroy`.
        let result = unsafe { (self.library.functions.abort)(self.comm) };
        self.library.judge("ncclCommAbort", result)
    }
}

/// `ncclDataType_t`.
fn type_code(dtype: DType) -> c_int {
    match dtype {
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// `ncclRedOp_t`.
fn op_code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

fn open(path: &Path) -> Result<*mut c_void, GpuError> {
    let name = CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default();
    // SAFETY: a NUL-terminated name; NCCL's initialisers have no precondition.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: a text of the loader's, valid until its next call on this thread.
    let why = unsafe { text(libc::dlerror()) };
    Err(GpuError::missing("NCCL", why, "give the library's path by --nccl PATH"))
}

/// The function `name`, as a pointer of type `F`.
///
/// # Safety
/// `F` is a function pointer with the signature of the function that goes by this name.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &str) -> Result<F, GpuError> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    let found = find(handle, name)
        .ok_or_else(|| GpuError::missing("NCCL", format!("the library has no {name}"), "NCCL 2.19 or newer has it"))?;
    // SAFETY: by the caller; both are pointers of one size.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

fn find(handle: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: a handle of the loader's, or RTLD_DEFAULT, and a NUL-terminated name.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The file that holds `address`, without links in its path.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: plain old data, for which all-zero is valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: writes the structure; any address may be asked for.
    if unsafe { libc::dladdr(address, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a NUL-terminated text of the loader's, which lives as long as the library.
    let path = PathBuf::from(unsafe { text(found.dli_fname) });
    Some(path.canonicalize().unwrap_or(path))
}

/// # Safety
/// Null, or a NUL-terminated text.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_text() {
        let id = UniqueId(std::array::from_fn(|at| at as u8 ^ 0xa5));
        assert_eq!(UniqueId::from_hex(&id.to_hex()), Some(id));
        assert_eq!(UniqueId::from_hex("a5"), None);
        assert_eq!(UniqueId::from_hex(&"é".repeat(128)), None);
    }

    #[test]
    fn a_library_that_is_not_there_is_missing_with_a_hint() {
        let error = Nccl::load(Some(Path::new("/nowhere/libnccl.so.2"))).unwrap_err();
        let text = error.to_string();
        assert!(error.is_environment() && text.contains("/nowhere/libnccl.so.2") && text.contains("--nccl"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_named_by_the_first_that_lacks() {
        let error = Nccl::load(Some(Path::new("libm.so.6"))).unwrap_err().to_string();
        assert!(error.contains("ncclGetVersion"), "{error}");
    }
}
