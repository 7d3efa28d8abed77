//! What was found, and how it is shown.

use serde::Serialize;

use crate::look::{Look, Tone, counted};

/// How it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Level {
    /// As it should be.
    Good,
    /// Worth knowing.
    Note,
    /// Something has to be done.
    Wrong,
    /// It could not be looked at.
    Unseen,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) what: String,
    /// What to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn good(what: impl Into<String>) -> Self {
        Self::new(Level::Good, what, "")
    }

    pub(super) fn note(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Level::Note, what, remedy)
    }

    pub(super) fn wrong(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Level::Wrong, what, remedy)
    }

    /// It could not be looked at, mostly for want of a right.
    pub(super) fn unseen(what: &str, why: &str) -> Self {
        Self::new(Level::Unseen, format!("{what} could not be looked at: {why}"), "")
    }

    fn new(level: Level, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            level,
            what: what.into(),
            remedy: remedy.into(),
        }
    }
}

/// All of it, and what it comes to.
pub(super) fn text(findings: &[Finding], look: Look) -> String {
    let mut text = String::new();
    for finding in findings {
        let (tone, mark) = match finding.level {
            Level::Good => (Tone::Good, "✓"),
            Level::Note => (Tone::Busy, "!"),
            Level::Wrong => (Tone::Bad, "✗"),
            Level::Unseen => (Tone::Dim, "?"),
        };
        text += &look.marked(tone, mark, &finding.what);
        if !finding.remedy.is_empty() {
            let remedy = look.wrapped(&finding.remedy, 4);
            text += &format!("  {} {}", look.paint(Tone::Dim, "→"), remedy.trim_start());
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let unseen = match count(Level::Unseen) {
        0 => String::new(),
        some => format!(" {} could not be looked at.", counted(some, "thing")),
    };
    let end = match count(Level::Wrong) {
        0 => look.paint(Tone::Good, "Nothing is wrong."),
        1 => look.paint(Tone::Bad, "1 thing is wrong."),
        some => look.paint(Tone::Bad, &format!("{some} things are wrong.")),
    };
    text + &format!("\n{end}{unseen}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_has_its_mark_and_what_is_wrong_says_what_to_do() {
        let findings = [
            Finding::good("Kubernetes 1.34"),
            Finding::wrong("nobody leads", "look at the pods"),
            Finding::unseen("the coordinator's rights", "subjectaccessreviews is forbidden"),
        ];
        assert_eq!(
            text(&findings, Look::plain(None)),
            "✓ Kubernetes 1.34\n\
             ✗ nobody leads\n\
             \u{20} → look at the pods\n\
             ? the coordinator's rights could not be looked at: subjectaccessreviews is forbidden\n\
             \n\
             1 thing is wrong. 1 thing could not be looked at.\n"
        );
        assert!(text(&findings[..1], Look::plain(None)).ends_with("\nNothing is wrong.\n"));
    }
}
