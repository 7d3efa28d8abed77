//! Pods that a restart of containerd would end, whoever ordered it.
//!
//! At its start containerd asks every shim it finds for its processes. One that answers with none, or not at all, is
//! taken for a leftover of a crash and ended ("cleaning leaked shim process": since 1.7, `runtime/v2/shim_load.go`
//! there and `core/runtime/v2/shim_load.go` in 2.x; a 1.6.20 was seen to leave such shims alone). The answer comes from
//! a cgroup, and there are nodes whose running containers are in another: systemd of 2024 and later, on cgroup v1,
//! takes sandboxes out of the devices hierarchy in which runc looks. From 2.0 on CRI's sandboxes are known by their
//! own store and are spared; containers are not.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use containerd_client::services::v1::ListPidsRequest;
use containerd_client::services::v1::tasks_client::TasksClient;
use futures::StreamExt;
use k8s_cri::v1::{ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandboxState};
use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

use crate::config::Version;
use crate::containerd::Daemon;
use crate::failure::Reported;

const NAMESPACE: &str = "k8s.io";
/// Each question has the shim start a program.
const AT_ONCE: usize = 8;
const PAUSE: Duration = Duration::from_millis(300);
/// For a containerd that is restarting just now.
const AWAKE: Duration = Duration::from_secs(15);
const SHOWN: usize = 5;

/// Why containerd is not restarted.
#[derive(Debug, Error)]
pub(crate) enum RestartUnsafe {
    /// Pods would end.
    #[error("a restart of containerd {version} would end {} running pod(s) in whose cgroups it finds no process: {}", .pods.len(), named(.pods))]
    Pods {
        /// The daemon.
        version: Version,
        /// `namespace/name`
        pods: Vec<String>,
    },
    /// It can't be known.
    #[error("containerd cannot be asked for the processes of its pods: {0}")]
    NoAnswer(String),
}

impl Reported for RestartUnsafe {
    fn reason(&self) -> FailureReason {
        match self {
            Self::Pods { .. } => FailureReason::RestartUnsafe,
            Self::NoAnswer(_) => FailureReason::ContainerdUnreachable,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::Pods { .. } => "Nothing was touched. Delete these pods, or drain the node, then try again: what is started after the node's last boot of systemd is usually where containerd looks. cgroup v2 does not know the problem.".into(),
            Self::NoAnswer(_) => "`systemctl status containerd` on the node says more.".into(),
        }
    }
}

fn named(pods: &[String]) -> String {
    let mut text = pods[..pods.len().min(SHOWN)].join(", ");
    if pods.len() > SHOWN {
        text.push_str(&format!(" and {} more", pods.len() - SHOWN));
    }
    text
}

/// A running shim's task.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Task {
    /// `namespace/name`
    pod: String,
    is_sandbox: bool,
    /// As containerd would find them.
    processes: usize,
}

/// The pods of `tasks` that a start of this containerd would end.
fn endangered(version: Version, tasks: &[Task]) -> Vec<String> {
    if (version.major, version.minor) < (1, 7) {
        return Vec::new();
    }
    let pods: BTreeSet<&str> = tasks
        .iter()
        .filter(|task| task.processes == 0 && (version.major < 2 || !task.is_sandbox))
        .map(|task| task.pod.as_str())
        .collect();
    pods.into_iter().map(str::to_owned).collect()
}

/// Checks that a restart ends no pod.
///
/// # Errors
/// [`RestartUnsafe`].
pub(crate) async fn check(daemon: &Daemon, version: Version) -> Result<(), RestartUnsafe> {
    let deadline = Instant::now() + AWAKE;
    let look = || async {
        loop {
            match tasks(daemon).await {
                Ok(tasks) => return Ok(endangered(version, &tasks)),
                Err(status) if Instant::now() > deadline => {
                    return Err(RestartUnsafe::NoAnswer(status.message().to_owned()));
                }
                // Somebody restarts it in this moment.
                Err(_) => sleep(PAUSE).await,
            }
        }
    };
    if look().await?.is_empty() {
        return Ok(());
    }
    // What has just ended has no processes either, and is gone at the second look.
    sleep(PAUSE).await;
    let pods = look().await?;
    if pods.is_empty() {
        Ok(())
    } else {
        Err(RestartUnsafe::Pods { version, pods })
    }
}

async fn tasks(daemon: &Daemon) -> Result<Vec<Task>, Status> {
    let mut runtime = daemon.runtime();
    let sandboxes = runtime
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await?
        .into_inner()
        .items;
    let containers = runtime
        .list_containers(ListContainersRequest::default())
        .await?
        .into_inner()
        .containers;
    let mut pods = HashMap::new();
    let mut running = Vec::new();
    for sandbox in sandboxes {
        let metadata = sandbox.metadata.unwrap_or_default();
        pods.insert(
            sandbox.id.clone(),
            format!("{}/{}", metadata.namespace, metadata.name),
        );
        if sandbox.state == i32::from(PodSandboxState::SandboxReady) {
            running.push((sandbox.id.clone(), sandbox.id, true));
        }
    }
    for container in containers {
        if container.state == i32::from(ContainerState::ContainerRunning) {
            running.push((container.id, container.pod_sandbox_id, false));
        }
    }
    let pods = &pods;
    let asked = futures::stream::iter(running).map(|(id, sandbox, is_sandbox)| async move {
        Ok(Task {
            pod: pods.get(&sandbox).cloned().unwrap_or(sandbox),
            processes: processes(daemon, &id).await?,
            is_sandbox,
        })
    });
    let answers: Vec<Result<Task, Status>> = asked.buffer_unordered(AT_ONCE).collect().await;
    answers.into_iter().collect()
}

/// How many processes containerd would find for a task.
async fn processes(daemon: &Daemon, id: &str) -> Result<usize, Status> {
    let mut request = Request::new(ListPidsRequest {
        container_id: id.to_owned(),
    });
    request
        .metadata_mut()
        .insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    match TasksClient::new(daemon.channel()).list_pids(request).await {
        Ok(answer) => Ok(answer.into_inner().processes.len()),
        Err(status) if status.code() == Code::Unavailable => Err(status),
        // A shim's error counts as no process, in containerd too.
        Err(_) => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(pod: &str, is_sandbox: bool, processes: usize) -> Task {
        Task {
            pod: pod.to_owned(),
            is_sandbox,
            processes,
        }
    }

    #[test]
    fn sandboxes_without_processes_are_ended_by_1_7_and_spared_by_others() {
        let tasks = [
            task("default/fine", true, 1),
            task("default/lost", true, 0),
            task("default/lost", false, 2),
        ];
        for (version, wanted) in [("1.6.20", &[][..]), ("1.7.24", &["default/lost"]), ("2.1.9", &[])] {
            assert_eq!(
                endangered(Version::parse(version).unwrap(), &tasks),
                wanted,
                "{version}"
            );
        }
    }

    #[test]
    fn containers_without_processes_are_ended_by_1_7_and_later() {
        let tasks = [task("default/a", true, 1), task("default/a", false, 0)];
        for version in ["1.7.24", "2.4.2"] {
            assert_eq!(
                endangered(Version::parse(version).unwrap(), &tasks),
                ["default/a"]
            );
        }
    }

    #[test]
    fn a_refusal_names_some_pods_and_counts_all() {
        let error = RestartUnsafe::Pods {
            version: Version::parse("1.7.24").unwrap(),
            pods: (0..7).map(|n| format!("default/pod-{n}")).collect(),
        };
        let words = error.to_string();
        assert!(
            words.contains("7 running pod(s)") && words.ends_with("default/pod-4 and 2 more"),
            "{words}"
        );
        assert_eq!(error.reason(), FailureReason::RestartUnsafe);
    }
}
