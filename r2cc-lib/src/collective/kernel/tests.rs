//! Every element type and operator against a scalar reference.

use half::{bf16, f16};

use super::{Operand, finish, reduce};
use crate::dtype::{DType, Element, ReduceOp};

/// The meaning of the operators, one element at a time and in the plainest way.
trait Reference: Element + bytemuck::Pod {
    fn combine(op: ReduceOp, a: Self, b: Self) -> Self;
    fn divide(self, world: usize) -> Self;
    fn sample(bits: u64) -> Self;
    /// Equal as numbers, or both NaN.
    fn same(self, other: Self) -> bool;
}

macro_rules! integer_reference {
    ($($t:ty),*) => {$(
        impl Reference for $t {
            fn combine(op: ReduceOp, a: $t, b: $t) -> $t {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => (a as i128 + b as i128) as $t,
                    ReduceOp::Prod => (a as i128).wrapping_mul(b as i128) as $t,
                    ReduceOp::Min => std::cmp::min(a, b),
                    ReduceOp::Max => std::cmp::max(a, b),
                }
            }
            fn divide(self, world: usize) -> $t {
                (self as i128 / world as i128) as $t
            }
            fn sample(bits: u64) -> $t {
                bits as $t
            }
            fn same(self, other: $t) -> bool {
                self == other
            }
        }
    )*};
}

integer_reference!(i32, i64, u32, u64);

macro_rules! float_reference {
    ($($t:ty, $wide:ty, $to:expr, $from:expr, $bits:expr);* $(;)?) => {$(
        impl Reference for $t {
            fn combine(op: ReduceOp, a: $t, b: $t) -> $t {
                let (a, b): ($wide, $wide) = ($to(a), $to(b));
                let nan = a.is_nan() || b.is_nan();
                $from(match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Min | ReduceOp::Max if nan => <$wide>::NAN,
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                })
            }
            fn divide(self, world: usize) -> $t {
                $from($to(self) / world as $wide)
            }
            fn sample(bits: u64) -> $t {
                // Every eighth is any bit pattern (NaN, infinity, subnormal), the rest are moderate.
                if bits % 8 == 0 {
                    $bits(bits >> 3)
                } else {
                    $from((bits >> 40) as $wide / 1024.0 - 8192.0)
                }
            }
            fn same(self, other: $t) -> bool {
                let (a, b): ($wide, $wide) = ($to(self), $to(other));
                a == b || (a.is_nan() && b.is_nan())
            }
        }
    )*};
}

float_reference!(
    f32, f32, |x| x, |x| x, |b| f32::from_bits(b as u32);
    f64, f64, |x| x, |x| x, f64::from_bits;
    f16, f32, f16::to_f32, f16::from_f32, |b| f16::from_bits(b as u16);
    bf16, f32, bf16::to_f32, bf16::from_f32, |b| bf16::from_bits(b as u16);
);

/// Numbers without pattern (splitmix64).
fn samples<T: Reference>(len: usize, mut state: u64) -> Vec<T> {
    (0..len)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            T::sample(z ^ (z >> 31))
        })
        .collect()
}

fn assert_same<T: Reference>(got: &[T], want: &[T], what: &str) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let (a, b) = (bytemuck::bytes_of(g), bytemuck::bytes_of(w));
        assert!(g.same(*w), "{what}, element {i}: {a:x?}, not {b:x?}");
    }
}

fn matches_the_reference<T: Reference>() {
    // Offsets leave the vector's alignment, lengths leave every kind of tail and cross blocks.
    for len in [0, 1, 2, 3, 7, 15, 31, 33, 100, 511, 512, 513, 1500, 4099] {
        for offset in [0, 1, 3] {
            for op in ReduceOp::ALL {
                let what = format!("{} {op}, {len} elements from {offset}", T::DTYPE);
                let operand = samples::<T>(len + offset, 1);
                let incoming = samples::<T>(len + offset, 2);
                let (operand, incoming) = (&operand[offset..], &incoming[offset..]);
                let mut want: Vec<T> = operand.iter().zip(incoming).map(|(a, b)| T::combine(op, *a, *b)).collect();

                let mut same = operand.to_vec();
                let bytes = bytemuck::cast_slice_mut(&mut same);
                let right = bytemuck::cast_slice(incoming);
                reduce(T::DTYPE, op, bytes, Operand::SameAsDst, right);
                assert_same(&same, &want, &what);

                let mut other = vec![T::sample(7); len + offset];
                let bytes = bytemuck::cast_slice_mut(&mut other[offset..]);
                let left = Operand::At(bytemuck::cast_slice(operand));
                reduce(T::DTYPE, op, bytes, left, right);
                assert_same(&other[offset..], &want, &what);

                finish(T::DTYPE, op, bytemuck::cast_slice_mut(&mut same), 6);
                if op == ReduceOp::Avg {
                    want.iter_mut().for_each(|w| *w = w.divide(6));
                }
                assert_same(&same, &want, &format!("{what}, finished"));
            }
        }
    }
}

#[test]
fn every_type_and_operator_matches_the_scalar_reference() {
    matches_the_reference::<f32>();
    matches_the_reference::<f64>();
    matches_the_reference::<i32>();
    matches_the_reference::<i64>();
    matches_the_reference::<u32>();
    matches_the_reference::<u64>();
    matches_the_reference::<f16>();
    matches_the_reference::<bf16>();
}

#[test]
fn sixteen_bit_floats_round_to_nearest_even_for_every_bit_pattern() {
    for bits in 0..=u16::MAX {
        let mut f = [f16::from_bits(bits)];
        let mut b = [bf16::from_bits(bits)];
        let (wf, wb) = (f[0].divide(3), b[0].divide(3));
        finish(DType::F16, ReduceOp::Avg, bytemuck::cast_slice_mut(&mut f), 3);
        finish(DType::BF16, ReduceOp::Avg, bytemuck::cast_slice_mut(&mut b), 3);
        assert!(f[0].same(wf) && b[0].same(wb), "bits {bits:#06x}");
    }
}

#[test]
fn least_and_greatest_of_nan_is_nan_from_either_side() {
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
            let mut dst = [a; 9];
            let bytes = bytemuck::cast_slice_mut(&mut dst);
            let incoming = [b; 9];
            let right = bytemuck::cast_slice(&incoming);
            reduce(DType::F32, op, bytes, Operand::SameAsDst, right);
            assert!(dst.iter().all(|d| d.is_nan()), "{op} of {a} and {b}");
        }
    }
}

#[test]
#[should_panic(expected = "the incoming slice (8 bytes, address 1 past a multiple of 4)")]
fn a_misaligned_slice_is_named() {
    let mut dst = [0f32; 2];
    let store = [0u32; 3];
    let bytes: &[u8] = bytemuck::cast_slice(&store);
    let bytes_mut = bytemuck::cast_slice_mut(&mut dst);
    let right = &bytes[1..9];
    reduce(DType::F32, ReduceOp::Sum, bytes_mut, Operand::SameAsDst, right);
}

#[test]
#[should_panic(expected = "elements to reduce and incoming")]
fn slices_of_different_length_are_refused() {
    let mut dst = [0u64; 1];
    let bytes = bytemuck::cast_slice_mut(&mut dst);
    reduce(DType::U64, ReduceOp::Sum, bytes, Operand::SameAsDst, &[]);
}
