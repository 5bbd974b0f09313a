//! The emulated cluster: building it, naming its places, reading its counters.
//!
//! A node is a network and a UTS namespace. Its NICs are veth pairs whose other ends are ports of
//! bridges in a switch namespace; both ends of a NIC with a rate are shaped on their way out.
//! Interface indices are chosen here, so nothing is ever looked up. Start at
//! [`EmulatedCluster::build`].

use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use nix::sched::{CloneFlags, setns};
use nix::sys::{prctl, signal::Signal};
use r2cc_inject::change::Place;
use r2cc_inject::netns::Netns;

use super::netlink::Route;
use super::netns::Namespaces;
use super::state::StateFile;
use super::wiring::{self, End, Verdict};
use super::{ClusterError, ClusterSpec, Fabric, MGMT_NIC, rail_name, spec};

const LOOPBACK_INDEX: u32 = 1;
/// First index of a node's NICs: `mgmt0`, then the NICs in order.
const NIC_INDEX_BASE: u32 = 2;
const BRIDGE_INDEX_BASE: u32 = 10;
const MGMT_BRIDGE_INDEX: u32 = 2;
/// First index of switch ports; each node has a block of its own.
const PORT_INDEX_BASE: u32 = 1000;
const PORTS_PER_NODE: u32 = 100;
/// First routing table of the NICs on an any-to-any fabric.
const TABLE_BASE: u32 = 100;
/// Policy rules: a NIC's own table, its own rail through the main table, then refusal.
const RULE_BASE: u32 = 1000;

static NEXT_CLUSTER: AtomicU32 = AtomicU32::new(1);

/// A running emulated cluster; it goes away with this value, or with this process.
pub struct EmulatedCluster {
    id: String,
    fabric: Fabric,
    nodes: Vec<Node>,
    switch: Namespaces,
    node_routes: Vec<Mutex<Route>>,
    _state: StateFile,
}

/// One node.
#[derive(Debug)]
pub struct Node {
    /// Name and hostname.
    pub name: String,
    /// Its network namespace.
    pub netns: OwnedFd,
    /// Its UTS namespace.
    pub utsns: OwnedFd,
    /// Its NICs, in the order of the specification.
    pub nics: Vec<Nic>,
    /// Its management interface, unshaped and on a bridge of its own.
    pub mgmt: Nic,
}

/// One NIC of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Interface name inside the node.
    pub name: String,
    /// Interface index inside the node.
    pub index: u32,
    /// Index of its rail from 0; `None` for `mgmt0`.
    pub rail: Option<usize>,
    /// Its address.
    pub addr: Ipv4Addr,
    /// Prefix length of its rail's subnet.
    pub prefix: u8,
    /// Name of the switch-side end, in the switch's namespace.
    pub switch_port: String,
    /// Interface index of the switch-side end, in the switch's namespace.
    pub switch_port_index: u32,
    bridge_index: u32,
    mac: [u8; 6],
}

/// Counters of one NIC, as its node sees them.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NicCounters {
    /// Node name.
    pub node: String,
    /// NIC name.
    pub nic: String,
    /// Bytes received, also those that an XDP program then dropped.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets received; with offloads one may stand for forty on a wire.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Packets dropped on reception.
    pub rx_dropped: u64,
    /// Packets dropped on the way out.
    pub tx_dropped: u64,
}

/// Which end of a NIC's cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The NIC itself: set down, it loses its routes.
    Node,
    /// The switch port: set down, the NIC stays up and sees its carrier go.
    Switch,
}

impl EmulatedCluster {
    /// Builds the cluster. On failure nothing is left.
    pub fn build(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        spec.validate()?;
        let switch = Namespaces::create("switch")?;
        let mut switch_route = Route::open(switch.net.as_fd(), "switch")?;
        lay_bridges(&mut switch_route, spec)?;
        let mut nodes = Vec::with_capacity(spec.nodes.len());
        let mut node_routes = Vec::with_capacity(spec.nodes.len());
        for position in 0..spec.nodes.len() {
            let (node, route) = add_node(&mut switch_route, spec, position)?;
            nodes.push(node);
            node_routes.push(Mutex::new(route));
        }
        let id = format!("{}-{}", std::process::id(), NEXT_CLUSTER.fetch_add(1, Ordering::Relaxed));
        let state = StateFile::write(&id, &nodes, switch.net.as_fd())?;
        Ok(Self { id, fabric: spec.fabric, nodes, switch, node_routes, _state: state })
    }

    /// Name of this cluster among those of the machine.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// How its rails reach each other.
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Its nodes, in the order of the specification.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of that name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// The network namespace of the switch.
    pub fn switch_netns(&self) -> BorrowedFd<'_> {
        self.switch.net.as_fd()
    }

    /// A command that runs inside a node, in a process group of its own, and is killed when the
    /// **thread that spawns it** ends: spawn from a thread that outlives it.
    pub fn command(&self, node: &str, program: &Path) -> Result<Command, ClusterError> {
        let node = &self.nodes[self.position(node)?];
        let duplicate = |fd: &OwnedFd| {
            fd.try_clone().map_err(|error| ClusterError::from_os("duplicate a namespace descriptor", &node.name, error))
        };
        let (net, uts) = (duplicate(&node.netns)?, duplicate(&node.utsns)?);
        let parent = nix::unistd::getpid();
        let mut command = Command::new(program);
        command.process_group(0);
        // SAFETY: between fork and exec the closure makes system calls only: no allocation, no
        // lock, no shared state. The descriptors live as long as the command that owns it.
        unsafe {
            command.pre_exec(move || {
                prctl::set_pdeathsig(Signal::SIGKILL)?;
                // A parent that died before the line above sends no signal any more.
                if nix::unistd::getppid() != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                setns(&net, CloneFlags::CLONE_NEWNET)?;
                setns(&uts, CloneFlags::CLONE_NEWUTS)?;
                Ok(())
            });
        }
        Ok(command)
    }

    /// Counters of every NIC of every node, `mgmt0` last of each.
    pub fn counters(&self) -> Result<Vec<NicCounters>, ClusterError> {
        let mut all = Vec::new();
        for (node, route) in self.nodes.iter().zip(&self.node_routes) {
            let links = lock(route).link_counters()?;
            for nic in node.nics.iter().chain([&node.mgmt]) {
                let Some(link) = links.iter().find(|link| link.index == nic.index) else {
                    return Err(self.unknown(&node.name, Some(&nic.name)));
                };
                all.push(NicCounters {
                    node: node.name.clone(),
                    nic: nic.name.clone(),
                    rx_bytes: link.rx_bytes,
                    tx_bytes: link.tx_bytes,
                    rx_packets: link.rx_packets,
                    tx_packets: link.tx_packets,
                    rx_dropped: link.rx_dropped,
                    tx_dropped: link.tx_dropped,
                });
            }
        }
        Ok(all)
    }

    /// One end of a NIC's cable, as faults name it to whoever carries them out.
    pub fn place(&self, node: &str, nic: &str, side: Side) -> Result<Place, ClusterError> {
        let (position, found) = self.locate(node, nic)?;
        let (netns, ifname) = match side {
            Side::Node => (self.nodes[position].netns.as_fd(), &found.name),
            Side::Switch => (self.switch.net.as_fd(), &found.switch_port),
        };
        let path = format!("/proc/{}/fd/{}", std::process::id(), netns.as_raw_fd());
        let netns = Netns::at(path)
            .map_err(|error| ClusterError::from_os(format!("name the namespace of {ifname}"), node, error))?;
        Ok(Place { netns, ifname: ifname.clone() })
    }

    fn position(&self, node: &str) -> Result<usize, ClusterError> {
        self.nodes.iter().position(|known| known.name == node).ok_or_else(|| self.unknown(node, None))
    }

    fn locate(&self, node: &str, nic: &str) -> Result<(usize, &Nic), ClusterError> {
        let position = self.position(node)?;
        self.nodes[position].nic(nic).map(|nic| (position, nic)).ok_or_else(|| self.unknown(node, Some(nic)))
    }

    fn unknown(&self, node: &str, nic: Option<&str>) -> ClusterError {
        let known = match self.node(node) {
            Some(node) => join(node.nics.iter().chain([&node.mgmt]).map(|nic| &nic.name)),
            None => join(self.nodes.iter().map(|node| &node.name)),
        };
        ClusterError::Unknown { cluster: self.id.clone(), node: node.to_owned(), nic: nic.map(str::to_owned), known }
    }
}

impl Node {
    /// Its NIC of that name, `mgmt0` included.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().chain([&self.mgmt]).find(|nic| nic.name == name)
    }
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for EmulatedCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatedCluster")
            .field("id", &self.id)
            .field("fabric", &self.fabric)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

fn lay_bridges(switch: &mut Route, spec: &ClusterSpec) -> Result<(), ClusterError> {
    let mut bridges = vec![("mgmt".to_owned(), MGMT_BRIDGE_INDEX)];
    match spec.fabric {
        Fabric::Any => bridges.push(("fabric".to_owned(), BRIDGE_INDEX_BASE)),
        Fabric::Rails => {
            let rails = spec.nodes.iter().flat_map(|node| &node.nics);
            let rails = rails.map(|nic| nic.rail + 1).max().unwrap_or(0);
            bridges.extend((0..rails).map(|rail| (rail_name(rail), rail_bridge(spec.fabric, rail))));
        }
    }
    for (name, index) in bridges {
        switch.apply(&format!("create bridge {name}"), wiring::bridge(&name, index), NLM_F_CREATE | NLM_F_EXCL)?;
    }
    Ok(())
}

fn add_node(switch: &mut Route, spec: &ClusterSpec, position: usize) -> Result<(Node, Route), ClusterError> {
    let asked = &spec.nodes[position];
    let namespaces = Namespaces::create(&asked.name)?;
    let mut route = Route::open(namespaces.net.as_fd(), &asked.name)?;
    route.apply("set lo up", wiring::link_state(LOOPBACK_INDEX, true), 0)?;
    let slot = |place: usize| u32::try_from(place).unwrap_or(PORTS_PER_NODE);
    let nic = |name: &str, place: usize, rail: Option<usize>| Nic {
        name: name.to_owned(),
        index: NIC_INDEX_BASE + slot(place),
        rail,
        addr: rail.map_or_else(|| spec::mgmt_address(position), |rail| spec::rail_address(rail, position)),
        prefix: spec::RAIL_PREFIX,
        switch_port: port_name(position, place, name),
        switch_port_index: PORT_INDEX_BASE + slot(position) * PORTS_PER_NODE + slot(place),
        bridge_index: rail.map_or(MGMT_BRIDGE_INDEX, |rail| rail_bridge(spec.fabric, rail)),
        mac: spec::mac_address(rail, position, 0),
    };
    let node = Node {
        name: asked.name.clone(),
        mgmt: nic(MGMT_NIC, 0, None),
        nics: asked
            .nics
            .iter()
            .enumerate()
            .map(|(place, asked)| nic(&asked.name, place + 1, Some(asked.rail)))
            .collect(),
        netns: namespaces.net,
        utsns: namespaces.uts,
    };
    let rates = asked.nics.iter().map(|nic| nic.rate_bits_s);
    for (nic, rate) in [&node.mgmt].into_iter().chain(&node.nics).zip([None].into_iter().chain(rates)) {
        plug(switch, &mut route, &node, nic, position)?;
        if let Some(rate) = rate {
            shape(&mut route, nic.index, rate)?;
            shape(switch, nic.switch_port_index, rate)?;
        }
        if nic.rail.is_some() {
            bind_source(&mut route, nic, spec.fabric)?;
        }
    }
    Ok((node, route))
}

/// Makes the cable and gives the NIC its address.
fn plug(switch: &mut Route, route: &mut Route, node: &Node, nic: &Nic, position: usize) -> Result<(), ClusterError> {
    let port = End {
        name: nic.switch_port.clone(),
        index: nic.switch_port_index,
        mac: spec::mac_address(nic.rail, position, 1),
    };
    let end = End { name: nic.name.clone(), index: nic.index, mac: nic.mac };
    switch.apply(
        &format!("create {}/{nic}", node.name),
        wiring::veth(&port, nic.bridge_index, &end, node.netns.as_raw_fd()),
        NLM_F_CREATE | NLM_F_EXCL,
    )?;
    switch.apply(
        &format!("stop flooding to port {}", nic.switch_port),
        wiring::port_without_flood(nic.switch_port_index),
        0,
    )?;
    switch.apply(
        &format!("enter the station behind port {}", nic.switch_port),
        wiring::port_station(nic.switch_port_index, nic.mac),
        NLM_F_CREATE | NLM_F_REPLACE,
    )?;
    route.apply(&format!("set {nic} up"), wiring::link_state(nic.index, true), 0)?;
    route.apply(
        &format!("give {nic} the address {}/{}", nic.addr, nic.prefix),
        wiring::address(nic.index, nic.addr, nic.prefix),
        NLM_F_CREATE | NLM_F_EXCL,
    )
}

/// A socket bound to a NIC's address leaves by that NIC or not at all.
fn bind_source(route: &mut Route, nic: &Nic, fabric: Fabric) -> Result<(), ClusterError> {
    let mut verdicts = Vec::new();
    if fabric == Fabric::Any {
        route_own_table(route, nic)?;
        verdicts.push(Verdict::Table(own_table(nic)));
    }
    verdicts.push(Verdict::MainFor(nic.rail.map_or(nic.addr, spec::rail_network)));
    verdicts.push(Verdict::Unreachable);
    for (step, verdict) in verdicts.into_iter().enumerate() {
        let priority = RULE_BASE + nic.index * 10 + u32::try_from(step).unwrap_or(9);
        route.apply(
            &format!("add a policy rule for {nic}"),
            wiring::rule(nic.addr, priority, verdict),
            NLM_F_CREATE | NLM_F_EXCL,
        )?;
    }
    Ok(())
}

fn route_own_table(route: &mut Route, nic: &Nic) -> Result<(), ClusterError> {
    route.apply(
        &format!("route the fabric through {nic}"),
        wiring::on_link_route(own_table(nic), spec::FABRIC_NETWORK, nic.index, nic.addr),
        NLM_F_CREATE | NLM_F_REPLACE,
    )
}

fn own_table(nic: &Nic) -> u8 {
    // At most 64 NICs a node, so this stays below 253 (the kernel's own tables).
    u8::try_from(TABLE_BASE + nic.index).unwrap_or(u8::MAX - 3)
}

fn shape(route: &mut Route, index: u32, bits_s: u64) -> Result<(), ClusterError> {
    route.apply(
        &format!("shape interface {index} to {bits_s} bit/s"),
        wiring::shaping(index, bits_s),
        NLM_F_CREATE | NLM_F_REPLACE,
    )
}

fn rail_bridge(fabric: Fabric, rail: usize) -> u32 {
    match fabric {
        Fabric::Any => BRIDGE_INDEX_BASE,
        // At most 64 rails.
        Fabric::Rails => BRIDGE_INDEX_BASE + u32::try_from(rail).unwrap_or(u32::MAX / 2),
    }
}

/// `n1-mlx5_2`, or a number where the NIC's name is too long for that.
fn port_name(position: usize, place: usize, nic: &str) -> String {
    let name = format!("n{}-{nic}", position + 1);
    if name.len() <= spec::INTERFACE_NAME_MAX { name } else { format!("n{}.nic{place}", position + 1) }
}

fn join<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// A poisoned socket is still a socket: requests are matched by sequence number.
fn lock(route: &Mutex<Route>) -> MutexGuard<'_, Route> {
    route.lock().unwrap_or_else(PoisonError::into_inner)
}
