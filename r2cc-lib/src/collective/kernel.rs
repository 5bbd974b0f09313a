//! The arithmetic of collectives on host memory: one reduction step, and the division of `Avg`.
//!
//! Owns what each operator means for each element type: integers wrap; floating-point `Min` and
//! `Max` give NaN when either operand is NaN; f16 and bf16 are computed in f32 and rounded to
//! nearest even after every step. Never allocates, never copies between buffers of different
//! types. Slices must be aligned to the element size and hold whole elements, as every span of an
//! aligned buffer is; a slice that is not is a caller's bug and panics with the figures.
//! Start at [`reduce`].

use half::{bf16, f16};

use crate::dtype::{DType, ReduceOp};

mod lanes;

/// Where the left operand of a reduction is.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// In the destination, which it is replaced in.
    SameAsDst,
    /// Elsewhere.
    At(&'a [u8]),
}

/// `dst = operand op incoming`, element by element. `Avg` adds; see [`finish`].
///
/// # Panics
///
/// When the slices differ in length, hold a fraction of an element, or are not aligned to it.
pub fn reduce(dtype: DType, op: ReduceOp, dst: &mut [u8], operand: Operand<'_>, incoming: &[u8]) {
    macro_rules! typed {
        ($t:ty) => {
            lanes::reduce::<$t>(
                op,
                elements_mut("destination", dtype, dst),
                match operand {
                    Operand::SameAsDst => None,
                    Operand::At(bytes) => Some(elements("operand", dtype, bytes)),
                },
                elements("incoming slice", dtype, incoming),
            )
        };
    }
    match dtype {
        DType::F32 => typed!(f32),
        DType::F64 => typed!(f64),
        DType::I32 => typed!(i32),
        DType::I64 => typed!(i64),
        DType::U32 => typed!(u32),
        DType::U64 => typed!(u64),
        DType::F16 => typed!(f16),
        DType::BF16 => typed!(bf16),
    }
}

/// Completes a reduction over `world` ranks: `Avg` divides by `world`, the others do nothing.
///
/// # Panics
///
/// When `dst` holds a fraction of an element or is not aligned to it, or when `world` is zero or
/// more than the element type can divide by.
pub fn finish(dtype: DType, op: ReduceOp, dst: &mut [u8], world: usize) {
    assert!(world > 0, "a world has at least one rank");
    if op != ReduceOp::Avg || world == 1 {
        return;
    }
    macro_rules! typed {
        ($t:ty) => {
            lanes::divide::<$t>(elements_mut("destination", dtype, dst), world)
        };
    }
    match dtype {
        DType::F32 => typed!(f32),
        DType::F64 => typed!(f64),
        DType::I32 => typed!(i32),
        DType::I64 => typed!(i64),
        DType::U32 => typed!(u32),
        DType::U64 => typed!(u64),
        DType::F16 => typed!(f16),
        DType::BF16 => typed!(bf16),
    }
}

fn elements<'a, T: bytemuck::Pod>(what: &str, dtype: DType, bytes: &'a [u8]) -> &'a [T] {
    // An empty slice has no place in memory that could be wrong.
    if bytes.is_empty() {
        return &[];
    }
    let (address, len) = (bytes.as_ptr() as usize, bytes.len());
    bytemuck::try_cast_slice(bytes).unwrap_or_else(|_| unusable(what, dtype, address, len))
}

fn elements_mut<'a, T: bytemuck::Pod>(what: &str, dtype: DType, bytes: &'a mut [u8]) -> &'a mut [T] {
    if bytes.is_empty() {
        return &mut [];
    }
    let (address, len) = (bytes.as_ptr() as usize, bytes.len());
    bytemuck::try_cast_slice_mut(bytes).unwrap_or_else(|_| unusable(what, dtype, address, len))
}

#[cold]
fn unusable(what: &str, dtype: DType, address: usize, len: usize) -> ! {
    let size = dtype.size_bytes();
    panic!(
        "the {what} ({len} bytes, address {} past a multiple of {size}) is no slice of {dtype}; \
         hint: cut buffers at whole elements of {size} bytes",
        address % size
    )
}

#[cfg(test)]
mod tests;
