//! One GPU: its primary context, one stream, buffers, and the module with our kernels. What is made here lives until
//! the process ends: a rank has one device for its whole life, and freeing memory waits for kernels that may hang.

use std::ffi::{CString, c_void};

use cudarc::driver::{DriverError, result, sys};

use super::GpuError;

/// Our kernels.
const KERNELS: &str = include_str!("kernels.ptx");
/// Enough blocks to fill any GPU of today; each thread strides over the buffer.
const BLOCKS: u32 = 1024;
const THREADS: u32 = 256;

/// Gives an error of the driver its action.
pub(super) fn during<T>(action: &'static str, outcome: Result<T, DriverError>) -> Result<T, GpuError> {
    outcome.map_err(|source| GpuError::Cuda { action, source })
}

/// Memory of the GPU.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    pub(super) at: sys::CUdeviceptr,
    pub(super) bytes: usize,
}

impl Buffer {
    /// Its address, as NCCL takes it.
    pub fn as_ptr(self) -> *mut c_void {
        self.at as *mut c_void
    }

    /// Its size.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// A GPU in use by this thread.
#[derive(Debug)]
pub struct Device {
    name: String,
    count: usize,
    version: i32,
    stream: sys::CUstream,
    pub(super) fill: sys::CUfunction,
    pub(super) check: sys::CUfunction,
}

impl Device {
    /// Opens GPU `ordinal` for the calling thread and loads the kernels.
    ///
    /// # Errors
    /// [`GpuError::Missing`] without a driver or without that GPU.
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        // SAFETY: looks for a library by name; loading NVIDIA's driver library has no precondition.
        if !unsafe { sys::is_culib_present() } {
            let why = "no libcuda.so or libcuda.so.1 on the library search path";
            return Err(GpuError::missing(
                "the CUDA driver",
                why,
                "the backend nccl needs an NVIDIA GPU and its driver",
            ));
        }
        let no_gpu = |source: DriverError| {
            GpuError::missing("a GPU", format!("the CUDA driver says {source}"), "`nvidia-smi` lists the GPUs it sees")
        };
        result::init().map_err(no_gpu)?;
        let count = during("count GPUs", result::device::get_count())? as usize;
        if ordinal >= count {
            let why = format!("number {ordinal} of {count} is not there");
            return Err(GpuError::missing("a GPU", why, "CUDA_VISIBLE_DEVICES names the GPUs a process may use"));
        }
        let mut version = 0;
        // SAFETY: writes one int.
        during("ask the driver's version", unsafe { sys::cuDriverGetVersion(&raw mut version) }.result())?;
        let device = during("open a GPU", result::device::get(ordinal as i32))?;
        let name = during("name the GPU", result::device::get_name(device))?;
        // SAFETY: the device is valid; the context is kept for the life of the process. NCCL uses the same one.
        let context = during("use the GPU", unsafe { result::primary_ctx::retain(device) })?;
        // SAFETY: the context has just been retained.
        during("use the GPU", unsafe { result::ctx::set_current(context) })?;
        let stream = during("make a stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        // SAFETY: PTX text that ends in NUL.
        let module =
            during("load the kernels", unsafe { result::module::load_data(terminated(KERNELS).as_ptr().cast()) })?;
        let function = |name: &str| {
            // SAFETY: the module is loaded and never unloaded.
            during("find a kernel", unsafe { result::module::get_function(module, terminated(name)) })
        };
        let (fill, check) = (function("r2cc_fill_f32")?, function("r2cc_check_f32")?);
        Ok(Self { name, count, version, stream, fill, check })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// GPUs that this process may use.
    pub fn count(&self) -> usize {
        self.count
    }

    /// CUDA version of the driver: `13.0`.
    pub fn cuda_version(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// The stream that everything runs on.
    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Memory for `bytes`, at least one.
    ///
    /// # Errors
    /// If there is no room.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, GpuError> {
        // SAFETY: a plain allocation, never freed.
        let at = during("allocate memory", unsafe { result::malloc_sync(bytes.max(1)) })?;
        Ok(Buffer { at, bytes })
    }

    /// Copies to the GPU, from `offset` of the buffer.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn write(&self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), GpuError> {
        assert!(offset + bytes.len() <= buffer.bytes, "a copy stays in its buffer");
        // SAFETY: the range lies in the buffer, which is never freed; the copy is over when this returns.
        during("copy to the GPU", unsafe { result::memcpy_htod_sync(buffer.at + offset as u64, bytes) })
    }

    /// Copies from the GPU, from `offset` of the buffer.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn read(&self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), GpuError> {
        assert!(offset + bytes.len() <= buffer.bytes, "a copy stays in its buffer");
        // SAFETY: as in `write`.
        during("copy from the GPU", unsafe { result::memcpy_dtoh_sync(bytes, buffer.at + offset as u64) })
    }

    /// Whether everything on the stream is done.
    ///
    /// # Errors
    /// If something on it failed.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        // SAFETY: the stream lives as long as the process.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => during("run what was enqueued", error.result()).map(|()| true),
        }
    }

    /// Waits for everything on the stream; for work that cannot hang.
    ///
    /// # Errors
    /// If something on it failed.
    pub fn finish(&self) -> Result<(), GpuError> {
        // SAFETY: as in `is_idle`.
        during("run what was enqueued", unsafe { result::stream::synchronize(self.stream) })
    }

    /// Starts one of our kernels on the stream.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, and addresses among them to memory of the size
    /// that the kernel is told.
    pub(super) unsafe fn launch(&self, kernel: sys::CUfunction, arguments: &mut [*mut c_void]) -> Result<(), GpuError> {
        let (grid, block) = ((BLOCKS, 1, 1), (THREADS, 1, 1));
        // SAFETY: by the caller; the module is never unloaded.
        let launched = unsafe { result::launch_kernel(kernel, grid, block, 0, self.stream, arguments) };
        during("start a kernel", launched)
    }
}

fn terminated(text: &str) -> CString {
    CString::new(text).expect("constants of ours have no NUL inside")
}
