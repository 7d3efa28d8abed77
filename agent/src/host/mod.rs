//! The host below the agent: its files through one root, its systemd through D-Bus, and what kind of system it is.
//!
//! Everything that the agent reads or writes on the host goes through [`HostRoot`]. Nothing here knows of
//! containerd's configuration or of the coordinator.

mod distribution;
mod overrides;
mod root;
mod systemd;
mod unit_file;

pub use distribution::{
    CONTAINERD_UNIT, Distribution, HostFacts, HostRefusal, OsRelease, PREFIXES, Recognised, UNITS, judge,
    read_facts, recognised,
};
pub use overrides::Overrides;
pub use root::{Held, HostDir, HostRoot};
pub use systemd::{JobResult, Property, ServiceFacts, Systemd, SystemdError};
pub use unit_file::UnitFile;

/// Reads what tells of a host's kind from a folder that holds its files.
pub fn facts_of_folder(root: &HostRoot) -> HostFacts {
    HostFacts {
        os: OsRelease::read(root),
        units: UNITS
            .into_iter()
            .filter(|unit| UnitFile::read(root, unit).is_some())
            .map(str::to_owned)
            .collect(),
        marks: distribution::marks(root),
    }
}
