//! Bringing a testbed up: what is started, in which order, and what is waited for.

use std::fs;
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::Cluster;
use crate::cgroups::Cgroups;
use crate::control_plane::{self, ControlPlane};
use crate::fabric::Fabric;
use crate::host::{self, settings};
use crate::layout::{Cache, State};
use crate::parts::Parts;
use crate::pki::{Authority, Identity, kubeconfig};
use crate::progress::Progress;
use crate::record::Record;
use crate::spec::Spec;
use crate::{forwarder, images, registry, teardown};

/// How long the nodes may take to be Ready, on a machine that has much else to do.
const NODES_DEADLINE: Duration = Duration::from_secs(120);

impl Cluster {
    /// Brings a testbed up, and returns when its nodes are Ready, its names resolve and its registry holds the base images.
    /// The first time on a machine this builds its parts, for ten minutes or more.
    ///
    /// # Errors
    /// If the host can't carry it, a testbed of this name is there, or a part fails; with the end of its log. What was made
    /// by then stays for a look, until [`Cluster::down`].
    pub fn up(spec: &Spec, progress: &Progress) -> Result<Self> {
        spec.validate()?;
        host::check()?;
        let cache = Cache::locate();
        host::packages::ensure(progress, &cache.logs().join("apt.log"))?;
        let mut series: Vec<&str> = spec.nodes.iter().map(|n| n.containerd.as_str()).collect();
        series.sort_unstable();
        series.dedup();
        let parts = Parts::ensure(&cache, &series, progress)?;
        let images = progress.step("base images at hand", || images::base_set(cache.root()))?;

        let mut record = {
            let _lock = teardown::lock()?;
            let record = Record::claim(spec, &parts)?;
            settings::apply()?;
            record
        };
        let state = State::of(&spec.name);
        let cgroups = Cgroups::of(&spec.name)?;
        let plan = record.plan();
        let authority = control_plane::make_identities(&state, plan)?;
        let fabric = progress.step("network made", || Fabric::make(&state, &cgroups, plan))?;
        let cluster = Self {
            spec: spec.clone(),
            plan,
            state,
            cgroups,
            parts,
            fabric,
        };
        std::thread::scope(|scope| {
            let control_plane = scope.spawn(|| cluster.start_control_plane(&authority, progress));
            let registry = scope.spawn(|| cluster.start_registry(&images, progress));
            let nodes = scope.spawn(|| cluster.boot_nodes(&authority, progress));
            [control_plane, registry, nodes]
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err(anyhow!("a thread of `up` died")))
                })
                // All have ended before the first failure is told.
                .collect::<Vec<_>>()
                .into_iter()
                .collect::<Result<()>>()
        })?;
        let names: Vec<&str> = spec.nodes.iter().map(|node| node.name.as_str()).collect();
        if !names.is_empty() {
            progress.step(&format!("Ready: {}", names.join(", ")), || {
                cluster.wait_until_ready(&names, NODES_DEADLINE)
            })?;
        }
        record.mark_complete(&cluster.state)?;
        Ok(cluster)
    }

    fn start_control_plane(&self, authority: &Authority, progress: &Progress) -> Result<()> {
        let control_plane = ControlPlane {
            state: &self.state,
            parts: &self.parts,
            fabric: &self.fabric,
            cgroups: &self.cgroups,
            plan: self.plan,
        };
        progress.step("etcd healthy", || control_plane.start_etcd())?;
        let simulated = self.spec.nodes.is_empty();
        progress.step("API server ready", || control_plane.start_api_server(simulated))?;
        if simulated {
            // Controllers would act on Nodes that nobody reports for, and there is nothing to schedule.
            let port = forwarder::start(&self.state, &self.fabric, &self.cgroups, self.plan)?;
            return self.write_kubeconfig(authority, port);
        }
        progress.step("controllers, scheduler and name server started", || {
            control_plane.start_controllers()?;
            let dns = control_plane.start_dns()?;
            let port = forwarder::start(&self.state, &self.fabric, &self.cgroups, self.plan)?;
            self.write_kubeconfig(authority, port)?;
            control_plane.wait_for_dns(&dns)
        })
    }

    fn write_kubeconfig(&self, authority: &Authority, port: u16) -> Result<()> {
        let admin = self.state.pki().join("admin");
        let identity = Identity {
            certificate: fs::read_to_string(admin.with_extension("crt"))?,
            key: fs::read_to_string(admin.with_extension("key"))?,
        };
        let server = format!("https://127.0.0.1:{port}");
        let context = format!("testbed-{}", self.spec.name);
        let text = kubeconfig(&server, authority.certificate(), &identity, &context)?;
        crate::pki::write(&self.kubeconfig(), &text, 0o600)
    }

    fn start_registry(&self, images: &[images::BuiltImage], progress: &Progress) -> Result<()> {
        if self.spec.nodes.is_empty() {
            return Ok(());
        }
        let what: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        progress.step(&format!("registry holds {}", what.join(", ")), || {
            registry::start(&self.state, &self.parts, &self.fabric, &self.cgroups, self.plan)?;
            for image in images {
                self.push(&image.archive, &image.name)?;
            }
            Ok(())
        })
    }

    fn boot_nodes(&self, authority: &Authority, progress: &Progress) -> Result<()> {
        for (position, spec) in self.spec.nodes.iter().enumerate() {
            let node = self.node_at(spec, position);
            let step = format!("{} booted (containerd {})", spec.name, spec.containerd);
            progress.step(&step, || {
                node.make_disk(authority)?;
                node.boot(&self.fabric, &self.parts)
            })?;
        }
        Ok(())
    }
}
