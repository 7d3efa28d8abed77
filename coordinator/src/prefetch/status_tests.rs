use jiff::SignedDuration;
use quartermaster_proto::v1::FailureReason;

use super::super::pairs::PairFailure;
use super::*;

struct Fleet {
    prefetch: PrefetchFacts,
    resolved: Resolved,
    nodes: BTreeMap<String, NodeFacts>,
    pairs: HashMap<String, NodePairs>,
    trusted: bool,
}

fn fleet(nodes: usize, images: usize) -> Fleet {
    Fleet {
        prefetch: PrefetchFacts {
            name: "p".into(),
            retry_after: SignedDuration::from_secs(300),
            generation: 2,
            status: PrefetchStatus {
                phase: Some(PrefetchPhase::Pending),
                ..PrefetchStatus::default()
            },
            ..PrefetchFacts::default()
        },
        resolved: Resolved {
            images: (0..images)
                .map(|i| format!("registry.example.com/team/application-{i:03}:v1.0.0"))
                .collect(),
            ..Resolved::default()
        },
        nodes: (0..nodes)
            .map(|i| {
                let name = format!("worker-{i:04}.region-1.example.com");
                let node = NodeFacts {
                    name: name.clone(),
                    boot_id: "boot".into(),
                    os: "linux".into(),
                    ready: true,
                    ..NodeFacts::default()
                };
                (name, node)
            })
            .collect(),
        pairs: HashMap::new(),
        trusted: false,
    }
}

impl Fleet {
    fn all(&mut self, pair: &Pair) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            for image in self.resolved.images.clone() {
                self.set(&name, &image, pair.clone());
            }
        }
    }

    fn set(&mut self, node: &str, image: &str, pair: Pair) {
        let known = self.pairs.entry(node.to_owned()).or_default();
        known.of_boot("boot").pairs.insert(image.to_owned(), pair);
    }

    fn status(&self) -> PrefetchStatus {
        status(StatusInput {
            prefetch: &self.prefetch,
            resolved: &self.resolved,
            nodes: &self.nodes,
            pairs: &self.pairs,
            trusted: &|_| self.trusted,
            now: Timestamp::UNIX_EPOCH,
        })
    }

    fn first(&self) -> (String, String) {
        (
            self.nodes.keys().next().expect("a node").clone(),
            self.resolved.images.first().expect("an image").clone(),
        )
    }
}

fn ready(digest: &str) -> Pair {
    Pair::Ready {
        digest: digest.into(),
        pulled: 10,
        at: Timestamp::UNIX_EPOCH,
    }
}

fn failed(message: &str) -> Pair {
    Pair::Failed(PairFailure {
        reason: FailureReason::ImageNotFound,
        message: message.into(),
        at: Timestamp::UNIX_EPOCH,
    })
}

fn condition(status: &PrefetchStatus, type_: &str) -> (String, String) {
    let found = status
        .conditions
        .iter()
        .find(|c| c.type_ == type_)
        .expect("the condition");
    (found.status.clone(), found.reason.clone())
}

#[test]
fn the_phase_goes_from_pending_over_running_to_ready() {
    let mut fleet = fleet(2, 2);
    assert_eq!(fleet.status().phase, Some(PrefetchPhase::Pending));
    let (node, image) = fleet.first();
    fleet.set(&node, &image, Pair::Pulling);
    assert_eq!(fleet.status().phase, Some(PrefetchPhase::Running));
    fleet.all(&ready("repo@sha256:1"));
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Ready));
    assert_eq!(status.bytes_pulled, 40);
    assert_eq!(status.observed_generation, 2);
    assert_eq!(
        condition(&status, "Ready"),
        ("True".into(), "AllImagesReady".into())
    );
}

#[test]
fn what_is_missing_fails_the_prefetch_with_the_words_of_the_registry() {
    let mut fleet = fleet(4, 1);
    fleet.all(&failed("not found: manifest unknown"));
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Failed));
    let reason = &status.images[0].reasons[0];
    assert_eq!((reason.reason.as_str(), reason.count), ("ImageNotFound", 4));
    assert_eq!(reason.message, "not found: manifest unknown");
    assert_eq!(reason.nodes.len(), 3);
    assert_eq!(
        condition(&status, "Degraded"),
        ("True".into(), "ImagesMissing".into())
    );
}

#[test]
fn a_failure_does_not_end_the_running_of_the_others() {
    let mut fleet = fleet(1, 2);
    let (node, image) = fleet.first();
    fleet.set(&node, &image, failed(""));
    assert_eq!(fleet.status().phase, Some(PrefetchPhase::Running));
}

#[test]
fn nodes_that_cannot_be_served_are_counted_apart_and_do_not_hold_ready_back() {
    let mut fleet = fleet(2, 1);
    fleet.all(&ready(""));
    let (node, _) = fleet.first();
    fleet.nodes.get_mut(&node).expect("the node").ready = false;
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Ready));
    assert_eq!((status.nodes.wanted, status.nodes.excluded), (1, 1));
}

#[test]
fn a_mark_on_the_node_stands_for_pairs_that_are_not_known_and_digests_stay() {
    let mut fleet = fleet(1, 1);
    fleet.all(&ready("repo@sha256:1"));
    fleet.prefetch.status = fleet.status();
    fleet.pairs.clear();
    fleet.trusted = true;
    let again = fleet.status();
    assert_eq!(again, fleet.prefetch.status);
}

#[test]
fn a_selector_that_matches_nothing_says_so() {
    let status = fleet(1, 0).status();
    assert_eq!(status.phase, Some(PrefetchPhase::Pending));
    assert_eq!(condition(&status, "Ready"), ("False".into(), "NoImages".into()));
    let status = fleet(0, 1).status();
    assert_eq!(condition(&status, "Ready"), ("False".into(), "NoNodes".into()));
}

#[test]
fn an_invalid_reference_fails_while_the_others_are_there() {
    let mut fleet = fleet(1, 1);
    fleet.all(&ready(""));
    fleet.resolved.invalid.insert("UPPER".into(), "invalid".into());
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Failed));
    assert_eq!(
        status.images.last().map(|i| i.reasons[0].reason.as_str()),
        Some("InvalidReference")
    );
}

#[test]
fn the_status_of_5000_nodes_and_100_images_stays_under_70_kilobytes() {
    let mut fleet = fleet(5000, 100);
    fleet.all(&failed(&"words of the registry ".repeat(40)));
    let size = serde_json::to_vec(&fleet.status()).expect("JSON").len();
    assert!(size < 70_000, "{size} bytes");
}

#[test]
fn a_message_is_shortened_at_a_character() {
    assert_eq!(shorten(""), "");
    assert_eq!(shorten("ä"), "ä");
    let long = shorten(&"ä".repeat(300));
    assert!(long.len() <= MESSAGE + 3 && long.ends_with('…'));
}

#[test]
fn a_new_object_is_pending_first_even_if_all_is_there() {
    let mut fleet = fleet(1, 1);
    fleet.all(&ready(""));
    fleet.prefetch.status = PrefetchStatus::default();
    assert_eq!(fleet.status().phase, Some(PrefetchPhase::Pending));
}

#[test]
fn an_object_that_cannot_be_read_says_so_and_wants_nothing() {
    let mut fleet = fleet(1, 0);
    fleet.prefetch = PrefetchFacts {
        status: fleet.prefetch.status.clone(),
        ..PrefetchFacts::broken(&kube::api::ObjectMeta::default(), "invalid type: string")
    };
    let status = fleet.status();
    assert_eq!(
        condition(&status, "Degraded"),
        ("True".into(), "InvalidSpec".into())
    );
    assert!(status.conditions[0].message.contains("invalid type: string"));
}
