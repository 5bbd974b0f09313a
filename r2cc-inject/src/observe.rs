//! Sees the faults of every injector on this machine, whichever process owns it and
//! whether that process answers or not: it reads, and heals, through the kernel's maps.
//! Touches only programs of ours, known by their names and their maps'. Start at
//! [`sessions`].

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use aya::{
    maps::MapInfo,
    programs::{loaded_links, loaded_programs},
};
use serde::Serialize;

use crate::{
    injector::{self, FaultStatus, PortCounters},
    kernel::{self, MAP_NAMES, MAX_FAULTS, MAX_PORTS, Maps},
};

/// The injector of some process.
pub struct Session {
    maps: Maps,
    control_id: u32,
    programs: Vec<u32>,
    ports: Vec<(String, String)>,
}

/// A fault of some process.
#[derive(Debug, Clone, Serialize)]
pub struct SeenFault {
    /// what it is, where its owner said so
    pub label: String,
    /// the ports it acts on, `NODE/NIC`
    pub ports: Vec<String>,
    /// the process that armed it
    pub owner_pid: u32,
    /// whether that process heals and ends when sent SIGTERM
    pub owner_stops_on_sigterm: bool,
    /// what has become of it
    pub status: FaultStatus,
}

/// All injectors on this machine.
///
/// # Errors
/// Missing rights (CAP_SYS_ADMIN), or a kernel that does not answer.
pub fn sessions() -> io::Result<Vec<Session>> {
    let mut found: Vec<Session> = Vec::new();
    for program in loaded_programs() {
        let program = program.map_err(io::Error::other)?;
        let is_ours =
            program.name_as_str().is_some_and(|name| name.starts_with("r2cc_rx_") || name.starts_with("r2cc_tx_"));
        if !is_ours {
            continue;
        }
        // It may go away between being listed and being looked at.
        let Ok(Some(map_ids)) = program.map_ids() else {
            continue;
        };
        let Some((control_id, fds)) = our_maps(&map_ids) else {
            continue;
        };
        if let Some(known) = found.iter_mut().find(|known| known.control_id == control_id) {
            known.programs.push(program.id());
            continue;
        }
        let maps = Maps::open(fds)?;
        let ports = maps
            .watch
            .iter()
            .take(MAX_PORTS)
            .map(|watch| kernel::read_text(&watch.name))
            .take_while(|name| !name.is_empty())
            .map(|name| {
                let (node, nic) = name.split_once('/').unwrap_or((&name, ""));
                (node.to_owned(), nic.to_owned())
            })
            .collect();
        found.push(Session { maps, control_id, programs: vec![program.id()], ports });
    }
    Ok(found)
}

/// The id of the control array and the arrays in the order of [`MAP_NAMES`], if the
/// program has all of them.
fn our_maps(map_ids: &[u32]) -> Option<(u32, [OwnedFd; 6])> {
    let infos: Vec<MapInfo> = map_ids.iter().filter_map(|id| MapInfo::from_id(*id).ok()).collect();
    let find = |name: &str| infos.iter().find(|info| info.name_as_str() == Some(name));
    let control_id = find("r2cc_control")?.id();
    let mut fds = Vec::with_capacity(MAP_NAMES.len());
    for name in MAP_NAMES {
        let fd = find(name)?.fd().ok()?;
        fds.push(fd.as_fd().try_clone_to_owned().ok()?);
    }
    Some((control_id, fds.try_into().ok()?))
}

impl Session {
    /// Its faults, healed ones included.
    #[must_use]
    pub fn faults(&self) -> Vec<SeenFault> {
        (0..MAX_FAULTS)
            .filter(|slot| self.maps.control[*slot].gate.read() != kernel::GATE_FREE)
            .map(|slot| {
                let control = &self.maps.control[slot];
                let acts_on = self.maps.rules[slot].ports.read();
                let ports = self.ports.iter().enumerate();
                SeenFault {
                    label: kernel::read_text(&control.label),
                    ports: ports
                        .filter(|(port, _)| acts_on >> port & 1 == 1)
                        .map(|(_, (node, nic))| format!("{node}/{nic}"))
                        .collect(),
                    owner_pid: u32::try_from(control.owner_pid.read()).unwrap_or(0),
                    owner_stops_on_sigterm: control.owner_kind.read() == kernel::OWNER_STOPS_ON_SIGTERM,
                    status: injector::status_of(&self.maps, slot, &self.ports),
                }
            })
            .collect()
    }

    /// The traffic of its ports.
    #[must_use]
    pub fn counters(&self) -> Vec<PortCounters> {
        injector::counters_of(&self.maps, &self.ports)
    }

    /// Ends all its faults, without the help of the process that owns them.
    pub fn heal(&self) {
        for slot in 0..MAX_FAULTS {
            injector::heal_in(&self.maps, slot);
        }
    }

    /// Takes its programs off the interfaces for good; answers with how many there were.
    ///
    /// # Errors
    /// A link that can be neither opened nor detached.
    pub fn detach(&self) -> io::Result<usize> {
        let mut detached = 0;
        for link in loaded_links() {
            let link = link.map_err(io::Error::other)?;
            if !self.programs.contains(&link.program_id()) {
                continue;
            }
            match kernel::link_by_id(link.id()).and_then(|fd| kernel::link_detach(fd.as_fd())) {
                Ok(()) => detached += 1,
                // gone meanwhile, with its owner
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(detached)
    }
}
