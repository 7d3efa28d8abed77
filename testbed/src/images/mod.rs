//! The images a testbed works with: those every cluster starts from, made here from a few lines of C and WebAssembly
//! text, and the product's own two, built from the workspace's Dockerfiles.
//!
//! Each is an OCI archive in the cache, named by what it was made from. Nothing here knows of clusters or of a registry.

mod archive;
mod base;

use std::path::{Path, PathBuf};

use anyhow::Result;

/// An image that can be pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltImage {
    /// Its name without a registry: `pause:3.10`.
    pub name: String,
    /// The OCI archive.
    pub archive: PathBuf,
}

/// The images a cluster and the samples need: `pause:3.10`, `server:1.0` (answers on 8080), `server-init:1.0` (an init
/// container) and `hello-wasm:1.0` (a WASI module). `cache` is the cache's root; what it has already is not made again.
///
/// # Errors
/// If a program can't be compiled, with the compiler's words, or the cache can't be written.
pub fn base_set(cache: &Path) -> Result<Vec<BuiltImage>> {
    base::make(&cache.join("images"), &cache.join("logs").join("images.log"))
}
