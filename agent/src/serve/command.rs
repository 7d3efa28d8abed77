//! Commands in progress and lately ended: each has an id, and every stream of that id sees all its events.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::Stream;
use tokio::sync::watch;
use tonic::Status;

/// Ended commands whose events are kept for a second look.
const KEPT: usize = 32;
/// Longest id, in bytes.
const MAX_ID: usize = 64;

/// A command's events, and who listens.
#[derive(Debug)]
pub(crate) struct Command<E> {
    events: Mutex<Events<E>>,
    /// The number of the next event, and whether the last one is there.
    length: watch::Sender<(u64, bool)>,
    attached: watch::Sender<usize>,
}

/// By number, with gaps where a newer event has taken the place of an old one.
#[derive(Debug)]
struct Events<E> {
    by_number: BTreeMap<u64, E>,
    next: u64,
    /// Of the event that the next one about the same subject replaces.
    latest: HashMap<String, u64>,
}

impl<E: Clone + Send + Sync + 'static> Command<E> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            events: Mutex::new(Events {
                by_number: BTreeMap::new(),
                next: 0,
                latest: HashMap::new(),
            }),
            length: watch::Sender::new((0, false)),
            attached: watch::Sender::new(0),
        })
    }

    /// An event that every stream sees.
    pub(crate) fn push(&self, event: E) {
        self.add(event, None, false);
    }

    /// How far something is. The next event about it takes its place, so that a long command holds no more than the
    /// latest of each, and a stream that is slow or late sees only that.
    pub(crate) fn push_latest(&self, subject: &str, event: E) {
        self.add(event, Some(subject), true);
    }

    /// An event that every stream sees, in place of how far its subject was.
    pub(crate) fn push_last(&self, subject: &str, event: E) {
        self.add(event, Some(subject), false);
    }

    fn add(&self, event: E, subject: Option<&str>, is_replaced: bool) {
        let next = {
            let mut events = locked(&self.events);
            let number = events.next;
            let before = subject.and_then(|subject| events.latest.remove(subject));
            if let Some(before) = before {
                events.by_number.remove(&before);
            }
            if let Some(subject) = subject.filter(|_| is_replaced) {
                events.latest.insert(subject.to_owned(), number);
            }
            events.by_number.insert(number, event);
            events.next += 1;
            events.next
        };
        self.length.send_modify(|state| state.0 = next);
    }

    pub(crate) fn end(&self) {
        self.length.send_modify(|state| state.1 = true);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.length.borrow().1
    }

    pub(crate) async fn ended(&self) {
        let mut length = self.length.subscribe();
        let _ = length.wait_for(|state| state.1).await;
    }

    /// All events from the first on, until the last.
    pub(crate) fn stream(self: &Arc<Self>) -> impl Stream<Item = Result<E, Status>> + Send + use<E> {
        let attachment = Attachment::of(Arc::clone(self));
        let length = self.length.subscribe();
        futures::stream::unfold((attachment, length, 0), async |(attachment, mut length, at)| {
            let (there, _) = *length.wait_for(|(there, over)| *there > at || *over).await.ok()?;
            if there <= at {
                return None;
            }
            let (number, event) = {
                let events = locked(&attachment.command.events);
                let (number, event) = events.by_number.range(at..).next()?;
                (*number, event.clone())
            };
            Some((Ok(event), (attachment, length, number + 1)))
        })
    }

    /// Ends when nobody has been attached for this long.
    pub(crate) async fn abandoned(&self, patience: Duration) {
        let mut attached = self.attached.subscribe();
        loop {
            if attached.wait_for(|count| *count == 0).await.is_err() {
                return;
            }
            let back = attached.wait_for(|count| *count > 0);
            if tokio::time::timeout(patience, back).await.is_err() {
                return;
            }
        }
    }
}

struct Attachment<E> {
    command: Arc<Command<E>>,
}

impl<E> Attachment<E> {
    fn of(command: Arc<Command<E>>) -> Self {
        command.attached.send_modify(|count| *count += 1);
        Self { command }
    }
}

impl<E> Drop for Attachment<E> {
    fn drop(&mut self) {
        self.command.attached.send_modify(|count| *count -= 1);
    }
}

/// All commands of one kind of event.
#[derive(Debug)]
pub(crate) struct Registry<E> {
    known: Mutex<Known<E>>,
}

#[derive(Debug)]
struct Known<E> {
    /// By id; with it what was ordered, since an id is for one order only.
    commands: HashMap<String, (&'static str, Arc<Command<E>>)>,
    order: VecDeque<String>,
}

/// Whether a command is new.
pub(crate) enum Entry<E> {
    New(Arc<Command<E>>),
    Known(Arc<Command<E>>),
}

impl<E: Clone + Send + Sync + 'static> Registry<E> {
    pub(crate) fn new() -> Self {
        Self {
            known: Mutex::new(Known {
                commands: HashMap::new(),
                order: VecDeque::new(),
            }),
        }
    }

    /// The command of this id, made where there is none.
    pub(crate) fn enter(&self, id: &str, kind: &'static str) -> Result<Entry<E>, Status> {
        if id.is_empty() || id.len() > MAX_ID {
            return Err(Status::invalid_argument(format!(
                "a command's id has 1 to {MAX_ID} bytes"
            )));
        }
        let mut known = locked(&self.known);
        if let Some((ordered, command)) = known.commands.get(id) {
            if *ordered != kind {
                return Err(Status::invalid_argument(format!(
                    "the id {id} belongs to a command {ordered}"
                )));
            }
            return Ok(Entry::Known(Arc::clone(command)));
        }
        while known.order.len() >= KEPT {
            let over = known.order.iter().position(|id| {
                known
                    .commands
                    .get(id)
                    .is_none_or(|(_, command)| command.has_ended())
            });
            let Some(over) = over else {
                return Err(Status::resource_exhausted("too many commands are running"));
            };
            if let Some(id) = known.order.remove(over) {
                known.commands.remove(&id);
            }
        }
        let command = Command::new();
        known.order.push_back(id.to_owned());
        known.commands.insert(id.to_owned(), (kind, Arc::clone(&command)));
        Ok(Entry::New(command))
    }

    /// Ends when all commands have.
    pub(crate) async fn drained(&self) {
        let running: Vec<Arc<Command<E>>> = locked(&self.known)
            .commands
            .values()
            .map(|(_, command)| Arc::clone(command))
            .collect();
        for command in running {
            command.ended().await;
        }
    }
}

/// A lock whose holder panicked guards nothing that could be half-changed here.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    fn new(registry: &Registry<u32>, id: &str) -> Arc<Command<u32>> {
        match registry.enter(id, "x").unwrap() {
            Entry::New(command) => command,
            Entry::Known(_) => panic!("{id} is known"),
        }
    }

    #[tokio::test]
    async fn a_second_stream_sees_all_from_the_beginning() {
        let registry = Registry::new();
        let command = new(&registry, "a");
        command.push(1);
        let first = command.stream();
        command.push(2);
        let Entry::Known(same) = registry.enter("a", "x").unwrap() else {
            panic!("the command was made twice");
        };
        let second = same.stream();
        command.push(3);
        command.end();
        let all = |stream| async { futures::StreamExt::collect::<Vec<_>>(stream).await };
        for seen in [all(first.boxed()).await, all(second.boxed()).await] {
            let seen: Vec<u32> = seen.into_iter().map(Result::unwrap).collect();
            assert_eq!(seen, [1, 2, 3]);
        }
        let late: Vec<_> = command.stream().collect().await;
        assert_eq!(late.len(), 3);
    }

    #[tokio::test]
    async fn of_progress_only_the_latest_is_kept_and_none_after_the_end() {
        let registry = Registry::new();
        let command = new(&registry, "a");
        let early = command.stream();
        let mut early = std::pin::pin!(early);
        command.push_latest("x", 1);
        assert_eq!(early.next().await.unwrap().unwrap(), 1);
        for progress in 2..100 {
            command.push_latest("x", progress);
            command.push_latest("y", progress * 1000);
        }
        assert_eq!(early.next().await.unwrap().unwrap(), 99);
        command.push_last("x", 100);
        command.push_last("y", 100_000);
        command.end();
        assert_eq!(locked(&command.events).by_number.len(), 2);
        let late: Vec<u32> = command.stream().map(Result::unwrap).collect().await;
        assert_eq!(late, [100, 100_000]);
        let rest: Vec<u32> = early.map(Result::unwrap).collect().await;
        assert_eq!(rest, [100, 100_000]);
    }

    #[tokio::test]
    async fn an_id_is_for_one_order_and_bounded() {
        let registry = Registry::<u32>::new();
        new(&registry, "a");
        assert!(registry.enter("a", "y").is_err());
        assert!(registry.enter("", "x").is_err());
        assert!(registry.enter(&"a".repeat(65), "x").is_err());
    }

    #[tokio::test]
    async fn ended_commands_are_forgotten_and_running_ones_never() {
        let registry = Registry::<u32>::new();
        for n in 0..KEPT {
            new(&registry, &n.to_string());
        }
        assert!(registry.enter("more", "x").is_err());
        let Entry::Known(first) = registry.enter("0", "x").unwrap() else {
            panic!("a running command was forgotten");
        };
        first.end();
        new(&registry, "more");
        assert!(matches!(registry.enter("1", "x"), Ok(Entry::Known(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_is_abandoned_only_after_the_whole_patience() {
        let registry = Registry::<u32>::new();
        let command = new(&registry, "a");
        let patience = Duration::from_secs(60);
        let stream = command.stream();
        let short = Duration::from_secs(600);
        assert!(
            tokio::time::timeout(short, command.abandoned(patience))
                .await
                .is_err()
        );
        drop(stream);
        let begun = tokio::time::Instant::now();
        command.abandoned(patience).await;
        assert!(begun.elapsed() >= patience);
    }
}
