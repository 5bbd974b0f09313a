//! Prints how fast the reduction kernel adds incoming slices to a large buffer.
//!
//! `cargo run --release -p r2cc-lib --example reduce_speed`. The 256 KiB of incoming data stay in
//! the second-level cache, as a slice just received does; `buffer` is 16 MiB. Bytes a second count
//! the buffer once, best of ten; copying the buffer is the yardstick.

use std::io::Write;
use std::time::Instant;

use r2cc::collective::kernel::{Operand, reduce};
use r2cc::dtype::{DType, ReduceOp};

const BUFFER: usize = 16 << 20;
const SLICE: usize = 256 << 10;

fn main() -> std::io::Result<()> {
    // As any type: small normal numbers, and no NaN.
    let words = |bytes: usize| vec![0x3c00_3c00_3c00_3c00_u64; bytes / 8];
    let (mut dst, input, incoming) = (words(BUFFER), words(BUFFER), words(SLICE));
    let dst: &mut [u8] = bytemuck::cast_slice_mut(&mut dst);
    let input: &[u8] = bytemuck::cast_slice(&input);
    let incoming: &[u8] = bytemuck::cast_slice(&incoming);
    let mut out = std::io::stdout().lock();
    writeln!(out, "dtype  op    in place  out of place  GB/s")?;
    for dtype in DType::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
            let in_place = gigabytes_a_second(|| {
                for d in dst.chunks_mut(SLICE) {
                    reduce(dtype, op, d, Operand::SameAsDst, incoming);
                }
            });
            let out_of_place = gigabytes_a_second(|| {
                for (d, i) in dst.chunks_mut(SLICE).zip(input.chunks(SLICE)) {
                    reduce(dtype, op, d, Operand::At(i), incoming);
                }
            });
            writeln!(out, "{dtype:6} {op:5} {in_place:8.1} {out_of_place:13.1}")?;
        }
    }
    let copy = gigabytes_a_second(|| dst.copy_from_slice(input));
    writeln!(out, "copy {copy:29.1}")
}

fn gigabytes_a_second(mut pass: impl FnMut()) -> f64 {
    let best = (0..10)
        .map(|_| {
            let start = Instant::now();
            pass();
            start.elapsed()
        })
        .min()
        .unwrap_or_default();
    BUFFER as f64 / best.as_secs_f64() / 1e9
}
