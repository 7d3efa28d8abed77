//! A fleet of simulated nodes under the real coordinator: thousands of Node objects in a real API server, and behind each an
//! agent that speaks the real protocol, all in one process.
//!
//! The coordinator is the program that is shipped, run as a process with the rights of its own account. What is simulated is
//! what lies on the other side of its two interfaces: kubelets and the DaemonSet controller as far as agents' pods go, and the
//! agents, which enrol with tokens of their pods and serve on loopback addresses of the testbed's fabric. Times, failures
//! and losses are drawn from a seed. Nothing here knows how the coordinator decides.

mod agent;
mod chaos;
mod command;
mod fault;
mod gateway;
mod kubelet;
mod ledger;
mod line;
mod machine;
mod objects;
mod observer;
mod plot;
mod replica;
mod scenario;
mod temper;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use quartermaster_proto::v1::agent_server::AgentServer;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;

use crate::cluster::Cluster;
use crate::progress::Progress;
use crate::spec::Spec;

use agent::Service;
use kubelet::Kubelets;
use ledger::Ledger;
use machine::Machine;
use observer::Observer;
use replica::Replica;

pub use chaos::{Chaos, run as chaos};
pub use plot::{growth, table};
pub use scenario::{Measurement, Options, Scenario, run};
pub use temper::Temper;

/// A fleet that stands.
struct Fleet<'a> {
    cluster: &'a Cluster,
    /// With an administrator's rights.
    client: kube::Client,
    machines: Vec<Arc<Machine>>,
    ledger: Arc<Ledger>,
    observer: Arc<Observer>,
    /// How many of the machines, the first ones, hold a control plane.
    control_planes: usize,
    /// What runs beside; it ends with the fleet.
    _tasks: JoinSet<()>,
}

/// What a fleet is made from.
struct Plan {
    nodes: usize,
    control_planes: usize,
    seed: u64,
    temper: Temper,
    /// How many machines may be down by us.
    max_unavailable: usize,
}

/// Brings up a testbed with nothing in it but an API server, and runs `work` in its network, in a runtime of its own.
fn on_stage<T: Send>(
    name: &str,
    progress: &Progress,
    work: impl AsyncFnOnce(&Cluster) -> Result<T> + Send,
) -> Result<T> {
    raise_descriptors()?;
    Cluster::down(name)?;
    let cluster = Cluster::up(&Spec::api_server_alone(name)?, progress)?;
    objects::apply_base(&cluster)?;
    // One provider for all of TLS, named outright; a second call finds the first one's.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = cluster.within_fabric(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?
            .block_on(work(&cluster))
    });
    if std::env::var_os("TESTBED_KEEP").is_none() {
        Cluster::down(name)?;
    }
    result
}

/// An agent needs a descriptor for its connection, and there are thousands.
fn raise_descriptors() -> Result<()> {
    let now = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: now.maximum,
        maximum: now.maximum,
    };
    setrlimit(Resource::Nofile, wanted).context("the limit of open files can't be raised")
}

async fn administrator(cluster: &Cluster) -> Result<kube::Client> {
    let text = std::fs::read_to_string(cluster.kubeconfig_in_fabric())?;
    let config =
        kube::Config::from_custom_kubeconfig(Kubeconfig::from_yaml(&text)?, &KubeConfigOptions::default())
            .await?;
    Ok(kube::Client::try_from(config)?)
}

impl<'a> Fleet<'a> {
    /// Makes the Nodes and everything behind them; `replicas` are where agents enrol.
    async fn make(cluster: &'a Cluster, plan: Plan, replicas: &[Replica]) -> Result<Self> {
        let client = administrator(cluster).await?;
        let (ledger, temper) = (Arc::new(Ledger::default()), Arc::new(plan.temper));
        ledger.limit.store(plan.max_unavailable, Ordering::SeqCst);
        let machines: Vec<Arc<Machine>> = (0..plan.nodes)
            .map(|number| {
                Arc::new(Machine::new(
                    objects::name(number, plan.control_planes),
                    objects::address(number),
                    plan.seed.wrapping_add(number as u64),
                    Arc::clone(&ledger),
                    Arc::clone(&temper),
                ))
            })
            .collect();
        objects::make_nodes(&client, &machines, plan.control_planes).await?;

        let mut tasks = JoinSet::new();
        let by_address: HashMap<_, _> = machines.iter().map(|m| (m.address, Arc::clone(m))).collect();
        let lines = line::listen(Arc::new(by_address))?;
        let server = tonic::transport::Server::builder().add_service(
            AgentServer::new(Service).max_decoding_message_size(quartermaster_proto::MAX_MESSAGE),
        );
        tasks.spawn(async move {
            // It ends with its task; the errors of connections are the coordinator's to notice.
            let _ = server.serve_with_incoming(lines).await;
        });
        let enrollment = replicas.iter().map(Replica::enrollment).collect();
        let kubelets = Kubelets::new(client.clone(), enrollment);
        for machine in &machines {
            tasks.spawn(Arc::clone(&kubelets).tend(Arc::clone(machine)));
        }
        let by_name = machines.iter().map(|m| (m.name.clone(), Arc::clone(m))).collect();
        let observer = Observer::new(by_name, Arc::clone(&ledger));
        tasks.spawn(Arc::clone(&observer).watch(client.clone()));
        ledger.begin();
        Ok(Self {
            cluster,
            client,
            machines,
            ledger,
            observer,
            control_planes: plan.control_planes,
            _tasks: tasks,
        })
    }

    fn names(&self) -> Vec<String> {
        self.machines.iter().map(|machine| machine.name.clone()).collect()
    }
}

/// The flags of every replica in a fleet.
fn replica_flags(more: &[String]) -> Vec<String> {
    let mut flags = vec!["--log-format=text".to_owned()];
    flags.extend_from_slice(more);
    flags
}

/// A seed for who gives none.
#[must_use]
pub fn seed_of_the_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_nanos()) ^ now.as_secs())
}

/// Waits, off the runtime's own threads, for what is done by blocking.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}

/// Reads `90s`, `2m` or `1h`.
///
/// # Errors
/// For anything else; with how to write it.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len());
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err("write it as 90s, 2m or 1h".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| format!("{number:?} is no number"))?;
    Ok(Duration::from_secs(number * seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_number_and_a_unit() {
        let seconds = |text: &str| duration(text).map(|time| time.as_secs());
        assert_eq!(seconds("90s"), Ok(90));
        assert_eq!(seconds("1h"), Ok(3600));
        for text in ["", "5", "m", "-1s", "1d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
