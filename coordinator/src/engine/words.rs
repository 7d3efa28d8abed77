//! Texts that many nodes report alike, kept once.

use std::collections::HashSet;
use std::sync::Arc;

/// So many texts are kept at most; a registry whose words differ every time is not worth more.
const MOST: usize = 1000;

/// Keeps one copy of each text.
#[derive(Debug, Default)]
pub(super) struct Words {
    kept: HashSet<Arc<str>>,
}

impl Words {
    /// The copy of a text that all share.
    pub(super) fn shared(&mut self, text: &str) -> Arc<str> {
        if let Some(kept) = self.kept.get(text) {
            return kept.clone();
        }
        if self.kept.len() >= MOST {
            self.kept.clear();
        }
        let text: Arc<str> = text.into();
        self.kept.insert(text.clone());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_text_is_kept_once_and_all_texts_have_a_bound() {
        let mut words = Words::default();
        let (one, two) = (words.shared("a"), words.shared("a"));
        assert!(Arc::ptr_eq(&one, &two));
        for i in 0..3 * MOST {
            words.shared(&i.to_string());
        }
        assert!(words.kept.len() <= MOST);
    }
}
