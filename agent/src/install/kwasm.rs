//! A node that KWasm's node installer provisioned: its handler is kept while it works, and goes with all its files
//! when the node is put back, as it did there.

use std::io;

use super::layout::Layout;
use crate::config::{Handler, Undo, UndoError, undo};
use crate::host::HostRoot;

/// Where KWasm lies on a host.
const DIR: &str = "/opt/kwasm";
/// What its installer writes there for the handler; shims of other handlers may lie beside it and stay.
const FILES: [(&str, &str); 4] = [
    ("/opt/kwasm/bin", "crun"),
    ("/opt/kwasm/lib", "libwasmedge.so"),
    ("/opt/kwasm/lib", "libwasmtime.so"),
    ("/opt/kwasm", "active"),
];
/// Links that it makes, so that crun finds its library.
const LINKS: [&str; 4] = [
    "libwasmedge.so",
    "libwasmedge.so.0",
    "libwasmedge.so.0.0.0",
    "libwasmtime.so",
];

/// What takes KWasm's handler, whose runtime is `binary`, out of a configuration.
pub(super) fn undo_theirs(current: &[u8], binary: &str) -> Result<Undo, UndoError> {
    let theirs = Handler {
        binary: binary.to_owned(),
        ..Layout::default().handler()
    };
    undo(current, None, &theirs)
}

/// Removes what KWasm's installer put onto the host for the handler.
pub(super) fn remove_files(root: &HostRoot) -> io::Result<()> {
    if let Ok(lib) = root.dir("/lib") {
        for name in LINKS {
            let target = std::fs::read_link(lib.path(name));
            if target.is_ok_and(|target| target.starts_with(DIR)) {
                lib.remove(name)?;
            }
        }
    }
    for (folder, name) in FILES {
        if let Ok(folder) = root.dir(folder) {
            folder.remove(name)?;
        }
    }
    // Folders go only when nothing of anybody is left in them.
    for (parent, name) in [(DIR, "bin"), (DIR, "lib"), ("/opt", "kwasm")] {
        if let Ok(parent) = root.dir(parent) {
            let _ = std::fs::remove_dir(parent.path(name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_files_of_kwasms_installer_go_and_everything_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for folder in ["opt/kwasm/bin", "opt/kwasm/lib", "usr/lib"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        symlink("usr/lib", at("lib")).unwrap();
        for file in [
            "opt/kwasm/bin/crun",
            "opt/kwasm/lib/libwasmedge.so",
            "opt/kwasm/active",
            "usr/lib/libc.so",
        ] {
            std::fs::write(at(file), "").unwrap();
        }
        symlink("/opt/kwasm/lib/libwasmedge.so", at("usr/lib/libwasmedge.so.0")).unwrap();
        symlink("/usr/lib/other.so", at("usr/lib/libwasmedge.so")).unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        remove_files(&root).unwrap();
        assert!(!at("opt/kwasm").exists());
        assert_eq!(root.list("/usr/lib").unwrap(), ["libc.so", "libwasmedge.so"]);

        std::fs::create_dir_all(at("opt/kwasm/bin")).unwrap();
        std::fs::write(at("opt/kwasm/bin/containerd-shim-spin-v2"), "").unwrap();
        remove_files(&root).unwrap();
        assert_eq!(root.list("/opt/kwasm/bin").unwrap(), ["containerd-shim-spin-v2"]);
    }
}
