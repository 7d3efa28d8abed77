//! A simulated agent: the service `quartermaster.v1.Agent` over a simulated machine.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use quartermaster_proto::v1::{
    CancelRequest, CancelResponse, CommandHeader, DescribeRequest, Failure, FailureReason, ImageFailed,
    ImageReady, NodeDescription, PreviewRequest, PreviewResponse, ProvisionEvent, ProvisionRequest, PullDone,
    PullEvent, PullRequest, ReleaseRequest, ReleaseResponse, Stage, StageFinished, UnprovisionRequest,
    VerifyRequest, agent_server, provision_event, pull_event,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::command::Command;
use super::ledger::locked;
use super::line::Caller;
use super::machine::{Change, Machine, failure};

/// One agent's process: it knows what it was ordered since it started, and ends with its pod or earlier.
#[derive(Debug)]
pub(super) struct Agent {
    /// How it shows itself.
    pub tls: Arc<rustls::ServerConfig>,
    life: CancellationToken,
    /// Ends all connections that are open now.
    lines: Mutex<CancellationToken>,
    frozen: Mutex<Option<Instant>>,
    slowness: AtomicU32,
    term: AtomicU64,
    commands: Mutex<HashMap<String, Known>>,
    /// The command that is changing the machine.
    turn: Mutex<Option<String>>,
}

#[derive(Debug, Clone)]
enum Known {
    Change(Arc<Command<ProvisionEvent>>),
    Pull(Arc<Command<PullEvent>>),
}

impl Agent {
    pub(super) fn new(tls: Arc<rustls::ServerConfig>) -> Arc<Self> {
        let life = CancellationToken::new();
        Arc::new(Self {
            tls,
            lines: Mutex::new(life.child_token()),
            life,
            frozen: Mutex::default(),
            slowness: AtomicU32::new(1),
            term: AtomicU64::new(0),
            commands: Mutex::default(),
            turn: Mutex::default(),
        })
    }

    /// The process ends; its commands and connections with it.
    pub(super) fn kill(&self) {
        self.life.cancel();
    }

    /// Ends when the process has.
    pub(super) async fn ended(&self) {
        self.life.cancelled().await;
    }

    /// Its connections break; it lives on.
    pub(super) fn cut(&self) {
        let old = std::mem::replace(&mut *locked(&self.lines), self.life.child_token());
        old.cancel();
    }

    /// What connections that are made now end with.
    pub(super) fn line(&self) -> CancellationToken {
        locked(&self.lines).clone()
    }

    /// Nothing is read or written for so long, and no connection is closed.
    pub(super) fn freeze(&self, time: Duration) {
        *locked(&self.frozen) = Some(Instant::now() + time);
    }

    /// Until when nothing is read or written.
    pub(super) fn frozen_until(&self) -> Option<Instant> {
        locked(&self.frozen).filter(|until| *until > Instant::now())
    }

    /// Everything takes so many times as long from now on.
    pub(super) fn slow_down(&self, factor: u32) {
        self.slowness.store(factor, Ordering::Relaxed);
    }

    pub(super) fn slowness(&self) -> u32 {
        self.slowness.load(Ordering::Relaxed)
    }

    /// Refuses a header of a coordinator that leads no more.
    fn admit(&self, header: Option<CommandHeader>, machine: &Machine) -> Result<String, Status> {
        let header = header.ok_or_else(|| Status::invalid_argument("the command has no header"))?;
        let seen = self.term.fetch_max(header.term, Ordering::SeqCst);
        if header.term < seen {
            machine.ledger.stale.fetch_add(1, Ordering::Relaxed);
            return Err(Status::failed_precondition(format!(
                "the command is of term {}, and one of term {seen} has been here",
                header.term
            )));
        }
        Ok(header.id)
    }

    /// The command of this id, if it is known; else it is made known.
    fn enter(&self, id: &str, make: impl FnOnce() -> Known, machine: &Machine) -> Option<Known> {
        let mut commands = locked(&self.commands);
        if let Some(known) = commands.get(id) {
            return Some(known.clone());
        }
        commands.insert(id.to_owned(), make());
        machine.ledger.commands.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn take_turn(&self, id: &str) -> Result<(), Failure> {
        let mut turn = locked(&self.turn);
        if let Some(other) = &*turn {
            return Err(failure(
                FailureReason::Busy,
                Stage::Unspecified,
                &format!("the agent is busy with the command {other}"),
            ));
        }
        *turn = Some(id.to_owned());
        Ok(())
    }
}

type Events<E> = Pin<Box<dyn Stream<Item = Result<E, Status>> + Send>>;

/// Serves all agents of the fleet: which of them is meant lies in the connection.
pub(super) struct Service;

impl Service {
    fn change(
        caller: Caller,
        header: Option<CommandHeader>,
        change: Change,
    ) -> Result<Response<Events<ProvisionEvent>>, Status> {
        let Caller { machine, agent } = caller;
        let id = agent.admit(header, &machine)?;
        let command = Command::new();
        match agent.enter(&id, || Known::Change(Arc::clone(&command)), &machine) {
            Some(Known::Change(known)) => return Ok(Response::new(known.stream().boxed())),
            Some(Known::Pull(_)) => return Err(Status::invalid_argument("the id is that of a pull")),
            None => {}
        }
        let stream = command.stream().boxed();
        lose_now_and_then(&machine, &agent);
        tokio::spawn(async move {
            let run = carry_out(&machine, &agent, &id, change, &command);
            tokio::select! {
                () = run => {}
                () = agent.ended() => {}
            }
            command.end();
        });
        Ok(Response::new(stream))
    }
}

async fn carry_out(
    machine: &Arc<Machine>,
    agent: &Agent,
    id: &str,
    change: Change,
    command: &Command<ProvisionEvent>,
) {
    let begun = Instant::now();
    let tell = |event: provision_event::Event| {
        let event = ProvisionEvent { event: Some(event) };
        if machine.happens(machine.temper.echoes) {
            command.push(event.clone());
        }
        command.push(event);
    };
    let told = |stage: Stage, took: Duration| {
        tell(provision_event::Event::Finished(StageFinished {
            stage: stage.into(),
            took: prost_types::Duration::try_from(took).ok(),
            summary: "simulated".to_owned(),
        }));
    };
    let result = match agent.take_turn(id) {
        Ok(()) => {
            let result = machine.change(change, id, told).await;
            *locked(&agent.turn) = None;
            result
        }
        Err(busy) => Err(busy),
    };
    if change == Change::Install {
        let micros = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        machine.ledger.install_micros.fetch_add(micros, Ordering::Relaxed);
    }
    tell(match result {
        Ok(done) => provision_event::Event::Done(done),
        Err(failure) => provision_event::Event::Failed(failure),
    });
}

/// Breaks the connections in the middle of a command that was drawn for it.
fn lose_now_and_then(machine: &Arc<Machine>, agent: &Arc<Agent>) {
    if machine.happens(machine.temper.losses) {
        let (machine, agent) = (Arc::clone(machine), Arc::clone(agent));
        tokio::spawn(async move {
            machine.pass(machine.temper.stage * 2).await;
            agent.cut();
        });
    }
}

async fn pull_all(machine: &Arc<Machine>, request: PullRequest, command: &Command<PullEvent>) {
    let begun = Instant::now();
    let parallelism = usize::try_from(request.parallelism).unwrap_or(0);
    let parallelism = if parallelism == 0 { 3 } else { parallelism };
    let (mut ready, mut failed) = (0, 0);
    let mut pulls = futures::stream::iter(request.images)
        .map(async |wanted| {
            let pulled = machine.pull(&wanted.reference).await;
            (wanted, pulled)
        })
        .buffer_unordered(parallelism);
    while let Some((wanted, pulled)) = pulls.next().await {
        let event = match pulled {
            Ok(was_present) => {
                ready += 1;
                pull_event::Event::Ready(ImageReady {
                    digest: digest(&wanted.reference),
                    image: wanted.reference,
                    was_present,
                    size: 1_000_000,
                    attempts: 1,
                    ..ImageReady::default()
                })
            }
            Err(failure) => {
                failed += 1;
                pull_event::Event::Failed(ImageFailed {
                    image: wanted.reference,
                    failure: Some(failure),
                    attempts: 1,
                    ..ImageFailed::default()
                })
            }
        };
        let event = PullEvent { event: Some(event) };
        if machine.happens(machine.temper.echoes) {
            command.push(event.clone());
        }
        command.push(event);
    }
    let micros = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    machine.ledger.pull_micros.fetch_add(micros, Ordering::Relaxed);
    command.push(PullEvent {
        event: Some(pull_event::Event::Done(PullDone {
            ready,
            failed,
            boot_id: machine.boot_id(),
            ..PullDone::default()
        })),
    });
}

/// As long as a real one, and the same for the same image.
fn digest(reference: &str) -> String {
    let name = reference.rsplit_once(':').map_or(reference, |(name, _)| name);
    let digits: String = reference
        .bytes()
        .rev()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{name}@sha256:{digits:0<64.64}")
}

fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    request
        .extensions()
        .get::<Caller>()
        .cloned()
        .ok_or_else(|| Status::internal("the connection is of no machine"))
}

#[tonic::async_trait]
impl agent_server::Agent for Service {
    type ProvisionStream = Events<ProvisionEvent>;
    type UnprovisionStream = Events<ProvisionEvent>;
    type VerifyStream = Events<ProvisionEvent>;
    type PullStream = Events<PullEvent>;

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<NodeDescription>, Status> {
        Ok(Response::new(caller(&request)?.machine.describe()))
    }

    async fn preview(&self, request: Request<PreviewRequest>) -> Result<Response<PreviewResponse>, Status> {
        Ok(Response::new(PreviewResponse {
            node: Some(caller(&request)?.machine.describe()),
            ..PreviewResponse::default()
        }))
    }

    async fn provision(
        &self,
        request: Request<ProvisionRequest>,
    ) -> Result<Response<Self::ProvisionStream>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let change = if request.prepare_only {
            Change::Prepare
        } else {
            Change::Install
        };
        Self::change(caller, request.header, change)
    }

    async fn unprovision(
        &self,
        request: Request<UnprovisionRequest>,
    ) -> Result<Response<Self::UnprovisionStream>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let change = if request.prepare_only {
            Change::Prepare
        } else {
            Change::Remove
        };
        Self::change(caller, request.header, change)
    }

    async fn verify(&self, request: Request<VerifyRequest>) -> Result<Response<Self::VerifyStream>, Status> {
        let caller = caller(&request)?;
        Self::change(caller, request.into_inner().header, Change::Verify)
    }

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let Caller { machine, agent } = caller(&request)?;
        let mut request = request.into_inner();
        let id = agent.admit(request.header.take(), &machine)?;
        let command = Command::new();
        match agent.enter(&id, || Known::Pull(Arc::clone(&command)), &machine) {
            Some(Known::Pull(known)) => return Ok(Response::new(known.stream().boxed())),
            Some(Known::Change(_)) => {
                return Err(Status::invalid_argument("the id is that of a change"));
            }
            None => {}
        }
        let stream = command.stream().boxed();
        lose_now_and_then(&machine, &agent);
        tokio::spawn(async move {
            tokio::select! {
                () = pull_all(&machine, request, &command) => {}
                () = agent.ended() => {}
            }
            command.end();
            // Its events are not asked for again, and a fleet has very many of them.
            locked(&agent.commands).remove(&id);
        });
        Ok(Response::new(stream))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let Caller { machine, agent } = caller(&request)?;
        agent.admit(request.into_inner().header, &machine)?;
        Ok(Response::new(CancelResponse::default()))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let Caller { machine, agent } = caller(&request)?;
        agent.admit(request.into_inner().header, &machine)?;
        Ok(Response::new(ReleaseResponse::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_as_long_as_a_real_one() {
        let digest = digest("registry.fleet/absent/7:1.0");
        let (name, hex) = digest.split_once("@sha256:").unwrap();
        assert_eq!((name, hex.len()), ("registry.fleet/absent/7", 64));
    }
}
