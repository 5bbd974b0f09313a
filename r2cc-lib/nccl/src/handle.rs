//! The 128 bytes that travel from the receiving to the sending end over NCCL's bootstrap: how to reach the
//! receiver, and the secret that proves the connections.

use std::net::{Ipv4Addr, SocketAddrV4};

use r2cc::transport::handshake::{Key, LinkName, PROTOCOL_VERSION};

use crate::abi::HANDLE_BYTES;

const MAGIC: [u8; 4] = *b"R2NP";
/// Version of the handle's layout.
const HANDLE_VERSION: u8 = 2;
const SECRET_BYTES: usize = 16;
const HEAD_BYTES: usize = 16 + SECRET_BYTES;
/// Stripes that a communicator may have.
pub(crate) const STRIPES_MAX: usize = 2;
const PLACE_BYTES: usize = 4 + 2 * STRIPES_MAX;
/// NICs that fit.
pub(crate) const NICS_MAX: usize = (HANDLE_BYTES - HEAD_BYTES) / PLACE_BYTES;

/// A secret drawn for one communicator.
pub(crate) type Secret = [u8; SECRET_BYTES];

/// What a handle says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    name: LinkName,
    pub(crate) secret: Secret,
    /// Where the NICs listen, for each stripe.
    stripes: Vec<Vec<SocketAddrV4>>,
}

/// A handle that this plugin did not make, or not this release of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandleError {
    #[error("the peer's handle is not of this plugin; hint: every rank needs NCCL_NET_PLUGIN=r2cc")]
    Foreign,
    #[error("the peer's plugin speaks version {theirs}, this one {ours}; hint: use the same release on every node")]
    Version { theirs: u16, ours: u16 },
    #[error("the peer's handle names no NIC")]
    Empty,
}

impl Handle {
    /// A handle with a fresh name and secret, for at most [`STRIPES_MAX`] stripes that listen on the same NICs.
    ///
    /// # Errors
    /// If the system has no randomness to give.
    pub(crate) fn draw(stripes: Vec<Vec<SocketAddrV4>>) -> Result<Self, getrandom::Error> {
        let (mut name, mut secret) = ([0; 8], [0; SECRET_BYTES]);
        getrandom::fill(&mut name)?;
        getrandom::fill(&mut secret)?;
        let name = u64::from_le_bytes(name);
        Ok(Self { name: LinkName { from: (name >> 32) as u32, to: name as u32 }, secret, stripes })
    }

    /// Where each stripe's listeners are, and what its link is called.
    pub(crate) fn stripes(&self) -> impl Iterator<Item = (LinkName, &[SocketAddrV4])> {
        let LinkName { from, to } = self.name;
        let named = self.stripes.iter().enumerate();
        named.map(move |(i, addrs)| (LinkName { from, to: to.wrapping_add(i as u32) }, addrs.as_slice()))
    }

    /// Key of the link's connections.
    pub(crate) fn key(&self) -> Key {
        Key::derive(&self.secret, "r2cc nccl link", &[])
    }

    /// The bytes; at most [`NICS_MAX`] NICs are kept.
    pub(crate) fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut out = [0; HANDLE_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        out[6] = HANDLE_VERSION;
        let nics = self.stripes.first().map_or(0, Vec::len).min(NICS_MAX);
        out[7] = (self.stripes.len() << 4 | nics) as u8;
        out[8..12].copy_from_slice(&self.name.from.to_le_bytes());
        out[12..16].copy_from_slice(&self.name.to.to_le_bytes());
        out[16..HEAD_BYTES].copy_from_slice(&self.secret);
        for (nic, place) in out[HEAD_BYTES..].chunks_exact_mut(PLACE_BYTES).take(nics).enumerate() {
            let (ip, ports) = place.split_at_mut(4);
            for (port, addrs) in ports.chunks_exact_mut(2).zip(&self.stripes) {
                ip.copy_from_slice(&addrs[nic].ip().octets());
                port.copy_from_slice(&addrs[nic].port().to_le_bytes());
            }
        }
        out
    }

    /// Reads a handle.
    ///
    /// # Errors
    /// If this plugin did not make it.
    pub(crate) fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, HandleError> {
        if bytes[..4] != MAGIC {
            return Err(HandleError::Foreign);
        }
        let version = |protocol: u16, layout: u8| protocol << 8 | u16::from(layout);
        let theirs = version(u16::from_le_bytes([bytes[4], bytes[5]]), bytes[6]);
        let ours = version(PROTOCOL_VERSION, HANDLE_VERSION);
        if theirs != ours {
            return Err(HandleError::Version { theirs, ours });
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut secret = [0; SECRET_BYTES];
        secret.copy_from_slice(&bytes[16..HEAD_BYTES]);
        let (stripes, nics) = (usize::from(bytes[7] >> 4), usize::from(bytes[7] & 15));
        if nics == 0 || !(1..=STRIPES_MAX).contains(&stripes) {
            return Err(HandleError::Empty);
        }
        let stripe = |i: usize| {
            let places = bytes[HEAD_BYTES..].chunks_exact(PLACE_BYTES).take(nics);
            let port = |p: &[u8]| u16::from_le_bytes([p[4 + 2 * i], p[5 + 2 * i]]);
            places.map(|p| SocketAddrV4::new(Ipv4Addr::new(p[0], p[1], p[2], p[3]), port(p))).collect()
        };
        let stripes = (0..stripes).map(stripe).collect();
        Ok(Self { name: LinkName { from: word(8), to: word(12) }, secret, stripes })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

    use super::*;

    fn handle(nics: usize) -> Handle {
        let addr = |i: usize, s: usize| SocketAddrV4::new(Ipv4Addr::new(10, 0, i as u8, 1), (1000 * s + i) as u16);
        let stripe = |s: usize| (0..nics).map(|i| addr(i, s)).collect();
        Handle::draw((0..STRIPES_MAX).map(stripe).collect()).unwrap()
    }

    #[test]
    fn a_handle_survives_the_bootstrap() {
        for nics in 1..=NICS_MAX {
            let made = handle(nics);
            assert_eq!(Handle::decode(&made.encode()), Ok(made));
        }
        let alone = Handle { stripes: handle(3).stripes[..1].to_vec(), ..handle(3) };
        assert_eq!(Handle::decode(&alone.encode()), Ok(alone));
        assert_ne!(handle(1).secret, handle(1).secret);
    }

    #[test]
    fn stripes_have_names_and_ports_of_their_own() {
        let handle = handle(2);
        let stripes: Vec<_> = handle.stripes().collect();
        assert_ne!(stripes[0].0, stripes[1].0);
        assert_eq!(stripes[1].1, ["10.0.0.1:1000".parse().unwrap(), "10.0.1.1:1001".parse().unwrap()]);
    }

    #[test]
    fn nics_that_do_not_fit_are_left_out() {
        let handle = Handle::decode(&handle(NICS_MAX + 3).encode()).unwrap();
        assert!(handle.stripes().all(|(_, addrs)| addrs.len() == NICS_MAX));
    }

    #[test]
    fn foreign_handles_other_versions_and_empty_ones_are_told_apart() {
        assert_eq!(Handle::decode(&[0; HANDLE_BYTES]), Err(HandleError::Foreign));
        let mut old = handle(1).encode();
        old[6] += 1;
        assert!(matches!(Handle::decode(&old), Err(HandleError::Version { .. })));
        let mut empty = handle(1).encode();
        empty[7] = 0;
        assert_eq!(Handle::decode(&empty), Err(HandleError::Empty));
    }
}
