//! What wakes the engine.

use std::collections::BTreeMap;
use std::time::Duration;

use quartermaster_proto::v1::provision_event::Event as StageEvent;
use tonic::transport::Channel;

use super::feeds::AgentPod;
use super::pulls::ImageReport;
use super::releases::Released;
use super::writes::WriteError;
use crate::control::Control;
use crate::node::{NodeFacts, Outcome, Version, Work};
use crate::others::DeploymentFacts;
use crate::prefetch::{PrefetchFacts, PrefetchStatus, Trouble, WorkloadFacts, WorkloadKind};

type Key = (String, String);

/// A change of one kind of object.
#[derive(Debug)]
pub(super) enum Change<K, V> {
    /// It is so now.
    Set(K, V),
    /// It is gone.
    Gone(K),
    /// These are all there are: the feed was listed, at its start or after it was lost.
    Reset(BTreeMap<K, V>),
}

/// What wakes the engine.
#[derive(Debug)]
pub(super) enum Input {
    Node(Change<String, NodeFacts>),
    Prefetch(Change<Key, PrefetchFacts>),
    Workload(WorkloadKind, Change<Key, WorkloadFacts>),
    /// The ConfigMap of what people have told us.
    Control(Change<String, Control>),
    /// Deployments that may be operators, from one of the places where they are looked for.
    Operator(usize, Change<Key, DeploymentFacts>),
    /// Something of the cluster that is to be told.
    Seen {
        reason: &'static str,
        words: String,
    },
    /// Agent pods, by their own name.
    Agent(Change<String, AgentPod>),
    /// An agent was dialled.
    Linked {
        node: String,
        pod_uid: String,
        result: Result<Channel, String>,
    },
    /// An agent told of a stage of its work.
    Stage {
        node: String,
        work: Work,
        event: StageEvent,
    },
    /// An order came to its end.
    Finished {
        node: String,
        work: Work,
        outcome: Outcome,
        took: Duration,
    },
    /// An agent told of an image.
    Image {
        node: String,
        report: ImageReport,
    },
    /// The stream of a pull came to its end, or was lost.
    PullEnded {
        node: String,
        lost: bool,
    },
    /// Pins that nobody wants were let go; `None` where that could not be finished.
    Released {
        node: String,
        released: Option<Released>,
    },
    /// Secrets for a Prefetch were read, or could not be.
    Secrets {
        key: Key,
        trouble: Option<Trouble>,
    },
    /// Marks were written on a Node; what the API server answered.
    NodeWritten {
        node: String,
        result: Result<NodeFacts, WriteError>,
    },
    /// The status of a Prefetch was written.
    StatusWritten {
        key: Key,
        result: Result<(PrefetchStatus, Version), WriteError>,
    },
}
