//! Follows nodes to what they are to become.

use std::collections::BTreeMap;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt as _};
use quartermaster_proto::v1::{self, watch_event};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::verdict::{Goal, Verdict, judge};
use crate::cluster::Cluster;
use crate::leader::Leader;
use crate::look::{Look, Tone, counted, named};
use crate::progress::Progress;
use crate::status;
use crate::trouble::chain;
use crate::{INTERRUPTED, REFUSED, events};

/// The nodes that are followed, and what has been shown of them.
pub(super) struct Followed {
    goal: Goal,
    look: Look,
    progress: Progress,
    begun: Instant,
    events: mpsc::Receiver<v1::WatchEvent>,
    nodes: Vec<String>,
    /// Those that are not at their end, with the last hindrance that was shown.
    left: BTreeMap<String, Option<(String, String)>>,
    refused: bool,
    failed: bool,
}

impl Followed {
    /// Begins to listen: before anything is written, so that nothing is missed.
    pub(super) async fn begin(leader: &Leader, nodes: &[String], goal: Goal) -> Self {
        let progress = Progress::new();
        let look = Look::of_stdout();
        notices(leader, &progress, look).await;
        Self {
            goal,
            look,
            progress,
            begun: Instant::now(),
            events: events::follow(leader, nodes).await,
            nodes: nodes.to_vec(),
            left: nodes.iter().map(|node| (node.clone(), None)).collect(),
            refused: false,
            failed: false,
        }
    }

    /// Follows the nodes until each is what it is to become, can't be, or the time is over.
    ///
    /// # Errors
    /// When the Nodes can't be watched.
    pub(super) async fn finish(mut self, cluster: &Cluster, limit: Duration) -> anyhow::Result<ExitCode> {
        for node in &self.nodes {
            self.progress.spin(node, node, "waiting to begin");
        }
        let only = match self.nodes.as_slice() {
            [node] => watcher::Config::default().fields(&format!("metadata.name={node}")),
            _ => watcher::Config::default(),
        };
        let mut seen = pin!(watcher(Api::<Node>::all(cluster.streams.clone()), only));
        let mut over = pin!(tokio::time::sleep(limit));
        let mut interrupted = pin!(tokio::signal::ctrl_c());
        while !self.left.is_empty() {
            tokio::select! {
                event = seen.next() => match event {
                    Some(Ok(Event::Apply(node) | Event::InitApply(node))) => self.seen(&node),
                    Some(Ok(Event::Delete(node))) => self.gone(&node.name_any()),
                    Some(Ok(Event::Init | Event::InitDone)) => {}
                    // It is begun anew by itself; what can't get better is a missing right.
                    Some(Err(error)) if is_forbidden(&error) => anyhow::bail!(
                        "You may not watch nodes, which shows how far they are ({}). What was ordered goes on.",
                        chain(&error)
                    ),
                    Some(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
                    None => break,
                },
                Some(event) = self.events.recv() => self.told(&event),
                () = &mut over => return Ok(self.over(limit)),
                _ = &mut interrupted => {
                    self.progress.end();
                    self.progress.line(
                        "Not followed any further; the cluster goes on with it: kubectl quartermaster status",
                    );
                    return Ok(ExitCode::from(INTERRUPTED));
                }
            }
        }
        Ok(self.code())
    }

    fn seen(&mut self, node: &Node) {
        let name = node.name_any();
        let Some(shown) = self.left.get_mut(&name) else {
            return;
        };
        match judge(node, self.goal) {
            Verdict::Going => {}
            Verdict::Done => {
                let what = match self.goal {
                    Goal::Provisioned => "runs WebAssembly: a module has run through the handler",
                    Goal::Removed => "is as it was",
                };
                self.end(&name, Tone::Good, "✓", what);
            }
            Verdict::Hindered { reason, message } => {
                let hindrance = (reason, message);
                if shown.as_ref() != Some(&hindrance) {
                    let (reason, message) = &hindrance;
                    let line = format!("{}  {reason}: {message}", self.look.strong(&name));
                    self.progress.line(&self.look.marked(Tone::Busy, "!", &line));
                    self.progress.spin(&name, &name, "waiting for another try");
                    *shown = Some(hindrance);
                }
            }
            Verdict::Refused { reason, message } => {
                self.refused = true;
                self.end(&name, Tone::Bad, "✗", &format!("{reason}: {message}"));
            }
        }
    }

    fn gone(&mut self, name: &str) {
        if self.left.contains_key(name) {
            self.failed = true;
            self.end(name, Tone::Bad, "✗", "is gone from the cluster");
        }
    }

    /// What the leader tells moves the spinners; without a terminal each of it is a line.
    fn told(&mut self, event: &v1::WatchEvent) {
        if !self.left.contains_key(&event.node) {
            return;
        }
        if !self.progress.is_seen()
            && let Some(line) = events::line(event, self.look)
        {
            self.progress.line(&line);
        }
        let removing = self.goal == Goal::Removed;
        let now = match &event.event {
            Some(watch_event::Event::Ordered(work)) => format!("{} begins", events::work_in_words(work)),
            Some(watch_event::Event::Stage(stage)) => {
                events::next_in_words(stage.stage(), removing).to_owned()
            }
            Some(watch_event::Event::Ended(ended)) if ended.work.starts_with("Prepare") => {
                "waiting for its turn to restart containerd".to_owned()
            }
            Some(watch_event::Event::Ended(ended)) if ended.message.is_empty() => {
                "writing it down".to_owned()
            }
            _ => return,
        };
        self.progress.spin(&event.node, &event.node, &now);
    }

    fn end(&mut self, name: &str, tone: Tone, mark: &str, what: &str) {
        self.left.remove(name);
        self.progress.clear(name);
        let took = format!("{:.1} s", self.begun.elapsed().as_secs_f64());
        let (name, took) = (self.look.strong(name), self.look.paint(Tone::Dim, &took));
        let line = format!("{name}  {what}  {took}");
        self.progress.line(&self.look.marked(tone, mark, &line));
    }

    fn over(&self, limit: Duration) -> ExitCode {
        self.progress.end();
        let names: Vec<String> = self.left.keys().cloned().collect();
        let line = format!(
            "{} not at the end of it after {} s: {}. The cluster goes on with it: kubectl quartermaster status",
            counted(names.len(), "node"),
            limit.as_secs(),
            named(&names, 12)
        );
        self.progress.line(&self.look.marked(Tone::Bad, "✗", &line));
        ExitCode::FAILURE
    }

    fn code(&self) -> ExitCode {
        if self.refused {
            ExitCode::from(REFUSED)
        } else if self.failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}

/// What keeps everything from going on is said first.
async fn notices(leader: &Leader, progress: &Progress, look: Look) {
    let Ok(status) = status::ask(leader).await else {
        return;
    };
    if status.paused {
        let text = "Quartermaster is paused: nothing is begun until `kubectl quartermaster resume`.";
        progress.line(&look.paint(Tone::Busy, text));
    }
    if let Some(why) = status.halted {
        let text = format!("The rollout is halted: {why}. `kubectl quartermaster resume` goes on.");
        progress.line(&look.paint(Tone::Busy, &text));
    }
    if status.removing {
        let text = "Everything is being removed from the cluster, whatever annotations say.";
        progress.line(&look.paint(Tone::Busy, text));
    }
}

fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 403,
        _ => false,
    }
}
