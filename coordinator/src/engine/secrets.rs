//! Effect: the pull secrets of Prefetches, read when a pull is ordered and kept for some seconds, in memory only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::Api;
use quartermaster_proto::credentials::{self, Format};
use quartermaster_proto::v1::Credential;
use tokio::sync::Mutex;

use crate::prefetch::{PullFacts, Trouble};
use crate::reason;

/// So long a secret is used again: thousands of nodes are ordered to pull in one go, and a secret that was rotated is
/// used soon.
const FRESH: Duration = Duration::from_secs(10);

/// Reads pull secrets.
pub(super) struct PullSecrets {
    client: kube::Client,
    /// Namespaces whose secrets may be read.
    namespaces: Vec<String>,
    kept: Mutex<HashMap<Asked, (Instant, Arc<Loaded>)>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Asked {
    namespace: String,
    secrets: Vec<String>,
    service_account: String,
}

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// All that can be used.
    pub credentials: Vec<Credential>,
    /// What could not be read, in an operator's words.
    pub trouble: Option<Trouble>,
}

impl PullSecrets {
    pub(super) fn new(client: kube::Client, namespaces: Vec<String>) -> Self {
        Self {
            client,
            namespaces,
            kept: Mutex::default(),
        }
    }

    /// The credentials of a Prefetch in `namespace`.
    pub(super) async fn load(&self, namespace: &str, pull: &PullFacts) -> Arc<Loaded> {
        let asked = Asked {
            namespace: namespace.to_owned(),
            secrets: pull.secrets.clone(),
            service_account: pull.service_account.clone(),
        };
        // Held while reading, so that a burst of orders reads once.
        let mut kept = self.kept.lock().await;
        kept.retain(|_, (at, _)| at.elapsed() < FRESH);
        if let Some((_, loaded)) = kept.get(&asked) {
            return loaded.clone();
        }
        let loaded = Arc::new(self.read(&asked).await);
        kept.insert(asked, (Instant::now(), loaded.clone()));
        loaded
    }

    async fn read(&self, asked: &Asked) -> Loaded {
        let mut loaded = Loaded::default();
        if !self.namespaces.contains(&asked.namespace) {
            if !asked.secrets.is_empty() {
                loaded.trouble = Some(Trouble {
                    reason: reason::SECRET_FORBIDDEN,
                    message: format!(
                        "pull.secrets are named, and secrets of the namespace {} may not be read; whoever runs the \
                         coordinator has to name it with --secret-namespaces and bind the role there",
                        asked.namespace
                    ),
                });
            }
            return loaded;
        }
        for name in &asked.secrets {
            if let Err(trouble) = self.add(&asked.namespace, name, &mut loaded.credentials).await {
                loaded.trouble = Some(trouble);
            }
        }
        // What a service account names and is not there is left out, as the kubelet leaves it out.
        for name in self.of_service_account(asked).await {
            if !asked.secrets.contains(&name) {
                let _ = self.add(&asked.namespace, &name, &mut loaded.credentials).await;
            }
        }
        loaded
    }

    async fn of_service_account(&self, asked: &Asked) -> Vec<String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &asked.namespace);
        match accounts.get_opt(&asked.service_account).await {
            Ok(account) => account
                .and_then(|account| account.image_pull_secrets)
                .into_iter()
                .flatten()
                .map(|reference| reference.name)
                .collect(),
            Err(error) => {
                tracing::warn!(namespace = asked.namespace, %error, "a service account could not be read");
                Vec::new()
            }
        }
    }

    async fn add(
        &self,
        namespace: &str,
        name: &str,
        credentials: &mut Vec<Credential>,
    ) -> Result<(), Trouble> {
        let trouble = |reason, why: String| Trouble {
            reason,
            message: format!("the secret {namespace}/{name} {why}"),
        };
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let secret = secrets.get(name).await.map_err(|error| match &error {
            kube::Error::Api(status) if status.code == 404 => {
                trouble(reason::SECRET_NOT_FOUND, "does not exist".into())
            }
            kube::Error::Api(status) if status.code == 403 => trouble(
                reason::SECRET_FORBIDDEN,
                "may not be read by the coordinator; bind the role for pull secrets in its namespace".into(),
            ),
            _ => trouble(reason::SECRET_UNREADABLE, format!("could not be read: {error}")),
        })?;
        let format = secret
            .type_
            .as_deref()
            .and_then(Format::of_secret_type)
            .ok_or_else(|| {
                trouble(
                    reason::SECRET_INVALID,
                    "is of neither type kubernetes.io/dockerconfigjson nor kubernetes.io/dockercfg".into(),
                )
            })?;
        let bytes = secret.data.as_ref().and_then(|data| data.get(format.data_key()));
        let bytes = bytes.ok_or_else(|| {
            trouble(
                reason::SECRET_INVALID,
                format!("has no data {:?}", format.data_key()),
            )
        })?;
        let parsed = credentials::parse(format, &bytes.0)
            .map_err(|error| trouble(reason::SECRET_INVALID, format!("can't be used: {error}")))?;
        credentials.extend(parsed.credentials);
        Ok(())
    }
}
