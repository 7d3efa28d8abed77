//! Faults at random, drawn from a seed, on a small fleet with two replicas of the coordinator; and what must hold all the same.
//!
//! Checked all the time: never more machines down by us than may be; no command takes effect twice; no restart that the Node
//! did not name before; no node invites Wasm pods in a boot in which no module has run, once a leader could know of the boot.
//! And at the end, when nothing fails any more: every node and every Prefetch as its owner wants it.

mod aftermath;
mod deal;
mod hand;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use axum::body::Bytes;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;

use super::fault::draw_fault;
use super::gateway::Gateway;
use super::machine::MISSING;
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
        let own = objects::coordinator_kubeconfig(&client, cluster).await?;
        let (gateway, kubeconfig) = Gateway::start(cluster, &own, options.seed).await?;
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
        let mut driver = Driver::new(&fleet, cluster, replicas, options.seed, gateway);
        let result = driver.play(options, progress).await;
        driver.release();
        result.with_context(|| driver.account(options.seed))
    })
}

/// What has to be undone at its time.
#[derive(Debug)]
enum Undo {
    StartReplica(usize),
    ResumeReplica(usize),
    ResumeApiServer,
    StartApiServer,
    /// Lists of a while ago.
    AnswerWith(HashMap<String, Bytes>),
}

/// Deals the faults out.
struct Driver<'a> {
    fleet: &'a Fleet<'a>,
    cluster: &'a Cluster,
    replicas: Vec<Replica>,
    draw: fastrand::Rng,
    undo: Vec<(Instant, Undo)>,
    api_is_away: bool,
    gateway: Gateway,
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
    fn new(
        fleet: &'a Fleet<'a>,
        cluster: &'a Cluster,
        replicas: Vec<Replica>,
        seed: u64,
        gateway: Gateway,
    ) -> Self {
        Self {
            fleet,
            cluster,
            replicas,
            draw: fastrand::Rng::with_seed(seed),
            undo: Vec::new(),
            api_is_away: false,
            gateway,
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
        if !one_works || self.api_is_away {
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
                    self.api_is_away = false;
                }
                Undo::StartApiServer => {
                    blocking(|| self.cluster.start_api_server())?;
                    self.api_is_away = false;
                }
                Undo::AnswerWith(lists) => {
                    self.led_from = self.led_from.max(Instant::now() + RECOVERY);
                    self.gateway.answer_with(lists);
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

    /// Nothing fails any more; what was stopped runs again.
    async fn calm_down(&mut self) -> Result<()> {
        self.undo_what_is_due(true)?;
        self.gateway.calm_down();
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
}
