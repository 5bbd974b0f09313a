//! The values: a hash of (index, rank, iteration), and its reduction over ranks.
//!
//! Owns the arithmetic in a form that the compiler vectorises: elements in blocks, one seed a
//! (block, rank, iteration), one multiplicative hash a lane, accumulated as integers (f64: as f64,
//! exactly) and converted once. Compiled for the baseline and for AVX2, chosen at run time. Blocks
//! of two- and four-byte types hold 32-bit words (floats as f32), of eight-byte types 64-bit words.

use std::ops::Range;

use r2cc::dtype::{DType, ReduceOp};

use super::ElementsError;

/// Elements of a block: its words stay in the first-level cache while the ranks are added.
pub(super) const BLOCK: usize = 1024;

/// Ranks that may contribute a factor of two, so that a product stays at most 2^8.
const RANKS_WITH_TWOS: usize = 8;

/// One buffer's contents for every rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pattern {
    dtype: DType,
    op: ReduceOp,
    world: usize,
    iteration: u64,
    /// log2 of the largest magnitude of a float input (sum, avg, min, max).
    bits: u32,
    /// Largest admissible difference; none where the result is exact.
    tolerance: Option<f64>,
}

impl Pattern {
    pub(super) fn new(dtype: DType, op: ReduceOp, world: usize, iteration: u64) -> Result<Pattern, ElementsError> {
        if world == 0 {
            return Err(ElementsError::NoSuchRank { rank: 0, world });
        }
        let precision = match dtype {
            DType::F32 => 24,
            DType::F64 => 53,
            DType::F16 => 11,
            DType::BF16 => 8,
            DType::I32 | DType::U32 => 32,
            DType::I64 | DType::U64 => 64,
        };
        let adds = matches!(op, ReduceOp::Sum | ReduceOp::Avg);
        let mut bits = precision;
        if adds && dtype.is_float() {
            let ranks_log2 = world.next_power_of_two().trailing_zeros();
            // With fewer than two bits most elements would be alike and the check blind; beyond 2^21
            // ranks an f64 would need fewer bits than its upper word has.
            let most_log2 = (precision - 2).min(21);
            if ranks_log2 > most_log2 {
                return Err(ElementsError::TooManyRanks { dtype, op, world, most: 1 << most_log2 });
            }
            bits -= ranks_log2;
        }
        let rounds = op == ReduceOp::Avg && dtype.is_float() && !world.is_power_of_two();
        let tolerance = rounds.then(|| (world + 2) as f64 * 2f64.powi(bits as i32 - precision as i32));
        Ok(Pattern { dtype, op, world, iteration, bits, tolerance })
    }

    /// The input of one rank.
    pub(super) fn input32(&self, rank: usize, block: u64, words: &mut [u32]) {
        self.fold32(rank..rank + 1, block, words);
        self.convert32(words);
    }

    /// The input of one rank.
    pub(super) fn input64(&self, rank: usize, block: u64, words: &mut [u64]) {
        self.fold64(rank..rank + 1, block, words);
    }

    /// The result over all ranks.
    pub(super) fn result32(&self, block: u64, words: &mut [u32]) {
        self.fold32(0..self.world, block, words);
        self.convert32(words);
        if self.op == ReduceOp::Avg {
            match self.dtype {
                DType::I32 => words.iter_mut().for_each(|w| *w = (*w as i32 / self.world as i32) as u32),
                DType::U32 => words.iter_mut().for_each(|w| *w /= self.world as u32),
                _ => words.iter_mut().for_each(|w| *w = (f32::from_bits(*w) / self.world as f32).to_bits()),
            }
        }
    }

    /// The result over all ranks.
    pub(super) fn result64(&self, block: u64, words: &mut [u64]) {
        self.fold64(0..self.world, block, words);
        if self.op == ReduceOp::Avg {
            match self.dtype {
                DType::I64 => words.iter_mut().for_each(|w| *w = (*w as i64 / self.world as i64) as u64),
                DType::U64 => words.iter_mut().for_each(|w| *w /= self.world as u64),
                _ => words.iter_mut().for_each(|w| *w = (f64::from_bits(*w) / self.world as f64).to_bits()),
            }
        }
    }

    /// Whether a widened element is wrong.
    pub(super) fn is_wrong32(&self, got: u32, want: u32) -> bool {
        match self.tolerance {
            None => got != want,
            Some(t) => !within32(got, want, t as f32),
        }
    }

    /// Whether an element is wrong.
    pub(super) fn is_wrong64(&self, got: u64, want: u64) -> bool {
        match self.tolerance {
            None => got != want,
            Some(t) => !within64(got, want, t),
        }
    }

    /// Number of wrong elements of a block.
    pub(super) fn wrong32(&self, got: &[u32], want: &[u32]) -> u64 {
        let pairs = got.iter().zip(want);
        let wrong: u32 = match self.tolerance {
            None => pairs.map(|(g, w)| u32::from(g != w)).sum(),
            Some(t) => pairs.map(|(g, w)| u32::from(!within32(*g, *w, t as f32))).sum(),
        };
        u64::from(wrong)
    }

    /// Number of wrong elements of a block.
    pub(super) fn wrong64(&self, got: &[u64], want: &[u64]) -> u64 {
        let pairs = got.iter().zip(want);
        match self.tolerance {
            None => pairs.map(|(g, w)| u64::from(g != w)).sum(),
            Some(t) => pairs.map(|(g, w)| u64::from(!within64(*g, *w, t))).sum(),
        }
    }

    /// Integers that stand for floats become the bits of the f32.
    fn convert32(&self, words: &mut [u32]) {
        if self.dtype.is_float() && self.op != ReduceOp::Prod {
            for w in words {
                *w = (*w as i32 as f32).to_bits();
            }
        }
    }

    fn fold32(&self, ranks: Range<usize>, block: u64, words: &mut [u32]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature that the function is compiled for has just been found.
            return unsafe { fold32_avx2(self, ranks, block, words) };
        }
        fold32(self, ranks, block, words);
    }

    fn fold64(&self, ranks: Range<usize>, block: u64, words: &mut [u64]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature that the function is compiled for has just been found.
            return unsafe { fold64_avx2(self, ranks, block, words) };
        }
        fold64(self, ranks, block, words);
    }

    /// Seed of a block: splitmix64's finaliser over the three coordinates.
    fn seed(&self, rank: usize, block: u64) -> u64 {
        mix(self.rank_seed(rank) ^ block)
    }

    /// The part of a block's seed that is the same for all blocks.
    pub(super) fn rank_seed(&self, rank: usize) -> u64 {
        mix(mix(self.iteration.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ rank as u64)
    }

    /// How far a hash is shifted to become an integer that floats add exactly.
    pub(super) fn shift(&self) -> u32 {
        31u32.saturating_sub(self.bits)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A 32-bit hash with two multiplications ("lowbias32", Chris Wellons), cheap in vectors.
#[inline(always)]
fn hash(seed: u32, lane: u32) -> u32 {
    let mut x = seed.wrapping_add(lane.wrapping_mul(0x9e37_79b9));
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

fn within32(got: u32, want: u32, tolerance: f32) -> bool {
    (f32::from_bits(got) - f32::from_bits(want)).abs() <= tolerance
}

fn within64(got: u64, want: u64, tolerance: f64) -> bool {
    (f64::from_bits(got) - f64::from_bits(want)).abs() <= tolerance
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold32_avx2(pattern: &Pattern, ranks: Range<usize>, block: u64, words: &mut [u32]) {
    fold32(pattern, ranks, block, words);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold64_avx2(pattern: &Pattern, ranks: Range<usize>, block: u64, words: &mut [u64]) {
    fold64(pattern, ranks, block, words);
}

#[inline(always)]
fn fold32(p: &Pattern, ranks: Range<usize>, block: u64, words: &mut [u32]) {
    let shift = p.shift();
    // Arithmetic shift: magnitude at most 2^bits, both signs.
    let small = |h: u32| (h as i32) >> shift;
    let signed = p.dtype == DType::I32;
    match (p.dtype.is_float(), p.op) {
        (true, ReduceOp::Sum | ReduceOp::Avg) => {
            each32(p, ranks, block, words, 0, |a, h, _| a.wrapping_add(small(h) as u32));
        }
        (true, ReduceOp::Min) => {
            each32(p, ranks, block, words, i32::MAX as u32, |a, h, _| (a as i32).min(small(h)) as u32)
        }
        (true, ReduceOp::Max) => {
            each32(p, ranks, block, words, i32::MIN as u32, |a, h, _| (a as i32).max(small(h)) as u32)
        }
        // The bits of the f32: factors of two add to the exponent, signs to the topmost bit.
        (true, ReduceOp::Prod) => each32(p, ranks, block, words, 1f32.to_bits(), |a, h, twos| {
            a.wrapping_add(h & (1 << 31)).wrapping_add((h & (h >> 1) & (h >> 2) & twos) << 23)
        }),
        (false, ReduceOp::Sum | ReduceOp::Avg) => {
            each32(p, ranks, block, words, 0, |a, h, _| a.wrapping_add(h));
        }
        (false, ReduceOp::Prod) => {
            each32(p, ranks, block, words, 1, |a, h, _| a.wrapping_mul(h | 1));
        }
        (false, ReduceOp::Min) if signed => {
            each32(p, ranks, block, words, i32::MAX as u32, |a, h, _| (a as i32).min(h as i32) as u32)
        }
        (false, ReduceOp::Max) if signed => {
            each32(p, ranks, block, words, i32::MIN as u32, |a, h, _| (a as i32).max(h as i32) as u32)
        }
        (false, ReduceOp::Min) => each32(p, ranks, block, words, u32::MAX, |a, h, _| a.min(h)),
        (false, ReduceOp::Max) => each32(p, ranks, block, words, 0, |a, h, _| a.max(h)),
    }
}

/// Folds the ranks' hashes into every lane; the last argument of `fold` is one for ranks that may
/// contribute a factor of two, else zero.
#[inline(always)]
fn each32(
    p: &Pattern,
    ranks: Range<usize>,
    block: u64,
    words: &mut [u32],
    start: u32,
    fold: impl Fn(u32, u32, u32) -> u32,
) {
    words.fill(start);
    for rank in ranks {
        let seed = p.seed(rank, block) as u32;
        let twos = u32::from(rank < RANKS_WITH_TWOS);
        for (lane, word) in words.iter_mut().enumerate() {
            *word = fold(*word, hash(seed, lane as u32), twos);
        }
    }
}

#[inline(always)]
fn fold64(p: &Pattern, ranks: Range<usize>, block: u64, words: &mut [u64]) {
    // A float is hi · 2^(bits - 31) + the topmost bits of lo: an integer of magnitude at most
    // 2^bits, in operations that are exact and that vectors have.
    let low_bits = p.bits.saturating_sub(31).min(22);
    let scale = f64::from(1u32 << low_bits);
    let small = |lo: u32, hi: u32| f64::from(hi as i32) * scale + f64::from((lo >> (32 - low_bits)) as i32);
    let whole = |lo: u32, hi: u32| u64::from(hi) << 32 | u64::from(lo);
    let signed = p.dtype == DType::I64;
    match (p.dtype.is_float(), p.op) {
        (true, ReduceOp::Sum | ReduceOp::Avg) => {
            each64(p, ranks, block, words, 0f64.to_bits(), |a, lo, hi, _| (f64::from_bits(a) + small(lo, hi)).to_bits())
        }
        (true, ReduceOp::Min) => each64(p, ranks, block, words, f64::MAX.to_bits(), |a, lo, hi, _| {
            f64::from_bits(a).min(small(lo, hi)).to_bits()
        }),
        (true, ReduceOp::Max) => each64(p, ranks, block, words, f64::MIN.to_bits(), |a, lo, hi, _| {
            f64::from_bits(a).max(small(lo, hi)).to_bits()
        }),
        (true, ReduceOp::Prod) => each64(p, ranks, block, words, 1f64.to_bits(), |a, h, _, twos| {
            let sign = u64::from(h >> 31) << 63;
            a.wrapping_add(sign).wrapping_add(u64::from(h & (h >> 1) & (h >> 2) & twos) << 52)
        }),
        (false, ReduceOp::Sum | ReduceOp::Avg) => {
            each64(p, ranks, block, words, 0, |a, lo, hi, _| a.wrapping_add(whole(lo, hi)));
        }
        (false, ReduceOp::Prod) => {
            each64(p, ranks, block, words, 1, |a, lo, hi, _| a.wrapping_mul(whole(lo, hi) | 1));
        }
        (false, ReduceOp::Min) if signed => {
            each64(p, ranks, block, words, i64::MAX as u64, |a, lo, hi, _| (a as i64).min(whole(lo, hi) as i64) as u64)
        }
        (false, ReduceOp::Max) if signed => {
            each64(p, ranks, block, words, i64::MIN as u64, |a, lo, hi, _| (a as i64).max(whole(lo, hi) as i64) as u64)
        }
        (false, ReduceOp::Min) => each64(p, ranks, block, words, u64::MAX, |a, lo, hi, _| a.min(whole(lo, hi))),
        (false, ReduceOp::Max) => each64(p, ranks, block, words, 0, |a, lo, hi, _| a.max(whole(lo, hi))),
    }
}

/// As [`each32`], with two hashes a lane, low and high.
#[inline(always)]
fn each64(
    p: &Pattern,
    ranks: Range<usize>,
    block: u64,
    words: &mut [u64],
    start: u64,
    fold: impl Fn(u64, u32, u32, u32) -> u64,
) {
    words.fill(start);
    for rank in ranks {
        let seed = p.seed(rank, block);
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        let twos = u32::from(rank < RANKS_WITH_TWOS);
        for (lane, word) in words.iter_mut().enumerate() {
            let lane = lane as u32;
            *word = fold(*word, hash(low, lane), hash(high, lane), twos);
        }
    }
}

#[cfg(test)]
impl Pattern {
    /// Whether the code chosen on this machine gives what the baseline code gives.
    pub(super) fn plain_code_agrees(&self, block: u64) -> bool {
        if self.dtype.size_bytes() == 8 {
            let (mut plain, mut fast) = ([0; BLOCK], [1; BLOCK]);
            fold64(self, 0..self.world, block, &mut plain);
            self.fold64(0..self.world, block, &mut fast);
            return plain == fast;
        }
        let (mut plain, mut fast) = ([0; BLOCK], [1; BLOCK]);
        fold32(self, 0..self.world, block, &mut plain);
        self.fold32(0..self.world, block, &mut fast);
        plain == fast
    }
}
