//! The API server, gone for a while and back: etcd, the kubelets and everything else go on.

use std::time::Duration;

use anyhow::{Context, Result};

use super::Cluster;
use crate::control_plane::ControlPlane;
use crate::process::{Process, record_path};
use crate::wait::wait_for;

impl Cluster {
    /// Ends the API server at once, as a crash would.
    ///
    /// # Errors
    /// If it does not run, or does not end.
    pub fn stop_api_server(&self) -> Result<()> {
        let record = record_path(&self.state.run(), "kube-apiserver");
        let process = Process::recorded(&record).context("no API server was started")?;
        process.kill()?;
        wait_for("the API server to end", Duration::from_secs(20), || {
            anyhow::ensure!(!process.is_alive(), "it is still there");
            Ok(Some(()))
        })?;
        Ok(())
    }

    /// Starts the API server again, and waits until it is ready.
    ///
    /// # Errors
    /// If it does not come up; with its log's end.
    pub fn start_api_server(&self) -> Result<()> {
        let control_plane = ControlPlane {
            state: &self.state,
            parts: &self.parts,
            fabric: &self.fabric,
            cgroups: &self.cgroups,
            plan: self.plan,
        };
        control_plane.start_api_server(self.spec.nodes.is_empty())
    }

    /// Runs `work` on a thread that has entered the fabric's network, where pods are within reach by address.
    ///
    /// # Errors
    /// If the network is gone, or whatever `work` fails with.
    pub fn within_fabric<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.fabric.within(work)
    }
}
