//! The engine's dealings with Prefetches: what they want of nodes, and the status that tells of it.

use std::collections::HashSet;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use tracing::{error, info};

use super::input::Change;
use super::writes::WriteError;
use super::{Engine, Key, Subject};
use crate::node::Version;
use crate::prefetch::{
    Claim, Cover, Excess, PrefetchFacts, PrefetchPhase, PrefetchStatus, Standing, StatusInput, Trouble,
    Wanted, claimants, covers, over_budget, resolve, status, wanted,
};
use crate::reason;

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
                // What the status said before this process began is where it goes on.
                for image in &facts.status.images {
                    if let Some(digest) = &image.digest
                        && !self.newest.contains_key(&*image.image)
                    {
                        self.newest
                            .insert(image.image.as_str().into(), digest.as_str().into());
                    }
                }
                let state = self.status.entry(key.clone()).or_default();
                state
                    .bytes_before
                    .get_or_insert_with(|| u64::try_from(facts.status.bytes_pulled).unwrap_or(0));
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
                    self.resolve_anew(&key);
                }
            }
            Change::Gone(key) => {
                self.prefetches.remove(&key);
                self.resolve_anew(&key);
                self.status.remove(&key);
                self.dirty_prefetches.remove(&key);
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

    /// What a Prefetch wants has to be looked up again.
    pub(super) fn resolve_anew(&mut self, key: &Key) {
        self.resolved.remove(key);
        self.over.remove(key);
        self.shared_wants.clear();
        self.dirty_prefetches.insert(key.clone());
        self.all_nodes_dirty();
    }

    pub(super) fn all_resolved_anew(&mut self) {
        self.resolved.clear();
        self.over.clear();
        self.shared_wants.clear();
        self.all_prefetches_dirty();
        self.all_nodes_dirty();
    }

    /// Resolves what was not resolved since its inputs changed. False while workloads are being listed.
    fn resolve_all(&mut self) -> bool {
        let unknown = self
            .prefetches
            .values()
            .flat_map(PrefetchFacts::kinds)
            .any(|kind| !self.workloads.knows(kind));
        if unknown {
            return false;
        }
        if self.resolved.len() == self.prefetches.len() && self.over.len() == self.prefetches.len() {
            return true;
        }
        let limits = &self.setup.limits;
        for (key, prefetch) in &self.prefetches {
            let resolved = self.resolved.entry(key.clone()).or_insert_with(|| {
                let mut resolved = resolve(prefetch, |kind| self.workloads.of(kind), limits);
                let meant = || {
                    self.nodes
                        .values()
                        .filter(|n| covers(prefetch, n) != Cover::No)
                        .count()
                };
                if limits.nodes > 0 && resolved.excess.is_none() {
                    let nodes = meant();
                    resolved.excess = (nodes > limits.nodes).then_some(Excess::Nodes(nodes, limits.nodes));
                }
                resolved
            });
            self.over
                .entry(key.clone())
                .or_insert_with(|| over_budget(resolved, &self.sizes, limits.bytes));
        }
        let wanted: HashSet<&Arc<str>> = self.resolved.values().flat_map(|r| r.images.keys()).collect();
        self.newest.retain(|image, _| wanted.contains(image));
        self.sizes.retain(|image, _| wanted.contains(image));
        true
    }

    /// What is wanted on a node; `None` while that is not known.
    pub(super) fn wanted_on(&mut self, name: &str) -> Option<Arc<Wanted>> {
        if !self.resolve_all() {
            return None;
        }
        let node = self.nodes.get(name)?;
        if self.control.removing {
            return Some(Arc::default());
        }
        let claims: Vec<Claim<'_>> = self
            .prefetches
            .iter()
            .filter_map(|(key, prefetch)| {
                Some(Claim {
                    prefetch,
                    resolved: self.resolved.get(key)?,
                    over: self.over.get(key)?,
                })
            })
            .collect();
        let places = claimants(node, claims.iter().copied());
        if let Some(shared) = self.shared_wants.get(&places) {
            return Some(shared.clone());
        }
        let these = places.iter().map(|place| (*place, claims[*place]));
        let fresh = Arc::new(wanted(these, &self.sizes));
        self.shared_wants.insert(places, fresh.clone());
        Some(fresh)
    }

    pub(super) fn secrets_read(&mut self, key: &Key, trouble: Option<Trouble>) {
        let Some(prefetch) = self.prefetches.get(key) else {
            return;
        };
        let state = self.status.entry(key.clone()).or_default();
        if state.trouble == trouble {
            return;
        }
        if let Some(trouble) = &trouble {
            self.notices
                .of_prefetch(prefetch, true, trouble.reason, &trouble.message);
        }
        state.trouble = trouble;
        self.dirty_prefetches.insert(key.clone());
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
        let pulls = state.engaged > 0 || !state.waiting.is_empty();
        let rest = rest(state.cost, self.prefetches.len(), pulls);
        let rests = [state.computed_at.map(|at| at + rest), state.write_not_before];
        if let Some(at) = rests.into_iter().flatten().filter(|at| *at > now).max() {
            self.wake(at, Subject::Prefetch(key.clone()));
            return;
        }
        state.computed_at = Some(now);
        let bytes = state.bytes_before.unwrap_or(0) + state.bytes;
        let trouble = state.trouble.clone();
        let runtime = &self.runtime;
        let standing = |node: &crate::node::NodeFacts| match runtime.get(&node.name) {
            Some(runtime) if runtime.settled => Standing::Settled,
            Some(runtime) if runtime.unreachable => Standing::Unreachable,
            _ => Standing::Open,
        };
        let none = HashSet::new();
        let begun = std::time::Instant::now();
        let fresh = status(StatusInput {
            prefetch,
            resolved,
            over: self.over.get(key).unwrap_or(&none),
            trouble: trouble.as_ref(),
            nodes: &self.nodes,
            pairs: &self.pairs,
            standing: &standing,
            newest: &self.newest,
            bytes,
            now,
        });
        let state = self.status.entry(key.clone()).or_default();
        state.cost = SignedDuration::try_from(begun.elapsed()).unwrap_or_default();
        let meant = usize::try_from(fresh.nodes.wanted).ok();
        if state.meant != meant {
            // Another number may pull at once.
            state.meant = meant;
            self.dirty_nodes.extend(state.waiting.iter().cloned());
        }
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
            Some(PrefetchPhase::Ready) => self.notices.of_prefetch(prefetch, false, reason::READY, &message),
            Some(PrefetchPhase::Failed) => {
                self.notices
                    .of_prefetch(prefetch, true, reason::IMAGES_MISSING, &message);
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

/// How long the status of one of so many Prefetches rests after it was computed, which took `cost`: at most a twentieth of
/// the time goes into all of them, a hundredth while nodes pull, whose last one ends that; or, where they would come later
/// than they are written then, half of it.
fn rest(cost: SignedDuration, prefetches: usize, pulls: bool) -> SignedDuration {
    let all = cost * i32::try_from(prefetches).unwrap_or(i32::MAX);
    let part = if pulls { 100 } else { 20 };
    COMPUTE.max((all * part).min(WRITE.max(all * 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_rest_the_longer_the_more_of_them_there_are_and_the_more_they_cost() {
        let rest =
            |millis, prefetches| rest(SignedDuration::from_millis(millis), prefetches, false).as_millis();
        assert_eq!(rest(0, 1), 100);
        assert_eq!(rest(10, 1), 200);
        // 198 Prefetches on 989 nodes.
        assert_eq!(rest(1, 198), 3960);
        assert_eq!(rest(50, 198), 19_800);
        let pulling = super::rest(SignedDuration::from_millis(10), 1, true);
        assert_eq!(pulling.as_millis(), 1000);
    }
}
