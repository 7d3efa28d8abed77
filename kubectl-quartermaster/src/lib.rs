//! kubectl's plugin for Quartermaster.
//!
//! It asks the leader by its service `quartermaster.v1.Operator`, through `pods/exec` with the person's own kubeconfig,
//! and reads and writes Nodes and Prefetches with the person's own rights. What is read becomes plain facts, what they
//! mean is decided by pure functions, and what a person sees is rendered by others; only the rest knows a cluster.

mod cli;
mod cluster;
mod confirm;
mod control;
mod doctor;
mod events;
mod leader;
mod logs;
mod look;
mod migrate;
mod output;
mod plan;
mod prefetch;
mod progress;
mod provision;
mod remove;
mod status;
mod trouble;

use std::process::ExitCode;

use clap::CommandFactory as _;

pub use cli::Cli;

use cli::Command;
use cluster::Cluster;
use leader::Leader;
use look::{Look, Tone};

/// Exit code: a node is or would be refused.
const REFUSED: u8 = 3;
/// Exit code: the person has interrupted it.
const INTERRUPTED: u8 = 130;

/// Runs a command of the command line.
///
/// # Errors
/// What a person is told when nothing came of it.
pub async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Command::Completion { shell } = cli.command {
        let name = "kubectl-quartermaster";
        clap_complete::generate(shell, &mut Cli::command(), name, &mut std::io::stdout());
        return Ok(ExitCode::SUCCESS);
    }
    let cluster = Cluster::find(&cli.reach).await?;
    let leader = Leader::of(&cluster);
    match cli.command {
        Command::Status { nodes, output } => status::show(&leader, &nodes, output).await?,
        Command::Plan(arguments) => return plan::show(&leader, &arguments).await,
        Command::Provision { nodes, waiting } => {
            return provision::provision(&cluster, &leader, &nodes, waiting).await;
        }
        Command::Unprovision {
            nodes,
            force,
            waiting,
        } => return provision::unprovision(&cluster, &leader, &nodes, force, waiting).await,
        Command::Prefetch(asked) => return prefetch::prefetch(&cluster, &leader, &asked).await,
        Command::Pause => control::pause(&leader).await?,
        Command::Resume => control::resume(&leader).await?,
        Command::Logs { nodes, follow } => logs::show(&leader, &nodes, follow).await?,
        Command::Doctor { output } => return doctor::doctor(&cluster, &leader, output).await,
        Command::Migrate { yes, dry_run } => return migrate::migrate(&cluster, &leader, yes, dry_run).await,
        Command::RemoveAll { yes, waiting } => return remove::remove_all(&leader, yes, waiting).await,
        Command::Completion { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// An error as a person is told it on standard error.
pub fn told(error: &anyhow::Error) -> String {
    Look::of_stderr().marked(Tone::Bad, "✗", &format!("{error:#}"))
}
