//! Finds where in an executable or library a call point lies, and whether a port's
//! traffic passes through the kernel at all. Reads files and asks drivers; attaches
//! nothing.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use object::{Object, ObjectSegment, ObjectSymbol, ReadCache};
use thiserror::Error;

/// Why a call point could not be found.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The file cannot be read.
    #[error("{}: cannot read it for symbol {symbol}: {source}", binary.display())]
    Unreadable {
        /// the executable or library
        binary: PathBuf,
        /// the function wanted
        symbol: String,
        /// what the system said
        source: io::Error,
    },
    /// The file is no ELF file, or a broken one.
    #[error("{}: not an ELF executable or library: {reason}", binary.display())]
    NotElf {
        /// the executable or library
        binary: PathBuf,
        /// what the reader found
        reason: String,
    },
    /// No such function.
    #[error(
        "{}: no function {symbol} in .dynsym or .symtab\n  hint: {}",
        binary.display(),
        if near.is_empty() {
            "an executable keeps its exported functions only when linked with -rdynamic".to_owned()
        } else {
            format!("it has {}", near.join(", "))
        }
    )]
    NoSymbol {
        /// the executable or library
        binary: PathBuf,
        /// the function wanted
        symbol: String,
        /// functions with similar names
        near: Vec<String>,
    },
}

/// endbr64: the kernel single-steps a probe on it, which costs 20 µs a call; one on the
/// next instruction (usually a push, which the kernel emulates) costs under 1 µs.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The file offset at which to probe `symbol`: its first instruction, or the second
/// where the first is `endbr64`.
pub fn symbol_offset(binary: &Path, symbol: &str) -> Result<u64, ProbeError> {
    let unreadable = |source| ProbeError::Unreadable { binary: binary.to_owned(), symbol: symbol.to_owned(), source };
    let not_elf = |reason: String| ProbeError::NotElf { binary: binary.to_owned(), reason };
    // Read piecewise: GPU libraries are hundreds of megabytes.
    let cache = ReadCache::new(File::open(binary).map_err(unreadable)?);
    let file = object::File::parse(&cache).map_err(|error| not_elf(error.to_string()))?;
    let functions = || file.dynamic_symbols().chain(file.symbols());
    let Some(address) = functions()
        .filter(ObjectSymbol::is_definition)
        .find(|found| found.name() == Ok(symbol))
        .map(|found| found.address())
    else {
        return Err(ProbeError::NoSymbol {
            binary: binary.to_owned(),
            symbol: symbol.to_owned(),
            near: near_names(functions().filter_map(|found| found.name().ok()), symbol),
        });
    };
    let segment = file
        .segments()
        .find(|segment| {
            let inside = address.wrapping_sub(segment.address());
            address >= segment.address() && inside < segment.file_range().1
        })
        .ok_or_else(|| not_elf(format!("{symbol} at {address:#x} lies in no loaded segment")))?;
    let inside = address - segment.address();
    let first = segment.data_range(address, ENDBR64.len() as u64).ok().flatten();
    let skip = if first == Some(&ENDBR64[..]) { 4 } else { 0 };
    Ok(segment.file_range().0 + inside + skip)
}

fn near_names<'a>(names: impl Iterator<Item = &'a str>, wanted: &str) -> Vec<String> {
    let mut near: Vec<(f64, &str)> =
        names.map(|name| (strsim::jaro_winkler(name, wanted), name)).filter(|(likeness, _)| *likeness > 0.85).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.dedup_by(|a, b| a.1 == b.1);
    near.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

/// A port whose RDMA traffic the kernel never sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaBypass {
    /// the interface
    pub ifname: String,
    /// its RDMA devices, as verbs programs name them
    pub devices: Vec<String>,
}

/// Whether `ifname`, in the calling thread's network namespace, belongs to a device
/// with hardware RDMA. Its queue pairs bypass the kernel, so a packet program would
/// drop the port's TCP and ARP while RDMA goes on: a fault that did not happen.
///
/// # Errors
/// When the device's driver cannot be asked for a reason other than having no answer.
pub fn rdma_bypass(ifname: &str) -> io::Result<Option<RdmaBypass>> {
    let Some(bus_address) = bus_address(ifname)? else {
        return Ok(None); // veth, bridge, loopback: no hardware behind it
    };
    // By bus address and not by /sys/class/net, which shows the interfaces of the
    // namespace that mounted it, not of this thread's. Subfunctions of a NIC are on the
    // auxiliary bus.
    let buses = ["/sys/bus/pci/devices", "/sys/bus/auxiliary/devices"];
    Ok(buses
        .into_iter()
        .find_map(|bus| rdma_devices(Path::new(bus), &bus_address))
        .map(|devices| RdmaBypass { ifname: ifname.to_owned(), devices }))
}

/// The names in `BUS/ADDRESS/infiniband`, if that folder exists.
fn rdma_devices(bus: &Path, address: &str) -> Option<Vec<String>> {
    let folder = std::fs::read_dir(bus.join(address).join("infiniband")).ok()?;
    let mut names: Vec<String> = folder.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    Some(names)
}

/// The PCI address behind an interface, asked of its driver (ETHTOOL_GDRVINFO).
fn bus_address(ifname: &str) -> io::Result<Option<String>> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    const ETHTOOL_GDRVINFO: u32 = 3;
    /// `struct ethtool_drvinfo`
    #[repr(C)]
    struct DriverFacts {
        command: u32,
        driver: [u8; 32],
        version: [u8; 32],
        firmware: [u8; 32],
        bus: [u8; 32],
        rest: [u8; 64],
    }
    let mut facts = DriverFacts {
        command: ETHTOOL_GDRVINFO,
        driver: [0; 32],
        version: [0; 32],
        firmware: [0; 32],
        bus: [0; 32],
        rest: [0; 64],
    };
    // SAFETY: ifreq is plain old data, for which all-zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if ifname.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(ifname.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = (&raw mut facts).cast();
    // SAFETY: plain socket(2); the descriptor is owned below.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just returned to us alone.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: the kernel writes at most one ethtool_drvinfo (196 bytes, the size of
    // DriverFacts) through ifru_data, which outlives the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        };
    }
    let text: Vec<u8> = facts.bus.into_iter().take_while(|byte| *byte != 0).collect();
    Ok(String::from_utf8(text).ok().filter(|bus| !bus.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[unsafe(no_mangle)]
    extern "C" fn r2cc_probe_test_symbol(value: u64) -> u64 {
        std::hint::black_box(value) + 1
    }

    #[test]
    fn a_function_of_a_position_independent_executable_is_found() {
        assert_eq!(r2cc_probe_test_symbol(1), 2);
        let binary = std::env::current_exe().unwrap();
        let offset = symbol_offset(&binary, "r2cc_probe_test_symbol").unwrap();
        // The bytes in the file are the bytes in memory, where no relocation lies.
        let file = std::fs::read(&binary).unwrap();
        let at = usize::try_from(offset).unwrap();
        let function = r2cc_probe_test_symbol as extern "C" fn(u64) -> u64 as *const u8;
        // SAFETY: reads four bytes of this process's own code.
        let code = unsafe { std::slice::from_raw_parts(function, 4) };
        assert!(file[at..at + 4] == *code || file[at - 4..at] == ENDBR64);
    }

    #[test]
    fn a_missing_function_is_named_with_near_ones() {
        let binary = std::env::current_exe().unwrap();
        let error = symbol_offset(&binary, "r2cc_probe_test_simbol").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("r2cc_probe_test_simbol"), "{text}");
        assert!(text.contains("r2cc_probe_test_symbol"), "{text}");
    }

    #[test]
    fn a_text_file_is_no_elf_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "not a program\n").unwrap();
        assert!(matches!(symbol_offset(&path, "main"), Err(ProbeError::NotElf { .. })));
    }

    #[test]
    fn a_pci_device_with_an_infiniband_folder_bypasses_the_kernel() {
        let bus = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(bus.path().join("0000:41:00.0/infiniband/mlx5_2")).unwrap();
        std::fs::create_dir_all(bus.path().join("0000:42:00.0/net")).unwrap();
        assert_eq!(rdma_devices(bus.path(), "0000:41:00.0"), Some(vec!["mlx5_2".to_owned()]));
        assert_eq!(rdma_devices(bus.path(), "0000:42:00.0"), None);
    }

    #[test]
    fn loopback_has_no_rdma_behind_it() {
        assert_eq!(rdma_bypass("lo").unwrap(), None);
        assert!(rdma_bypass("no-such-if0").is_err());
    }
}
