//! The image registry in the fabric, and how images get into it.

use std::fs::{self, File};
use std::io::Read;
use std::net::SocketAddrV4;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::address::{AddressPlan, REGISTRY};
use crate::cgroups::Cgroups;
use crate::control_plane::http_get;
use crate::fabric::Fabric;
use crate::host::find;
use crate::layout::State;
use crate::parts::Parts;
use crate::process::Launch;

const ROLE: &str = "registry";
const PORT: u16 = 5000;

/// Starts the registry and waits until it answers.
///
/// # Errors
/// If it does not come up; with its log's end.
pub fn start(
    state: &State,
    parts: &Parts,
    fabric: &Fabric,
    cgroups: &Cgroups,
    plan: AddressPlan,
) -> Result<()> {
    let blobs = state.control_plane().join("registry");
    fs::create_dir_all(&blobs)?;
    let config = state.control_plane().join("registry.yaml");
    fs::write(&config, render_config(plan, &blobs))
        .with_context(|| format!("can't write {}", config.display()))?;
    let mut args = fabric.enter();
    args.extend([parts.program("registry").into(), "serve".into(), config.into()]);
    let registry = Launch {
        role: ROLE,
        args,
        env: vec![("OTEL_TRACES_EXPORTER", "none".into())],
        cgroups: &cgroups.make_control_plane()?,
        run: &state.run(),
        logs: &state.logs(),
    }
    .start()?;
    registry.wait_until("to answer", Duration::from_secs(20), || {
        let answer = fabric.within(|| http_get(SocketAddrV4::new(plan.fabric(), PORT), "/v2/"))?;
        Ok(answer.starts_with("HTTP/1.1 200"))
    })
}

fn render_config(plan: AddressPlan, blobs: &Path) -> String {
    format!(
        "version: 0.1
log:
  level: warn
  accesslog: {{disabled: false}}
storage:
  filesystem: {{rootdirectory: \"{}\"}}
  delete: {{enabled: true}}
http:
  addr: {}:{PORT}
",
        blobs.display(),
        plan.fabric()
    )
}

/// Puts an image into the registry as `name` (`server:1.0`). The image is the path of an OCI archive, a Docker archive or an
/// OCI layout, or else the name of an image that Docker or buildah has on this host.
///
/// # Errors
/// If there is no such image, or the registry refuses it.
pub fn push(fabric: &Fabric, image: &str, name: &str) -> Result<()> {
    let target = target(name)?;
    let mut refused = Vec::new();
    for source in sources(image)? {
        let copied = fabric
            .run_with_names("skopeo")
            .args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"])
            // An index keeps its digest only when it is copied whole.
            .arg("--all")
            .args([&source, &target])
            .called(format!("pushing {image} as {name}"))
            .output();
        match copied {
            Ok(_) => return Ok(()),
            Err(error) => refused.push(format!("{source}: {error}")),
        }
    }
    bail!("{}", refused.join("\n"))
}

fn target(name: &str) -> Result<String> {
    let name = name
        .strip_prefix(REGISTRY)
        .map_or(name, |rest| rest.trim_start_matches('/'));
    let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if !tagged {
        bail!("{name:?} names no tag; write it as name:tag, for example server:1.0");
    }
    Ok(format!("docker://{REGISTRY}/{name}"))
}

/// skopeo's names for what the image may be, the likeliest first.
fn sources(image: &str) -> Result<Vec<String>> {
    let path = Path::new(image);
    if path.is_dir() {
        return Ok(vec![format!("oci:{image}")]);
    }
    if path.is_file() {
        let kind = if holds_oci_layout(path)? {
            "oci-archive"
        } else {
            "docker-archive"
        };
        return Ok(vec![format!("{kind}:{image}")]);
    }
    if image.ends_with(".tar") || image.starts_with(['/', '.']) {
        bail!("there is no file {image}");
    }
    let mut sources = Vec::new();
    if find("docker").is_some() {
        sources.push(format!("docker-daemon:{image}"));
    }
    sources.push(format!("containers-storage:{image}"));
    Ok(sources)
}

/// Looks for the entry `oci-layout` in a tar file: what tells an OCI archive from a Docker archive.
fn holds_oci_layout(path: &Path) -> Result<bool> {
    const BLOCK: u64 = 512;
    let mut file = File::open(path).with_context(|| format!("can't read {}", path.display()))?;
    let mut header = [0; BLOCK as usize];
    let mut at = 0;
    while file.read_exact(&mut header).is_ok() && header[0] != 0 {
        let name = header[..100].split(|byte| *byte == 0).next().unwrap_or_default();
        if name == b"oci-layout" || name == b"./oci-layout" {
            return Ok(true);
        }
        let digits: String = header[124..136]
            .iter()
            .map(|byte| char::from(*byte))
            .filter(char::is_ascii_digit)
            .collect();
        let size =
            u64::from_str_radix(&digits, 8).with_context(|| format!("{} is no tar file", path.display()))?;
        at += BLOCK + size.div_ceil(BLOCK) * BLOCK;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(at))?;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::Tool;

    #[test]
    fn a_name_is_taken_with_or_without_the_registry() {
        assert_eq!(
            target("server:1.0").unwrap(),
            "docker://registry.testbed:5000/server:1.0"
        );
        assert_eq!(
            target("registry.testbed:5000/a/b:2").unwrap(),
            "docker://registry.testbed:5000/a/b:2"
        );
    }

    #[test]
    fn a_name_without_a_tag_is_refused_with_an_example() {
        let error = target("server").unwrap_err().to_string();
        assert!(error.contains("server:1.0"), "{error}");
    }

    #[test]
    fn tells_an_oci_archive_from_a_docker_archive() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["first", "oci-layout", "manifest.json"] {
            fs::write(dir.path().join(name), "x".repeat(700)).unwrap();
        }
        let tar = |file: &str, entries: &[&str]| {
            let path = dir.path().join(file);
            Tool::new("tar")
                .arg("cf")
                .arg(&path)
                .args(entries)
                .dir(dir.path())
                .output()
                .unwrap();
            path
        };
        assert!(holds_oci_layout(&tar("oci.tar", &["first", "oci-layout"])).unwrap());
        assert!(!holds_oci_layout(&tar("docker.tar", &["first", "manifest.json"])).unwrap());
    }

    #[test]
    fn a_path_that_is_not_there_is_not_taken_for_a_name() {
        assert!(sources("/no/such.tar").is_err());
    }
}
