//! Collectives over real sockets: several ranks as threads of one process, over the loopback device.
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up has failed")]

use std::net::{SocketAddr, TcpListener};
use std::thread;

use r2cc::schedule::Part;
use r2cc::{Communicator, DType, Error, Operation, ReduceOp};

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Runs `body` on every rank and returns what each returned.
fn with_ranks<T: Send + 'static>(world: usize, body: fn(&mut Communicator) -> T) -> Vec<T> {
    let rendezvous = free_port();
    let ranks: Vec<_> = (0..world)
        .map(|rank| {
            thread::spawn(move || {
                let builder = Communicator::builder().rank(rank).world(world).rendezvous(rendezvous).secret(b"test");
                let mut comm = builder.node("one").build().unwrap();
                let result = body(&mut comm);
                comm.close().unwrap();
                result
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn sums_are_right_in_place_and_out_of_place_for_many_sizes() {
    for world in [1, 2, 3, 6] {
        with_ranks(world, |comm| {
            let (rank, world) = (comm.rank() as i64, comm.world() as i64);
            for elements in [0_i64, 1, 5, 1000, 100_003, 3_000_000] {
                let input: Vec<i64> = (0..elements).map(|i| i * 7 + rank).collect();
                let expected: Vec<i64> = (0..elements).map(|i| world * i * 7 + world * (world - 1) / 2).collect();
                let mut output = vec![0; input.len()];
                comm.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
                assert!(output == expected, "out of place, {elements} elements, world {world}");
                let mut buffer = input;
                comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer == expected, "in place, {elements} elements, world {world}");
            }
        });
    }
}

#[test]
fn small_and_large_sums_have_the_same_bits_on_every_rank() {
    for world in [2, 3, 4, 5] {
        with_ranks(world, |comm| {
            // Sums that depend on the order of addition.
            for elements in [1, 7, 1024, 20_000] {
                let scale = [1.0_f32, 1e-3, 3e7, 7e-8, 0.3][comm.rank()];
                let mut sums: Vec<f32> = (0..elements).map(|i| (i as f32 + 0.1) * scale).collect();
                comm.all_reduce_in_place(&mut sums, ReduceOp::Sum).unwrap();
                let mut all = vec![0.0; sums.len() * comm.world()];
                comm.all_gather(&sums, &mut all).unwrap();
                let same = |other: &[f32]| other.iter().zip(&sums).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(all.chunks(sums.len()).all(same), "{elements} elements, world {}", comm.world());
            }
        });
    }
}

#[test]
fn every_operator_and_type_is_served() {
    with_ranks(3, |comm| {
        let rank = comm.rank();
        let mut min = [rank as f32 + 1.0, 5.0];
        comm.all_reduce_in_place(&mut min, ReduceOp::Min).unwrap();
        assert_eq!(min, [1.0, 5.0]);
        let mut max = [rank as u32, 9];
        comm.all_reduce_in_place(&mut max, ReduceOp::Max).unwrap();
        assert_eq!(max, [2, 9]);
        let mut prod = [half::bf16::from_f32(2.0)];
        comm.all_reduce_in_place(&mut prod, ReduceOp::Prod).unwrap();
        assert_eq!(prod[0].to_f32(), 8.0);
        let mut avg = [rank as i32 * 10, -7];
        comm.all_reduce_in_place(&mut avg, ReduceOp::Avg).unwrap();
        assert_eq!(avg, [10, -7]);
    });
}

#[test]
fn broadcast_delivers_the_roots_elements_from_every_root() {
    with_ranks(4, |comm| {
        for root in 0..4 {
            let mut buffer: Vec<u64> = (0..50_000).map(|i| i * (comm.rank() as u64 + 1)).collect();
            comm.broadcast(&mut buffer, root).unwrap();
            assert!(buffer.iter().enumerate().all(|(i, x)| *x == i as u64 * (root as u64 + 1)));
        }
    });
}

/// What rank `rank` contributes at `i`.
fn value(rank: usize, i: usize) -> i64 {
    (rank * 1_000_003 + i * 7) as i64
}

/// Sum over the ranks of what they contribute at `i`.
fn sum(world: usize, i: usize) -> i64 {
    (0..world).map(|rank| value(rank, i)).sum()
}

fn of(len: usize, element: impl Fn(usize) -> i64) -> Vec<i64> {
    (0..len).map(element).collect()
}

const BLOCKS: [usize; 4] = [0, 1, 1021, 70_001];

#[test]
fn blocks_are_gathered_and_reduced_in_place_and_out_of_place() {
    for world in [1, 2, 3, 5] {
        with_ranks(world, |comm| {
            let (me, world) = (comm.rank(), comm.world());
            for n in BLOCKS {
                let gathered = of(world * n, |i| value(i / n, i % n));
                let mut all = vec![-1; world * n];
                comm.all_gather(&of(n, |i| value(me, i)), &mut all).unwrap();
                assert!(all == gathered, "all_gather of {n}, P {world}");
                let mut buffer = of(world * n, |i| if i / n == me { value(me, i % n) } else { -1 });
                comm.all_gather_in_place(&mut buffer).unwrap();
                assert!(buffer == gathered, "all_gather in place of {n}, P {world}");

                let reduced = of(n, |i| sum(world, me * n + i));
                let input = of(world * n, |i| value(me, i));
                let mut one = vec![-1; n];
                comm.reduce_scatter(&input, &mut one, ReduceOp::Sum).unwrap();
                assert!(one == reduced, "reduce_scatter of {n}, P {world}");
                let mut buffer = input.clone();
                comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                let expected = of(world * n, |i| if i / n == me { sum(world, i) } else { value(me, i) });
                assert!(buffer == expected, "reduce_scatter in place of {n}, P {world}: only the own block changes");
            }
        });
    }
}

#[test]
fn a_root_collects_reduces_and_hands_out_from_every_rank() {
    with_ranks(3, |comm| {
        let (me, world) = (comm.rank(), comm.world());
        for (root, n) in (0..world).flat_map(|root| BLOCKS.map(|n| (root, n))) {
            let own = of(n, |i| value(me, i));
            let mut result = if me == root { vec![-1; n] } else { vec![] };
            comm.reduce(&own, &mut result, ReduceOp::Sum, root).unwrap();
            assert!(me != root || result == of(n, |i| sum(world, i)), "reduce of {n} to {root}");
            let mut buffer = own.clone();
            comm.reduce_in_place(&mut buffer, ReduceOp::Sum, root).unwrap();
            let expected = if me == root { of(n, |i| sum(world, i)) } else { own.clone() };
            assert!(buffer == expected, "reduce in place of {n} to {root}: the others' stays");

            let mut all = if me == root { vec![-1; world * n] } else { vec![] };
            comm.gather(&own, &mut all, root).unwrap();
            assert!(me != root || all == of(world * n, |i| value(i / n, i % n)), "gather of {n} to {root}");

            let blocks = if me == root { of(world * n, |i| value(9, i)) } else { vec![] };
            let mut block = vec![-1; n];
            comm.scatter(&blocks, &mut block, root).unwrap();
            assert!(block == of(n, |i| value(9, me * n + i)), "scatter of {n} from {root}");
        }
    });
}

#[test]
fn elements_go_from_any_rank_to_any_other() {
    with_ranks(4, |comm| {
        let (me, world) = (comm.rank(), comm.world());
        for n in BLOCKS {
            let mut all = vec![-1; world * n];
            comm.all_to_all(&of(world * n, |i| value(me, i)), &mut all).unwrap();
            assert!(all == of(world * n, |i| value(i / n, me * n + i % n)), "all_to_all of {n}");
        }
        // A pair of ranks, while the others do nothing; then a group that swaps halves and keeps some.
        match me {
            0 => comm.send(&of(50_000, |i| value(0, i)), 3).unwrap(),
            3 => {
                let mut got = vec![-1; 50_000];
                comm.recv(&mut got, 0).unwrap();
                assert!(got == of(50_000, |i| value(0, i)));
            }
            _ => {}
        }
        let part = |peer, elements| Part { peer, elements };
        let partner = world - 1 - me;
        let mut got = vec![-1; 30];
        let sends = [part(partner, 10..20), part(me, 0..5), part(partner, 20..25)];
        let receives = [part(partner, 0..10), part(partner, 10..15), part(me, 15..20)];
        comm.exchange(&of(30, |i| value(me, i)), &mut got, &sends, &receives).unwrap();
        let from = |rank: usize, range: std::ops::Range<usize>| range.map(move |i| value(rank, i));
        let expected: Vec<i64> =
            from(partner, 10..25).chain(from(me, 0..5)).chain(std::iter::repeat_n(-1, 10)).collect();
        assert_eq!(got, expected);
    });
}

#[test]
fn every_element_type_passes_through_scratch() {
    with_ranks(3, |comm| {
        for dtype in DType::ALL {
            // Ones, whose sum and product every type holds; 3 ranks, so that partial results lie in scratch.
            let one: Vec<u8> = match dtype {
                DType::F32 => 1f32.to_le_bytes().to_vec(),
                DType::F64 => 1f64.to_le_bytes().to_vec(),
                DType::F16 => half::f16::ONE.to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::ONE.to_le_bytes().to_vec(),
                DType::I32 | DType::U32 => 1u32.to_le_bytes().to_vec(),
                DType::I64 | DType::U64 => 1u64.to_le_bytes().to_vec(),
            };
            let bytes = 3 * 5000 * dtype.size_bytes();
            let mut words = vec![0u64; bytes.div_ceil(8)];
            let buffer: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
            buffer.chunks_mut(one.len()).for_each(|element| element.copy_from_slice(&one));
            comm.perform(Operation::ReduceScatter(ReduceOp::Prod), dtype, None, buffer).unwrap();
            assert!(buffer.chunks(one.len()).all(|element| element == one), "{dtype}");
        }
    });
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_is_sent() {
    with_ranks(2, |comm| {
        let mut output = [0_u8; 16];
        let short = comm.all_reduce_bytes(DType::F32, ReduceOp::Sum, Some(&[0; 8]), &mut output);
        assert!(matches!(short, Err(Error::Argument { .. })));
        let odd = comm.all_reduce_bytes(DType::F64, ReduceOp::Sum, None, &mut output[..12]);
        assert!(matches!(odd, Err(Error::Argument { .. })));
        let refused = |outcome: Result<(), Error>| assert!(matches!(outcome, Err(Error::Argument { .. })));
        refused(comm.broadcast(&mut [0_u32], 2));
        refused(comm.all_gather(&[0_u32; 3], &mut [0; 5]));
        refused(comm.reduce_scatter_in_place(&mut [0_u32; 3], ReduceOp::Sum));
        refused(comm.gather(&[0_u32], &mut [0; 2], 2));
        refused(comm.perform(Operation::AllToAll, DType::F32, None, &mut []));
        refused(comm.send(&[0_u32], comm.rank()));
        let part = |peer, elements| Part { peer, elements };
        refused(comm.exchange(&[0_u32; 2], &mut [0; 2], &[part(2, 0..1)], &[]));
        refused(comm.exchange(&[0_u32; 2], &mut [0; 2], &[part(0, 0..3)], &[]));
        refused(comm.exchange(&[0_u32; 2], &mut [0; 2], &[], &[part(0, 0..2), part(1, 1..2)]));
        refused(comm.exchange(&[0_u32; 2], &mut [0; 2], &[part(comm.rank(), 0..1)], &[]));
        comm.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_leaves_without_a_goodbye_is_named_to_all_others() {
    let rendezvous = free_port();
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            thread::spawn(move || {
                let builder = Communicator::builder().rank(rank).world(3).rendezvous(rendezvous).secret(b"test");
                // Rank 1 may be gone before the others have finished building.
                let mut comm = match builder.node("one").build() {
                    Ok(comm) => comm,
                    Err(error) => return Some(error.to_string()),
                };
                if rank == 1 {
                    return None;
                }
                let mut buffer = vec![1.0_f32; 1 << 20];
                comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).err().map(|e| e.to_string())
            })
        })
        .collect();
    let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    let expected = "rank 1 on one is lost: its control connection closed without a goodbye";
    assert_eq!(errors, [Some(expected.to_owned()), None, Some(expected.to_owned())]);
}

#[test]
fn another_secret_is_refused_with_the_reason_on_both_sides() {
    let rendezvous = free_port();
    let builder = move |rank: usize, secret: &'static [u8]| {
        let bound = std::time::Duration::from_secs(2);
        Communicator::builder().rank(rank).world(2).rendezvous(rendezvous).secret(secret).node("one").join_bound(bound)
    };
    let zero = thread::spawn(move || builder(0, b"right").build().unwrap_err().to_string());
    let one = builder(1, b"wrong").build().unwrap_err().to_string();
    assert!(one.contains("same secret"), "{one}");
    let zero = zero.join().unwrap();
    assert!(zero.contains("these ranks had not joined: [1]") && zero.contains("wrong job secret"), "{zero}");
}
