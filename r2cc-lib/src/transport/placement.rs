//! Where a message comes from and where it lands: raw memory of the caller, who waits until the
//! collective is over, and what is done with a chunk that counts.

use crate::collective::kernel::{self, Operand};
use crate::dtype::{DType, ReduceOp};
use crate::repair::Chunk;

/// Bytes to send. They stay unchanged until the message is done: they are what a replay reads.
#[derive(Debug)]
pub struct Source {
    ptr: *const u8,
    bytes: usize,
    /// What `ptr` points to, if the bytes are our own.
    copy: Option<Box<[u8]>>,
}

// SAFETY: the memory belongs to a caller that blocks, or keeps it untouched, until the message is done.
unsafe impl Send for Source {}

impl Source {
    /// `bytes` bytes at `ptr`.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the message is reported done, or its link is dropped.
    pub unsafe fn new(ptr: *const u8, bytes: usize) -> Self {
        Self { ptr, bytes, copy: None }
    }

    /// The same bytes in memory of our own: the caller's is not read again.
    pub(super) fn into_copy(self) -> Self {
        // SAFETY: the memory that `new` was promised.
        let copy: Box<[u8]> = unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }.into();
        Self { ptr: copy.as_ptr(), bytes: self.bytes, copy: Some(copy) }
    }

    /// Whether the caller's memory is not read any more.
    pub(super) fn is_copy(&self) -> bool {
        self.copy.is_some()
    }

    /// Length, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes of a chunk of this message.
    pub(super) fn chunk(&self, chunk: &Chunk) -> &[u8] {
        let offset = chunk.offset as usize;
        assert!(offset + chunk.len as usize <= self.bytes, "the sender cuts chunks inside the message");
        // SAFETY: inside the memory that `new` was promised, or inside the copy.
        unsafe { std::slice::from_raw_parts(self.ptr.add(offset), chunk.len as usize) }
    }
}

/// A reduction with what is there.
#[derive(Clone, Copy, Debug)]
struct Reduction {
    op: ReduceOp,
    operand: *const u8,
    finish_world: Option<usize>,
}

/// Memory that a message lands in.
#[derive(Clone, Copy, Debug)]
pub struct Sink {
    dst: *mut u8,
    bytes: usize,
    /// Of bytes without a type, none.
    dtype: Option<DType>,
    reduction: Option<Reduction>,
}

// SAFETY: as for `Source`.
unsafe impl Send for Sink {}

impl Sink {
    /// Incoming bytes replace what is at `dst`.
    ///
    /// # Safety
    /// The memory must stay valid, and nobody else may touch it, until the message has landed or its link is dropped.
    pub unsafe fn copy(dst: *mut u8, bytes: usize, dtype: DType) -> Self {
        Self { dst, bytes, dtype: Some(dtype), reduction: None }
    }

    /// Incoming bytes, of whatever they are made, replace what is at `dst`.
    ///
    /// # Safety
    /// As for [`Sink::copy`].
    pub unsafe fn raw(dst: *mut u8, bytes: usize) -> Self {
        Self { dst, bytes, dtype: None, reduction: None }
    }

    /// `dst = operand op incoming`; `finish_world`: this completes the elements of a collective of that many ranks.
    ///
    /// # Safety
    /// As for [`Sink::copy`]; `operand` is `dst` itself or does not overlap it, and both are aligned for `dtype`.
    pub unsafe fn reduce(
        dst: *mut u8,
        bytes: usize,
        dtype: DType,
        op: ReduceOp,
        operand: *const u8,
        finish_world: Option<usize>,
    ) -> Self {
        Self { dst, bytes, dtype: Some(dtype), reduction: Some(Reduction { op, operand, finish_world }) }
    }

    /// Length, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Type of its elements, if they have one.
    pub(super) fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Whether chunks are read in place (a copy) or must be whole before they are applied (a reduction).
    pub(super) fn is_copy(&self) -> bool {
        self.reduction.is_none()
    }

    /// Whether the chunk lies inside and on element bounds.
    pub(super) fn accepts(&self, chunk: &Chunk) -> bool {
        let size = self.dtype.map_or(1, DType::size_bytes) as u64;
        let end = chunk.offset.saturating_add(u64::from(chunk.len));
        end <= self.bytes as u64 && chunk.offset.is_multiple_of(size) && u64::from(chunk.len).is_multiple_of(size)
    }

    /// The chunk's place.
    pub(super) fn place(&mut self, chunk: &Chunk) -> &mut [u8] {
        assert!(self.accepts(chunk), "checked when the header came");
        // SAFETY: inside the memory that the constructor was promised; nobody else touches it.
        unsafe { std::slice::from_raw_parts_mut(self.dst.add(chunk.offset as usize), chunk.len as usize) }
    }

    /// Applies a whole chunk that was read into `incoming`.
    pub(super) fn apply(&mut self, chunk: &Chunk, incoming: &[u8]) {
        let (dtype, dst_ptr) = (self.dtype, self.dst.cast_const());
        let (Some(reduction), Some(dtype)) = (self.reduction, dtype) else {
            self.place(chunk).copy_from_slice(incoming);
            return;
        };
        let dst = self.place(chunk);
        let operand = if reduction.operand == dst_ptr {
            Operand::SameAsDst
        } else {
            let at = chunk.offset as usize;
            // SAFETY: the operand has the length of `dst` and does not overlap it, as promised to `reduce`.
            Operand::At(unsafe { std::slice::from_raw_parts(reduction.operand.add(at), chunk.len as usize) })
        };
        kernel::reduce(dtype, reduction.op, dst, operand, incoming);
        if let Some(world) = reduction.finish_world {
            kernel::finish(dtype, reduction.op, dst, world);
        }
    }
}

/// A self-test of whoever checks results: damage one element of what this rank receives in its next collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Corruption {
    /// Chooses the bit of an integer; of a float it is always the highest of the exponent.
    pub seed: u64,
    /// Where in the payload that the collective receives, as a fraction from 0 to 1.
    pub position: f64,
    /// Write a NaN instead of flipping a bit.
    pub nan: bool,
}

impl Corruption {
    /// Damages the element at byte `at` of received bytes.
    pub(super) fn apply(self, dtype: Option<DType>, at: usize, bytes: &mut [u8]) {
        let size = dtype.map_or(1, DType::size_bytes);
        let start = at / size * size;
        let element = &mut bytes[start..start + size];
        if !self.nan {
            match dtype {
                // The highest bit of the exponent: the rounding of the additions that follow swallows a low bit.
                Some(DType::F32 | DType::F64 | DType::F16 | DType::BF16) => element[size - 1] ^= 0x40,
                Some(DType::I32 | DType::I64 | DType::U32 | DType::U64) | None => element[0] ^= 1 << (self.seed % 8),
            }
            return;
        }
        match dtype {
            Some(DType::F32) => element.copy_from_slice(&f32::NAN.to_le_bytes()),
            Some(DType::F64) => element.copy_from_slice(&f64::NAN.to_le_bytes()),
            Some(DType::F16) => element.copy_from_slice(&half::f16::NAN.to_le_bytes()),
            Some(DType::BF16) => element.copy_from_slice(&half::bf16::NAN.to_le_bytes()),
            Some(DType::I32 | DType::I64 | DType::U32 | DType::U64) | None => element.iter_mut().for_each(|b| *b = !*b),
        }
    }
}
