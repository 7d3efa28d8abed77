//! What the operator of the cluster allows those who make Prefetches.

use crate::reason;
use std::fmt;

/// Bounds of every Prefetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Registries and repositories that may be pulled from, such as `registry.example.com` or
    /// `registry.example.com/team`; empty allows all.
    pub repositories: Vec<String>,
    /// Images of one Prefetch.
    pub images: usize,
    /// Nodes of one Prefetch; 0 is without bound.
    pub nodes: usize,
    /// Bytes of all images of one Prefetch on one node, as far as their sizes are known; 0 is without bound.
    pub bytes: u64,
    /// Whether workloads of other namespaces may be followed.
    pub across_namespaces: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            repositories: Vec::new(),
            images: 500,
            nodes: 0,
            bytes: 0,
            across_namespaces: true,
        }
    }
}

impl Limits {
    /// Whether a normalised reference may be pulled.
    pub fn allows(&self, image: &str) -> bool {
        self.repositories.is_empty()
            || self.repositories.iter().any(|allowed| {
                // At a border: "registry.example.com/team" must not allow "registry.example.com/teamster".
                image
                    .strip_prefix(allowed.trim_end_matches('/'))
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', ':', '@']))
            })
    }
}

/// A bound that a Prefetch exceeds: nothing of it is pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Excess {
    /// So many images, where so many are allowed.
    Images(usize, usize),
    /// So many nodes, where so many are allowed.
    Nodes(usize, usize),
    /// Workloads of other namespaces are asked for, and may not be followed.
    Namespaces,
}

impl Excess {
    /// The reason of the condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Images(..) => reason::TOO_MANY_IMAGES,
            Self::Nodes(..) => reason::TOO_MANY_NODES,
            Self::Namespaces => reason::NAMESPACE_FORBIDDEN,
        }
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Images(wanted, allowed) => write!(
                f,
                "{wanted} images are wanted, and this cluster allows {allowed} for one Prefetch; \
                 select fewer, or divide them among several"
            ),
            Self::Nodes(wanted, allowed) => write!(
                f,
                "{wanted} nodes are meant, and this cluster allows {allowed} for one Prefetch; \
                 narrow it with node_filter or nodes.selector"
            ),
            Self::Namespaces => f.write_str(
                "workloads of other namespaces are asked for, and this cluster allows a Prefetch only those of its \
                 own; name them with workloads, without namespaces",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_allowed_at_the_borders_of_its_path_only() {
        let limits = Limits {
            repositories: vec!["registry.example.com/team".into(), "quay.io/".into()],
            ..Limits::default()
        };
        for image in [
            "registry.example.com/team/app:1",
            "registry.example.com/team:1",
            "quay.io/a/b@sha256:1",
        ] {
            assert!(limits.allows(image), "{image}");
        }
        for image in [
            "registry.example.com/teamster/app:1",
            "registry.example.com/app:1",
            "quay.io.evil.example/a:1",
            "docker.io/library/quay.io:1",
        ] {
            assert!(!limits.allows(image), "{image}");
        }
        assert!(Limits::default().allows("docker.io/library/nginx:latest"));
    }
}
