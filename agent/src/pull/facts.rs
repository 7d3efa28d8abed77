//! What a node offers for pulls, read once for each command.

use std::sync::Arc;

use containerd_client::services::v1::PluginsRequest;
use containerd_client::services::v1::introspection_client::IntrospectionClient;

use crate::config::{Tree, Version};
use crate::containerd::{Daemon, DaemonSettings};
use crate::host::HostRoot;

const IMAGES: &str = "io.containerd.cri.v1.images";
const CRI: &str = "io.containerd.grpc.v1.cri";
const TRANSFER: &str = "io.containerd.transfer.v1";
const STREAMING: &str = "io.containerd.streaming.v1";
const DEFAULT_SNAPSHOTTER: &str = "overlayfs";

/// What decides how images are pulled on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeOffer {
    /// As containerd says it; `None` when it did not answer.
    pub(crate) version: Option<Version>,
    /// The transfer and streaming plugins are there and in order.
    pub(crate) transfer: bool,
    /// What CRI's part of the configuration says about images.
    pub(crate) images: ImageSettings,
    /// Folders of containerd's data on the host: content, snapshots.
    pub(crate) data: Vec<String>,
}

/// CRI's settings for images. containerd 2.x does not report them, so they come from its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageSettings {
    /// The files could be read and understood.
    pub(crate) known: bool,
    pub(crate) snapshotter: String,
    /// A setting with which CRI itself does not use the transfer service.
    pub(crate) local_pull: Option<&'static str>,
    /// Folders with a `hosts.toml` for each registry, the first one counts; empty where none is set.
    pub(crate) hosts: Vec<String>,
    /// Headers for registries.
    pub(crate) headers: Vec<(String, String)>,
    /// Snapshotters that the transfer service unpacks for.
    pub(crate) unpacks: Vec<String>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            known: false,
            snapshotter: DEFAULT_SNAPSHOTTER.to_owned(),
            local_pull: None,
            hosts: Vec::new(),
            headers: Vec::new(),
            unpacks: vec![DEFAULT_SNAPSHOTTER.to_owned()],
        }
    }
}

impl NodeOffer {
    /// Asks the daemon and reads its files. What cannot be read stays at its default, with which nothing but CRI's
    /// own pull is chosen.
    pub(crate) async fn read(daemon: &Daemon, settings: Option<&DaemonSettings>) -> Self {
        let version = daemon.version().await.ok();
        let answer = IntrospectionClient::new(daemon.channel())
            .plugins(PluginsRequest::default())
            .await;
        let plugins = answer
            .map(|answer| answer.into_inner().plugins)
            .unwrap_or_default();
        let in_order = |kind: &str| {
            plugins
                .iter()
                .any(|plugin| plugin.r#type == kind && plugin.init_err.is_none())
        };
        let images = settings
            .and_then(|settings| ImageSettings::read(settings, version.as_deref().and_then(Version::parse)))
            .unwrap_or_default();
        let root_of = |kind: &str, id: &str| {
            let plugin = plugins
                .iter()
                .find(|plugin| plugin.r#type == kind && plugin.id == id)?;
            plugin.exports.get("root").cloned()
        };
        let data = [
            root_of("io.containerd.content.v1", "content"),
            root_of("io.containerd.snapshotter.v1", &images.snapshotter),
        ];
        Self {
            version: version.as_deref().and_then(Version::parse),
            transfer: in_order(TRANSFER) && in_order(STREAMING),
            images,
            data: data.into_iter().flatten().collect(),
        }
    }

    /// The first of the node's folders that says anything about this registry. The transfer service takes one
    /// folder only and does not split a list.
    pub(crate) fn hosts_for(&self, root: &Arc<HostRoot>, registry: &str) -> Option<&str> {
        let with_port = match registry.rsplit_once(':') {
            Some((host, port)) => format!("{host}_{port}_"),
            None => registry.to_owned(),
        };
        self.images
            .hosts
            .iter()
            .find(|folder| {
                [&with_port, registry, "_default"]
                    .iter()
                    .any(|name| root.exists(&format!("{folder}/{name}")))
            })
            .map(String::as_str)
    }
}

impl ImageSettings {
    /// Reads the files; `None` when one of them is not understood.
    fn read(settings: &DaemonSettings, version: Option<Version>) -> Option<Self> {
        let mut tree = match settings.file.as_deref() {
            Some(bytes) => Tree::parse(bytes)?,
            None => Tree::Table(Default::default()),
        };
        for import in &settings.imports {
            tree.overlay(&Tree::parse(&import.bytes)?);
        }
        Some(Self::of(&tree, version))
    }

    fn of(tree: &Tree, version: Option<Version>) -> Self {
        // A file of version 2 has the old id, which containerd 2.x takes over into the new one.
        let new = ["plugins", IMAGES];
        let old = ["plugins", CRI];
        let old_containerd = ["plugins", CRI, "containerd"];
        let is_new = tree.table(&new).is_some();
        let at = |key: &'static str, in_containerd: bool| -> Vec<&'static str> {
            let mut path = match (is_new, in_containerd) {
                (true, _) => new.to_vec(),
                (false, true) => old_containerd.to_vec(),
                (false, false) => old.to_vec(),
            };
            path.push(key);
            path
        };
        let registry = |key: &'static str| {
            let mut path = at("registry", false);
            path.push(key);
            path
        };
        let is_set = |path: Vec<&str>| tree.table(&path).is_some_and(|table| !table.is_empty());
        let local_pull = if tree.boolean(&at("use_local_image_pull", false)) == Some(true) {
            Some("use_local_image_pull")
        } else if tree.boolean(&at("disable_snapshot_annotations", true)) == Some(false) {
            Some("disable_snapshot_annotations = false")
        } else if tree.boolean(&at("discard_unpacked_layers", true)) == Some(true) {
            Some("discard_unpacked_layers")
        } else if is_set(registry("mirrors")) {
            Some("registry.mirrors")
        } else if is_set(registry("configs")) {
            Some("registry.configs")
        } else if is_set(registry("auths")) {
            Some("registry.auths")
        } else if tree
            .get(&at("max_concurrent_downloads", false))
            .is_some_and(|value| *value != Tree::Integer(3))
        {
            Some("max_concurrent_downloads")
        } else if tree.boolean(&at("image_pull_with_sync_fs", false)) == Some(true) {
            Some("image_pull_with_sync_fs")
        } else {
            None
        };
        let mut hosts: Vec<String> = tree
            .text(&registry("config_path"))
            .unwrap_or_default()
            .split(':')
            .filter(|folder| !folder.is_empty())
            .map(str::to_owned)
            .collect();
        // Since 2.2 these are looked at where nothing is set.
        let has_default = version.is_some_and(|version| (version.major, version.minor) >= (2, 2));
        if hosts.is_empty() && has_default {
            hosts = vec!["/etc/containerd/certs.d".into(), "/etc/docker/certs.d".into()];
        }
        let headers = tree
            .table(&registry("headers"))
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| match value {
                Tree::Array(values) => match values.first() {
                    Some(Tree::Text(text)) => Some((key.clone(), text.clone())),
                    _ => None,
                },
                Tree::Text(text) => Some((key.clone(), text.clone())),
                _ => None,
            })
            .collect();
        let unpacks = match tree.get(&["plugins", "io.containerd.transfer.v1.local", "unpack_config"]) {
            None => vec![DEFAULT_SNAPSHOTTER.to_owned()],
            Some(Tree::Tables(entries) | Tree::Array(entries)) => entries
                .iter()
                .filter_map(|entry| entry.text(&["snapshotter"]).map(str::to_owned))
                .collect(),
            Some(_) => Vec::new(),
        };
        Self {
            known: true,
            snapshotter: tree
                .text(&at("snapshotter", true))
                .filter(|name| !name.is_empty())
                .unwrap_or(DEFAULT_SNAPSHOTTER)
                .to_owned(),
            local_pull,
            hosts,
            headers,
            unpacks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str, version: &str) -> ImageSettings {
        ImageSettings::of(&Tree::parse(text.as_bytes()).unwrap(), Version::parse(version))
    }

    #[test]
    fn settings_are_found_under_the_ids_of_both_families() {
        let new = settings(
            "[plugins.'io.containerd.cri.v1.images']\nsnapshotter = 'zfs'\nregistry = {config_path = '/a:/b'}\n",
            "2.1.9",
        );
        let old = settings(
            "[plugins.'io.containerd.grpc.v1.cri']\ncontainerd = {snapshotter = 'zfs'}\nregistry = {config_path = '/a:/b'}\n",
            "2.1.9",
        );
        assert_eq!(new, old);
        assert_eq!((new.snapshotter.as_str(), new.local_pull), ("zfs", None));
        assert_eq!(new.hosts, ["/a", "/b"]);
        assert_eq!(new.unpacks, ["overlayfs"]);
    }

    #[test]
    fn what_makes_cri_pull_by_itself_is_named() {
        for (line, wanted) in [
            ("use_local_image_pull = true", "use_local_image_pull"),
            ("discard_unpacked_layers = true", "discard_unpacked_layers"),
            ("max_concurrent_downloads = 8", "max_concurrent_downloads"),
            ("registry = {configs = {'a.io' = {}}}", "registry.configs"),
        ] {
            let text = format!("[plugins.'io.containerd.cri.v1.images']\n{line}\n");
            assert_eq!(settings(&text, "2.4.2").local_pull, Some(wanted));
        }
        let stock = "[plugins.'io.containerd.cri.v1.images']\nmax_concurrent_downloads = 3\ndiscard_unpacked_layers = false\n";
        assert_eq!(settings(stock, "2.4.2").local_pull, None);
    }

    #[test]
    fn folders_that_nobody_set_are_looked_at_since_2_2() {
        assert!(settings("version = 3", "2.1.9").hosts.is_empty());
        assert_eq!(
            settings("version = 3", "2.2.0").hosts,
            ["/etc/containerd/certs.d", "/etc/docker/certs.d"]
        );
    }

    #[test]
    fn snapshotters_of_the_transfer_service_are_listed() {
        let text = "[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]\nplatform = 'linux'\nsnapshotter = 'zfs'\n";
        assert_eq!(settings(text, "2.4.2").unpacks, ["zfs"]);
        let none = "[plugins.'io.containerd.transfer.v1.local']\nunpack_config = []\n";
        assert!(settings(none, "2.4.2").unpacks.is_empty());
    }

    #[test]
    fn the_first_folder_that_knows_the_registry_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/other.io")).unwrap();
        std::fs::create_dir_all(dir.path().join("b/r.io_5000_")).unwrap();
        std::fs::create_dir_all(dir.path().join("c/_default")).unwrap();
        let root = Arc::new(HostRoot::open(dir.path()).unwrap());
        let offer = NodeOffer {
            images: ImageSettings {
                hosts: vec!["/a".into(), "/b".into(), "/c".into()],
                ..Default::default()
            },
            ..Default::default()
        };
        assert_eq!(offer.hosts_for(&root, "r.io:5000"), Some("/b"));
        assert_eq!(offer.hosts_for(&root, "other.io"), Some("/a"));
        assert_eq!(offer.hosts_for(&root, "x.io"), Some("/c"));
    }
}
