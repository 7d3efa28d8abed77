//! A pull is watched while it runs: its bytes, the registry that stalls, the disk that fills.

use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::FailureReason;
use tokio::time::{Instant, sleep};

use super::disk::{Commitments, Space, needed};
use super::layers::{Layers, Snapshot, locked};
use crate::host::HostRoot;

/// Between two looks, and so at most four reports a second.
const LOOK: Duration = Duration::from_millis(250);

/// The disk that pulls fill.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) root: Arc<HostRoot>,
    pub(crate) folders: Vec<String>,
    /// Bytes that stay free.
    pub(crate) reserve: u64,
    pub(crate) commitments: Commitments,
}

/// When anything of the order was last seen to come. containerd fetches few layers at once for all pulls together,
/// so an image may wait for others without being stalled.
#[derive(Debug)]
pub(crate) struct Pulse(std::sync::Mutex<Instant>);

impl Pulse {
    pub(crate) fn new() -> Self {
        Self(std::sync::Mutex::new(Instant::now()))
    }

    fn beat(&self, at: Instant) {
        let mut last = locked(&self.0);
        *last = (*last).max(at);
    }

    fn last(&self) -> Instant {
        *locked(&self.0)
    }
}

/// What is watched.
pub(crate) struct Watch<'a> {
    pub(crate) name: &'a str,
    pub(crate) layers: &'a Layers,
    pub(crate) stall_after: Duration,
    pub(crate) pulse: &'a Pulse,
    /// `None` where the disk cannot be asked.
    pub(crate) disk: Option<&'a Disk>,
}

/// Why a pull is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Halt {
    pub(crate) reason: FailureReason,
    pub(crate) message: String,
}

impl Disk {
    pub(crate) fn space(&self) -> Option<Space> {
        Space::of(&self.root, &self.folders)
    }

    /// Whether there is room to begin at all.
    pub(crate) fn refuse(&self) -> Option<Halt> {
        let space = self.space()?;
        (space.free <= self.reserve).then(|| Halt {
            reason: FailureReason::DiskReserve,
            message: format!(
                "{} free where containerd keeps images, {} stay free; the pull was not begun",
                megabytes(space.free),
                megabytes(self.reserve)
            ),
        })
    }
}

impl Watch<'_> {
    /// Reports and watches until the pull must be stopped; else it never ends.
    pub(crate) async fn run(&self, report: impl Fn(&Snapshot)) -> Halt {
        let mut reported = 0;
        let mut known = 0;
        loop {
            sleep(LOOK).await;
            let seen = self.layers.snapshot();
            if seen.changes != reported {
                reported = seen.changes;
                self.pulse.beat(seen.moved);
                report(&seen);
            }
            if let Some(halt) = self.full(&seen, &mut known).or_else(|| self.stalled(&seen)) {
                return halt;
            }
        }
    }

    fn stalled(&self, seen: &Snapshot) -> Option<Halt> {
        let now = Instant::now();
        let is_late = |moved: Instant| now.duration_since(moved) >= self.stall_after;
        let is_coming = seen
            .layers
            .values()
            .any(|layer| layer.offset > 0 && layer.offset < layer.total);
        // Nothing comes while a layer is unpacked; the deadline is for that.
        let waits = seen.is_whole() || !is_late(seen.moved);
        if waits || !(is_coming || is_late(self.pulse.last())) {
            return None;
        }
        Some(Halt {
            reason: FailureReason::RegistryStalled,
            message: format!(
                "no byte of {} came for {} s ({} of {} are there)",
                self.name,
                self.stall_after.as_secs(),
                megabytes(seen.done()),
                megabytes(seen.total()),
            ),
        })
    }

    fn full(&self, seen: &Snapshot, known: &mut usize) -> Option<Halt> {
        let disk = self.disk?;
        let space = disk.space()?;
        disk.commitments.set(self.name, needed(seen.missing()));
        if space.free <= disk.reserve {
            return Some(Halt {
                reason: FailureReason::DiskReserve,
                message: format!(
                    "{} free where containerd keeps images, {} stay free; the pull of {} was stopped",
                    megabytes(space.free),
                    megabytes(disk.reserve),
                    self.name
                ),
            });
        }
        // Only when more of the image becomes known: one that has begun must not be stopped by a later one.
        if seen.layers.len() == *known {
            return None;
        }
        *known = seen.layers.len();
        let wanted = disk.commitments.total();
        (wanted.saturating_add(disk.reserve) > space.free).then(|| Halt {
            reason: FailureReason::DoesNotFit,
            message: format!(
                "{} needs at least {} and with what is being pulled {}; {} are free and {} stay free",
                self.name,
                megabytes(needed(seen.missing())),
                megabytes(wanted),
                megabytes(space.free),
                megabytes(disk.reserve)
            ),
        })
    }
}

pub(crate) fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::super::layers::Layer;
    use super::*;

    fn watch<'a>(layers: &'a Layers, pulse: &'a Pulse, disk: Option<&'a Disk>) -> Watch<'a> {
        Watch {
            name: "r.io/x:1",
            layers,
            stall_after: Duration::from_secs(5),
            pulse,
            disk,
        }
    }

    fn at(offset: u64) -> Layer {
        Layer { offset, total: 100 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_that_sends_nothing_is_stalled_and_bytes_put_it_off() {
        let (layers, pulse) = (Layers::new(), Pulse::new());
        let begun = Instant::now();
        let bytes = async {
            for n in 1..=3 {
                sleep(Duration::from_secs(4)).await;
                layers.see("a", at(n * 10));
            }
            std::future::pending::<()>().await;
        };
        let watch = watch(&layers, &pulse, None);
        let halt = tokio::select! { halt = watch.run(|_| ()) => halt, () = bytes => unreachable!() };
        assert_eq!(halt.reason, FailureReason::RegistryStalled);
        assert!(
            begun.elapsed() >= Duration::from_secs(17),
            "{:?}",
            begun.elapsed()
        );
        assert!(halt.message.contains("5 s"), "{}", halt.message);
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_waits_for_others_or_is_unpacked_is_not_stalled() {
        let (other, pulse) = (Layers::new(), Pulse::new());
        let waiting = Layers::new();
        waiting.see("b", at(0));
        let whole = Layers::new();
        whole.see("c", at(100));
        let bytes = async {
            for n in 1..=20 {
                sleep(Duration::from_secs(4)).await;
                other.see("a", at(n));
            }
        };
        let (busy, waits, unpacks) = (
            watch(&other, &pulse, None),
            watch(&waiting, &pulse, None),
            watch(&whole, &pulse, None),
        );
        tokio::select! {
            halt = busy.run(|_| ()) => panic!("{halt:?}"),
            halt = waits.run(|_| ()) => panic!("{halt:?}"),
            halt = unpacks.run(|_| ()) => panic!("{halt:?}"),
            () = bytes => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_fit_is_stopped_when_its_layers_become_known() {
        let dir = tempfile::tempdir().unwrap();
        let root = Arc::new(HostRoot::open(dir.path()).unwrap());
        let disk = Disk {
            root,
            folders: vec!["/".into()],
            reserve: 0,
            commitments: Commitments::default(),
        };
        let free = disk.space().unwrap().free;
        let (layers, pulse) = (Layers::new(), Pulse::new());
        layers.see(
            "a",
            Layer {
                offset: 0,
                total: free,
            },
        );
        let halt = watch(&layers, &pulse, Some(&disk)).run(|_| ()).await;
        assert_eq!(halt.reason, FailureReason::DoesNotFit);

        let full = Disk {
            reserve: u64::MAX,
            ..disk
        };
        assert_eq!(full.refuse().unwrap().reason, FailureReason::DiskReserve);
        let halt = watch(&Layers::new(), &pulse, Some(&full)).run(|_| ()).await;
        assert_eq!(halt.reason, FailureReason::DiskReserve);
    }
}
