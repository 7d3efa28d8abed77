//! What is reported of an order while it is carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::{FailureReason, PullWay};

use super::layers::Layer;
use super::pins::Pinned;

/// An image that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// `repo@sha256:…` as CRI reports it, empty where it reports none.
    pub digest: String,
    /// It was there before.
    pub was_present: bool,
    /// In bytes, as CRI reports it.
    pub size: u64,
    /// From the first look to the proof.
    pub took: Duration,
    /// Bytes that came for it.
    pub fetched: u64,
    /// What became of its pins.
    pub pinned: Pinned,
    /// How it was pulled; unspecified when it was not.
    pub way: PullWay,
    /// How often it was tried.
    pub attempts: u32,
}

/// How far an image is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// From 1.
    pub attempt: u32,
    /// Bytes that are there.
    pub done: u64,
    /// Bytes in all; 0 while it is not known.
    pub total: u64,
    /// By digest.
    pub layers: BTreeMap<String, Layer>,
}

/// An image that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The category.
    pub reason: FailureReason,
    /// In containerd's and the registry's own words.
    pub message: String,
    /// How often it was tried.
    pub attempts: u32,
}

/// What happens to an image, under the name as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageEvent {
    /// Its pull begins, or is this far.
    Progress(String, Progress),
    /// It is there.
    Ready(String, Ready),
    /// It is not.
    Failed(String, Failed),
}

/// How an order ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// References whose image is there.
    pub ready: u32,
    /// References whose image is not.
    pub failed: u32,
    /// Bytes that came.
    pub fetched: u64,
    /// Pins of ours are on the node.
    pub pins_held: bool,
}

/// Where reports go.
pub type Sink = Arc<dyn Fn(ImageEvent) + Send + Sync>;
