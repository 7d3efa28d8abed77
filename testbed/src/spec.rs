//! What a testbed is asked to be: its name and its nodes.

use std::str::FromStr;

use crate::versions;

/// The cluster that [`crate::Cluster::up`] makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Name of the testbed: it names the state folder and the cgroups, so that several stand side by side.
    pub name: String,
    /// The nodes, in the order of their addresses.
    pub nodes: Vec<NodeSpec>,
}

/// One node: `NAME=SERIES`, for example `worker-1=1.7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// Kubernetes' name of the node: a DNS subdomain. 63 characters at most, as the kubelet also makes it the value of a label.
    pub name: String,
    /// Series of containerd, as listed in [`versions::CONTAINERD`]: `1.6`, `1.7`, `2.1`, `2.4`.
    pub containerd: String,
}

/// Why a [`Spec`] can't be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The testbed's name is not a short DNS label.
    #[error(
        "the testbed's name {0:?} must be 1 to 20 lower-case letters, digits or dashes, and start with a letter"
    )]
    TestbedName(String),
    /// A node's name would be refused by Kubernetes.
    #[error(
        "the node name {0:?} is not a DNS subdomain (lower-case letters, digits, dashes and dots, 63 characters at most)"
    )]
    NodeName(String),
    /// A node is not written as NAME=SERIES.
    #[error("{0:?} does not name a node and its containerd; write it as worker-1=1.7")]
    Shape(String),
    /// No such containerd is known.
    #[error("node {node}: no containerd {asked:?} is known; there are {known}")]
    UnknownContainerd {
        /// The node.
        node: String,
        /// What it asked for.
        asked: String,
        /// What there is.
        known: String,
    },
    /// Two nodes have one name.
    #[error("two nodes are named {0}")]
    Twice(String),
    /// No nodes, or more than the address range holds.
    #[error("a testbed has 1 to {max} nodes, not {asked}")]
    Count {
        /// How many were asked for.
        asked: usize,
        /// How many there can be.
        max: usize,
    },
}

/// The most nodes that one testbed's address range holds.
pub const MAX_NODES: usize = 200;

impl Spec {
    /// A checked specification from a list such as `worker-1=1.7,worker-2=2.1`.
    ///
    /// # Errors
    /// [`SpecError`] says which part is wrong and how to write it.
    pub fn parse(name: &str, nodes: &str) -> Result<Self, SpecError> {
        let nodes = nodes
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let spec = Self {
            name: name.to_owned(),
            nodes,
        };
        if spec.nodes.is_empty() {
            return Err(SpecError::Count {
                asked: 0,
                max: MAX_NODES,
            });
        }
        spec.validate()?;
        Ok(spec)
    }

    /// A testbed of an API server and its etcd alone: no node, no controller, no registry. Whoever makes Nodes there plays
    /// the parts of all others.
    ///
    /// # Errors
    /// [`SpecError::TestbedName`].
    pub fn api_server_alone(name: &str) -> Result<Self, SpecError> {
        check_testbed_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            nodes: Vec::new(),
        })
    }

    /// Checks names, versions and counts; [`crate::Cluster::up`] does this first.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), SpecError> {
        check_testbed_name(&self.name)?;
        if self.nodes.len() > MAX_NODES {
            return Err(SpecError::Count {
                asked: self.nodes.len(),
                max: MAX_NODES,
            });
        }
        for (at, node) in self.nodes.iter().enumerate() {
            if !is_dns_subdomain(&node.name) {
                return Err(SpecError::NodeName(node.name.clone()));
            }
            if versions::containerd(&node.containerd).is_none() {
                return Err(SpecError::UnknownContainerd {
                    node: node.name.clone(),
                    asked: node.containerd.clone(),
                    known: versions::series(),
                });
            }
            if self.nodes[..at].iter().any(|other| other.name == node.name) {
                return Err(SpecError::Twice(node.name.clone()));
            }
        }
        Ok(())
    }
}

impl FromStr for NodeSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        match text.split_once('=') {
            Some((name, containerd)) if !name.is_empty() && !containerd.is_empty() => Ok(Self {
                name: name.to_owned(),
                containerd: containerd.to_owned(),
            }),
            _ => Err(SpecError::Shape(text.to_owned())),
        }
    }
}

/// Checks the name of a testbed, which becomes part of paths and cgroup names.
///
/// # Errors
/// [`SpecError::TestbedName`].
pub fn check_testbed_name(name: &str) -> Result<(), SpecError> {
    let good = (1..=20).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if good {
        Ok(())
    } else {
        Err(SpecError::TestbedName(name.to_owned()))
    }
}

fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 63
        && name.split('.').all(|label| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_list_of_nodes_in_its_order() {
        let spec = Spec::parse("qm", "worker-1=1.7, worker-2=2.4").unwrap();
        assert_eq!(spec.nodes[0].name, "worker-1");
        assert_eq!(spec.nodes[0].containerd, "1.7");
        assert_eq!(spec.nodes[1].name, "worker-2");
        assert_eq!(spec.nodes[1].containerd, "2.4");
    }

    #[test]
    fn names_the_known_versions_when_one_is_unknown() {
        let error = Spec::parse("qm", "worker-1=3.0").unwrap_err().to_string();
        assert!(error.contains("worker-1"), "{error}");
        assert!(error.contains("1.6, 1.7, 2.1, 2.4"), "{error}");
    }

    #[test]
    fn refuses_a_node_without_a_version() {
        assert_eq!(
            Spec::parse("qm", "worker-1"),
            Err(SpecError::Shape("worker-1".into()))
        );
    }

    #[test]
    fn refuses_two_nodes_of_one_name() {
        assert_eq!(
            Spec::parse("qm", "a=1.7,a=2.4"),
            Err(SpecError::Twice("a".into()))
        );
    }

    #[test]
    fn refuses_a_testbed_without_nodes() {
        assert!(matches!(
            Spec::parse("qm", ""),
            Err(SpecError::Count { asked: 0, .. })
        ));
    }

    #[test]
    fn refuses_a_name_that_would_leave_its_folder() {
        for name in ["", "../x", "a/b", "A", "-a", "0a", "a_b", &"a".repeat(21)] {
            assert!(check_testbed_name(name).is_err(), "{name}");
        }
        check_testbed_name("qm-2").unwrap();
    }

    #[test]
    fn takes_the_longest_node_name_that_a_kubelet_can_register() {
        let long = format!("{}.{}", "a".repeat(31), "b".repeat(31));
        assert_eq!(long.len(), 63);
        Spec::parse("qm", &format!("{long}=1.7")).unwrap();
        assert!(Spec::parse("qm", &format!("{long}c=1.7")).is_err());
        assert!(Spec::parse("qm", "Worker=1.7").is_err());
        assert!(Spec::parse("qm", "-a=1.7").is_err());
    }
}
