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
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig,
    PodSandboxMetadata, RemoveImageRequest, RunPodSandboxRequest, StartContainerRequest,
};
use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use super::image::{MODULE, ModuleImage};
use super::layout::RUN_DIR;
use super::sandboxes::{labels, remove_sandbox};
use super::verdict::{Attempt, SANDBOX_IMAGE, again, judge, sandbox_failed};
use crate::checkpoint::checkpoint;
use crate::containerd::{Daemon, Served};
use crate::failure::Reported;
use crate::host::HostRoot;

const DEADLINE: Duration = Duration::from_secs(30);
const TRIES: u32 = 5;
const IMPORTS: u32 = 3;
const RUN: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(150);
/// For a containerd that is restarting just now.
const AWAKE: Duration = Duration::from_secs(15);
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
    let served = awake(daemon).await?;
    let mut imports = 0;
    while let Err(error) = import(daemon, &image).await {
        imports += 1;
        if imports == IMPORTS {
            return Err(error);
        }
        sleep(PAUSE).await;
        awake(daemon).await?;
    }
    let bench = Bench {
        root,
        daemon,
        handler,
        image: image.name(),
        cgroup_parent: cgroup_parent(root, &served, handler),
    };
    let result = bench.try_often().await;
    let mut images = daemon.images();
    checkpoint("remove the module's image");
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

/// Waits until CRI answers: a daemon that somebody restarts in this moment says nothing about the handler.
async fn awake(daemon: &Daemon) -> Result<Served, VerifyError> {
    let deadline = Instant::now() + AWAKE;
    loop {
        match daemon.served().await {
            Ok(served) => return Ok(served),
            Err(error) if Instant::now() > deadline => {
                return Err(VerifyError::Run {
                    step: "Status",
                    why: error.to_string(),
                    tries: 0,
                });
            }
            Err(_) => sleep(PAUSE).await,
        }
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
        let mut pause = PAUSE;
        loop {
            tries += 1;
            match self.once().await {
                Ok(()) => return Ok(Verified { tries }),
                Err(Attempt::Never(error)) => return Err(error),
                Err(Attempt::Again { step, why }) => {
                    tracing::info!(tries, step, %why, "the module's run is tried again");
                    if tries >= TRIES || Instant::now() + pause > deadline {
                        return Err(match step {
                            SANDBOX_IMAGE => VerifyError::SandboxImage(why),
                            step => VerifyError::Run { step, why, tries },
                        });
                    }
                }
            }
            sleep(pause).await;
            pause *= 2;
            awake(self.daemon).await?;
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
            checkpoint("run a sandbox");
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
        checkpoint("create the module's container");
        let created = runtime
            .create_container(CreateContainerRequest {
                pod_sandbox_id: sandbox_id.to_owned(),
                config: Some(container),
                sandbox_config: Some(sandbox.clone()),
            })
            .await
            .map_err(again("CreateContainer"))?;
        let container_id = created.into_inner().container_id;
        checkpoint("start the module's container");
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
