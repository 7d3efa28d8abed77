//! A running containerd: its socket, its version, and what its CRI serves.
//!
//! Nothing here changes anything. A dial to a socket that nobody answers hangs, so each call has a deadline.

mod channel;
mod comparison;
mod served;
mod settings;
mod site;

pub use channel::{Daemon, DaemonError};
pub use comparison::{Difference, Expected, compare};
pub use served::{RuntimeOptions, Served};
pub use settings::{DEFAULT_CONFIG, DaemonSettings, SettingsError, read_settings};
pub use site::{Site, data_dir};
