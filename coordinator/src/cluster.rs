//! The way to the API server: one configuration, every request counted.

use std::sync::Arc;

use anyhow::Context as _;
use kube::client::ClientBuilder;

use crate::leadership::Fence;
use crate::report::{Counting, Metrics};

/// The cluster that this coordinator runs in.
pub(crate) struct Cluster {
    config: kube::Config,
    counting: Counting,
    client: kube::Client,
}

impl Cluster {
    /// The cluster of this pod, or of the kubeconfig.
    ///
    /// # Errors
    /// When there is neither, or its credentials can't be used.
    pub(crate) async fn infer(metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let config = kube::Config::infer().await.context(
            "the cluster's address and credentials can't be found; the coordinator runs in a pod, or with KUBECONFIG set",
        )?;
        let counting = Counting(metrics);
        let client = ClientBuilder::try_from(config.clone())?
            .with_layer(&counting)
            .build();
        Ok(Self {
            config,
            counting,
            client,
        })
    }

    /// What every replica may use.
    pub(crate) fn client(&self) -> &kube::Client {
        &self.client
    }

    /// What only the leader may write through.
    ///
    /// # Errors
    /// When the credentials can't be used.
    pub(crate) fn client_behind(&self, fence: &Fence) -> anyhow::Result<kube::Client> {
        let builder = ClientBuilder::try_from(self.config.clone())?.with_layer(&self.counting);
        Ok(builder.with_layer(fence).build())
    }
}
