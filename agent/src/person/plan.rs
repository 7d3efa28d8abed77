//! The `plan` command: for the node it runs on, or for one whose files lie in a folder.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};

use super::output::{NOTHING_TO_DO, Paint, code_of, report, say};
use super::target;
use crate::cli;
use crate::config::{ConfigEdit, Plan, Refusal};
use crate::failure::{Failure, Reported};
use crate::host::{Distribution, HostRoot, Recognised};
use crate::install;

/// What is known of the node, as it is shown.
struct Node<'a> {
    host: &'a Recognised,
    containerd: String,
    version_from: Option<&'a str>,
    read: &'a str,
    written: &'a str,
    socket: &'a str,
    binary: String,
    restarts_along: &'a [String],
}

/// `plan`
pub(crate) async fn plan(arguments: &cli::Plan) -> anyhow::Result<ExitCode> {
    match &arguments.root {
        Some(folder) => in_folder(arguments, folder),
        None => on_this_node(arguments).await,
    }
}

fn in_folder(arguments: &cli::Plan, folder: &Path) -> anyhow::Result<ExitCode> {
    let root = HostRoot::open(folder).with_context(|| format!("{} cannot be opened", folder.display()))?;
    match install::plan_folder(&root, &arguments.host.overrides) {
        Ok((found, planned)) => {
            let node = Node {
                host: &found.host,
                containerd: found.version.to_string(),
                version_from: found.version_from,
                read: &found.config.path,
                written: found.written_path(),
                socket: &found.socket,
                binary: found.handler.binary.clone(),
                restarts_along: &[],
            };
            show(arguments, &node, &planned)
        }
        Err(failure) => Ok(refused(arguments, None, &failure, None)),
    }
}

async fn on_this_node(arguments: &cli::Plan) -> anyhow::Result<ExitCode> {
    let target = target(&arguments.host)?;
    match install::preview(&target).await {
        Ok((detected, planned)) => {
            let node = Node {
                host: &detected.host,
                containerd: detected.version.clone(),
                version_from: None,
                read: &detected.config.path,
                written: detected.written_path(),
                socket: &detected.socket,
                binary: detected.layout.handler_binary(),
                restarts_along: &detected.unit.restarts_along,
            };
            show(arguments, &node, &planned)
        }
        Err(failure) => Ok(refused(arguments, None, &failure, None)),
    }
}

fn show(arguments: &cli::Plan, node: &Node<'_>, planned: &Result<Plan, Refusal>) -> anyhow::Result<ExitCode> {
    let (outcome, edit, code) = match planned {
        Err(refusal) => {
            let failure = Failure::at(quartermaster_proto::v1::Stage::Plan, refusal);
            return Ok(refused(arguments, Some(node), &failure, Some(refusal)));
        }
        Ok(Plan::Edit(edit)) => ("edit", Some(edit), 0),
        Ok(Plan::NothingToDo) => ("nothingToDo", None, NOTHING_TO_DO),
        Ok(Plan::Adopt(_)) => ("adopt", None, NOTHING_TO_DO),
    };
    let diff = edit.map_or_else(String::new, |edit| {
        install::diff(&edit.path, edit.before.as_deref(), Some(&edit.after))
    });
    let written_to = match (edit, &arguments.output) {
        (Some(edit), Some(folder)) => Some(write_below(folder, edit)?),
        _ => None,
    };
    if arguments.json {
        let mut shown = describe(node);
        shown["outcome"] = outcome.into();
        shown["diff"] = diff.into();
        say(&shown.to_string());
        return Ok(ExitCode::from(code));
    }
    let paint = Paint::new();
    say(&headline(node, paint));
    match planned {
        Ok(Plan::Adopt(adoption)) => say(&format!(
            "{} has a handler of KWasm already ({}). It is kept as it is if a Wasm module runs through it, and replaced if not.",
            node.written, adoption.binary
        )),
        Ok(Plan::NothingToDo) => say(&format!(
            "{} has the handler already; nothing to do.",
            node.written
        )),
        _ => {
            let _ = write!(std::io::stdout(), "\n{}", paint.diff(&diff));
        }
    }
    if let Some(path) = written_to {
        say(&paint.dim(&format!("Written to {path}.")));
    }
    Ok(ExitCode::from(code))
}

fn refused(
    arguments: &cli::Plan,
    node: Option<&Node<'_>>,
    failure: &Failure,
    refusal: Option<&Refusal>,
) -> ExitCode {
    if !arguments.json {
        let paint = Paint::new();
        if let Some(node) = node {
            say(&headline(node, paint));
        }
        return report(failure, paint);
    }
    let mut shown = node.map_or_else(|| json!({}), describe);
    shown["outcome"] = "refusal".into();
    shown["refusal"] = json!({
        "reason": failure.reason.camel_case(),
        "file": refusal.map(|refusal| &refusal.path),
        "line": refusal.and_then(|refusal| refusal.line),
        "message": failure.message,
        "remedy": refusal.map_or_else(|| failure.remedy.clone(), Reported::remedy),
    });
    say(&shown.to_string());
    ExitCode::from(code_of(failure))
}

fn describe(node: &Node<'_>) -> Value {
    json!({
        "host": node.host.name,
        "distribution": node.host.distribution.name(),
        "containerd": node.containerd,
        "containerdFrom": node.version_from,
        "config": node.read,
        "file": node.written,
        "unit": node.host.unit,
        "restart": restart(node.host).0,
        "restartsAlong": node.restarts_along,
        "socket": node.socket,
        "prefix": node.host.prefix,
        "binary": node.binary,
    })
}

/// What is restarted, for machines and for people.
fn restart(host: &Recognised) -> (&'static str, &'static str) {
    match host.distribution {
        Distribution::K0s => ("none", "takes the file in by itself, nothing is restarted"),
        _ if host.control_plane => (
            "controlPlane",
            "is restarted, and with it this node's control plane",
        ),
        _ => ("unit", "is restarted; running containers live on"),
    }
}

fn headline(node: &Node<'_>, paint: Paint) -> String {
    let mut text = format!("{}, containerd {}", node.host.name, node.containerd);
    if let Some(from) = node.version_from {
        text.push_str(&paint.dim(&format!(" ({from})")));
    }
    let mut row = |name: &str, value: &str| {
        text.push_str(&format!("\n  {} {value}", paint.dim(&format!("{name:<8}"))));
    };
    row("reads", node.read);
    if node.written != node.read {
        row("edited", node.written);
    }
    row("unit", &format!("{} {}", node.host.unit, restart(node.host).1));
    if !node.restarts_along.is_empty() {
        row("along", &node.restarts_along.join(", "));
    }
    text
}

fn write_below(folder: &Path, edit: &ConfigEdit) -> anyhow::Result<String> {
    let path = folder.join(edit.path.trim_start_matches('/'));
    let parent = path.parent().unwrap_or(folder);
    std::fs::create_dir_all(parent).with_context(|| format!("{} cannot be made", parent.display()))?;
    std::fs::write(&path, &edit.after).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(path.display().to_string())
}
