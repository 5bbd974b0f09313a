//! What the two ends of a link tell each other beside the data, as JSON over any of its lanes.

use serde::{Deserialize, Serialize};

use crate::hub;
use crate::view::Knowledge;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub(super) enum Notice {
    /// The receiver is there.
    Here { rank: Option<usize>, node: String, nics: Vec<String> },
    /// This end closes: it has taken, or had acknowledged, this many messages.
    Bye { messages: u64 },
    /// This end has failed.
    Failed { reason: String },
    /// What is known of the job's NICs.
    Known { knowledge: Knowledge },
}

/// The other end, as far as it has said.
#[derive(Debug, Default)]
pub(super) struct Peer {
    pub(super) rank: Option<usize>,
    pub(super) node: Option<String>,
    pub(super) nics: Vec<String>,
}

/// Passes news on to every process that this one has links with.
pub(super) fn pass_on(news: Option<Knowledge>) {
    for knowledge in news.iter().flat_map(Knowledge::pieces) {
        if let Ok(bytes) = serde_json::to_vec(&Notice::Known { knowledge }) {
            hub::tell_all(&bytes.into());
        }
    }
}
