//! The Lease: of all replicas one leads, and only it decides.
//!
//! What lives here knows when this replica may act and for how long, and nothing of what it then does.

mod claim;
mod keeper;
#[cfg(test)]
mod keeper_tests;
mod tenure;

use std::sync::Arc;
use std::time::Duration;

use kube::api::Api;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::cluster::Cluster;
use crate::engine::{PullSettings, Setup, lead};
use crate::identity::{Arrival, Dialer};
use crate::node::spec_hash;
use crate::operator::{Leading, People};
use crate::report::{Health, Metrics};
use crate::settings::{Agents, Settings};

use keeper::Keeper;
pub(crate) use tenure::Fence;
use tenure::Tenure;

const LEASE: &str = "quartermaster-coordinator";
/// Questions of people that wait.
const QUESTIONS: usize = 16;
/// For giving the Lease back when told to end.
const FAREWELL: Duration = Duration::from_secs(3);
/// Before leading is taken up again in the same term.
const AGAIN: Duration = Duration::from_secs(1);

/// What a leader works with, and whom it tells.
pub(crate) struct Hands {
    /// Dials agents.
    pub(crate) dialer: Arc<Dialer>,
    /// Counts.
    pub(crate) metrics: Arc<Metrics>,
    /// Says who leads.
    pub(crate) health: Health,
    /// Asks.
    pub(crate) people: People,
}

/// Leads whenever the Lease is held, until `stop` is cancelled.
pub(crate) async fn contend(
    cluster: &Cluster,
    settings: Settings,
    hands: Hands,
    mut arrivals: mpsc::Receiver<Arrival>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let Hands {
        dialer,
        metrics,
        health,
        people,
    } = hands;
    let tenure = Tenure::new();
    // All that the leader writes goes through the fence; the Lease itself does not.
    let fenced = cluster.client_behind(&Fence::before(tenure.clone()))?;
    let (sender, mut leads) = watch::channel(None);
    let keeper = Keeper {
        api: Api::namespaced(cluster.client().clone(), &settings.namespace),
        lease: LEASE,
        me: settings.pod_name.clone(),
        tenure: tenure.clone(),
        leads: sender,
    };
    let give_back = CancellationToken::new();
    let keeper = tokio::spawn(keeper.run(give_back.clone()));
    loop {
        let term = *leads.borrow_and_update();
        if let Some(term) = term {
            info!(term, "this replica leads");
            metrics.leads(Some(term));
            health.leads(true).await;
            let setup = Setup {
                client: fenced.clone(),
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
                    disk_reserve: settings.disk_reserve,
                },
            };
            let (questions, asked) = mpsc::channel(QUESTIONS);
            people.leading.send_replace(Some(Leading { questions }));
            tokio::select! {
                biased;
                // By the clock too: a process that was paused learns of the end before anybody has told it.
                () = tenure.lapsed() => {}
                _ = leads.wait_for(|leads| *leads != Some(term)) => {}
                () = lead(setup, &mut arrivals, asked, &stop) => {}
            }
            people.leading.send_replace(None);
            metrics.leads(None);
            health.leads(false).await;
        }
        tokio::select! {
            () = stop.cancelled() => break,
            // Agents that enrol here are found by the leader through its watch of pods.
            Some(_) = arrivals.recv() => {}
            // The Lease was renewed in the very moment in which it had run out by the clock: nothing changes then.
            () = tokio::time::sleep(AGAIN), if leads.borrow().is_some() => {}
            changed = leads.changed() => {
                if changed.is_err() {
                    anyhow::bail!("the Lease is not kept any more");
                }
            }
        }
    }
    health.ends().await;
    // The engine has stopped: only now may another begin.
    give_back.cancel();
    let _ = tokio::time::timeout(FAREWELL, keeper).await;
    Ok(())
}
