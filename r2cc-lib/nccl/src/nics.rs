//! Which NICs carry the data, what NCCL is told of them, and which pairs of them become paths.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::ffi::OsStrExt;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use r2cc::topology::{Nic, PairOfNics};

/// Speed of a NIC that states none, Mbit/s.
const SPEED_UNKNOWN: u64 = 10_000;

/// An interface with an IPv4 address.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) nic: Nic,
    pub(crate) loopback: bool,
}

/// No NIC can be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NicError {
    #[error("cannot list the network interfaces: {0}")]
    List(#[from] nix::Error),
    #[error("R2CC_IFNAME={asked} matches no NIC that is up with an IPv4 address; this host has {present}")]
    NoMatch { asked: String, present: String },
    #[error("no NIC is up with an IPv4 address")]
    None,
}

/// What the user said about NICs, as the environment has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) r2cc_ifname: Option<String>,
    pub(crate) nccl_socket_ifname: Option<String>,
    pub(crate) nccl_comm_id: Option<String>,
}

impl Wishes {
    pub(crate) fn from_environment() -> Self {
        let read = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            r2cc_ifname: read("R2CC_IFNAME"),
            nccl_socket_ifname: read("NCCL_SOCKET_IFNAME"),
            nccl_comm_id: read("NCCL_COMM_ID"),
        }
    }
}

/// Interfaces that are up with an IPv4 address, the first address of each.
pub(crate) fn candidates() -> Result<Vec<Candidate>, NicError> {
    let mut found: Vec<Candidate> = Vec::new();
    for entry in getifaddrs()? {
        let ip = |a: Option<nix::sys::socket::SockaddrStorage>| a.and_then(|a| a.as_sockaddr_in().map(|a| a.ip()));
        let (Some(addr), Some(mask)) = (ip(entry.address), ip(entry.netmask)) else { continue };
        let up = entry.flags.contains(InterfaceFlags::IFF_UP);
        if up && !found.iter().any(|known| known.nic.name == entry.interface_name) {
            let loopback = entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
            let prefix = u32::from(mask).leading_ones() as u8;
            found.push(Candidate { nic: Nic { name: entry.interface_name, addr, prefix }, loopback });
        }
    }
    Ok(found)
}

/// NCCL's grammar: a list of prefixes, `^` in front excludes them, `=` asks for whole names.
fn matches(list: &str, name: &str) -> bool {
    let (exclude, list) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
    let (exact, list) = list.strip_prefix('=').map_or((false, list), |rest| (true, rest));
    let fits = |entry: &str| {
        let wanted = entry.split(':').next().unwrap_or(entry);
        !wanted.is_empty() && if exact { name == wanted } else { name.starts_with(wanted) }
    };
    list.split(',').any(fits) != exclude
}

/// The NICs that carry data: those that `R2CC_IFNAME` asks for, else all but the one of the bootstrap.
pub(crate) fn choose(present: &[Candidate], wishes: &Wishes) -> Result<Vec<Nic>, NicError> {
    let named = |list: &str| -> Vec<Nic> {
        // Only a list that names the loopback device itself means it.
        let meant = |c: &&Candidate| matches(list, &c.nic.name) && (!c.loopback || !list.starts_with('^'));
        present.iter().filter(meant).map(|c| c.nic.clone()).collect()
    };
    if let Some(asked) = &wishes.r2cc_ifname {
        let nics = named(asked);
        let names: Vec<&str> = present.iter().map(|c| c.nic.name.as_str()).collect();
        let no_match = || NicError::NoMatch { asked: asked.clone(), present: names.join(", ") };
        return if nics.is_empty() { Err(no_match()) } else { Ok(nics) };
    }
    let bootstrap = wishes.nccl_socket_ifname.as_deref().map(named).unwrap_or_default();
    if bootstrap.len() > 1 {
        return Ok(bootstrap);
    }
    let root: Option<Ipv4Addr> =
        wishes.nccl_comm_id.as_deref().and_then(|id| id.rsplit_once(':')).and_then(|(ip, _)| ip.parse().ok());
    let is_bootstrap =
        |nic: &Nic| bootstrap.contains(nic) || root.is_some_and(|root| nic.prefix > 0 && same_subnet(nic, root));
    let ordinary =
        |c: &&Candidate| !c.loopback && !["docker", "virbr"].iter().any(|prefix| c.nic.name.starts_with(prefix));
    let usable: Vec<Nic> = present.iter().filter(ordinary).map(|c| c.nic.clone()).collect();
    let others: Vec<Nic> = usable.iter().filter(|nic| !is_bootstrap(nic)).cloned().collect();
    let all = || present.iter().map(|c| c.nic.clone()).collect::<Vec<_>>();
    [others, usable, bootstrap.clone(), all()].into_iter().find(|nics| !nics.is_empty()).ok_or(NicError::None)
}

fn same_subnet(nic: &Nic, addr: Ipv4Addr) -> bool {
    Nic { addr, ..nic.clone() }.subnet() == nic.subnet()
}

/// Speed of all NICs together, as they state it.
pub(crate) fn speed_mbit_s(nics: &[Nic]) -> u64 {
    let stated = |nic: &Nic| {
        let text = fs::read_to_string(format!("/sys/class/net/{}/speed", nic.name)).unwrap_or_default();
        text.trim().parse::<u64>().ok().filter(|speed| *speed > 0).unwrap_or(SPEED_UNKNOWN)
    };
    nics.iter().map(stated).sum()
}

/// Path under /sys of the first NIC that is a PCI device.
pub(crate) fn pci_path(nics: &[Nic]) -> Option<std::ffi::CString> {
    let of = |nic: &Nic| fs::canonicalize(format!("/sys/class/net/{}/device", nic.name)).ok();
    let pci = |path: &std::path::PathBuf| path.join("class").exists() && path.starts_with("/sys/devices");
    nics.iter().filter_map(of).find(pci).and_then(|path| std::ffi::CString::new(path.as_os_str().as_bytes()).ok())
}

/// A number of its own for this host's set of NICs (FNV-1a of the host name and the addresses).
pub(crate) fn guid(host: &str, nics: &[Nic]) -> u64 {
    let octets = nics.iter().flat_map(|nic| nic.addr.octets());
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    host.bytes().chain(octets).fold(0xcbf2_9ce4_8422_2325, step)
}

/// The paths from our NICs to a peer's addresses. NICs of one subnet reach each other: each takes a partner, and a
/// second one where there are several, so that no two failures on different NICs cut the link. Only if no two share
/// a subnet are they taken for routed, and paired in their order.
pub(crate) fn pair_up(local: &[Nic], remote: &[SocketAddrV4]) -> Vec<PairOfNics> {
    let mut pairs = Vec::new();
    let mut seen: Vec<Ipv4Addr> = Vec::new();
    for nic in local {
        if seen.contains(&nic.subnet()) {
            continue;
        }
        seen.push(nic.subnet());
        let here: Vec<usize> = (0..local.len()).filter(|i| local[*i].subnet() == nic.subnet()).collect();
        let there: Vec<usize> = (0..remote.len()).filter(|j| same_subnet(nic, *remote[*j].ip())).collect();
        cross(&here, &there, local, remote, &mut pairs);
    }
    if pairs.is_empty() {
        let (here, there): (Vec<usize>, Vec<usize>) = ((0..local.len()).collect(), (0..remote.len()).collect());
        cross(&here, &there, local, remote, &mut pairs);
    }
    pairs
}

fn cross(here: &[usize], there: &[usize], local: &[Nic], remote: &[SocketAddrV4], pairs: &mut Vec<PairOfNics>) {
    if here.is_empty() || there.is_empty() {
        return;
    }
    for shift in 0..2 {
        for step in 0..here.len().max(there.len()) {
            let (i, j) = (here[step % here.len()], there[(step + shift) % there.len()]);
            let pair = PairOfNics { from_nic: Some(i), to_nic: Some(j), from: local[i].addr, to: remote[j] };
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

    use super::*;

    fn nic(name: &str, addr: [u8; 4]) -> Nic {
        Nic { name: name.into(), addr: addr.into(), prefix: 24 }
    }

    fn host() -> Vec<Candidate> {
        let nics = [
            nic("lo", [127, 0, 0, 1]),
            nic("mgmt0", [10, 78, 0, 1]),
            nic("mlx5_0", [10, 77, 1, 1]),
            nic("mlx5_2", [10, 77, 2, 1]),
            nic("mlx5_20", [10, 77, 3, 1]),
            nic("docker0", [172, 17, 0, 1]),
        ];
        nics.into_iter().map(|nic| Candidate { loopback: nic.name == "lo", nic }).collect()
    }

    fn chosen(wishes: &Wishes) -> Vec<String> {
        choose(&host(), wishes).unwrap().into_iter().map(|nic| nic.name).collect()
    }

    fn r2cc(list: &str) -> Wishes {
        Wishes { r2cc_ifname: Some(list.into()), ..Wishes::default() }
    }

    #[test]
    fn the_list_of_nics_follows_nccls_grammar() {
        assert_eq!(chosen(&r2cc("mlx5_2")), ["mlx5_2", "mlx5_20"], "a prefix");
        assert_eq!(chosen(&r2cc("=mlx5_2")), ["mlx5_2"], "a whole name");
        assert_eq!(chosen(&r2cc("=mlx5_2,mlx5_0:7")), ["mlx5_0", "mlx5_2"], "in the host's order");
        assert_eq!(chosen(&r2cc("^mlx5_2,docker")), ["mgmt0", "mlx5_0"], "an exclusion");
        assert_eq!(chosen(&r2cc("^=mlx5_2,mgmt0,docker0")), ["mlx5_0", "mlx5_20"]);
        assert_eq!(chosen(&r2cc("lo")), ["lo"], "the loopback device only by name");
    }

    #[test]
    fn an_unknown_name_tells_what_there_is() {
        let error = choose(&host(), &r2cc("ib")).unwrap_err().to_string();
        assert!(error.contains("R2CC_IFNAME=ib") && error.contains("mlx5_0, mlx5_2"), "{error}");
    }

    #[test]
    fn the_bootstraps_nic_is_left_alone_while_there_are_others() {
        let data = ["mlx5_0", "mlx5_2", "mlx5_20"];
        let all = ["mgmt0", "mlx5_0", "mlx5_2", "mlx5_20"];
        let socket = |list: &str| Wishes { nccl_socket_ifname: Some(list.into()), ..Wishes::default() };
        assert_eq!(chosen(&Wishes::default()), all);
        assert_eq!(chosen(&socket("=mgmt0")), data);
        assert_eq!(chosen(&socket("mlx5_")), data, "several: the user means them");
        let id = Wishes { nccl_comm_id: Some("10.78.0.9:5000".into()), ..Wishes::default() };
        assert_eq!(chosen(&id), data);
        let only = [Candidate { nic: nic("mgmt0", [10, 78, 0, 1]), loopback: false }];
        assert_eq!(choose(&only, &socket("=mgmt0")).unwrap()[0].name, "mgmt0");
        let alone = [Candidate { nic: nic("lo", [127, 0, 0, 1]), loopback: true }];
        assert_eq!(choose(&alone, &Wishes::default()).unwrap()[0].name, "lo");
        assert!(matches!(choose(&[], &Wishes::default()), Err(NicError::None)));
    }

    fn addr(ip: [u8; 4]) -> SocketAddrV4 {
        SocketAddrV4::new(ip.into(), 1)
    }

    fn indices(local: &[Nic], remote: &[SocketAddrV4]) -> Vec<(usize, usize)> {
        pair_up(local, remote).iter().map(|p| (p.from_nic.unwrap(), p.to_nic.unwrap())).collect()
    }

    #[test]
    fn rails_are_matched_by_subnet_whatever_their_order_number_and_names() {
        let local = [nic("a", [10, 0, 1, 1]), nic("b", [10, 0, 2, 1]), nic("c", [10, 0, 3, 1])];
        assert_eq!(indices(&local, &[addr([10, 0, 3, 2]), addr([10, 0, 1, 2])]), [(0, 1), (2, 0)]);
    }

    #[test]
    fn several_nics_of_one_subnet_have_two_partners_each() {
        let local = [nic("a", [10, 0, 1, 1]), nic("b", [10, 0, 1, 2])];
        let remote = [addr([10, 0, 1, 3]), addr([10, 0, 1, 4])];
        assert_eq!(indices(&local, &remote), [(0, 0), (1, 1), (0, 1), (1, 0)]);
        assert_eq!(indices(&local, &remote[..1]), [(0, 0), (1, 0)]);
    }

    #[test]
    fn without_a_common_subnet_nics_are_paired_in_order() {
        let local = [nic("a", [10, 0, 1, 1]), nic("b", [10, 0, 2, 1])];
        let remote = [addr([10, 1, 1, 3]), addr([10, 1, 2, 4])];
        assert_eq!(indices(&local, &remote), [(0, 0), (1, 1), (0, 1), (1, 0)]);
    }
}
