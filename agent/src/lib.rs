//! The agent of Quartermaster.
pub mod config;
