//! Collectives over real sockets: several ranks as threads of one process, over the loopback device.
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up has failed")]

use std::net::{SocketAddr, TcpListener};
use std::thread;

use r2cc::{Communicator, DType, Error, ReduceOp};

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

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_is_sent() {
    with_ranks(2, |comm| {
        let mut output = [0_u8; 16];
        let short = comm.all_reduce_bytes(DType::F32, ReduceOp::Sum, Some(&[0; 8]), &mut output);
        assert!(matches!(short, Err(Error::Argument { .. })));
        let odd = comm.all_reduce_bytes(DType::F64, ReduceOp::Sum, None, &mut output[..12]);
        assert!(matches!(odd, Err(Error::Argument { .. })));
        assert!(matches!(comm.broadcast(&mut [0_u32], 2), Err(Error::Argument { .. })));
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
