//! Carrying out an order: several images at once, each name once.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use quartermaster_proto::v1::FailureReason;
use tokio_util::sync::CancellationToken;

use super::attempt::Context;
use super::disk::{Commitments, Space, reserve};
use super::event::{Failed, ImageEvent, Progress, Sink, Tally};
use super::facts::NodeOffer;
use super::kubelet::Kubelet;
use super::lease::Leases;
use super::order::{Order, Wanted};
use super::patience::Patience;
use super::providers::Providers;
use super::reference::normalise;
use super::release::sweep;
use super::watch::{Disk, Pulse};
use super::way::{Way, choose};
use crate::containerd::{Daemon, DaemonSettings};
use crate::host::{HostRoot, Systemd};

/// Where images are pulled.
#[derive(Debug, Clone)]
pub struct Node {
    /// The host.
    pub root: Arc<HostRoot>,
    /// The kubelet's containerd.
    pub daemon: Daemon,
    /// Its files, where they could be read.
    pub settings: Option<DaemonSettings>,
}

/// One name, with all spellings of it.
struct Job {
    name: String,
    wanted: Wanted,
    spellings: Vec<String>,
}

/// Brings the images of an order onto the node, and lets go of pins whose time is over. When `cancelled` is, what
/// runs is stopped and reported as failed.
pub async fn pull(node: &Node, order: &Order, sink: &Sink, cancelled: &CancellationToken) -> Tally {
    let mut tally = Tally::default();
    let jobs = jobs(order, |image, failed| {
        tally.failed += 1;
        sink(ImageEvent::Failed(image, failed));
    });
    let context = context(node, order).await;
    let context = &context;
    let results = futures::stream::iter(jobs)
        .map(|job| async move {
            let report = |progress: Progress| {
                for image in &job.spellings {
                    sink(ImageEvent::Progress(image.clone(), progress.clone()));
                }
            };
            let result = tokio::select! {
                biased;
                () = cancelled.cancelled() => Err(Failed {
                    reason: FailureReason::Cancelled,
                    message: format!("the pull of {} was cancelled", job.name),
                    attempts: 0,
                }),
                result = context.bring(&job.wanted, &job.name, &report) => result,
            };
            (job.spellings, result)
        })
        .buffer_unordered(order.parallelism);
    let mut results = std::pin::pin!(results);
    while let Some((spellings, result)) = results.next().await {
        if let Ok(ready) = &result {
            tally.fetched += ready.fetched;
        }
        for image in spellings {
            match &result {
                Ok(ready) => {
                    tally.ready += 1;
                    sink(ImageEvent::Ready(image, ready.clone()));
                }
                Err(failed) => {
                    tally.failed += 1;
                    sink(ImageEvent::Failed(image, failed.clone()));
                }
            }
        }
    }
    context.leases.give_back_all(&node.daemon).await;
    tally.pins_held = sweep(&node.daemon).await.unwrap_or(true);
    tally
}

/// One job for all spellings of a name; each spelling gets its answer. What several want of one image is joined.
fn jobs(order: &Order, mut refuse: impl FnMut(String, Failed)) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for wanted in &order.images {
        let given = wanted.reference.clone();
        let name = match normalise(&given) {
            Ok(name) => name,
            Err(error) => {
                refuse(
                    given,
                    Failed {
                        reason: FailureReason::InvalidReference,
                        message: error.to_string(),
                        attempts: 0,
                    },
                );
                continue;
            }
        };
        match places.get(&name) {
            None => {
                places.insert(name.clone(), jobs.len());
                jobs.push(Job {
                    name,
                    wanted: wanted.clone(),
                    spellings: vec![given],
                });
            }
            Some(at) => {
                let job = &mut jobs[*at];
                job.wanted.always |= wanted.always;
                job.wanted.pins.extend(wanted.pins.iter().cloned());
                job.wanted.credentials.extend(wanted.credentials.iter().cloned());
                if !job.spellings.contains(&given) {
                    job.spellings.push(given);
                }
            }
        }
    }
    jobs
}

async fn context<'a>(node: &'a Node, order: &'a Order) -> Context<'a> {
    let offer = NodeOffer::read(&node.daemon, node.settings.as_ref()).await;
    let way = choose(&offer);
    if let Way::Cri { why } = &way {
        tracing::info!(why, "images are pulled through CRI");
    }
    let disk = disk(node, order, &offer).await;
    Context {
        root: &node.root,
        daemon: &node.daemon,
        order,
        offer,
        way,
        disk,
        pulse: Pulse::new(),
        patience: Patience::default(),
        providers: Providers::new(Arc::clone(&node.root)),
        leases: Leases::default(),
        counted: Mutex::new(HashSet::new()),
    }
}

async fn disk(node: &Node, order: &Order, offer: &NodeOffer) -> Option<Disk> {
    let space = Space::of(&node.root, &offer.data)?;
    let kubelet = match Systemd::connect(&node.root).await {
        Ok(systemd) => Kubelet::find(&node.root, &systemd).await,
        Err(_) => Kubelet::default(),
    };
    let thresholds = kubelet.thresholds(&node.root, space.size);
    Some(Disk {
        root: Arc::clone(&node.root),
        folders: offer.data.clone(),
        reserve: reserve(order.reserve, space.size, thresholds),
        commitments: Commitments::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pull::pins::Pin;

    fn nowhere() -> (tempfile::TempDir, Node) {
        let dir = tempfile::tempdir().unwrap();
        let root = Arc::new(HostRoot::open(dir.path()).unwrap());
        let node = Node {
            daemon: Daemon::new(Arc::clone(&root), "/nowhere.sock"),
            settings: None,
            root,
        };
        (dir, node)
    }

    fn recorder() -> (Arc<Mutex<Vec<ImageEvent>>>, Sink) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&events);
        let sink: Sink = Arc::new(move |event| recorded.lock().unwrap().push(event));
        (events, sink)
    }

    #[tokio::test]
    async fn an_invalid_reference_fails_without_asking_anyone() {
        let (_dir, node) = nowhere();
        let (events, sink) = recorder();
        let order = Order::new(vec![Wanted::new("UPPER/x/Y z")]);
        let tally = pull(&node, &order, &sink, &CancellationToken::new()).await;
        assert_eq!((tally.ready, tally.failed), (0, 1));
        assert!(matches!(
            &events.lock().unwrap()[0],
            ImageEvent::Failed(_, failed)
                if failed.reason == FailureReason::InvalidReference && failed.attempts == 0
        ));
    }

    #[tokio::test]
    async fn every_spelling_of_a_name_gets_its_answer() {
        let (_dir, node) = nowhere();
        let (events, sink) = recorder();
        let wanted = |name: &str| Wanted {
            attempts: 1,
            ..Wanted::new(name)
        };
        let images = ["nginx", "docker.io/nginx", "nginx:latest", "nginx"];
        let order = Order::new(images.map(wanted).into());
        let tally = pull(&node, &order, &sink, &CancellationToken::new()).await;
        assert_eq!((tally.ready, tally.failed), (0, 3));
        for event in events.lock().unwrap().iter() {
            if let ImageEvent::Failed(_, failed) = event {
                assert_eq!(
                    (failed.reason, failed.attempts),
                    (FailureReason::ContainerdUnreachable, 1)
                );
            }
        }
    }

    #[tokio::test]
    async fn a_cancelled_order_answers_for_every_image() {
        let (_dir, node) = nowhere();
        let (events, sink) = recorder();
        let order = Order::new(vec![Wanted::new("a"), Wanted::new("b")]);
        let cancelled = CancellationToken::new();
        cancelled.cancel();
        let tally = pull(&node, &order, &sink, &cancelled).await;
        assert_eq!(tally.failed, 2);
        assert!(events.lock().unwrap().iter().all(|event| matches!(
            event,
            ImageEvent::Failed(_, failed) if failed.reason == FailureReason::Cancelled
        )));
    }

    #[test]
    fn what_several_want_of_one_image_is_joined() {
        let pin = |owner: &str| Pin {
            owner: owner.to_owned(),
            until: None,
        };
        let one = Wanted {
            pins: vec![pin("a")],
            ..Wanted::new("nginx")
        };
        let other = Wanted {
            pins: vec![pin("b")],
            always: true,
            ..Wanted::new("docker.io/library/nginx:latest")
        };
        let jobs = jobs(&Order::new(vec![one, other]), |_, _| panic!("refused"));
        assert_eq!(jobs.len(), 1);
        assert_eq!(jobs[0].wanted.pins, [pin("a"), pin("b")]);
        assert!(jobs[0].wanted.always);
        assert_eq!(jobs[0].spellings.len(), 2);
    }
}
