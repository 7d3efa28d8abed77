//! What agents tell of images: each result is noted and counted, and what is left is decided anew.

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::v1::FailureReason;
use tracing::{debug, info, warn};

use super::Engine;
use super::pulls::ImageReport;
use super::releases::Released;
use crate::prefetch::{Pair, PairFailure, host};

/// After a pull or release whose stream was lost.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);

impl Engine {
    /// An agent told of an image.
    pub(super) fn image(&mut self, name: &str, report: ImageReport) {
        let ImageReport { image, result, at } = report;
        let (Some(node), Some(runtime)) = (self.nodes.get(name), self.runtime.get_mut(name)) else {
            return;
        };
        // Only what we asked for is ours to count; by its own name here, all nodes share one text.
        let Some((image, pins)) = runtime.ordered.remove_entry(&*image) else {
            return;
        };
        if matches!(&result, Err(failed) if failed.reason == FailureReason::Cancelled) {
            // No failure of the image: should it be wanted again by now, it is pulled without a wait.
            if let Some(known) = self.pairs.get_mut(name) {
                known.pairs.remove(&image);
            }
            return;
        }
        let keys = runtime.ordered_by.clone();
        let fetched = result.as_ref().map_or(0, |ready| ready.fetched);
        match &result {
            Ok(ready) if ready.was_present => self.reports.unchanged(name),
            Ok(ready) => self.reports.line(
                name,
                format!("  {image}: pulled, {} bytes fetched", ready.fetched),
            ),
            Err(failed) => self.reports.line(
                name,
                format!("  {image}: {}: {}", failed.reason.camel_case(), failed.message),
            ),
        }
        let pair = match result {
            Ok(ready) => {
                if ready.was_present {
                    debug!(
                        node = name,
                        image = &*image,
                        digest = &*ready.digest,
                        "image was there"
                    );
                } else {
                    info!(
                        node = name,
                        image = &*image,
                        digest = &*ready.digest,
                        fetched = ready.fetched,
                        "image ready"
                    );
                }
                if ready.size > 0 && self.sizes.insert(image.clone(), ready.size) != Some(ready.size) {
                    // Smallest first, and the bytes of a Prefetch, depend on it.
                    self.shared_wants.clear();
                    self.over.clear();
                }
                if !ready.was_present || !self.newest.contains_key(&image) {
                    self.registries.served(host(&image), at);
                    if !ready.digest.is_empty() {
                        self.newest.insert(image.clone(), self.words.of(&ready.digest));
                    }
                }
                for key in &keys {
                    let resolved = self.resolved.get(key);
                    if ready.fetched > 0 && resolved.is_some_and(|r| r.images.contains_key(&image)) {
                        self.status.entry(key.clone()).or_default().bytes += ready.fetched;
                    }
                }
                Pair::Ready {
                    digest: self.words.of(&ready.digest),
                    pins,
                    at,
                }
            }
            Err(failed) if failed.reason == FailureReason::NotForThisNode => {
                info!(node = name, image = &*image, "image is not for this node");
                Pair::NotForNode { at }
            }
            Err(failed) => {
                warn!(
                    node = name,
                    image = &*image,
                    reason = failed.reason.camel_case(),
                    message = failed.message,
                    "image failed"
                );
                if failed.reason.asks_for_patience() {
                    let host = host(&image);
                    let pulling = self.pulling_from.get(host).copied().unwrap_or(1);
                    self.registries.refused(host, failed.retry_after, pulling, at);
                }
                Pair::Failed(Box::new(PairFailure {
                    reason: failed.reason,
                    message: self.words.of(&failed.message),
                    at,
                }))
            }
        };
        self.setup.metrics.image(&pair, fetched);
        self.pairs
            .entry(name.to_owned())
            .or_default()
            .of_boot(&node.boot_id)
            .pairs
            .insert(image, pair);
        self.dirty_prefetches.extend(keys);
    }

    pub(super) fn pull_ended(&mut self, name: &str, lost: bool) {
        let end = if lost {
            "the agent was lost; what is missing is ordered again"
        } else {
            "done"
        };
        let end = format!("{:.0} {end}", Timestamp::now());
        if lost {
            self.reports.end(name, end);
        } else {
            self.reports.end_if_anything_happened(name, end);
        }
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.pulling = false;
        runtime.ordered.clear();
        self.leave_registries(name);
        if lost {
            warn!(
                node = name,
                "the stream of a pull was lost; what is missing is ordered again"
            );
            self.order_lost(name);
        }
        if let Some(known) = self.pairs.get_mut(name) {
            known.pairs.retain(|_, pair| *pair != Pair::Pulling);
        }
        self.dirty_nodes.insert(name.to_owned());
        self.all_prefetches_dirty();
    }

    fn order_lost(&mut self, name: &str) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pull_not_before = Some(Timestamp::now() + PAUSE);
            runtime.agent.channel = None;
        }
    }

    pub(super) fn released(&mut self, name: &str, released: Option<Released>) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pulling = false;
        }
        self.dirty_nodes.insert(name.to_owned());
        let Some(done) = released else {
            self.order_lost(name);
            return;
        };
        info!(
            node = name,
            released = done.released,
            removed = done.removed,
            "pins that nobody wants any more are released"
        );
        if let Some(known) = self.pairs.get_mut(name) {
            known.released = Some(done.hash);
        }
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.owed_pins = Some(done.held_until.map(|until| format!("{until:.0}")));
        }
    }

    /// Writes what is left of pins after a release.
    pub(super) fn pay_pins(&mut self, name: &str) {
        if let Some(held) = self.owed_pins(name) {
            self.mark(name, |marks| marks.pins_held = held);
        }
    }

    /// What the Node has to say of pins after a release, for who writes it at once; it must not get lost while another
    /// write is under way.
    pub(super) fn owed_pins(&mut self, name: &str) -> Option<Option<String>> {
        let runtime = self.runtime.get_mut(name)?;
        if runtime.writing {
            return None;
        }
        runtime.owed_pins.take()
    }
}
