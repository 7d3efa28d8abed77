//! Every shape of configuration that is found in the field, with the node's own containerd: what it serves on the
//! untouched file and on the edited one.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::hand::{HAND, Hand};
use crate::stage::{NODES, Stage};

const SCRIPT: &str = include_str!("configurations.sh");
const OURS: &str = "crun";
const BINARY: &str = "/opt/quartermaster/current/bin/crun";

/// Shapes that a daemon serves and that are refused all the same, with the words of the reason.
const REFUSED_ALL_THE_SAME: &[(&str, &str)] = &[
    // Whoever generates it writes it anew.
    (
        "24-k3s-rendered-v2",
        "the file is generated and would be written over",
    ),
];

/// What became of one shape on one daemon.
enum Verdict {
    Right,
    Refused,
    Wrong(String),
}

pub(crate) fn every_configuration_is_right_or_refused_on_every_containerd(stage: &Stage) -> Result<()> {
    let fixtures = packed()?;
    let mut wrong = Vec::new();
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        let printed = ran(&hand, &fixtures);
        hand.sh(&format!("rm -rf {HAND}/shapes"))?;
        let printed = printed?;
        let (mut right, mut refused, mut count) = (0, 0, 0);
        for shape in printed.split("==== ").skip(1) {
            count += 1;
            let shape = Shape::read(shape)?;
            match shape.judge() {
                Verdict::Right => right += 1,
                Verdict::Refused => refused += 1,
                Verdict::Wrong(why) => wrong.push(format!("{node}: {}: {why}", shape.name)),
            }
        }
        ensure!(
            count == 38,
            "{node}: {count} shapes were tried, not 38:\n{printed}"
        );
        println!(
            "configurations on {node}: {right} right, {refused} refused, {} wrong",
            count - right - refused
        );
    }
    ensure!(wrong.is_empty(), "wrong:\n{}", wrong.join("\n"));
    Ok(())
}

/// The agent's fixtures as a shell can unpack them.
fn packed() -> Result<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/tests/fixtures/configurations");
    let output = Command::new("sh")
        .args(["-c", "tar --create --gzip . | base64 --wrap=0"])
        .current_dir(&folder)
        .output()
        .context("the fixtures can't be packed")?;
    ensure!(output.status.success(), "the fixtures can't be packed");
    Ok(String::from_utf8(output.stdout)?)
}

fn ran(hand: &Hand<'_>, fixtures: &str) -> Result<String> {
    hand.sh(&format!(
        "set -e; rm -rf {HAND}/shapes; mkdir {HAND}/shapes; cd {HAND}/shapes; base64 -d <<<'{fixtures}' | tar -xz"
    ))?;
    hand.put("shapes/run.sh", SCRIPT)?;
    hand.sh(&format!("bash {HAND}/shapes/run.sh {HAND}/shapes"))
}

struct Shape {
    name: String,
    code: i32,
    plan: Value,
    /// What CRI says; nothing where the daemon does not serve it, or was not booted.
    untouched: Option<Value>,
    edited: Option<Value>,
}

impl Shape {
    fn read(text: &str) -> Result<Self> {
        let (head, _) = text.split_once('\n').context("no parts")?;
        let (name, code) = head.split_once(' ').context("no exit code")?;
        let mut parts = BTreeMap::new();
        for part in text.split("---- ").skip(1) {
            let (kind, body) = part.split_once('\n').context("a part without a body")?;
            parts.insert(kind, body);
        }
        let json = |kind: &str| {
            parts
                .get(kind)
                .and_then(|body| serde_json::from_str::<Value>(body).ok())
        };
        Ok(Self {
            name: name.to_owned(),
            code: code.trim().parse()?,
            plan: json("plan").with_context(|| format!("no plan of {name}:\n{text}"))?,
            untouched: json("untouched"),
            edited: json("edited"),
        })
    }

    fn judge(&self) -> Verdict {
        self.judged()
            .unwrap_or_else(|error| Verdict::Wrong(format!("{error:#}")))
    }

    fn judged(&self) -> Result<Verdict> {
        let refusal = &self.plan["refusal"];
        match (self.code, &self.untouched) {
            (3, untouched) => {
                let message = refusal["message"].as_str().unwrap_or_default();
                ensure!(refusal["line"].is_u64(), "the refusal names no line: {refusal}");
                ensure!(
                    refusal["remedy"] != "",
                    "the refusal does not say what to do: {refusal}"
                );
                if untouched.is_some() {
                    let known = REFUSED_ALL_THE_SAME
                        .iter()
                        .any(|(name, words)| *name == self.name && message.contains(words));
                    ensure!(known, "containerd serves it, and it is refused: {message}");
                }
                Ok(Verdict::Refused)
            }
            (0, None) => bail!("containerd does not serve it, and it is edited"),
            (0, Some(untouched)) => {
                let edited = self
                    .edited
                    .as_ref()
                    .context("containerd does not serve CRI on the edited file")?;
                compare(untouched, edited)?;
                Ok(Verdict::Right)
            }
            (code, _) => bail!("the plan ended with {code}: {}", self.plan),
        }
    }
}

fn compare(untouched: &Value, edited: &Value) -> Result<()> {
    let runtimes = |info: &Value| info["config"]["containerd"]["runtimes"].clone();
    let handlers = |info: &Value| -> Vec<String> {
        let list = info["runtimeHandlers"].as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> = list
            .iter()
            .filter_map(|handler| handler["name"].as_str().map(str::to_owned))
            .filter(|name| name != OURS)
            .collect();
        names.sort();
        names
    };
    let crun = &runtimes(edited)[OURS];
    ensure!(crun["options"]["BinaryName"] == BINARY, "the handler is {crun}");
    let served = edited["runtimeHandlers"].as_array();
    ensure!(
        served.is_none_or(|list| list.is_empty() || list.iter().any(|handler| handler["name"] == OURS)),
        "the handler is configured and not served"
    );
    let default = |info: &Value| info["config"]["containerd"]["defaultRuntimeName"].clone();
    ensure!(
        default(untouched) == default(edited),
        "the default runtime goes from {} to {}",
        default(untouched),
        default(edited)
    );
    let name = default(edited).as_str().unwrap_or_default().to_owned();
    let driver = |runtime: &Value| runtime["options"]["SystemdCgroup"] == true;
    ensure!(
        driver(crun) == driver(&runtimes(edited)[&name]),
        "the handler has not the cgroup driver of {name}"
    );
    ensure!(
        handlers(untouched) == handlers(edited),
        "the other handlers go from {:?} to {:?}",
        handlers(untouched),
        handlers(edited)
    );
    let rest = |info: &Value| {
        let mut config = info["config"].clone();
        if let Some(runtimes) = config["containerd"]["runtimes"].as_object_mut() {
            runtimes.remove(OURS);
        }
        said(config)
    };
    let (before, after) = (rest(untouched), rest(edited));
    ensure!(
        before == after,
        "a setting changes from\n{before:?}\nto\n{after:?}"
    );
    Ok(())
}

/// A setting without what it does not say: nothing, `false`, 0 and what is empty mean the same to containerd.
fn said(value: Value) -> Option<Value> {
    match value {
        Value::Null | Value::Bool(false) => None,
        Value::Number(number) if number.as_f64() == Some(0.0) => None,
        Value::String(text) if text.is_empty() => None,
        Value::Array(values) => {
            let values: Vec<_> = values.into_iter().filter_map(said).collect();
            (!values.is_empty()).then_some(Value::Array(values))
        }
        Value::Object(entries) => {
            let entries: serde_json::Map<_, _> = entries
                .into_iter()
                .filter_map(|(key, value)| Some((key, said(value)?)))
                .collect();
            (!entries.is_empty()).then_some(Value::Object(entries))
        }
        other => Some(other),
    }
}
