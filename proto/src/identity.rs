//! Names in certificates.
//!
//! Every certificate carries one URI that says who its holder is, and a DNS name of its role, which lets an
//! ordinary TLS stack check the chain whatever address was dialled. The URI is what is compared.

/// Who a certificate's holder is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// A coordinator; all replicas share it.
    Coordinator,
    /// The agent of the node of this name.
    Agent(String),
}

/// DNS name in every agent's certificate.
pub const AGENT_DNS: &str = "agent.quartermaster.internal";
/// DNS name in every coordinator's certificate, beside those of its Service.
pub const COORDINATOR_DNS: &str = "coordinator.quartermaster.internal";

const COORDINATOR_URI: &str = "spiffe://quartermaster/coordinator";
const AGENT_URI: &str = "spiffe://quartermaster/agent/";

impl Identity {
    /// The URI that stands for this identity in a certificate.
    pub fn uri(&self) -> String {
        match self {
            Self::Coordinator => COORDINATOR_URI.to_owned(),
            Self::Agent(node) => format!("{AGENT_URI}{node}"),
        }
    }

    /// Reads an identity from a certificate's URI; `None` for anything that [`Identity::uri`] does not make.
    pub fn from_uri(uri: &str) -> Option<Self> {
        if uri == COORDINATOR_URI {
            return Some(Self::Coordinator);
        }
        let node = uri.strip_prefix(AGENT_URI)?;
        let valid = !node.is_empty()
            && node.len() <= 253
            && node
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
        valid.then(|| Self::Agent(node.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_uri() {
        for id in [
            Identity::Coordinator,
            Identity::Agent("worker-1.example.com".into()),
        ] {
            assert_eq!(Identity::from_uri(&id.uri()), Some(id));
        }
    }

    #[test]
    fn a_uri_that_is_not_ours_names_nobody() {
        for uri in [
            "",
            "spiffe://quartermaster/agent/",
            "spiffe://quartermaster/agent/a/b",
            "spiffe://quartermaster/agent/UPPER",
            "spiffe://other/coordinator",
            "spiffe://quartermaster/coordinator/",
        ] {
            assert_eq!(Identity::from_uri(uri), None, "{uri}");
        }
    }
}
