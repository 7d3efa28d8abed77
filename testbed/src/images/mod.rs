//! The images a testbed works with: those every cluster starts from, made here from a few lines of C and WebAssembly
//! text, and the product's own two, built from the workspace's Dockerfiles.
//!
//! Each is an OCI archive in the cache, named by what it was made from. Nothing here knows of clusters or of a registry.

mod archive;
mod base;
mod product;
mod random;
mod sources;
mod stand_in;
mod store;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use random::{foreign, random};

use crate::progress::Progress;

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

/// The images that this workspace builds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Product {
    /// `quartermaster-agent:<hash of its sources>`
    pub agent: BuiltImage,
    /// `quartermaster-coordinator:<hash of its sources>`
    pub coordinator: BuiltImage,
}

/// Builds the product's images from the Dockerfiles in `workspace_root`; what the cache has of the same sources is not
/// built again. `cache` is the cache's root. From nothing it takes minutes, after a change about one for each image; with
/// `TESTBED_PROFILE=dev` in the environment a fraction of that, and the images are larger and slower.
///
/// # Errors
/// If a build fails, with the end of its log and its path; or if the host has no Rust toolchain that can be lent to it.
pub fn product(cache: &Path, workspace_root: &Path, progress: &Progress) -> Result<Product> {
    product::build(
        &cache.join("images"),
        &cache.join("logs"),
        workspace_root,
        progress,
    )
}
