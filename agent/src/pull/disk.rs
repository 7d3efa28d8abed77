//! How much of the disk stays free.

use std::collections::HashMap;
use std::sync::Mutex;

use super::layers::locked;
use crate::host::HostRoot;

/// Above what the kubelet wants free, in percent: its own look at the disk comes every ten seconds, and a pull
/// that is stopped leaves a moment's worth of writes behind.
const MARGIN: f64 = 1.0;
/// What the kubelet wants free where its file cannot be read.
const DEFAULT: f64 = 15.0;

/// What an order wants kept free; the larger counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reserve {
    /// Of the file system's size; `None` follows the kubelet.
    pub percent: Option<u32>,
    /// In bytes.
    pub bytes: u64,
}

/// A file system at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) size: u64,
    pub(crate) free: u64,
}

impl Space {
    /// The fuller of the file systems that hold these folders; `None` where none can be asked.
    pub(crate) fn of(root: &HostRoot, folders: &[String]) -> Option<Self> {
        folders
            .iter()
            .filter_map(|folder| {
                let stat = root.statvfs(folder).ok()?;
                Some(Self {
                    size: stat.f_blocks.saturating_mul(stat.f_frsize),
                    // What root alone may use is not counted: the kubelet does not count it either.
                    free: stat.f_bavail.saturating_mul(stat.f_frsize),
                })
            })
            .min_by_key(|space| space.free)
    }
}

/// How many bytes stay free: what is asked for, else what the kubelet's thresholds ask for and a margin.
pub(crate) fn reserve(wanted: Reserve, size: u64, kubelet: Option<f64>) -> u64 {
    let percent = match wanted.percent {
        Some(percent) => f64::from(percent.min(100)),
        None => (kubelet.unwrap_or(DEFAULT) + MARGIN).min(100.0),
    };
    let share = (size as f64 * percent / 100.0) as u64;
    share.max(wanted.bytes)
}

/// What the images that are being pulled still need, together, on one file system.
#[derive(Debug, Default)]
pub(crate) struct Commitments(Mutex<HashMap<String, u64>>);

impl Commitments {
    /// An image still needs so much.
    pub(crate) fn set(&self, image: &str, bytes: u64) {
        locked(&self.0).insert(image.to_owned(), bytes);
    }

    pub(crate) fn release(&self, image: &str) {
        locked(&self.0).remove(image);
    }

    pub(crate) fn total(&self) -> u64 {
        locked(&self.0).values().sum()
    }
}

/// What an image needs at the very least: the bytes to come, and once more what they unpack to. Layers unpack to
/// more than that, so what does not fit by this does not fit.
pub(crate) fn needed(missing: u64) -> u64 {
    missing.saturating_mul(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_stays_clear_of_the_kubelets_thresholds() {
        let default = Reserve::default();
        assert_eq!(reserve(default, 1000, Some(10.0)), 110);
        assert_eq!(reserve(default, 1000, None), 160);
        let bytes = Reserve {
            bytes: 500,
            ..default
        };
        assert_eq!(reserve(bytes, 1000, Some(10.0)), 500);
        let percent = Reserve {
            percent: Some(30),
            bytes: 5,
        };
        assert_eq!(reserve(percent, 1000, Some(50.0)), 300);
    }

    #[test]
    fn images_in_progress_are_counted_together() {
        let commitments = Commitments::default();
        commitments.set("a", needed(10));
        commitments.set("b", needed(20));
        commitments.set("a", needed(5));
        assert_eq!(commitments.total(), 50);
        commitments.release("b");
        assert_eq!(commitments.total(), 10);
    }
}
