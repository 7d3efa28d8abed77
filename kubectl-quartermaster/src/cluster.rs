//! The cluster of the person's kubeconfig.

use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::cli::Reach;
use crate::trouble::{Trouble, chain};

/// How long it may take to reach the API server.
const CONNECT: Duration = Duration::from_secs(10);

/// The ways to the API server, and where Quartermaster is.
#[derive(Clone)]
pub(crate) struct Cluster {
    /// For requests: each is bounded by `--request-timeout`.
    pub api: Client,
    /// For what stays open: watches, and the way to the leader.
    pub streams: Client,
    /// Where Quartermaster is installed.
    pub namespace: String,
    /// The namespace of the person's context.
    pub own_namespace: String,
}

impl Cluster {
    /// Finds the cluster as kubectl does.
    ///
    /// # Errors
    /// When the kubeconfig, or what it names, can't be used.
    pub(crate) async fn find(reach: &Reach) -> Result<Self, Trouble> {
        let mut config = config(reach).await?;
        if let Some(user) = &reach.act_as {
            config.auth_info.impersonate = Some(user.clone());
        }
        if !reach.as_group.is_empty() {
            config.auth_info.impersonate_groups = Some(reach.as_group.clone());
        }
        config.connect_timeout = Some(CONNECT);
        config.read_timeout = None;
        config.write_timeout = None;
        let own_namespace = config.default_namespace.clone();
        let client =
            |config: Config| Client::try_from(config).map_err(|error| Trouble::Kubeconfig(chain(&error)));
        let streams = client(config.clone())?;
        if !reach.request_timeout.is_zero() {
            config.read_timeout = Some(reach.request_timeout);
        }
        Ok(Self {
            api: client(config)?,
            streams,
            namespace: reach.namespace.clone(),
            own_namespace,
        })
    }
}

async fn config(reach: &Reach) -> Result<Config, Trouble> {
    let options = KubeConfigOptions {
        context: reach.context.clone(),
        cluster: reach.cluster.clone(),
        user: reach.user.clone(),
    };
    let unusable = |error: &dyn std::error::Error| Trouble::Kubeconfig(chain(error));
    let read = match &reach.kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::read(),
    };
    match read {
        Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .map_err(|error| unusable(&error)),
        // In a pod there is no kubeconfig, and none is needed.
        Err(error) if reach.kubeconfig.is_none() => Config::incluster().map_err(|_| unusable(&error)),
        Err(error) => Err(unusable(&error)),
    }
}
