//! Stage 6: a Wasm module that has really run through the handler.
//!
//! The exit code proves nothing (crun 1.21 reports 0 whatever a module under WasmEdge exits with), so the output is
//! compared: the module turns a random word round, which nothing else on the node would do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatusRequest, CreateContainerRequest,
    ImageSpec, ImageStatusRequest, LinuxContainerConfig, LinuxContainerSecurityContext,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, ListPodSandboxRequest, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxFilter, PodSandboxMetadata, PodSandboxState,
    RemoveImageRequest, RemovePodSandboxRequest, RunPodSandboxRequest, StartContainerRequest,
    StopPodSandboxRequest,
};
use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;
use uuid::Uuid;

use super::image::{MODULE, ModuleImage};
use super::layout::RUN_DIR;
use crate::containerd::{Daemon, Served};
use crate::failure::Reported;
use crate::host::HostRoot;

const DEADLINE: Duration = Duration::from_secs(30);
const TRIES: u32 = 5;
const RUN: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(150);
const LABEL: &str = "quartermaster.internal/verify";
const PREFIX: &str = "quartermaster-verified ";
const LOG: &str = "module.log";

/// Why no module ran.
#[derive(Debug, Error)]
pub(crate) enum VerifyError {
    /// The image could not be written into containerd's store.
    #[error("the module's image cannot be imported into containerd: {0}")]
    Import(String),
    /// CRI does not see the image.
    #[error("CRI does not see the module's image after its import: {0}")]
    NotSeen(String),
    /// The sandbox image is not there and cannot be had.
    #[error("the sandbox (pause) image is not on the node and cannot be pulled: {0}")]
    SandboxImage(String),
    /// Something on the way failed.
    #[error("the module did not run through the handler ({tries} tries): {step}: {why}")]
    Run {
        /// Which call of CRI.
        step: &'static str,
        /// Its own words.
        why: String,
        /// How often it was tried.
        tries: u32,
    },
    /// It ran and printed something else.
    #[error("the module ran through the handler and printed {0:?} instead of its word turned round")]
    Output(String),
}

impl Reported for VerifyError {
    fn reason(&self) -> FailureReason {
        FailureReason::VerificationFailed
    }

    fn remedy(&self) -> String {
        match self {
            Self::SandboxImage(_) => "Bring the sandbox image onto the node (`crictl pull`), or give the node a way to its registry, then try again.".into(),
            Self::Output(_) => "The handler's binary is not a crun that runs Wasm; is the payload the right one?".into(),
            _ => "`journalctl -u containerd` on the node says more.".into(),
        }
    }
}

/// That a module ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verified {
    pub(crate) tries: u32,
}

/// Runs the module through `handler` and compares what it prints.
///
/// # Errors
/// [`VerifyError`].
pub(crate) async fn verify(
    root: &Arc<HostRoot>,
    daemon: &Daemon,
    handler: &str,
) -> Result<Verified, VerifyError> {
    let image = ModuleImage::new();
    let served = daemon.served().await.map_err(|error| VerifyError::Run {
        step: "Status",
        why: error.to_string(),
        tries: 0,
    })?;
    import(daemon, &image).await?;
    let bench = Bench {
        root,
        daemon,
        handler,
        image: image.name(),
        cgroup_parent: cgroup_parent(root, &served, handler),
    };
    let result = bench.try_often().await;
    let mut images = daemon.images();
    let removed = images
        .remove_image(RemoveImageRequest {
            image: Some(spec(image.name())),
        })
        .await;
    if let Err(status) = removed {
        tracing::warn!(image = image.name(), %status, "the module's image could not be removed");
    }
    result
}

/// Removes sandboxes and scratch folders that an earlier verification left behind.
pub(crate) async fn sweep(root: &HostRoot, daemon: &Daemon) {
    let filter = PodSandboxFilter {
        label_selector: labels(),
        ..Default::default()
    };
    let listed = daemon
        .runtime()
        .list_pod_sandbox(ListPodSandboxRequest { filter: Some(filter) })
        .await;
    for sandbox in listed.map(|list| list.into_inner().items).unwrap_or_default() {
        remove_sandbox(daemon, &sandbox.id).await;
    }
    if let Ok(run) = root.dir(RUN_DIR) {
        for name in root.list(RUN_DIR).unwrap_or_default() {
            if name.starts_with("v-") {
                let _ = run.remove_tree(&name);
            }
        }
    }
}

/// A pod that uses a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    /// `namespace/name`
    pub(crate) pod: String,
    /// Of its sandbox.
    pub(crate) sandbox: String,
}

/// Pods whose sandbox runs under `handler`, our own verifications left out.
pub(crate) async fn users(daemon: &Daemon, handler: &str) -> Result<Vec<User>, Status> {
    let listed = daemon
        .runtime()
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await?;
    let mut users: Vec<User> = listed
        .into_inner()
        .items
        .into_iter()
        .filter(|sandbox| {
            sandbox.runtime_handler == handler
                && sandbox.state == i32::from(PodSandboxState::SandboxReady)
                && !sandbox.labels.contains_key(LABEL)
        })
        .map(|sandbox| {
            let metadata = sandbox.metadata.unwrap_or_default();
            User {
                pod: format!("{}/{}", metadata.namespace, metadata.name),
                sandbox: sandbox.id,
            }
        })
        .collect();
    users.sort_by(|left, right| left.pod.cmp(&right.pod));
    Ok(users)
}

/// Stops and removes a sandbox; one that is gone is removed.
pub(crate) async fn remove_sandbox(daemon: &Daemon, id: &str) {
    let mut runtime = daemon.runtime();
    let _ = runtime
        .stop_pod_sandbox(StopPodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        })
        .await;
    let removed = runtime
        .remove_pod_sandbox(RemovePodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        })
        .await;
    if let Err(status) = removed {
        tracing::warn!(sandbox = id, %status, "a sandbox could not be removed");
    }
}

async fn import(daemon: &Daemon, image: &ModuleImage) -> Result<(), VerifyError> {
    image
        .import(daemon.channel())
        .await
        .map_err(|status| VerifyError::Import(status.message().to_owned()))?;
    // CRI takes a new image up by an event, a moment after the call that made it.
    let deadline = Instant::now() + RUN;
    loop {
        let status = daemon
            .images()
            .image_status(ImageStatusRequest {
                image: Some(spec(image.name())),
                verbose: false,
            })
            .await;
        let lack = match status {
            Ok(answer) if answer.get_ref().image.is_some() => return Ok(()),
            Ok(_) => "it is not there".to_owned(),
            Err(status) => status.message().to_owned(),
        };
        if Instant::now() > deadline {
            return Err(VerifyError::NotSeen(lack));
        }
        sleep(POLL).await;
    }
}

/// The parent of the module's cgroup: below the kubelet's own where there is a kubelet. With systemd's driver it
/// must be a slice, and an unset one is refused by runc and crun alike.
fn cgroup_parent(root: &HostRoot, served: &Served, handler: &str) -> String {
    let there = |name: &str| {
        [
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/systemd",
            "/sys/fs/cgroup/memory",
        ]
        .iter()
        .any(|mount| root.exists(&format!("{mount}/{name}")))
    };
    if served.systemd_cgroup(handler).unwrap_or(false) {
        let slice = if there("kubepods.slice") {
            "kubepods.slice"
        } else {
            "system.slice"
        };
        slice.to_owned()
    } else if there("kubepods") {
        "/kubepods".to_owned()
    } else {
        String::new()
    }
}

fn spec(image: &str) -> ImageSpec {
    ImageSpec {
        image: image.to_owned(),
        ..Default::default()
    }
}

fn labels() -> HashMap<String, String> {
    [(LABEL.to_owned(), "true".to_owned())].into()
}

/// One attempt's end.
enum Attempt {
    /// A reason that another attempt may not have.
    Again { step: &'static str, why: String },
    /// One that it would have too.
    Never(VerifyError),
}

fn again(step: &'static str) -> impl FnOnce(Status) -> Attempt {
    move |status| Attempt::Again {
        step,
        why: status.message().to_owned(),
    }
}

struct Bench<'a> {
    root: &'a Arc<HostRoot>,
    daemon: &'a Daemon,
    handler: &'a str,
    image: &'a str,
    cgroup_parent: String,
}

impl Bench<'_> {
    async fn try_often(&self) -> Result<Verified, VerifyError> {
        let deadline = Instant::now() + DEADLINE;
        let mut tries = 0;
        loop {
            tries += 1;
            match self.once().await {
                Ok(()) => return Ok(Verified { tries }),
                Err(Attempt::Never(error)) => return Err(error),
                Err(Attempt::Again { step, why }) => {
                    tracing::info!(tries, step, %why, "the module's run is tried again");
                    if tries >= TRIES || Instant::now() + PAUSE > deadline {
                        return Err(VerifyError::Run { step, why, tries });
                    }
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn once(&self) -> Result<(), Attempt> {
        let uid = Uuid::new_v4();
        let id = uid.simple().to_string();
        let folder = format!("v-{}", &id[..8]);
        let logs = format!("{RUN_DIR}/{folder}");
        let setup = |why: std::io::Error| Attempt::Again {
            step: "scratch folder",
            why: why.to_string(),
        };
        let run = self.root.make_dir(RUN_DIR).map_err(setup)?;
        self.root.make_dir(&logs).map_err(setup)?;
        let sandbox = self.sandbox(&uid, &logs);
        let result = async {
            let started = self
                .daemon
                .runtime()
                .run_pod_sandbox(RunPodSandboxRequest {
                    config: Some(sandbox.clone()),
                    runtime_handler: self.handler.to_owned(),
                })
                .await
                .map_err(sandbox_failed)?;
            let sandbox_id = started.into_inner().pod_sandbox_id;
            let ran = self.run_module(&sandbox_id, &sandbox, &id, &logs).await;
            remove_sandbox(self.daemon, &sandbox_id).await;
            ran
        };
        let result = timeout(RUN * 2, result).await.unwrap_or_else(|_| {
            Err(Attempt::Again {
                step: "RunPodSandbox",
                why: "no answer in time".to_owned(),
            })
        });
        let _ = run.remove_tree(&folder);
        result
    }

    fn sandbox(&self, uid: &Uuid, logs: &str) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: format!("verify-{}", &uid.simple().to_string()[..8]),
                uid: uid.to_string(),
                namespace: "quartermaster".to_owned(),
                attempt: 0,
            }),
            log_directory: logs.to_owned(),
            labels: labels(),
            annotations: annotations(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                security_context: Some(LinuxSandboxSecurityContext {
                    // The node's own network: a node without CNI proves itself too.
                    namespace_options: Some(namespaces()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    async fn run_module(
        &self,
        sandbox_id: &str,
        sandbox: &PodSandboxConfig,
        word: &str,
        logs: &str,
    ) -> Result<(), Attempt> {
        let mut runtime = self.daemon.runtime();
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: "module".to_owned(),
                attempt: 0,
            }),
            image: Some(spec(self.image)),
            command: vec![MODULE.to_owned(), word.to_owned()],
            labels: labels(),
            annotations: annotations(),
            log_path: LOG.to_owned(),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: Some(namespaces()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let created = runtime
            .create_container(CreateContainerRequest {
                pod_sandbox_id: sandbox_id.to_owned(),
                config: Some(container),
                sandbox_config: Some(sandbox.clone()),
            })
            .await
            .map_err(again("CreateContainer"))?;
        let container_id = created.into_inner().container_id;
        runtime
            .start_container(StartContainerRequest {
                container_id: container_id.clone(),
            })
            .await
            .map_err(again("StartContainer"))?;
        let deadline = Instant::now() + RUN;
        loop {
            let answer = runtime
                .container_status(ContainerStatusRequest {
                    container_id: container_id.clone(),
                    verbose: false,
                })
                .await
                .map_err(again("ContainerStatus"))?;
            let status = answer.into_inner().status.unwrap_or_default();
            if status.state == i32::from(ContainerState::ContainerExited) {
                let log = self.root.read(&format!("{logs}/{LOG}"), 64 * 1024);
                let log = log.unwrap_or_default();
                return judge(&String::from_utf8_lossy(&log), word, status.exit_code);
            }
            if Instant::now() > deadline {
                return Err(Attempt::Again {
                    step: "module",
                    why: format!("it did not end within {} s", RUN.as_secs()),
                });
            }
            sleep(POLL).await;
        }
    }
}

fn sandbox_failed(status: Status) -> Attempt {
    let why = status.message().to_owned();
    if why.contains("sandbox image") {
        Attempt::Never(VerifyError::SandboxImage(why))
    } else {
        Attempt::Again {
            step: "RunPodSandbox",
            why,
        }
    }
}

fn annotations() -> HashMap<String, String> {
    [("module.wasm.image/variant".to_owned(), "compat-smart".to_owned())].into()
}

fn namespaces() -> NamespaceOption {
    NamespaceOption {
        network: NamespaceMode::Node.into(),
        pid: NamespaceMode::Container.into(),
        ..Default::default()
    }
}

/// Whether a container's log shows that the module ran.
fn judge(log: &str, word: &str, exit_code: i32) -> Result<(), Attempt> {
    let printed = printed(log);
    let turned: String = word.chars().rev().collect();
    if printed.trim() == format!("{PREFIX}{turned}") {
        return Ok(());
    }
    // The kubelet ends sandboxes that it does not know, within two seconds: that says nothing about the handler.
    if printed.is_empty() || [137, 143].contains(&exit_code) {
        return Err(Attempt::Again {
            step: "module",
            why: format!("it printed {printed:?} and exited with {exit_code}"),
        });
    }
    Err(Attempt::Never(VerifyError::Output(crate::failure::cut(
        &printed, 500,
    ))))
}

/// What a container printed, from CRI's log: each line is a time, a stream, a tag and the text.
fn printed(log: &str) -> String {
    log.lines()
        .filter_map(|line| line.splitn(4, ' ').nth(3))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_turned_round_is_a_proof() {
        let line = |text: &str| format!("2026-11-30T10:00:00.1Z stdout F {text}\n");
        assert!(judge(&line("quartermaster-verified cba"), "abc", 0).is_ok());
        assert!(judge(&line("quartermaster-verified cba"), "abc", 143).is_ok());
        for text in ["quartermaster-verified abc", "abc", "exec format error"] {
            assert!(matches!(
                judge(&line(text), "abc", 0),
                Err(Attempt::Never(VerifyError::Output(_)))
            ));
        }
        assert!(matches!(judge("", "abc", 0), Err(Attempt::Again { .. })));
        assert!(matches!(
            judge(&line("x"), "abc", 143),
            Err(Attempt::Again { .. })
        ));
    }

    #[test]
    fn a_missing_sandbox_image_is_said_and_not_tried_again() {
        let status = Status::unknown("failed to get sandbox image \"pause:3.10\": failed to pull");
        assert!(matches!(
            sandbox_failed(status),
            Attempt::Never(VerifyError::SandboxImage(_))
        ));
        assert!(matches!(
            sandbox_failed(Status::unavailable("x")),
            Attempt::Again { .. }
        ));
    }
}
