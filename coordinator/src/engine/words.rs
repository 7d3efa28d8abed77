//! What many nodes report alike, kept once: words of a registry, digests, and whole lists of digests.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

/// So many are kept at most; what differs every time is not worth more.
const MOST: usize = 4096;

/// Keeps one copy of each.
#[derive(Debug)]
pub(super) struct Shared<T: ?Sized> {
    kept: HashSet<Arc<T>>,
}

impl<T: ?Sized + Eq + Hash> Default for Shared<T> {
    fn default() -> Self {
        Self { kept: HashSet::new() }
    }
}

impl<T: ?Sized + Eq + Hash> Shared<T> {
    /// The copy that all share.
    pub(super) fn of<'a>(&mut self, one: &'a T) -> Arc<T>
    where
        Arc<T>: From<&'a T>,
    {
        if let Some(kept) = self.kept.get(one) {
            return kept.clone();
        }
        if self.kept.len() >= MOST {
            self.kept.retain(|kept| Arc::strong_count(kept) > 1);
        }
        if self.kept.len() >= MOST {
            self.kept.clear();
        }
        let one = Arc::from(one);
        self.kept.insert(Arc::clone(&one));
        one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_kept_once_and_all_have_a_bound() {
        let mut words = Shared::<str>::default();
        let (one, two) = (words.of("a"), words.of("a"));
        assert!(Arc::ptr_eq(&one, &two));
        let held: Vec<_> = (0..3 * MOST).map(|i| words.of(&i.to_string())).collect();
        assert!(words.kept.len() <= MOST);
        assert_eq!(&*held[7], "7");
    }

    #[test]
    fn what_nobody_holds_any_more_makes_room_first() {
        let mut words = Shared::<str>::default();
        let held = words.of("held");
        (0..MOST).for_each(|i| drop(words.of(&i.to_string())));
        assert!(Arc::ptr_eq(&held, &words.of("held")));
    }
}
