//! What a fleet is measured by: images that are absent and present, a restart of the coordinator, and a rollout.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::observer::Seen;
use super::replica::{Profile, Replica, Usage};
use super::temper::Temper;
use super::{Fleet, Plan, blocking, objects, on_stage, replica, replica_flags};
use crate::progress::Progress;

/// How long any scenario may take.
const DEADLINE: Duration = Duration::from_secs(900);
const LOOK: Duration = Duration::from_millis(100);
/// A fleet of any size has so many nodes with a control plane.
const CONTROL_PLANES: usize = 3;
/// The Deployment and the Prefetch of all scenarios.
const WORK: &str = "work";

/// A scenario; they run in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Scenario {
    /// No image is there, and no agent.
    Absent,
    /// Every image is there and the coordinator does not know it; needs `absent`, which brings the agents.
    Present,
    /// The coordinator is restarted in a fleet with nothing to do.
    Restart,
    /// Every node becomes able to run Wasm, a tenth at a time.
    Provision,
}

impl Scenario {
    /// All of them.
    #[must_use]
    pub fn all() -> Vec<Self> {
        Self::value_variants().to_vec()
    }
}

/// A fleet, and what is done with it.
#[derive(Debug)]
pub struct Options {
    /// The testbed's name.
    pub name: String,
    /// How many nodes.
    pub nodes: usize,
    /// How many images.
    pub images: usize,
    /// What everything is drawn from.
    pub seed: u64,
    /// What is run; in its own order, whatever order it is given in.
    pub scenarios: Vec<Scenario>,
    /// How agents behave.
    pub temper: Temper,
}

/// A number that was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// In a fleet of so many nodes.
    pub nodes: usize,
    /// What was measured.
    pub what: &'static str,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What it should not exceed.
    pub goal: Option<f64>,
}

impl Measurement {
    /// Whether it is as it should be, or nothing was asked of it.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.goal.is_none_or(|goal| self.value <= goal)
    }
}

/// Runs the scenarios on a fresh testbed, which goes away at the end.
///
/// # Errors
/// If a scenario does not come to its end, or a rule was broken on the way: then with the coordinator's log.
pub fn run(options: Options, progress: &Progress) -> Result<Vec<Measurement>> {
    ensure!(
        options.nodes > CONTROL_PLANES,
        "a fleet has more than {CONTROL_PLANES} nodes"
    );
    let program = progress.long_step("the coordinator is built", || replica::build(Profile::Shipped))?;
    let name = options.name.clone();
    on_stage(&name, progress, async |cluster| {
        let client = super::administrator(cluster).await?;
        let kubeconfig = objects::coordinator_kubeconfig(&client, cluster).await?;
        let max_unavailable = (options.nodes / 10).max(1);
        let flags = replica_flags(&[
            format!("--max-unavailable={max_unavailable}"),
            // Long enough that agents that came for one scenario are there in the next.
            "--linger=30m".to_owned(),
        ]);
        let mut scenarios = options.scenarios.clone();
        scenarios.sort();
        let mut course = Course {
            replica: Replica::new(0, &program, &kubeconfig, &flags),
            results: Vec::new(),
            nodes: options.nodes,
            images: options.images,
            max_unavailable,
            progress,
            peak: 0,
        };
        let begun = Instant::now();
        let plan = Plan {
            nodes: options.nodes,
            control_planes: CONTROL_PLANES,
            seed: options.seed,
            temper: options.temper,
            max_unavailable,
        };
        let fleet = Fleet::make(cluster, plan, std::slice::from_ref(&course.replica)).await?;
        progress.note(format!(
            "{} Nodes made in {:.1} s, seed {}",
            options.nodes,
            begun.elapsed().as_secs_f64(),
            options.seed
        ));
        let result = course.run(&fleet, &scenarios).await;
        let log = || {
            format!(
                "seed {}; the end of the coordinator's log:\n{}",
                options.seed,
                course.replica.log_tail(200)
            )
        };
        result.with_context(log)?;
        let violations = fleet.ledger.violations();
        if !violations.is_empty() {
            bail!("rules were broken:\n{}\n{}", violations.join("\n"), log());
        }
        Ok(course.results)
    })
}

/// The scenarios under way.
struct Course<'a> {
    replica: Replica,
    results: Vec<Measurement>,
    nodes: usize,
    images: usize,
    max_unavailable: usize,
    progress: &'a Progress,
    /// The most memory of a process that has ended.
    peak: u64,
}

/// Where all counters stood.
struct Mark {
    at: Instant,
    usage: Usage,
    writes: BTreeMap<String, f64>,
    patches: f64,
    commands: u64,
    enrolments: u64,
    lines: u64,
    pull_micros: u64,
    install_micros: u64,
}

impl Course<'_> {
    async fn run(&mut self, fleet: &Fleet<'_>, scenarios: &[Scenario]) -> Result<()> {
        blocking(|| {
            self.replica.start(fleet.cluster)?;
            self.replica.wait_until_ready()
        })?;
        self.until_steady().await?;
        for scenario in scenarios {
            match scenario {
                Scenario::Absent => self.absent(fleet).await?,
                Scenario::Present => self.present(fleet).await?,
                Scenario::Restart => self.restart(fleet).await?,
                Scenario::Provision => self.provision(fleet).await?,
            }
        }
        let peak = blocking(|| self.replica.usage())?.peak.max(self.peak);
        self.add("memory, the most in all", megabytes(peak), "MB", Some(100.0));
        Ok(())
    }

    async fn absent(&mut self, fleet: &Fleet<'_>) -> Result<()> {
        let images = objects::images("absent", self.images);
        objects::make_workload(&fleet.client, WORK, &images).await?;
        let before = self.mark(fleet)?;
        objects::make_prefetch(&fleet.client, WORK, WORK, "", 300).await?;
        self.until_images_are_marked(fleet, &before).await?;
        let after = self.mark(fleet)?;
        self.add("absent: time to READY", after.seconds_since(&before), "s", None);
        // So many nodes pull at once, so this is what the agents alone would take.
        let at_once = (self.nodes / 10).max(10).min(self.nodes);
        let alone = (after.pull_micros - before.pull_micros) as f64 / 1e6 / at_once as f64;
        self.add("absent: of that, the agents' own work", alone, "s", None);
        self.add("absent: coordinator's CPU", after.cpu_since(&before), "s", None);
        self.add(
            "absent: agents enrolled",
            count(after.enrolments - before.enrolments),
            "",
            None,
        );
        self.writes(
            "absent: writes a node",
            "absent: writes of the status",
            &before,
            &after,
            None,
        );
        self.add(
            "absent: memory so far",
            megabytes(after.usage.peak),
            "MB",
            Some(100.0),
        );
        Ok(())
    }

    async fn present(&mut self, fleet: &Fleet<'_>) -> Result<()> {
        let old: BTreeMap<String, Option<String>> = marks(fleet);
        let before = self.mark(fleet)?;
        let images = objects::images("present", self.images);
        objects::make_workload(&fleet.client, WORK, &images).await?;
        self.until("all nodes to carry the mark of the new images", || {
            let now = marks(fleet);
            Ok(now
                .iter()
                .filter(|(name, mark)| mark.is_some() && old.get(*name) != Some(mark))
                .count()
                == old.values().flatten().count())
        })
        .await?;
        self.until_images_are_marked(fleet, &before).await?;
        let after = self.mark(fleet)?;
        self.add("present: time to READY", after.seconds_since(&before), "s", None);
        self.add(
            "present: coordinator's CPU",
            after.cpu_since(&before),
            "s",
            Some(5.0),
        );
        self.writes(
            "present: writes a node",
            "present: writes of the status",
            &before,
            &after,
            Some(1.0),
        );
        self.add(
            "present: memory so far",
            megabytes(after.usage.peak),
            "MB",
            Some(100.0),
        );
        Ok(())
    }

    async fn restart(&mut self, fleet: &Fleet<'_>) -> Result<()> {
        self.until_steady().await?;
        let before = self.mark(fleet)?;
        self.peak = self.peak.max(before.usage.peak);
        blocking(|| self.replica.terminate())?;
        let begun = Instant::now();
        blocking(|| {
            self.replica.start(fleet.cluster)?;
            self.replica.wait_until_ready()
        })?;
        let steady = self.until_steady().await?;
        let after = self.mark(fleet)?;
        self.add(
            "restart: until steady",
            (steady - begun).as_secs_f64(),
            "s",
            Some(10.0),
        );
        self.add(
            "restart: coordinator's CPU",
            after.usage.cpu.as_secs_f64(),
            "s",
            None,
        );
        self.add("restart: memory", megabytes(after.usage.peak), "MB", Some(100.0));
        let woken = after.commands - before.commands + after.enrolments - before.enrolments + after.lines
            - before.lines;
        self.add("restart: agents woken", count(woken), "", Some(0.0));
        let writes = after.writes.values().sum::<f64>().abs();
        self.add("restart: writes but the Lease", writes, "", Some(0.0));
        Ok(())
    }

    async fn provision(&mut self, fleet: &Fleet<'_>) -> Result<()> {
        let before = self.mark(fleet)?;
        objects::annotate(&fleet.client, &fleet.names(), Some("true")).await?;
        self.until("every node to take Wasm pods", || {
            ensure_kept(fleet)?;
            Ok(fleet.observer.count(Seen::takes_wasm) == self.nodes)
        })
        .await?;
        let after = self.mark(fleet)?;
        let wall = after.seconds_since(&before);
        let alone = (after.install_micros - before.install_micros) as f64 / 1e6 / self.max_unavailable as f64;
        self.add("provision: all nodes", wall, "s", None);
        self.add("provision: of that, the agents' own work", alone, "s", None);
        let overhead = (wall - alone).max(0.0) * 1000.0 / count(self.nodes as u64);
        self.add("provision: overhead a node", overhead, "ms", Some(50.0));
        self.add(
            "provision: coordinator's CPU a node",
            after.cpu_since(&before) * 1000.0 / count(self.nodes as u64),
            "ms",
            None,
        );
        let worst = fleet.ledger.worst.load(Ordering::SeqCst) as u64;
        self.add(
            "provision: nodes down at once, the most",
            count(worst),
            "",
            Some(self.max_unavailable as f64),
        );
        let marked = fleet.observer.worst.load(Ordering::SeqCst) as u64;
        self.add(
            "provision: nodes marked at once, the most",
            count(marked),
            "",
            Some(self.max_unavailable as f64),
        );
        let writes = after.kind("node") - before.kind("node");
        self.add(
            "provision: writes a node",
            writes / count(self.nodes as u64),
            "",
            None,
        );
        Ok(())
    }

    fn writes(
        &mut self,
        nodes: &'static str,
        status: &'static str,
        before: &Mark,
        after: &Mark,
        goal: Option<f64>,
    ) {
        // By the coordinator's own count, held against the API server's, in which ours are none: we patch no Node here.
        let own = after.kind("node") - before.kind("node");
        let seen = after.patches - before.patches;
        if (own - seen).abs() > 0.5 {
            self.progress.note(format!(
                "the coordinator counts {own} writes of Nodes, the API server {seen}"
            ));
        }
        self.add(nodes, seen / count(self.nodes as u64), "", goal);
        let of_status = after.kind("prefetch") - before.kind("prefetch");
        let at_most = 5.0 + after.seconds_since(before) / 5.0;
        self.add(status, of_status, "", Some(at_most.ceil()));
    }

    fn add(&mut self, what: &'static str, value: f64, unit: &'static str, goal: Option<f64>) {
        let measurement = Measurement {
            nodes: self.nodes,
            what,
            value,
            unit,
            goal,
        };
        let verdict = match goal {
            None => String::new(),
            Some(goal) if measurement.is_met() => format!("  (goal {goal:.0})"),
            Some(goal) => format!("  MISSED: goal {goal:.0}"),
        };
        self.progress
            .note(format!("{what:<45} {value:>10.2} {unit}{verdict}"));
        self.results.push(measurement);
    }

    fn mark(&self, fleet: &Fleet<'_>) -> Result<Mark> {
        let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let ledger = &fleet.ledger;
        Ok(Mark {
            at: Instant::now(),
            usage: blocking(|| self.replica.usage())?,
            writes: blocking(|| self.replica.metrics())?
                .into_iter()
                .filter(|(name, _)| name.contains("api_writes_total"))
                .collect(),
            patches: blocking(|| patches_of_nodes(fleet))?,
            commands: read(&ledger.commands),
            enrolments: read(&ledger.enrolments),
            lines: read(&ledger.lines),
            pull_micros: read(&ledger.pull_micros),
            install_micros: read(&ledger.install_micros),
        })
    }

    async fn until_images_are_marked(&self, fleet: &Fleet<'_>, since: &Mark) -> Result<()> {
        let least = u64::try_from(self.images * (self.nodes - CONTROL_PLANES))?;
        let end = since.at + DEADLINE;
        loop {
            let status = objects::prefetch_status(&fleet.client, WORK).await?;
            let (pairs, nodes) = (&status["pairs"], status["nodes"]["wanted"].as_u64());
            let there = status["phase"] == "READY"
                && pairs["ready"] == pairs["wanted"]
                && pairs["ready"].as_u64().is_some_and(|ready| ready >= least);
            let marked = fleet.observer.count(|seen| seen.images_verified.is_some());
            if there && nodes == Some(u64::try_from(marked)?) {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "waited {DEADLINE:?} for all images; the status is {status}"
            );
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn until(&self, what: &str, mut look: impl FnMut() -> Result<bool>) -> Result<()> {
        let end = Instant::now() + DEADLINE;
        while !look()? {
            ensure!(Instant::now() < end, "waited {DEADLINE:?} for {what}");
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until the replica leads and has had nothing to do for a second; returns when that second began.
    async fn until_steady(&self) -> Result<Instant> {
        const QUIET: Duration = Duration::from_secs(1);
        let end = Instant::now() + DEADLINE;
        let mut quiet = (Instant::now(), Duration::ZERO);
        loop {
            let (usage, metrics) = blocking(|| anyhow::Ok((self.replica.usage()?, self.replica.metrics()?)))?;
            let leads = metrics.get("quartermaster_leader") == Some(&1.0);
            // Two hundredths of a second: a clock tick or two for being asked.
            if !leads || usage.cpu > quiet.1 + Duration::from_millis(50) {
                quiet = (Instant::now(), usage.cpu);
            } else if quiet.0.elapsed() >= QUIET {
                return Ok(quiet.0);
            }
            ensure!(Instant::now() < end, "the coordinator does not come to rest");
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Mark {
    fn seconds_since(&self, before: &Self) -> f64 {
        (self.at - before.at).as_secs_f64()
    }

    fn cpu_since(&self, before: &Self) -> f64 {
        self.usage.cpu.saturating_sub(before.usage.cpu).as_secs_f64()
    }

    fn kind(&self, kind: &str) -> f64 {
        let label = format!("kind=\"{kind}\"");
        self.writes
            .iter()
            .filter(|(name, _)| name.contains(&label))
            .map(|(_, value)| value)
            .sum()
    }
}

fn marks(fleet: &Fleet<'_>) -> BTreeMap<String, Option<String>> {
    fleet
        .observer
        .seen()
        .into_iter()
        .map(|(name, seen)| (name, seen.images_verified))
        .collect()
}

/// Ends a scenario as soon as a rule is broken.
fn ensure_kept(fleet: &Fleet<'_>) -> Result<()> {
    match fleet.ledger.violations().first() {
        Some(violation) => bail!("a rule was broken: {violation}"),
        None => Ok(()),
    }
}

/// How many patches of Nodes the API server has answered.
fn patches_of_nodes(fleet: &Fleet<'_>) -> Result<f64> {
    let kubeconfig = fleet.cluster.kubeconfig_in_fabric().display().to_string();
    let text = fleet
        .cluster
        .kubectl(&["--kubeconfig", &kubeconfig, "get", "--raw=/metrics"])?;
    Ok(replica::read_metrics(&text)
        .iter()
        .filter(|(name, _)| {
            name.starts_with("apiserver_request_total{")
                && name.contains("resource=\"nodes\"")
                && (name.contains("verb=\"PATCH\"") || name.contains("verb=\"APPLY\""))
        })
        .map(|(_, value)| value)
        .sum())
}

fn count(n: u64) -> f64 {
    n as f64
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
