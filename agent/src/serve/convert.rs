//! From what the stages report to what goes over the wire.

use std::time::Duration;

use quartermaster_proto::v1::{
    self, HeldImage, ImageFailed, ImageProgress, ImageReady, LayerProgress, NodeDescription, PinState,
    ProvisionDone, ProvisionEvent, PullEvent, ReleaseResponse, StageFinished, StageStarted, provision_event,
    pull_event,
};

use crate::failure::{Failure, cut};
use crate::install::{Done, Event};
use crate::pull::{ImageEvent, Pinned, Progress, Ready, Released, normalise, registry_of, remedy_of};

const MAX_DIFF: usize = 4096;
const MAX_SUMMARY: usize = 1024;
const MAX_LAYERS: usize = 128;
const MAX_HELD: usize = 1000;
const UNPINNABLE: &str = "this containerd can't pin images (1.6.39, 1.7.3 and later can)";

pub(crate) fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or_default()
}

pub(crate) fn progress(event: Event) -> ProvisionEvent {
    let event = match event {
        Event::Started(stage) => provision_event::Event::Started(StageStarted { stage: stage.into() }),
        Event::Finished { stage, took, summary } => provision_event::Event::Finished(StageFinished {
            stage: stage.into(),
            took: Some(duration(took)),
            summary: cut(&summary, MAX_SUMMARY),
        }),
    };
    ProvisionEvent { event: Some(event) }
}

pub(crate) fn done(done: Done, node: NodeDescription) -> ProvisionEvent {
    ProvisionEvent {
        event: Some(provision_event::Event::Done(ProvisionDone {
            restarted: done.restarted,
            socket_gap: done.socket_gap.map(duration),
            prepared_only: done.prepared_only,
            node: Some(node),
            diff: cut(&done.diff, MAX_DIFF),
        })),
    }
}

pub(crate) fn failed(failure: &Failure) -> ProvisionEvent {
    ProvisionEvent {
        event: Some(provision_event::Event::Failed(failure.to_wire())),
    }
}

/// An event of a pull: about which image, and whether it is the last one about it.
pub(crate) fn image(event: ImageEvent) -> (String, PullEvent, bool) {
    let (image, event, is_last) = match event {
        ImageEvent::Progress(image, progress) => {
            let event = pull_event::Event::Progress(image_progress(image.clone(), progress));
            (image, event, false)
        }
        ImageEvent::Ready(image, ready) => {
            let event = pull_event::Event::Ready(image_ready(image.clone(), ready));
            (image, event, true)
        }
        ImageEvent::Failed(image, failed) => {
            let event = pull_event::Event::Failed(ImageFailed {
                registry: registry(&image),
                image: image.clone(),
                failure: Some(v1::Failure {
                    reason: failed.reason.into(),
                    message: cut(&failed.message, MAX_DIFF),
                    remedy: remedy_of(failed.reason).to_owned(),
                    ..Default::default()
                }),
                attempts: failed.attempts,
                retry_after: None,
            });
            (image, event, true)
        }
    };
    (image, PullEvent { event: Some(event) }, is_last)
}

fn image_progress(image: String, progress: Progress) -> ImageProgress {
    let layers = progress.layers.into_iter().take(MAX_LAYERS);
    ImageProgress {
        image,
        bytes_done: progress.done,
        bytes_total: progress.total,
        layers: layers
            .map(|(digest, layer)| LayerProgress {
                digest,
                offset: layer.offset,
                total: layer.total,
            })
            .collect(),
        attempt: progress.attempt,
    }
}

fn image_ready(image: String, ready: Ready) -> ImageReady {
    let (pin, pin_note) = match ready.pinned {
        Pinned::NotAsked => (PinState::Unspecified, String::new()),
        Pinned::Pinned => (PinState::Pinned, String::new()),
        Pinned::Unsupported => (PinState::Unsupported, UNPINNABLE.to_owned()),
        Pinned::Failed(why) => (PinState::Failed, cut(&why, MAX_SUMMARY)),
    };
    ImageReady {
        registry: registry(&image),
        image,
        digest: ready.digest,
        was_present: ready.was_present,
        size: ready.size,
        took: Some(duration(ready.took)),
        bytes_fetched: ready.fetched,
        pin: pin.into(),
        pin_note,
        way: ready.way.into(),
        attempts: ready.attempts,
    }
}

fn registry(image: &str) -> String {
    normalise(image).map_or(String::new(), |name| registry_of(&name).to_owned())
}

/// What a release came to.
pub(crate) fn released(released: Released) -> ReleaseResponse {
    let held_count = u32::try_from(released.held.len()).unwrap_or(u32::MAX);
    let held = released.held.into_iter().take(MAX_HELD);
    ReleaseResponse {
        released: released.released,
        removed: released.removed,
        held: held
            .map(|(image, pins)| HeldImage {
                image,
                pins: pins.into_iter().map(v1::Pin::from).collect(),
            })
            .collect(),
        held_count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quartermaster_proto::v1::FailureReason;

    #[test]
    fn a_failed_image_names_its_registry_and_what_to_do() {
        let failed = crate::pull::Failed {
            reason: FailureReason::RateLimited,
            message: "429 Too Many Requests".into(),
            attempts: 3,
        };
        let (image, event, is_last) = image(ImageEvent::Failed("host:5000/x".into(), failed));
        assert!(image == "host:5000/x" && is_last);
        let Some(pull_event::Event::Failed(failed)) = event.event else {
            panic!("{event:?}");
        };
        assert_eq!(failed.registry, "host:5000");
        assert!(!failed.failure.unwrap().remedy.is_empty());
    }
}
