//! The commands of `quartermaster.v1.Agent`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt};
use quartermaster_proto::v1::agent_server;
use quartermaster_proto::v1::{
    CancelRequest, CancelResponse, CommandHeader, DescribeRequest, FailureReason, NodeDescription,
    PreviewRequest, PreviewResponse, ProvisionEvent, ProvisionRequest, PullDone, PullEvent, PullRequest,
    ReleaseRequest, ReleaseResponse, Stage, UnprovisionRequest, VerifyRequest, pull_event,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::command::{Command, Entry, Registry, locked};
use super::convert;
use super::metrics::Metrics;
use crate::describe::describe;
use crate::failure::{Failure, cut};
use crate::install::{self, Done, Progress, Stop, Target};
use crate::pull::{Order, Release, Sink, pull, release};

/// Longest diff of a preview, in bytes.
const MAX_PREVIEW: usize = 256 * 1024;
/// How long a pull goes on with nobody attached.
const PATIENCE: Duration = Duration::from_secs(60);

/// The agent behind the service.
#[derive(Debug)]
pub struct Agent {
    node_name: String,
    target: Target,
    /// The highest term of a coordinator seen.
    term: AtomicU64,
    provisions: Registry<ProvisionEvent>,
    pulls: Registry<PullEvent>,
    /// How to stop the pulls that run.
    stops: Stops,
    /// Kind of the command that is changing the node.
    changing: Arc<Mutex<Option<&'static str>>>,
    metrics: Arc<Metrics>,
}

/// The service, one for each server.
#[derive(Debug, Clone)]
pub struct Service(Arc<Agent>);

/// The right to change the node, in this process. The lock on the host is for other processes.
struct Turn(Arc<Mutex<Option<&'static str>>>);

impl Drop for Turn {
    fn drop(&mut self) {
        *locked(&self.0) = None;
    }
}

impl Agent {
    pub(crate) fn new(node_name: String, target: Target, metrics: Arc<Metrics>) -> Self {
        Self {
            node_name,
            target,
            term: AtomicU64::new(0),
            provisions: Registry::new(),
            pulls: Registry::new(),
            stops: Stops::default(),
            changing: Arc::default(),
            metrics,
        }
    }

    /// Ends when no command runs any more. Pulls are stopped: nobody is left to go on with them for.
    pub(crate) async fn drain(&self) {
        for token in locked(&self.stops).values() {
            token.cancel();
        }
        self.provisions.drained().await;
        self.pulls.drained().await;
    }

    /// Finishes, in the background, what a killed agent or a power loss left in the middle.
    pub(crate) fn finish_interrupted(self: &Arc<Self>) {
        let Ok(turn) = self.turn("settle") else {
            return;
        };
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let target = &agent.target;
            let layout = match target.located().await {
                Ok(located) => located.layout().clone(),
                Err(_) => target.layout().clone(),
            };
            if let Err(error) = install::settle_at_start(&target.root, &layout).await {
                tracing::error!(%error, "an interrupted change could not be finished");
            }
            drop(turn);
        });
    }

    fn turn(&self, kind: &'static str) -> Result<Turn, Failure> {
        let mut changing = locked(&self.changing);
        match *changing {
            None => {
                *changing = Some(kind);
                Ok(Turn(Arc::clone(&self.changing)))
            }
            Some(other) => Err(Failure {
                reason: FailureReason::Busy,
                message: format!("the agent is busy with another command ({other})"),
                remedy: String::new(),
                stage: Stage::Unspecified,
                rolled_back: false,
                users: Vec::new(),
            }),
        }
    }

    /// Refuses a header of a coordinator that no longer leads.
    fn admit(&self, header: Option<CommandHeader>) -> Result<String, Status> {
        let header = header.ok_or_else(|| Status::invalid_argument("the command has no header"))?;
        let seen = self.term.fetch_max(header.term, Ordering::SeqCst);
        if header.term < seen {
            return Err(Status::failed_precondition(format!(
                "the command is of term {}, and one of term {seen} has been here",
                header.term
            )));
        }
        Ok(header.id)
    }

    async fn describe(&self) -> NodeDescription {
        describe(&self.node_name, &self.target).await
    }

    /// Starts a command that changes the node, or attaches to it.
    fn change<F, W>(
        self: &Arc<Self>,
        header: Option<CommandHeader>,
        kind: &'static str,
        work: W,
    ) -> Result<Response<Events<ProvisionEvent>>, Status>
    where
        W: FnOnce(Arc<Self>, Progress) -> F,
        F: Future<Output = Result<Done, Failure>> + Send + 'static,
    {
        let id = self.admit(header)?;
        let command = match self.provisions.enter(&id, kind)? {
            Entry::Known(command) => return Ok(streamed(&command)),
            Entry::New(command) => command,
        };
        let stream = streamed(&command);
        let turn = match self.turn(kind) {
            Ok(turn) => turn,
            Err(busy) => {
                command.push(convert::failed(&busy));
                command.end();
                return Ok(stream);
            }
        };
        let reported = Arc::clone(&command);
        let logged = id.clone();
        let progress: Progress = Arc::new(move |event| {
            if let install::Event::Finished { stage, took, summary } = &event {
                tracing::info!(
                    command = logged,
                    kind,
                    stage = stage.word(),
                    took_ms = took.as_millis(),
                    summary,
                    "stage"
                );
            }
            reported.push(convert::progress(event));
        });
        let work = work(Arc::clone(self), progress);
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let ending = Ending(Arc::clone(&command));
            let result = work.await;
            agent.metrics.count(kind, result.is_ok());
            let last = match result {
                Ok(done) => {
                    tracing::info!(command = id, kind, restarted = done.restarted, "done");
                    convert::done(done, agent.describe().await)
                }
                Err(failure) => {
                    tracing::error!(
                        command = id,
                        kind,
                        stage = failure.stage.word(),
                        reason = failure.reason.camel_case(),
                        rolled_back = failure.rolled_back,
                        message = failure.message,
                        "failed"
                    );
                    convert::failed(&failure)
                }
            };
            // The turn ends first: who sees the last event may order the next command at once.
            drop(turn);
            command.push(last);
            drop(ending);
        });
        Ok(stream)
    }
}

type Stops = Arc<Mutex<HashMap<String, CancellationToken>>>;

/// A pull that can be stopped, for as long as it runs.
struct Stopped {
    stops: Stops,
    id: String,
    token: CancellationToken,
}

impl Stopped {
    fn begin(stops: &Stops, id: &str) -> Self {
        let token = CancellationToken::new();
        locked(stops).insert(id.to_owned(), token.clone());
        Self {
            stops: Arc::clone(stops),
            id: id.to_owned(),
            token,
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        locked(&self.stops).remove(&self.id);
    }
}

/// Ends a command's streams whatever becomes of its task.
struct Ending<E: Clone + Send + Sync + 'static>(Arc<Command<E>>);

impl<E: Clone + Send + Sync + 'static> Drop for Ending<E> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Service {
    /// A service of this agent.
    pub fn new(agent: Arc<Agent>) -> Self {
        Self(agent)
    }
}

type Events<E> = Pin<Box<dyn Stream<Item = Result<E, Status>> + Send>>;

fn streamed<E: Clone + Send + Sync + 'static>(command: &Arc<Command<E>>) -> Response<Events<E>> {
    Response::new(command.stream().boxed())
}

fn stop(prepare_only: bool) -> Stop {
    if prepare_only {
        Stop::BeforeSwap
    } else {
        Stop::AtTheEnd
    }
}

#[tonic::async_trait]
impl agent_server::Agent for Service {
    type ProvisionStream = Events<ProvisionEvent>;
    type UnprovisionStream = Events<ProvisionEvent>;
    type VerifyStream = Events<ProvisionEvent>;
    type PullStream = Events<PullEvent>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<NodeDescription>, Status> {
        Ok(Response::new(self.0.describe().await))
    }

    async fn preview(&self, _: Request<PreviewRequest>) -> Result<Response<PreviewResponse>, Status> {
        let (diff, refusal) = match install::preview_diff(&self.0.target).await {
            Ok(diff) => (diff, None),
            Err(failure) => (String::new(), Some(failure.to_wire())),
        };
        Ok(Response::new(PreviewResponse {
            diff: cut(&diff, MAX_PREVIEW),
            refusal,
            node: Some(self.0.describe().await),
        }))
    }

    async fn provision(
        &self,
        request: Request<ProvisionRequest>,
    ) -> Result<Response<Self::ProvisionStream>, Status> {
        let request = request.into_inner();
        let stop = stop(request.prepare_only);
        self.0
            .change(request.header, "provision", |agent, progress| async move {
                install::install(&agent.target, &progress, stop).await
            })
    }

    async fn unprovision(
        &self,
        request: Request<UnprovisionRequest>,
    ) -> Result<Response<Self::UnprovisionStream>, Status> {
        let request = request.into_inner();
        let (stop, force) = (stop(request.prepare_only), request.force);
        self.0
            .change(request.header, "unprovision", |agent, progress| async move {
                install::uninstall(&agent.target, &progress, stop, force).await
            })
    }

    async fn verify(&self, request: Request<VerifyRequest>) -> Result<Response<Self::VerifyStream>, Status> {
        self.0.change(
            request.into_inner().header,
            "verify",
            |agent, progress| async move { install::verify_only(&agent.target, &progress).await },
        )
    }

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let mut request = request.into_inner();
        let id = self.0.admit(request.header.take())?;
        let order = Order::of(request).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let command = match self.0.pulls.enter(&id, "pull")? {
            Entry::Known(command) => return Ok(streamed(&command)),
            Entry::New(command) => command,
        };
        let stream = streamed(&command);
        let stopped = Stopped::begin(&self.0.stops, &id);
        let agent = Arc::clone(&self.0);
        tokio::spawn(async move {
            let ending = Ending(Arc::clone(&command));
            let reported = Arc::clone(&command);
            let sink: Sink = Arc::new(move |event| {
                let (image, event, is_last) = convert::image(event);
                if is_last {
                    reported.push_last(&image, event);
                } else {
                    reported.push_latest(&image, event);
                }
            });
            let node = crate::describe::pulls(&agent.target).await;
            let cancelled = stopped.token.clone();
            let pulling = pull(&node, &order, &sink, &cancelled);
            tokio::pin!(pulling);
            let tally = tokio::select! {
                tally = &mut pulling => tally,
                () = command.abandoned(PATIENCE) => {
                    tracing::info!(command = id, "a pull that nobody watches any more is stopped");
                    cancelled.cancel();
                    pulling.await
                }
            };
            agent.metrics.count("pull", tally.failed == 0);
            tracing::info!(
                command = id,
                ready = tally.ready,
                failed = tally.failed,
                bytes = tally.fetched,
                "pulled"
            );
            command.push(PullEvent {
                event: Some(pull_event::Event::Done(PullDone {
                    ready: tally.ready,
                    failed: tally.failed,
                    boot_id: crate::describe::boot_id(&agent.target.root),
                    bytes_fetched: tally.fetched,
                    pins_held: tally.pins_held,
                })),
            });
            drop(stopped);
            drop(ending);
        });
        Ok(stream)
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let request = request.into_inner();
        self.0.admit(request.header)?;
        let running = locked(&self.0.stops).get(&request.command_id).cloned();
        if let Some(token) = &running {
            tracing::info!(command = request.command_id, "a pull is cancelled");
            token.cancel();
        }
        Ok(Response::new(CancelResponse {
            was_running: running.is_some(),
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let request = request.into_inner();
        self.0.admit(request.header)?;
        if request.owner.is_empty() || request.keep.len() > 1000 {
            return Err(Status::invalid_argument(
                "a release names its owner and keeps at most 1000 images",
            ));
        }
        let order = Release {
            owner: Some(request.owner),
            keep: request.keep,
            remove_unused: request.remove_unused,
        };
        let node = crate::describe::pulls(&self.0.target).await;
        let released = release(&node.daemon, &order)
            .await
            .map_err(|status| Status::unavailable(format!("containerd: {}", status.message())))?;
        tracing::info!(
            owner = order.owner,
            released = released.released,
            removed = released.removed,
            held = released.held.len(),
            "released"
        );
        Ok(Response::new(convert::released(released)))
    }
}
