//! TCP sockets bound to one NIC each, and what the kernel tells about them.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::repair::DeliveryRate;

/// Bytes the kernel may buffer for a lane; enough for the largest window.
const BUFFER_BYTES: usize = 4 << 20;

/// Listens on one local address with a port of the kernel's choice.
///
/// # Errors
/// If the address is not local or the port is taken.
pub fn listen(addr: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    Ok(socket)
}

/// Starts to connect from one NIC. The source address is bound, and the device where the process may,
/// so that the kernel cannot choose another way out.
///
/// # Errors
/// If the local address is gone or the network is unreachable.
pub(crate) fn connect(device: Option<&str>, local: Ipv4Addr, remote: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    if let Some(device) = device {
        // Without the right to do so the source address has to be enough.
        let _ = socket.bind_device(Some(device.as_bytes()));
    }
    socket.bind(&SocketAddrV4::new(local, 0).into())?;
    prepare(&socket)?;
    match socket.connect(&remote.into()) {
        Ok(()) => Ok(socket),
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        Err(e) => Err(e),
    }
}

/// Options of every lane.
///
/// # Errors
/// If the socket is closed already.
pub(crate) fn prepare(socket: &Socket) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    choose_congestion_control(socket);
    if set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, BUFFER_BYTES as libc::c_int).is_err() {
        // Only a privileged process may go beyond the system's limit; the limit is then what we get.
        let _ = socket.set_send_buffer_size(BUFFER_BYTES);
    }
    Ok(())
}

/// The window of a lane is ours to bound, so congestion control has to react to loss and otherwise keep out of
/// the way. BBR does not: every ten seconds it drains the connection for 200 ms to measure its delay. The first
/// that the system lets us have is taken; none is no error.
fn choose_congestion_control(socket: &Socket) {
    for name in [&b"cubic"[..], b"reno"] {
        // SAFETY: the descriptor is open and the option value is `name`, whose length is given.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_CONGESTION,
                name.as_ptr().cast(),
                name.len() as libc::socklen_t,
            )
        };
        if rc == 0 {
            return;
        }
    }
}

/// Acknowledge at once what has arrived: the other side takes silence for a stall.
pub(crate) fn acknowledge_now(socket: &Socket) {
    // A socket that fails here fails its next read too, which reports it.
    let _ = set_option(socket, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
}

/// The socket counts as readable once it holds so many bytes, or is closed.
pub(crate) fn wake_at(socket: &Socket, bytes: usize) {
    // If it fails the reader wakes for less.
    let _ = set_option(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as libc::c_int);
}

/// Close with a reset: what the kernel still holds must not arrive.
pub(crate) fn reset(socket: Socket) {
    // If it fails the socket is closed in the usual way, which the fence protocol allows for.
    let _ = socket.set_linger(Some(Duration::ZERO));
}

/// Bounds what the kernel holds for a lane: bytes not acknowledged by the other host.
pub(crate) fn bound_outstanding(socket: &Socket, bytes: u64) {
    // The kernel doubles the value for its own overhead, so half of it is close to `bytes` of payload in large
    // buffers. If it fails the bound stays as it was.
    let half = libc::c_int::try_from(bytes / 2).unwrap_or(libc::c_int::MAX);
    if set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, half).is_err() {
        let _ = set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, half);
    }
}

fn set_option(socket: &Socket, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open and the option value is an int of the stated size.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Acknowledged and outstanding bytes of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelProgress {
    /// Moves whenever the other host acknowledges anything, in order or not.
    pub(crate) acked: u64,
    /// Segments sent and not acknowledged.
    pub(crate) unacked_segments: u32,
    /// They would all go into one, and the other host acknowledges them as late as one.
    pub(crate) few_bytes: bool,
    /// Bytes not sent yet.
    pub(crate) unsent_bytes: u32,
    /// The other host takes no bytes now, because its process has not read those that it has, and says so: it
    /// answers probes. Nothing is on its way then.
    pub(crate) closed: bool,
    /// Delivery rate as the kernel measured it last.
    pub(crate) delivery: Option<DeliveryRate>,
}

/// Reads `TCP_INFO`.
///
/// # Errors
/// If the socket is closed already.
pub(crate) fn progress(socket: &Socket) -> io::Result<KernelProgress> {
    // SAFETY: tcp_info is a plain C struct of integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open; the kernel writes at most `len` bytes into `info`.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: byte 7 is a bit field that libc's struct leaves out as padding; the kernel or `zeroed` wrote it.
    let bits = unsafe { (&raw const info).cast::<u8>().add(7).read() };
    // The lowest bit says that the rate was sampled while there was too little to send.
    let limited_by_sender = bits & 1 == 1;
    Ok(KernelProgress {
        acked: info.tcpi_bytes_acked.wrapping_add(u64::from(info.tcpi_delivered)),
        unacked_segments: info.tcpi_unacked,
        // Every byte sent again makes this too large, and the silence that is waited out shorter.
        few_bytes: info.tcpi_bytes_sent.saturating_sub(info.tcpi_bytes_acked) <= u64::from(info.tcpi_snd_mss),
        unsent_bytes: info.tcpi_notsent_bytes,
        // Bytes that a dead NIC of our own refuses are unsent too, but there the peer's window is open.
        closed: info.tcpi_unacked == 0
            && info.tcpi_notsent_bytes > 0
            && info.tcpi_probes == 0
            && info.tcpi_snd_wnd < info.tcpi_snd_mss,
        delivery: (info.tcpi_delivery_rate > 0)
            .then_some(DeliveryRate { bytes_s: info.tcpi_delivery_rate, limited_by_sender }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Instant;

    #[test]
    fn a_peer_that_does_not_read_closes_its_window_and_one_that_has_read_all_does_not() {
        let listener = listen(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(false).unwrap();
        let to = listener.local_addr().unwrap().as_socket_ipv4().unwrap();
        let sender = connect(None, Ipv4Addr::LOCALHOST, to).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        let reaches = |wanted: fn(&KernelProgress) -> bool| {
            while !wanted(&progress(&sender).unwrap()) {
                assert!(Instant::now() < until, "{:?}", progress(&sender));
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let chunk = vec![0; 1 << 20];
        let mut sent = 0;
        while let Ok(n) = (&sender).write(&chunk) {
            sent += n;
        }
        reaches(|p| p.closed && p.unsent_bytes > 0);
        receiver.set_nonblocking(false).unwrap();
        std::io::copy(&mut std::io::Read::take(&receiver, sent as u64), &mut std::io::sink()).unwrap();
        reaches(|p| !p.closed && p.unsent_bytes == 0 && p.unacked_segments == 0);
    }
}
