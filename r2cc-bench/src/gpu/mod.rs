//! The GPU side of the backend `nccl`: the driver, our own kernels, and the NCCL library, all found at run time,
//! so that everything builds and starts where there is none of them.
//!
//! [`survey`] says what a machine has, [`Device`] is one GPU with the buffers and kernels of a rank, [`nccl`] the
//! table of NCCL's functions. Nothing here knows suites, clusters or faults. What is missing is an
//! [`GpuError::Missing`] with the reason; the command ends in exit code 4 then.

mod device;
mod elements;
mod graph;
pub mod loaded;
pub mod nccl;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use device::{Buffer, Device};
pub use elements::Elements;
pub use graph::Graph;

use crate::elements::ElementsError;

/// What went wrong on the GPU side.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The machine lacks something.
    #[error("{what}: {why}\n  hint: {hint}")]
    Missing {
        /// What.
        what: String,
        /// How that shows.
        why: String,
        /// What to do.
        hint: String,
    },
    /// The CUDA driver refused.
    #[error("CUDA: cannot {action}: {source}")]
    Cuda {
        /// What it was to do.
        action: &'static str,
        /// Why not.
        source: cudarc::driver::DriverError,
    },
    /// NCCL refused, or reports an error of a communicator.
    #[error("NCCL: {call}: {code}{}", if last.is_empty() { String::new() } else { format!("; last: {last}") })]
    Nccl {
        /// The function.
        call: &'static str,
        /// Its result, in words.
        code: String,
        /// NCCL's own last warning.
        last: String,
    },
    /// Our kernels and our processors' code do not agree.
    #[error("the kernels give {found} where the processor's code gives {expected}")]
    KernelsDiffer {
        /// The processor's.
        expected: String,
        /// The kernels'.
        found: String,
    },
    /// No such inputs.
    #[error(transparent)]
    Elements(#[from] ElementsError),
}

impl GpuError {
    fn missing(what: impl Into<String>, why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Missing { what: what.into(), why: why.into(), hint: hint.into() }
    }

    /// Whether the machine is at fault, not the job.
    pub fn is_environment(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// What a process found: its GPU and the NCCL library that it really uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Name of the GPU.
    pub gpu: String,
    /// GPUs of the machine.
    pub gpus: usize,
    /// CUDA version of the driver, `13.0`.
    pub cuda: String,
    /// The driver's library that is mapped.
    pub libcuda: PathBuf,
    /// NCCL's version, `2.28.9`.
    pub nccl: String,
    /// The NCCL library that is mapped.
    pub libnccl: PathBuf,
}

/// Looks at this machine without making anything but a CUDA context; `nccl` is the library asked for.
///
/// # Errors
/// [`GpuError::Missing`] names the first thing that is missing.
pub fn survey(ordinal: usize, nccl: Option<&Path>) -> Result<(Device, nccl::Nccl, GpuFacts), GpuError> {
    let device = Device::open(ordinal)?;
    let library = nccl::Nccl::load(nccl)?;
    let libcuda = loaded::mapped_here("libcuda.so").ok_or_else(|| {
        GpuError::missing("libcuda", "it is not among this process's mappings", "is /proc mounted and readable?")
    })?;
    let facts = GpuFacts {
        gpu: device.name().to_owned(),
        gpus: device.count(),
        cuda: device.cuda_version(),
        libcuda,
        nccl: library.version_text(),
        libnccl: library.path().to_owned(),
    };
    Ok((device, library, facts))
}
