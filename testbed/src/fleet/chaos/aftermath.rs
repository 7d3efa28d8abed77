//! What has to come right once nothing fails any more, and what is told of it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::{CONVERGENCE, Driver, LOG, WORKLOADS};
use crate::fleet::ledger::locked;
use crate::fleet::objects;

impl Driver<'_> {
    pub(super) async fn until_right(&mut self) -> Result<()> {
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

    pub(super) fn check_what_was_ordered(&self) -> Result<()> {
        let unnamed: Vec<String> = self
            .fleet
            .ledger
            .ordered()
            .into_iter()
            .filter(|(node, id)| {
                !self.fleet.observer.has_named(node, id) && !self.gateway.has_named(node, id)
            })
            .map(|(node, id)| format!("{node} by {id}"))
            .collect();
        ensure!(
            unnamed.is_empty(),
            "restarts that no Node has named before: {}",
            unnamed.join(", ")
        );
        Ok(())
    }

    pub(super) fn story(&self, faults: &BTreeMap<&'static str, u32>, took: Duration) -> Vec<String> {
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
        story.extend(self.gateway.story());
        story
    }

    /// What a person needs who looks into a failure.
    pub(super) fn account(&self, seed: u64) -> String {
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
