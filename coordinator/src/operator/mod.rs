//! The operator's interface: `quartermaster.v1.Operator` on a local socket, which people reach with their own kubeconfig
//! by `pods/exec`. It decides nothing: it asks the engine, or writes what it was told to where every replica reads it.

mod person;
mod relay;
mod removal;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, Patch, PatchParams};
use quartermaster_proto::v1::agent_client::AgentClient;
use quartermaster_proto::v1::operator_server::{Operator, OperatorServer};
use quartermaster_proto::{MAX_MESSAGE, v1};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::wrappers::{BroadcastStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

pub use person::{Ask, ask};
pub use relay::relay;
pub use removal::remove_all;

use crate::control::{self, Control};
use crate::engine::{Question, SHARDS, key_of, report_map, shard_of};

/// How long a plan may take when the caller does not say.
const PLAN: Duration = Duration::from_secs(120);
/// Longest answer: the status of ten thousand nodes.
const LONGEST_ANSWER: usize = 16 * 1024 * 1024;
/// Events that wait for a watcher.
const WATCHED: usize = 4096;

/// The leader's engine, as far as it can be asked.
#[derive(Debug, Clone)]
pub(crate) struct Leading {
    pub(crate) questions: mpsc::Sender<Question>,
}

/// What the interface works with.
#[derive(Clone)]
pub(crate) struct Interface {
    pub(crate) client: kube::Client,
    pub(crate) namespace: String,
    /// Set while this replica leads.
    pub(crate) leading: watch::Receiver<Option<Leading>>,
    pub(crate) watchers: broadcast::Sender<v1::WatchEvent>,
}

/// What the leader tells the interface.
#[derive(Debug)]
pub(crate) struct People {
    /// Where it takes questions, while it leads.
    pub(crate) leading: watch::Sender<Option<Leading>>,
    /// What happens.
    pub(crate) watchers: broadcast::Sender<v1::WatchEvent>,
}

impl Default for People {
    fn default() -> Self {
        Self {
            leading: watch::Sender::new(None),
            watchers: broadcast::Sender::new(WATCHED),
        }
    }
}

/// Serves on `socket` until `stop` is cancelled.
///
/// # Errors
/// When the socket can't be made or served.
pub(crate) async fn serve(
    interface: Interface,
    socket: &std::path::Path,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    // One of a process that was killed is in the way, and nobody answers on it.
    let _ = std::fs::remove_file(socket);
    if let Some(folder) = socket.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("{} can't be made", folder.display()))?;
    }
    let listener =
        UnixListener::bind(socket).with_context(|| format!("{} can't be bound", socket.display()))?;
    let service = OperatorServer::new(interface)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(LONGEST_ANSWER);
    Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
        .await
        .context("the operator's interface has ended")
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Interface {
    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Result<T, Status> {
        let leading = self.leading.borrow().clone();
        let Some(leading) = leading else {
            return Err(Status::failed_precondition(
                "this replica does not lead; ask the one that holds the Lease quartermaster-coordinator",
            ));
        };
        let (answer, answered) = oneshot::channel();
        let gone = || Status::unavailable("this replica has just stopped leading; ask again");
        leading
            .questions
            .send(question(answer))
            .await
            .map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }

    async fn set(&self, change: impl FnOnce(&mut Control)) -> Result<v1::ControlResponse, Status> {
        let control = change_control(&self.client, &self.namespace, change)
            .await
            .map_err(|error| Status::unavailable(format!("{error:#}")))?;
        Ok(v1::ControlResponse {
            control: Some(v1::Control {
                paused: control.paused,
                halted: control.halted.unwrap_or_default(),
                removing: control.removing,
            }),
        })
    }
}

/// Changes what the cluster is told.
///
/// # Errors
/// When the ConfigMap can't be read or written.
pub(crate) async fn change_control(
    client: &kube::Client,
    namespace: &str,
    change: impl FnOnce(&mut Control),
) -> anyhow::Result<Control> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let what = || format!("the ConfigMap {namespace}/{}", control::NAME);
    let map = maps
        .get(control::NAME)
        .await
        .with_context(|| format!("{} can't be read", what()))?;
    let mut control = Control::read(&map);
    change(&mut control);
    maps.patch(
        control::NAME,
        &PatchParams::default(),
        &Patch::Merge(control.patch()),
    )
    .await
    .with_context(|| format!("{} can't be written", what()))?;
    Ok(control)
}

#[tonic::async_trait]
impl Operator for Interface {
    type WatchStream = Answers<v1::WatchEvent>;
    type RemoveAllStream = Answers<v1::RemoveAllEvent>;

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        self.ask(Question::Status).await.map(Response::new)
    }

    async fn plan(&self, request: Request<v1::PlanRequest>) -> Result<Response<v1::PlanResponse>, Status> {
        let request = request.into_inner();
        let timeout = request
            .timeout
            .and_then(|timeout| Duration::try_from(timeout).ok())
            .unwrap_or(PLAN);
        let node = request.node;
        let planned = async {
            let channel = self
                .ask(|answer| Question::Agent {
                    node: node.clone(),
                    answer,
                })
                .await?
                .map_err(Status::not_found)?;
            let mut agent = AgentClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
            // Whatever broke there, this replica leads and has answered: asking it anew would not help.
            agent.preview(v1::PreviewRequest {}).await.map_err(|status| {
                Status::aborted(format!(
                    "the agent of {node} did not answer: {}",
                    status.message()
                ))
            })
        };
        let preview = tokio::time::timeout(timeout, planned)
            .await
            .map_err(|_| Status::deadline_exceeded(format!("no agent of {node} has answered in time")))??;
        Ok(Response::new(v1::PlanResponse {
            preview: Some(preview.into_inner()),
        }))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let nodes = request.into_inner().nodes;
        let events = BroadcastStream::new(self.watchers.subscribe());
        let wanted = events.filter_map(move |event| {
            let event = match event {
                Ok(event) if nodes.is_empty() || nodes.contains(&event.node) => Some(Ok(event)),
                Ok(_) => None,
                Err(BroadcastStreamRecvError::Lagged(lost)) => Some(Ok(v1::WatchEvent {
                    event: Some(v1::watch_event::Event::Lost(lost)),
                    ..v1::WatchEvent::default()
                })),
            };
            std::future::ready(event)
        });
        Ok(Response::new(Box::pin(wanted)))
    }

    async fn pause(&self, _: Request<v1::PauseRequest>) -> Result<Response<v1::ControlResponse>, Status> {
        self.set(|control| control.paused = true).await.map(Response::new)
    }

    async fn resume(&self, _: Request<v1::ResumeRequest>) -> Result<Response<v1::ControlResponse>, Status> {
        let set = self.set(|control| {
            control.paused = false;
            control.halted = None;
        });
        set.await.map(Response::new)
    }

    async fn reports(
        &self,
        request: Request<v1::ReportsRequest>,
    ) -> Result<Response<v1::ReportsResponse>, Status> {
        let nodes = request.into_inner().nodes;
        if nodes.len() > 100 {
            return Err(Status::invalid_argument(
                "at most 100 nodes can be asked for at once",
            ));
        }
        let reports = reports(&self.client, &self.namespace, &nodes)
            .await
            .map_err(|error| Status::unavailable(format!("{error:#}")))?;
        Ok(Response::new(v1::ReportsResponse { reports }))
    }

    async fn remove_all(
        &self,
        _: Request<v1::RemoveAllRequest>,
    ) -> Result<Response<Self::RemoveAllStream>, Status> {
        let client = Arc::new(self.client.clone());
        self.set(removal::begin).await?;
        let left = futures::stream::unfold(Some(client), |client| async move {
            let client = client?;
            match removal::left(&client).await {
                Ok(event) if event.left_count == 0 => Some((Ok(event), None)),
                Ok(event) => {
                    tokio::time::sleep(removal::LOOK).await;
                    Some((Ok(event), Some(client)))
                }
                Err(error) => Some((Err(Status::unavailable(format!("{error:#}"))), None)),
            }
        });
        Ok(Response::new(Box::pin(left)))
    }
}

/// The last reports of some nodes, or of all.
async fn reports(
    client: &kube::Client,
    namespace: &str,
    nodes: &[String],
) -> anyhow::Result<Vec<v1::Report>> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let mut shards: Vec<u8> = nodes.iter().map(|node| shard_of(node)).collect();
    shards.sort_unstable();
    shards.dedup();
    if nodes.is_empty() {
        shards = (0..SHARDS).collect();
    }
    let keys: Vec<String> = nodes.iter().map(|node| key_of(node)).collect();
    let mut reports = Vec::new();
    for shard in shards {
        let map = maps
            .get_opt(&report_map(shard))
            .await
            .context("the reports can't be read")?;
        let data = map.and_then(|map| map.data).unwrap_or_default();
        reports.extend(
            data.into_iter()
                .filter(|(key, _)| keys.is_empty() || keys.contains(key))
                .map(|(node, text)| v1::Report { node, text }),
        );
    }
    reports.sort_by(|a, b| a.node.cmp(&b.node));
    Ok(reports)
}
