//! The Prefetch object: what is asked for, and what its status says.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{ApiResource, DynamicObject};
use kube::core::{Expression, GroupVersionKind, Selector};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::cli::Prefetch;

/// How the API server calls a Prefetch.
pub(crate) fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("cache.techsquad.rocks", "v1", "Prefetch");
    ApiResource::from_gvk_with_plural(&kind, "prefetches")
}

/// The object that is applied.
///
/// # Errors
/// In words, when the selector of nodes is none.
pub(super) fn object(asked: &Prefetch, namespace: &str) -> Result<DynamicObject, String> {
    let mut spec = json!({ "images": asked.images });
    if let Some(selector) = &asked.nodes {
        let selector = LabelSelector::from(selector_of(selector)?);
        spec["nodes"] = json!({ "selector": selector });
    }
    let mut pull = serde_json::Map::new();
    if !asked.secret.is_empty() {
        pull.insert("secrets".to_owned(), json!(asked.secret));
    }
    if asked.always {
        pull.insert("policy".to_owned(), json!("Always"));
    }
    if !pull.is_empty() {
        spec["pull"] = Value::Object(pull);
    }
    let name = asked.name.clone().unwrap_or_else(|| name_of(asked));
    let mut object = DynamicObject::new(&name, &resource()).within(namespace);
    object.data = json!({ "spec": spec });
    Ok(object)
}

/// A name that the same images on the same nodes always get: the same command twice is the same Prefetch.
fn name_of(asked: &Prefetch) -> String {
    let first = asked.images.first().map(String::as_str).unwrap_or_default();
    let last = first.rsplit('/').next().unwrap_or_default();
    let word: String = last
        .split(['@', ':'])
        .next()
        .unwrap_or_default()
        .to_lowercase()
        .chars()
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '-'
            }
        })
        .take(40)
        .collect();
    let word = word.trim_matches('-');
    let images: BTreeSet<&String> = asked.images.iter().collect();
    let hash = Sha256::digest(format!("{images:?} {:?}", asked.nodes));
    let hash: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{hash}", if word.is_empty() { "images" } else { word })
}

/// A label selector as kubectl takes it: `a=b,c!=d,e in (f,g),h,!i`.
fn selector_of(text: &str) -> Result<Selector, String> {
    parts(text).iter().map(|part| expression(part)).collect()
}

/// The text between commas, but not those in brackets.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for letter in text.chars() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if letter == ',' && depth == 0 {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts
}

fn expression(part: &str) -> Result<Expression, String> {
    let part = part.trim();
    let no = || format!("{part:?} is no selector of labels, such as pool=gpu, pool in (a,b) or !pool");
    let key = |text: &str| {
        let key = text.trim();
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
        if key.is_empty() || !key.chars().all(fits) {
            return Err(no());
        }
        Ok(key.to_owned())
    };
    for (word, is_in) in [(" notin ", false), (" in ", true)] {
        let Some((name, values)) = part.split_once(word) else {
            continue;
        };
        let values = values
            .trim()
            .strip_prefix('(')
            .and_then(|values| values.strip_suffix(')'))
            .ok_or_else(no)?;
        let values = values.split(',').map(|value| value.trim().to_owned()).collect();
        return Ok(if is_in {
            Expression::In(key(name)?, values)
        } else {
            Expression::NotIn(key(name)?, values)
        });
    }
    if let Some((name, value)) = part.split_once("!=") {
        return Ok(Expression::NotEqual(key(name)?, value.trim().to_owned()));
    }
    if let Some((name, value)) = part.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        return Ok(Expression::Equal(key(name)?, value.trim().to_owned()));
    }
    match part.strip_prefix('!') {
        Some(name) => Ok(Expression::DoesNotExist(key(name)?)),
        None => Ok(Expression::Exists(key(part)?)),
    }
}

/// What the status of a Prefetch says, as far as it is shown.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    pub phase: String,
    pub observed_generation: i64,
    pub conditions: Vec<Condition>,
    pub nodes: Nodes,
    pub pairs: Pairs,
    pub images: Vec<Image>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub type_: String,
    pub message: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Nodes {
    pub wanted: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Pairs {
    pub wanted: u64,
    pub ready: u64,
    pub failed: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Image {
    /// The normalised reference, as the agents' reports name it.
    pub image: String,
    pub ready: u64,
    pub failed: u64,
    pub reasons: Vec<Reason>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Reason {
    pub reason: String,
    pub count: u64,
    pub message: String,
    pub nodes: Vec<String>,
}

impl Status {
    /// Reads it; `None` while it speaks of no or of an older specification.
    pub(super) fn read(object: &DynamicObject) -> Option<Self> {
        let status = serde_json::from_value::<Self>(object.data.get("status")?.clone()).ok()?;
        (status.observed_generation >= object.metadata.generation.unwrap_or_default()).then_some(status)
    }

    /// The words of its condition Ready.
    pub(super) fn message(&self) -> &str {
        let ready = self
            .conditions
            .iter()
            .find(|condition| condition.type_ == "Ready");
        ready.map_or("", |condition| condition.message.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(images: &[&str]) -> Prefetch {
        Prefetch {
            images: images.iter().map(|image| (*image).to_owned()).collect(),
            ..Prefetch::default()
        }
    }

    #[test]
    fn what_is_asked_for_becomes_a_prefetch() {
        let mut asked = asked(&["r.example.com/team/app:1.4"]);
        asked.nodes = Some("pool=gpu,zone in (a, b),!old".into());
        asked.secret = vec!["login".into()];
        let object = object(&asked, "shop").expect("an object");
        assert_eq!(object.metadata.namespace.as_deref(), Some("shop"));
        assert_eq!(
            object.data["spec"],
            json!({
                "images": ["r.example.com/team/app:1.4"],
                "nodes": {"selector": {
                    "matchLabels": {"pool": "gpu"},
                    "matchExpressions": [
                        {"key": "zone", "operator": "In", "values": ["a", "b"]},
                        {"key": "old", "operator": "DoesNotExist"},
                    ],
                }},
                "pull": {"secrets": ["login"]},
            })
        );
    }

    #[test]
    fn the_same_images_have_the_same_name() {
        let name = name_of(&asked(&["r.example.com/team/App_x:1.4@sha256:00", "b"]));
        assert!(name.starts_with("app-x-"), "{name}");
        assert_eq!(name.len(), "app-x-".len() + 8);
        assert_eq!(
            name,
            name_of(&asked(&["r.example.com/team/App_x:1.4@sha256:00", "b"]))
        );
        assert_ne!(name_of(&asked(&["a"])), name_of(&asked(&["a", "b"])));
        assert_eq!(&name_of(&asked(&["__"]))[..7], "images-");
    }

    #[test]
    fn what_is_no_selector_is_said_to_be_none() {
        for text in ["", "a b=c", "a in b", "=x", "a,,b"] {
            assert!(selector_of(text).is_err(), "{text}");
        }
        for text in ["a", "a==b", "a!=b", "example.com/a notin (x,y)", "!a"] {
            assert!(selector_of(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_status_of_an_older_specification_is_none() {
        let mut object = DynamicObject::new("a", &resource());
        object.metadata.generation = Some(2);
        object.data = json!({"status": {"phase": "READY", "observedGeneration": 1}});
        assert_eq!(Status::read(&object), None);
        object.data["status"]["observedGeneration"] = json!(2);
        assert_eq!(
            Status::read(&object).map(|status| status.phase),
            Some("READY".into())
        );
    }
}
