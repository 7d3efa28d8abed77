//! The decision by which of containerd's own ways images are pulled on a node.

use super::facts::NodeOffer;

/// How images are pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// The transfer service, which is what CRI itself uses on such a node, and which tells its progress.
    Transfer,
    /// CRI's `PullImage`.
    Cri {
        /// Why not the other.
        why: String,
    },
}

/// Chooses the transfer service exactly where CRI would use it too, so that an image is unpacked where the kubelet's
/// containers look for it.
pub(crate) fn choose(offer: &NodeOffer) -> Way {
    let cri = |why: String| Way::Cri { why };
    let Some(version) = offer.version else {
        return cri("containerd does not tell its version".into());
    };
    if (version.major, version.minor) < (2, 1) {
        return cri(format!(
            "CRI of containerd {version} pulls without the transfer service"
        ));
    }
    if (version.major, version.minor, version.patch) == (2, 1, 0) {
        return cri("the transfer service of containerd 2.1.0 is broken".into());
    }
    if !offer.transfer {
        return cri("the transfer service is not there or not in order".into());
    }
    if !offer.images.known {
        return cri("containerd's configuration could not be read".into());
    }
    if let Some(setting) = offer.images.local_pull {
        return cri(format!(
            "CRI pulls without the transfer service because of {setting}"
        ));
    }
    if !offer.images.unpacks.contains(&offer.images.snapshotter) {
        return cri(format!(
            "the transfer service does not unpack for the snapshotter {}",
            offer.images.snapshotter
        ));
    }
    Way::Transfer
}

/// Whether images can be pinned: CRI knows the label since 1.6.39, 1.7.3 and 2.0.
pub(crate) fn can_pin(offer: &NodeOffer) -> bool {
    let Some(version) = offer.version else {
        return false;
    };
    match (version.major, version.minor) {
        (1, 6) => version.patch >= 39,
        (1, 7) => version.patch >= 3,
        (major, _) => major >= 2,
    }
}

/// Go's name for the processor that this program runs on.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Whether an image for this processor runs here. What an image does not say is not held against it.
pub(crate) fn runs_here(image: &str, here: &str) -> bool {
    image.is_empty() || image == here || matches!((image, here), ("386", "amd64") | ("arm", "arm64"))
}

#[cfg(test)]
mod tests {
    use super::super::facts::ImageSettings;
    use super::*;
    use crate::config::Version;

    fn offer(version: &str) -> NodeOffer {
        NodeOffer {
            version: Version::parse(version),
            transfer: true,
            images: ImageSettings {
                known: true,
                ..Default::default()
            },
            data: Vec::new(),
        }
    }

    #[test]
    fn the_transfer_service_is_used_exactly_where_cri_uses_it() {
        for version in ["2.1.1", "2.1.9", "2.4.2"] {
            assert_eq!(choose(&offer(version)), Way::Transfer, "{version}");
        }
        for version in ["1.6.20", "1.7.24", "2.0.5", "2.1.0", "?"] {
            assert!(matches!(choose(&offer(version)), Way::Cri { .. }), "{version}");
        }
        let mut local = offer("2.4.2");
        local.images.local_pull = Some("use_local_image_pull");
        let mut other = offer("2.4.2");
        other.images.snapshotter = "zfs".into();
        let mut absent = offer("2.4.2");
        absent.transfer = false;
        let mut unread = offer("2.4.2");
        unread.images.known = false;
        for offer in [local, other, absent, unread] {
            assert!(matches!(choose(&offer), Way::Cri { .. }), "{offer:?}");
        }
    }

    #[test]
    fn an_image_for_another_processor_is_not_for_this_node() {
        for (image, wanted) in [
            ("amd64", true),
            ("", true),
            ("386", true),
            ("s390x", false),
            ("arm64", false),
        ] {
            assert_eq!(runs_here(image, "amd64"), wanted, "{image}");
        }
    }

    #[test]
    fn images_can_be_pinned_where_cri_knows_the_label() {
        for (version, wanted) in [
            ("1.6.20", false),
            ("1.6.39", true),
            ("1.7.2", false),
            ("1.7.24", true),
            ("2.0.0", true),
            ("2.4.2", true),
        ] {
            assert_eq!(can_pin(&offer(version)), wanted, "{version}");
        }
    }
}
