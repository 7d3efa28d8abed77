use quartermaster_proto::v1::FailureReason;

use super::super::pairs::PairFailure;
use super::super::wanted::tests::on;
use super::*;

const RECHECK: SignedDuration = SignedDuration::from_hours(6);
const A: &str = "docker.io/library/a:latest";
const B: &str = "docker.io/library/b:latest";
const ONE: &[&str] = &["{images: [a], retry_after: 60, pin: {enabled: false}}"];
const TWO: &[&str] = &["{images: [a, b], retry_after: 60, pin: {enabled: false}}"];
const PINNED: &[&str] = &["{images: [a]}"];

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

fn node() -> NodeFacts {
    NodeFacts {
        name: "worker-1".into(),
        boot_id: "boot-1".into(),
        os: "linux".into(),
        ready: true,
        ..NodeFacts::default()
    }
}

struct Case {
    node: NodeFacts,
    known: NodePairs,
    registries: Registries,
}

impl Case {
    fn new() -> Self {
        Self {
            node: node(),
            known: NodePairs {
                boot_id: "boot-1".into(),
                ..NodePairs::default()
            },
            registries: Registries::default(),
        }
    }

    fn with(mut self, image: &str, pair: Pair) -> Self {
        self.known.pairs.insert(image.into(), pair);
        self
    }

    fn plan(&self, specs: &[&str], second: i64) -> PullPlan {
        plan(PlanInput {
            node: &self.node,
            wanted: &on(&self.node, specs),
            known: &self.known,
            registries: &self.registries,
            recheck: RECHECK,
            now: at(second),
        })
    }

    /// Brings the mark onto the node that the plan asks for, as the engine does.
    fn settle(mut self, specs: &[&str], second: i64) -> Self {
        match self.plan(specs, second) {
            PullPlan::Settled(mark) => self.node.marks.images_verified = mark,
            other => panic!("expected a mark, got {other:?}"),
        }
        self.known.pairs.clear();
        self
    }
}

fn ready() -> Pair {
    Pair::Ready {
        digest: "".into(),
        pins: 0,
        at: at(0),
    }
}

fn pinned(specs: &[&str]) -> Pair {
    Pair::Ready {
        digest: "".into(),
        pins: on(&node(), specs).images[A].pins_fingerprint(),
        at: at(0),
    }
}

fn failed(reason: FailureReason, second: i64) -> Pair {
    Pair::Failed(Box::new(PairFailure {
        reason,
        message: "".into(),
        at: at(second),
    }))
}

fn pull(images: &[&str]) -> PullPlan {
    PullPlan::Pull(images.iter().map(|image| (*image).into()).collect())
}

#[test]
fn what_is_not_known_is_pulled() {
    assert_eq!(Case::new().with(A, ready()).plan(TWO, 0), pull(&[B]));
}

#[test]
fn images_are_pulled_in_the_order_that_was_asked_for() {
    let given = &["{images: [b, a], order: AsGiven}"];
    assert_eq!(Case::new().plan(given, 0), pull(&[B, A]));
}

#[test]
fn a_node_that_has_all_gets_a_mark_and_is_trusted_by_it_afterwards() {
    let case = Case::new()
        .with(A, ready())
        .with(B, Pair::NotForNode { at: at(0) })
        .settle(TWO, 0);
    let mark = case.node.marks.images_verified.clone();
    assert_eq!(case.plan(TWO, 3600), PullPlan::Settled(mark));
}

#[test]
fn another_boot_or_another_set_of_images_is_not_trusted() {
    let mut case = Case::new().with(A, ready()).settle(ONE, 0);
    assert_eq!(case.plan(TWO, 1), pull(&[A, B]));
    case.node.boot_id = "boot-2".into();
    assert_eq!(case.plan(ONE, 1), pull(&[A]));
}

#[test]
fn what_was_there_is_checked_again_after_the_recheck_interval() {
    let case = Case::new().with(A, ready()).settle(ONE, 0);
    assert_eq!(case.plan(ONE, 7 * 3600), pull(&[A]));
    let wanted = on(&case.node, ONE);
    let at_time = recheck_at(&case.node, &wanted, RECHECK)
        .expect("a time")
        .as_second();
    assert!((19_440..=23_760).contains(&at_time), "{at_time}");
}

#[test]
fn what_failed_waits_for_its_retry_and_the_others_do_not() {
    let case = Case::new().with(A, failed(FailureReason::ImageNotFound, 0));
    assert_eq!(case.plan(TWO, 59), pull(&[B]));
    assert_eq!(case.plan(ONE, 59), PullPlan::WaitUntil(at(60)));
    assert_eq!(case.plan(ONE, 60), pull(&[A]));
}

#[test]
fn a_registry_that_asks_for_patience_is_not_asked_and_then_does_not_wait_for_retry_after() {
    let mut case = Case::new().with(A, failed(FailureReason::RateLimited, 0));
    case.registries
        .refused("docker.io", Some(SignedDuration::from_secs(20)), 4, at(0));
    let PullPlan::WaitUntil(until) = case.plan(TWO, 1) else {
        panic!("neither image may be asked for");
    };
    assert!((20..23).contains(&until.as_second()), "{until}");
    assert_eq!(case.plan(TWO, 25), pull(&[A, B]));
}

#[test]
fn a_pin_that_is_asked_for_later_is_set_on_what_is_there_already() {
    assert_eq!(Case::new().with(A, ready()).plan(PINNED, 1), pull(&[A]));
    let case = Case::new().with(A, pinned(PINNED));
    assert!(matches!(case.plan(PINNED, 1), PullPlan::Settled(Some(_))));
}

#[test]
fn pins_are_renewed_well_before_they_expire() {
    let short = &["{images: [a], pin: {expiry: 2h}}"];
    let case = Case::new().with(A, pinned(short)).settle(short, 0);
    assert!(matches!(case.plan(short, 3000), PullPlan::Settled(_)));
    assert_eq!(case.plan(short, 4000), pull(&[A]));
}

#[test]
fn a_node_says_that_pins_are_held_before_any_is_set() {
    let mut node = node();
    let wanted = on(&node, PINNED);
    let promised = promise(&node, &wanted, at(0)).expect("a promise");
    assert_eq!(promised, "1970-01-08T00:00:00Z");
    node.marks.pins_held = Some(promised);
    assert_eq!(promise(&node, &wanted, at(3600)), None);
    assert!(promise(&node, &wanted, at(3600 * 24)).is_some(), "it is renewed");
    assert_eq!(promise(&node, &on(&node, ONE), at(0)), None);
}

#[test]
fn what_is_not_wanted_any_more_is_let_go_first_and_once() {
    let mut case = Case::new().with(A, ready()).settle(ONE, 0);
    case.node.marks.pins_held = Some("1970-01-08T00:00:00Z".into());
    assert_eq!(case.plan(TWO, 1), PullPlan::Release);
    case.known.released = Some(on(&case.node, TWO).hash().to_owned());
    assert_eq!(case.plan(TWO, 1), pull(&[A, B]));
}

#[test]
fn a_deleted_prefetch_lets_go_of_its_pins_and_leaves_no_mark() {
    let mut case = Case::new().with(A, pinned(PINNED)).settle(PINNED, 0);
    case.node.marks.pins_held = Some("1970-01-08T00:00:00Z".into());
    assert_eq!(case.plan(&[], 1), PullPlan::Release);
    case.node.marks.pins_held = None;
    assert_eq!(case.plan(&[], 1), PullPlan::Settled(None));
}

#[test]
fn pins_that_are_kept_wake_nobody_until_they_expire() {
    let mut case = Case::new();
    case.node.marks.pins_held = Some("1970-01-08T00:00:00Z".into());
    case.known.released = Some(on(&case.node, &[]).hash().to_owned());
    let mut case = case.settle(&[], 1);
    assert!(case.node.marks.images_verified.is_some());
    // Another leader remembers nothing, and reads it back from the mark.
    case.known = NodePairs::default();
    assert!(matches!(case.plan(&[], 2), PullPlan::Settled(Some(_))));
    let expiry = recheck_at(&case.node, &Wanted::default(), RECHECK).expect("a time");
    assert_eq!(expiry, at(7 * 24 * 3600));
    assert_eq!(case.plan(&[], 7 * 24 * 3600), PullPlan::Release);
}

#[test]
fn a_suspended_prefetch_pulls_nothing_and_lets_go_of_nothing() {
    let suspended = &["{images: [a], suspend: true}"];
    let mut case = Case::new();
    assert_eq!(case.plan(suspended, 0), PullPlan::Settled(None));
    case = case.with(A, pinned(PINNED)).settle(PINNED, 0);
    case.node.marks.pins_held = Some("1970-01-08T00:00:00Z".into());
    let mark = case.node.marks.images_verified.clone();
    assert_eq!(case.plan(suspended, 1), PullPlan::Settled(mark.clone()));
    assert_eq!(
        case.plan(PINNED, 2),
        PullPlan::Settled(mark),
        "and goes on where it was"
    );
}

#[test]
fn a_node_on_which_nothing_is_wanted_carries_no_mark() {
    assert_eq!(Case::new().plan(&[], 0), PullPlan::Settled(None));
}

#[test]
fn a_pull_is_pointless_once_nothing_of_what_is_left_of_it_is_wanted() {
    let wanted = on(&node(), ONE);
    let untold = |images: &[&str]| -> Vec<Arc<str>> { images.iter().map(|image| (*image).into()).collect() };
    assert!(is_pointless(&untold(&[B]), &wanted));
    assert!(!is_pointless(&untold(&[A, B]), &wanted));
    assert!(is_pointless(&untold(&[A, B]), &Wanted::default()));
    // It has told of everything, or lets go of pins.
    assert!(!is_pointless(&untold(&[]), &wanted));
}

#[test]
fn the_largest_image_begins_beside_the_small_ones_where_several_come_at_once() {
    let mut wanted = on(&node(), &["{images: [a, b, c]}"]);
    let names: Vec<Arc<str>> = wanted.images.keys().cloned().collect();
    let order = |wanted: &Wanted, at_once: u32| -> Vec<usize> {
        let mut images = names.clone();
        largest_beside(&mut images, wanted, at_once);
        images
            .iter()
            .filter_map(|image| names.iter().position(|name| name == image))
            .collect()
    };
    // Sizes that are not known, and those that nobody asked to be heeded.
    assert_eq!(order(&wanted, 3), [0, 1, 2]);
    for (n, want) in wanted.images.values_mut().enumerate() {
        want.place = (0, u32::try_from(n).expect("a place"));
    }
    assert_eq!(order(&wanted, 3), [0, 1, 2]);
    for (want, size) in wanted.images.values_mut().zip([10, 20, u64::MAX]) {
        want.place.0 = size;
    }
    assert_eq!(order(&wanted, 3), [1, 0, 2]);
    assert_eq!(order(&wanted, 1), [0, 1, 2]);
}
