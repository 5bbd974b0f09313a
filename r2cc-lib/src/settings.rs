//! What a user asks of the library: builder calls and the `R2CC_*` variables of the paper's library.
//!
//! Rank 0's settings hold for the job; a rank that was given others says so once for each and adopts them.

use serde::{Deserialize, Serialize};

use crate::control::{Component, PathHealth, ViewEntry};
use crate::schedule::{Overlap, Policy, Wishes};
use crate::topology::{Member, rails};

/// What the library does for an AllReduce: the values of `R2CC_MODE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// 2: the flat ring; surviving NICs share the load.
    #[default]
    Balance,
    /// 3: Balance, and R2CC-AllReduce once a fault has settled.
    R2ccAllReduce,
    /// 4: the bandwidth-weighted schedule, healthy or not.
    Weighted,
}

impl Mode {
    fn policy(self) -> Policy {
        match self {
            Self::Balance => Policy::Balance,
            Self::R2ccAllReduce => Policy::R2ccAllReduce,
            Self::Weighted => Policy::Weighted,
        }
    }
}

/// NICs of a node that are taken for failed from the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredFault {
    /// The node's name, or its number in the order of first ranks.
    pub node: String,
    /// NICs by name, by number, or by the number that their name ends in.
    pub nics: Vec<String>,
    /// With no NIC named: the last so many.
    pub count: usize,
}

/// Everything that a user may set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// `R2CC_MODE`.
    pub mode: Mode,
    /// `R2CC_AR_AFTER_REPAIR`: the mode once a fault has settled, if another.
    pub after_repair: Option<Mode>,
    /// `R2CC_AR_STAGE2_CHUNKS` (K, default 4), from 1.
    pub chunks: usize,
    /// `R2CC_AR_SCHEDULE`.
    pub overlap: Overlap,
    /// `R2CC_AR_MIN_BYTES` (16 MiB): smaller ones take the flat ring.
    pub min_bytes: usize,
    /// `R2CC_FAILED_NODE`, `R2CC_FAILED_HCA`, `R2CC_FAILED_NIC_COUNT`.
    pub declared: Option<DeclaredFault>,
}

impl Default for Settings {
    fn default() -> Self {
        let Wishes { chunks, overlap, min_bytes, .. } = Wishes::default();
        Self { mode: Mode::default(), after_repair: None, chunks, overlap, min_bytes, declared: None }
    }
}

/// A variable, or a declared fault, that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value}: {problem}")]
pub struct SettingsError {
    /// The variable.
    pub name: &'static str,
    /// What it was set to.
    pub value: String,
    /// What is wrong, and what would be right.
    pub problem: String,
}

fn wrong(name: &'static str, value: &str, problem: impl Into<String>) -> SettingsError {
    SettingsError { name, value: value.to_owned(), problem: problem.into() }
}

impl Settings {
    /// Reads the variables that are set, through `variable`.
    ///
    /// # Errors
    /// If one has a value that it cannot have.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        let mut settings = Self::default();
        let number = |name: &'static str| -> Result<Option<usize>, SettingsError> {
            let Some(value) = variable(name) else { return Ok(None) };
            value.trim().parse().map(Some).map_err(|_| wrong(name, &value, "expected a whole number, such as 4"))
        };
        let mode = |name: &'static str, known: &str| -> Result<Option<Mode>, SettingsError> {
            Ok(match number(name)? {
                None => None,
                Some(2) => Some(Mode::Balance),
                Some(3) => Some(Mode::R2ccAllReduce),
                Some(4) => Some(Mode::Weighted),
                Some(other) => return Err(wrong(name, &other.to_string(), known)),
            })
        };
        let modes = "expected 2 (Balance), 3 (R2CC-AllReduce) or 4 (Weighted)";
        settings.mode = mode("R2CC_MODE", modes)?.unwrap_or_default();
        settings.after_repair = mode("R2CC_AR_AFTER_REPAIR", modes)?;
        if let Some(chunks) = number("R2CC_AR_STAGE2_CHUNKS")? {
            settings.chunks = chunks;
        }
        if settings.chunks == 0 {
            return Err(wrong("R2CC_AR_STAGE2_CHUNKS", "0", "expected at least 1"));
        }
        if let Some(overlap) = number("R2CC_AR_SCHEDULE")? {
            let known = u32::try_from(overlap).ok().and_then(Overlap::from_number);
            let problem = "expected 0, 1, 2 or 3";
            settings.overlap = known.ok_or_else(|| wrong("R2CC_AR_SCHEDULE", &overlap.to_string(), problem))?;
        }
        if let Some(bytes) = number("R2CC_AR_MIN_BYTES")? {
            settings.min_bytes = bytes;
        }
        let count = number("R2CC_FAILED_NIC_COUNT")?.unwrap_or(0);
        let nics: Vec<String> = variable("R2CC_FAILED_HCA").as_deref().map(words).unwrap_or_default();
        settings.declared = match variable("R2CC_FAILED_NODE") {
            Some(node) => Some(DeclaredFault { node: node.trim().to_owned(), nics, count }),
            None if nics.is_empty() && count == 0 => None,
            None => {
                let problem = "is not set, but R2CC_FAILED_HCA or R2CC_FAILED_NIC_COUNT is; expected the node's name";
                return Err(wrong("R2CC_FAILED_NODE", "", problem));
            }
        };
        Ok(settings)
    }

    /// Reads the process's environment.
    ///
    /// # Errors
    /// If a variable has a value that it cannot have.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::read(|name| std::env::var(name).ok())
    }

    /// What the planner may do now.
    pub(crate) fn wishes(&self, faulty: bool) -> Wishes {
        let mode = if faulty { self.after_repair.unwrap_or(self.mode) } else { self.mode };
        Wishes { policy: mode.policy(), chunks: self.chunks, overlap: self.overlap, min_bytes: self.min_bytes }
    }

    /// Names of the variables whose values differ from `other`'s.
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let pairs = [
            (self.mode != other.mode, "R2CC_MODE"),
            (self.after_repair != other.after_repair, "R2CC_AR_AFTER_REPAIR"),
            (self.chunks != other.chunks, "R2CC_AR_STAGE2_CHUNKS"),
            (self.overlap != other.overlap, "R2CC_AR_SCHEDULE"),
            (self.min_bytes != other.min_bytes, "R2CC_AR_MIN_BYTES"),
            (self.declared != other.declared, "R2CC_FAILED_NODE"),
        ];
        pairs.into_iter().filter(|(differs, _)| *differs).map(|(_, name)| name).collect()
    }

    /// The declared fault as the fault view would tell it.
    ///
    /// # Errors
    /// If the node, or a NIC of it, does not exist, or no NIC of the node would be left.
    pub(crate) fn declared_view(&self, members: &[Member]) -> Result<Vec<ViewEntry>, SettingsError> {
        let Some(declared) = &self.declared else { return Ok(Vec::new()) };
        let mut nodes: Vec<&Member> = Vec::new();
        for member in members {
            if !nodes.iter().any(|known| known.node == member.node) {
                nodes.push(member);
            }
        }
        let names = || nodes.iter().map(|node| node.node.as_str()).collect::<Vec<_>>().join(", ");
        let by_number = || declared.node.parse().ok().and_then(|i: usize| nodes.get(i).copied());
        let node =
            nodes.iter().copied().find(|node| node.node == declared.node).or_else(by_number).ok_or_else(|| {
                wrong("R2CC_FAILED_NODE", &declared.node, format!("no such node; the nodes are {}", names()))
            })?;
        let nics = &node.nics;
        let failed: Vec<usize> = if declared.nics.is_empty() {
            (nics.len().saturating_sub(declared.count)..nics.len()).collect()
        } else {
            let found = declared.nics.iter().map(|wanted| {
                let names: Vec<&str> = nics.iter().map(|nic| nic.name.as_str()).collect();
                find_nic(&names, wanted).ok_or_else(|| {
                    let problem = format!("{} has no such NIC; its NICs are {}", node.node, names.join(", "));
                    wrong("R2CC_FAILED_HCA", wanted, problem)
                })
            });
            found.collect::<Result<_, _>>()?
        };
        if failed.len() >= nics.len() && !failed.is_empty() {
            let problem = format!("all {} NICs of {} would be lost", nics.len(), node.node);
            return Err(wrong("R2CC_FAILED_NIC_COUNT", &failed.len().to_string(), problem));
        }
        let rails = rails(members);
        let entry = |i: usize| ViewEntry {
            component: Component::Nic { node: node.node.clone(), nic: nics[i].name.clone() },
            rail: format!("rail-{}", rails.iter().position(|rail| *rail == nics[i].subnet()).unwrap_or(0) + 1),
            health: PathHealth::Down,
            cause: "declared".into(),
        };
        Ok(failed.into_iter().map(entry).collect())
    }
}

/// The words of a list separated by commas or blanks.
fn words(list: &str) -> Vec<String> {
    list.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// A NIC by its name, else by the number that only its name ends in, else by its index.
fn find_nic(names: &[&str], wanted: &str) -> Option<usize> {
    let by_name = names.iter().position(|name| *name == wanted);
    let number: Option<usize> = wanted.parse().ok();
    let suffix = |name: &str| name.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
    let by_suffix = || {
        let number = number?;
        let mut found = (0..names.len()).filter(|i| suffix(names[*i]) == Some(number));
        found.next().filter(|_| found.next().is_none())
    };
    by_name.or_else(by_suffix).or_else(|| number.filter(|i| *i < names.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::Ipv4Addr;

    use super::*;
    use crate::topology::Nic;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        Settings::read(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    fn members() -> Vec<Member> {
        let nic = |(i, name): (usize, &&str), node: usize| Nic {
            name: (*name).into(),
            addr: Ipv4Addr::new(10, 0, i as u8, node as u8 + 1),
            prefix: 24,
        };
        let nics = |node| ["mlx5_0", "mlx5_2", "mlx5_3"].iter().enumerate().map(|n| nic(n, node)).collect();
        let member = |rank: usize| Member {
            rank,
            node: format!("node-{}", rank / 2 + 1),
            nics: nics(rank / 2),
            ports: vec![1; 3],
            local_port: 1,
        };
        (0..6).map(member).collect()
    }

    fn declared(node: &str, nics: &str, count: &str) -> Result<Vec<String>, SettingsError> {
        let variables = [("R2CC_FAILED_NODE", node), ("R2CC_FAILED_HCA", nics), ("R2CC_FAILED_NIC_COUNT", count)];
        let view = read(&variables)?.declared_view(&members())?;
        let name = |entry: ViewEntry| match entry.component {
            Component::Nic { node, nic } => format!("{node}/{nic} on {}", entry.rail),
            other => format!("{other:?}"),
        };
        Ok(view.into_iter().map(name).collect())
    }

    #[test]
    fn the_papers_variables_are_read() {
        assert_eq!(read(&[]).unwrap(), Settings::default());
        let all = [
            ("R2CC_MODE", "2"),
            ("R2CC_AR_AFTER_REPAIR", "3"),
            ("R2CC_AR_STAGE2_CHUNKS", "16"),
            ("R2CC_AR_SCHEDULE", "0"),
            ("R2CC_AR_MIN_BYTES", "1024"),
        ];
        let settings = read(&all).unwrap();
        assert_eq!((settings.mode, settings.after_repair), (Mode::Balance, Some(Mode::R2ccAllReduce)));
        assert_eq!((settings.chunks, settings.overlap, settings.min_bytes), (16, Overlap::AsDataAllows, 1024));
        assert_eq!(settings.wishes(false).policy, Policy::Balance);
        assert_eq!(settings.wishes(true).policy, Policy::R2ccAllReduce);
        assert_eq!(settings.differences(&Settings::default()).len(), 4);
    }

    #[test]
    fn a_declared_fault_may_name_nics_numbers_or_a_count() {
        for (nics, expected) in [
            ("mlx5_2", vec!["node-2/mlx5_2 on rail-2"]),
            ("2", vec!["node-2/mlx5_2 on rail-2"]),
            ("1", vec!["node-2/mlx5_2 on rail-2"]),
            ("0, mlx5_3", vec!["node-2/mlx5_0 on rail-1", "node-2/mlx5_3 on rail-3"]),
        ] {
            assert_eq!(declared("node-2", nics, "0").unwrap(), expected, "{nics}");
        }
        assert_eq!(declared("1", "", "1").unwrap(), ["node-2/mlx5_3 on rail-3"]);
    }

    #[test]
    fn what_makes_no_sense_is_told_with_the_variable() {
        let cases = [
            (read(&[("R2CC_MODE", "7")]).map(drop), "R2CC_MODE=7"),
            (read(&[("R2CC_MODE", "fast")]).map(drop), "R2CC_MODE=fast"),
            (read(&[("R2CC_AR_STAGE2_CHUNKS", "0")]).map(drop), "R2CC_AR_STAGE2_CHUNKS=0"),
            (read(&[("R2CC_FAILED_HCA", "mlx5_0")]).map(drop), "R2CC_FAILED_NODE="),
            (declared("node-9", "mlx5_0", "0").map(drop), "node-1, node-2, node-3"),
            (declared("node-1", "mlx5_9", "0").map(drop), "mlx5_0, mlx5_2, mlx5_3"),
            (declared("node-1", "", "3").map(drop), "all 3 NICs"),
        ];
        for (outcome, expected) in cases {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
