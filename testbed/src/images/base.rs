//! The images a cluster starts from: pause, a server with its init container, and a Wasm module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::BuiltImage;
use super::archive::Image;
use crate::host::{find, packages};
use crate::progress::Progress;
use crate::tool::Tool;

/// To be raised when an image of the same sources should come out otherwise.
const RECIPE: &str = "1";

struct Base {
    name: &'static str,
    program: &'static str,
    source: Source,
    user: &'static str,
    ports: &'static [&'static str],
}

enum Source {
    C(&'static str),
    Wat(&'static str),
}

const BASES: &[Base] = &[
    Base {
        name: "pause:3.10",
        program: "pause",
        source: Source::C(include_str!("../../images/pause.c")),
        user: "65535:65535",
        ports: &[],
    },
    Base {
        name: "server:1.0",
        program: "server",
        source: Source::C(include_str!("../../images/server.c")),
        user: "65534:65534",
        ports: &["8080/tcp"],
    },
    Base {
        name: "server-init:1.0",
        program: "server-init",
        source: Source::C(include_str!("../../images/server-init.c")),
        user: "65534:65534",
        ports: &[],
    },
    Base {
        name: "hello-wasm:1.0",
        program: "hello.wasm",
        source: Source::Wat(include_str!("../../images/hello.wat")),
        user: "",
        ports: &[],
    },
];

/// Makes those that `images` does not hold yet.
pub(super) fn make(images: &Path, log: &Path) -> Result<Vec<BuiltImage>> {
    fs::create_dir_all(images).with_context(|| format!("can't make {}", images.display()))?;
    let all: Vec<(&Base, PathBuf)> = BASES.iter().map(|base| (base, base.archive(images))).collect();
    let missing: Vec<&(&Base, PathBuf)> = all.iter().filter(|(_, archive)| !archive.exists()).collect();
    let wants_compiler = missing
        .iter()
        .any(|(base, _)| matches!(base.source, Source::C(_)));
    if wants_compiler && !has_compiler() {
        packages::install(&Progress::terminal(), &["gcc", "libc6-dev"], log)?;
    }
    for (base, archive) in missing {
        base.make(archive)
            .with_context(|| format!("making the image {}", base.name))?;
    }
    Ok(all
        .into_iter()
        .map(|(base, archive)| BuiltImage {
            name: base.name.to_owned(),
            archive,
        })
        .collect())
}

fn has_compiler() -> bool {
    // gcc without libc6-dev is found on many machines, and has no libc.a to link with.
    find("gcc").is_some()
        && Tool::new("gcc")
            .arg("-print-file-name=libc.a")
            .output()
            .is_ok_and(|path| Path::new(path.trim()).is_absolute())
}

impl Base {
    /// The archive's path, named by everything the image is made from.
    fn archive(&self, images: &Path) -> PathBuf {
        let (Source::C(text) | Source::Wat(text)) = &self.source;
        let arch = std::env::consts::ARCH;
        let made_from = format!(
            "{RECIPE}\n{arch}\n{} {} {} {:?}\n{text}",
            self.name, self.program, self.user, self.ports
        );
        let hash = Sha256::digest(made_from);
        let hex: String = hash[..5].iter().map(|byte| format!("{byte:02x}")).collect();
        images.join(format!("{}-{hex}.tar", self.name.replace(':', "-")))
    }

    fn make(&self, archive: &Path) -> Result<()> {
        let program = match &self.source {
            Source::C(text) => compile(text, &archive.with_extension("program"))?,
            Source::Wat(text) => wat::parse_str(text)?,
        };
        Image {
            name: self.name,
            files: &[(self.program, program)],
            entrypoint: &[&format!("/{}", self.program)],
            user: self.user,
            ports: self.ports,
            architecture: None,
        }
        .write(archive)
    }
}

fn compile(source: &str, program: &Path) -> Result<Vec<u8>> {
    Tool::new("gcc")
        .args([
            "-static",
            "-Os",
            "-s",
            "-Wall",
            "-Wl,--build-id=none",
            "-x",
            "c",
            "-o",
        ])
        .arg(program)
        .arg("-")
        .input(source)
        .output()?;
    let bytes = fs::read(program).with_context(|| format!("can't read {}", program.display()))?;
    fs::remove_file(program)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wasm_module_is_valid_text() {
        for base in BASES {
            if let Source::Wat(text) = &base.source {
                let module = wat::parse_str(text).unwrap();
                assert_eq!(&module[..4], b"\0asm");
                assert!(module.len() < 4096, "{} bytes", module.len());
            }
        }
    }

    #[test]
    fn an_archive_is_named_by_what_it_is_made_from() {
        let one = BASES[0].archive(Path::new("/c"));
        let name = one.file_name().unwrap().to_str().unwrap();
        assert!(
            name.starts_with("pause-3.10-") && name.ends_with(".tar"),
            "{name}"
        );
        assert_ne!(one, BASES[1].archive(Path::new("/c")));
    }

    #[test]
    fn a_made_image_is_taken_from_the_cache() {
        if !has_compiler() {
            return; // Without root nothing is installed; the testbed's own tests make them.
        }
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let images = make(dir.path(), &log).unwrap();
        let names: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        assert_eq!(
            names,
            ["pause:3.10", "server:1.0", "server-init:1.0", "hello-wasm:1.0"]
        );
        let times = |images: &[BuiltImage]| -> Vec<_> {
            images
                .iter()
                .map(|image| fs::metadata(&image.archive).unwrap().modified().unwrap())
                .collect()
        };
        let before = times(&images);
        assert_eq!(times(&make(dir.path(), &log).unwrap()), before);
    }
}
