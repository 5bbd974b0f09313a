//! The fabric of a job: its members' NICs, what is measured of them, and what the fault view says is lost.

use super::{Fabric, FabricError, FabricNode};
use crate::control::{Component, PathHealth, ViewEntry};
use crate::topology::{Member, by_node, rails};

impl Fabric {
    /// Nodes in order of their first rank. `bytes_s` is what a NIC of a rank carries each way, measured or by
    /// its name; a node's NICs are those of its first rank. What `view` holds to be down carries nothing; where
    /// it cannot tell which of some NICs is down, none of them does.
    ///
    /// # Errors
    /// As [`Fabric::new`]: above all if a pair of nodes shares no rail any more.
    pub fn of_members(
        members: &[Member],
        view: &[ViewEntry],
        bytes_s: impl Fn(&Member, usize) -> f64,
    ) -> Result<Self, FabricError> {
        let rails = rails(members);
        let node = |of_node: Vec<&Member>| {
            let (first, ranks) = (of_node[0], of_node.iter().map(|member| member.rank).collect());
            let mut node = FabricNode { ranks, rails: vec![0.0; rails.len()] };
            for (i, nic) in first.nics.iter().enumerate() {
                let Some(rail) = rails.iter().position(|rail| *rail == nic.subnet()) else { continue };
                if !view.iter().any(|entry| takes_down(entry, &first.node, &nic.name, rail)) {
                    node.rails[rail] += bytes_s(first, i);
                }
            }
            node
        };
        Self::new(by_node(members).into_iter().map(node).collect())
    }
}

fn takes_down(entry: &ViewEntry, node: &str, nic: &str, rail: usize) -> bool {
    entry.health == PathHealth::Down
        && match &entry.component {
            Component::Nic { node: of, nic: name } => of == node && name == nic,
            Component::Rail => entry.rail == format!("rail-{}", rail + 1),
            Component::OneOf { candidates } => candidates.contains(&format!("{node}/{nic}")),
        }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::topology::Nic;

    fn members() -> Vec<Member> {
        let nic = |rail: u8, host: u8| Nic {
            name: format!("mlx5_{rail}"),
            addr: Ipv4Addr::new(10, 10, rail, host),
            prefix: 24,
        };
        let member = |rank: usize| {
            let node = rank / 2;
            let nics = (0..3).map(|rail| nic(rail, node as u8 + 1)).collect();
            Member { rank, node: format!("node-{}", node + 1), nics, ports: vec![1; 3], local_port: 1 }
        };
        (0..6).map(member).collect()
    }

    fn view(component: Component, rail: &str, health: PathHealth) -> Vec<ViewEntry> {
        vec![ViewEntry { component, rail: rail.into(), health, cause: "stall".into() }]
    }

    fn rails_of(view: &[ViewEntry]) -> Vec<Vec<f64>> {
        let fabric = Fabric::of_members(&members(), view, |_, nic| 1.0 + nic as f64).unwrap();
        assert_eq!(fabric.nodes()[1].ranks, [2, 3]);
        fabric.nodes().iter().map(|node| node.rails.clone()).collect()
    }

    #[test]
    fn what_the_view_holds_to_be_down_carries_nothing() {
        let healthy = vec![1.0, 2.0, 3.0];
        assert_eq!(rails_of(&[]), [healthy.clone(), healthy.clone(), healthy.clone()]);
        let nic = Component::Nic { node: "node-1".into(), nic: "mlx5_1".into() };
        let found = rails_of(&view(nic.clone(), "rail-2", PathHealth::Down));
        assert_eq!(found, [vec![1.0, 0.0, 3.0], healthy.clone(), healthy.clone()]);
        assert_eq!(rails_of(&view(nic, "rail-2", PathHealth::Slow))[0], healthy);
        let found = rails_of(&view(Component::Rail, "rail-3", PathHealth::Down));
        assert!(found.iter().all(|rails| rails == &[1.0, 2.0, 0.0]));
        let either = Component::OneOf { candidates: vec!["node-1/mlx5_0".into(), "node-2/mlx5_0".into()] };
        let found = rails_of(&view(either, "rail-1", PathHealth::Down));
        assert_eq!(found, [vec![0.0, 2.0, 3.0], vec![0.0, 2.0, 3.0], healthy]);
    }
}
