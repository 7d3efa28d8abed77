//! The address plan: pure arithmetic from a testbed's index to every address in it.
//!
//! All of it lies in namespaces of the testbed, so nothing here can collide with the host's own networks; the index keeps
//! two testbeds' addresses apart for the person who reads them.

use std::net::Ipv4Addr;

/// Addresses of one testbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressPlan {
    index: u8,
}

/// The cluster's service range.
pub const SERVICE_RANGE: &str = "10.96.0.0/16";
/// The range that all pods' addresses are taken from.
pub const POD_RANGE: &str = "10.244.0.0/16";
/// The address of the service `default/kubernetes`.
pub const KUBERNETES_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// The address of the service `kube-system/kube-dns`, which every pod's resolver uses.
pub const DNS_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// The registry's name and port, in nodes and in the fabric.
pub const REGISTRY: &str = "registry.testbed:5000";
/// The registry's host name alone.
pub const REGISTRY_HOST: &str = "registry.testbed";
/// The port of the API server in the fabric.
pub const API_PORT: u16 = 6443;

impl AddressPlan {
    /// The plan with this index (0 to 255), one for each testbed of a machine.
    #[must_use]
    pub fn new(index: u8) -> Self {
        Self { index }
    }

    /// The index it was made with.
    #[must_use]
    pub fn index(self) -> u8 {
        self.index
    }

    /// The fabric's own address: bridge, API server, name server, registry and every node's gateway.
    #[must_use]
    pub fn fabric(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 89, self.index, 1)
    }

    /// The address of a node, by its position (0 first).
    #[must_use]
    pub fn node(self, position: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 89, self.index, 11 + host_part(position))
    }

    /// The range of pod addresses of a node, by its position (0 first).
    #[must_use]
    pub fn pods(self, position: usize) -> String {
        format!("10.244.{}.0/24", 1 + host_part(position))
    }

    /// The URL that components in the fabric and on nodes reach the API server by.
    #[must_use]
    pub fn api_server(self) -> String {
        format!("https://{}:{API_PORT}", self.fabric())
    }
}

fn host_part(position: usize) -> u8 {
    u8::try_from(position)
        .unwrap_or(u8::MAX)
        .min(crate::spec::MAX_NODES as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_testbeds_share_no_node_address() {
        let (a, b) = (AddressPlan::new(0), AddressPlan::new(1));
        assert_eq!(a.fabric().to_string(), "10.89.0.1");
        assert_eq!(b.fabric().to_string(), "10.89.1.1");
        assert_eq!(a.node(0).to_string(), "10.89.0.11");
        assert_eq!(b.node(2).to_string(), "10.89.1.13");
    }

    #[test]
    fn the_last_node_still_has_an_address_of_its_own() {
        let plan = AddressPlan::new(0);
        let last = crate::spec::MAX_NODES - 1;
        assert_eq!(plan.node(last).to_string(), "10.89.0.210");
        assert_eq!(plan.pods(last), "10.244.200.0/24");
        assert_eq!(plan.pods(0), "10.244.1.0/24");
    }
}
