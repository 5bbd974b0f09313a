//! Loads the kernel object and attaches one pair of its programs to each port, inside
//! the port's network namespace.

use std::{
    collections::HashSet,
    ffi::CString,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{Error, PortSpec, error::chain};
use crate::{
    kernel::{self, Hook, MAX_PORTS},
    netns,
    probe::rdma_bypass,
};
use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::MapError,
    programs::{Program, ProgramError, SchedClassifier, UProbe, Xdp},
};

pub(super) fn load_and_attach(ports: &[PortSpec<'_>]) -> Result<(Ebpf, Vec<OwnedFd>), Error> {
    check_names(ports)?;
    let mut ebpf = load_object(ports.len())?;
    let mut links = Vec::with_capacity(ports.len() * 2);
    for (slot, port) in ports.iter().enumerate() {
        let rx: &mut Xdp = program(&mut ebpf, &format!("r2cc_rx_{slot}"))?;
        rx.load().map_err(|error| refused("r2cc_rx", &error))?;
        let tx: &mut SchedClassifier = program(&mut ebpf, &format!("r2cc_tx_{slot}"))?;
        tx.load().map_err(|error| refused("r2cc_tx", &error))?;
        let rx: &Xdp = shared(&ebpf, &format!("r2cc_rx_{slot}"))?;
        let tx: &SchedClassifier = shared(&ebpf, &format!("r2cc_tx_{slot}"))?;
        let programs = [
            (rx.fd().map_err(|error| refused("r2cc_rx", &error))?.as_fd(), Hook::XdpGeneric),
            (tx.fd().map_err(|error| refused("r2cc_tx", &error))?.as_fd(), Hook::TcxEgress),
        ];
        links.extend(in_namespace(port, || attach_port(port, programs))?);
    }
    Ok((ebpf, links))
}

fn check_names(ports: &[PortSpec<'_>]) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::BadPorts { reason });
    if ports.is_empty() {
        return refuse("none given".to_owned());
    }
    if ports.len() > MAX_PORTS {
        return refuse(format!("{} given, at most {MAX_PORTS} fit", ports.len()));
    }
    let mut seen = HashSet::new();
    for port in ports {
        if !seen.insert((&port.node, &port.nic)) {
            return refuse(format!("{}/{} given twice", port.node, port.nic));
        }
    }
    Ok(())
}

fn load_object(port_count: usize) -> Result<Ebpf, Error> {
    // Where the first integer argument of a call lies in the kernel's register block.
    let first_arg_word: u32 = if cfg!(target_arch = "x86_64") { 14 } else { 0 };
    let port_count = u32::try_from(port_count).unwrap_or(u32::MAX); // checked: <= MAX_PORTS
    let mut ebpf = EbpfLoader::new()
        .override_global("PORT_COUNT", &port_count, true)
        .override_global("FIRST_ARG_WORD", &first_arg_word, true)
        .load(kernel::OBJECT)
        .map_err(|error| {
            if let EbpfError::MapError(MapError::CreateError { io_error, .. }) = &error
                && io_error.raw_os_error() == Some(libc::EPERM)
            {
                return Error::NotPermitted { action: "create BPF maps".to_owned() };
            }
            Error::Load { program: "object".to_owned(), reason: chain(&error) }
        })?;
    let call: &mut UProbe = program(&mut ebpf, "r2cc_call")?;
    call.load().map_err(|error| refused("r2cc_call", &error))?;
    Ok(ebpf)
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, Error>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or(Error::BrokenObject { part: "a program of a port" })
}

fn shared<'a, P>(ebpf: &'a Ebpf, name: &str) -> Result<&'a P, Error>
where
    &'a P: TryFrom<&'a Program, Error = ProgramError>,
{
    ebpf.program(name)
        .and_then(|program| program.try_into().ok())
        .ok_or(Error::BrokenObject { part: "a program of a port" })
}

fn refused(program: &str, error: &ProgramError) -> Error {
    if let ProgramError::LoadError { io_error, .. } = error
        && io_error.raw_os_error() == Some(libc::EPERM)
    {
        return Error::NotPermitted { action: format!("load the program {program}") };
    }
    Error::Load { program: program.to_owned(), reason: chain(error) }
}

fn attach_port(port: &PortSpec<'_>, programs: [(BorrowedFd<'_>, Hook); 2]) -> Result<Vec<OwnedFd>, Error> {
    let (node, nic, ifname) = (port.node.clone(), port.nic.clone(), port.ifname.clone());
    let Some(ifindex) = index_of(&ifname) else {
        return Err(Error::NoInterface { node, nic, ifname });
    };
    match rdma_bypass(&ifname) {
        Ok(None) => {}
        Ok(Some(bypass)) => {
            return Err(Error::RdmaBypass { node, nic, ifname, devices: bypass.devices });
        }
        Err(source) => {
            return Err(Error::Driver { node, nic, ifname, source });
        }
    }
    let mut links = Vec::with_capacity(2);
    for (program, hook) in programs {
        let link = kernel::link_create(program, ifindex, hook).map_err(|source| {
            let (node, nic, ifname) = (node.clone(), nic.clone(), ifname.clone());
            match source.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => Error::Occupied { node, nic, ifname },
                Some(libc::EPERM) => Error::NotPermitted { action: format!("attach to {ifname} of {node}/{nic}") },
                _ => Error::Attach {
                    node,
                    nic,
                    ifname,
                    hook: match hook {
                        Hook::XdpGeneric => "ingress (generic XDP)",
                        Hook::TcxEgress => "egress (TCX)",
                    },
                    source,
                },
            }
        })?;
        links.push(link);
    }
    Ok(links)
}

fn index_of(ifname: &str) -> Option<u32> {
    let name = CString::new(ifname).ok()?;
    // SAFETY: a NUL-terminated string that outlives the call.
    Some(unsafe { libc::if_nametoindex(name.as_ptr()) }).filter(|index| *index != 0)
}

/// Runs `work` inside the port's namespace.
fn in_namespace<T: Send>(port: &PortSpec<'_>, work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let Some(netns) = port.netns else {
        return work();
    };
    netns::within(netns, work).map_err(|source| Error::Namespace {
        node: port.node.clone(),
        nic: port.nic.clone(),
        source,
    })?
}
