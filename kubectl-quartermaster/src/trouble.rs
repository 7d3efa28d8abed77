//! What can go wrong between a person and the leader, in words that say what to do.

use kube::client::UpgradeConnectionError;

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// The kubeconfig can't be used.
    #[error("The kubeconfig can't be used: {0}")]
    Kubeconfig(String),
    /// RBAC says no.
    #[error(
        "You may not {what}{}. An administrator can give you the role for it: manifests/samples/people.yaml.",
        in_words(.words)
    )]
    Forbidden {
        /// What was tried.
        what: String,
        /// The API server's own words, where there are any.
        words: String,
    },
    /// The API server does not know who it is.
    #[error("The API server does not know you (401): log in again, or look at the user in your kubeconfig.")]
    Unknown,
    /// There is nothing of Quartermaster where it is looked for.
    #[error(
        "Quartermaster was not found in the namespace {0}: it has no Lease quartermaster-coordinator. If it is \
         installed in another one, name it with --namespace."
    )]
    NotInstalled(String),
    /// Nobody leads, or the leader is not reached.
    #[error(
        "The leader in the namespace {namespace} could not be asked: {why}. See: kubectl get pods,lease -n {namespace}"
    )]
    NoLeader {
        /// Where it was looked for.
        namespace: String,
        /// What was in the way.
        why: String,
    },
    /// The leader said no.
    #[error("{0}")]
    Refused(String),
    /// The API server said no, or was not reached.
    #[error("Can't {what}: {why}")]
    Api {
        /// What was tried.
        what: String,
        /// Why.
        why: String,
    },
}

impl Trouble {
    /// Reads what the API server said to something that was tried.
    pub(crate) fn of(what: &str, error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 403 => Self::Forbidden {
                what: what.to_owned(),
                words: status.message.clone(),
            },
            kube::Error::Api(status) if status.code == 401 => Self::Unknown,
            kube::Error::Api(status) => Self::Api {
                what: what.to_owned(),
                why: status.message.clone(),
            },
            kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status))
                if status.as_u16() == 403 =>
            {
                Self::Forbidden {
                    what: what.to_owned(),
                    words: String::new(),
                }
            }
            other => Self::Api {
                what: what.to_owned(),
                why: chain(other),
            },
        }
    }

    /// Whether it may be otherwise in a moment.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::NoLeader { .. })
    }
}

/// An error with all that caused it, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}

fn in_words(words: &str) -> String {
    if words.is_empty() {
        String::new()
    } else {
        format!(" ({words})")
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn api(code: u16, message: &str) -> kube::Error {
        kube::Error::Api(Box::new(Status {
            code,
            message: message.into(),
            ..Status::default()
        }))
    }

    #[test]
    fn who_may_not_is_told_what_and_who_can_help() {
        let error = UpgradeConnectionError::ProtocolSwitch(http::StatusCode::FORBIDDEN);
        let trouble = Trouble::of(
            "exec into pods of the namespace quartermaster",
            &kube::Error::UpgradeConnection(error),
        );
        assert_eq!(
            trouble.to_string(),
            "You may not exec into pods of the namespace quartermaster. An administrator can give you the role for it: \
             manifests/samples/people.yaml."
        );
        let trouble = Trouble::of("read the node a", &api(403, "nodes \"a\" is forbidden"));
        assert!(
            trouble
                .to_string()
                .starts_with("You may not read the node a (nodes \"a\" is forbidden). An administrator")
        );
    }

    #[test]
    fn only_what_may_be_otherwise_in_a_moment_is_tried_again() {
        let nobody = Trouble::NoLeader {
            namespace: "q".into(),
            why: "nobody holds the Lease".into(),
        };
        assert!(nobody.may_pass());
        for code in [401, 403, 500] {
            assert!(!Trouble::of("x", &api(code, "no")).may_pass(), "{code}");
        }
    }
}
