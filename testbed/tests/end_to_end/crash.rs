//! Whatever dies in the middle, a node ends wholly old or wholly new, and healthy. The points at which it dies are those
//! that the agent counts itself, so a step that is added tomorrow is tested tomorrow.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use testbed::wait_for;

use crate::hand::{HAND, Hand};
use crate::stage::{NODES, Stage, server_pod};

const SCRIPT: &str = include_str!("crash.sh");
/// What an installation's or a removal's first line after a fault may be: the exit code is the victim's own.
const WHOLE: [&str; 2] = ["old healthy without", "new healthy with"];

/// A point that an operation passes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Point {
    operation: &'static str,
    /// `install`, `uninstall`, or `apply` for the host unit.
    command: String,
    ordinal: usize,
    effect: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// The agent dies at the point, and never comes back.
    Agent,
    /// The host unit dies there.
    HostUnit,
    Containerd,
    FullDisk,
    PowerCut,
}

impl Fault {
    fn word(self) -> &'static str {
        match self {
            Self::Agent | Self::HostUnit => "kill",
            Self::Containerd => "containerd",
            Self::FullDisk => "full",
            Self::PowerCut => "cut",
        }
    }

    /// Whether it can happen at a point.
    fn hits(self, point: &Point) -> bool {
        let host_unit = point.command == "apply";
        match self {
            Self::Agent => !host_unit,
            Self::HostUnit | Self::PowerCut => host_unit,
            Self::Containerd => true,
            // What needs room on a disk.
            Self::FullDisk => ["write ", "make ", "link ", "commit "]
                .iter()
                .any(|word| point.effect.starts_with(word)),
        }
    }
}

/// Everything, on every node: for `make soak`.
fn soak() -> bool {
    std::env::var_os("TESTBED_SOAK").is_some()
}

pub(crate) fn a_node_survives_the_death_of_the_agent_between_any_two_steps(stage: &Stage) -> Result<()> {
    survives(stage, Fault::Agent)
}

pub(crate) fn a_node_survives_the_death_of_the_host_unit_between_any_two_steps(stage: &Stage) -> Result<()> {
    survives(stage, Fault::HostUnit)
}

pub(crate) fn a_node_survives_the_death_of_containerd_between_any_two_steps(stage: &Stage) -> Result<()> {
    survives(stage, Fault::Containerd)
}

pub(crate) fn a_node_survives_a_disk_that_is_full_at_any_write(stage: &Stage) -> Result<()> {
    survives(stage, Fault::FullDisk)
}

pub(crate) fn a_node_survives_a_power_cut_between_any_two_steps_of_the_host_unit(
    stage: &Stage,
) -> Result<()> {
    survives(stage, Fault::PowerCut)
}

fn survives(stage: &Stage, fault: Fault) -> Result<()> {
    let nodes: &[&str] = if soak() {
        &NODES
    } else {
        &["worker-17", "worker-24"]
    };
    let results: Vec<Result<usize>> = std::thread::scope(|scope| {
        let threads: Vec<_> = nodes
            .iter()
            .enumerate()
            .map(|(position, node)| {
                scope.spawn(move || survives_on(stage, node, (position, nodes.len()), fault))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread died")))
            .collect()
    });
    for (node, result) in nodes.iter().zip(results) {
        let survived = result.with_context(|| format!("on {node}, {fault:?}"))?;
        println!("    {fault:?}: {survived} points survived on {node}");
    }
    Ok(())
}

fn survives_on(stage: &Stage, node: &str, (position, nodes): (usize, usize), fault: Fault) -> Result<usize> {
    let ground = Ground::prepare(stage, node)?;
    let result: Result<usize> = (|| {
        if fault == Fault::FullDisk {
            ground.hand.sh(SMALL_DISKS)?;
        }
        let points = ground.points()?;
        let survived = ground.run(fault, chosen(fault, points, position, nodes))?;
        ground.check_pod(fault != Fault::PowerCut)?;
        Ok(survived)
    })();
    let cleared = ground.clear();
    let survived = result?;
    cleared?;
    Ok(survived)
}

/// The points to try. In a soak these are all, on each node. Otherwise the nodes share them, one of the payload's files
/// stands for the others, and the power is cut where the host unit goes from one step to the next.
fn chosen(fault: Fault, points: Vec<Point>, position: usize, nodes: usize) -> Vec<Point> {
    let mut files = 0;
    points
        .into_iter()
        .filter(|point| fault.hits(point))
        .filter(|point| {
            let file = point.effect.starts_with("write of the payload");
            files += usize::from(file);
            let step = ["rename to ", "RestartUnit", "wait until"]
                .iter()
                .any(|word| point.effect.starts_with(word));
            soak() || (!file || files == 3) && (fault != Fault::PowerCut || step)
        })
        .enumerate()
        .filter(|(n, _)| soak() || n % nodes == position)
        .map(|(_, point)| point)
        .collect()
}

/// Small disks of their own where the agent writes, with what lay there.
const SMALL_DISKS: &str = "set -e; for disk in /opt /etc/containerd; do
    mkdir -p /root/hand/keep; cp -a $disk/. /root/hand/keep/
    mount -t tmpfs -o size=160m tmpfs $disk; cp -a /root/hand/keep/. $disk/; rm -rf /root/hand/keep
done";
const LARGE_DISKS: &str =
    "for disk in /opt /etc/containerd; do mountpoint -q $disk && umount -l $disk; done; true";
/// containerd comes up at once when it was killed, not after its unit's five seconds.
const QUICK: &str = "mkdir -p /run/systemd/system/containerd.service.d
printf '[Service]\\nRestartSec=200ms\\nStartLimitIntervalSec=0\\n' > /run/systemd/system/containerd.service.d/quick.conf
systemctl daemon-reload";
const SLOW: &str = "rm -rf /run/systemd/system/containerd.service.d; systemctl daemon-reload";

/// A node that is ready to be hurt: a pod runs on it all along.
struct Ground<'a> {
    stage: &'a Stage,
    hand: Hand<'a>,
    pod: String,
    container: String,
}

impl<'a> Ground<'a> {
    fn prepare(stage: &'a Stage, node: &'a str) -> Result<Self> {
        let hand = Hand::on(stage, node)?;
        hand.put("crash.sh", SCRIPT)?;
        let pod = format!("lives-{node}");
        stage.cluster.apply(&server_pod(&pod, node, None))?;
        stage.until_phase(&pod, "Running")?;
        let container = container(stage, &pod)?.0;
        hand.sh(QUICK)?;
        // What a run that was broken off has left.
        hand.agent("uninstall")?;
        hand.sh(&format!("cp /etc/containerd/config.toml {HAND}/original"))?;
        hand.ends(0, "install")?;
        hand.sh(&format!("cp /etc/containerd/config.toml {HAND}/edited"))?;
        hand.ends(0, "uninstall")?;
        Ok(Self {
            stage,
            hand,
            pod,
            container,
        })
    }

    fn clear(&self) -> Result<()> {
        let left = self.hand.agent("uninstall")?;
        self.hand.sh(LARGE_DISKS)?;
        self.hand.sh(SLOW)?;
        self.stage.delete_pods(&[&self.pod])?;
        ensure!(left.code == 4, "it was not clean: {}", left.out);
        Ok(())
    }

    /// The points of an installation and of a removal, in their order.
    fn points(&self) -> Result<Vec<Point>> {
        let mut points = Vec::new();
        for operation in ["install", "uninstall"] {
            self.hand.sh(&format!(
                "bash {HAND}/crash.sh none {operation} {operation} 0 again"
            ))?;
            let passed = self.hand.sh(&format!("cat {HAND}/passed"))?;
            for line in passed.lines() {
                let mut words = line.splitn(3, ' ');
                let (Some(command), Some(ordinal), Some(effect)) = (words.next(), words.next(), words.next())
                else {
                    bail!("{line:?} is no point");
                };
                points.push(Point {
                    operation,
                    command: command.to_owned(),
                    ordinal: ordinal.parse()?,
                    effect: effect.to_owned(),
                });
            }
        }
        ensure!(points.len() > 50, "only {} points were passed", points.len());
        Ok(points)
    }

    /// Tries every point. Installations that went on to their end are what removals are tried on.
    fn run(&self, fault: Fault, points: Vec<Point>) -> Result<usize> {
        let (installs, removals): (Vec<_>, Vec<_>) =
            points.into_iter().partition(|point| point.operation == "install");
        let (mut survived, mut removals) = (0, removals.into_iter());
        for (n, point) in installs.iter().enumerate() {
            // Half of them are given to the same command again, the others to the one that takes it back.
            let removal = if n % 2 == 0 { removals.next() } else { None };
            match removal {
                Some(removal) => {
                    survived += self.case(fault, point, "again")?;
                    survived += self.case(fault, &removal, "again")?;
                }
                None => survived += self.case(fault, point, "back")?,
            }
        }
        for removal in removals {
            survived += self.case(fault, &removal, "again")?;
        }
        Ok(survived)
    }

    /// Tries one point. A point that this run did not come to (a module that was run once less) counts for nothing.
    fn case(&self, fault: Fault, point: &Point, then: &str) -> Result<usize> {
        let Point {
            operation,
            command,
            ordinal,
            effect,
        } = point;
        if *operation == "uninstall" {
            self.hand.agent("install")?;
        }
        let line = |fault: &str| {
            format!("bash {HAND}/crash.sh {fault} {operation} {command} {ordinal} {then} 2>/dev/null")
        };
        let told = if fault == Fault::PowerCut {
            self.cut_power(&line("cut"))?;
            self.hand.sh(&line("booted"))?
        } else {
            self.hand.sh(&line(fault.word()))?
        };
        self.judge(&told).with_context(|| {
            let said = self
                .hand
                .sh(&format!(
                    "cd {HAND}; tail -n 20 first second; cat /opt/quartermaster/state/journal.json; journalctl -o cat -n 30 -u 'quartermaster-apply*'"
                ))
                .unwrap_or_default();
            format!("{fault:?} at {command} {ordinal} ({effect}) of {operation}:\n{told}\n{said}")
        })
    }

    fn judge(&self, told: &str) -> Result<usize> {
        let mut lines = told.lines();
        let fault = lines.next().and_then(|line| line.strip_prefix("fault "));
        let (_, node) = fault.and_then(|line| line.split_once(' ')).context("no report")?;
        ensure!(
            WHOLE.iter().any(|whole| node.starts_with(whole)),
            "it was left neither wholly old nor wholly new, or not healthy"
        );
        ensure!(!node.contains(" armed "), "the boot-time unit was left");
        let end = lines
            .next()
            .and_then(|line| line.strip_prefix("then "))
            .context("no end")?;
        let right = ["install 0 new healthy with", "install 4 new healthy with"]
            .iter()
            .any(|right| end.trim_end() == *right)
            || [
                "uninstall 0 old healthy without",
                "uninstall 4 old healthy without",
            ]
            .iter()
            .any(|right| end.trim_end() == *right);
        ensure!(
            right,
            "the command that came after did not end right, or left a trace"
        );
        Ok(usize::from(!node.contains(" missed ")))
    }

    /// Runs a case up to its point, cuts the node's power there, and boots it again.
    fn cut_power(&self, case: &str) -> Result<()> {
        let (stage, node) = (self.stage, self.hand.node);
        std::thread::scope(|scope| {
            // It ends with the node.
            let running = scope.spawn(|| self.hand.sh(case));
            let stopped = wait_for(
                "the host unit to come to its point",
                Duration::from_secs(60),
                || self.hand.sh(&format!("test -e {HAND}/stopped")).map(Some),
            );
            stage.cluster.stop_node(node)?;
            let _ = running.join();
            stopped?;
            anyhow::Ok(())
        })?;
        stage.cluster.start_node(node)?;
        stage.cluster.wait_until_ready(&[node], crate::stage::SOON)?;
        self.hand.sh(QUICK).map(drop)
    }

    /// The pod that ran all along is the same container as at the start.
    fn check_pod(&self, same: bool) -> Result<()> {
        if !same {
            return self.stage.until_phase(&self.pod, "Running");
        }
        let (now, restarts) = container(self.stage, &self.pod)?;
        ensure!(
            now == self.container && restarts == 0,
            "the pod {} did not run through: {restarts} restarts, {} is now {now}",
            self.pod,
            self.container
        );
        Ok(())
    }
}

/// The id and the restarts of a pod's one container.
fn container(stage: &Stage, pod: &str) -> Result<(String, u64)> {
    let status = &stage.get(&["pod", pod])?["status"]["containerStatuses"][0];
    let id = status["containerID"]
        .as_str()
        .context("the pod has no container")?;
    Ok((id.to_owned(), status["restartCount"].as_u64().unwrap_or(u64::MAX)))
}
