//! Effect: dialling agents, ordering them to do things, and telling the engine what they report.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use quartermaster_proto::v1::agent_client::AgentClient;
use quartermaster_proto::v1::watch_event;
use quartermaster_proto::v1::{
    CommandHeader, FailureReason, ProvisionEvent, ProvisionRequest, UnprovisionRequest, VerifyRequest,
    provision_event,
};
use quartermaster_proto::{MAX_MESSAGE, v1};
use tokio::sync::mpsc;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use tracing::{info, warn};

use super::Engine;
use super::input::Input;
use crate::node::{Outcome, Work};

/// A provisioning that has not come to its end by then is asked about again.
const PROVISION_DEADLINE: Duration = Duration::from_secs(300);

impl Engine {
    /// Dials the agent of a node; the answer comes back as an input.
    pub(super) fn dial(&mut self, node: &str, address: SocketAddr) {
        let runtime = self.runtime.entry(node.to_owned()).or_default();
        runtime.agent.dialling = true;
        let pod_uid = runtime
            .agent
            .pod
            .as_ref()
            .map(|(_, uid)| uid.clone())
            .unwrap_or_default();
        let (dialer, inputs, node) = (self.setup.dialer.clone(), self.inputs.clone(), node.to_owned());
        self.tasks.spawn(async move {
            let result = dialer
                .dial(address, &node)
                .await
                .map_err(|error| error.to_string());
            let _ = inputs
                .send(Input::Linked {
                    node,
                    pod_uid,
                    result,
                })
                .await;
        });
    }

    /// Orders work about the runtime.
    pub(super) fn order(&mut self, node: &str, channel: Channel, work: Work, id: String) {
        self.runtime.entry(node.to_owned()).or_default().working = Some(work);
        info!(node, command = id, work = ?work, "ordered");
        self.reports.begin(
            node,
            format!("{:.0} {} (command {id})", jiff::Timestamp::now(), work.word()),
        );
        self.tell_watchers(node, watch_event::Event::Ordered(work.word().to_owned()));
        let header = self.header(id);
        let (inputs, node) = (self.inputs.clone(), node.to_owned());
        self.tasks.spawn(async move {
            let begun = Instant::now();
            let provision = provision(channel, header, work, &node, &inputs);
            let outcome = tokio::time::timeout(PROVISION_DEADLINE, provision)
                .await
                .unwrap_or(Outcome::Lost);
            let took = begun.elapsed();
            let finished = Input::Finished {
                node,
                work,
                outcome,
                took,
            };
            let _ = inputs.send(finished).await;
        });
    }

    pub(super) fn header(&self, id: String) -> Option<CommandHeader> {
        Some(CommandHeader {
            id,
            term: self.setup.term,
        })
    }
}

pub(super) fn client(channel: Channel) -> AgentClient<Channel> {
    AgentClient::new(channel).max_decoding_message_size(MAX_MESSAGE)
}

async fn provision(
    channel: Channel,
    header: Option<CommandHeader>,
    work: Work,
    node: &str,
    inputs: &mpsc::Sender<Input>,
) -> Outcome {
    let mut agent = client(channel);
    let answer = match work {
        Work::PrepareInstall | Work::Install => {
            let prepare_only = work == Work::PrepareInstall;
            agent.provision(ProvisionRequest { header, prepare_only }).await
        }
        Work::Verify => agent.verify(VerifyRequest { header }).await,
        Work::PrepareRemove => {
            let request = UnprovisionRequest {
                header,
                prepare_only: true,
                force: false,
            };
            agent.unprovision(request).await
        }
        Work::Remove { force } => {
            let request = UnprovisionRequest {
                header,
                prepare_only: false,
                force,
            };
            agent.unprovision(request).await
        }
    };
    match answer {
        Ok(stream) => follow(stream.into_inner(), work, node, inputs).await,
        Err(status) => refused(node, &status),
    }
}

async fn follow(
    mut stream: Streaming<ProvisionEvent>,
    work: Work,
    node: &str,
    inputs: &mpsc::Sender<Input>,
) -> Outcome {
    loop {
        let event = match stream.message().await {
            Ok(Some(ProvisionEvent { event: Some(event) })) => event,
            Ok(Some(ProvisionEvent { event: None })) => continue,
            Ok(None) => return Outcome::Lost,
            Err(status) => return refused(node, &status),
        };
        let outcome = match &event {
            provision_event::Event::Done(done) => {
                let described = done.node.clone().unwrap_or_default();
                Some(Outcome::Done {
                    boot_id: described.boot_id,
                    machine_id: described.machine_id,
                })
            }
            provision_event::Event::Failed(failure) => Some(Outcome::Failed {
                reason: failure.reason(),
                message: words(failure),
                stage: failure.stage(),
                rolled_back: failure.rolled_back,
            }),
            _ => None,
        };
        let input = Input::Stage {
            node: node.to_owned(),
            work,
            event,
        };
        if inputs.send(input).await.is_err() {
            return Outcome::Lost;
        }
        if let Some(outcome) = outcome {
            return outcome;
        }
    }
}

/// What a failure says to a person: the agent's message, who uses the handler, and what to do.
pub(super) fn words(failure: &v1::Failure) -> String {
    let mut text = failure.message.clone();
    // The message may name them already.
    if failure
        .users
        .first()
        .is_some_and(|user| !text.contains(user.as_str()))
    {
        text.push_str(&format!(": {}", failure.users.join(", ")));
        let named = u32::try_from(failure.users.len()).unwrap_or(u32::MAX);
        if let Some(more @ 1..) = failure.user_count.checked_sub(named) {
            text.push_str(&format!(" and {more} more"));
        }
    }
    if !failure.remedy.is_empty() {
        text.push_str(&format!(". {}", failure.remedy));
    }
    text
}

/// An answer by status instead of by report. A malformed command is our own fault and stays one; of
/// everything else nobody knows what became of it, so the same command is sent again.
fn refused(node: &str, status: &Status) -> Outcome {
    warn!(node, code = ?status.code(), message = status.message(), "the agent's answer was lost or refused");
    match status.code() {
        Code::InvalidArgument | Code::Unimplemented => Outcome::Failed {
            reason: FailureReason::Internal,
            message: format!("the agent does not understand the command: {}", status.message()),
            stage: v1::Stage::Unspecified,
            rolled_back: false,
        },
        _ => Outcome::Lost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_who_uses_the_handler_and_what_to_do() {
        let failure = v1::Failure {
            message: "the handler is in use".into(),
            remedy: "Delete these pods".into(),
            users: vec!["a/x".into(), "b/y".into()],
            user_count: 5,
            ..v1::Failure::default()
        };
        assert_eq!(
            words(&failure),
            "the handler is in use: a/x, b/y and 3 more. Delete these pods"
        );
    }

    #[test]
    fn only_a_command_that_is_not_understood_is_not_sent_again() {
        assert!(matches!(
            refused("n", &Status::invalid_argument("")),
            Outcome::Failed { .. }
        ));
        for status in [
            Status::unavailable(""),
            Status::failed_precondition("stale"),
            Status::internal(""),
        ] {
            assert_eq!(refused("n", &status), Outcome::Lost);
        }
    }
}
