//! The control plane: etcd, the API server, the controllers, the scheduler and the name server, as processes in the fabric.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::address::{
    API_PORT, AddressPlan, DNS_SERVICE, KUBERNETES_SERVICE, POD_RANGE, REGISTRY_HOST, SERVICE_RANGE,
};
use crate::cgroups::Cgroups;
use crate::fabric::Fabric;
use crate::layout::State;
use crate::parts::Parts;
use crate::pki::{Authority, Subject};
use crate::process::{Background, Launch};
use crate::tool::Tool;

/// How long any component may take to come up.
const DEADLINE: Duration = Duration::from_secs(60);
/// etcd listens on the fabric's loopback alone.
const ETCD: &str = "http://127.0.0.1:2379";
/// Where CoreDNS says that it has the cluster's names.
const DNS_READY_PORT: u16 = 8181;

/// What the control plane's parts need to know of the rest.
#[derive(Clone, Copy)]
pub struct ControlPlane<'a> {
    /// Where files lie.
    pub state: &'a State,
    /// The programs.
    pub parts: &'a Parts,
    /// The network they run in.
    pub fabric: &'a Fabric,
    /// The cgroup they run in.
    pub cgroups: &'a Cgroups,
    /// The addresses they have.
    pub plan: AddressPlan,
}

/// The subjects of the control plane's certificates, beside those that serve: file, user, group.
const CLIENTS: &[(&str, &str, Option<&str>)] = &[
    ("admin", "admin", Some("system:masters")),
    ("controller-manager", "system:kube-controller-manager", None),
    ("scheduler", "system:kube-scheduler", None),
    ("proxy", "system:kube-proxy", None),
    ("coredns", "system:coredns", None),
];

/// Makes every certificate and kubeconfig of the control plane.
///
/// # Errors
/// If a file can't be written.
pub fn make_identities(state: &State, plan: AddressPlan) -> Result<Authority> {
    let authority = Authority::make(&state.pki())?;
    crate::pki::service_account_key(&state.pki())?;
    authority.issue(&Subject {
        file: "apiserver",
        user: "kube-apiserver",
        group: None,
        names: &[
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "localhost",
        ],
        // 127.0.0.1 is where the host's own kubectl reaches it, through the forwarder.
        addresses: &[plan.fabric(), KUBERNETES_SERVICE, Ipv4Addr::LOCALHOST],
    })?;
    authority.issue(&Subject {
        file: "kubelet-client",
        user: "kube-apiserver-kubelet-client",
        group: Some("system:masters"),
        names: &[],
        addresses: &[],
    })?;
    for (file, user, group) in CLIENTS {
        let subject = Subject {
            file,
            user,
            group: *group,
            names: &[],
            addresses: &[],
        };
        authority.kubeconfig(&subject, &plan.api_server())?;
    }
    Ok(authority)
}

impl ControlPlane<'_> {
    /// Starts etcd and waits until it answers.
    ///
    /// # Errors
    /// If it does not come up; with its log's end.
    pub fn start_etcd(&self) -> Result<()> {
        let etcd = self.start(
            "etcd",
            vec![
                flag("data-dir", self.state.control_plane().join("etcd")),
                flag("listen-client-urls", ETCD),
                flag("advertise-client-urls", ETCD),
                flag("listen-peer-urls", "http://127.0.0.1:2380"),
                // The data dies with the testbed: nothing is gained by waiting for the disk.
                "--unsafe-no-fsync".into(),
                flag("log-level", "warn"),
            ],
        )?;
        let health = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 2379);
        etcd.wait_until("to be healthy", DEADLINE, || {
            let answer = self.fabric.within(|| http_get(health, "/health"))?;
            Ok(answer.contains("\"health\":\"true\""))
        })
    }

    /// Starts the API server and waits until it is ready. Where Nodes are `simulated` it leaves them as they are made: no
    /// controller is there to take away the taint that it gives new ones.
    ///
    /// # Errors
    /// If it does not come up; with its log's end.
    pub fn start_api_server(&self, simulated: bool) -> Result<()> {
        let address = self.plan.fabric().to_string();
        let pki = |file: &str| self.state.pki().join(file);
        let mut flags = vec![
            flag("etcd-servers", ETCD),
            flag("bind-address", &address),
            flag("advertise-address", &address),
            flag("secure-port", API_PORT.to_string()),
            flag("tls-cert-file", pki("apiserver.crt")),
            flag("tls-private-key-file", pki("apiserver.key")),
            flag("client-ca-file", pki("ca.crt")),
            flag("service-account-key-file", pki("sa.pub")),
            flag("service-account-signing-key-file", pki("sa.key")),
            flag(
                "service-account-issuer",
                "https://kubernetes.default.svc.cluster.local",
            ),
            flag("service-cluster-ip-range", SERVICE_RANGE),
            flag("authorization-mode", "Node,RBAC"),
            flag("enable-admission-plugins", "NodeRestriction"),
            flag("kubelet-client-certificate", pki("kubelet-client.crt")),
            flag("kubelet-client-key", pki("kubelet-client.key")),
            flag("kubelet-certificate-authority", pki("ca.crt")),
            // By name it would look them up, and the fabric knows no node's name.
            flag("kubelet-preferred-address-types", "InternalIP"),
            flag("allow-privileged", "true"),
            flag("endpoint-reconciler-type", "lease"),
            // There is no kube-proxy in the fabric: webhooks and aggregated APIs are called at their pods.
            flag("enable-aggregator-routing", "true"),
            flag("profiling", "false"),
        ];
        if simulated {
            flags.push(flag("disable-admission-plugins", "TaintNodesByCondition"));
        }
        let server = self.start("kube-apiserver", flags)?;
        server.wait_until("to be ready", DEADLINE, || {
            self.kubectl().args(["get", "--raw=/readyz"]).output()?;
            Ok(true)
        })
    }

    /// Starts the controllers and the scheduler; nobody has to wait for them.
    ///
    /// # Errors
    /// If one can't be started.
    pub fn start_controllers(&self) -> Result<()> {
        let pki = |file: &str| self.state.pki().join(file);
        self.start(
            "kube-controller-manager",
            vec![
                flag("kubeconfig", pki("controller-manager.kubeconfig")),
                flag("service-account-private-key-file", pki("sa.key")),
                flag("root-ca-file", pki("ca.crt")),
                flag("cluster-signing-cert-file", pki("ca.crt")),
                flag("cluster-signing-key-file", pki("ca.key")),
                flag("use-service-account-credentials", "true"),
                flag("cluster-cidr", POD_RANGE),
                flag("allocate-node-cidrs", "false"),
                flag("leader-elect", "false"),
                flag("bind-address", "127.0.0.1"),
            ],
        )?;
        self.start(
            "kube-scheduler",
            vec![
                flag("kubeconfig", pki("scheduler.kubeconfig")),
                flag("leader-elect", "false"),
                flag("bind-address", "127.0.0.1"),
            ],
        )?;
        Ok(())
    }

    /// Starts the name server, with the service that pods know it by.
    ///
    /// # Errors
    /// If it can't be started, or the API server refuses the service.
    pub fn start_dns(&self) -> Result<Background> {
        self.kubectl()
            .args(["apply", "--filename=-"])
            .input(dns_manifest(self.plan))
            .called("applying the service kube-dns")
            .output()?;
        let corefile = self.state.control_plane().join("Corefile");
        let kubeconfig = self.state.pki().join("coredns.kubeconfig");
        fs::write(&corefile, render_corefile(self.plan, &kubeconfig))
            .with_context(|| format!("can't write {}", corefile.display()))?;
        self.start("coredns", vec!["-conf".into(), corefile.into()])
    }

    /// Waits until the name server has the cluster's names.
    ///
    /// # Errors
    /// If it does not come up; with its log's end.
    pub fn wait_for_dns(&self, dns: &Background) -> Result<()> {
        let ready = SocketAddrV4::new(self.plan.fabric(), DNS_READY_PORT);
        dns.wait_until("to know the cluster's names", DEADLINE, || {
            let answer = self.fabric.within(|| http_get(ready, "/ready"))?;
            Ok(answer.starts_with("HTTP/1.1 200"))
        })
    }

    /// kubectl as the testbed's administrator, run in the fabric.
    #[must_use]
    pub fn kubectl(&self) -> Tool {
        self.fabric
            .run(self.parts.program("kubectl"))
            .arg(flag("kubeconfig", self.state.pki().join("admin.kubeconfig")))
            .arg("--request-timeout=10s")
    }

    fn start(&self, program: &str, flags: Vec<OsString>) -> Result<Background> {
        fs::create_dir_all(self.state.control_plane())?;
        let mut args = self.fabric.enter();
        args.push(self.parts.program(program).into());
        args.extend(flags);
        Launch {
            role: program,
            args,
            env: Vec::new(),
            cgroups: &self.cgroups.make_control_plane()?,
            run: &self.state.run(),
            logs: &self.state.logs(),
        }
        .start()
    }
}

/// Asks a server in the current network namespace for a path; returns the head of its answer.
pub(crate) fn http_get(server: SocketAddrV4, path: &str) -> Result<String> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mut stream = TcpStream::connect_timeout(&server.into(), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.take(64 * 1024).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// A flag of a Kubernetes component: `--name=value`.
fn flag(name: &str, value: impl Into<OsString>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value.into());
    flag
}

fn render_corefile(plan: AddressPlan, kubeconfig: &Path) -> String {
    let address = plan.fabric();
    let kubeconfig = kubeconfig.display();
    // No cache: a name that was asked for before its service existed must be found as soon as it does.
    format!(
        ".:53 {{
    bind {address}
    errors
    ready {address}:{DNS_READY_PORT}
    hosts {{
        {address} {REGISTRY_HOST}
        fallthrough
    }}
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
    }}
}}
"
    )
}

/// The service `kube-dns`, whose one endpoint is the name server in the fabric, and what the name server may read.
fn dns_manifest(plan: AddressPlan) -> String {
    include_str!("../assets/kube-dns.yaml")
        .replace("@SERVICE@", &DNS_SERVICE.to_string())
        .replace("@FABRIC@", &plan.fabric().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_server_listens_on_the_fabric_and_knows_the_registry() {
        let corefile = render_corefile(AddressPlan::new(3), Path::new("/k"));
        assert!(corefile.contains("bind 10.89.3.1\n"), "{corefile}");
        assert!(corefile.contains("10.89.3.1 registry.testbed\n"), "{corefile}");
        assert!(corefile.contains("kubeconfig /k\n"), "{corefile}");
    }

    #[test]
    fn the_dns_service_points_to_the_fabric() {
        let manifest = dns_manifest(AddressPlan::new(3));
        assert!(manifest.contains("clusterIP: 10.96.0.10"));
        assert!(manifest.contains("addresses: [10.89.3.1]"));
        assert!(!manifest.contains('@'), "{manifest}");
    }
}
