//! Stand-ins for the public base images that the Dockerfiles name, so that they build here without a registry.
//!
//! A stand-in is a Debian of the same release, and brings what a build here needs of the host: its mirror and apt's
//! settings for it. The Rust one has the host's toolchain lent to it for the time of a build, with the host's settings of
//! cargo; only the Dockerfiles say what is built, and they know of none of this.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::store::{NewImage, Store, contained};
use crate::host::find;
use crate::progress::Progress;
use crate::tool::Tool;
use crate::versions::NODE_SUITE;

/// What the Dockerfiles name.
const DEBIAN: &str = "docker.io/library/debian:trixie-slim";
const RUST: &str = "docker.io/library/rust:1.95.0-trixie";

/// To be raised when a stand-in should come out otherwise than before.
const RECIPE: &str = "1";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";
const PATH: &str = "PATH=/usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where the host's toolchain appears in a build.
const TOOLCHAIN: &str = "/usr/local/rustup/toolchain";
/// Where the host's variables for cargo appear.
const CARGO_VARIABLES: &str = "/usr/local/cargo/host-variables";

/// Makes the Rust stand-in's commands: cargo and rustc are the lent toolchain's; rustup only says whether what it is asked
/// for is there.
const COMMANDS: &str = r#"
apt-get update
apt-get install --yes --no-install-recommends gcc libc6-dev musl-tools protobuf-compiler
rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
mkdir -p /usr/local/cargo/bin
cd /usr/local/cargo/bin
for tool in cargo rustc rustdoc; do
    cat > $tool <<SH
#!/bin/sh
[ ! -f CARGO_VARIABLES ] || . CARGO_VARIABLES
PATH=TOOLCHAIN/bin:\$PATH
exec TOOLCHAIN/bin/$tool "\$@"
SH
done
cat > rustup <<'SH'
#!/bin/sh
[ "$1 $2" = 'target add' ] || { echo "the testbed's stand-in for rustup can't $*" >&2; exit 1; }
[ -d "TOOLCHAIN/lib/rustlib/$3" ] || { echo "the host's toolchain has no target $3" >&2; exit 1; }
SH
chmod 0755 *
"#;

/// The host's mirror of Debian, as for the nodes' root.
fn mirror() -> String {
    std::env::var("TESTBED_DEBIAN_MIRROR").unwrap_or_else(|_| "http://deb.debian.org/debian".to_owned())
}

fn security_mirror() -> String {
    std::env::var("TESTBED_DEBIAN_SECURITY_MIRROR")
        .unwrap_or_else(|_| "http://deb.debian.org/debian-security".to_owned())
}

/// Makes the stand-ins that the store does not have yet.
pub(super) fn ensure(store: &Store, progress: &Progress) -> Result<()> {
    let apt_settings = apt_settings()?;
    let key = key(&[
        RECIPE,
        COMMANDS,
        NODE_SUITE,
        &mirror(),
        &security_mirror(),
        &apt_settings,
    ]);
    let made = store.dir().join("stand-ins");
    if fs::read_to_string(&made).is_ok_and(|of| of == key) {
        return Ok(());
    }
    progress.long_step(
        "stand-ins for the Debian and Rust base images made (once)",
        || {
            let volumes = authorities();
            let content = debian(store, &apt_settings)?;
            store.make(&NewImage {
                name: DEBIAN,
                base: "scratch",
                content: Some(content.clone()),
                script: None,
                volumes: &[],
                variables: &[],
            })?;
            fs::remove_file(content)?;
            store.make(&NewImage {
                name: RUST,
                base: DEBIAN,
                content: None,
                script: Some(
                    COMMANDS
                        .replace("TOOLCHAIN", TOOLCHAIN)
                        .replace("CARGO_VARIABLES", CARGO_VARIABLES),
                ),
                volumes: &volumes,
                variables: &[
                    PATH,
                    "CARGO_HOME=/usr/local/cargo",
                    "RUSTUP_HOME=/usr/local/rustup",
                ],
            })
        },
    )?;
    fs::write(&made, key).with_context(|| format!("can't write {}", made.display()))
}

/// A minimal Debian with its sources and the host's settings of apt, as a tar file.
fn debian(store: &Store, apt_settings: &str) -> Result<PathBuf> {
    let root = store.dir().join("debian");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let (main, security) = (mirror(), security_mirror());
    contained()
        .arg(find("debootstrap").context("debootstrap is not installed")?)
        .args(["--variant=minbase", &format!("--keyring={KEYRING}")])
        // The host's authorities are laid over its bundle during a build, and then no script could write one.
        .args(["--include=ca-certificates", NODE_SUITE])
        .arg(&root)
        .arg(&main)
        .called("debootstrap of the base images")
        .logged(store.log())?;
    let sources = format!(
        "deb {main} {NODE_SUITE} main\n\
         deb {main} {NODE_SUITE}-updates main\n\
         deb {security} {NODE_SUITE}-security main\n"
    );
    fs::write(root.join("etc/apt/sources.list"), sources)?;
    fs::write(root.join("etc/apt/apt.conf.d/80host"), apt_settings)?;
    let content = store.dir().join("debian.tar");
    Tool::new("tar")
        .args([
            "--create",
            "--numeric-owner",
            "--xattrs",
            "--exclude=./var/cache/apt/archives/*.deb",
        ])
        .args(["--exclude=./var/lib/apt/lists/*", "--file"])
        .arg(&content)
        .arg("--directory")
        .arg(&root)
        .arg(".")
        .logged(store.log())?;
    fs::remove_dir_all(&root)?;
    Ok(content)
}

/// How this host's apt reaches its mirrors: proxies, retries, what it checks.
fn apt_settings() -> Result<String> {
    let all = Tool::new("apt-config").arg("dump").output()?;
    Ok(reaching(&all))
}

fn reaching(dump: &str) -> String {
    const SECTIONS: &[&str] = &["http", "https", "Check-", "Retries", "ForceIPv"];
    dump.lines()
        .filter(|line| {
            line.strip_prefix("Acquire::")
                .is_some_and(|rest| SECTIONS.iter().any(|section| rest.starts_with(section)))
        })
        .map(|line| format!("{line}\n"))
        .collect()
}

/// The host's authorities, for mirrors and registries behind a proxy with a certificate of its own.
fn authorities() -> Vec<String> {
    if Path::new(AUTHORITIES).exists() {
        vec![format!("{AUTHORITIES}:{AUTHORITIES}:ro")]
    } else {
        Vec::new()
    }
}

/// What the host lends a build: `/on/the/host:/in/the/build:ro`. `workspace` chooses the toolchain.
///
/// # Errors
/// If the host's toolchain can't build the product's static binaries.
pub(super) fn lent(store: &Store, workspace: &Path) -> Result<Vec<String>> {
    let mut volumes = authorities();
    let sysroot = Tool::new("rustc")
        .args(["--print", "sysroot"])
        .dir(workspace)
        .called("finding the Rust toolchain (rustc --print sysroot)")
        .output()?;
    let sysroot = fs::canonicalize(sysroot.trim())?;
    usable(&sysroot, workspace)?;
    volumes.push(format!("{}:{TOOLCHAIN}:ro", sysroot.display()));

    let variables = store.dir().join("cargo-variables");
    fs::write(&variables, cargo_variables(std::env::vars()))?;
    volumes.push(format!("{}:{CARGO_VARIABLES}:ro", variables.display()));

    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    if let Some(settings) = home
        .map(|home| home.join("config.toml"))
        .filter(|file| file.exists())
    {
        volumes.push(format!("{}:/usr/local/cargo/config.toml:ro", settings.display()));
    }
    Ok(volumes)
}

fn usable(sysroot: &Path, workspace: &Path) -> Result<()> {
    if sysroot == Path::new("/usr") {
        bail!(
            "the host's Rust comes from its distribution, whose libraries can't be lent to a build; install one with rustup \
             (its version is in rust-toolchain.toml)"
        );
    }
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    if sysroot.join("lib/rustlib").join(&target).exists() {
        return Ok(());
    }
    Tool::new("rustup")
        .args(["target", "add", &target])
        .dir(workspace)
        .called(format!(
            "the Rust toolchain at {} has no target {target}, which the images' static binaries need, and adding it",
            sysroot.display()
        ))
        .output()?;
    Ok(())
}

/// The variables that tell cargo how to reach registries, as a shell script. Those about where to build are the
/// Dockerfiles' business.
fn cargo_variables(all: impl Iterator<Item = (String, String)>) -> String {
    const WANTED: &[&str] = &["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTRIES_", "CARGO_SOURCE_"];
    let mut lines: Vec<String> = all
        .filter(|(name, _)| WANTED.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, value)| format!("export {name}='{}'\n", value.replace('\'', r"'\''")))
        .collect();
    lines.sort();
    lines.concat()
}

fn key(parts: &[&str]) -> String {
    let hash = Sha256::digest(parts.join("\n"));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stand-ins must be named as the Dockerfiles name their bases, and the Rust one after the pinned toolchain.
    #[test]
    fn the_dockerfiles_name_no_base_that_has_no_stand_in() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for dockerfile in ["Dockerfile.agent", "Dockerfile.coordinator"] {
            let text = fs::read_to_string(workspace.join(dockerfile)).unwrap();
            let bases = text
                .lines()
                .filter_map(|line| line.strip_prefix("FROM docker.io/"));
            let mut count = 0;
            for base in bases {
                let name = format!("docker.io/{}", base.split(' ').next().unwrap());
                assert!(
                    [DEBIAN, RUST].contains(&name.as_str()),
                    "{dockerfile} names {name}"
                );
                count += 1;
            }
            assert!(count > 0, "{dockerfile} names no base at all");
        }
        let toolchain = fs::read_to_string(workspace.join("rust-toolchain.toml")).unwrap();
        let version = RUST.rsplit(':').next().unwrap().trim_end_matches("-trixie");
        assert!(
            toolchain.contains(&format!("channel = \"{version}\"")),
            "rust-toolchain.toml pins another version than {RUST}"
        );
    }

    #[test]
    fn only_what_reaches_a_mirror_is_taken_from_the_hosts_apt() {
        let dump = "APT::Architecture \"amd64\";\nAcquire::http::Proxy \"http://p:3142\";\n\
                    Acquire::Check-Date \"false\";\nAcquire::Languages \"none\";\nDir::Cache \"x\";\n";
        assert_eq!(
            reaching(dump),
            "Acquire::http::Proxy \"http://p:3142\";\nAcquire::Check-Date \"false\";\n"
        );
    }

    #[test]
    fn cargos_registries_go_along_and_its_target_folder_does_not() {
        let all = [
            ("CARGO_TARGET_DIR", "/x"),
            ("CARGO_NET_RETRY", "it's 3"),
            ("HOME", "/root"),
        ];
        let script = cargo_variables(all.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())));
        assert_eq!(script, "export CARGO_NET_RETRY='it'\\''s 3'\n");
    }
}
