//! The Lease: of all replicas one leads, and only it decides.

use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube_lease_manager::{LeaseCreateMode, LeaseManagerBuilder};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::engine::{PullSettings, Setup, lead};
use crate::identity::{Arrival, Dialer};
use crate::node::spec_hash;
use crate::operator::{Leading, People};
use crate::report::Metrics;
use crate::settings::{Agents, Settings};

/// Questions of people that wait.
const QUESTIONS: usize = 16;
const LEASE: &str = "quartermaster-coordinator";
/// Seconds for which the Lease is held, and before their end at which it is renewed.
const HELD: u64 = 12;
const GRACE: u64 = 4;

/// Leads whenever the Lease is held, until `stop` is cancelled.
pub(crate) async fn contend(
    client: kube::Client,
    settings: Settings,
    dialer: Arc<Dialer>,
    metrics: Arc<Metrics>,
    mut arrivals: mpsc::Receiver<Arrival>,
    people: People,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let manager = LeaseManagerBuilder::new(client.clone(), LEASE)
        .with_namespace(&settings.namespace)
        .with_identity(&settings.pod_name)
        .with_create_mode(LeaseCreateMode::AutoCreate)
        .with_duration(HELD)
        .with_grace(GRACE)
        .build()
        .await
        .context("the Lease can't be read or made")?;
    let (mut leads, keeper) = manager.watch().await;
    loop {
        if *leads.borrow_and_update() {
            let term = term(&client, &settings.namespace).await?;
            info!(term, "this replica leads");
            metrics.set_leader(true);
            let setup = Setup {
                client: client.clone(),
                namespace: settings.namespace.clone(),
                reporter: settings.pod_name.clone(),
                dialer: dialer.clone(),
                metrics: metrics.clone(),
                term,
                auto_provision: settings.auto_provision,
                policy: settings.policy(),
                halt_after: settings.halt_after,
                parked: settings.agents == Agents::Parked,
                gate_deadline: settings.gate_deadline,
                linger: settings.linger,
                recheck: settings.recheck,
                spec_hash: spec_hash(env!("CARGO_PKG_VERSION")),
                watchers: people.watchers.clone(),
                limits: settings.limits(),
                secret_namespaces: settings.secret_namespaces.clone(),
                pulls: PullSettings {
                    node_credential_providers: settings.node_credential_providers,
                    registry_sizes: settings.registry_sizes,
                    disk_reserve: settings.disk_reserve,
                },
            };
            let (questions, asked) = mpsc::channel(QUESTIONS);
            people.leading.send_replace(Some(Leading { questions }));
            tokio::select! {
                () = lead(setup, &mut arrivals, asked, &stop) => {}
                _ = leads.wait_for(|leads| !leads) => warn!("the Lease is lost; this replica stops leading"),
            }
            people.leading.send_replace(None);
            metrics.set_leader(false);
        }
        tokio::select! {
            () = stop.cancelled() => break,
            // Agents that enrol here are found by the leader through its watch of pods.
            Some(_) = arrivals.recv() => {}
            changed = leads.changed() => changed.context("the Lease is not kept any more")?,
        }
    }
    // Closing the channel makes the keeper give the Lease back, so that another replica need not wait.
    drop(leads);
    let _ = tokio::time::timeout(std::time::Duration::from_secs(3), keeper).await;
    Ok(())
}

/// How often the Lease has changed hands: agents refuse commands of an earlier term.
async fn term(client: &kube::Client, namespace: &str) -> anyhow::Result<u64> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = leases.get(LEASE).await.context("the Lease can't be read")?;
    let transitions = lease.spec.and_then(|spec| spec.lease_transitions);
    Ok(transitions.and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
}
