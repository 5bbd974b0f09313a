//! A captured CUDA graph.

use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};

use super::device::during;
use super::{Device, GpuError};

/// What was enqueued on a stream, ready to be replayed.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    replayable: sys::CUgraphExec,
    /// What the capture took.
    pub captured_in: Duration,
    /// What making it replayable took.
    pub instantiated_in: Duration,
}

impl Graph {
    /// Captures what `enqueue` puts on the device's stream.
    ///
    /// # Errors
    /// If it, or the driver, fails.
    pub fn capture(device: &Device, enqueue: impl FnOnce() -> Result<(), GpuError>) -> Result<Self, GpuError> {
        let begin = Instant::now();
        let stream = device.stream();
        // SAFETY: the stream lives as long as the process. Thread-local: NCCL's own threads go on meanwhile.
        during("begin a capture", unsafe {
            result::stream::begin_capture(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        })?;
        let enqueued = enqueue();
        // SAFETY: this stream's capture was begun above; it is ended also when nothing could be enqueued.
        let graph = during("end a capture", unsafe { result::stream::end_capture(stream) });
        enqueued?;
        let graph = graph?;
        let captured_in = begin.elapsed();
        let begin = Instant::now();
        let mut replayable = std::ptr::null_mut();
        // SAFETY: the graph was just captured; one handle is written.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut replayable, graph, 0) };
        during("make a graph replayable", made.result())?;
        // SAFETY: both handles are valid.
        during("send a graph to the GPU", unsafe { result::graph::upload(replayable, stream) })?;
        device.finish()?;
        Ok(Self { graph, replayable, captured_in, instantiated_in: begin.elapsed() })
    }

    /// Enqueues everything that was captured.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn replay(&self, device: &Device) -> Result<(), GpuError> {
        // SAFETY: both handles are valid; the buffers that the graph uses are never freed.
        during("replay a graph", unsafe { result::graph::launch(self.replayable, device.stream()) })
    }

    /// Gives it up; nothing of it may be running.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn destroy(self) -> Result<(), GpuError> {
        // SAFETY: valid handles that nobody uses again.
        unsafe {
            during("destroy a graph", result::graph::exec_destroy(self.replayable))?;
            during("destroy a graph", result::graph::destroy(self.graph))
        }
    }
}
