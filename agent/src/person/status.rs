//! The `status` command.

use std::process::ExitCode;

use quartermaster_proto::v1::InstallState;
use serde_json::json;

use super::output::{Paint, say};
use super::target;
use crate::cli::Host;
use crate::describe::{describe, locate};
use crate::install;

const LABEL: usize = 12;

/// `status`
pub(crate) async fn status(host: &Host, as_json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?.located().await?;
    let node = describe("", &target).await;
    let daemon = locate(&target).await;
    let handler = quartermaster_proto::HANDLER;
    let served = daemon.served().await.ok().map(|served| served.serves(handler));
    let pods = install::pods_using(&daemon, handler).await;
    let open = install::open_swap(&target);
    let state = match node.state() {
        InstallState::Installed => "installed",
        InstallState::InFlight => "in flight",
        InstallState::Absent => "not installed",
        InstallState::Unspecified => "unknown",
    };
    if as_json {
        say(&json!({
            "state": state,
            "version": node.payload_version,
            "os": node.os,
            "containerd": node.containerd_version,
            "config": node.config_path,
            "handlerServed": served,
            "pods": pods,
            "openSwap": open,
            "bootId": node.boot_id,
            "machineId": node.machine_id,
        })
        .to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let paint = Paint::new();
    let row = |name: &str, value: &str| {
        let value = if value.is_empty() { "-" } else { value };
        say(&format!("{}{value}", paint.dim(&format!("{name:<LABEL$}"))));
    };
    row(
        "state",
        &match node.state() {
            InstallState::Installed => paint.good(state),
            InstallState::InFlight => paint.warn(state),
            _ => state.to_owned(),
        },
    );
    row("version", &node.payload_version);
    row("system", &node.os);
    row("containerd", &node.containerd_version);
    row("config", &node.config_path);
    row(
        "handler",
        &match served {
            Some(true) => paint.good(&format!("{handler} is served")),
            Some(false) => format!("{handler} is not served"),
            None => paint.bad("containerd does not answer"),
        },
    );
    row("pods", &pods.join(", "));
    if let Some(step) = open {
        row("open swap", &paint.warn(&step));
        row(
            "",
            "Nothing runs? `install` goes on with it, `uninstall` takes it back.",
        );
    }
    Ok(ExitCode::SUCCESS)
}
