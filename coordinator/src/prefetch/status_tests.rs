use jiff::SignedDuration;
use quartermaster_proto::v1::FailureReason;

use super::super::crd::PrefetchPhase;
use super::super::limits::Excess;
use super::super::pairs::PairFailure;
use super::super::resolve::RefusedImage;
use super::*;

struct Fleet {
    prefetch: PrefetchFacts,
    resolved: Resolved,
    nodes: BTreeMap<String, NodeFacts>,
    pairs: HashMap<String, NodePairs>,
    standing: Standing,
    newest: HashMap<Arc<str>, Arc<str>>,
    over: HashSet<Arc<str>>,
    trouble: Option<Trouble>,
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
                .map(|i| {
                    let image = format!("registry.example.com/team/application-{i:03}:v1.0.0");
                    (image.into(), u32::try_from(i).expect("few"))
                })
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
        standing: Standing::Open,
        newest: HashMap::new(),
        over: HashSet::new(),
        trouble: None,
    }
}

impl Fleet {
    fn all(&mut self, pair: &Pair) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            for image in self.resolved.images.clone().into_keys() {
                self.set(&name, &image, pair.clone());
            }
        }
    }

    fn set(&mut self, node: &str, image: &str, pair: Pair) {
        let known = self.pairs.entry(node.to_owned()).or_default();
        known.of_boot("boot").pairs.insert(image.into(), pair);
    }

    fn status(&self) -> PrefetchStatus {
        status(StatusInput {
            prefetch: &self.prefetch,
            resolved: &self.resolved,
            nodes: &self.nodes,
            pairs: &self.pairs,
            over: &self.over,
            trouble: self.trouble.as_ref(),
            standing: &|_| self.standing,
            newest: &self.newest,
            bytes: 40,
            now: Timestamp::UNIX_EPOCH,
        })
    }

    fn first(&self) -> (String, String) {
        (
            self.nodes.keys().next().expect("a node").clone(),
            self.resolved.images.keys().next().expect("an image").to_string(),
        )
    }
}

fn ready(digest: &str) -> Pair {
    Pair::Ready {
        digest: digest.into(),
        pins: 0,
        at: Timestamp::UNIX_EPOCH,
    }
}

fn failed(message: &str) -> Pair {
    Pair::Failed(Box::new(PairFailure {
        reason: FailureReason::ImageNotFound,
        message: message.into(),
        at: Timestamp::UNIX_EPOCH,
    }))
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
fn a_node_to_which_no_agent_comes_does_not_hold_ready_back() {
    let mut fleet = fleet(1, 1);
    fleet.standing = Standing::Unreachable;
    let status = fleet.status();
    assert_eq!((status.nodes.wanted, status.nodes.excluded), (0, 1));
    assert_eq!(condition(&status, "Ready"), ("False".into(), "NoNodes".into()));
}

#[test]
fn a_mark_on_the_node_stands_for_pairs_that_are_not_known_and_digests_stay() {
    let mut fleet = fleet(1, 1);
    fleet.all(&ready("sha256:1"));
    fleet.prefetch.status = fleet.status();
    fleet.pairs.clear();
    fleet.standing = Standing::Settled;
    let again = fleet.status();
    assert_eq!(again, fleet.prefetch.status);
}

#[test]
fn a_node_at_rest_counts_as_it_did_before() {
    let mut fleet = fleet(2, 3);
    fleet.all(&ready("sha256:1"));
    let (node, image) = fleet.first();
    let at = Timestamp::UNIX_EPOCH;
    fleet.set(&node, &image, Pair::NotForNode { at });
    let before = fleet.status();
    for known in fleet.pairs.values_mut() {
        known.rest(|digests| digests.into());
    }
    fleet.standing = Standing::Settled;
    assert_eq!(fleet.status(), before);
}

#[test]
fn an_image_that_is_not_for_a_node_is_no_failure() {
    let mut fleet = fleet(2, 1);
    fleet.all(&ready("sha256:1"));
    let (node, image) = fleet.first();
    let at = Timestamp::UNIX_EPOCH;
    fleet.set(&node, &image, Pair::NotForNode { at });
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Ready));
    assert_eq!((status.pairs.wanted, status.pairs.ready), (1, 1));
    assert_eq!((status.nodes.ready, status.images[0].not_for_node), (2, 1));
}

#[test]
fn a_tag_that_moved_is_told_and_is_no_failure() {
    let mut fleet = fleet(2, 1);
    fleet.all(&ready("sha256:old"));
    let (node, image) = fleet.first();
    fleet.set(&node, &image, ready("sha256:new"));
    fleet.newest.insert(image.as_str().into(), "sha256:new".into());
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Ready));
    let image = &status.images[0];
    assert_eq!(image.digest.as_deref(), Some("sha256:new"));
    assert_eq!(
        (image.reasons[0].reason.as_str(), image.reasons[0].count),
        ("TagMoved", 1)
    );
}

#[test]
fn a_bound_that_is_exceeded_fails_the_prefetch_and_says_which() {
    let mut fleet = fleet(3, 0);
    fleet.resolved.excess = Some(Excess::Images(501, 500));
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Failed));
    assert_eq!(
        condition(&status, "Degraded"),
        ("True".into(), "TooManyImages".into())
    );
    assert_eq!((status.nodes.wanted, status.nodes.excluded), (0, 3));
}

#[test]
fn images_beyond_the_bytes_that_are_allowed_are_named() {
    let mut fleet = fleet(1, 2);
    fleet.all(&ready("sha256:1"));
    let (_, image) = fleet.first();
    fleet.over.insert(image.as_str().into());
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Failed));
    assert_eq!((status.pairs.wanted, status.pairs.ready), (1, 1));
    let over = status.images.iter().find(|i| i.image == image).expect("it");
    assert_eq!(over.reasons[0].reason, "TooManyBytes");
}

#[test]
fn secrets_that_cannot_be_read_degrade_it_and_explain_a_failure() {
    let mut fleet = fleet(1, 1);
    fleet.trouble = Some(Trouble {
        reason: "SecretForbidden",
        message: "secrets of the namespace may not be read".into(),
    });
    fleet.all(&ready("sha256:1"));
    let status = fleet.status();
    assert_eq!(
        condition(&status, "Ready"),
        ("True".into(), "AllImagesReady".into())
    );
    assert_eq!(condition(&status, "Degraded").0, "True");
    fleet.all(&failed("unauthorized"));
    assert_eq!(
        condition(&fleet.status(), "Ready"),
        ("False".into(), "SecretForbidden".into())
    );
}

#[test]
fn a_suspended_prefetch_keeps_its_counts_and_says_so() {
    let mut fleet = fleet(1, 1);
    fleet.all(&ready("sha256:1"));
    fleet.prefetch.status = fleet.status();
    fleet.prefetch.suspend = true;
    fleet.pairs.clear();
    let status = fleet.status();
    assert_eq!(status.phase, Some(PrefetchPhase::Ready));
    assert_eq!(status.pairs, fleet.prefetch.status.pairs);
    assert_eq!(condition(&status, "Ready"), ("True".into(), "Suspended".into()));
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
    let why = RefusedImage {
        reason: "InvalidReference",
        message: "invalid".into(),
    };
    fleet.resolved.refused.insert("UPPER".into(), why);
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
    assert_eq!(shorten(&"a".repeat(256)).len(), 256);
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
