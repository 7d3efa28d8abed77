//! Writes an image of a few files as an OCI archive, byte for byte the same for the same input.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::host::architecture;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Not compressed: the files are small, and whoever pushes them compresses as they like.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The time of everything: a hash over an image must not depend on when it was made.
const EPOCH: &str = "1970-01-01T00:00:00Z";

/// An image from scratch.
pub(super) struct Image<'a> {
    /// `server:1.0`
    pub(super) name: &'a str,
    /// Path in the image without the leading slash, and content; all are executable.
    pub(super) files: &'a [(&'a str, Vec<u8>)],
    /// The command it runs.
    pub(super) entrypoint: &'a [&'a str],
    /// `65534:65534`; empty is root.
    pub(super) user: &'a str,
    /// `8080/tcp`
    pub(super) ports: &'a [&'a str],
    /// Another processor than this machine's.
    pub(super) architecture: Option<&'a str>,
}

impl Image<'_> {
    /// Writes the archive to `path`, which appears only when it is whole.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let partial = path.with_extension("partial");
        let file = File::create(&partial).with_context(|| format!("can't write {}", partial.display()))?;
        self.write_to(file)
            .and_then(|file| file.sync_all().map_err(Into::into))
            .and_then(|()| fs::rename(&partial, path).map_err(Into::into))
            .with_context(|| format!("can't write {}", path.display()))
    }

    fn write_to<W: Write>(&self, to: W) -> Result<W> {
        let layer = self.layer()?;
        let config = serde_json::to_vec(&self.config(&layer)?)?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": [descriptor(LAYER, &layer)],
        }))?;
        let mut index_entry = descriptor(MANIFEST, &manifest);
        index_entry["annotations"] = json!({"org.opencontainers.image.ref.name": self.name});
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [index_entry]}))?;

        let mut archive = tar::Builder::new(to);
        append(
            &mut archive,
            "oci-layout",
            0o644,
            br#"{"imageLayoutVersion":"1.0.0"}"#,
        )?;
        append(&mut archive, "index.json", 0o644, &index)?;
        for blob in [&manifest, &config, &layer] {
            append(&mut archive, &format!("blobs/sha256/{}", hex(blob)), 0o644, blob)?;
        }
        Ok(archive.into_inner()?)
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = tar::Builder::new(Vec::new());
        for (path, content) in self.files {
            append(&mut layer, path, 0o755, content)?;
        }
        Ok(layer.into_inner()?)
    }

    fn config(&self, layer: &[u8]) -> Result<Value> {
        let ports: serde_json::Map<String, Value> = self
            .ports
            .iter()
            .map(|port| ((*port).to_owned(), json!({})))
            .collect();
        Ok(json!({
            "created": EPOCH,
            "architecture": match self.architecture {
                Some(named) => named,
                None => architecture()?,
            },
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Env": ["PATH=/"],
                "User": self.user,
                "ExposedPorts": ports,
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
            "history": [{"created": EPOCH, "comment": "made by the testbed"}],
        }))
    }
}

fn append<W: Write>(archive: &mut tar::Builder<W>, path: &str, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    archive.append_data(&mut header, path, content)?;
    Ok(())
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    format!("sha256:{}", hex(blob))
}

fn hex(blob: &[u8]) -> String {
    Sha256::digest(blob)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::find;
    use crate::tool::Tool;

    fn hello() -> Vec<u8> {
        let files = [("hello", b"#!/bin/nothing".to_vec())];
        let image = Image {
            name: "hello:1",
            files: &files,
            entrypoint: &["/hello", "there"],
            user: "65534:65534",
            ports: &["8080/tcp"],
            architecture: None,
        };
        image.write_to(Vec::new()).unwrap()
    }

    fn entry(archive: &[u8], name: &str) -> Option<Vec<u8>> {
        tar::Archive::new(archive).entries().unwrap().find_map(|entry| {
            let mut entry = entry.unwrap();
            let is_it = entry.path().unwrap().to_str() == Some(name);
            is_it.then(|| {
                let mut bytes = Vec::new();
                std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
                bytes
            })
        })
    }

    fn blob(archive: &[u8], descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap();
        let bytes = entry(archive, &format!("blobs/{}", digest.replace(':', "/"))).unwrap();
        assert_eq!(descriptor["size"], bytes.len());
        assert_eq!(digest, super::digest(&bytes));
        bytes
    }

    #[test]
    fn every_descriptor_leads_to_its_blob() {
        let archive = hello();
        let index: Value = serde_json::from_slice(&entry(&archive, "index.json").unwrap()).unwrap();
        let manifest: Value = serde_json::from_slice(&blob(&archive, &index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&blob(&archive, &manifest["config"])).unwrap();
        let layer = blob(&archive, &manifest["layers"][0]);
        assert_eq!(config["config"]["Entrypoint"], json!(["/hello", "there"]));
        assert_eq!(config["rootfs"]["diff_ids"], json!([digest(&layer)]));
        assert_eq!(entry(&layer, "hello").unwrap(), b"#!/bin/nothing");
    }

    #[test]
    fn the_same_image_is_the_same_bytes() {
        assert_eq!(hello(), hello());
    }

    #[test]
    fn skopeo_reads_it() {
        if find("skopeo").is_none() {
            return; // A testbed installs it; unit tests run on machines without one.
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hello.tar");
        fs::write(&path, hello()).unwrap();
        let said = Tool::new("skopeo")
            .arg("inspect")
            .arg("--config")
            .arg(format!("oci-archive:{}", path.display()))
            .output()
            .unwrap();
        let config: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(config["config"]["User"], "65534:65534");
    }
}
