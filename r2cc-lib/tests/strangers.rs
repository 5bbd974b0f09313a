//! Connections that are no part of the job, at the rendezvous and at the data ports: they are closed in bounded
//! time and counted, and the job joins and finishes as if they had never come.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use r2cc::transport::handshake::{CHALLENGE_BYTES, Connector, Hello, Key, LinkName, Purpose};
use r2cc::{Communicator, ReduceOp};

/// Bound of everything that should happen soon; generous, since the machine may be busy.
const SOON: Duration = Duration::from_secs(60);

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// What a stranger does once it is connected.
#[derive(Clone, Copy, Debug)]
enum Stranger {
    /// Speaks another protocol.
    Garbage,
    /// Says nothing at all.
    Silent,
    /// Begins like one of us and then says nothing more.
    HalfHello,
    /// Speaks the protocol, with a proof by another secret.
    WrongSecret,
    /// Goes away at once.
    Fleeting,
}

const ALL: [Stranger; 5] =
    [Stranger::Garbage, Stranger::Silent, Stranger::HalfHello, Stranger::WrongSecret, Stranger::Fleeting];

impl Stranger {
    /// Connects, as soon as somebody listens, and does what it does; the connection stays open on this side.
    fn come(self, addr: SocketAddr) -> TcpStream {
        let deadline = Instant::now() + SOON;
        let mut stream = loop {
            match TcpStream::connect(addr) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "{addr}: {error}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(SOON)).unwrap();
        // The other side may have closed the connection already: that is its right.
        match self {
            Self::Garbage => drop(stream.write_all(&[0x47; 4096])),
            Self::Silent => {}
            Self::HalfHello => drop(stream.write_all(b"R2CC\x01\x00\x00")),
            Self::WrongSecret => {
                let mut challenge = [0; CHALLENGE_BYTES];
                if stream.read_exact(&mut challenge).is_ok() {
                    let hello = Hello { name: LinkName { from: 1, to: 0 }, purpose: Purpose::Control };
                    let mut connector = Connector::new(Key::derive(b"another", "r2cc rendezvous", b""), hello);
                    drop(stream.write_all(&connector.handle_challenge(&challenge).unwrap()));
                }
            }
            Self::Fleeting => drop(stream.shutdown(std::net::Shutdown::Both)),
        }
        stream
    }
}

/// Reads until the other side has closed the connection. All that it may say before is its challenge.
fn expect_closed(mut stream: TcpStream) {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "still open: {error}"),
    }
    assert!(said.len() <= CHALLENGE_BYTES, "a stranger was told {} bytes", said.len());
}

fn rank(rank: usize, world: usize, rendezvous: SocketAddr) -> r2cc::Builder {
    Communicator::builder().rank(rank).world(world).rendezvous(rendezvous).secret(b"ours").node("one").join_bound(SOON)
}

/// One AllReduce with an exact answer.
fn reduce(comm: &mut Communicator) {
    let (me, world) = (comm.rank() as u64, comm.world() as u64);
    let mut buffer: Vec<u64> = (0..300_000).map(|i| i * 3 + me).collect();
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
    let right = |(i, x): (usize, &u64)| *x == world * i as u64 * 3 + world * (world - 1) / 2;
    assert!(buffer.iter().enumerate().all(right));
}

#[test]
fn a_job_joins_past_strangers_at_the_rendezvous_that_send_garbage_or_stall() {
    let rendezvous = free_port();
    let zero = thread::spawn(move || {
        let mut comm = rank(0, 3, rendezvous).build().unwrap();
        reduce(&mut comm);
        comm.close().unwrap();
    });
    // Those that are found out at once.
    for stranger in [Stranger::Garbage, Stranger::WrongSecret, Stranger::Fleeting] {
        expect_closed(stranger.come(rendezvous));
    }
    // More than rank 0 talks to at once, all there before any rank is.
    let stalling: Vec<_> = (0..80).map(|i| [Stranger::Silent, Stranger::HalfHello][i % 2].come(rendezvous)).collect();
    let others: Vec<_> = [1, 2]
        .map(|me| {
            thread::spawn(move || {
                let mut comm = rank(me, 3, rendezvous).build().unwrap();
                reduce(&mut comm);
                comm.close().unwrap();
            })
        })
        .into_iter()
        .collect();
    others.into_iter().for_each(|other| other.join().unwrap());
    zero.join().unwrap();
    stalling.into_iter().for_each(expect_closed);
}

#[test]
fn rank_0_that_waits_in_vain_says_whom_it_refused() {
    let rendezvous = free_port();
    let bound = Duration::from_secs(4);
    let zero = thread::spawn(move || rank(0, 2, rendezvous).join_bound(bound).build().unwrap_err().to_string());
    expect_closed(Stranger::Garbage.come(rendezvous));
    let error = zero.join().unwrap();
    for words in ["had not joined: [1]", "connections refused: 1", "does not speak this protocol"] {
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
}

#[test]
fn a_stranger_in_the_place_of_rank_0_is_told_from_silence() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = listener.local_addr().unwrap();
    let (over, told) = std::sync::mpsc::channel();
    let impostor = thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        // It may be gone before all is written.
        drop(first.write_all(&[0x47; 4096]));
        // From then on it accepts and says nothing.
        let mut silent = Vec::new();
        listener.set_nonblocking(true).unwrap();
        while told.try_recv().is_err() {
            silent.extend(listener.accept().ok());
            thread::sleep(Duration::from_millis(5));
        }
    });
    let error = rank(1, 2, rendezvous).join_bound(Duration::from_secs(3)).build().unwrap_err().to_string();
    for words in ["rank 1 could not join at", "does not speak this protocol"] {
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
    over.send(()).unwrap();
    impostor.join().unwrap();
}

#[test]
fn a_second_rank_with_the_same_number_is_refused_and_the_job_goes_on() {
    let rendezvous = free_port();
    let start = |me: usize| {
        thread::spawn(move || -> Result<(), r2cc::Error> {
            let mut comm = rank(me, 3, rendezvous).build()?;
            reduce(&mut comm);
            comm.close()
        })
    };
    let (zero, one, again) = (start(0), start(1), start(1));
    // Exactly one of the two is turned away, before anybody else has come.
    let deadline = Instant::now() + SOON;
    while !one.is_finished() && !again.is_finished() {
        assert!(Instant::now() < deadline, "neither was refused");
        thread::sleep(Duration::from_millis(5));
    }
    let two = start(2);
    let outcomes = [one, again].map(|outcome| outcome.join().unwrap());
    let refusals: Vec<String> = outcomes.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    assert_eq!(refusals, ["rank 0 refused rank 1: rank 1 has joined already, from one"]);
    zero.join().unwrap().unwrap();
    two.join().unwrap().unwrap();
}

/// The loopback port that a rank listens on, by its own event file.
fn data_port(events: &Path, rank: usize) -> u16 {
    let text = fs::read_to_string(events).unwrap();
    let start: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(start["event"], "start");
    u16::try_from(start["members"][rank]["local_port"].as_u64().unwrap()).unwrap()
}

#[test]
fn strangers_at_a_data_port_are_closed_and_counted_while_collectives_go_on() {
    /// More than may be in the handshake at once.
    const CROWD: usize = 270;
    let rendezvous = free_port();
    let folder = std::env::temp_dir().join(format!("r2cc-strangers-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let events = folder.join("rank-0.jsonl");
    let (ready, port) = std::sync::mpsc::channel();
    let told = events.clone();
    let zero = thread::spawn(move || {
        let mut comm = rank(0, 2, rendezvous).events(&told).build().unwrap();
        ready.send(data_port(&told, 0)).unwrap();
        let deadline = Instant::now() + SOON;
        // Until all strangers have been dealt with; the other rank is told by the broadcast.
        loop {
            reduce(&mut comm);
            let refused = comm.status().unwrap().refused_connections;
            let done = refused >= (CROWD + ALL.len()) as u64;
            assert!(done || Instant::now() < deadline, "{refused} connections refused");
            let mut word = [u32::from(done)];
            comm.broadcast(&mut word, 0).unwrap();
            if done {
                comm.close().unwrap();
                return refused;
            }
        }
    });
    let one = thread::spawn(move || {
        let mut comm = rank(1, 2, rendezvous).build().unwrap();
        loop {
            reduce(&mut comm);
            let mut word = [0_u32];
            comm.broadcast(&mut word, 0).unwrap();
            if word == [1] {
                comm.close().unwrap();
                return;
            }
        }
    });
    let addr = SocketAddr::from(([127, 0, 0, 1], port.recv_timeout(SOON).unwrap()));
    let came: Vec<_> = ALL.iter().map(|stranger| stranger.come(addr)).collect();
    let crowd: Vec<_> = (0..CROWD).map(|_| Stranger::Silent.come(addr)).collect();
    came.into_iter().chain(crowd).for_each(expect_closed);
    assert!(zero.join().unwrap() >= (CROWD + ALL.len()) as u64);
    one.join().unwrap();
    fs::remove_dir_all(&folder).unwrap();
}
