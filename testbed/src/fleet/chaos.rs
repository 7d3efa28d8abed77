//! Faults at random, drawn from a seed, on a small fleet with two replicas of the coordinator; and what must hold all the same.
//!
//! Checked all the time: never more machines down by us than may be; no command takes effect twice; no restart that the Node
//! did not name before; no node invites Wasm pods in a boot in which no module has run, once a leader could know of the boot.
//! And at the end, when nothing fails any more: every node and every Prefetch as its owner wants it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::task::JoinSet;

use super::fault::{Fault, draw_fault};
use super::ledger::locked;
use super::machine::{MISSING, Machine};
use super::replica::{Profile, Replica};
use super::temper::Temper;
use super::{Fleet, Plan, blocking, objects, on_stage, replica, replica_flags};
use crate::cluster::Cluster;
use crate::deployment::NAMESPACE;
use crate::progress::Progress;

/// How long everything may take to be right once nothing fails any more. Attempts that failed are repeated after 10 s,
/// doubled each time: four in a row are as many as may be drawn.
const CONVERGENCE: Duration = Duration::from_secs(240);
/// A leader that was disturbed is counted as one again after the Lease's time, and as much again to read everything.
const RECOVERY: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(5);
const CONTROL_PLANES: usize = 2;
const LOG: usize = 200;
const PREFETCHES: [&str; 3] = ["chaos-0", "chaos-1", "chaos-2"];
const WORKLOADS: [&str; 2] = ["chaos-a", "chaos-b"];

/// What is done, to what.
#[derive(Debug, Clone)]
pub struct Chaos {
    /// The testbed's name.
    pub name: String,
    /// How many nodes.
    pub nodes: usize,
    /// What everything is drawn from.
    pub seed: u64,
    /// For how long.
    pub duration: Duration,
    /// How many nodes may be down by us.
    pub max_unavailable: usize,
}

/// Runs it on a fresh testbed, which goes away at the end; returns what became of it, a line for each count.
///
/// # Errors
/// If a rule was broken or something does not end as it should: with the seed, what was done, and the end of both logs.
pub fn run(options: &Chaos, progress: &Progress) -> Result<Vec<String>> {
    ensure!(
        options.nodes > CONTROL_PLANES,
        "chaos needs more than {CONTROL_PLANES} nodes"
    );
    progress.note(format!("chaos with seed {}", options.seed));
    let program = progress.long_step("the coordinator is built", || replica::build(Profile::Dev))?;
    on_stage(&options.name, progress, async |cluster| {
        let client = super::administrator(cluster).await?;
        let kubeconfig = objects::coordinator_kubeconfig(&client, cluster).await?;
        let flags = replica_flags(&[
            format!("--max-unavailable={}", options.max_unavailable),
            "--linger=3s".to_owned(),
        ]);
        let replicas: Vec<Replica> = (0..2)
            .map(|number| Replica::new(number, &program, &kubeconfig, &flags))
            .collect();
        let plan = Plan {
            nodes: options.nodes,
            control_planes: CONTROL_PLANES,
            seed: options.seed,
            temper: Temper {
                arrival: Duration::from_millis(200),
                image: Duration::from_millis(60),
                failures: 0.03,
                losses: 0.05,
                echoes: 0.05,
                ..Temper::default()
            },
            max_unavailable: options.max_unavailable,
        };
        let fleet = Fleet::make(cluster, plan, &replicas).await?;
        let mut driver = Driver::new(&fleet, cluster, replicas, options.seed);
        let result = driver.play(options, progress).await;
        driver.release();
        result.with_context(|| driver.account(options.seed))
    })
}

/// What has to be undone at its time.
#[derive(Debug, Clone, Copy)]
enum Undo {
    StartReplica(usize),
    ResumeReplica(usize),
    ResumeApiServer,
}

/// Deals the faults out.
struct Driver<'a> {
    fleet: &'a Fleet<'a>,
    cluster: &'a Cluster,
    replicas: Vec<Replica>,
    draw: fastrand::Rng,
    undo: Vec<(Instant, Undo)>,
    api_is_paused: bool,
    /// From when on a leader is undisturbed.
    led_from: Instant,
    /// What nodes are annotated with.
    wanted: Arc<Mutex<BTreeMap<String, Option<&'static str>>>>,
    /// Nodes to which something happens just now.
    busy: Arc<Mutex<BTreeSet<String>>>,
    happening: JoinSet<()>,
    /// Workload and filter of each Prefetch that is there.
    prefetches: BTreeMap<&'static str, (&'static str, &'static str)>,
    timeline: Vec<String>,
}

impl<'a> Driver<'a> {
    fn new(fleet: &'a Fleet<'a>, cluster: &'a Cluster, replicas: Vec<Replica>, seed: u64) -> Self {
        Self {
            fleet,
            cluster,
            replicas,
            draw: fastrand::Rng::with_seed(seed),
            undo: Vec::new(),
            api_is_paused: false,
            led_from: Instant::now() + RECOVERY,
            wanted: Arc::default(),
            busy: Arc::default(),
            happening: JoinSet::new(),
            prefetches: BTreeMap::new(),
            timeline: Vec::new(),
        }
    }

    async fn play(&mut self, options: &Chaos, progress: &Progress) -> Result<Vec<String>> {
        for replica in &mut self.replicas {
            blocking(|| replica.start(self.cluster))?;
        }
        blocking(|| self.replicas[0].wait_until_ready())?;
        let images = |set: &str| objects::images(set, 5);
        let client = &self.fleet.client;
        objects::make_workload(client, WORKLOADS[0], &images("absent")).await?;
        let mut some_missing = images("other");
        some_missing.push(format!("registry.fleet{MISSING}1:1.0"));
        objects::make_workload(client, WORKLOADS[1], &some_missing).await?;
        let checks = tokio::spawn(Arc::clone(&self.fleet.observer).check_boots());

        let begun = Instant::now();
        let mut faults = BTreeMap::<&'static str, u32>::new();
        let mut next = begun;
        while begun.elapsed() < options.duration {
            self.undo_what_is_due(false)?;
            if Instant::now() >= next {
                let fault = draw_fault(&mut self.draw);
                if let Some(what) = self.deal(fault).await? {
                    let at = self.fleet.ledger.elapsed().as_secs_f64();
                    self.timeline.push(format!("{at:>8.2} s  {what}"));
                    *faults.entry(fault.name()).or_default() += 1;
                }
                next = Instant::now() + Duration::from_millis(self.draw.u64(150..900));
            }
            self.look_after()?;
            tokio::time::sleep(TICK).await;
        }
        self.calm_down().await?;
        progress.note(format!(
            "{} faults in {:.0} s; now everything has to come right",
            self.timeline.len(),
            begun.elapsed().as_secs_f64()
        ));
        let calm = Instant::now();
        self.until_right().await?;
        let took = calm.elapsed();
        checks.abort();
        self.check_what_was_ordered()?;
        self.ensure_kept()?;
        Ok(self.story(&faults, took))
    }

    /// Lets the checks know whether a leader is at work, and ends the play as soon as a rule is broken.
    fn look_after(&mut self) -> Result<()> {
        let one_works = self
            .replicas
            .iter()
            .any(|replica| replica.runs() && !replica.paused);
        if !one_works || self.api_is_paused {
            self.led_from = Instant::now() + RECOVERY;
        }
        self.fleet.observer.led(Instant::now() >= self.led_from);
        self.ensure_kept()
    }

    fn ensure_kept(&self) -> Result<()> {
        let mut broken = self.fleet.ledger.violations();
        broken.extend(self.replicas.iter().filter_map(Replica::panic));
        ensure!(broken.is_empty(), "rules were broken:\n{}", broken.join("\n"));
        for replica in &self.replicas {
            let expected = self
                .undo
                .iter()
                .any(|(_, undo)| matches!(undo, Undo::StartReplica(n) if self.replicas[*n].name() == replica.name()));
            ensure!(
                replica.runs() || expected,
                "{} has ended by itself",
                replica.name()
            );
        }
        Ok(())
    }

    fn undo_what_is_due(&mut self, all: bool) -> Result<()> {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.undo)
            .into_iter()
            .partition(|(at, _)| all || *at <= now);
        self.undo = later;
        let due: Vec<(Instant, Undo)> = due;
        for (_, undo) in due {
            match undo {
                Undo::StartReplica(n) => blocking(|| self.replicas[n].start(self.cluster))?,
                Undo::ResumeReplica(n) => self.replicas[n].resume()?,
                Undo::ResumeApiServer => {
                    self.signal_api_server(Signal::SIGCONT)?;
                    self.api_is_paused = false;
                }
            }
        }
        Ok(())
    }

    fn signal_api_server(&self, signal: Signal) -> Result<()> {
        let process = self
            .cluster
            .process("kube-apiserver")
            .context("the API server has ended")?;
        kill(Pid::from_raw(process.pid), signal).context("a signal to the API server")
    }

    /// Whatever happens, nothing stays paused.
    fn release(&mut self) {
        let _ = self.signal_api_server(Signal::SIGCONT);
        for replica in self.replicas.iter_mut().filter(|replica| replica.paused) {
            let _ = replica.resume();
        }
    }

    /// Which replica holds the Lease, as far as the API server can be asked.
    async fn leader(&self) -> Option<usize> {
        let leases: Api<Lease> = Api::namespaced(self.fleet.client.clone(), NAMESPACE);
        let get = leases.get_opt("quartermaster-coordinator");
        let lease = tokio::time::timeout(PATIENCE, get).await.ok()?.ok()??;
        let holder = lease.spec?.holder_identity?;
        self.replicas.iter().position(|replica| replica.name() == holder)
    }

    /// Deals one fault out; says what it was, if it could be.
    async fn deal(&mut self, fault: Fault) -> Result<Option<String>> {
        let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
        let between =
            |draw: &mut fastrand::Rng, range: std::ops::Range<u64>| Duration::from_millis(draw.u64(range));
        match fault {
            Fault::KillCoordinator | Fault::PauseCoordinator => {
                if self.api_is_paused {
                    return Ok(None);
                }
                let leader = self.leader().await;
                // Mostly the leader: the other one has little to lose.
                let n = match leader {
                    Some(leader) if self.draw.f64() < 0.75 => leader,
                    _ => self.draw.usize(..self.replicas.len()),
                };
                if !self.replicas[n].runs() || self.replicas[n].paused {
                    return Ok(None);
                }
                if leader.is_none() || leader == Some(n) {
                    self.led_from = Instant::now() + RECOVERY;
                }
                let name = self.replicas[n].name().to_owned();
                let role = if leader == Some(n) { " (the leader)" } else { "" };
                if fault == Fault::KillCoordinator {
                    let time = between(&mut self.draw, 500..6000);
                    blocking(|| self.replicas[n].kill())?;
                    self.undo.push((Instant::now() + time, Undo::StartReplica(n)));
                    return Ok(Some(format!("{name}{role} killed, for {}", seconds(time))));
                }
                // Past its Lease, or not quite.
                let time = between(&mut self.draw, 3000..22_000);
                self.replicas[n].pause()?;
                self.led_from = self.led_from.max(Instant::now() + time + RECOVERY);
                self.undo.push((Instant::now() + time, Undo::ResumeReplica(n)));
                Ok(Some(format!("{name}{role} paused, for {}", seconds(time))))
            }
            Fault::PauseApiServer => {
                if self.api_is_paused {
                    return Ok(None);
                }
                let time = between(&mut self.draw, 1000..6000);
                self.signal_api_server(Signal::SIGSTOP)?;
                self.api_is_paused = true;
                self.undo.push((Instant::now() + time, Undo::ResumeApiServer));
                Ok(Some(format!("the API server paused, for {}", seconds(time))))
            }
            Fault::KillAgent | Fault::HangAgent | Fault::CutAgent | Fault::SlowAgent => {
                let agents: Vec<_> = self
                    .fleet
                    .machines
                    .iter()
                    .filter_map(|machine| Some((machine, machine.agent()?)))
                    .collect();
                let Some((machine, agent)) = self.draw.choice(agents) else {
                    return Ok(None);
                };
                let what = match fault {
                    Fault::KillAgent => {
                        agent.kill();
                        "is killed".to_owned()
                    }
                    Fault::CutAgent => {
                        agent.cut();
                        "loses its connections".to_owned()
                    }
                    Fault::HangAgent => {
                        let time = between(&mut self.draw, 2000..20_000);
                        agent.freeze(time);
                        format!("hangs for {}", seconds(time))
                    }
                    _ => {
                        let factor = self.draw.u32(2..12);
                        agent.slow_down(factor);
                        format!("is {factor} times as slow")
                    }
                };
                Ok(Some(format!("the agent of {} {what}", machine.name)))
            }
            Fault::ChangePrefetch => self.change_prefetch().await,
            _ => Ok(self.happen_to_a_node(fault)),
        }
    }

    async fn change_prefetch(&mut self) -> Result<Option<String>> {
        if self.api_is_paused {
            return Ok(None);
        }
        let name = PREFETCHES[self.draw.usize(..PREFETCHES.len())];
        let client = &self.fleet.client;
        if self.prefetches.contains_key(name) && self.draw.f64() < 0.3 {
            objects::delete_prefetch(client, name).await?;
            self.prefetches.remove(name);
            return Ok(Some(format!("Prefetch {name} deleted")));
        }
        let workload = WORKLOADS[self.draw.usize(..WORKLOADS.len())];
        let filters = ["", "worker-0000", "worker-0001", "worker-00012"];
        let filter = filters[self.draw.usize(..filters.len())];
        objects::make_prefetch(client, name, workload, filter, 5).await?;
        self.prefetches.insert(name, (workload, filter));
        Ok(Some(format!(
            "Prefetch {name} wants {workload} on nodes with {filter:?} in their name"
        )))
    }

    /// What happens to a node goes on beside everything else, and to one node one thing at a time.
    fn happen_to_a_node(&mut self, fault: Fault) -> Option<String> {
        let number = self.draw.usize(..self.fleet.machines.len());
        let machine = Arc::clone(&self.fleet.machines[number]);
        let name = machine.name.clone();
        if !locked(&self.busy).insert(name.clone()) {
            return None;
        }
        let seconds = Duration::from_millis(self.draw.u64(1000..8000));
        let value = self
            .draw
            .choice([Some("true"), Some("true"), Some("false"), None])?;
        let said = match fault {
            Fault::Annotate => format!("{name} annotated {value:?}"),
            other => format!("{name} {}, {:.1} s", other.name(), seconds.as_secs_f64()),
        };
        let wanted = Arc::clone(&self.wanted);
        let busy = Arc::clone(&self.busy);
        let hand = Hand {
            nodes: Api::all(self.fleet.client.clone()),
            machine,
            number,
            control_plane: number < self.fleet.control_planes,
        };
        self.happening.spawn(async move {
            match fault {
                Fault::Annotate => {
                    hand.annotate(value).await;
                    locked(&wanted).insert(name.clone(), value);
                }
                Fault::Reboot => hand.reboot(seconds / 4).await,
                Fault::Reimage => {
                    hand.machine.reimage();
                    hand.report_boot().await;
                }
                Fault::Remake => {
                    locked(&wanted).remove(&name);
                    hand.remake(seconds / 2).await;
                }
                Fault::Cordon => hand.cordon(seconds).await,
                _ => hand.not_ready(seconds).await,
            }
            locked(&busy).remove(&name);
        });
        Some(said)
    }

    /// Nothing fails any more; what was stopped runs again.
    async fn calm_down(&mut self) -> Result<()> {
        self.undo_what_is_due(true)?;
        self.fleet.ledger.calm_down();
        while let Some(ended) = self.happening.join_next().await {
            ended?;
        }
        for agent in self.fleet.machines.iter().filter_map(|machine| machine.agent()) {
            agent.slow_down(1);
        }
        self.led_from = self.led_from.min(Instant::now() + RECOVERY);
        Ok(())
    }

    async fn until_right(&mut self) -> Result<()> {
        let end = Instant::now() + CONVERGENCE;
        loop {
            self.look_after()?;
            let wrong = self.what_is_wrong().await?;
            if wrong.is_empty() {
                return Ok(());
            }
            if Instant::now() >= end {
                let some: Vec<_> = wrong.iter().take(20).cloned().collect();
                bail!(
                    "{} s after the last fault {} things are still not right:\n{}",
                    CONVERGENCE.as_secs(),
                    wrong.len(),
                    some.join("\n")
                );
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn what_is_wrong(&self) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        let seen = self.fleet.observer.seen();
        let wanted = locked(&self.wanted).clone();
        for machine in &self.fleet.machines {
            let name = &machine.name;
            let Some(node) = seen.get(name) else {
                wrong.push(format!("{name} is not there"));
                continue;
            };
            let is_wanted = wanted.get(name).copied().flatten() == Some("true");
            let right = if is_wanted {
                node.takes_wasm()
                    && node.verified_boot.as_ref() == Some(&node.boot_id)
                    && machine.is_installed()
                    && machine.ran_in(&node.boot_id)
            } else {
                node.is_untouched() && !machine.is_installed()
            };
            if !right || !node.ready || node.summoned {
                let there = machine.is_installed();
                wrong.push(format!("{name}, wanted {is_wanted}, installed {there}: {node:?}"));
            }
            for (workload, filter) in self.prefetches.values() {
                let excluded = machine.name.starts_with("control");
                if !excluded && name.contains(filter) {
                    let set = if *workload == WORKLOADS[0] {
                        "absent"
                    } else {
                        "other"
                    };
                    let missing = objects::images(set, 5)
                        .iter()
                        .filter(|image| !machine.has(image))
                        .count();
                    if missing > 0 {
                        wrong.push(format!("{name} lacks {missing} images of {workload}"));
                    }
                }
            }
        }
        for name in self.prefetches.keys() {
            let status = objects::prefetch_status(&self.fleet.client, name).await?;
            if status["phase"] != "READY" || status["pairs"]["ready"] != status["pairs"]["wanted"] {
                wrong.push(format!("Prefetch {name}: {status}"));
            }
        }
        Ok(wrong)
    }

    fn check_what_was_ordered(&self) -> Result<()> {
        let unnamed: Vec<String> = self
            .fleet
            .ledger
            .ordered()
            .into_iter()
            .filter(|(node, id)| !self.fleet.observer.has_named(node, id))
            .map(|(node, id)| format!("{node} by {id}"))
            .collect();
        ensure!(
            unnamed.is_empty(),
            "restarts that no Node has named before: {}",
            unnamed.join(", ")
        );
        Ok(())
    }

    fn story(&self, faults: &BTreeMap<&'static str, u32>, took: Duration) -> Vec<String> {
        let ledger = &self.fleet.ledger;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::SeqCst);
        let mut story: Vec<String> = faults.iter().map(|(name, n)| format!("{n:>6}  {name}")).collect();
        story.extend([
            format!("{:>6}  commands", read(&ledger.commands)),
            format!(
                "{:>6}  commands of a term that was over, refused",
                read(&ledger.stale)
            ),
            format!("{:>6}  restarts of containerd", read(&ledger.restarts)),
            format!("{:>6}  modules run", read(&ledger.modules)),
            format!("{:>6}  images pulled", read(&ledger.pulled)),
            format!("{:>6}  agents enrolled", read(&ledger.enrolments)),
            format!(
                "{:>6}  machines down at once at most, of {}",
                ledger.worst.load(Ordering::SeqCst),
                ledger.limit.load(Ordering::SeqCst)
            ),
            format!("{:>6.1}  seconds until everything was right", took.as_secs_f64()),
        ]);
        story
    }

    /// What a person needs who looks into a failure.
    fn account(&self, seed: u64) -> String {
        let from = self.timeline.len().saturating_sub(LOG);
        let logs: Vec<String> = self
            .replicas
            .iter()
            .map(|replica| {
                format!(
                    "the last {LOG} lines of {}:\n{}",
                    replica.name(),
                    replica.log_tail(LOG)
                )
            })
            .collect();
        format!(
            "chaos failed with seed {seed}; again: testbed chaos --seed {seed}\nwhat was done:\n{}\n{}",
            self.timeline[from..].join("\n"),
            logs.join("\n")
        )
    }
}

/// What lays hands on one node.
struct Hand {
    nodes: Api<Node>,
    machine: Arc<Machine>,
    number: usize,
    control_plane: bool,
}

impl Hand {
    /// Does something until the API server has taken it.
    async fn until_taken<T, W>(&self, work: impl Fn() -> W)
    where
        W: Future<Output = kube::Result<T>>,
    {
        loop {
            match tokio::time::timeout(PATIENCE, work()).await {
                Ok(Ok(_)) => return,
                // It was taken, and the answer was lost.
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => return,
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    async fn patch(&self, patch: serde_json::Value) {
        let (patch, params) = (Patch::Merge(patch), PatchParams::default());
        self.until_taken(|| self.nodes.patch(&self.machine.name, &params, &patch))
            .await;
    }

    async fn patch_status(&self, patch: serde_json::Value) {
        // By type: a merge of the list would take away the conditions of others.
        let (patch, params) = (Patch::Strategic(patch), PatchParams::default());
        self.until_taken(|| self.nodes.patch_status(&self.machine.name, &params, &patch))
            .await;
    }

    async fn annotate(&self, value: Option<&str>) {
        self.patch(json!({"metadata": {"annotations": {"kwasm.sh/kwasm-node": value}}}))
            .await;
    }

    async fn cordon(&self, time: Duration) {
        self.patch(json!({"spec": {"unschedulable": true}})).await;
        tokio::time::sleep(time).await;
        self.patch(json!({"spec": {"unschedulable": false}})).await;
    }

    async fn not_ready(&self, time: Duration) {
        self.patch_status(json!({"status": {"conditions": objects::conditions(false)}}))
            .await;
        tokio::time::sleep(time).await;
        self.patch_status(json!({"status": {"conditions": objects::conditions(true)}}))
            .await;
    }

    async fn reboot(&self, time: Duration) {
        self.machine.reboot();
        tokio::time::sleep(time).await;
        self.report_boot().await;
    }

    async fn report_boot(&self) {
        let info = json!({"bootID": self.machine.boot_id(), "machineID": self.machine.machine_id()});
        self.patch_status(json!({"status": {"nodeInfo": info}})).await;
    }

    async fn remake(&self, time: Duration) {
        let (now, params) = (DeleteParams::default(), PostParams::default());
        self.until_taken(|| self.nodes.delete(&self.machine.name, &now))
            .await;
        self.machine.reimage();
        tokio::time::sleep(time).await;
        let Ok(node) = objects::node(&self.machine, self.number, self.control_plane) else {
            return;
        };
        self.until_taken(|| self.nodes.create(&params, &node)).await;
    }
}
