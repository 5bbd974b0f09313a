//! How ranks find each other: rank 0 listens, everybody else connects, proves the job's secret and says who it
//! is; rank 0 answers with the roster. Blocking, bounded by one deadline.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::mesh::{MESSAGE_MAX, Mesh};
use crate::settings::Settings;
use crate::topology::Member;
use crate::transport::handshake::{
    Acceptor, CHALLENGE_BYTES, Connector, HELLO_BYTES, HandshakeError, Hello, Key, LinkName, Purpose, WELCOME_BYTES,
    nonce,
};

/// Longest that a stranger may take for the handshake.
const GREETING_TIME: Duration = Duration::from_secs(2);
/// Connections that are in the handshake at once; more wait in the kernel's queue.
const GREETING_MAX: usize = 64;

/// Joining failed.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {addr}: {source}; hint: is another job using this port?")]
    Listen {
        /// The rendezvous address.
        addr: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Not everybody came in time.
    #[error("rendezvous at {addr}: after {seconds:.1} s these ranks had not joined: {missing:?}{}", also(refused))]
    Missing {
        /// The rendezvous address.
        addr: SocketAddr,
        /// The bound.
        seconds: f64,
        /// Ranks that are missing.
        missing: Vec<usize>,
        /// Connections that were no rank of this job, and why the last one was not.
        refused: Option<(u64, String)>,
    },
    /// Rank 0 was not reached, or did not answer in time.
    #[error("rank {rank} could not join at {addr} within {seconds:.1} s: {reason}")]
    Unreachable {
        /// This rank.
        rank: usize,
        /// The rendezvous address.
        addr: SocketAddr,
        /// The bound.
        seconds: f64,
        /// The last error.
        reason: String,
    },
    /// Rank 0 said no.
    #[error("rank 0 refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Its reason.
        reason: String,
    },
}

fn also(refused: &Option<(u64, String)>) -> String {
    refused
        .as_ref()
        .map_or_else(String::new, |(count, last)| format!("; connections refused: {count}, the last: {last}"))
}

/// Everybody is here.
#[derive(Debug)]
pub struct Joined {
    /// All members by rank.
    pub roster: Vec<Member>,
    /// Rank 0's settings.
    pub settings: Settings,
    /// Key of this job's data lanes.
    pub lane_key: Key,
    /// The control connections.
    pub mesh: Mesh,
}

#[derive(Serialize, Deserialize)]
struct Join {
    world: usize,
    member: Member,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Roster { roster: Vec<Member>, settings: Settings, nonce: [u8; 16] },
    Refused { reason: String },
}

/// Joins the job; returns when every rank has.
///
/// # Errors
/// If rank 0 cannot listen or refuses, or somebody is missing at the deadline.
pub fn join(
    addr: SocketAddr,
    secret: &[u8],
    world: usize,
    me: &Member,
    settings: &Settings,
    bound: Duration,
) -> Result<Joined, RendezvousError> {
    let key = Key::derive(secret, "r2cc rendezvous", &(world as u64).to_le_bytes());
    let (roster, settings, nonce, peers) = if me.rank == 0 {
        let (roster, nonce, peers) = gather(addr, &key, world, me, settings, bound)?;
        (roster, settings.clone(), nonce, peers)
    } else {
        let deadline = Instant::now() + bound;
        let mut best: Option<(Telling, String)> = None;
        loop {
            let error = match ask(addr, &key, world, me, deadline) {
                Ok((Answer::Roster { roster, settings, nonce }, socket)) => {
                    break (roster, settings, nonce, vec![(0, socket)]);
                }
                Ok((Answer::Refused { reason }, _)) => {
                    return Err(RendezvousError::Refused { rank: me.rank, reason });
                }
                Err(error) => error,
            };
            let telling = Telling::of(&error);
            if best.as_ref().is_none_or(|(known, _)| telling >= *known) {
                best = Some((telling, error.to_string()));
            }
            if Instant::now() >= deadline {
                let (seconds, reason) = (bound.as_secs_f64(), best.map(|(_, reason)| reason).unwrap_or_default());
                return Err(RendezvousError::Unreachable { rank: me.rank, addr, seconds, reason });
            }
            thread::sleep(Duration::from_millis(20));
        }
    };
    let lane_key = Key::derive(secret, "r2cc lanes", &nonce);
    Ok(Joined { roster, settings, lane_key, mesh: Mesh::new(peers) })
}

/// How much an error says about why rank 0 cannot be joined. What rank 0 once said counts, not that it has
/// gone since.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Telling {
    Absent,
    Silent,
    Said,
}

impl Telling {
    fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Absent,
            // Made here, from what came over the connection.
            io::ErrorKind::Other => Self::Said,
            _ => Self::Silent,
        }
    }
}

type Gathered = (Vec<Member>, [u8; 16], Vec<(usize, Socket)>);

fn gather(
    addr: SocketAddr,
    key: &Key,
    world: usize,
    me: &Member,
    settings: &Settings,
    bound: Duration,
) -> Result<Gathered, RendezvousError> {
    let listen_error = |source| RendezvousError::Listen { addr, source };
    let listener = tcp(addr).map_err(listen_error)?;
    listener.set_reuse_address(true).map_err(listen_error)?;
    listener.bind(&addr.into()).map_err(listen_error)?;
    listener.listen(1024).map_err(listen_error)?;
    listener.set_nonblocking(true).map_err(listen_error)?;
    let nonce = nonce().map_err(listen_error)?;
    let deadline = Instant::now() + bound;
    let mut members: Vec<Option<Member>> = vec![None; world];
    let mut sockets: Vec<Option<Socket>> = (0..world).map(|_| None).collect();
    members[0] = Some(me.clone());
    let (arrivals, arrived) = mpsc::channel();
    let mut greeting = 0;
    let mut refused: Option<(u64, String)> = None;
    while members.iter().any(Option::is_none) {
        if Instant::now() >= deadline {
            let missing = (0..world).filter(|r| members[*r].is_none()).collect();
            return Err(RendezvousError::Missing { addr, seconds: bound.as_secs_f64(), missing, refused });
        }
        while greeting < GREETING_MAX
            && let Ok((socket, _)) = listener.accept()
        {
            let (arrivals, key) = (arrivals.clone(), key.clone());
            greeting += 1;
            // A gather that has given up does not listen any more.
            thread::spawn(move || drop(arrivals.send(greet(socket, &key))));
        }
        let Ok(arrival) = arrived.recv_timeout(Duration::from_millis(5)) else { continue };
        greeting -= 1;
        match arrival {
            Ok((from, join, socket)) => match objection(from, &join, world, &members) {
                None => {
                    sockets[from] = Some(socket);
                    members[from] = Some(join.member);
                }
                Some(reason) => {
                    tracing::warn!(rank = from, %reason, "refused at the rendezvous");
                    let _ = send(&socket, &Answer::Refused { reason }, Instant::now() + GREETING_TIME);
                }
            },
            Err(error) => {
                tracing::warn!(%error, "a connection to the rendezvous was no rank of this job");
                refused = Some((refused.map_or(1, |(count, _)| count + 1), error.to_string()));
            }
        }
    }
    let roster: Vec<Member> = members.into_iter().flatten().collect();
    let mut peers = Vec::new();
    for (rank, socket) in sockets.into_iter().enumerate().filter_map(|(r, s)| Some((r, s?))) {
        let answer = Answer::Roster { roster: roster.clone(), settings: settings.clone(), nonce };
        if send(&socket, &answer, deadline.max(Instant::now() + GREETING_TIME)).is_err() {
            let seconds = bound.as_secs_f64();
            return Err(RendezvousError::Missing { addr, seconds, missing: vec![rank], refused });
        }
        peers.push((rank, socket));
    }
    Ok((roster, nonce, peers))
}

fn objection(from: usize, join: &Join, world: usize, members: &[Option<Member>]) -> Option<String> {
    if join.world != world {
        return Some(format!("it expects a world of {} ranks, rank 0 one of {world}", join.world));
    }
    if join.member.rank != from || from >= world {
        return Some(format!("rank {from} is outside the world of {world} ranks"));
    }
    members[from].as_ref().map(|m| format!("rank {from} has joined already, from {}", m.node))
}

fn greet(socket: Socket, key: &Key) -> io::Result<(usize, Join, Socket)> {
    let deadline = Instant::now() + GREETING_TIME;
    socket.set_nonblocking(false)?;
    let acceptor = Acceptor::new()?;
    write_all(&socket, &acceptor.challenge(), deadline)?;
    let hello: [u8; HELLO_BYTES] = read_exact(&socket, deadline)?;
    let (hello, welcome) = acceptor.handle_hello(&hello, |_| Some(key.clone())).map_err(io::Error::other)?;
    if hello.purpose != Purpose::Control || hello.name.to != 0 {
        return Err(io::Error::other(HandshakeError::Purpose));
    }
    write_all(&socket, &welcome, deadline)?;
    let join: Join = receive(&socket, deadline)?;
    Ok((hello.name.from as usize, join, socket))
}

fn ask(addr: SocketAddr, key: &Key, world: usize, me: &Member, deadline: Instant) -> io::Result<(Answer, Socket)> {
    let socket = tcp(addr)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    socket.connect_timeout(&addr.into(), left.min(Duration::from_secs(1)))?;
    socket.set_nonblocking(false)?;
    let greeting = deadline.min(Instant::now() + GREETING_TIME);
    let hello = Hello { name: LinkName { from: me.rank as u32, to: 0 }, purpose: Purpose::Control };
    let mut connector = Connector::new(key.clone(), hello);
    let challenge: [u8; CHALLENGE_BYTES] = read_exact(&socket, greeting)?;
    write_all(&socket, &connector.handle_challenge(&challenge).map_err(io::Error::other)?, greeting)?;
    let welcome: [u8; WELCOME_BYTES] = read_exact(&socket, greeting).map_err(|_| {
        io::Error::other("rank 0 closed the handshake; hint: every rank needs the same secret and world size")
    })?;
    connector.handle_welcome(&welcome).map_err(io::Error::other)?;
    send(&socket, &Join { world, member: me.clone() }, greeting)?;
    let answer = receive(&socket, deadline)?;
    Ok((answer, socket))
}

fn tcp(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM.cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

fn send<T: Serialize>(socket: &Socket, message: &T, deadline: Instant) -> io::Result<()> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    write_all(socket, &bytes, deadline)
}

fn receive<T: for<'a> Deserialize<'a>>(socket: &Socket, deadline: Instant) -> io::Result<T> {
    let len = u32::from_le_bytes(read_exact(socket, deadline)?) as usize;
    if len > MESSAGE_MAX {
        return Err(io::Error::other(format!("a message of {len} bytes, at most {MESSAGE_MAX} allowed")));
    }
    let mut body = vec![0; len];
    read_into(socket, &mut body, deadline)?;
    serde_json::from_slice(&body).map_err(io::Error::other)
}

fn write_all(socket: &Socket, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    socket.set_write_timeout(Some(left))?;
    let mut writer: &Socket = socket;
    writer.write_all(bytes)
}

fn read_exact<const N: usize>(socket: &Socket, deadline: Instant) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    read_into(socket, &mut bytes, deadline)?;
    Ok(bytes)
}

/// Reads all of `buffer`; the deadline holds for the whole, not for each piece.
fn read_into(socket: &Socket, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let (mut reader, mut read) = (socket, 0);
    while read < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // The other side is told by the closed connection.
            let _ = SockRef::from(socket).shutdown(Shutdown::Both);
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match reader.read(&mut buffer[read..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => read += n,
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
