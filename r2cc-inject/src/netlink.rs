//! A synchronous route netlink socket inside one namespace: interfaces, bridge ports,
//! routes, addresses and root qdiscs, read as they are and put back as they were.
//!
//! Replies are kept as bytes, so that what is put back is what the kernel said, also
//! where a newer kernel says more than this program knows. Decides nothing.

use std::{io, net::IpAddr, os::fd::BorrowedFd};

use netlink_packet_core::{DefaultNla, Emitable, NlasIterator};
use netlink_packet_route::{
    AddressFamily,
    link::{LinkAttribute, LinkFlags, LinkMessage},
    tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use serde::{Deserialize, Serialize};

use crate::netns::within;

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_GETQDISC: u16 = 38;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const REPLACE: u16 = 0x100;
const CREATE: u16 = 0x400;
const HEADER_BYTES: usize = 16;

const IFINFO_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_PROTINFO: u16 = 12;
const NLA_F_NESTED: u16 = 1 << 15;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_CARRIER: u16 = 33;
const IFADDR_BYTES: usize = 8;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTMSG_BYTES: usize = 12;
const RTA_OIF: u16 = 4;
const RTPROT_KERNEL: u8 = 2;
const TCMSG_BYTES: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;

/// An interface as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// its index in its namespace
    pub index: u32,
    /// its name
    pub name: String,
    /// whether it is set up
    pub is_up: bool,
    /// whether it has a carrier; never while it is set down
    pub has_carrier: bool,
    /// what a bridge does with its frames; None: it is no port of a bridge
    pub port_state: Option<u8>,
}

/// A root qdisc, as it can be put back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qdisc {
    /// its kind, such as `tbf`
    pub kind: String,
    /// its handle; 0: the kernel's default, which comes back by itself
    pub handle: u32,
    /// its options, as the kernel said them
    pub options: Vec<u8>,
}

/// A route netlink socket.
#[derive(Debug)]
pub struct Route {
    socket: Socket,
    sequence: u32,
}

impl Route {
    /// Opens the socket in `netns`; it stays there.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(netns: BorrowedFd<'_>) -> io::Result<Self> {
        let socket = within(netns, || {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            io::Result::Ok(socket)
        })??;
        Ok(Self { socket, sequence: 0 })
    }

    /// The interface of that name.
    ///
    /// # Errors
    /// `NotFound`, or what the system says.
    pub fn interface(&mut self, name: &str) -> io::Result<Interface> {
        let mut found = None;
        let mut request = vec![0; IFINFO_BYTES];
        request[0] = 0;
        self.exchange(RTM_GETLINK, DUMP, &request, |kind, payload| {
            if kind != RTM_NEWLINK {
                return;
            }
            let its_name = attribute(payload, IFINFO_BYTES, IFLA_IFNAME);
            if its_name.as_deref().map(text) == Some(name.to_owned()) {
                found = Some(Interface {
                    index: word(payload, 4),
                    name: name.to_owned(),
                    is_up: word(payload, 8) & 1 == 1, // IFF_UP
                    has_carrier: attribute(payload, IFINFO_BYTES, IFLA_CARRIER).is_some_and(|carrier| carrier == [1]),
                    port_state: port_state(payload),
                });
            }
        })?;
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no interface {name}")))
    }

    /// Sets an interface up or down.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_link(&mut self, index: u32, up: bool) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.change_mask = LinkFlags::Up;
        if up {
            message.header.flags = LinkFlags::Up;
        }
        self.change(RTM_NEWLINK, 0, &emitted(&message))
    }

    /// Says what its bridge does with the frames of a port: asked of the bridge, because a change of the port itself
    /// makes the bridge enable it again.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_port_state(&mut self, index: u32, state: u8) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.interface_family = AddressFamily::Bridge;
        message.header.index = index;
        let state = DefaultNla::new(IFLA_BRPORT_STATE, vec![state]);
        let mut port = vec![0; state.buffer_len()];
        state.emit(&mut port);
        message.attributes = vec![LinkAttribute::Other(DefaultNla::new(IFLA_PROTINFO | NLA_F_NESTED, port))];
        self.change(RTM_SETLINK, 0, &emitted(&message))
    }

    /// The IPv4 routes over an interface that the kernel did not make itself; it forgets
    /// them when the interface goes down.
    ///
    /// # Errors
    /// What the system says.
    pub fn own_routes(&mut self, index: u32) -> io::Result<Vec<Vec<u8>>> {
        let mut routes = self.routes(libc::AF_INET as u8)?;
        routes.retain(|route| {
            route[5] != RTPROT_KERNEL
                && attribute(route, RTMSG_BYTES, RTA_OIF).is_some_and(|oif| word(&oif, 0) == index)
        });
        for route in &mut routes {
            // what a route has been (dead, offloaded) is no part of what it is asked to be
            route[8..12].fill(0);
        }
        Ok(routes)
    }

    /// Puts a route back that [`Route::own_routes`] has read.
    ///
    /// # Errors
    /// What the system says.
    pub fn add_route(&mut self, route: &[u8]) -> io::Result<()> {
        self.change(RTM_NEWROUTE, CREATE | REPLACE, route)
    }

    /// The interfaces that carry a default route, IPv4 or IPv6.
    ///
    /// # Errors
    /// What the system says.
    pub fn default_route_interfaces(&mut self) -> io::Result<Vec<u32>> {
        const RTN_UNICAST: u8 = 1;
        const RTA_MULTIPATH: u16 = 9;
        let mut indices = Vec::new();
        for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
            for route in self.routes(family)? {
                if route[1] != 0 || route[7] != RTN_UNICAST {
                    continue;
                }
                if let Some(oif) = attribute(&route, RTMSG_BYTES, RTA_OIF) {
                    indices.push(word(&oif, 0));
                }
                // struct rtnexthop: length u16, flags, hops, interface index, attributes
                let hops = attribute(&route, RTMSG_BYTES, RTA_MULTIPATH).unwrap_or_default();
                let mut rest = hops.as_slice();
                while rest.len() >= 8 {
                    indices.push(word(rest, 4));
                    let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]])).max(8);
                    rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                }
            }
        }
        Ok(indices)
    }

    /// The interface that has this address.
    ///
    /// # Errors
    /// What the system says.
    pub fn interface_of(&mut self, address: IpAddr) -> io::Result<Option<u32>> {
        let wanted = match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let mut found = None;
        self.exchange(RTM_GETADDR, DUMP, &[0; IFADDR_BYTES], |kind, payload| {
            let has = |id| attribute(payload, IFADDR_BYTES, id).as_ref() == Some(&wanted);
            if kind == RTM_NEWADDR && (has(IFA_LOCAL) || has(IFA_ADDRESS)) {
                found = Some(word(payload, 4));
            }
        })?;
        Ok(found)
    }

    /// The root qdisc of an interface.
    ///
    /// # Errors
    /// What the system says.
    pub fn root_qdisc(&mut self, index: u32) -> io::Result<Option<Qdisc>> {
        let mut found = None;
        self.exchange(RTM_GETQDISC, DUMP, &[0; TCMSG_BYTES], |kind, payload| {
            if kind != RTM_NEWQDISC || word(payload, 4) != index || word(payload, 12) != u32::MAX {
                return;
            }
            found = Some(Qdisc {
                kind: attribute(payload, TCMSG_BYTES, TCA_KIND).map(|name| text(&name)).unwrap_or_default(),
                handle: word(payload, 8),
                options: attribute(payload, TCMSG_BYTES, TCA_OPTIONS).unwrap_or_default(),
            });
        })?;
        Ok(found)
    }

    /// Shapes what an interface sends to a rate (tbf, 128 KiB burst, at most 10 ms of
    /// queue and never less than two of the largest packets).
    ///
    /// # Errors
    /// What the system says.
    pub fn shape(&mut self, index: u32, bits_per_second: u64) -> io::Result<()> {
        const BURST_BYTES: u32 = 128 * 1024;
        const TBF_PARAMETERS: u16 = 1;
        const TBF_RATE64: u16 = 4;
        const TBF_BURST: u16 = 6;
        const LINKLAYER_ETHERNET: u8 = 1;
        const TICK_NS: u64 = 64;
        let bytes_per_second = (bits_per_second / 8).max(1);
        let rate_32 = u32::try_from(bytes_per_second).unwrap_or(u32::MAX);
        let queue = (bytes_per_second / 100).max(u64::from(BURST_BYTES));
        let ticks = u64::from(BURST_BYTES) * 1_000_000_000 / bytes_per_second / TICK_NS;
        // struct tc_tbf_qopt: two tc_ratespec of 12 bytes, then limit, buffer and mtu
        let mut parameters = vec![0; 36];
        parameters[1] = LINKLAYER_ETHERNET;
        parameters[8..12].copy_from_slice(&rate_32.to_ne_bytes());
        parameters[24..28].copy_from_slice(&u32::try_from(queue).unwrap_or(u32::MAX).to_ne_bytes());
        parameters[28..32].copy_from_slice(&u32::try_from(ticks).unwrap_or(u32::MAX).to_ne_bytes());
        let option = |kind, value| TcOption::Other(DefaultNla::new(kind, value));
        let mut options =
            vec![option(TBF_PARAMETERS, parameters), option(TBF_BURST, BURST_BYTES.to_ne_bytes().to_vec())];
        if rate_32 == u32::MAX {
            options.push(option(TBF_RATE64, bytes_per_second.to_ne_bytes().to_vec()));
        }
        let mut message = root(index);
        message.header.handle = TcHandle { major: 1, minor: 0 };
        message.attributes = vec![TcAttribute::Kind("tbf".to_owned()), TcAttribute::Options(options)];
        self.change(RTM_NEWQDISC, CREATE | REPLACE, &emitted(&message))
    }

    /// Puts a root qdisc back that [`Route::root_qdisc`] has read; None or one with
    /// handle 0: takes away what is there, and the kernel's default returns.
    ///
    /// # Errors
    /// What the system says.
    pub fn restore_qdisc(&mut self, index: u32, qdisc: Option<&Qdisc>) -> io::Result<()> {
        let Some(qdisc) = qdisc.filter(|qdisc| qdisc.handle != 0) else {
            return match self.change(RTM_DELQDISC, 0, &emitted(&root(index))) {
                // the default is there already
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => Ok(()),
                result => result,
            };
        };
        let mut message = root(index);
        message.header.handle = TcHandle::from(qdisc.handle);
        message.attributes = vec![
            TcAttribute::Kind(qdisc.kind.clone()),
            TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, qdisc.options.clone())),
        ];
        self.change(RTM_NEWQDISC, CREATE | REPLACE, &emitted(&message))
    }

    fn routes(&mut self, family: u8) -> io::Result<Vec<Vec<u8>>> {
        let mut routes = Vec::new();
        let mut request = vec![0; RTMSG_BYTES];
        request[0] = family;
        self.exchange(RTM_GETROUTE, DUMP, &request, |kind, payload| {
            if kind == RTM_NEWROUTE && payload.len() >= RTMSG_BYTES {
                routes.push(payload.to_vec());
            }
        })?;
        Ok(routes)
    }

    fn change(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<()> {
        self.exchange(kind, ACK | flags, payload, |_, _| {})
    }

    /// Sends a request and hands each part of the answer to `part`.
    fn exchange(&mut self, kind: u16, flags: u16, payload: &[u8], mut part: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = Vec::with_capacity(HEADER_BYTES + payload.len());
        let length = u32::try_from(HEADER_BYTES + payload.len()).map_err(io::Error::other)?;
        request.extend(length.to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend((REQUEST | flags).to_ne_bytes());
        request.extend(self.sequence.to_ne_bytes());
        request.extend(0_u32.to_ne_bytes());
        request.extend(payload);
        retried(|| self.socket.send(&request, 0))?;
        // The kernel fills at most 32 KiB of a dump at once.
        let mut reply = vec![0_u8; 64 * 1024];
        loop {
            let received = retried(|| self.socket.recv(&mut &mut reply[..], 0))?;
            let mut rest = &reply[..received];
            while rest.len() >= HEADER_BYTES {
                let length = word(rest, 0) as usize;
                if length < HEADER_BYTES || length > rest.len() {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let (kind, sequence) = (u16::from_ne_bytes([rest[4], rest[5]]), word(rest, 8));
                if sequence == self.sequence {
                    let payload = &rest[HEADER_BYTES..length];
                    match kind {
                        NLMSG_DONE => return Ok(()),
                        NLMSG_ERROR => {
                            return match word(payload, 0).cast_signed() {
                                0 => Ok(()),
                                code => Err(io::Error::from_raw_os_error(-code)),
                            };
                        }
                        _ => part(kind, payload),
                    }
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

/// What a bridge does with the frames of the interface that a message is about.
fn port_state(link: &[u8]) -> Option<u8> {
    let facts = attribute(link, IFINFO_BYTES, IFLA_LINKINFO)?;
    let of_bridge = attribute(&facts, 0, IFLA_INFO_SLAVE_KIND).is_some_and(|kind| text(&kind) == "bridge");
    let port = attribute(&facts, 0, IFLA_INFO_SLAVE_DATA).filter(|_| of_bridge)?;
    attribute(&port, 0, IFLA_BRPORT_STATE)?.first().copied()
}

fn root(index: u32) -> TcMessage {
    let mut message = TcMessage::default();
    message.header.index = index.cast_signed();
    message.header.parent = TcHandle::ROOT;
    message
}

fn emitted(message: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    bytes
}

/// The word at `offset`; 0 where the message is too short.
fn word(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |four| u32::from_ne_bytes(*four))
}

fn attribute(payload: &[u8], header: usize, kind: u16) -> Option<Vec<u8>> {
    NlasIterator::new(payload.get(header..)?)
        .flatten()
        .find(|attribute| attribute.kind() == kind)
        .map(|attribute| attribute.value().to_vec())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

fn retried<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
