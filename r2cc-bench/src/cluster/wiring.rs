//! The messages that wire a cluster, as pure values.
//!
//! Owns the shape of each netlink request: veth pair, bridge, address, rules, shaping, switch
//! port. Sends nothing.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, InfoPortKind, InfoVeth, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage as Message};

const MTU_BYTES: u32 = 1500;
/// Largest packet a sender hands down; a tbf with a smaller burst cuts it into MTU pieces, which
/// costs more CPU than everything else together.
const GSO_BYTES_MAX: u64 = 64 * 1024;
const BURST_BYTES: u32 = 128 * 1024;
const QUEUE_MS_MAX: u64 = 10;

const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
const LINKLAYER_ETHERNET: u8 = 1;
/// The kernel's packet scheduler counts time in units of 64 ns.
const TICK_NS: u64 = 64;

/// One end of a veth pair.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) name: String,
    pub(super) index: u32,
    pub(super) mac: [u8; 6],
}

impl End {
    fn link(&self) -> LinkMessage {
        let mut link = LinkMessage::default();
        link.header.index = self.index;
        link.attributes = vec![
            LinkAttribute::IfName(self.name.clone()),
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(MTU_BYTES),
            // One queue each: a tbf at the root serialises anyway.
            LinkAttribute::NumTxQueues(1),
            LinkAttribute::NumRxQueues(1),
        ];
        link
    }
}

/// A veth pair: the port here, up and on `bridge`; the NIC in the node's namespace, still down
/// (the kernel refuses to bring an end up before it has its peer).
pub(super) fn veth(port: &End, bridge: u32, nic: &End, node_netns: RawFd) -> Message {
    let mut peer = nic.link();
    peer.attributes.push(LinkAttribute::NetNsFd(node_netns));
    let mut link = port.link();
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    link.attributes.push(LinkAttribute::Controller(bridge));
    link.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
    ]));
    Message::NewLink(link)
}

/// A bridge without spanning tree or multicast snooping: it says nothing of its own.
pub(super) fn bridge(name: &str, index: u32) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bridge),
            LinkInfo::Data(InfoData::Bridge(vec![InfoBridge::MulticastSnooping(false)])),
        ]),
    ];
    Message::NewLink(link)
}

/// Sets an interface up or down.
pub(super) fn link_state(index: u32, up: bool) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.change_mask = LinkFlags::Up;
    if up {
        link.header.flags = LinkFlags::Up;
    }
    Message::SetLink(link)
}

/// Stops a port from being sent frames for unknown stations.
///
/// A dead NIC's frames would otherwise be flooded to every other NIC of the rail, take its
/// bandwidth and move its counters. A port that another tool takes off its bridge and puts back has
/// the kernel's default again and still works.
pub(super) fn port_without_flood(port: u32) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = port;
    link.attributes = vec![LinkAttribute::LinkInfo(vec![
        LinkInfo::PortKind(InfoPortKind::Bridge),
        LinkInfo::PortData(InfoPortData::BridgePort(vec![InfoBridgePort::UnicastFlood(false)])),
    ])];
    Message::NewLink(link)
}

/// Tells a port's bridge which station is behind it, for as long as the port is on it.
pub(super) fn port_station(port: u32, station: [u8; 6]) -> Message {
    let mut neighbour = NeighbourMessage::default();
    neighbour.header.family = AddressFamily::Bridge;
    neighbour.header.ifindex = port;
    neighbour.header.state = NeighbourState::Noarp;
    neighbour.header.flags = NeighbourFlags::Controller;
    neighbour.attributes = vec![NeighbourAttribute::LinkLayerAddress(station.to_vec())];
    Message::NewNeighbour(neighbour)
}

/// Gives an interface an address, and its network a connected route.
pub(super) fn address(index: u32, address: Ipv4Addr, prefix: u8) -> Message {
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet;
    message.header.prefix_len = prefix;
    message.header.index = index;
    message.attributes =
        vec![AddressAttribute::Local(IpAddr::V4(address)), AddressAttribute::Address(IpAddr::V4(address))];
    Message::NewAddress(message)
}

/// What becomes of packets from a source address.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    /// Look in this routing table.
    Table(u8),
    /// Look in the main table, if the destination is in this /24.
    MainFor(Ipv4Addr),
    /// Refuse.
    Unreachable,
}

/// A policy rule for packets from `source`.
pub(super) fn rule(source: Ipv4Addr, priority: u32, verdict: Verdict) -> Message {
    let mut rule = RuleMessage::default();
    rule.header.family = AddressFamily::Inet;
    rule.header.src_len = 32;
    rule.attributes = vec![RuleAttribute::Source(IpAddr::V4(source)), RuleAttribute::Priority(priority)];
    match verdict {
        Verdict::Table(table) => {
            rule.header.action = RuleAction::ToTable;
            rule.header.table = table;
        }
        Verdict::MainFor(network) => {
            rule.header.action = RuleAction::ToTable;
            rule.header.table = RouteHeader::RT_TABLE_MAIN;
            rule.header.dst_len = super::spec::RAIL_PREFIX;
            rule.attributes.push(RuleAttribute::Destination(IpAddr::V4(network)));
        }
        Verdict::Unreachable => rule.header.action = RuleAction::Unreachable,
    }
    Message::NewRule(rule)
}

/// Reaches `network` straight through one interface, in a table of its own.
pub(super) fn on_link_route(table: u8, network: (Ipv4Addr, u8), index: u32, source: Ipv4Addr) -> Message {
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet;
    route.header.destination_prefix_length = network.1;
    route.header.table = table;
    route.header.protocol = RouteProtocol::Static;
    route.header.scope = RouteScope::Link;
    route.header.kind = RouteType::Unicast;
    route.attributes = vec![
        RouteAttribute::Destination(RouteAddress::Inet(network.0)),
        RouteAttribute::Oif(index),
        RouteAttribute::PrefSource(RouteAddress::Inet(source)),
    ];
    Message::NewRoute(route)
}

/// Shapes what leaves an interface.
pub(super) fn shaping(index: u32, bits_s: u64) -> Message {
    let mut message = root_qdisc(index);
    message.header.handle = TcHandle { major: 1, minor: 0 };
    let bytes_s = bits_s / 8;
    let rate_32 = u32::try_from(bytes_s).unwrap_or(u32::MAX);
    let mut options = vec![
        TcOption::Other(DefaultNla::new(TCA_TBF_PARMS, tbf_parameters(rate_32, queue_bytes(bits_s), bytes_s))),
        TcOption::Other(DefaultNla::new(TCA_TBF_BURST, BURST_BYTES.to_ne_bytes().to_vec())),
    ];
    if rate_32 == u32::MAX {
        options.push(TcOption::Other(DefaultNla::new(TCA_TBF_RATE64, bytes_s.to_ne_bytes().to_vec())));
    }
    message.attributes = vec![TcAttribute::Kind("tbf".to_owned()), TcAttribute::Options(options)];
    Message::NewQueueDiscipline(message)
}

fn root_qdisc(index: u32) -> TcMessage {
    let mut message = TcMessage::default();
    // Interface indices are ours and small.
    message.header.index = i32::try_from(index).unwrap_or(i32::MAX);
    message.header.parent = TcHandle::ROOT;
    message
}

/// At most 10 ms of the rate, and never less than two of the largest packets, which a shorter
/// queue would refuse whole.
fn queue_bytes(bits_s: u64) -> u32 {
    let queue = (bits_s / 8 * QUEUE_MS_MAX / 1000).max(2 * GSO_BYTES_MAX);
    u32::try_from(queue).unwrap_or(u32::MAX)
}

/// `struct tc_tbf_qopt`: two `tc_ratespec` of 12 bytes, then limit, buffer and mtu.
fn tbf_parameters(rate_32: u32, limit_bytes: u32, bytes_s: u64) -> Vec<u8> {
    let burst_ticks = u64::from(BURST_BYTES) * 1_000_000_000 / bytes_s.max(1) / TICK_NS;
    let mut parameters = vec![0; 36];
    parameters[1] = LINKLAYER_ETHERNET;
    parameters[8..12].copy_from_slice(&rate_32.to_ne_bytes());
    parameters[24..28].copy_from_slice(&limit_bytes.to_ne_bytes());
    parameters[28..32].copy_from_slice(&u32::try_from(burst_ticks).unwrap_or(u32::MAX).to_ne_bytes());
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_ten_milliseconds_of_the_rate_where_two_packets_fit() {
        assert_eq!(queue_bytes(200_000_000), 250_000);
        assert_eq!(queue_bytes(1_000_000_000), 1_250_000);
        assert_eq!(queue_bytes(20_000_000), 131_072);
    }

    #[test]
    fn shaping_carries_the_rate_where_the_kernel_reads_it() {
        let parameters = tbf_parameters(25_000_000, 250_000, 25_000_000);
        assert_eq!(parameters.len(), 36);
        assert_eq!(parameters[1], 1);
        assert_eq!(parameters[8..12], 25_000_000_u32.to_ne_bytes());
        assert_eq!(parameters[24..28], 250_000_u32.to_ne_bytes());
        // 131072 B at 25 MB/s last 5242880 ns: 81920 ticks.
        assert_eq!(parameters[28..32], 81_920_u32.to_ne_bytes());
    }
}
