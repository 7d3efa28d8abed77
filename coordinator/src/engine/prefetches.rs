//! The engine's dealings with Prefetches: what they want of nodes, and the status that tells of it.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use tracing::{error, info};

use super::input::Change;
use super::writes::WriteError;
use super::{Engine, Key, Subject};
use crate::node::Version;
use crate::prefetch::{
    Cover, DeploymentFacts, Pair, PrefetchFacts, PrefetchPhase, PrefetchStatus, StatusInput, covers, resolve,
    status,
};

/// A status is computed at most this often, and written at most that often unless its phase changes.
const COMPUTE: SignedDuration = SignedDuration::from_millis(100);
const WRITE: SignedDuration = SignedDuration::from_secs(5);
const WRITE_PAUSE: SignedDuration = SignedDuration::from_secs(2);

impl Engine {
    pub(super) fn prefetch_changed(&mut self, change: Change<Key, PrefetchFacts>) {
        match change {
            Change::Set(key, facts) => {
                let known = self.prefetches.get(&key);
                if known.is_some_and(|k| k.uid == facts.uid && facts.version.is_stale_beside(k.version)) {
                    return;
                }
                let old = self.prefetches.insert(key.clone(), facts.clone());
                self.dirty_prefetches.insert(key.clone());
                // The answer to our own status write must not wake every node.
                let same = old.is_some_and(|old| {
                    PrefetchFacts {
                        status: facts.status.clone(),
                        ..old
                    } == facts
                });
                if !same {
                    self.resolved.remove(&key);
                    self.all_nodes_dirty();
                }
            }
            Change::Gone(key) => {
                self.prefetches.remove(&key);
                self.resolved.remove(&key);
                self.status.remove(&key);
                self.all_nodes_dirty();
            }
            Change::Reset(all) => {
                self.synced.prefetches = true;
                let gone: Vec<Key> = self
                    .prefetches
                    .keys()
                    .filter(|key| !all.contains_key(*key))
                    .cloned()
                    .collect();
                for key in gone {
                    self.prefetch_changed(Change::Gone(key));
                }
                for (key, facts) in all {
                    self.prefetch_changed(Change::Set(key, facts));
                }
            }
        }
    }

    pub(super) fn deployment_changed(&mut self, change: Change<Key, DeploymentFacts>) {
        match change {
            Change::Reset(all) => self.deployments = Some(all),
            Change::Set(key, facts) => {
                let known = self.deployments.get_or_insert_default();
                if known.get(&key) == Some(&facts) {
                    return;
                }
                known.insert(key, facts);
            }
            Change::Gone(key) => {
                if let Some(known) = self.deployments.as_mut() {
                    known.remove(&key);
                }
            }
        }
        self.resolved.clear();
        self.all_nodes_dirty();
        self.all_prefetches_dirty();
    }

    /// Resolves what was not resolved since its inputs changed. False while Deployments are being listed.
    fn resolve_all(&mut self) -> bool {
        let labelled = self.prefetches.values().any(|p| !p.labels.is_empty());
        if labelled && self.deployments.is_none() {
            return false;
        }
        for (key, prefetch) in &self.prefetches {
            if !self.resolved.contains_key(key) {
                let deployments = self.deployments.iter().flat_map(BTreeMap::values);
                self.resolved.insert(key.clone(), resolve(prefetch, deployments));
            }
        }
        true
    }

    /// The images that are wanted on a node, each with the shortest `retry_after`; `None` while that is
    /// not known.
    pub(super) fn wanted_images(&mut self, name: &str) -> Option<BTreeMap<String, SignedDuration>> {
        if !self.resolve_all() {
            return None;
        }
        let node = self.nodes.get(name)?;
        let mut wanted: BTreeMap<String, SignedDuration> = BTreeMap::new();
        for (key, prefetch) in &self.prefetches {
            // One that is not Ready keeps its mark: it is trusted again when it is back in the same boot.
            if covers(prefetch, node) == Cover::No {
                continue;
            }
            for image in self
                .resolved
                .get(key)
                .iter()
                .flat_map(|resolved| &resolved.images)
            {
                wanted
                    .entry(image.clone())
                    .and_modify(|shortest| *shortest = (*shortest).min(prefetch.retry_after))
                    .or_insert(prefetch.retry_after);
            }
        }
        Some(wanted)
    }

    pub(super) fn image(&mut self, node: &str, image: &str, pair: Pair) {
        let Some(facts) = self.nodes.get(node) else {
            return;
        };
        self.setup.metrics.image(&pair);
        match &pair {
            Pair::Ready { digest, pulled, .. } => info!(node, image, digest, pulled, "image ready"),
            Pair::Failed(failure) => info!(
                node,
                image,
                reason = failure.reason.camel_case(),
                message = failure.message,
                "image failed"
            ),
            Pair::Pulling => {}
        }
        let known = self
            .pairs
            .entry(node.to_owned())
            .or_default()
            .of_boot(&facts.boot_id);
        known.pairs.insert(image.to_owned(), pair);
        self.all_prefetches_dirty();
    }

    pub(super) fn settle_prefetches(&mut self, now: Timestamp) {
        if self.dirty_prefetches.is_empty() || !self.resolve_all() {
            return;
        }
        for key in std::mem::take(&mut self.dirty_prefetches) {
            self.settle_prefetch(&key, now);
        }
    }

    fn settle_prefetch(&mut self, key: &Key, now: Timestamp) {
        let (Some(prefetch), Some(resolved)) = (self.prefetches.get(key), self.resolved.get(key)) else {
            return;
        };
        let state = self.status.entry(key.clone()).or_default();
        if state.writing {
            return;
        }
        let rests = [state.computed_at.map(|at| at + COMPUTE), state.write_not_before];
        if let Some(at) = rests.into_iter().flatten().filter(|at| *at > now).max() {
            self.wake(at, Subject::Prefetch(key.clone()));
            return;
        }
        state.computed_at = Some(now);
        let runtime = &self.runtime;
        let trusted = |node: &crate::node::NodeFacts| runtime.get(&node.name).is_some_and(|r| r.settled);
        let fresh = status(StatusInput {
            prefetch,
            resolved,
            nodes: &self.nodes,
            pairs: &self.pairs,
            trusted: &trusted,
            now,
        });
        if fresh == prefetch.status {
            return;
        }
        let urgent = fresh.phase != prefetch.status.phase
            || fresh.observed_generation != prefetch.status.observed_generation;
        if let Some(at) = state
            .written_at
            .map(|at| at + WRITE)
            .filter(|at| *at > now && !urgent)
        {
            self.wake(at, Subject::Prefetch(key.clone()));
            return;
        }
        if fresh.phase != prefetch.status.phase {
            self.announce(prefetch, &fresh);
        }
        if let Some(state) = self.status.get_mut(key) {
            state.written_at = Some(now);
        }
        self.write_status(key, fresh);
    }

    fn announce(&self, prefetch: &PrefetchFacts, fresh: &PrefetchStatus) {
        let message = fresh
            .conditions
            .first()
            .map(|c| c.message.clone())
            .unwrap_or_default();
        info!(
            namespace = prefetch.namespace,
            prefetch = prefetch.name,
            phase = ?fresh.phase,
            message,
            "phase"
        );
        match fresh.phase {
            Some(PrefetchPhase::Ready) => self.notices.of_prefetch(prefetch, false, "Ready", &message),
            Some(PrefetchPhase::Failed) => {
                self.notices
                    .of_prefetch(prefetch, true, "ImagesMissing", &message);
            }
            _ => {}
        }
    }

    pub(super) fn status_written(
        &mut self,
        key: &Key,
        result: Result<(PrefetchStatus, Version), WriteError>,
    ) {
        let state = self.status.entry(key.clone()).or_default();
        state.writing = false;
        match result {
            Ok((status, version)) => {
                if let Some(prefetch) = self.prefetches.get_mut(key) {
                    prefetch.status = status;
                    prefetch.version = version;
                }
            }
            Err(WriteError::Gone) => return,
            Err(WriteError::Failed(error)) => {
                error!(
                    namespace = key.0,
                    prefetch = key.1,
                    error,
                    "a status could not be written; it is tried again"
                );
                state.write_not_before = Some(Timestamp::now() + WRITE_PAUSE);
            }
        }
        self.dirty_prefetches.insert(key.clone());
    }
}
