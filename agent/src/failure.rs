//! A failure in the words that an operator sees, whichever stage it comes from.

use quartermaster_proto::v1::{self, FailureReason, Stage};

const MAX_MESSAGE: usize = 4096;
const MAX_USERS: usize = 20;

/// What an error means to an operator.
pub trait Reported: std::error::Error {
    /// Its category.
    fn reason(&self) -> FailureReason;
    /// What can be done now; may be empty.
    fn remedy(&self) -> String {
        String::new()
    }
}

/// A command that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The category.
    pub reason: FailureReason,
    /// What failed, where and why.
    pub message: String,
    /// What can be done now; may be empty.
    pub remedy: String,
    /// The stage in which it failed.
    pub stage: Stage,
    /// Something was changed and has been put back.
    pub rolled_back: bool,
    /// `namespace/name` of pods that stand in the way.
    pub users: Vec<String>,
}

impl Failure {
    /// A failure of `stage` from the error that made it.
    pub fn at(stage: Stage, error: &impl Reported) -> Self {
        Self {
            reason: error.reason(),
            message: error.to_string(),
            remedy: error.remedy(),
            stage,
            rolled_back: false,
            users: Vec::new(),
        }
    }

    /// The failure as it goes over the wire, its texts cut to what the protocol allows.
    pub fn to_wire(&self) -> v1::Failure {
        v1::Failure {
            reason: self.reason.into(),
            message: cut(&self.message, MAX_MESSAGE),
            remedy: cut(&self.remedy, MAX_MESSAGE),
            stage: self.stage.into(),
            rolled_back: self.rolled_back,
            users: self.users.iter().take(MAX_USERS).cloned().collect(),
            user_count: u32::try_from(self.users.len()).unwrap_or(u32::MAX),
        }
    }
}

/// The first `limit` bytes of a text, cut between characters.
pub(crate) fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let mark = "…";
    let mut end = limit.saturating_sub(mark.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{mark}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("short", 10), "short");
        let long = "ä".repeat(100);
        let short = cut(&long, 50);
        assert!(short.len() <= 50 && short.ends_with('…'), "{short}");
    }

    #[test]
    fn the_wire_names_at_most_twenty_users_and_counts_all() {
        let failure = Failure {
            reason: FailureReason::HandlerInUse,
            message: "x".repeat(10_000),
            remedy: String::new(),
            stage: Stage::Plan,
            rolled_back: false,
            users: (0..30).map(|n| format!("default/pod-{n}")).collect(),
        };
        let wire = failure.to_wire();
        assert_eq!((wire.users.len(), wire.user_count), (20, 30));
        assert!(wire.message.len() <= 4096);
    }
}
