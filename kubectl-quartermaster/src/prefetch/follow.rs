//! Follows a Prefetch to its end.

use std::collections::BTreeSet;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, ResourceExt as _};
use quartermaster_proto::v1::{WatchEvent, watch_event};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::board::Board;
use super::object::{Image, Reason, Status, resource};
use crate::cluster::Cluster;
use crate::look::{Look, Tone, counted, named};
use crate::progress::Progress;
use crate::{INTERRUPTED, events};

/// Of an image's name, the end tells it from others.
const NAME: usize = 32;

struct Followed {
    what: String,
    look: Look,
    progress: Progress,
    begun: Instant,
    board: Board,
    status: Status,
    /// What has been said, so that it is said once.
    said: BTreeSet<String>,
}

pub(super) async fn follow(
    cluster: &Cluster,
    applied: &DynamicObject,
    mut told: mpsc::Receiver<WatchEvent>,
    limit: Duration,
) -> anyhow::Result<ExitCode> {
    let (name, namespace) = (applied.name_any(), applied.namespace().unwrap_or_default());
    let mut followed = Followed {
        what: format!("{namespace}/{name}"),
        look: Look::of_stdout(),
        progress: Progress::new(),
        begun: Instant::now(),
        board: Board::default(),
        status: Status::default(),
        said: BTreeSet::new(),
    };
    followed.progress.now("waiting to begin");
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.streams.clone(), &namespace, &resource());
    let only = Config::default().fields(&format!("metadata.name={name}"));
    let mut seen = pin!(watcher(api, only));
    let mut over = pin!(tokio::time::sleep(limit));
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        tokio::select! {
            event = seen.next() => match event {
                Some(Ok(Event::Apply(object) | Event::InitApply(object))) => {
                    if let Some(end) = followed.seen(&object) {
                        return Ok(end);
                    }
                }
                Some(Ok(Event::Delete(_))) => anyhow::bail!("the Prefetch {} was deleted", followed.what),
                Some(Ok(Event::Init | Event::InitDone)) => {}
                // It is begun anew by itself.
                Some(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
                None => return Ok(ExitCode::FAILURE),
            },
            Some(event) = told.recv() => followed.told(&event),
            () = &mut over => return Ok(followed.over(limit)),
            _ = &mut interrupted => {
                followed.progress.end();
                followed.progress.line(&format!(
                    "Not followed any further; the cluster goes on with it: kubectl get prefetch -n {namespace} {name}"
                ));
                return Ok(ExitCode::from(INTERRUPTED));
            }
        }
    }
}

impl Followed {
    fn seen(&mut self, object: &DynamicObject) -> Option<ExitCode> {
        self.status = Status::read(object)?;
        let status = self.status.clone();
        let wanted = status.nodes.wanted;
        for image in &status.images {
            if image.ready >= wanted && wanted > 0 && self.said.insert(image.image.clone()) {
                self.progress.clear(&image.image);
                let line = format!("{}  on {}", image.image, nodes(wanted));
                self.line(Tone::Good, "✓", &line);
            }
        }
        self.progress.now(&format!(
            "{} of {} there",
            status.pairs.ready, status.pairs.wanted
        ));
        match status.phase.as_str() {
            "READY" => {
                self.progress.end();
                self.line(
                    Tone::Good,
                    "✓",
                    &format!(
                        "{} is READY: {} on {}",
                        self.what,
                        counted(status.images.len(), "image"),
                        nodes(wanted)
                    ),
                );
                Some(ExitCode::SUCCESS)
            }
            "FAILED" => {
                self.progress.end();
                for (line, words) in failures(&status.images) {
                    self.line(Tone::Bad, "✗", &line);
                    self.progress.line(&self.look.wrapped(words, 4));
                }
                let line = format!(
                    "{} is FAILED: {} of {} missing. What is missing is tried again by itself.",
                    self.what, status.pairs.failed, status.pairs.wanted
                );
                self.line(Tone::Bad, "✗", &line);
                Some(ExitCode::FAILURE)
            }
            // Nothing is wanted, which is seldom what was meant.
            "PENDING" if status.pairs.wanted == 0 => {
                let words = status.message().to_owned();
                if !words.is_empty() && self.said.insert(words.clone()) {
                    self.line(Tone::Busy, "!", &words);
                }
                None
            }
            _ => None,
        }
    }

    /// What the agents report moves the bars; without a terminal each image on each node is a line.
    fn told(&mut self, event: &WatchEvent) {
        let Some(image) = self.board.note(event) else {
            return;
        };
        // Other Prefetches pull too.
        if !self.status.images.iter().any(|wanted| wanted.image == image) {
            return;
        }
        if !self.progress.is_seen() {
            if let Some(line) = events::line(event, self.look) {
                self.progress.line(&line);
            }
            return;
        }
        if let Some(watch_event::Event::ImageFailed(failed)) = &event.event {
            let reason = failed.failure.clone().unwrap_or_default().reason().camel_case();
            if self.said.insert(format!("{image} {reason}")) {
                let line = format!("{image}: {reason} on {}, which may try again", event.node);
                self.line(Tone::Busy, "!", &line);
            }
        }
        if self.said.contains(&image) {
            return;
        }
        let bar = self.board.bar(&image, self.status.nodes.wanted);
        let name = shortened(&image);
        let there = format!("{} of {}", bar.there, nodes(self.status.nodes.wanted));
        if bar.total == 0 {
            self.progress.spin(&image, &name, "resolving");
        } else {
            self.progress.fill(&image, &name, bar.done, bar.total, &there);
        }
    }

    fn line(&self, tone: Tone, mark: &str, text: &str) {
        let took = format!("{:.1} s", self.begun.elapsed().as_secs_f64());
        let text = format!("{text}  {}", self.look.paint(Tone::Dim, &took));
        self.progress.line(&self.look.marked(tone, mark, &text));
    }

    fn over(&self, limit: Duration) -> ExitCode {
        self.progress.end();
        self.line(
            Tone::Bad,
            "✗",
            &format!(
                "{} is {} after {} s: {} of {} there. {} The cluster goes on with it.",
                self.what,
                if self.status.phase.is_empty() {
                    "without a status"
                } else {
                    &self.status.phase
                },
                limit.as_secs(),
                self.status.pairs.ready,
                self.status.pairs.wanted,
                self.status.message()
            ),
        );
        ExitCode::FAILURE
    }
}

fn nodes(count: u64) -> String {
    counted(usize::try_from(count).unwrap_or(usize::MAX), "node")
}

/// Why images are missing, each reason once: in one line, and in the words of whoever refused.
fn failures(images: &[Image]) -> Vec<(String, &str)> {
    let of = |image: &Image, reason: &Reason| {
        let some = named(&reason.nodes, reason.nodes.len());
        let more = reason.count.saturating_sub(reason.nodes.len() as u64);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        format!("{}: {} on {some}{more}", image.image, reason.reason)
    };
    images
        .iter()
        .filter(|image| image.failed > 0)
        .flat_map(|image| image.reasons.iter().map(move |reason| (image, reason)))
        .map(|(image, reason)| (of(image, reason), reason.message.as_str()))
        .collect()
}

/// The end of a name tells images apart, not its registry.
fn shortened(image: &str) -> String {
    let letters: Vec<char> = image.chars().collect();
    match letters.len() {
        0..=NAME => format!("{image:<NAME$}"),
        length => format!("…{}", letters[length - NAME + 1..].iter().collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_with_where_and_why() {
        let image = Image {
            image: "r/a:1".into(),
            ready: 1,
            failed: 4,
            reasons: vec![Reason {
                reason: "ImageNotFound".into(),
                count: 4,
                message: "not found".into(),
                nodes: vec!["x".into(), "y".into()],
            }],
        };
        assert_eq!(
            failures(&[image, Image::default()]),
            [("r/a:1: ImageNotFound on x, y and 2 more".to_owned(), "not found")]
        );
    }

    #[test]
    fn names_of_images_have_one_width() {
        assert_eq!(shortened("nginx:1").chars().count(), NAME);
        let long = shortened("registry.example.com/team/group/project/server:1.2.3");
        assert_eq!(long.chars().count(), NAME);
        assert!(long.ends_with("project/server:1.2.3"));
    }
}
