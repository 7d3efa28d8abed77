//! The decision whether a daemon on a changed configuration serves what it should: what the untouched one serves,
//! and exactly our handler more, or less.

use std::collections::BTreeSet;

use serde_json::Value;
use thiserror::Error;

use super::Served;

/// What the change is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected<'a> {
    /// This handler is new.
    Added(&'a str),
    /// This handler is gone.
    Removed(&'a str),
}

/// What is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Difference {
    /// The new handler is not there.
    #[error("the handler {0:?} is not served")]
    Missing(String),
    /// The removed handler is still there.
    #[error("the handler {0:?} is still served")]
    StillThere(String),
    /// Another handler came or went.
    #[error("the handlers would change from {before} to {after}")]
    Handlers {
        /// Names, joined.
        before: String,
        /// Names, joined.
        after: String,
    },
    /// The default runtime changed.
    #[error("the default runtime would change from {before:?} to {after:?}")]
    DefaultRuntime {
        /// Its name.
        before: String,
        /// Its name.
        after: String,
    },
    /// An option changed.
    #[error("the setting {path} would change from {before} to {after}")]
    Setting {
        /// Where it stands.
        path: String,
        /// As JSON.
        before: String,
        /// As JSON.
        after: String,
    },
    /// The new handler's cgroup driver is not that of the default runtime.
    #[error("the default runtime has SystemdCgroup = {wanted}, the new handler has not")]
    CgroupDriver {
        /// That of the default runtime.
        wanted: bool,
    },
    /// The daemon is less ready than before.
    #[error("the runtime would not be ready any more: {0}")]
    NotReady(String),
}

/// Compares what two daemons serve.
///
/// # Errors
/// The first [`Difference`] that should not be.
pub fn compare(before: &Served, after: &Served, expected: Expected<'_>) -> Result<(), Difference> {
    let ours = match expected {
        Expected::Added(name) => {
            if !after.serves(name) {
                return Err(Difference::Missing(name.to_owned()));
            }
            name
        }
        Expected::Removed(name) => {
            if after.runtimes.contains_key(name) || after.handlers.contains(name) {
                return Err(Difference::StillThere(name.to_owned()));
            }
            name
        }
    };
    if before.default_runtime != after.default_runtime {
        return Err(Difference::DefaultRuntime {
            before: before.default_runtime.clone(),
            after: after.default_runtime.clone(),
        });
    }
    let configured = |served: &Served| -> BTreeSet<String> {
        let names = served.runtimes.keys().cloned();
        names.filter(|name| name != ours).collect()
    };
    let reported = |served: &Served| -> BTreeSet<String> {
        let names = served.handlers.iter().cloned();
        names.filter(|name| name != ours).collect()
    };
    for (left, right) in [
        (configured(before), configured(after)),
        (reported(before), reported(after)),
    ] {
        if left != right {
            let joined = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Difference::Handlers {
                before: joined(left),
                after: joined(right),
            });
        }
    }
    for (name, left) in before.runtimes.iter().filter(|(name, _)| *name != ours) {
        let right = &after.runtimes[name];
        if let Some((path, left, right)) = first_difference(left, right, &format!("runtimes.{name}")) {
            return Err(setting(path, left, right));
        }
    }
    if let Some((path, left, right)) = first_difference(&before.settings, &after.settings, "") {
        return Err(setting(path.trim_start_matches('.').to_owned(), left, right));
    }
    if before.runtime_ready && !after.runtime_ready {
        return Err(Difference::NotReady(after.complaint.clone()));
    }
    if let Expected::Added(name) = expected {
        let wanted = after.systemd_cgroup(&after.default_runtime).unwrap_or(false);
        if after.systemd_cgroup(name).unwrap_or(false) != wanted {
            return Err(Difference::CgroupDriver { wanted });
        }
    }
    Ok(())
}

fn setting(path: String, before: Option<&Value>, after: Option<&Value>) -> Difference {
    let shown = |value: Option<&Value>| value.map_or("unset".to_owned(), Value::to_string);
    Difference::Setting {
        path,
        before: shown(before),
        after: shown(after),
    }
}

/// The first place where two values differ. A setting that is not there equals one that is `false` or 0: containerd
/// leaves out of its report what a table of ours does not name, and shows its zero where the table is implicit.
fn first_difference<'a>(
    before: &'a Value,
    after: &'a Value,
    path: &str,
) -> Option<(String, Option<&'a Value>, Option<&'a Value>)> {
    match (before, after) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            keys.into_iter().find_map(|key| {
                let path = format!("{path}.{key}");
                match (left.get(key), right.get(key)) {
                    (Some(left), Some(right)) => first_difference(left, right, &path),
                    (Some(only), None) if is_zero(only) => None,
                    (None, Some(only)) if is_zero(only) => None,
                    (left, right) => Some((path, left, right)),
                }
            })
        }
        (left, right) if left == right => None,
        (left, right) => Some((path.to_owned(), Some(left), Some(right))),
    }
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(entries) => entries.values().all(is_zero),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn served(runtimes: &[(&str, Value)]) -> Served {
        Served {
            runtime_ready: true,
            network_ready: true,
            complaint: String::new(),
            default_runtime: "runc".into(),
            runtimes: runtimes
                .iter()
                .map(|(name, options)| ((*name).to_owned(), options.clone()))
                .collect(),
            handlers: BTreeSet::new(),
            settings: json!({"enableSelinux": true}),
            sandbox_image: None,
        }
    }

    fn systemd() -> Value {
        json!({"runtimeType": "io.containerd.runc.v2", "options": {"SystemdCgroup": true}})
    }

    #[test]
    fn exactly_one_handler_more_is_right() {
        let before = served(&[("runc", systemd())]);
        let after = served(&[("runc", systemd()), ("crun", systemd())]);
        assert_eq!(compare(&before, &after, Expected::Added("crun")), Ok(()));
        assert_eq!(compare(&after, &before, Expected::Removed("crun")), Ok(()));
        assert_eq!(
            compare(&before, &before, Expected::Added("crun")),
            Err(Difference::Missing("crun".into()))
        );
        assert_eq!(
            compare(&after, &after, Expected::Removed("crun")),
            Err(Difference::StillThere("crun".into()))
        );
    }

    #[test]
    fn a_handler_that_goes_along_is_seen() {
        let before = served(&[("runc", systemd()), ("kata", systemd())]);
        let after = served(&[("runc", systemd()), ("crun", systemd())]);
        assert!(matches!(
            compare(&before, &after, Expected::Added("crun")),
            Err(Difference::Handlers { .. })
        ));
    }

    #[test]
    fn a_changed_option_is_named_by_its_place() {
        let before = served(&[("runc", systemd())]);
        let mut after = served(&[
            ("runc", json!({"runtimeType": "io.containerd.runc.v2"})),
            ("crun", systemd()),
        ]);
        let difference = compare(&before, &after, Expected::Added("crun")).unwrap_err();
        assert!(
            difference.to_string().contains("runtimes.runc.options"),
            "{difference}"
        );
        after.runtimes.insert("runc".into(), systemd());
        after.settings = json!({});
        let difference = compare(&before, &after, Expected::Added("crun")).unwrap_err();
        assert!(difference.to_string().contains("enableSelinux"), "{difference}");
    }

    #[test]
    fn an_implicit_runtime_written_down_is_no_change() {
        let implicit =
            json!({"runtimeType": "io.containerd.runc.v2", "options": {"IoUid": 0, "SystemdCgroup": false}});
        let written = json!({"runtimeType": "io.containerd.runc.v2"});
        let crun = json!({"options": {"SystemdCgroup": false}});
        let before = served(&[("runc", implicit)]);
        let after = served(&[("runc", written), ("crun", crun)]);
        assert_eq!(compare(&before, &after, Expected::Added("crun")), Ok(()));
    }

    #[test]
    fn another_cgroup_driver_than_the_default_runtimes_is_wrong() {
        let before = served(&[("runc", systemd())]);
        let after = served(&[("runc", systemd()), ("crun", json!({"options": {}}))]);
        assert_eq!(
            compare(&before, &after, Expected::Added("crun")),
            Err(Difference::CgroupDriver { wanted: true })
        );
    }
}
