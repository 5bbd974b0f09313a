//! The loops of the reduction kernel, written so that the compiler vectorises them.
//!
//! Owns one loop a (type, operator), instantiated twice on x86-64: for the baseline and for AVX2
//! with F16C, chosen at run time. Sixteen-bit floats go through blocks of f32. Start at [`reduce`].

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::ReduceOp;

/// An element type and how its elements combine.
pub(super) trait Arithmetic: Copy + Send + Sync + 'static {
    /// `dst = operand op incoming`; the operand is `dst` when none is given.
    fn reduce(op: ReduceOp, dst: &mut [Self], operand: Option<&[Self]>, incoming: &[Self]);
    /// Divides every element by `world`.
    fn divide(dst: &mut [Self], world: usize);
}

/// `dst = operand op incoming` with the widest instructions this machine has.
pub(super) fn reduce<T: Arithmetic>(op: ReduceOp, dst: &mut [T], operand: Option<&[T]>, incoming: &[T]) {
    assert_eq!(dst.len(), incoming.len(), "elements to reduce and incoming");
    if let Some(operand) = operand {
        assert_eq!(dst.len(), operand.len(), "elements to reduce and operand");
    }
    #[cfg(target_arch = "x86_64")]
    if wide() {
        // SAFETY: `wide` has found every feature that `reduce_wide` is compiled for.
        return unsafe { reduce_wide(op, dst, operand, incoming) };
    }
    T::reduce(op, dst, operand, incoming);
}

/// Divides every element by `world` with the widest instructions this machine has.
pub(super) fn divide<T: Arithmetic>(dst: &mut [T], world: usize) {
    #[cfg(target_arch = "x86_64")]
    if wide() {
        // SAFETY: `wide` has found every feature that `divide_wide` is compiled for.
        return unsafe { divide_wide(dst, world) };
    }
    T::divide(dst, world);
}

#[cfg(target_arch = "x86_64")]
fn wide() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn reduce_wide<T: Arithmetic>(op: ReduceOp, dst: &mut [T], operand: Option<&[T]>, incoming: &[T]) {
    T::reduce(op, dst, operand, incoming);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn divide_wide<T: Arithmetic>(dst: &mut [T], world: usize) {
    T::divide(dst, world);
}

#[inline(always)]
fn zip<T: Copy>(dst: &mut [T], operand: Option<&[T]>, incoming: &[T], combine: impl Fn(T, T) -> T + Copy) {
    match operand {
        None => {
            for (d, i) in dst.iter_mut().zip(incoming) {
                *d = combine(*d, *i);
            }
        }
        Some(operand) => {
            for ((d, o), i) in dst.iter_mut().zip(operand).zip(incoming) {
                *d = combine(*o, *i);
            }
        }
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn reduce(op: ReduceOp, dst: &mut [$t], operand: Option<&[$t]>, incoming: &[$t]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => {
                        zip(dst, operand, incoming, |a, b| a.wrapping_add(b))
                    }
                    ReduceOp::Prod => zip(dst, operand, incoming, |a, b| a.wrapping_mul(b)),
                    ReduceOp::Min => zip(dst, operand, incoming, |a, b| a.min(b)),
                    ReduceOp::Max => zip(dst, operand, incoming, |a, b| a.max(b)),
                }
            }

            #[inline(always)]
            fn divide(dst: &mut [$t], world: usize) {
                let Ok(world) = <$t>::try_from(world) else {
                    panic!("a world of {world} ranks is more than {} can divide by", stringify!($t))
                };
                for d in dst {
                    *d /= world;
                }
            }
        }
    )*};
}

integers!(i32, i64, u32, u64);

/// Combines a pair of floats; a NaN on either side gives NaN.
macro_rules! float_pair {
    ($op:expr, $each:ident) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Avg => $each!(|a, b| a + b),
            ReduceOp::Prod => $each!(|a, b| a * b),
            // `min` and `max` ignore a NaN, the sum keeps it. Choosing between two results, and
            // not between result and operand, spares the loop a conditional store.
            ReduceOp::Min => $each!(|a, b| if a.is_nan() | b.is_nan() { a + b } else { a.min(b) }),
            ReduceOp::Max => $each!(|a, b| if a.is_nan() | b.is_nan() { a + b } else { a.max(b) }),
        }
    };
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn reduce(op: ReduceOp, dst: &mut [$t], operand: Option<&[$t]>, incoming: &[$t]) {
                macro_rules! each {
                    ($combine:expr) => {
                        zip(dst, operand, incoming, $combine)
                    };
                }
                float_pair!(op, each)
            }

            #[inline(always)]
            fn divide(dst: &mut [$t], world: usize) {
                for d in dst {
                    *d /= world as $t;
                }
            }
        }
    )*};
}

floats!(f32, f64);

/// Elements converted at a time: three blocks of f32 stay in the first-level cache.
const BLOCK: usize = 512;

/// Sixteen-bit floats, converted a block at a time.
trait Narrow: Copy + Send + Sync + 'static {
    fn widen(from: &[Self], to: &mut [f32]);
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Narrow for f16 {
    #[inline(always)]
    fn widen(from: &[f16], to: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if wide() {
            // SAFETY: `wide` has found every feature that the function is compiled for.
            return unsafe { f16c::widen(from, to) };
        }
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f16]) {
        #[cfg(target_arch = "x86_64")]
        if wide() {
            // SAFETY: `wide` has found every feature that the function is compiled for.
            return unsafe { f16c::narrow(from, to) };
        }
        to.convert_from_f32_slice(from);
    }
}

/// Conversions with the F16C instructions. The `half` crate asks for the feature and calls a
/// function for every eight elements, at half the speed.
#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use half::f16;
    use half::slice::HalfFloatSliceExt;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn widen(from: &[f16], to: &mut [f32]) {
        let (from, from_rest) = from.as_chunks::<8>();
        let (to, to_rest) = to.as_chunks_mut::<8>();
        for (f, t) in from.iter().zip(to) {
            // SAFETY: unaligned load of eight f16 and store of eight f32, which is what f and t are.
            unsafe { _mm256_storeu_ps(t.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(f.as_ptr().cast()))) };
        }
        from_rest.convert_to_f32_slice(to_rest);
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn narrow(from: &[f32], to: &mut [f16]) {
        let (from, from_rest) = from.as_chunks::<8>();
        let (to, to_rest) = to.as_chunks_mut::<8>();
        for (f, t) in from.iter().zip(to) {
            // SAFETY: unaligned load of eight f32 and store of eight f16, which is what f and t are.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(f.as_ptr()));
                _mm_storeu_si128(t.as_mut_ptr().cast(), rounded);
            }
        }
        to_rest.convert_from_f32_slice(from_rest);
    }
}

impl Narrow for bf16 {
    #[inline(always)]
    fn widen(from: &[bf16], to: &mut [f32]) {
        for (t, f) in to.iter_mut().zip(from) {
            *t = f32::from_bits(u32::from(f.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [bf16]) {
        for (t, f) in to.iter_mut().zip(from) {
            let bits = f.to_bits();
            // To nearest, ties to even; a NaN would round up to infinity, so it is made quiet.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x40;
            *t = bf16::from_bits(if f.is_nan() { quiet } else { rounded } as u16);
        }
    }
}

macro_rules! narrow {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn reduce(op: ReduceOp, dst: &mut [$t], operand: Option<&[$t]>, incoming: &[$t]) {
                let (mut left, mut right) = ([0f32; BLOCK], [0f32; BLOCK]);
                let mut start = 0;
                for (dst, incoming) in dst.chunks_mut(BLOCK).zip(incoming.chunks(BLOCK)) {
                    let len = dst.len();
                    let (left, right) = (&mut left[..len], &mut right[..len]);
                    match operand {
                        None => Narrow::widen(dst, left),
                        Some(operand) => Narrow::widen(&operand[start..start + len], left),
                    }
                    Narrow::widen(incoming, right);
                    <f32 as Arithmetic>::reduce(op, left, None, right);
                    Narrow::narrow(left, dst);
                    start += len;
                }
            }

            #[inline(always)]
            fn divide(dst: &mut [$t], world: usize) {
                let mut wide = [0f32; BLOCK];
                for dst in dst.chunks_mut(BLOCK) {
                    let wide = &mut wide[..dst.len()];
                    Narrow::widen(dst, wide);
                    <f32 as Arithmetic>::divide(wide, world);
                    Narrow::narrow(wide, dst);
                }
            }
        }
    )*};
}

narrow!(f16, bf16);
