//! What the leader tells of as it happens, in words.

use std::time::Duration;

use quartermaster_proto::v1::watch_event::Event;
use quartermaster_proto::v1::{FailureReason, Stage, WatchEvent};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::leader::Leader;
use crate::look::{Look, Tone, bytes};

/// After a stream was lost.
const PAUSE: Duration = Duration::from_secs(1);
/// For the first stream to begin; what is waited for can do without it.
const FIRST: Duration = Duration::from_secs(5);
/// Events that wait.
const WAITING: usize = 1024;

/// Everything that happens on some nodes, or on all, for as long as the receiver is there. What happens after this has
/// returned is told, if the leader could be asked; a stream that is lost is taken up again, and what happened meanwhile is
/// not told.
pub(crate) async fn follow(leader: &Leader, nodes: &[String]) -> mpsc::Receiver<WatchEvent> {
    let (sender, receiver) = mpsc::channel(WAITING);
    let (leader, nodes) = (leader.clone(), nodes.to_vec());
    let mut first = timeout(FIRST, leader.watch(&nodes))
        .await
        .ok()
        .and_then(Result::ok);
    tokio::spawn(async move {
        while !sender.is_closed() {
            let stream = match first.take() {
                Some(stream) => Some(stream),
                None => leader.watch(&nodes).await.ok(),
            };
            if let Some(mut stream) = stream {
                while let Ok(Some(event)) = stream.message().await {
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
            }
            leader.forget();
            tokio::time::sleep(PAUSE).await;
        }
    });
    receiver
}

/// One line for a person; `None` for what only moves a bar.
pub(crate) fn line(event: &WatchEvent, look: Look) -> Option<String> {
    let (tone, text) = match event.event.as_ref()? {
        Event::Progress(_) => return None,
        Event::Ordered(work) => (Tone::Dim, format!("{} begins", work_in_words(work))),
        Event::Stage(stage) => {
            let took = stage.took.and_then(|took| Duration::try_from(took).ok());
            let took = format!("{} ms", took.unwrap_or_default().as_millis());
            let word = format!("{:<9}", stage.stage().word());
            (
                Tone::Plain,
                format!(
                    "{word}{} {}",
                    look.paint(Tone::Dim, &format!("{took:>8}")),
                    stage.summary
                ),
            )
        }
        Event::Ended(ended) if ended.message.is_empty() => {
            (Tone::Good, format!("{} is done", work_in_words(&ended.work)))
        }
        Event::Ended(ended) if ended.reason() == FailureReason::Unspecified => (
            Tone::Busy,
            format!("{}: {}", work_in_words(&ended.work), ended.message),
        ),
        Event::Ended(ended) => (
            Tone::Bad,
            format!(
                "{}: {}: {}",
                work_in_words(&ended.work),
                ended.reason().camel_case(),
                ended.message
            ),
        ),
        Event::ImageReady(ready) if ready.was_present => (Tone::Good, format!("{} was there", ready.image)),
        Event::ImageReady(ready) => (
            Tone::Good,
            format!("{} is there, {}", ready.image, bytes(ready.size)),
        ),
        Event::ImageFailed(failed) => {
            let failure = failed.failure.clone().unwrap_or_default();
            (
                Tone::Bad,
                format!(
                    "{}: {}: {}",
                    failed.image,
                    failure.reason().camel_case(),
                    failure.message
                ),
            )
        }
        Event::Lost(count) => {
            return Some(look.paint(
                Tone::Dim,
                &format!("{count} events were missed: too many at once"),
            ));
        }
    };
    Some(format!(
        "{}  {}",
        look.strong(&event.node),
        look.paint(tone, &text)
    ))
}

/// What an order is called among people.
pub(crate) fn work_in_words(work: &str) -> &str {
    match work {
        "Prepare" => "the preparation",
        "Install" => "the installation",
        "Verify" => "the verification",
        "PrepareRemoval" => "the preparation of the removal",
        "Remove" => "the removal",
        "Pull" => "a pull",
        other => other,
    }
}

/// What is done in the stage that follows one that has ended.
pub(crate) fn next_in_words(stage: Stage, removing: bool) -> &'static str {
    match stage {
        Stage::Unspecified => "looking at the node",
        Stage::Detect => "planning the change",
        Stage::Plan if removing => "rehearsing the change",
        Stage::Plan => "copying crun and its libraries",
        Stage::Payload => "rehearsing the change",
        Stage::Rehearse => "replacing the file and restarting containerd",
        Stage::Swap if removing => "looking whether all is as it was",
        Stage::Swap => "running a Wasm module through the handler",
        Stage::Verify | Stage::Commit => "writing it down",
    }
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::{Ended, Failure, ImageFailed, ImageReady, StageFinished};

    use super::*;

    fn told(event: Event) -> Option<String> {
        let event = WatchEvent {
            node: "worker-1".into(),
            event: Some(event),
            ..WatchEvent::default()
        };
        line(&event, Look::plain(None))
    }

    #[test]
    fn each_event_is_a_line() {
        assert_eq!(
            told(Event::Ordered("Install".into())).as_deref(),
            Some("worker-1  the installation begins")
        );
        let stage = StageFinished {
            stage: Stage::Rehearse.into(),
            took: Some(prost_types::Duration {
                seconds: 0,
                nanos: 120_000_000,
            }),
            summary: "containerd serves crun too".into(),
        };
        assert_eq!(
            told(Event::Stage(stage)).as_deref(),
            Some("worker-1  rehearse   120 ms containerd serves crun too")
        );
        let mut ended = Ended {
            work: "Install".into(),
            ..Ended::default()
        };
        assert_eq!(
            told(Event::Ended(ended.clone())).as_deref(),
            Some("worker-1  the installation is done")
        );
        ended.reason = FailureReason::SwapFailed.into();
        ended.message = "the disk is full".into();
        assert_eq!(
            told(Event::Ended(ended)).as_deref(),
            Some("worker-1  the installation: SwapFailed: the disk is full")
        );
        let ready = ImageReady {
            image: "r/a:1".into(),
            size: 12_300_000,
            ..ImageReady::default()
        };
        assert_eq!(
            told(Event::ImageReady(ready)).as_deref(),
            Some("worker-1  r/a:1 is there, 12.3 MB")
        );
        let failed = ImageFailed {
            image: "r/a:1".into(),
            failure: Some(Failure {
                reason: FailureReason::ImageNotFound.into(),
                message: "not found".into(),
                ..Failure::default()
            }),
            ..ImageFailed::default()
        };
        assert_eq!(
            told(Event::ImageFailed(failed)).as_deref(),
            Some("worker-1  r/a:1: ImageNotFound: not found")
        );
    }
}
