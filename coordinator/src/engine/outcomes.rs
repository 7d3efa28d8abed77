//! What orders and writes came to: logged, told in Events, counted, and brought onto the Node.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::v1::FailureReason;
use quartermaster_proto::v1::provision_event::Event as StageEvent;
use quartermaster_proto::v1::{Ended, watch_event};
use tracing::{error, info, warn};

use super::Engine;
use super::runtime::Owed;
use super::writes::WriteError;
use crate::node::{Attempt, NodeFacts, Outcome, Work, conclude};
use crate::reason;

/// After a write that failed.
const WRITE_PAUSE: SignedDuration = SignedDuration::from_secs(2);
/// After a write for which the object had changed or gone.
const GONE_PAUSE: SignedDuration = SignedDuration::from_millis(200);

impl Engine {
    /// An order came to its end. What it means for the node's marks is owed until it is written.
    pub(super) fn finished(&mut self, name: &str, work: Work, outcome: &Outcome, took: Duration) {
        self.setup.metrics.count_order(work, outcome, took);
        self.dirty_nodes.insert(name.to_owned());
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.working = None;
        let now = Timestamp::now();
        let (reason, message) = match outcome {
            Outcome::Failed { reason, message, .. } => (*reason, message.clone()),
            Outcome::Done { .. } => (FailureReason::Unspecified, String::new()),
            Outcome::Lost => (
                FailureReason::Unspecified,
                "the agent was lost; it is asked again".to_owned(),
            ),
        };
        let end = match (outcome, reason) {
            (Outcome::Failed { rolled_back, .. }, reason) => {
                let back = if *rolled_back { ", rolled back" } else { "" };
                format!("{now:.0} failed{back}: {}: {message}", reason.camel_case())
            }
            (Outcome::Done { .. }, _) => format!("{now:.0} done"),
            (Outcome::Lost, _) => format!("{now:.0} {message}"),
        };
        self.reports.end(name, end);
        let ended = Ended {
            work: work.word().to_owned(),
            reason: reason.into(),
            message,
        };
        self.tell_watchers(name, watch_event::Event::Ended(ended));
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        match outcome {
            Outcome::Done { .. } => info!(node = name, ?work, "done"),
            Outcome::Failed {
                reason,
                message,
                stage,
                rolled_back,
            } => warn!(
                node = name,
                ?work,
                reason = reason.camel_case(),
                stage = stage.word(),
                rolled_back,
                message,
                "failed"
            ),
            Outcome::Lost => {
                runtime.agent.channel = None;
                runtime.agent.failed(now);
            }
        }
        if matches!(outcome, Outcome::Done { .. })
            && let Some((_, looked_into)) = &mut runtime.handler_missing
        {
            *looked_into = true;
        }
        let restarted = matches!(work, Work::Install | Work::Remove { .. }) && *outcome != Outcome::Lost;
        if restarted {
            runtime.restarted_at = Some(now);
        }
        runtime.owed = Some(Owed {
            work,
            outcome: outcome.clone(),
            told: false,
        });
        match outcome {
            Outcome::Done { .. } if restarted => self.restart_ended(name, false),
            // What was refused before anything was touched says nothing of the next node.
            Outcome::Failed {
                rolled_back: true, ..
            } => self.restart_ended(name, true),
            _ => {}
        }
    }

    /// Writes what the end of an order asks for. The attempt is remembered once there is nothing to write.
    pub(super) fn pay(&mut self, name: &str, owed: &Owed, now: Timestamp) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let spec_hash = self.setup.spec_hash.clone();
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        let (marks, attempt) = conclude(node, owed.work, &owed.outcome, &spec_hash, &runtime.attempt, now);
        if !owed.told {
            self.tell(node, owed);
            if let Some(owed) = self
                .runtime
                .get_mut(name)
                .and_then(|runtime| runtime.owed.as_mut())
            {
                owed.told = true;
            }
        }
        if !self.write_marks(name, &marks) {
            self.paid(name, attempt);
        } else if let Some(runtime) = self.runtime.get_mut(name) {
            // Written with the attempt that was current: it must not grow again when the write is repeated.
            runtime.pending_attempt = Some(attempt);
        }
    }

    fn paid(&mut self, name: &str, attempt: Attempt) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.owed = None;
            runtime.pending_attempt = None;
            runtime.attempt = attempt;
        }
        self.dirty_nodes.insert(name.to_owned());
    }

    fn tell(&self, node: &NodeFacts, owed: &Owed) {
        let (warning, reason, note) = match (&owed.outcome, owed.work) {
            (Outcome::Done { .. }, Work::Install) => (
                false,
                reason::PROVISIONED.to_owned(),
                "a WebAssembly module ran through the handler crun; the node takes Wasm pods".to_owned(),
            ),
            (Outcome::Done { .. }, Work::Verify) => (
                false,
                reason::VERIFIED.to_owned(),
                "a WebAssembly module ran through the handler crun".to_owned(),
            ),
            (Outcome::Done { .. }, Work::Remove { .. }) => (
                false,
                reason::UNPROVISIONED.to_owned(),
                "crun with WasmEdge was removed; containerd's configuration is as it was".to_owned(),
            ),
            (
                Outcome::Failed {
                    reason: FailureReason::HandlerInUse,
                    message,
                    ..
                },
                _,
            ) => (true, reason::REMOVAL_BLOCKED.to_owned(), message.clone()),
            (
                Outcome::Failed {
                    reason,
                    message,
                    rolled_back,
                    ..
                },
                _,
            ) => {
                let prefix = if *rolled_back { "rolled back: " } else { "" };
                (true, reason.camel_case(), format!("{prefix}{message}"))
            }
            (Outcome::Done { .. }, Work::PrepareInstall | Work::PrepareRemove) | (Outcome::Lost, _) => return,
        };
        self.notices.of_node(node, warning, &reason, &note);
    }

    pub(super) fn node_written(&mut self, name: &str, result: Result<NodeFacts, WriteError>) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.writing = false;
        if result.is_err() {
            runtime.pending_attempt = None;
        }
        self.dirty_nodes.insert(name.to_owned());
        match result {
            Ok(facts) => {
                // Only the write that pays what is owed settles it: another may have been under way when
                // the order came to its end.
                if let Some(attempt) = runtime.pending_attempt.take() {
                    self.paid(name, attempt);
                }
                // The answer is newer than what the watch has brought so far.
                if self.nodes.contains_key(name) {
                    self.nodes.insert(name.to_owned(), facts);
                }
            }
            // The watch brings what there is now, and the decision is made on that.
            Err(WriteError::Gone) => runtime.write_not_before = Some(Timestamp::now() + GONE_PAUSE),
            Err(WriteError::Failed(error)) => {
                error!(
                    node = name,
                    error, "marks could not be written; it is tried again"
                );
                runtime.write_not_before = Some(Timestamp::now() + WRITE_PAUSE);
            }
        }
    }

    /// A line in the log for each stage: the agent and its own log are gone when someone asks.
    pub(super) fn stage(&mut self, name: &str, work: Work, event: &StageEvent) {
        match event {
            StageEvent::Finished(stage) => {
                let took = stage.took.and_then(|t| std::time::Duration::try_from(t).ok());
                let line = format!(
                    "  {:<8} {:>6} ms  {}",
                    stage.stage().word(),
                    took.unwrap_or_default().as_millis(),
                    stage.summary
                );
                self.reports.line(name, line);
                self.tell_watchers(name, watch_event::Event::Stage(stage.clone()));
                if let Some(took) = took {
                    self.setup.metrics.stage(work, stage.stage().word(), took);
                }
                info!(
                    node = name,
                    ?work,
                    stage = stage.stage().word(),
                    took_ms = took.unwrap_or_default().as_millis(),
                    summary = stage.summary,
                    "stage done"
                );
            }
            StageEvent::Done(done) => {
                let gap = done
                    .socket_gap
                    .and_then(|t| std::time::Duration::try_from(t).ok());
                info!(
                    node = name,
                    ?work,
                    restarted = done.restarted,
                    socket_gap_ms = gap.map(|gap| gap.as_millis()),
                    "reported done"
                );
            }
            StageEvent::Started(_) | StageEvent::Failed(_) => {}
        }
    }
}
