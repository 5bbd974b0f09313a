//! A right result passes whatever the order of reduction; every way of going wrong is seen.

use half::{bf16, f16};
use proptest::prelude::*;
use r2cc::collective::kernel::{Operand, finish, reduce};

use super::*;

const LEN: usize = 5000;

/// Bytes of `len` elements in memory aligned for every type.
#[derive(Clone)]
struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    fn new(dtype: DType, len: usize) -> Aligned {
        let bytes = len * dtype.size_bytes();
        Aligned { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

fn input(dtype: DType, op: ReduceOp, rank: usize, world: usize, iteration: u64, len: usize) -> Aligned {
    let mut buf = Aligned::new(dtype, len);
    fill(buf.bytes_mut(), dtype, op, rank, world, iteration).unwrap();
    buf
}

/// The reduction of the inputs of `ranks`, taken in that order.
fn reduced(dtype: DType, op: ReduceOp, ranks: &[usize], world: usize, len: usize) -> Aligned {
    let mut sum = input(dtype, op, ranks[0], world, 3, len);
    for &rank in &ranks[1..] {
        let next = input(dtype, op, rank, world, 3, len);
        reduce(dtype, op, sum.bytes_mut(), Operand::SameAsDst, next.bytes());
    }
    finish(dtype, op, sum.bytes_mut(), world);
    sum
}

fn wrong(buf: &Aligned, dtype: DType, op: ReduceOp, world: usize) -> u64 {
    let found = check(buf.bytes(), dtype, op, world, 3, 0).unwrap();
    assert_eq!(found.checked as usize * dtype.size_bytes(), buf.bytes);
    found.wrong
}

fn every_case(worlds: &[usize], mut test: impl FnMut(DType, ReduceOp, usize)) {
    for dtype in DType::ALL {
        for op in ReduceOp::ALL {
            worlds.iter().for_each(|&world| test(dtype, op, world));
        }
    }
}

#[test]
fn a_right_result_passes_in_any_order_of_reduction() {
    every_case(&[1, 2, 3, 4, 6, 7, 16, 64], |dtype, op, world| {
        let forward: Vec<usize> = (0..world).collect();
        let mut other = forward.clone();
        other.reverse();
        other.rotate_left(world / 3);
        for order in [forward, other] {
            let result = reduced(dtype, op, &order, world, LEN);
            assert_eq!(wrong(&result, dtype, op, world), 0, "{dtype} {op} over {world}");
        }
    });
}

#[test]
fn a_rank_left_out_or_counted_twice_shows() {
    every_case(&[2, 3, 6], |dtype, op, world| {
        let without: Vec<usize> = (1..world).collect();
        let result = reduced(dtype, op, &without, world, LEN);
        // A rank is the least or greatest at one element in `world`; half of prod's signs agree.
        assert!(wrong(&result, dtype, op, world) > LEN as u64 / 10, "{dtype} {op} over {world}, one left out");
        if !matches!(op, ReduceOp::Min | ReduceOp::Max) {
            let mut twice: Vec<usize> = (0..world).collect();
            twice.push(0);
            let result = reduced(dtype, op, &twice, world, LEN);
            assert!(wrong(&result, dtype, op, world) > LEN as u64 / 10, "{dtype} {op} over {world}, one twice");
        }
    });
}

#[test]
fn the_result_of_another_iteration_shows() {
    every_case(&[1, 2, 6], |dtype, op, world| {
        let ranks: Vec<usize> = (0..world).collect();
        let result = reduced(dtype, op, &ranks, world, LEN);
        for iteration in [0, 2, 4] {
            let found = check(result.bytes(), dtype, op, world, iteration, 0).unwrap();
            assert!(found.wrong > LEN as u64 / 4, "{dtype} {op} over {world}: {}", found.wrong);
        }
    });
}

/// Spoils bytes of a right result and expects wrong elements there and nowhere else.
fn chunks_spoilt(what: &str, spoil: impl Fn(&mut [u8], usize)) {
    every_case(&[1, 2, 6], |dtype, op, world| {
        let ranks: Vec<usize> = (0..world).collect();
        let right = reduced(dtype, op, &ranks, world, LEN);
        for chunk in [64, 256, 1000] {
            let mut spoilt = right.clone();
            spoil(spoilt.bytes_mut(), chunk * dtype.size_bytes());
            let found = check(spoilt.bytes(), dtype, op, world, 3, usize::MAX).unwrap();
            assert!(found.wrong > 0, "{what} of {chunk} elements of {dtype} {op} over {world} went unseen");
            assert_eq!(found.wrong as usize, found.reported.len());
            for element in &found.reported {
                let bytes = element.index * dtype.size_bytes()..(element.index + 1) * dtype.size_bytes();
                assert_ne!(spoilt.bytes()[bytes.clone()], right.bytes()[bytes], "{element:?}");
            }
        }
    });
}

#[test]
fn a_shift_of_a_chunk_by_one_element_shows() {
    chunks_spoilt("a shift by one", |bytes, chunk| {
        // The smallest element is two bytes; larger ones are shifted by whole elements below.
        let element = chunk / [64, 256, 1000].into_iter().find(|n| chunk % n == 0 && chunk / n <= 8).unwrap();
        bytes.copy_within(chunk..2 * chunk, chunk + element);
    });
}

#[test]
fn two_chunks_swapped_show() {
    chunks_spoilt("a swap", |bytes, chunk| {
        let (left, right) = bytes.split_at_mut(3 * chunk);
        left[chunk..2 * chunk].swap_with_slice(&mut right[..chunk]);
    });
}

#[test]
fn a_chunk_repeated_over_the_next_shows() {
    chunks_spoilt("a repeat", |bytes, chunk| bytes.copy_within(chunk..2 * chunk, 2 * chunk));
}

#[test]
fn a_zeroed_chunk_shows() {
    chunks_spoilt("zeroing", |bytes, chunk| bytes[2 * chunk..3 * chunk].fill(0));
}

#[test]
fn blocks_swapped_whole_show() {
    let (dtype, op) = (DType::F32, ReduceOp::Sum);
    let mut result = reduced(dtype, op, &[0, 1, 2], 3, 2 * BLOCK);
    result.words.rotate_left(BLOCK / 2);
    assert!(wrong(&result, dtype, op, 3) > BLOCK as u64);
}

#[test]
fn a_nan_is_wrong_even_where_a_tolerance_holds() {
    for op in ReduceOp::ALL {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let mut result = reduced(dtype, op, &[0, 1, 2], 3, LEN);
            let at = 77 * dtype.size_bytes();
            let nan = match dtype {
                DType::F64 => f64::NAN.to_le_bytes().to_vec(),
                DType::F16 => f16::NAN.to_le_bytes().to_vec(),
                DType::BF16 => bf16::NAN.to_le_bytes().to_vec(),
                _ => f32::NAN.to_le_bytes().to_vec(),
            };
            result.bytes_mut()[at..at + nan.len()].copy_from_slice(&nan);
            let found = check(result.bytes(), dtype, op, 3, 3, 4).unwrap();
            assert_eq!(found.wrong, 1, "{dtype} {op}");
            let first = found.first_wrong().unwrap();
            assert_eq!((first.index, first.actual.as_str()), (77, "NaN"));
        }
    }
}

#[test]
fn inputs_are_within_their_range_and_use_it() {
    let mut buf = vec![0f32; 1 << 16];
    fill(bytemuck::cast_slice_mut(&mut buf), DType::F32, ReduceOp::Sum, 5, 6, 1).unwrap();
    let most = (1u32 << 21) as f32;
    assert!(buf.iter().all(|x| x.abs() <= most && x.fract() == 0.0));
    assert!(buf.iter().any(|x| *x > 0.99 * most) && buf.iter().any(|x| *x < -0.99 * most));
    fill(bytemuck::cast_slice_mut(&mut buf), DType::F32, ReduceOp::Prod, 5, 6, 1).unwrap();
    assert!(buf.iter().all(|x| [1.0, 2.0].contains(&x.abs())));
    let twos = buf.iter().filter(|x| x.abs() == 2.0).count();
    assert!((7000..9500).contains(&twos), "{twos} of 65536");
    let mut wide = vec![0f64; 1 << 16];
    fill(bytemuck::cast_slice_mut(&mut wide), DType::F64, ReduceOp::Max, 5, 6, 1).unwrap();
    let most = 2f64.powi(53);
    assert!(wide.iter().all(|x| x.abs() <= most && x.fract() == 0.0));
    assert!(wide.iter().any(|x| x % 2.0 != 0.0) && wide.iter().any(|x| *x < -0.99 * most));
}

#[test]
fn the_vector_and_the_plain_code_agree() {
    every_case(&[1, 6, 9], |dtype, op, world| {
        let pattern = Pattern::new(dtype, op, world, 8).unwrap();
        assert!(pattern.plain_code_agrees(5), "{dtype} {op} over {world}");
    });
}

#[test]
fn what_cannot_be_checked_exactly_is_refused() {
    let most = |dtype| match check(&[], dtype, ReduceOp::Sum, 1 << 40, 0, 0) {
        Err(ElementsError::TooManyRanks { most, .. }) => Some(most),
        _ => None,
    };
    assert_eq!([DType::BF16, DType::F16, DType::F32].map(most), [Some(64), Some(512), Some(1 << 21)]);
    assert!(check(&[], DType::BF16, ReduceOp::Sum, 64, 0, 0).is_ok());
    assert!(check(&[], DType::BF16, ReduceOp::Sum, 65, 0, 0).is_err());
    let store = [0u64; 2];
    let bytes: &[u8] = bytemuck::cast_slice(&store);
    for (buf, misaligned_by) in [(&bytes[1..9], 1), (&bytes[..7], 0)] {
        let refused = check(buf, DType::F32, ReduceOp::Sum, 2, 0, 0);
        let len = buf.len();
        assert_eq!(refused, Err(ElementsError::NoElements { dtype: DType::F32, len, misaligned_by }));
    }
    let refused = fill(&mut [], DType::F32, ReduceOp::Sum, 2, 2, 0);
    assert_eq!(refused, Err(ElementsError::NoSuchRank { rank: 2, world: 2 }));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_flipped_bit_of_an_exact_result_is_one_wrong_element(
        dtype in prop::sample::select(DType::ALL.to_vec()),
        op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max]),
        world in 1usize..9,
        len in 1usize..4000,
        byte in any::<prop::sample::Index>(),
        bit in 0u32..8,
    ) {
        let ranks: Vec<usize> = (0..world).collect();
        let mut result = reduced(dtype, op, &ranks, world, len);
        let byte = byte.index(result.bytes);
        result.bytes_mut()[byte] ^= 1 << bit;
        let found = check(result.bytes(), dtype, op, world, 3, 5).unwrap();
        prop_assert_eq!(found.wrong, 1);
        prop_assert_eq!(found.reported[0].index, byte / dtype.size_bytes());
        prop_assert_ne!(&found.reported[0].expected, &found.reported[0].actual);
    }
}

#[test]
fn a_part_is_checked_where_it_belongs_and_nowhere_else() {
    every_case(&[3], |dtype, op, world| {
        let (whole, own) = (reduced(dtype, op, &[0, 1, 2], world, LEN), input(dtype, op, 1, world, 3, LEN));
        let size = dtype.size_bytes();
        let part = |buf: &Aligned, expected, first: usize, at: usize| {
            let bytes = &buf.bytes()[at * size..(at + 1500) * size];
            let found = check_part(bytes, dtype, op, world, 3, expected, first, 1).unwrap();
            assert_eq!(found.checked, 1500);
            found.wrong
        };
        for first in [0, 1024, 1700] {
            assert_eq!(part(&whole, Expected::Reduced, first, first), 0, "{dtype} {op}");
            assert_eq!(part(&own, Expected::Input(1), first, first), 0, "{dtype} {op}");
            assert!(part(&own, Expected::Input(1), first + 1, first) > 100, "{dtype} {op}: moved by one");
            assert!(part(&own, Expected::Input(2), first, first) > 100, "{dtype} {op}: another rank's");
        }
    });
}

#[test]
fn a_wrong_element_of_a_part_is_numbered_from_its_start() {
    let mut buf = input(DType::F32, ReduceOp::Sum, 0, 2, 3, LEN);
    buf.bytes_mut()[1500 * 4 + 3] ^= 0x40;
    let part = &buf.bytes()[1000 * 4..];
    let found = check_part(part, DType::F32, ReduceOp::Sum, 2, 3, Expected::Input(0), 1000, 3).unwrap();
    assert_eq!((found.wrong, found.first_wrong().map(|w| w.index)), (1, Some(500)));
}
