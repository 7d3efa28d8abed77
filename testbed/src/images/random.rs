//! Images of bytes that do not compress, for measuring pulls.

use std::path::Path;

use anyhow::Result;

use super::archive::Image;

/// Writes an image with one file of `size` bytes, which no compressor makes smaller, to `archive`. The same name gives the
/// same bytes.
///
/// # Errors
/// If the archive can't be written.
pub fn random(archive: &Path, name: &str, size: usize) -> Result<()> {
    // xorshift64*: fast, and as dense as a layer of real programs in gzip already is.
    let mut state = name.bytes().fold(0x9E37_79B9_7F4A_7C15_u64, |seed, byte| {
        (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    }) | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    bytes.truncate(size);
    Image {
        name,
        files: &[("data", bytes)],
        entrypoint: &["/data"],
        user: "",
        ports: &[],
        architecture: None,
    }
    .write(archive)
}

/// Writes a small image that is for no processor of a testbed to `archive`.
///
/// # Errors
/// If the archive can't be written.
pub fn foreign(archive: &Path, name: &str) -> Result<()> {
    Image {
        name,
        files: &[("data", b"data".to_vec())],
        entrypoint: &["/data"],
        user: "",
        ports: &[],
        architecture: Some("s390x"),
    }
    .write(archive)
}
