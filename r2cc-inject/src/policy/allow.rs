//! The allow file: interfaces that faults may act on although no cluster made them.

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::Refusal;
use crate::{fault::Target, watcher::check_owner};

/// The file that is always looked at.
pub const DEFAULT_PATH: &str = "/etc/r2cc/allow.toml";

/// An allow file: `interfaces = ["node-1/eth3", "eth4"]`. A name without a node allows
/// that interface on this host only.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Allow {
    /// `NODE/INTERFACE`, or `INTERFACE` of this host
    pub interfaces: Vec<String>,
}

impl Allow {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Refusal::BadFile`] naming line and column.
    pub fn read(path: &Path) -> Result<Self, Refusal> {
        let bad = |reason: String| Refusal::BadFile { path: path.to_owned(), reason };
        check_owner(path).map_err(|error| bad(error.to_string()))?;
        let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        toml::from_str(&text).map_err(|error| bad(error.to_string()))
    }

    /// Whether it allows the target.
    #[must_use]
    pub fn allows(&self, target: &Target) -> bool {
        self.interfaces.iter().any(|entry| match entry.split_once('/') {
            Some((node, nic)) => node == target.node && nic == target.nic,
            None => *entry == target.nic && super::is_this_host(&target.node),
        })
    }

    /// The file, of the one given and the default one, that allows the target.
    pub(super) fn find(given: Option<&Path>, target: &Target) -> Result<Option<PathBuf>, Refusal> {
        if let Some(path) = given
            && Self::read(path)?.allows(target)
        {
            return Ok(Some(path.to_owned()));
        }
        let default = Path::new(DEFAULT_PATH);
        match std::fs::metadata(default) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            _ => {}
        }
        Ok(Self::read(default)?.allows(target).then(|| default.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(node: &str, nic: &str) -> Target {
        Target { node: node.into(), nic: nic.into() }
    }

    #[test]
    fn a_name_without_a_node_allows_this_host_only() {
        let allow: Allow = toml::from_str(r#"interfaces = ["node-1/eth3", "eth4"]"#).unwrap();
        assert!(allow.allows(&target("node-1", "eth3")));
        assert!(!allow.allows(&target("localhost", "eth3")));
        assert!(allow.allows(&target("localhost", "eth4")));
        assert!(!allow.allows(&target("node-1", "eth4")));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("allow.toml");
        std::fs::write(&path, "interfaces = []\ninterfacs = [\"eth0\"]\n").unwrap();
        let text = Allow::read(&path).unwrap_err().to_string();
        assert!(text.contains("line 2") && text.contains("interfacs"), "{text}");
    }

    #[test]
    fn a_file_that_others_may_write_is_not_trusted() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("allow.toml");
        std::fs::write(&path, "interfaces = [\"eth0\"]\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let text = Allow::read(&path).unwrap_err().to_string();
        assert!(text.contains("not trusted"), "{text}");
    }
}
