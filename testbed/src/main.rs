//! Placeholder.
fn main() {
    let progress = testbed::progress::Progress::terminal();
    let cache = testbed::layout::Cache::locate();
    if let Err(e) = testbed::host::packages::ensure(&progress, &cache.logs().join("apt.log"))
        .and_then(|()| testbed::parts::Parts::ensure(&cache, &["1.6", "1.7", "2.1", "2.4"], &progress).map(drop))
    {
        eprintln!("{e:#}");
    }
}
