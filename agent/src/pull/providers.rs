//! Asking the kubelet's credential providers.
//!
//! A provider is a program of the host that the kubelet runs, and is run the same way here: by systemd, on the host,
//! with the environment of the kubelet's unit. What it says comes through a pipe that systemd is handed, so that it
//! is written nowhere.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::keyring;
use quartermaster_proto::v1::Credential;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::timeout;
use zbus::wire::Variant;
use zeroize::Zeroizing;

use super::kubelet::Kubelet;
use super::provider_config::{self, CacheKeyType, Provider, ProviderError};
use super::reference::registry_of;
use crate::host::{HostRoot, Property, Systemd};

/// The kubelet gives a provider a minute.
const DEADLINE: Duration = Duration::from_secs(60);
const MAX_ANSWER: u64 = 1024 * 1024;
const MAX_FILE: usize = 1024 * 1024;

/// The providers of this node, asked at most once for whatever an answer holds for.
#[derive(Debug)]
pub(crate) struct Providers {
    root: Arc<HostRoot>,
    found: OnceCell<Result<Found, ProviderError>>,
    answers: Mutex<Answers>,
}

/// By provider and what the answer holds for.
type Answers = HashMap<(String, String), Arc<Vec<Credential>>>;

#[derive(Debug)]
struct Found {
    systemd: Systemd,
    unit: String,
    folder: String,
    providers: Vec<Provider>,
}

impl Providers {
    pub(crate) fn new(root: Arc<HostRoot>) -> Self {
        Self {
            root,
            found: OnceCell::new(),
            answers: Mutex::default(),
        }
    }

    /// Credentials for a repository, and what went wrong. A provider that fails is no reason not to go on without
    /// it: that is what the kubelet does.
    pub(crate) async fn ask(&self, repository: &str) -> (Vec<Credential>, Option<ProviderError>) {
        let found = match self.found.get_or_init(|| find(&self.root)).await {
            Ok(found) => found,
            Err(error) => return (Vec::new(), Some(error.clone())),
        };
        let mut all = Vec::new();
        let mut failure = None;
        for provider in found.providers.iter().filter(|one| one.is_for(repository)) {
            match self.ask_one(found, provider, repository).await {
                Ok(credentials) => all.extend(credentials.iter().cloned()),
                Err(error) => {
                    tracing::warn!(%error, "a credential provider failed");
                    failure = Some(error);
                }
            }
        }
        let matching = keyring::matching(&all, repository);
        (matching.into_iter().cloned().collect(), failure)
    }

    async fn ask_one(
        &self,
        found: &Found,
        provider: &Provider,
        repository: &str,
    ) -> Result<Arc<Vec<Credential>>, ProviderError> {
        let attributes = provider.token_attributes.as_ref();
        if attributes.is_some_and(|attributes| attributes.require_service_account) {
            return Err(ProviderError::WantsToken(provider.name.clone()));
        }
        // Held while the provider runs: images that wait for the same answer do not start it again.
        let mut answers = self.answers.lock().await;
        let key = |holds_for: &str| (provider.name.clone(), holds_for.to_owned());
        for holds_for in [repository, registry_of(repository), ""] {
            if let Some(known) = answers.get(&key(holds_for)) {
                return Ok(Arc::clone(known));
            }
        }
        let said = run(found, provider, repository).await?;
        let answer = provider_config::answer(provider, &said)?;
        let holds_for = match answer.holds_for {
            CacheKeyType::Image => repository,
            CacheKeyType::Registry => registry_of(repository),
            CacheKeyType::Global => "",
        };
        let credentials = Arc::new(answer.credentials);
        answers.insert(key(holds_for), Arc::clone(&credentials));
        Ok(credentials)
    }
}

/// Finds the providers through the kubelet's own flags; none where the kubelet has none.
async fn find(root: &Arc<HostRoot>) -> Result<Found, ProviderError> {
    let systemd = Systemd::connect(root)
        .await
        .map_err(|error| ProviderError::File("the kubelet's command line".into(), error.to_string()))?;
    let kubelet = Kubelet::find(root, &systemd).await;
    let mut found = Found {
        systemd,
        unit: kubelet.unit.clone(),
        folder: String::new(),
        providers: Vec::new(),
    };
    let flags = (
        kubelet.flag("image-credential-provider-config"),
        kubelet.flag("image-credential-provider-bin-dir"),
    );
    if let (Some(config), Some(folder)) = flags {
        found.folder = folder.to_owned();
        found.providers = provider_config::parse(&files(root, config)?)?;
    }
    Ok(found)
}

/// A file, or all of a folder.
fn files(root: &HostRoot, path: &str) -> Result<Vec<(String, Vec<u8>)>, ProviderError> {
    let read = |path: String| match root.read(&path, MAX_FILE) {
        Ok(bytes) => Ok((path, bytes)),
        Err(error) => Err(ProviderError::File(path, error.to_string())),
    };
    match root.list(path) {
        Err(_) => Ok(vec![read(path.to_owned())?]),
        Ok(names) => names
            .into_iter()
            .filter(|name| [".json", ".yaml", ".yml"].iter().any(|end| name.ends_with(end)))
            .map(|name| read(format!("{path}/{name}")))
            .collect(),
    }
}

async fn run(
    found: &Found,
    provider: &Provider,
    repository: &str,
) -> Result<Zeroizing<Vec<u8>>, ProviderError> {
    let failed = |why: &dyn std::fmt::Display| ProviderError::Run(provider.name.clone(), why.to_string());
    let (mut request, stdin) = std::io::pipe()
        .map(|(read, write)| (write, read))
        .map_err(|e| failed(&e))?;
    // A request fits into a pipe's buffer: a reference has 512 bytes at most.
    request
        .write_all(&provider.request(repository))
        .map_err(|error| failed(&error))?;
    drop(request);
    let (stdout, out) = std::io::pipe().map_err(|error| failed(&error))?;
    let unit = format!("quartermaster-credentials-{}.service", uuid::Uuid::new_v4());
    let mut said = Zeroizing::new(Vec::new());
    {
        let environment = found.systemd.environment(&found.unit).await.unwrap_or_default();
        let properties = properties(found, provider, environment, stdin.into(), out.into());
        // Our own copies of the pipe's other ends go with the properties, or its end would never be seen.
        let result = {
            let reading = async {
                let stdout = pipe::Receiver::from_owned_fd(OwnedFd::from(stdout))?;
                stdout.take(MAX_ANSWER + 1).read_to_end(&mut said).await
            };
            let systemd = &found.systemd;
            let started = async move {
                let result = systemd
                    .start_transient(&unit, &properties, DEADLINE + Duration::from_secs(5))
                    .await;
                drop(properties);
                result
            };
            let both = async { tokio::join!(started, reading) };
            timeout(DEADLINE + Duration::from_secs(10), both).await
        };
        match result {
            Err(_) => return Err(failed(&"it did not end in time")),
            Ok((Err(error), _)) => return Err(failed(&error)),
            Ok((_, Err(error))) => return Err(failed(&error)),
            Ok((Ok(job), _)) if !job.is_done() => {
                return Err(failed(&format!("it ended as {}", job.0)));
            }
            Ok(_) => {}
        }
    }
    if said.len() as u64 > MAX_ANSWER {
        return Err(failed(&"its answer is larger than 1 MiB"));
    }
    Ok(said)
}

fn properties(
    found: &Found,
    provider: &Provider,
    mut environment: Vec<String>,
    stdin: OwnedFd,
    stdout: OwnedFd,
) -> Vec<Property> {
    for variable in provider.env.iter().flatten() {
        environment.push(format!("{}={}", variable.name, variable.value));
    }
    let program = format!("{}/{}", found.folder, provider.name);
    let mut arguments = vec![program.clone()];
    arguments.extend(provider.args.iter().flatten().cloned());
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    vec![
        (
            "Description",
            Variant::from("Quartermaster asks a credential provider of the kubelet".to_owned()),
        ),
        // Its start is done when the program has ended.
        ("Type", Variant::from("oneshot".to_owned())),
        ("ExecStart", Variant::from(vec![(program, arguments, false)])),
        ("Environment", Variant::from(environment)),
        (
            "StandardInputFileDescriptor",
            Variant::from(zbus::Fd::from(stdin)),
        ),
        (
            "StandardOutputFileDescriptor",
            Variant::from(zbus::Fd::from(stdout)),
        ),
        // A provider may say anything there.
        ("StandardError", Variant::from("null".to_owned())),
        ("TimeoutStartUSec", Variant::from(micros(DEADLINE))),
        ("TimeoutStopUSec", Variant::from(micros(Duration::from_secs(2)))),
        ("LimitCORE", Variant::from(0_u64)),
        ("CollectMode", Variant::from("inactive-or-failed".to_owned())),
    ]
}
