//! The agent of Quartermaster: one static binary, on each node that has work.
//!
//! It edits containerd's configuration, installs the runtime and pulls images, for the coordinator ([`serve`]) or
//! for a person on the node ([`cli`]). The decisions are pure and stand in [`config`] and [`containerd`]; the stages
//! that carry them out in [`install`]; images in [`pull`]; what the host offers in [`host`].

mod checkpoint;
pub mod cli;
pub mod config;
pub mod containerd;
mod describe;
pub mod failure;
pub mod host;
pub mod install;
mod person;
pub mod pull;
pub mod serve;

use std::process::ExitCode;
use std::sync::Arc;

use cli::{Cli, Command, LogFormat};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// Runs a command of the command line.
///
/// # Errors
/// What could not even be begun; everything else is in the exit code, as `--help` lists them.
pub async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Plan(plan) => person::plan(&plan).await,
        Command::Install {
            host,
            prepare_only,
            json,
        } => person::install(&host, prepare_only, json).await,
        Command::Uninstall { host, force, json } => person::uninstall(&host, force, json).await,
        Command::Status { host, json } => person::status(&host, json).await,
        Command::Pull { host, pull } => {
            stay_out_of_core_dumps();
            person::pull_images(&host, pull).await
        }
        Command::Release {
            host,
            owner,
            keep,
            remove_unused,
        } => {
            let order = pull::Release {
                owner,
                keep,
                remove_unused,
            };
            person::release_images(&host, &order).await
        }
        Command::Apply { journal } => {
            log_to_stderr(LogFormat::Text);
            let root = host::HostRoot::open("/")?;
            install::apply(Arc::new(root), &journal).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Serve(serve) => {
            log_to_stderr(serve.log_format);
            stay_out_of_core_dumps();
            serve_until_told(*serve).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Registries' passwords are in this process's memory and must be nowhere else. The limit alone would not do: the
/// kernel ignores it where core dumps go to a program, as systemd has it.
fn stay_out_of_core_dumps() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let limited = setrlimit(Resource::Core, none);
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = limited.and(hidden) {
        tracing::warn!(%error, "core dumps of the agent could not be switched off");
    }
}

async fn serve_until_told(arguments: cli::Serve) -> anyhow::Result<()> {
    let options = serve::Options {
        node_name: arguments.node_name,
        host_root: arguments.host_root,
        payload: arguments.payload,
        overrides: arguments.overrides,
        enrolment: serve::Enrolment {
            url: arguments.enroll_url,
            ca_file: arguments.ca_file,
            token_file: arguments.token_file,
            pod_ip: arguments.pod_ip,
        },
        listen: arguments.listen,
        health_listen: arguments.health_listen,
        metrics_listen: arguments.metrics_listen,
    };
    let bound = serve::Bound::bind(&options).await?;
    let shutdown = CancellationToken::new();
    tokio::spawn(watch_signals(shutdown.clone()));
    serve::serve(options, bound, shutdown).await
}

/// The first signal drains, the second aborts.
async fn watch_signals(shutdown: CancellationToken) {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    for round in 0.. {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if round > 0 {
            tracing::warn!("told twice to end; ending at once");
            std::process::exit(1);
        }
        tracing::info!("told to end; running commands are finished first");
        shutdown.cancel();
    }
}

fn log_to_stderr(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(std::io::stderr);
    let _ = match format {
        LogFormat::Json => log.json().flatten_event(true).try_init(),
        LogFormat::Text => log.with_ansi(false).try_init(),
    };
}
