//! Carrier and address changes of the local NICs, as the kernel announces them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use netlink_packet_core::{NetlinkBuffer, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressAttribute;
use netlink_packet_route::link::{LinkAttribute, LinkFlags};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::topology::Nic;

const GROUPS: u32 = (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR) as u32;

/// A netlink socket in the thread's network namespace.
#[derive(Debug)]
pub struct NicWatch {
    socket: Socket,
}

impl NicWatch {
    /// Starts to listen.
    ///
    /// # Errors
    /// If the kernel refuses a netlink socket.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket })
    }

    /// Changes since the last call: index in `nics`, and whether that NIC can carry traffic.
    pub fn changes(&mut self, nics: &[Nic]) -> Vec<(usize, bool)> {
        let mut changes = Vec::new();
        let mut buffer = Vec::with_capacity(16 << 10);
        loop {
            buffer.clear();
            match self.socket.recv(&mut buffer, 0) {
                Ok(_) => read_messages(&buffer, nics, &mut changes),
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(_) => return changes,
            }
        }
    }
}

impl AsFd for NicWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.socket.as_raw_fd()) }
    }
}

fn read_messages(mut bytes: &[u8], nics: &[Nic], changes: &mut Vec<(usize, bool)>) {
    while let Ok(head) = NetlinkBuffer::new_checked(bytes) {
        let len = head.length() as usize;
        if len == 0 || len > bytes.len() {
            return;
        }
        if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes[..len])
            && let NetlinkPayload::InnerMessage(inner) = message.payload
        {
            changes.extend(change(&inner, nics));
        }
        bytes = &bytes[len.next_multiple_of(4).min(bytes.len())..];
    }
}

fn change(message: &RouteNetlinkMessage, nics: &[Nic]) -> Option<(usize, bool)> {
    match message {
        RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link) => {
            let name = link.attributes.iter().find_map(|a| match a {
                LinkAttribute::IfName(name) => Some(name),
                _ => None,
            })?;
            let index = nics.iter().position(|nic| nic.name == *name)?;
            let gone = matches!(message, RouteNetlinkMessage::DelLink(_));
            let up = link.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp);
            Some((index, up && !gone))
        }
        RouteNetlinkMessage::NewAddress(a) | RouteNetlinkMessage::DelAddress(a) => {
            let addr = a.attributes.iter().find_map(|x| match x {
                AddressAttribute::Local(addr) => Some(*addr),
                _ => None,
            })?;
            let index = nics.iter().position(|nic| std::net::IpAddr::V4(nic.addr) == addr)?;
            Some((index, matches!(message, RouteNetlinkMessage::NewAddress(_))))
        }
        _ => None,
    }
}
