//! What is known of images on nodes.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use quartermaster_proto::v1::FailureReason;

/// What is known of the images of one node. It is lost with the process, and read back from the node's
/// annotation as far as that says that all is there.
#[derive(Debug, Clone, Default)]
pub struct NodePairs {
    /// The boot that this knowledge is of; another boot voids it.
    pub boot_id: String,
    /// By normalised reference; one that is absent is not known.
    pub pairs: HashMap<Arc<str>, Pair>,
    /// Once all was there: what each image was, in the order of their names. A fleet that is at rest keeps no more than this.
    pub digests: Arc<[(Arc<str>, Arc<str>)]>,
    /// The hash of what was wanted when pins that nobody wants any more were last released.
    pub released: Option<String>,
}

/// One image on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pair {
    /// Being pulled, or about to be.
    Pulling,
    /// There, as CRI said.
    Ready {
        /// `sha256:…`, or empty.
        digest: Arc<str>,
        /// The pins that were asked for with it; see [`super::Want`].
        pins: u64,
        /// When CRI said so.
        at: Timestamp,
    },
    /// The image has no manifest for the node's platform.
    NotForNode {
        /// When the registry said so.
        at: Timestamp,
    },
    /// Missing after its attempts.
    Failed(Box<PairFailure>),
}

/// Why an image is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairFailure {
    /// Category.
    pub reason: FailureReason,
    /// Words of the registry or of containerd.
    pub message: Arc<str>,
    /// When the last attempt ended.
    pub at: Timestamp,
}

impl NodePairs {
    /// What is known in the boot `boot_id`; knowledge of another boot is dropped.
    pub fn of_boot(&mut self, boot_id: &str) -> &mut Self {
        if self.boot_id != boot_id {
            *self = Self {
                boot_id: boot_id.to_owned(),
                ..Self::default()
            };
        }
        self
    }

    /// Keeps of what is there its digest alone: the node's own mark says the rest from now on. `shared` gives the copy of
    /// such a list that all nodes share.
    pub fn rest(&mut self, shared: impl FnOnce(&[(Arc<str>, Arc<str>)]) -> Arc<[(Arc<str>, Arc<str>)]>) {
        if self.pairs.is_empty() {
            return;
        }
        let mut digests: Vec<(Arc<str>, Arc<str>)> = self
            .pairs
            .drain()
            .filter_map(|(image, pair)| match pair {
                Pair::Ready { digest, .. } if !digest.is_empty() => Some((image, digest)),
                // What is not for this node must not count as there when the mark is trusted.
                Pair::NotForNode { .. } => Some((image, NOT_FOR_NODE.into())),
                _ => None,
            })
            .collect();
        digests.sort_unstable();
        self.digests = shared(&digests);
        self.pairs.shrink_to_fit();
    }
}

/// Stands in the place of a digest.
pub(super) const NOT_FOR_NODE: &str = "-";

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(digest: &str) -> Pair {
        Pair::Ready {
            digest: digest.into(),
            pins: 0,
            at: Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn another_boot_voids_what_is_known() {
        let mut known = NodePairs::default();
        known.of_boot("1").pairs.insert("a".into(), ready("sha256:1"));
        assert_eq!(known.of_boot("1").pairs.len(), 1);
        assert!(known.of_boot("2").pairs.is_empty());
    }

    #[test]
    fn a_node_at_rest_keeps_its_digests_alone() {
        let mut known = NodePairs::default();
        known.pairs.insert("a".into(), ready("sha256:1"));
        known.pairs.insert("b".into(), ready(""));
        known.rest(|digests| digests.into());
        assert!(known.pairs.is_empty());
        assert_eq!(known.digests.len(), 1);
        known.rest(|digests| digests.into());
        assert_eq!(known.digests.len(), 1, "resting twice forgets nothing");
    }
}
