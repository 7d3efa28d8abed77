//! A simulated machine: what is on its disk, and what its containerd goes through. It outlives the agents that come and go.
//!
//! As on a real one, the restart of containerd is the host's own: it goes on when the agent dies, and a power loss in the
//! middle leaves what was there before.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quartermaster_proto::v1::{Failure, FailureReason, NodeDescription, ProvisionDone, Stage};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::agent::Agent;
use super::ledger::{Ledger, locked};
use super::temper::{Temper, around};

/// Images whose references hold this are on every machine from the first.
pub(super) const PRESENT: &str = "/present/";
/// Images whose references hold this are in no registry, until it is calm.
pub(super) const MISSING: &str = "/missing/";

/// A simulated machine.
pub(super) struct Machine {
    /// Name of its Node.
    pub name: String,
    /// Where its agents are dialled.
    pub address: Ipv4Addr,
    /// Its Node's uid while an agent is wanted there.
    pub wanted: watch::Sender<Option<String>>,
    /// What it does is counted here.
    pub ledger: Arc<Ledger>,
    /// How it behaves.
    pub temper: Arc<Temper>,
    state: Mutex<State>,
    draw: Mutex<fastrand::Rng>,
    /// Held by whoever changes its containerd.
    change: tokio::sync::Mutex<()>,
}

/// What is on the machine now.
struct State {
    boot_id: String,
    machine_id: String,
    installed: bool,
    images: HashSet<String>,
    /// The boot in which a module ran.
    ran_in: Option<String>,
    /// Ends with the boot.
    boot: CancellationToken,
    agent: Option<Arc<Agent>>,
}

/// What a command is to do about the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// All that disturbs nobody.
    Prepare,
    Install,
    Remove,
    Verify,
}

impl Machine {
    pub(super) fn new(
        name: String,
        address: Ipv4Addr,
        seed: u64,
        ledger: Arc<Ledger>,
        temper: Arc<Temper>,
    ) -> Self {
        Self {
            name,
            address,
            wanted: watch::Sender::new(None),
            ledger,
            temper,
            state: Mutex::new(State {
                boot_id: Uuid::new_v4().to_string(),
                machine_id: Uuid::new_v4().simple().to_string(),
                installed: false,
                images: HashSet::new(),
                ran_in: None,
                boot: CancellationToken::new(),
                agent: None,
            }),
            draw: Mutex::new(fastrand::Rng::with_seed(seed)),
            change: tokio::sync::Mutex::new(()),
        }
    }

    pub(super) fn draw<T>(&self, draw: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
        draw(&mut locked(&self.draw))
    }

    /// Draws whether something of this likelihood happens, from 0 to 1.
    pub(super) fn happens(&self, likelihood: f64) -> bool {
        !self.ledger.is_calm() && self.draw(|draw| draw.f64() < likelihood)
    }

    /// Takes about as long as this.
    pub(super) async fn pass(&self, mean: Duration) {
        let factor = self.agent().map_or(1, |agent| agent.slowness());
        let time = self.draw(|draw| around(mean, draw)) * factor;
        tokio::time::sleep(time).await;
    }

    pub(super) fn boot_id(&self) -> String {
        locked(&self.state).boot_id.clone()
    }

    pub(super) fn machine_id(&self) -> String {
        locked(&self.state).machine_id.clone()
    }

    pub(super) fn is_installed(&self) -> bool {
        locked(&self.state).installed
    }

    /// Whether a module ran in the boot of this id.
    pub(super) fn ran_in(&self, boot_id: &str) -> bool {
        locked(&self.state).ran_in.as_deref() == Some(boot_id)
    }

    pub(super) fn agent(&self) -> Option<Arc<Agent>> {
        locked(&self.state).agent.clone()
    }

    /// An agent runs on it now, or none does.
    pub(super) fn set_agent(&self, agent: Option<Arc<Agent>>) {
        let old = std::mem::replace(&mut locked(&self.state).agent, agent);
        if let Some(old) = old {
            old.kill();
        }
    }

    /// Power is cut; it is another boot from now on.
    pub(super) fn reboot(&self) {
        let boot = {
            let mut state = locked(&self.state);
            state.boot_id = Uuid::new_v4().to_string();
            std::mem::take(&mut state.boot)
        };
        boot.cancel();
        self.kill_agent();
    }

    /// As a reboot, with a fresh disk.
    pub(super) fn reimage(&self) {
        self.reboot();
        let mut state = locked(&self.state);
        state.machine_id = Uuid::new_v4().simple().to_string();
        state.installed = false;
        state.images.clear();
        state.ran_in = None;
    }

    pub(super) fn kill_agent(&self) {
        if let Some(agent) = self.agent() {
            agent.kill();
        }
    }

    pub(super) fn has(&self, image: &str) -> bool {
        image.contains(PRESENT) || locked(&self.state).images.contains(image)
    }

    /// Pulls an image; says whether it was there.
    pub(super) async fn pull(&self, image: &str) -> Result<bool, Failure> {
        if self.has(image) {
            return Ok(true);
        }
        let boot = locked(&self.state).boot.clone();
        tokio::select! {
            () = self.pass(self.temper.image) => {}
            () = boot.cancelled() => return Err(failure(FailureReason::PullFailed, Stage::Unspecified, "the power was cut")),
        }
        if image.contains(MISSING) && !self.ledger.is_calm() {
            return Err(failure(
                FailureReason::ImageNotFound,
                Stage::Unspecified,
                "no such image",
            ));
        }
        if self.happens(self.temper.failures) {
            return Err(failure(
                FailureReason::RegistryUnreachable,
                Stage::Unspecified,
                "connection refused",
            ));
        }
        locked(&self.state).images.insert(image.to_owned());
        self.ledger.pulled.fetch_add(1, Ordering::Relaxed);
        Ok(false)
    }

    /// Carries a command out; `stage` is told of each stage that is done.
    pub(super) async fn change(
        self: &Arc<Self>,
        change: Change,
        id: &str,
        stage: impl Fn(Stage, Duration),
    ) -> Result<ProvisionDone, Failure> {
        let done = |restarted| ProvisionDone {
            restarted,
            prepared_only: change == Change::Prepare,
            socket_gap: restarted.then_some(prost_types::Duration {
                seconds: 0,
                nanos: 150_000_000,
            }),
            node: Some(self.describe()),
            diff: String::new(),
        };
        let go = async |this: Stage| {
            let begun = tokio::time::Instant::now();
            self.pass(self.temper.stage).await;
            stage(this, begun.elapsed());
        };
        if change != Change::Verify {
            for this in [Stage::Detect, Stage::Plan, Stage::Rehearse] {
                go(this).await;
            }
            if self.happens(self.temper.failures) {
                return Err(failure(
                    FailureReason::RehearsalFailed,
                    Stage::Rehearse,
                    "the rehearsal was drawn to fail",
                ));
            }
        }
        if change == Change::Prepare {
            return Ok(done(false));
        }
        let mut restarted = false;
        if matches!(change, Change::Install | Change::Remove) {
            restarted = self.restart(change == Change::Install, id).await?;
            stage(Stage::Swap, self.temper.restart);
        }
        if change == Change::Remove {
            return Ok(done(restarted));
        }
        let boot = self.boot_id();
        go(Stage::Verify).await;
        if !self.is_installed() || boot != self.boot_id() || self.happens(self.temper.failures) {
            return Err(failure(
                FailureReason::VerificationFailed,
                Stage::Verify,
                "the module did not run",
            ));
        }
        locked(&self.state).ran_in = Some(boot);
        self.ledger.modules.fetch_add(1, Ordering::Relaxed);
        Ok(done(restarted))
    }

    /// Brings the handler in or out by a restart of containerd, if it is not so already. It goes on to its end whoever
    /// stops waiting for it.
    async fn restart(self: &Arc<Self>, install: bool, id: &str) -> Result<bool, Failure> {
        let (tell, told) = oneshot::channel();
        let (machine, id) = (Arc::clone(self), id.to_owned());
        let boot = locked(&self.state).boot.clone();
        tokio::spawn(async move {
            let _turn = machine.change.lock().await;
            let result = tokio::select! {
                biased;
                () = boot.cancelled() => Err("the power was cut"),
                result = machine.restart_now(install, &id) => result,
            };
            let _ = tell.send(result);
        });
        match told.await {
            Ok(Ok(restarted)) => Ok(restarted),
            Ok(Err(why)) => Err(Failure {
                rolled_back: true,
                ..failure(FailureReason::RestartFailed, Stage::Swap, why)
            }),
            Err(_) => Err(failure(
                FailureReason::Internal,
                Stage::Swap,
                "the host's unit is gone",
            )),
        }
    }

    async fn restart_now(&self, install: bool, id: &str) -> Result<bool, &'static str> {
        if self.is_installed() == install {
            return Ok(false);
        }
        let _down = self.ledger.goes_down(&self.name, id);
        let time = self.draw(|draw| around(self.temper.restart, draw));
        tokio::time::sleep(time).await;
        self.ledger.restarts.fetch_add(1, Ordering::Relaxed);
        if self.happens(self.temper.failures) {
            return Err("the restart was drawn to fail");
        }
        self.ledger.took_effect(&self.name, &self.machine_id(), id);
        locked(&self.state).installed = install;
        Ok(true)
    }

    pub(super) fn describe(&self) -> NodeDescription {
        let state = locked(&self.state);
        NodeDescription {
            node_name: self.name.clone(),
            boot_id: state.boot_id.clone(),
            machine_id: state.machine_id.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            os: "a simulated machine".to_owned(),
            containerd_version: "2.1.4".to_owned(),
            config_path: "/etc/containerd/config.toml".to_owned(),
            ..NodeDescription::default()
        }
    }
}

pub(super) fn failure(reason: FailureReason, stage: Stage, message: &str) -> Failure {
    Failure {
        reason: reason.into(),
        message: message.to_owned(),
        stage: stage.into(),
        ..Failure::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Arc<Machine> {
        let ledger = Ledger::default();
        ledger.limit.store(1, Ordering::SeqCst);
        Arc::new(Machine::new(
            "node".to_owned(),
            Ipv4Addr::LOCALHOST,
            1,
            Arc::new(ledger),
            Arc::default(),
        ))
    }

    #[tokio::test(start_paused = true)]
    async fn an_installation_restarts_once_and_the_same_command_again_does_not() {
        let machine = machine();
        let boot = machine.boot_id();
        let first = machine.change(Change::Install, "1", |_, _| ()).await.unwrap();
        assert!(first.restarted && machine.ran_in(&boot));
        let second = machine.change(Change::Install, "1", |_, _| ()).await.unwrap();
        assert!(!second.restarted);
        assert_eq!(machine.ledger.restarts.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn nothing_fails_once_it_is_calm() {
        let machine = machine();
        assert!(machine.happens(1.0));
        machine.ledger.calm_down();
        assert!(!machine.happens(1.0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_goes_on_when_nobody_waits_for_it() {
        let machine = machine();
        {
            let install = machine.restart(true, "1");
            tokio::select! {
                biased;
                _ = install => panic!("it takes its time"),
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(machine.is_installed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_power_cut_in_the_middle_leaves_what_was_there() {
        let machine = machine();
        let (changed, ()) = tokio::join!(machine.restart(true, "1"), async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            machine.reboot();
        });
        assert!(changed.unwrap_err().rolled_back);
        assert!(!machine.is_installed());
    }
}
