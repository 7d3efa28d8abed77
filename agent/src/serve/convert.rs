//! From what the stages report to what goes over the wire.

use std::time::Duration;

use quartermaster_proto::v1::{
    self, ImageFailed, ImageProgress, ImageReady, NodeDescription, ProvisionDone, ProvisionEvent, PullEvent,
    StageFinished, StageStarted, provision_event, pull_event,
};

use crate::failure::{Failure, cut};
use crate::install::{Done, Event};
use crate::pull::ImageEvent;

const MAX_DIFF: usize = 4096;
const MAX_SUMMARY: usize = 1024;

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

pub(crate) fn image(event: ImageEvent) -> PullEvent {
    let event = match event {
        ImageEvent::Started(image) => pull_event::Event::Progress(ImageProgress {
            image,
            ..Default::default()
        }),
        ImageEvent::Ready(image, ready) => pull_event::Event::Ready(ImageReady {
            image,
            digest: ready.digest,
            was_present: ready.was_present,
            size: ready.size,
            took: Some(duration(ready.took)),
            ..Default::default()
        }),
        ImageEvent::Failed {
            image,
            reason,
            message,
            remedy,
            attempts,
        } => pull_event::Event::Failed(ImageFailed {
            image,
            failure: Some(v1::Failure {
                reason: reason.into(),
                message: cut(&message, MAX_DIFF),
                remedy: remedy.to_owned(),
                ..Default::default()
            }),
            attempts,
            ..Default::default()
        }),
    };
    PullEvent { event: Some(event) }
}
