//! The way to the leader: the holder of the Lease, by `pods/exec` of the coordinator's own relay.
//!
//! An exec ends without a word when containerd restarts under the leader's pod, which is what this product does for a
//! living. So an end is never an answer: the leader is looked for anew and asked again, for a bounded time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::AttachParams;
use quartermaster_proto::v1;
use quartermaster_proto::v1::operator_client::OperatorClient;
use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status, Streaming};
use tower::service_fn;

use crate::cluster::Cluster;
use crate::trouble::{Trouble, chain};

/// The Lease that the leader holds.
pub(crate) const LEASE: &str = "quartermaster-coordinator";
const RELAY: [&str; 2] = ["/quartermaster-coordinator", "relay"];
/// For one way to be made, handshakes and all.
const CONNECT: Duration = Duration::from_secs(15);
/// For how long a leader that does not answer is asked again.
const PATIENCE: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(500);
/// A way on which nothing is heard for so long is taken for dead.
const ALIVE: Duration = Duration::from_secs(10);
/// Bytes that wait on either side of an exec.
const BUFFER: usize = 64 * 1024;
/// Longest answer: the status of ten thousand nodes.
const LONGEST_ANSWER: usize = 16 * 1024 * 1024;

/// A client of the leader.
pub(crate) type Asked = OperatorClient<Channel>;

/// The leader, wherever it is.
#[derive(Clone)]
pub(crate) struct Leader {
    cluster: Cluster,
    channel: Arc<Mutex<Option<Channel>>>,
    patience: Duration,
}

impl Leader {
    /// The leader of a cluster. Nothing is asked yet.
    pub(crate) fn of(cluster: &Cluster) -> Self {
        Self {
            cluster: cluster.clone(),
            channel: Arc::default(),
            patience: PATIENCE,
        }
    }

    /// The same leader, asked again for this long at most.
    pub(crate) fn within(&self, patience: Duration) -> Self {
        Self {
            patience,
            ..self.clone()
        }
    }

    /// Asks it, and again when the answer was lost.
    ///
    /// # Errors
    /// When the person may not, nobody leads, or the leader says no.
    pub(crate) async fn ask<T, Answer>(&self, ask: impl Fn(Asked) -> Answer) -> Result<T, Trouble>
    where
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let begun = Instant::now();
        loop {
            let trouble = match self.ask_once(&ask).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            if !trouble.may_pass() || begun.elapsed() >= self.patience {
                return Err(trouble);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Asks it once.
    ///
    /// # Errors
    /// As [`Leader::ask`], and when the answer is lost.
    pub(crate) async fn ask_once<T, Answer>(&self, ask: impl Fn(Asked) -> Answer) -> Result<T, Trouble>
    where
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let channel = self.channel().await?;
        let client = OperatorClient::new(channel).max_decoding_message_size(LONGEST_ANSWER);
        match ask(client).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) if is_lost(&status) => {
                self.forget();
                Err(self.not_reached(status_words(&status)))
            }
            Err(status) => Err(Trouble::Refused(status.message().to_owned())),
        }
    }

    /// Everything that happens on some nodes, or on all, from now on.
    ///
    /// # Errors
    /// As [`Leader::ask_once`].
    pub(crate) async fn watch(&self, nodes: &[String]) -> Result<Streaming<v1::WatchEvent>, Trouble> {
        let request = v1::WatchRequest {
            nodes: nodes.to_vec(),
        };
        self.ask_once(|mut leader| {
            let request = request.clone();
            async move { leader.watch(request).await }
        })
        .await
    }

    /// Forgets the way to it: the next time it is looked for anew.
    pub(crate) fn forget(&self) {
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    async fn channel(&self) -> Result<Channel, Trouble> {
        let kept = self
            .channel
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(channel) = kept {
            return Ok(channel);
        }
        let channel = timeout(CONNECT, self.connect())
            .await
            .map_err(|_| self.not_reached("it did not answer in time".to_owned()))??;
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = Some(channel.clone());
        Ok(channel)
    }

    async fn connect(&self) -> Result<Channel, Trouble> {
        let namespace = &self.cluster.namespace;
        let leases: Api<Lease> = Api::namespaced(self.cluster.api.clone(), namespace);
        let lease = leases.get(LEASE).await.map_err(|error| match error {
            kube::Error::Api(status) if status.code == 404 => Trouble::NotInstalled(namespace.clone()),
            other => Trouble::of(&format!("read the Lease {namespace}/{LEASE}"), &other),
        })?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        let holder = holder
            .filter(|holder| !holder.is_empty())
            .ok_or_else(|| self.not_reached("nobody holds the Lease".to_owned()))?;
        let pods: Api<Pod> = Api::namespaced(self.cluster.streams.clone(), namespace);
        let attach = AttachParams::default()
            .stdin(true)
            .stdout(true)
            .stderr(true)
            .max_stdin_buf_size(BUFFER)
            .max_stdout_buf_size(BUFFER);
        let mut relay = pods.exec(&holder, RELAY, &attach).await.map_err(|error| {
            let what = format!("exec into pods of the namespace {namespace}, which leads to the leader");
            match Trouble::of(&what, &error) {
                Trouble::Api { why, .. } => self.not_reached(format!("{holder}: {why}")),
                other => other,
            }
        })?;
        let (Some(answers), Some(questions), Some(mut complaints)) =
            (relay.stdout(), relay.stdin(), relay.stderr())
        else {
            return Err(self.not_reached("exec gave no streams".to_owned()));
        };
        let mut way = Some(TokioIo::new(tokio::io::join(answers, questions)));
        // There is one way, and it is used once: when it ends, the leader is looked for anew.
        let connector = service_fn(move |_: Uri| {
            std::future::ready(
                way.take()
                    .ok_or_else(|| std::io::Error::other("the exec has ended")),
            )
        });
        let connected = Endpoint::from_static("http://operator.local")
            .http2_keep_alive_interval(ALIVE)
            .keep_alive_timeout(ALIVE)
            .connect_with_connector(connector)
            .await;
        match connected {
            Ok(channel) => {
                // The exec lives as long as this, and this until the streams of the channel are dropped.
                tokio::spawn(async move {
                    let complaints = async { tokio::io::copy(&mut complaints, &mut tokio::io::sink()).await };
                    let _ = tokio::join!(relay.join(), complaints);
                });
                Ok(channel)
            }
            Err(error) => {
                let mut said = String::new();
                let _ = timeout(PAUSE, complaints.read_to_string(&mut said)).await;
                let said = said.lines().next().unwrap_or_default().trim().to_owned();
                Err(self.not_reached(if said.is_empty() { chain(&error) } else { said }))
            }
        }
    }

    fn not_reached(&self, why: String) -> Trouble {
        Trouble::NoLeader {
            namespace: self.cluster.namespace.clone(),
            why,
        }
    }
}

/// Whether an answer says nothing of what was asked: the way broke, or it was the wrong replica.
fn is_lost(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::FailedPrecondition | Code::Internal
    )
}

fn status_words(status: &Status) -> String {
    match status.message() {
        "" => status.code().description().to_owned(),
        words => words.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_way_is_no_answer_and_a_no_is_one() {
        for lost in [
            Status::unavailable("broken pipe"),
            Status::unknown("h2 protocol error"),
            Status::failed_precondition("this replica does not lead"),
        ] {
            assert!(is_lost(&lost), "{lost}");
        }
        for no in [
            Status::not_found("there is no node x"),
            Status::deadline_exceeded("no agent has answered in time"),
            Status::invalid_argument("too many"),
        ] {
            assert!(!is_lost(&no), "{no}");
        }
    }
}
