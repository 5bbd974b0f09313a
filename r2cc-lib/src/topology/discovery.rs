//! Which NICs this host has, asked of the kernel in the caller's network namespace.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use super::Nic;

/// The wanted NICs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The kernel did not answer.
    #[error("cannot list the network interfaces: {0}")]
    List(#[source] nix::Error),
    /// A NIC that was asked for does not exist or has no IPv4 address.
    #[error(
        "NIC {name:?} has no IPv4 address on this node; it has {present:?}; hint: check the NICs given to the builder"
    )]
    Missing {
        /// The name asked for.
        name: String,
        /// NICs with an address.
        present: Vec<String>,
    },
}

/// The NICs named in `wanted`, in that order; all that are up and not loopback if `wanted` is empty
/// (none is no error: ranks of one node need no NIC).
///
/// # Errors
/// If a wanted NIC has no address.
pub fn local_nics(wanted: &[String]) -> Result<Vec<Nic>, TopologyError> {
    let mut present: Vec<Nic> = Vec::new();
    for entry in getifaddrs().map_err(TopologyError::List)? {
        let usable =
            entry.flags.contains(InterfaceFlags::IFF_UP) && !entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        let addr = entry.address.and_then(|a| a.as_sockaddr_in().map(nix::sys::socket::SockaddrIn::ip));
        let mask = entry.netmask.and_then(|a| a.as_sockaddr_in().map(nix::sys::socket::SockaddrIn::ip));
        let (Some(addr), Some(mask)) = (addr, mask) else { continue };
        if usable && !present.iter().any(|nic| nic.name == entry.interface_name) {
            let prefix = u32::from(mask).leading_ones() as u8;
            present.push(Nic { name: entry.interface_name, addr, prefix });
        }
    }
    let nics: Vec<Nic> = if wanted.is_empty() {
        present
    } else {
        let find = |name: &String| {
            present.iter().find(|nic| nic.name == *name).cloned().ok_or_else(|| TopologyError::Missing {
                name: name.clone(),
                present: present.iter().map(|nic| nic.name.clone()).collect(),
            })
        };
        wanted.iter().map(find).collect::<Result<_, _>>()?
    };
    Ok(nics)
}
