//! The baseline: what an AllReduce of two ranks has to move and to add, over plain sockets and nothing else.
//!
//! Each rank sends half of the buffer twice (once to be added, once to be placed), receives as much, adds the first
//! half of what it receives to its own and places the second. No frames, no acknowledgements, and no order between
//! the halves beyond that of each connection: less than a correct AllReduce needs. Start at [`Plain::run`].
//! [`Plain::sink`] moves as many bytes as iperf3 does: out of one piece of memory and into another.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use r2cc::collective::kernel::{Operand, reduce};
use r2cc::{DType, ReduceOp};
use socket2::{Domain, SockRef, Socket, Type};

use crate::orders::{CONGESTION_CONTROL, Shape};

/// Bound of connecting, accepting and of every wait for readiness.
const PATIENCE: Duration = Duration::from_secs(10);
const F32_BYTES: usize = size_of::<f32>();

/// The sockets of one rank; a lane's number is the first byte that it carries.
#[derive(Default)]
pub(crate) struct Plain {
    listeners: Vec<Socket>,
    outgoing: Vec<Socket>,
    incoming: Vec<Socket>,
}

/// The memory of one run, all three of one length: added to, sent from, placed into.
pub(crate) struct Memory<'a> {
    pub(crate) own: &'a mut [f32],
    pub(crate) other: &'a [f32],
    pub(crate) place: &'a mut [f32],
}

impl Plain {
    /// Listens; returns the ports. Older connections are closed.
    pub(crate) fn listen(&mut self, addrs: &[Ipv4Addr], shape: Shape) -> io::Result<Vec<u16>> {
        *self = Self::default();
        for addr in addrs {
            let socket = Socket::new(Domain::IPV4, Type::STREAM.cloexec(), None)?;
            // Accepted sockets inherit all of it; the size must be known before the window scale is agreed.
            prepare(&socket, shape)?;
            socket.bind(&SocketAddr::from((*addr, 0)).into())?;
            socket.listen(shape.lanes_a_nic as i32)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            self.listeners.push(socket);
        }
        let port = |socket: &Socket| Ok(socket.local_addr()?.as_socket().map_or(0, |addr| addr.port()));
        self.listeners.iter().map(port).collect()
    }

    /// Connects every lane, then accepts as many.
    pub(crate) fn connect(&mut self, ends: &[(Ipv4Addr, SocketAddrV4)], shape: Shape) -> io::Result<()> {
        for lane in 0..shape.lanes_a_nic * ends.len() {
            let (source, target) = ends[lane % ends.len()];
            let socket = Socket::new(Domain::IPV4, Type::STREAM.cloexec(), None)?;
            prepare(&socket, shape)?;
            socket.bind(&SocketAddr::from((source, 0)).into())?;
            socket.connect_timeout(&SocketAddr::V4(target).into(), PATIENCE)?;
            socket.set_tcp_nodelay(true)?;
            (&socket).write_all(&[lane as u8])?;
            self.outgoing.push(socket);
        }
        let mut numbered = Vec::new();
        for listener in &self.listeners {
            for _ in 0..shape.lanes_a_nic {
                let (socket, _) = listener.accept()?;
                socket.set_read_timeout(Some(PATIENCE))?;
                let mut lane = [0];
                (&socket).read_exact(&mut lane)?;
                numbered.push((lane[0], socket));
            }
        }
        numbered.sort_by_key(|(lane, _)| *lane);
        self.incoming = numbered.into_iter().map(|(_, socket)| socket).collect();
        self.outgoing.iter().chain(&self.incoming).try_for_each(|socket| socket.set_nonblocking(true))
    }

    /// Sends and receives everything once.
    pub(crate) fn run(&self, shape: Shape, memory: &mut Memory<'_>) -> io::Result<()> {
        let Memory { own, other, place } = memory;
        let each = own.len().div_ceil(self.outgoing.len());
        let stripes = other.chunks(each).map(bytemuck::cast_slice);
        let sending = self.outgoing.iter().zip(stripes);
        let sending =
            sending.map(|(socket, bytes): (_, &[u8])| Sending { socket, bytes, sent: 0, all: 2 * bytes.len() });
        let receiving = self.incoming.iter().zip(own.chunks_mut(each).zip(place.chunks_mut(each)));
        let receiving = receiving.map(|(socket, (add, place))| Receiving {
            socket,
            scratch: vec![0.0; shape.piece_bytes / F32_BYTES],
            carried: 0,
            add,
            added: 0,
            place: bytemuck::cast_slice_mut(place),
            placed: 0,
        });
        move_all(sending.collect(), receiving.collect(), shape)
    }

    /// Sends and receives `bytes`, none of which is looked at.
    pub(crate) fn sink(&self, shape: Shape, bytes: usize) -> io::Result<()> {
        let (piece, each) = (vec![0; shape.piece_bytes], bytes.div_ceil(self.outgoing.len()));
        let sending = self.outgoing.iter().map(|socket| Sending { socket, bytes: &piece, sent: 0, all: each });
        let sinking = self.incoming.iter();
        let sinking = sinking.map(|socket| Sinking { socket, scratch: vec![0; shape.piece_bytes], left: each });
        move_all(sending.collect(), sinking.collect(), shape)
    }
}

/// All lanes on one thread, or those of each direction on one.
fn move_all<R: Lane + Send>(mut sending: Vec<Sending<'_>>, mut receiving: Vec<R>, shape: Shape) -> io::Result<()> {
    if shape.threads == 1 {
        return drive(&mut sending, &mut receiving, shape.piece_bytes);
    }
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| drive::<R>(&mut sending, &mut [], shape.piece_bytes));
        let received = drive(&mut [], &mut receiving, shape.piece_bytes);
        sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(received)
    })
}

/// The same congestion control as the library's lanes; the choice of `iperf.rs` too.
fn prepare(socket: &Socket, shape: Shape) -> io::Result<()> {
    socket.set_tcp_congestion(CONGESTION_CONTROL.as_bytes())?;
    if shape.buffer_bytes > 0 {
        let socket = SockRef::from(socket);
        socket.set_send_buffer_size(shape.buffer_bytes)?;
        socket.set_recv_buffer_size(shape.buffer_bytes)?;
    }
    Ok(())
}

/// One direction of one connection.
trait Lane {
    fn socket(&self) -> &Socket;
    fn is_over(&self) -> bool;
    /// Moves what goes at once, at most `piece` bytes.
    fn step(&mut self, piece: usize) -> io::Result<()>;
}

/// One outgoing lane: its bytes go out until it is `all`.
struct Sending<'a> {
    socket: &'a Socket,
    bytes: &'a [u8],
    sent: usize,
    all: usize,
}

impl Lane for Sending<'_> {
    fn socket(&self) -> &Socket {
        self.socket
    }

    fn is_over(&self) -> bool {
        self.sent == self.all
    }

    fn step(&mut self, piece: usize) -> io::Result<()> {
        let rest = &self.bytes[self.sent % self.bytes.len()..];
        let most = piece.min(rest.len()).min(self.all - self.sent);
        self.sent += moved(self.socket.send_with_flags(&rest[..most], libc::MSG_NOSIGNAL))?;
        Ok(())
    }
}

/// One incoming lane whose bytes nobody wants.
struct Sinking<'a> {
    socket: &'a Socket,
    scratch: Vec<u8>,
    left: usize,
}

impl Lane for Sinking<'_> {
    fn socket(&self) -> &Socket {
        self.socket
    }

    fn is_over(&self) -> bool {
        self.left == 0
    }

    fn step(&mut self, piece: usize) -> io::Result<()> {
        let most = piece.min(self.left);
        self.left -= moved((&mut &*self.socket).read(&mut self.scratch[..most]))?;
        Ok(())
    }
}

/// One incoming lane: first bytes to add, then as many to place.
struct Receiving<'a> {
    socket: &'a Socket,
    scratch: Vec<f32>,
    /// Bytes of an element that has not arrived whole, at the start of `scratch`.
    carried: usize,
    add: &'a mut [f32],
    added: usize,
    place: &'a mut [u8],
    placed: usize,
}

impl Lane for Receiving<'_> {
    fn socket(&self) -> &Socket {
        self.socket
    }

    fn is_over(&self) -> bool {
        self.placed == self.place.len()
    }

    fn step(&mut self, piece: usize) -> io::Result<()> {
        if self.added == self.add.len() {
            let end = self.place.len().min(self.placed + piece);
            let read = moved((&mut &*self.socket).read(&mut self.place[self.placed..end]))?;
            self.placed += read;
            return Ok(());
        }
        let left = (self.add.len() - self.added) * F32_BYTES;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let end = bytes.len().min(left);
        let there = self.carried + moved((&mut &*self.socket).read(&mut bytes[self.carried..end]))?;
        let whole = there / F32_BYTES;
        let target: &mut [u8] = bytemuck::cast_slice_mut(&mut self.add[self.added..self.added + whole]);
        reduce(DType::F32, ReduceOp::Sum, target, Operand::SameAsDst, &bytes[..whole * F32_BYTES]);
        bytes.copy_within(whole * F32_BYTES..there, 0);
        self.carried = there - whole * F32_BYTES;
        self.added += whole;
        Ok(())
    }
}

fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// One thread's loop: a piece a lane and direction whenever its socket is ready.
fn drive<R: Lane>(sending: &mut [Sending<'_>], receiving: &mut [R], piece: usize) -> io::Result<()> {
    let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    loop {
        let outgoing = sending.iter().filter(|lane| !lane.is_over());
        let incoming = receiving.iter().filter(|lane| !lane.is_over());
        let mut watched: Vec<PollFd<'_>> = outgoing
            .map(|lane| PollFd::new(lane.socket().as_fd(), PollFlags::POLLOUT))
            .chain(incoming.map(|lane| PollFd::new(lane.socket().as_fd(), PollFlags::POLLIN)))
            .collect();
        if watched.is_empty() {
            return Ok(());
        }
        if poll(&mut watched, patience)? == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no lane of the baseline moved for 10 s"));
        }
        let ready: Vec<bool> = watched.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let mut ready = ready.into_iter();
        for lane in sending.iter_mut().filter(|lane| !lane.is_over()) {
            if ready.next() == Some(true) {
                lane.step(piece)?;
            }
        }
        for lane in receiving.iter_mut().filter(|lane| !lane.is_over()) {
            if ready.next() == Some(true) {
                lane.step(piece)?;
            }
        }
    }
}
