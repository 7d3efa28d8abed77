//! What is known of the layers of an image while it is pulled.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// One layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Layer {
    /// Bytes that are there.
    pub offset: u64,
    /// Bytes in all; 0 while it is not known.
    pub total: u64,
}

impl Layer {
    fn is_whole(self) -> bool {
        self.total > 0 && self.offset >= self.total
    }
}

/// The layers of one image, filled by whoever sees the bytes come.
#[derive(Debug)]
pub(crate) struct Layers(Mutex<State>);

#[derive(Debug)]
struct State {
    layers: BTreeMap<String, Layer>,
    /// When anything was last seen to happen.
    moved: Instant,
    changes: u64,
}

/// The layers at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) layers: BTreeMap<String, Layer>,
    pub(crate) moved: Instant,
    /// Grows with every change.
    pub(crate) changes: u64,
}

impl Layers {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State {
            layers: BTreeMap::new(),
            moved: Instant::now(),
            changes: 0,
        }))
    }

    /// A layer is this far. It never goes back within an attempt: a look at the store may be older than one before.
    pub(crate) fn see(&self, digest: &str, seen: Layer) {
        let mut state = locked(&self.0);
        let known = state.layers.entry(digest.to_owned()).or_default();
        let next = Layer {
            offset: known.offset.max(seen.offset),
            total: known.total.max(seen.total),
        };
        if *known != next {
            *known = next;
            state.moved = Instant::now();
            state.changes += 1;
        }
    }

    /// Something happened that is no byte of a layer: a manifest came, a layer is being unpacked.
    pub(crate) fn stir(&self) {
        locked(&self.0).moved = Instant::now();
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = locked(&self.0);
        Snapshot {
            layers: state.layers.clone(),
            moved: state.moved,
            changes: state.changes,
        }
    }
}

/// A lock whose holder panicked guards nothing that could be half-changed here.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Snapshot {
    pub(crate) fn done(&self) -> u64 {
        self.layers.values().map(|layer| layer.offset).sum()
    }

    pub(crate) fn total(&self) -> u64 {
        self.layers.values().map(|layer| layer.total).sum()
    }

    /// Bytes that are still to come.
    pub(crate) fn missing(&self) -> u64 {
        self.layers
            .values()
            .map(|layer| layer.total.saturating_sub(layer.offset))
            .sum()
    }

    /// Whether all that is known is there, and so what happens is unpacking.
    pub(crate) fn is_whole(&self) -> bool {
        !self.layers.is_empty() && self.layers.values().all(|layer| layer.is_whole())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_only_grow_and_sum_up() {
        let layers = Layers::new();
        let at = |offset| Layer { offset, total: 10 };
        layers.see("a", at(4));
        layers.see("a", at(2));
        layers.see("b", at(10));
        let seen = layers.snapshot();
        assert_eq!((seen.done(), seen.total(), seen.missing()), (14, 20, 6));
        assert!(!seen.is_whole());
        layers.see("a", at(10));
        assert!(layers.snapshot().is_whole());
        let before = layers.snapshot().changes;
        layers.see("a", at(10));
        assert_eq!(layers.snapshot().changes, before);
    }
}
