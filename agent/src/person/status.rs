//! The `status` command.

use std::process::ExitCode;

use quartermaster_proto::v1::InstallState;
use serde_json::json;

use super::output::say;
use super::target;
use crate::cli::Host;
use crate::describe::describe;

/// `status`
pub(crate) async fn status(host: &Host, as_json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let node = describe("", &target.root).await;
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
            "bootId": node.boot_id,
            "machineId": node.machine_id,
        })
        .to_string());
    } else {
        for (name, value) in [
            ("state", state),
            ("version", node.payload_version.as_str()),
            ("system", &node.os),
            ("containerd", &node.containerd_version),
            ("config", &node.config_path),
        ] {
            say(&format!(
                "{name:<12}{}",
                if value.is_empty() { "-" } else { value }
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}
