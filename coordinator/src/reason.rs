//! The words that the coordinator gives as reasons, on conditions and Events: all of them, so that none is without a
//! paragraph in docs/troubleshooting.md. Those of agents are `FailureReason` of the protocol.

macro_rules! reasons {
    ($($name:ident = $text:literal, $means:literal;)+) => {
        $(#[doc = $means] pub const $name: &str = $text;)+
        /// All of them.
        pub const ALL: &[&str] = &[$($text),+];
    };
}

reasons! {
    PROVISIONED = "Provisioned", "A module ran through the handler.";
    VERIFIED = "Verified", "It did so again.";
    VERIFYING = "Verifying", "It is not known whether what was there still runs.";
    INSTALLING = "Installing", "The handler is being installed.";
    REMOVING = "Removing", "The handler is being removed.";
    UNPROVISIONED = "Unprovisioned", "The handler was removed.";
    REMOVAL_BLOCKED = "RemovalBlocked", "Pods use a handler that is to go.";
    AGENT_UNAVAILABLE = "AgentUnavailable", "A summoned agent does not come.";
    ANOTHER_OPERATOR = "AnotherOperator", "Another operator provisions nodes too.";
    LEFTOVERS = "Leftovers", "Something of another operator is still there.";
    FOREIGN_RUNTIME_CLASS = "ForeignRuntimeClass", "A RuntimeClass of one of our names leads elsewhere.";
    GATE_DEADLINE_PASSED = "GateDeadlinePassed", "A new node takes pods although not all is there.";
    ROLLOUT_HALTED = "RolloutHalted", "So many restarts in a row have failed.";
    READY = "Ready", "A Prefetch has all of its images.";
    ALL_IMAGES_READY = "AllImagesReady", "Every image is on every node.";
    PULLING = "Pulling", "Images are being pulled.";
    WAITING = "Waiting", "Nothing has begun yet.";
    SUSPENDED = "Suspended", "The Prefetch says so itself.";
    INVALID_SPEC = "InvalidSpec", "The object can't be read.";
    IMAGES_REFUSED = "ImagesRefused", "No image may be pulled.";
    IMAGES_MISSING = "ImagesMissing", "Images could not be pulled.";
    NO_IMAGES = "NoImages", "No image is meant.";
    NO_NODES = "NoNodes", "No node is meant, or none can be served.";
    TOO_MANY_IMAGES = "TooManyImages", "More than the cluster allows for one Prefetch.";
    TOO_MANY_NODES = "TooManyNodes", "More than the cluster allows for one Prefetch.";
    TOO_MANY_BYTES = "TooManyBytes", "More than the cluster allows for one Prefetch.";
    NAMESPACE_FORBIDDEN = "NamespaceForbidden", "Workloads of other namespaces may not be followed.";
    REGISTRY_NOT_ALLOWED = "RegistryNotAllowed", "The cluster does not allow this repository.";
    INVALID_REFERENCE = "InvalidReference", "What is named is no image.";
    TAG_MOVED = "TagMoved", "The node has what the tag stood for earlier.";
    SECRET_FORBIDDEN = "SecretForbidden", "A pull secret may not be read.";
    SECRET_NOT_FOUND = "SecretNotFound", "A pull secret is not there.";
    SECRET_UNREADABLE = "SecretUnreadable", "A pull secret could not be read.";
    SECRET_INVALID = "SecretInvalid", "A pull secret is none.";
    NODE_NOT_READY = "NodeNotReady", "Nothing can be removed from a node that is not Ready.";
}
