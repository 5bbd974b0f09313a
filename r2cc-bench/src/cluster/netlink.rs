//! A synchronous route netlink socket opened inside one namespace.
//!
//! Owns requests, acknowledgements and the reading of link counters. Builds no messages: those
//! are in `wiring`. Replies are read by hand, because a newer kernel's attributes must not make
//! a counter unreadable.

use std::io;
use std::os::fd::BorrowedFd;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkMessage, LinkMessageBuffer};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::{ClusterError, in_netns};

const RTM_NEWLINK: u16 = 16;
const IFLA_STATS64: u16 = 23;
const NLMSGERR_ATTR_MSG: u16 = 1;
/// `struct nlmsgerr` with `NETLINK_CAP_ACK`: the code and the request's header.
const ERROR_HEADER_BYTES: usize = 20;
/// The kernel fills at most 32 KiB of a dump at once.
const REPLY_BYTES_MAX: usize = 64 * 1024;

/// One route netlink socket.
#[derive(Debug)]
pub(super) struct Route {
    socket: Socket,
    sequence: u32,
    place: String,
    reply: Vec<u8>,
}

/// Counters of one interface, as `struct rtnl_link_stats64` has them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinkCounters {
    pub(super) index: u32,
    pub(super) rx_packets: u64,
    pub(super) tx_packets: u64,
    pub(super) rx_bytes: u64,
    pub(super) tx_bytes: u64,
    pub(super) rx_dropped: u64,
    pub(super) tx_dropped: u64,
}

impl Route {
    /// Opens the socket in `netns`; it stays there. `place` names the namespace in errors.
    pub(super) fn open(netns: BorrowedFd<'_>, place: &str) -> Result<Self, ClusterError> {
        let socket = in_netns(netns, || {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            socket.set_cap_ack(true)?;
            socket.set_ext_ack(true)?;
            Ok(socket)
        })?
        .map_err(|error: io::Error| ClusterError::from_os("open a route netlink socket", place, error))?;
        Ok(Self { socket, sequence: 0, place: place.to_owned(), reply: vec![0; REPLY_BYTES_MAX] })
    }

    /// Sends one change and waits for the kernel's answer. `what` completes "cannot …".
    pub(super) fn apply(&mut self, what: &str, message: RouteNetlinkMessage, flags: u16) -> Result<(), ClusterError> {
        let mut answer = Answer::default();
        self.exchange(message, NLM_F_REQUEST | NLM_F_ACK | flags, |kind, payload| {
            if kind == NLMSG_ERROR {
                answer = Answer::parse(payload);
            }
        })
        .map_err(|error| ClusterError::from_os(what, &self.place, error))?;
        if answer.code == 0 {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(-answer.code);
        Err(match ClusterError::from_os(what, &self.place, source) {
            ClusterError::Refused { what, place, source, .. } => {
                ClusterError::Refused { what, place, kernel: answer.text, source }
            }
            other => other,
        })
    }

    /// Reads the counters of every interface of the namespace.
    pub(super) fn link_counters(&mut self) -> Result<Vec<LinkCounters>, ClusterError> {
        let mut counters = Vec::new();
        let mut failed = 0;
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        self.exchange(request, NLM_F_REQUEST | NLM_F_DUMP, |kind, payload| match kind {
            RTM_NEWLINK => counters.extend(LinkCounters::parse(payload)),
            NLMSG_ERROR => failed = Answer::parse(payload).code,
            _ => {}
        })
        .map_err(|error| ClusterError::from_os("read link counters", &self.place, error))?;
        if failed != 0 {
            return Err(ClusterError::from_os(
                "read link counters",
                &self.place,
                io::Error::from_raw_os_error(-failed),
            ));
        }
        Ok(counters)
    }

    /// Sends a request and hands each part of the reply to `part` until its last one.
    fn exchange(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        mut part: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut request = vec![0; packet.buffer_len()];
        packet.serialize(&mut request);
        retried(|| self.socket.send(&request, 0))?;
        loop {
            let reply = &mut self.reply;
            let received = retried(|| self.socket.recv(&mut reply.as_mut_slice(), 0))?;
            let mut rest = &self.reply[..received];
            while !rest.is_empty() {
                let buffer = NetlinkBuffer::new_checked(rest)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                let length = buffer.length() as usize;
                if buffer.sequence_number() == self.sequence {
                    let kind = buffer.message_type();
                    part(kind, buffer.payload());
                    if matches!(kind, NLMSG_DONE | NLMSG_ERROR) {
                        return Ok(());
                    }
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

/// What the kernel says to a change.
#[derive(Debug, Default)]
struct Answer {
    /// 0, or a negative errno.
    code: i32,
    text: Option<String>,
}

impl Answer {
    fn parse(payload: &[u8]) -> Self {
        let code = payload.first_chunk().map_or(-libc::EPROTO, |bytes| i32::from_ne_bytes(*bytes));
        let attributes = payload.get(ERROR_HEADER_BYTES..).unwrap_or_default();
        let text = NlasIterator::new(attributes)
            .flatten()
            .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
            .map(|attribute| String::from_utf8_lossy(attribute.value()).trim_end_matches('\0').to_owned());
        Self { code, text }
    }
}

impl LinkCounters {
    fn parse(payload: &[u8]) -> Option<Self> {
        let link = LinkMessageBuffer::new_checked(payload).ok()?;
        let stats = link.attributes().flatten().find(|attribute| attribute.kind() == IFLA_STATS64)?;
        let field = |position: usize| {
            let bytes = stats.value().get(position * 8..)?;
            bytes.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
        };
        Some(Self {
            index: link.link_index(),
            rx_packets: field(0)?,
            tx_packets: field(1)?,
            rx_bytes: field(2)?,
            tx_bytes: field(3)?,
            rx_dropped: field(6)?,
            tx_dropped: field(7)?,
        })
    }
}

fn retried<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
