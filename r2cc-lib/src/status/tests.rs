use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

fn path(nic: &str, state: &str) -> PathNow {
    let bits_s = Some(182_400_000);
    PathNow { nic: nic.into(), peer_nic: nic.into(), state: state.into(), bits_s, in_flight_bytes: 0 }
}

fn comm() -> CommStatus {
    CommStatus {
        name: "native".into(),
        rank: Some(1),
        world: Some(6),
        node: "node-1".into(),
        activity: "AllReduce under way".into(),
        begun: 8,
        payload_bytes: 3 << 20,
        replayed_bytes: 1 << 19,
        links: vec![
            LinkNow { peer: "rank 0 on node-1".into(), paths: vec![path("lo", "live")] },
            LinkNow { peer: "rank 2 on node-2".into(), paths: vec![path("mlx5_0", "live"), path("mlx5_2", "failed")] },
        ],
        last_transition: Some(LastTransition {
            at_ns: 1_000_000_000,
            text: "mlx5_2 to rank 2: suspect -> failed".into(),
        }),
    }
}

#[test]
fn a_status_in_words_marks_what_one_more_failure_would_end() {
    let status = ProcessStatus { version: 1, at_ns: 2_500_000_000, pid: 7, comms: vec![comm()], silent: 1 };
    let text = "\
rank 1 of 6 on node-1, native: AllReduce under way; 8 begun, 3.0 MiB posted, 0.50 MiB again
  to rank 0 on node-1: 1 of 1 paths live; lo live 182 Mbit/s
  to rank 2 on node-2: 1 of 2 paths live; mlx5_0 live 182 Mbit/s; mlx5_2 failed  UNPROTECTED
  last change 1.5 s ago: mlx5_2 to rank 2: suspect -> failed
process 7: 1 I/O threads did not answer
";
    assert_eq!(status.to_string(), text);
}

#[test]
fn a_source_tells_once_for_each_question_and_one_that_is_stuck_is_counted() {
    // The board is the process's: this test alone registers sources.
    let mut source = Source::register();
    let stuck = Source::register();
    assert!(!source.is_asked());
    let asks = thread::spawn(board::ask);
    let until = Instant::now() + Duration::from_secs(20);
    while !source.is_asked() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    source.answer(vec![comm()]);
    assert!(!source.is_asked());
    let status = asks.join().unwrap();
    assert_eq!((status.comms, status.silent), (vec![comm()], 1));
    drop((source, stuck));
    let nobody = board::ask();
    assert_eq!((nobody.comms.len(), nobody.silent), (0, 0));
}

#[test]
fn a_server_answers_each_reader_and_leaves_no_socket() {
    let place = std::env::temp_dir().join(format!("r2cc-status-{}", std::process::id()));
    let server = Server::start(&place, || "line".into()).unwrap();
    assert_eq!((read(&place).unwrap(), read(&place).unwrap()), ("line".into(), "line".into()));
    let taken = Server::start(&place, String::new).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    drop(server);
    assert!(!place.exists());

    // What a killed process left is replaced, what is no socket is not touched.
    drop(UnixListener::bind(&place).unwrap());
    drop(Server::start(&place, String::new).unwrap());
    std::fs::write(&place, "mine").unwrap();
    assert_eq!(Server::start(&place, String::new).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "mine");
    std::fs::remove_file(&place).unwrap();
}
