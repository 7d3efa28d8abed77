//! What the node's kubelet is told by its command line and its file, as far as pulls depend on it.

use serde::Deserialize;
use serde_yaml_ng::Value;

use crate::host::{HostRoot, Systemd};

const UNITS: [&str; 3] = [
    "kubelet.service",
    "snap.kubelet-eks.daemon.service",
    "kubelite.service",
];
const DEFAULT_CONFIG: &str = "/var/lib/kubelet/config.yaml";
const LIMIT: usize = 1024 * 1024;

/// The kubelet's own command line and its unit's environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Kubelet {
    /// Empty where no kubelet was found.
    pub(crate) arguments: Vec<String>,
    /// Name of its unit.
    pub(crate) unit: String,
}

impl Kubelet {
    /// Finds the kubelet through its unit.
    pub(crate) async fn find(root: &HostRoot, systemd: &Systemd) -> Self {
        for unit in UNITS {
            let Ok(service) = systemd.service(unit).await else {
                continue;
            };
            if service.main_pid == 0 {
                continue;
            }
            let line = root.read(&format!("/proc/{}/cmdline", service.main_pid), LIMIT);
            let arguments = line.unwrap_or_default();
            return Self {
                arguments: arguments
                    .split(|byte| *byte == 0)
                    .filter(|argument| !argument.is_empty())
                    .map(|argument| String::from_utf8_lossy(argument).into_owned())
                    .collect(),
                unit: unit.to_owned(),
            };
        }
        Self::default()
    }

    /// The value of a flag, the last one where it stands twice.
    pub(crate) fn flag(&self, name: &str) -> Option<&str> {
        let mut found = None;
        let mut arguments = self.arguments.iter().skip(1);
        while let Some(argument) = arguments.next() {
            let Some(body) = argument.strip_prefix("--") else {
                continue;
            };
            match body.split_once('=') {
                Some((key, value)) if key == name => found = Some(value),
                None if body == name => found = arguments.next().map(String::as_str),
                _ => {}
            }
        }
        found.filter(|value| !value.is_empty())
    }

    /// The kubelet's thresholds, in percent of the file system that must stay free; `None` when its file cannot be
    /// read.
    pub(crate) fn thresholds(&self, root: &HostRoot, size: u64) -> Option<f64> {
        let path = self.flag("config").unwrap_or(DEFAULT_CONFIG);
        let bytes = root.read(path, LIMIT).ok()?;
        let config: Config = serde_yaml_ng::from_slice(&bytes).ok()?;
        Some(config.needed(self.flag("eviction-hard"), size))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Config {
    eviction_hard: Option<std::collections::BTreeMap<String, Value>>,
    eviction_soft: Option<std::collections::BTreeMap<String, Value>>,
    #[serde(rename = "imageGCHighThresholdPercent")]
    image_gc_high: Option<u32>,
}

impl Config {
    /// The largest share that anything of the kubelet wants free: hard and soft eviction, and the collection of
    /// unused images, which takes those first that nobody has used yet.
    fn needed(&self, hard_flag: Option<&str>, size: u64) -> f64 {
        let signals = ["nodefs.available", "imagefs.available", "containerfs.available"];
        let share = |text: &str| share(text, size);
        let mut needed = 0_f64;
        match (hard_flag, &self.eviction_hard) {
            (Some(flag), _) => {
                for part in flag.split(',') {
                    if let Some((signal, value)) = part.split_once('<')
                        && signals.contains(&signal.trim())
                    {
                        needed = needed.max(share(value));
                    }
                }
            }
            // The kubelet's defaults hold only where nothing is set.
            (None, None) => needed = needed.max(15.0),
            (None, Some(_)) => {}
        }
        let hard = if hard_flag.is_some() {
            None
        } else {
            self.eviction_hard.as_ref()
        };
        for (signal, value) in hard.into_iter().chain(self.eviction_soft.as_ref()).flatten() {
            if signals.contains(&signal.as_str())
                && let Some(text) = value.as_str()
            {
                needed = needed.max(share(text));
            }
        }
        let high = self.image_gc_high;
        needed.max(100.0 - f64::from(high.unwrap_or(85).min(100)))
    }
}

/// A threshold, `15%` or a quantity such as `10Gi`, in percent of a file system.
fn share(text: &str, size: u64) -> f64 {
    let text = text.trim();
    if let Some(percent) = text.strip_suffix('%') {
        return percent.trim().parse().unwrap_or(0.0);
    }
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        "Ti" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return 0.0,
    };
    number.parse::<f64>().unwrap_or(0.0) * factor * 100.0 / (size.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GI: u64 = 1024 * 1024 * 1024;

    fn kubelet(arguments: &[&str]) -> Kubelet {
        Kubelet {
            arguments: std::iter::once("/usr/bin/kubelet")
                .chain(arguments.iter().copied())
                .map(str::to_owned)
                .collect(),
            unit: "kubelet.service".into(),
        }
    }

    #[test]
    fn flags_are_read_in_both_forms_and_the_last_one_counts() {
        let kubelet = kubelet(&["--config", "/a", "--v=2", "--config=/b", "--empty="]);
        assert_eq!(kubelet.flag("config"), Some("/b"));
        assert_eq!(kubelet.flag("v"), Some("2"));
        assert_eq!(kubelet.flag("empty"), None);
        assert_eq!(kubelet.flag("absent"), None);
    }

    fn needed(yaml: &str, arguments: &[&str]) -> Option<f64> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("var/lib/kubelet")).unwrap();
        std::fs::write(dir.path().join("var/lib/kubelet/config.yaml"), yaml).unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        kubelet(arguments).thresholds(&root, 100 * GI)
    }

    #[test]
    fn the_largest_threshold_counts_and_defaults_hold_only_where_nothing_is_set() {
        for (yaml, wanted) in [
            ("kind: KubeletConfiguration\n", 15.0),
            (
                "evictionHard: {nodefs.available: 5%}\nimageGCHighThresholdPercent: 99\n",
                5.0,
            ),
            ("evictionHard: {nodefs.available: 5%}\n", 15.0),
            (
                "evictionHard: {imagefs.available: 10Gi}\nevictionSoft: {nodefs.available: 20Gi}\nimageGCHighThresholdPercent: 95\n",
                20.0,
            ),
            (
                "evictionHard: {memory.available: 100Mi}\nimageGCHighThresholdPercent: 100\n",
                0.0,
            ),
        ] {
            assert_eq!(needed(yaml, &[]), Some(wanted), "{yaml}");
        }
        let flag = ["--eviction-hard=memory.available<100Mi,nodefs.available<25%"];
        assert_eq!(
            needed("evictionHard: {nodefs.available: 50%}\n", &flag),
            Some(25.0)
        );
    }

    #[test]
    fn a_file_that_is_elsewhere_is_found_by_the_flag() {
        assert_eq!(needed("", &["--config=/nowhere"]), None);
    }
}
