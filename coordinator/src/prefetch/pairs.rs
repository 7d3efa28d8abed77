//! What is known of images on nodes.

use std::collections::HashMap;

use jiff::Timestamp;
use quartermaster_proto::v1::FailureReason;

/// What is known of the images of one node. It is lost with the process, and read back from the node's
/// annotation as far as that says that all is there.
#[derive(Debug, Clone, Default)]
pub struct NodePairs {
    /// The boot that this knowledge is of; another boot voids it.
    pub boot_id: String,
    /// By normalised reference; one that is absent is not known.
    pub pairs: HashMap<String, Pair>,
}

/// One image on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pair {
    /// Being pulled, or about to be.
    Pulling,
    /// There, as CRI said.
    Ready {
        /// `repo@sha256:…`, or empty.
        digest: String,
        /// Bytes that were pulled; 0 when it was there before.
        pulled: u64,
        /// When CRI said so.
        at: Timestamp,
    },
    /// Missing after its attempts.
    Failed(PairFailure),
}

/// Why an image is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairFailure {
    /// Category.
    pub reason: FailureReason,
    /// Words of the registry or of containerd.
    pub message: String,
    /// When the last attempt ended.
    pub at: Timestamp,
}

impl NodePairs {
    /// What is known in the boot `boot_id`; knowledge of another boot is dropped.
    pub fn of_boot(&mut self, boot_id: &str) -> &mut Self {
        if self.boot_id != boot_id {
            self.pairs.clear();
            boot_id.clone_into(&mut self.boot_id);
        }
        self
    }
}
