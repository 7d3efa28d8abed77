//! A command of a simulated agent: its events from the first on, for every stream that attaches to it.

use std::sync::{Arc, Mutex};

use futures::Stream;
use tokio::sync::watch;
use tonic::Status;

use super::ledger::locked;

/// A command's events.
#[derive(Debug)]
pub(super) struct Command<E> {
    events: Mutex<Vec<E>>,
    /// How many events there are, and whether the last is among them.
    length: watch::Sender<(usize, bool)>,
}

impl<E: Clone + Send + Sync + 'static> Command<E> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            events: Mutex::new(Vec::new()),
            length: watch::Sender::new((0, false)),
        })
    }

    pub(super) fn push(&self, event: E) {
        let length = {
            let mut events = locked(&self.events);
            events.push(event);
            events.len()
        };
        self.length.send_modify(|state| state.0 = length);
    }

    pub(super) fn end(&self) {
        self.length.send_modify(|state| state.1 = true);
    }

    pub(super) fn stream(self: &Arc<Self>) -> impl Stream<Item = Result<E, Status>> + Send + use<E> {
        let command = Arc::clone(self);
        let length = self.length.subscribe();
        futures::stream::unfold((command, length, 0), async |(command, mut length, at)| {
            let (there, _) = *length.wait_for(|(there, over)| *there > at || *over).await.ok()?;
            if there <= at {
                return None;
            }
            let event = locked(&command.events).get(at).cloned()?;
            Some((Ok(event), (command, length, at + 1)))
        })
    }
}
