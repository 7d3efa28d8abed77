//! The last report of each node, kept in ConfigMaps so that there is an answer when the agent is gone.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tracing::warn;

/// The ConfigMaps among which nodes are spread: one alone could not hold the reports of thousands.
pub(crate) const SHARDS: u8 = 16;
/// Longest report of a node, in bytes.
const LONGEST: usize = 4096;
/// The API server takes 1 MiB; the names and the rest need some of it.
const FULLEST: usize = 900_000;
/// A ConfigMap is written at most this often.
const EVERY: SignedDuration = SignedDuration::from_secs(5);

/// The name of the ConfigMap of a shard.
pub(crate) fn name(shard: u8) -> String {
    format!("quartermaster-reports-{shard}")
}

/// Where the report of a node is.
pub(crate) fn shard_of(node: &str) -> u8 {
    Sha256::digest(node)[0] % SHARDS
}

/// A report as a key of a ConfigMap can be named: a Node's name is one, but it may be too long.
pub(crate) fn key_of(node: &str) -> String {
    crate::node::label_value(node)
}

/// Reports that are not written yet.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// What is under way on a node.
    open: BTreeMap<String, Open>,
    /// What is known to be in the ConfigMaps, or is about to be, by shard: thousands of nodes, so no more than its traces.
    kept: BTreeMap<u8, BTreeMap<String, Trace>>,
    /// What is not written yet; `None` takes it away.
    changed: BTreeMap<u8, BTreeMap<String, Option<String>>>,
    written_at: Option<Timestamp>,
}

/// A report that has not ended.
#[derive(Debug, Default)]
struct Open {
    lines: Vec<String>,
    /// Images that were there already.
    unchanged: usize,
}

/// By which a report is known again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Trace {
    hash: u64,
    length: usize,
}

impl Trace {
    fn of(text: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Self {
            hash: hasher.finish(),
            length: text.len(),
        }
    }
}

impl Reports {
    /// Something was ordered of a node: its report begins.
    pub(super) fn begin(&mut self, node: &str, line: String) {
        let open = Open {
            lines: vec![line],
            unchanged: 0,
        };
        self.open.insert(node.to_owned(), open);
    }

    /// Something happened there.
    pub(super) fn line(&mut self, node: &str, line: String) {
        let lines = &mut self.open.entry(node.to_owned()).or_default().lines;
        // A pull may tell of a thousand images; the first of them and the end are what is asked for.
        if lines.len() < 60 {
            lines.push(line);
        }
    }

    /// An image that was asked for was there already.
    pub(super) fn unchanged(&mut self, node: &str) {
        self.open.entry(node.to_owned()).or_default().unchanged += 1;
    }

    /// A pull came to its end. Where all was there already, the report before tells more.
    pub(super) fn end_if_anything_happened(&mut self, node: &str, line: String) {
        if self.open.get(node).is_some_and(|open| open.lines.len() > 1) {
            self.end(node, line);
        } else {
            self.open.remove(node);
        }
    }

    /// It came to its end: the report takes the place of the one before.
    pub(super) fn end(&mut self, node: &str, line: String) {
        let Open { mut lines, unchanged } = self.open.remove(node).unwrap_or_default();
        if unchanged > 0 {
            lines.push(format!("  {unchanged} images were there"));
        }
        let text = bounded(&lines, &line);
        let (shard, key) = (shard_of(node), key_of(node));
        let trace = Trace::of(&text);
        if self.kept.entry(shard).or_default().insert(key.clone(), trace) != Some(trace) {
            self.change(shard, key, Some(text));
        }
    }

    /// A node is gone, and its report with it.
    pub(super) fn forget(&mut self, node: &str) {
        self.open.remove(node);
        let (shard, key) = (shard_of(node), key_of(node));
        if self.kept.entry(shard).or_default().remove(&key).is_some() {
            self.change(shard, key, None);
        }
    }

    fn change(&mut self, shard: u8, key: String, text: Option<String>) {
        self.changed.entry(shard).or_default().insert(key, text);
    }

    /// When there is something to write.
    pub(super) fn due(&self) -> Option<Timestamp> {
        (!self.changed.is_empty()).then(|| self.written_at.map_or(Timestamp::UNIX_EPOCH, |at| at + EVERY))
    }

    /// What is to be written now, by shard.
    pub(super) fn take(&mut self, now: Timestamp) -> BTreeMap<u8, Value> {
        self.written_at = Some(now);
        let mut patches = BTreeMap::new();
        for (shard, changed) in std::mem::take(&mut self.changed) {
            let kept = self.kept.entry(shard).or_default();
            let full = kept.values().map(|trace| trace.length).sum::<usize>() > FULLEST;
            let mut data = Map::new();
            for (key, text) in changed {
                let value = text.filter(|_| !full).map_or(Value::Null, Value::String);
                if value.is_null() {
                    kept.remove(&key);
                }
                data.insert(key, value);
            }
            patches.insert(shard, json!({"data": data}));
        }
        patches
    }
}

/// The first lines, as many as there is room for, and the last one.
fn bounded(lines: &[String], last: &str) -> String {
    const LEFT_OUT: &str = "…\n";
    let last = &last[..last.floor_char_boundary(LONGEST / 2)];
    let mut text = String::new();
    for line in lines {
        if text.len() + line.len() + 1 + LEFT_OUT.len() + last.len() > LONGEST {
            text.push_str(LEFT_OUT);
            break;
        }
        text.push_str(line);
        text.push('\n');
    }
    text + last
}

/// Effect: writes the changed parts of some ConfigMaps, and makes those that are not there yet.
pub(super) async fn write(client: kube::Client, namespace: String, patches: BTreeMap<u8, Value>) {
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    for (shard, patch) in patches {
        let name = name(shard);
        let merge = Patch::Merge(&patch);
        let written = match maps.patch(&name, &PatchParams::default(), &merge).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {
                let mut map = ConfigMap::default();
                map.metadata.name = Some(name.clone());
                let labels = [("app.kubernetes.io/name".to_owned(), "quartermaster".to_owned())];
                map.metadata.labels = Some(labels.into());
                match maps.create(&Default::default(), &map).await {
                    Ok(_) => maps.patch(&name, &PatchParams::default(), &merge).await,
                    Err(error) => Err(error),
                }
            }
            other => other,
        };
        if let Err(error) = written {
            warn!(%error, name, "reports could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn a_report_is_written_when_it_ends_and_only_if_it_says_something_new() {
        let mut reports = Reports::default();
        reports.begin("a", "Install".into());
        reports.line("a", "detect: 5 ms".into());
        assert_eq!(reports.due(), None);
        reports.end("a", "done".into());
        let patches = reports.take(at(0));
        assert_eq!(
            patches[&shard_of("a")]["data"]["a"],
            "Install\ndetect: 5 ms\ndone"
        );
        reports.begin("a", "Install".into());
        reports.line("a", "detect: 5 ms".into());
        reports.end("a", "done".into());
        assert_eq!(reports.due(), None);
        reports.end("a", "failed".into());
        assert_eq!(reports.due(), Some(at(5)));
    }

    #[test]
    fn a_pull_that_found_everything_there_leaves_the_report_before_it() {
        let mut reports = Reports::default();
        reports.begin("a", "Pull".into());
        reports.unchanged("a");
        reports.end_if_anything_happened("a", "done".into());
        assert_eq!(reports.due(), None);
        reports.begin("a", "Pull".into());
        reports.unchanged("a");
        reports.line("a", "  image: pulled".into());
        reports.unchanged("a");
        reports.end_if_anything_happened("a", "done".into());
        assert_eq!(
            reports.take(at(0))[&shard_of("a")]["data"]["a"],
            "Pull\n  image: pulled\n  2 images were there\ndone"
        );
    }

    #[test]
    fn a_report_has_a_bound_and_keeps_its_end() {
        let mut reports = Reports::default();
        reports.begin("a", "begin".into());
        for _ in 0..100 {
            reports.line("a", "x".repeat(500));
        }
        reports.end("a", "the end".into());
        let patches = reports.take(at(0));
        let text = patches[&shard_of("a")]["data"]["a"]
            .as_str()
            .expect("a text")
            .to_owned();
        assert!(text.len() <= LONGEST, "{}", text.len());
        assert!(text.ends_with("the end"));
        reports.end("a", "ä".repeat(5000));
        let patches = reports.take(at(9));
        assert!(
            patches[&shard_of("a")]["data"]["a"]
                .as_str()
                .is_some_and(|text| text.len() <= LONGEST)
        );
    }

    #[test]
    fn the_report_of_a_node_that_is_gone_goes() {
        let mut reports = Reports::default();
        reports.end("a", "done".into());
        reports.take(at(0));
        reports.forget("a");
        assert_eq!(reports.take(at(9))[&shard_of("a")]["data"]["a"], Value::Null);
        reports.forget("never seen");
        assert_eq!(reports.due(), None);
    }

    #[test]
    fn a_shard_never_exceeds_what_the_api_server_takes() {
        let mut reports = Reports::default();
        let nodes = (0..20_000)
            .map(|i| format!("node-{i}"))
            .filter(|node| shard_of(node) == 0);
        for node in nodes.take(400) {
            reports.end(&node, "x".repeat(4000));
        }
        let size = serde_json::to_vec(&reports.take(at(0))[&0]).expect("JSON").len();
        assert!(size < 1_000_000, "{size}");
    }
}
