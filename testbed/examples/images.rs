//! Builds every image and tells its name, size and time: `cargo run -p testbed --example images [-- base | -- WORKSPACE]`.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use testbed::Progress;
use testbed::images::{self, BuiltImage};
use testbed::layout::Cache;

fn main() -> Result<()> {
    let cache = Cache::locate();
    let start = Instant::now();
    tell(&images::base_set(cache.root())?, start)?;
    let what = std::env::args().nth(1);
    if what.as_deref() != Some("base") {
        let start = Instant::now();
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let workspace = PathBuf::from(what.unwrap_or_else(|| here.to_owned()));
        let product = images::product(cache.root(), &workspace, &Progress::terminal())?;
        tell(&[product.agent, product.coordinator], start)?;
    }
    Ok(())
}

fn tell(images: &[BuiltImage], since: Instant) -> Result<()> {
    for image in images {
        let size = fs::metadata(&image.archive)?.len();
        println!(
            "{:>9} bytes  {:<40} {}",
            size,
            image.name,
            image.archive.display()
        );
    }
    println!("{:>9.1} s", since.elapsed().as_secs_f64());
    Ok(())
}
