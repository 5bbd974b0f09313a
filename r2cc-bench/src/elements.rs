//! Inputs that every correct AllReduce adds up exactly, and the check of every output element.
//!
//! Owns what rank r puts at index i in an iteration, and what must be there afterwards. The value
//! hashes (index, rank, iteration), so that a shift, swap, repeat or zeroing of chunks, a rank left
//! out or counted twice, and data of an earlier iteration all show. Whatever the order of the
//! reduction, the result is the same to the bit; only `avg` of floats over a number of ranks that
//! is no power of two has a tolerance ([`check`]). Never trusts the library under test: nothing
//! here calls it. Start at [`fill`]; the values are in `pattern`.

use std::ops::Range;

use half::bf16;
use half::f16;
use half::slice::HalfFloatSliceExt;
use r2cc::dtype::{DType, ReduceOp};

mod pattern;

use pattern::{BLOCK, Pattern};

/// Why a buffer cannot be filled or checked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ElementsError {
    /// More ranks than integers of this type can be summed exactly for.
    #[error("exact {op} of {dtype} over {world} ranks is not possible; hint: at most {most} ranks, or a wider type")]
    TooManyRanks {
        /// Element type.
        dtype: DType,
        /// Operator.
        op: ReduceOp,
        /// Ranks asked for.
        world: usize,
        /// Ranks possible.
        most: usize,
    },
    /// The rank is not one of the world.
    #[error("rank {rank} is not one of {world} ranks")]
    NoSuchRank {
        /// Rank asked for.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The buffer holds a fraction of an element or is not aligned to one.
    #[error("{len} bytes at {misaligned_by} past an aligned address are no slice of {dtype}")]
    NoElements {
        /// Element type.
        dtype: DType,
        /// Bytes in the buffer.
        len: usize,
        /// Address modulo the element size.
        misaligned_by: usize,
    },
}

/// One wrong element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongElement {
    /// Index in the buffer.
    pub index: usize,
    /// The value that belongs there, as decimal text.
    pub expected: String,
    /// The value found, as decimal text.
    pub actual: String,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ElementCheck {
    /// Elements looked at: all of them.
    pub checked: u64,
    /// Elements that are wrong.
    pub wrong: u64,
    /// The first wrong ones, in order, up to the number asked for.
    pub reported: Vec<WrongElement>,
}

impl ElementCheck {
    /// The wrong element of least index, if any is wrong and at least one was to be reported.
    pub fn first_wrong(&self) -> Option<&WrongElement> {
        self.reported.first()
    }
}

/// Fills a buffer with rank `rank`'s input of an iteration.
///
/// | op | floats | integers |
/// |---|---|---|
/// | sum, avg | integers of magnitude at most 2^p / P, so that no sum leaves the exact range (p = 24, 53, 11, 8 for f32, f64, f16, bf16) | full range; sums wrap |
/// | prod | ±1, and ±2 at one element in eight of ranks 0 to 7 | full-range odd numbers, so that no information is lost modulo the width |
/// | min, max | integers of magnitude at most 2^p | full range |
pub fn fill(
    buf: &mut [u8],
    dtype: DType,
    op: ReduceOp,
    rank: usize,
    world: usize,
    iteration: u64,
) -> Result<(), ElementsError> {
    if rank >= world {
        return Err(ElementsError::NoSuchRank { rank, world });
    }
    let pattern = Pattern::new(dtype, op, world, iteration)?;
    usable(buf, dtype)?;
    let mut narrow = [0u32; BLOCK];
    let mut wide = [0u64; BLOCK];
    for (block, bytes) in buf.chunks_mut(BLOCK * dtype.size_bytes()).enumerate() {
        let len = bytes.len() / dtype.size_bytes();
        let (narrow, wide) = (&mut narrow[..len], &mut wide[..len]);
        if dtype.size_bytes() == 8 {
            pattern.input64(rank, block as u64, wide);
        } else {
            pattern.input32(rank, block as u64, narrow);
        }
        match dtype {
            DType::F64 | DType::I64 | DType::U64 => bytes.copy_from_slice(bytemuck::cast_slice(wide)),
            DType::F32 | DType::I32 | DType::U32 => bytes.copy_from_slice(bytemuck::cast_slice(narrow)),
            DType::F16 => {
                let to: &mut [f16] = bytemuck::cast_slice_mut(bytes);
                to.convert_from_f32_slice(bytemuck::cast_slice(narrow));
            }
            DType::BF16 => {
                let to: &mut [bf16] = bytemuck::cast_slice_mut(bytes);
                for (t, n) in to.iter_mut().zip(narrow) {
                    // The inputs fit the eight bits kept.
                    *t = bf16::from_bits((*n >> 16) as u16);
                }
            }
        }
    }
    Ok(())
}

/// Whose inputs an output element must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The reduction of all ranks' inputs.
    Reduced,
    /// The input of one rank, to the bit.
    Input(usize),
}

/// Checks every element of a result against the reduction of all ranks' inputs of an iteration,
/// reporting at most `max_reported` wrong ones in detail.
///
/// Elements must be equal to the bit, so a NaN is wrong, and so is a zero with the wrong sign.
/// `avg` of floats, P no power of two: |actual - expected| <= (P + 2) · 2^-p · M, where M bounds the
/// inputs' magnitude. A library may scale by 1/P before it adds (NCCL) or divide afterwards (ours):
/// the rounded 1/P and the P products err by at most 2 · 2^-p · M together, each of P - 1 sums and
/// the division by 2^-p · M.
pub fn check(
    buf: &[u8],
    dtype: DType,
    op: ReduceOp,
    world: usize,
    iteration: u64,
    max_reported: usize,
) -> Result<ElementCheck, ElementsError> {
    check_part(buf, dtype, op, world, iteration, Expected::Reduced, 0, max_reported)
}

/// [`check`] of a part of a result: what must be there begins with element `first` of the inputs of an iteration.
/// Wrong elements are numbered from the start of `buf`.
#[expect(clippy::too_many_arguments, reason = "the coordinates of an element")]
pub fn check_part(
    buf: &[u8],
    dtype: DType,
    op: ReduceOp,
    world: usize,
    iteration: u64,
    expected: Expected,
    first: usize,
    max_reported: usize,
) -> Result<ElementCheck, ElementsError> {
    if let Expected::Input(rank) = expected
        && rank >= world
    {
        return Err(ElementsError::NoSuchRank { rank, world });
    }
    let pattern = Pattern::new(dtype, op, world, iteration)?;
    usable(buf, dtype)?;
    let size = dtype.size_bytes();
    let mut found = ElementCheck::default();
    let mut want32 = [0u32; BLOCK];
    let mut want64 = [0u64; BLOCK];
    let mut widened = [0u32; BLOCK];
    let mut rest = buf;
    while !rest.is_empty() {
        let begin = found.checked as usize;
        let (block, skip) = ((first + begin) / BLOCK, (first + begin) % BLOCK);
        let len = (BLOCK - skip).min(rest.len() / size);
        let bytes;
        (bytes, rest) = rest.split_at(len * size);
        found.checked += len as u64;
        if size == 8 {
            let want = &mut want64[..skip + len];
            match expected {
                Expected::Reduced => pattern.result64(block as u64, want),
                Expected::Input(rank) => pattern.input64(rank, block as u64, want),
            }
            let (want, got): (&[u64], &[u64]) = (&want[skip..], bytemuck::cast_slice(bytes));
            let (is_wrong, wrong) = match expected {
                Expected::Reduced => {
                    (Pattern::is_wrong64 as fn(&Pattern, u64, u64) -> bool, pattern.wrong64(got, want))
                }
                Expected::Input(_) => (differ64 as fn(&Pattern, u64, u64) -> bool, differing(got, want)),
            };
            report(&mut found, max_reported, begin..begin + len, wrong, |lane| {
                let (g, w) = (got[lane], want[lane]);
                is_wrong(&pattern, g, w).then(|| (text64(dtype, w), text64(dtype, g)))
            });
        } else {
            let want = &mut want32[..skip + len];
            match expected {
                Expected::Reduced => pattern.result32(block as u64, want),
                Expected::Input(rank) => pattern.input32(rank, block as u64, want),
            }
            let want: &[u32] = &want[skip..];
            let got = widen(dtype, bytes, &mut widened[..len]);
            let (is_wrong, wrong) = match expected {
                Expected::Reduced => {
                    (Pattern::is_wrong32 as fn(&Pattern, u32, u32) -> bool, pattern.wrong32(got, want))
                }
                Expected::Input(_) => (differ32 as fn(&Pattern, u32, u32) -> bool, differing(got, want)),
            };
            report(&mut found, max_reported, begin..begin + len, wrong, |lane| {
                let (g, w) = (got[lane], want[lane]);
                is_wrong(&pattern, g, w).then(|| (text32(dtype, w), text32(dtype, g)))
            });
        }
    }
    Ok(found)
}

fn differ32(_: &Pattern, got: u32, want: u32) -> bool {
    got != want
}

fn differ64(_: &Pattern, got: u64, want: u64) -> bool {
    got != want
}

fn differing<T: PartialEq>(got: &[T], want: &[T]) -> u64 {
    got.iter().zip(want).map(|(g, w)| u64::from(g != w)).sum()
}

/// What a kernel needs to make and to check the same values as [`fill`] and [`check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRule {
    /// Seed of each rank in the iteration; a block's is the hash of it and the block's index.
    pub seeds: Vec<u64>,
    /// Arithmetic shift of an element's hash.
    pub shift: u32,
}

/// The rule for kernels: there are some for sums of f32, none for other types and operators.
pub fn kernel_rule(
    dtype: DType,
    op: ReduceOp,
    world: usize,
    iteration: u64,
) -> Result<Option<KernelRule>, ElementsError> {
    let pattern = Pattern::new(dtype, op, world, iteration)?;
    let covered = dtype == DType::F32 && op == ReduceOp::Sum;
    let seeds = || (0..world).map(|rank| pattern.rank_seed(rank)).collect();
    Ok(covered.then(|| KernelRule { seeds: seeds(), shift: pattern.shift() }))
}

/// What belongs at `index` of a result of four-byte elements, beside the bits found there.
pub fn wrong_at(
    dtype: DType,
    op: ReduceOp,
    world: usize,
    iteration: u64,
    index: usize,
    found: u32,
) -> Result<WrongElement, ElementsError> {
    let pattern = Pattern::new(dtype, op, world, iteration)?;
    let mut want = [0u32; BLOCK];
    pattern.result32((index / BLOCK) as u64, &mut want);
    Ok(WrongElement { index, expected: text32(dtype, want[index % BLOCK]), actual: text32(dtype, found) })
}

/// Adds the wrong elements of a range; looks for them one by one only where there are some to report.
fn report(
    found: &mut ElementCheck,
    max_reported: usize,
    range: Range<usize>,
    wrong: u64,
    texts: impl Fn(usize) -> Option<(String, String)>,
) {
    found.wrong += wrong;
    let room = max_reported.saturating_sub(found.reported.len());
    if wrong == 0 || room == 0 {
        return;
    }
    let details = range.clone().filter_map(|index| {
        texts(index - range.start).map(|(expected, actual)| WrongElement { index, expected, actual })
    });
    found.reported.extend(details.take(room));
}

/// Elements of four bytes as they are, of two bytes as the f32 of the same value.
fn widen<'a>(dtype: DType, bytes: &'a [u8], to: &'a mut [u32]) -> &'a [u32] {
    match dtype {
        DType::F16 => {
            let from: &[f16] = bytemuck::cast_slice(bytes);
            from.convert_to_f32_slice(bytemuck::cast_slice_mut(to));
            to
        }
        DType::BF16 => {
            let from: &[u16] = bytemuck::cast_slice(bytes);
            for (t, f) in to.iter_mut().zip(from) {
                *t = u32::from(*f) << 16;
            }
            to
        }
        _ => bytemuck::cast_slice(bytes),
    }
}

fn text32(dtype: DType, bits: u32) -> String {
    match dtype {
        DType::I32 => (bits as i32).to_string(),
        DType::U32 => bits.to_string(),
        _ => f32::from_bits(bits).to_string(),
    }
}

fn text64(dtype: DType, bits: u64) -> String {
    match dtype {
        DType::I64 => (bits as i64).to_string(),
        DType::U64 => bits.to_string(),
        _ => f64::from_bits(bits).to_string(),
    }
}

fn usable(buf: &[u8], dtype: DType) -> Result<(), ElementsError> {
    let size = dtype.size_bytes();
    let misaligned_by = if buf.is_empty() { 0 } else { buf.as_ptr() as usize % size };
    if misaligned_by != 0 || !buf.len().is_multiple_of(size) {
        return Err(ElementsError::NoElements { dtype, len: buf.len(), misaligned_by });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
