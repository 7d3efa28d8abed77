//! The words in which reasons and stages are shown to people.

use crate::v1::{FailureReason, Stage};

impl FailureReason {
    /// The reason in the form of the API conventions, such as `RehearsalFailed`.
    pub fn camel_case(self) -> String {
        camel(self.as_str_name(), "FAILURE_REASON_")
    }

    /// Whether another try without any change by an operator may end otherwise.
    pub fn is_transient(self) -> bool {
        match self {
            Self::UnsupportedHost
            | Self::UnsupportedConfiguration
            | Self::HandlerConflict
            | Self::InvalidReference
            | Self::NotForThisNode => false,
            Self::Unspecified
            | Self::ContainerdUnreachable
            | Self::PayloadFailed
            | Self::RehearsalFailed
            | Self::SwapFailed
            | Self::RestartFailed
            | Self::VerificationFailed
            | Self::HandlerInUse
            | Self::RestartUnsafe
            | Self::Busy
            | Self::Internal
            | Self::ImageNotFound
            | Self::Unauthorized
            | Self::RegistryUnreachable
            | Self::RateLimited
            | Self::DeadlineExceeded
            | Self::NoSpace
            | Self::PullFailed
            | Self::DiskReserve
            | Self::DoesNotFit
            | Self::RegistryStalled
            | Self::RegistryOverloaded
            | Self::Cancelled => true,
        }
    }

    /// Whether the registry asks for patience, and so should be asked less by every node.
    pub fn asks_for_patience(self) -> bool {
        matches!(self, Self::RateLimited | Self::RegistryOverloaded)
    }
}

impl Stage {
    /// The stage as one lower-case word, such as `rehearse`.
    pub fn word(self) -> String {
        self.as_str_name()
            .trim_start_matches("STAGE_")
            .to_ascii_lowercase()
    }
}

fn camel(name: &str, prefix: &str) -> String {
    name.trim_start_matches(prefix)
        .split('_')
        .map(|word| {
            let mut letters = word.chars();
            letters
                .next()
                .map(|first| first.to_string() + &letters.as_str().to_ascii_lowercase())
                .unwrap_or_default()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_read_as_the_api_conventions_ask() {
        assert_eq!(FailureReason::RehearsalFailed.camel_case(), "RehearsalFailed");
        assert_eq!(FailureReason::NotForThisNode.camel_case(), "NotForThisNode");
        assert_eq!(Stage::Rehearse.word(), "rehearse");
    }
}
