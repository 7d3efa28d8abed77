//! Pins: labels on containerd's record of an image, by which CRI tells the kubelet to leave it alone.
//!
//! Each owner has a label of its own with the moment until which it holds the image. Besides, a label says that
//! CRI's was set by us: what somebody else has pinned is never released, and an image that was there before is never
//! removed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::{cri, store};
use crate::containerd::Daemon;

/// CRI's own label and its value.
const PINNED: (&str, &str) = ("io.cri-containerd.pinned", "pinned");
/// CRI's label above was set by us.
const SET_BY_US: &str = "quartermaster.kwasm.sh/pinned";
/// The image was not there before us.
const PULLED: &str = "quartermaster.kwasm.sh/pulled";
/// Before the hash of an owner.
const OWNER: &str = "quartermaster.kwasm.sh/pin.";
const YES: &str = "true";
const NEVER: &str = "never";

/// How long CRI may take to see a changed label.
const SEEN: Duration = Duration::from_secs(3);

/// Who holds an image, and until when (seconds since 1970; `None` is for ever).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// In the coordinator's own words.
    pub owner: String,
    /// It has let go then.
    pub until: Option<u64>,
}

/// How a pin that was asked for went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pinned {
    /// No pin was asked for.
    NotAsked,
    /// CRI says that the image is pinned.
    Pinned,
    /// This containerd can't.
    Unsupported,
    /// The image is there, the pin is not.
    Failed(String),
}

type Labels = HashMap<String, String>;

/// Who holds an image by its labels.
pub(super) fn pins_of(labels: &Labels) -> Vec<Pin> {
    let pins = labels.iter().filter(|(key, _)| key.starts_with(OWNER));
    let mut pins: Vec<Pin> = pins
        .filter_map(|(_, value)| {
            let (until, owner) = value.split_once(' ')?;
            let until = match until {
                NEVER => None,
                seconds => Some(seconds.parse().ok()?),
            };
            Some(Pin {
                owner: owner.to_owned(),
                until,
            })
        })
        .collect();
    pins.sort_by(|left, right| left.owner.cmp(&right.owner));
    pins
}

fn key_of(owner: &str) -> String {
    let hash = Sha256::digest(owner.as_bytes());
    let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{OWNER}{hex}")
}

/// Which labels change when these owners take hold of an image.
fn taking(labels: &Labels, pins: &[Pin], was_present: bool, can_pin: bool) -> BTreeMap<String, String> {
    let mut changes = BTreeMap::new();
    if pins.is_empty() {
        return changes;
    }
    let mut set = |key: &str, value: String| {
        if labels.get(key) != Some(&value) {
            changes.insert(key.to_owned(), value);
        }
    };
    for pin in pins {
        let until = pin.until.map_or(NEVER.to_owned(), |until| until.to_string());
        set(&key_of(&pin.owner), format!("{until} {}", pin.owner));
    }
    if !was_present {
        set(PULLED, YES.to_owned());
    }
    let is_pinned = labels.get(PINNED.0).map(String::as_str) == Some(PINNED.1);
    if can_pin && !is_pinned {
        set(SET_BY_US, YES.to_owned());
        set(PINNED.0, PINNED.1.to_owned());
    }
    changes
}

/// What letting go of an image comes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Letting {
    /// Labels that change; an empty value removes one.
    pub(super) changes: BTreeMap<String, String>,
    /// The owner in question was among those who let go.
    pub(super) released: bool,
    /// Who still holds it.
    pub(super) held: Vec<Pin>,
    /// It is here because of us, and nobody holds it any more.
    pub(super) removable: bool,
}

/// Who lets go, besides those whose time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose<'a> {
    Expired,
    Owner(&'a str),
    All,
}

/// Lets go for these, and for all whose time is over. What is not ours stays.
pub(super) fn letting(labels: &Labels, whose: Whose<'_>, now: u64) -> Letting {
    let mut letting = Letting::default();
    let pins = pins_of(labels);
    if pins.is_empty() {
        return letting;
    }
    for pin in pins {
        let is_owner = whose == Whose::All || whose == Whose::Owner(&pin.owner);
        if is_owner || pin.until.is_some_and(|until| until <= now) {
            letting.changes.insert(key_of(&pin.owner), String::new());
            letting.released |= is_owner;
        } else {
            letting.held.push(pin);
        }
    }
    if letting.held.is_empty() {
        if labels.contains_key(SET_BY_US) {
            letting.changes.insert(SET_BY_US.to_owned(), String::new());
            letting.changes.insert(PINNED.0.to_owned(), String::new());
        }
        letting.removable = labels.contains_key(PULLED);
    }
    letting
}

/// Sets pins and has CRI confirm them.
pub(super) async fn pin(
    daemon: &Daemon,
    name: &str,
    pins: &[Pin],
    was_present: bool,
    can_pin: bool,
) -> Pinned {
    if pins.is_empty() {
        return Pinned::NotAsked;
    }
    match take(daemon, name, pins, was_present, can_pin).await {
        Ok(()) if !can_pin => Pinned::Unsupported,
        Ok(()) => confirm(daemon, name).await,
        Err(status) => Pinned::Failed(format!(
            "containerd did not take the labels: {}",
            status.message()
        )),
    }
}

async fn take(
    daemon: &Daemon,
    name: &str,
    pins: &[Pin],
    was_present: bool,
    can_pin: bool,
) -> Result<(), Status> {
    let image = store::image(daemon, name)
        .await?
        .ok_or_else(|| Status::not_found(format!("there is no record {name}")))?;
    let changes = taking(&image.labels, pins, was_present, can_pin);
    store::update_labels(daemon, &image, changes).await
}

/// CRI sees a changed label by an event, so it may take a moment.
async fn confirm(daemon: &Daemon, name: &str) -> Pinned {
    let deadline = Instant::now() + SEEN;
    loop {
        match cri::status(daemon, name).await {
            Ok(Some(image)) if image.pinned => return Pinned::Pinned,
            Ok(_) if Instant::now() < deadline => sleep(Duration::from_millis(10)).await,
            Ok(_) => return Pinned::Failed("CRI does not report the image as pinned".into()),
            Err(status) => return Pinned::Failed(status.message().to_owned()),
        }
    }
}

/// What we have noted on an image, to be put back after a pull: that of CRI without the transfer service replaces
/// every label of the record.
pub(super) async fn noted(daemon: &Daemon, name: &str) -> BTreeMap<String, String> {
    let image = store::image(daemon, name).await.ok().flatten();
    image.map(|image| ours(&image.labels)).unwrap_or_default()
}

fn ours(labels: &Labels) -> BTreeMap<String, String> {
    let is_ours = labels.contains_key(SET_BY_US);
    labels
        .iter()
        .filter(|(key, _)| {
            key.starts_with(OWNER)
                || [SET_BY_US, PULLED].contains(&key.as_str())
                || (is_ours && key.as_str() == PINNED.0)
        })
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Puts back what was noted before a pull, where it is gone.
pub(super) async fn restore(daemon: &Daemon, name: &str, noted: BTreeMap<String, String>) {
    if noted.is_empty() {
        return;
    }
    let Ok(Some(image)) = store::image(daemon, name).await else {
        return;
    };
    let gone = noted
        .into_iter()
        .filter(|(key, _)| !image.labels.contains_key(key));
    if let Err(status) = store::update_labels(daemon, &image, gone).await {
        tracing::warn!(
            image = name,
            message = status.message(),
            "pins could not be put back after a pull"
        );
    }
}

/// Now, as labels have it.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(owner: &str, until: Option<u64>) -> Pin {
        Pin {
            owner: owner.to_owned(),
            until,
        }
    }

    fn apply(labels: &mut Labels, changes: BTreeMap<String, String>) {
        for (key, value) in changes {
            if value.is_empty() {
                labels.remove(&key);
            } else {
                labels.insert(key, value);
            }
        }
    }

    #[test]
    fn an_image_stays_pinned_until_its_last_owner_lets_go() {
        let mut labels = Labels::from([("io.cri-containerd.image".into(), "managed".into())]);
        let before = labels.clone();
        let both = [pin("team/a", Some(100)), pin("team/b", None)];
        let changes = taking(&labels, &both, false, true);
        apply(&mut labels, changes);
        assert_eq!(labels.get("io.cri-containerd.pinned").unwrap(), "pinned");
        assert_eq!(pins_of(&labels), both);
        assert!(taking(&labels, &both, true, true).is_empty());

        let first = letting(&labels, Whose::Owner("team/b"), 50);
        assert!(first.released && !first.removable);
        assert_eq!(first.held, [pin("team/a", Some(100))]);
        apply(&mut labels, first.changes);
        assert!(labels.contains_key("io.cri-containerd.pinned"));

        let last = letting(&labels, Whose::Owner("team/a"), 50);
        assert!(last.released && last.removable && last.held.is_empty());
        apply(&mut labels, last.changes);
        labels.remove("quartermaster.kwasm.sh/pulled");
        assert_eq!(labels, before);
    }

    #[test]
    fn a_pin_of_somebody_else_and_an_image_that_was_there_are_left_alone() {
        let mut labels = Labels::from([("io.cri-containerd.pinned".into(), "pinned".into())]);
        assert_eq!(letting(&labels, Whose::Owner("team/a"), 0), Letting::default());
        let changes = taking(&labels, &[pin("team/a", None)], true, true);
        apply(&mut labels, changes);
        let letting = letting(&labels, Whose::Owner("team/a"), 0);
        assert!(letting.released && !letting.removable);
        apply(&mut labels, letting.changes);
        assert_eq!(
            labels,
            Labels::from([("io.cri-containerd.pinned".into(), "pinned".into())])
        );
    }

    #[test]
    fn a_pin_whose_time_is_over_is_let_go_whoever_asks() {
        let mut labels = Labels::new();
        let pins = [pin("a", Some(10)), pin("b", Some(20))];
        let changes = taking(&labels, &pins, false, true);
        apply(&mut labels, changes);
        let seen = letting(&labels, Whose::Expired, 10);
        assert_eq!(seen.held, [pin("b", Some(20))]);
        assert!(!seen.released);
        assert!(letting(&labels, Whose::Expired, 20).held.is_empty());
    }

    #[test]
    fn what_is_put_back_after_a_pull_is_ours_alone() {
        let mut labels = Labels::from([("io.cri-containerd.image".into(), "managed".into())]);
        assert!(ours(&labels).is_empty());
        let changes = taking(&labels, &[pin("a", None)], false, true);
        apply(&mut labels, changes.clone());
        assert_eq!(ours(&labels), changes);
        let others = Labels::from([("io.cri-containerd.pinned".into(), "pinned".into())]);
        assert!(ours(&others).is_empty());
    }

    #[test]
    fn a_renewed_pin_changes_one_label_only() {
        let mut labels = Labels::new();
        let changes = taking(&labels, &[pin("a", Some(10))], false, true);
        apply(&mut labels, changes);
        assert_eq!(taking(&labels, &[pin("a", Some(99))], true, true).len(), 1);
    }

    #[test]
    fn where_images_cannot_be_pinned_only_the_owner_is_noted() {
        let changes = taking(&Labels::new(), &[pin("a", None)], false, false);
        assert!(!changes.contains_key("io.cri-containerd.pinned"));
        assert_eq!(changes.len(), 2);
    }
}
