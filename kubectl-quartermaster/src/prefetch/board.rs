//! How far each image is on all of its nodes together, by what the agents report as they pull.

use std::collections::BTreeMap;

use quartermaster_proto::v1::WatchEvent;
use quartermaster_proto::v1::watch_event::Event;

/// What agents have reported of images.
#[derive(Debug, Default)]
pub(super) struct Board {
    images: BTreeMap<String, BTreeMap<String, Part>>,
}

/// An image on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Pulling { done: u64, total: u64 },
    There,
    Failed,
}

/// An image on all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bar {
    /// Bytes that have come to all nodes together.
    pub done: u64,
    /// Bytes that all nodes need together, as far as the image's size is known; 0 while it is not.
    pub total: u64,
    /// Nodes that have it.
    pub there: usize,
}

impl Board {
    /// Takes in a report; gives the image that it was about.
    pub(super) fn note(&mut self, event: &WatchEvent) -> Option<String> {
        let (image, part) = match event.event.as_ref()? {
            Event::Progress(progress) => (
                &progress.image,
                Part::Pulling {
                    done: progress.bytes_done,
                    total: progress.bytes_total,
                },
            ),
            Event::ImageReady(ready) => (&ready.image, Part::There),
            Event::ImageFailed(failed) => (&failed.image, Part::Failed),
            _ => return None,
        };
        let nodes = self.images.entry(image.clone()).or_default();
        // The size stays known when the first node has it.
        let size = match nodes.get(&event.node) {
            Some(Part::Pulling { total, .. }) => *total,
            _ => 0,
        };
        if size > 0 && part == Part::There {
            nodes.insert(SIZE.to_owned(), Part::Pulling { done: 0, total: size });
        }
        nodes.insert(event.node.clone(), part);
        Some(image.clone())
    }

    /// How far an image is that so many nodes want.
    pub(super) fn bar(&self, image: &str, wanted: u64) -> Bar {
        let Some(nodes) = self.images.get(image) else {
            return Bar::default();
        };
        let size = nodes
            .values()
            .map(|part| match part {
                Part::Pulling { total, .. } => *total,
                _ => 0,
            })
            .max()
            .unwrap_or_default();
        let mut bar = Bar {
            total: size * wanted,
            ..Bar::default()
        };
        for (node, part) in nodes {
            match part {
                Part::Pulling { done, .. } if node != SIZE => bar.done += done,
                Part::There => {
                    bar.done += size;
                    bar.there += 1;
                }
                Part::Pulling { .. } | Part::Failed => {}
            }
        }
        bar
    }
}

/// Where the size of an image is kept: no Node has an empty name.
const SIZE: &str = "";

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::{ImageFailed, ImageProgress, ImageReady};

    use super::*;

    fn event(node: &str, event: Event) -> WatchEvent {
        WatchEvent {
            node: node.into(),
            event: Some(event),
            ..WatchEvent::default()
        }
    }

    fn progress(node: &str, done: u64, total: u64) -> WatchEvent {
        event(
            node,
            Event::Progress(ImageProgress {
                image: "r/a:1".into(),
                bytes_done: done,
                bytes_total: total,
                ..ImageProgress::default()
            }),
        )
    }

    #[test]
    fn bytes_of_all_nodes_are_counted_together() {
        let mut board = Board::default();
        assert_eq!(board.note(&progress("x", 10, 100)).as_deref(), Some("r/a:1"));
        board.note(&progress("y", 30, 100));
        let bar = |done, there| Bar {
            done,
            total: 300,
            there,
        };
        assert_eq!(board.bar("r/a:1", 3), bar(40, 0));
        let ready = ImageReady {
            image: "r/a:1".into(),
            ..ImageReady::default()
        };
        board.note(&event("y", Event::ImageReady(ready.clone())));
        assert_eq!(board.bar("r/a:1", 3), bar(110, 1));
        board.note(&event("x", Event::ImageReady(ready)));
        assert_eq!(board.bar("r/a:1", 3), bar(200, 2));
        let failed = ImageFailed {
            image: "r/a:1".into(),
            ..ImageFailed::default()
        };
        board.note(&event("z", Event::ImageFailed(failed)));
        assert_eq!(board.bar("r/a:1", 3), bar(200, 2));
        assert_eq!(board.bar("other", 3), Bar::default());
    }
}
