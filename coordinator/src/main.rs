//! `quartermaster-coordinator`: see the library for what it does.

use clap::Parser;
use quartermaster_coordinator::{Cli, Command, LogFormat, OPERATOR_SOCKET, crd_yaml, operator, run};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let settings = match Cli::parse().command {
        Command::Crd => {
            print!("{}", crd_yaml()?);
            return Ok(());
        }
        Command::Run(settings) => *settings,
        Command::Ask(what) => return wait_for(operator::ask(what, OPERATOR_SOCKET.as_ref())),
        Command::Relay => return wait_for(operator::relay(OPERATOR_SOCKET.as_ref())),
        Command::RemoveAll { namespace, wait } => {
            use_ring()?;
            let wait = wait.try_into()?;
            return wait_for(operator::remove_all(&namespace, wait));
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    match settings.log_format {
        LogFormat::Json => log.json().flatten_event(true).init(),
        LogFormat::Text => log.init(),
    }
    use_ring()?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            let stop = CancellationToken::new();
            tokio::spawn(signals(stop.clone()));
            run(settings, stop).await
        })
}

/// One provider for all of TLS, named outright: a second one in the tree would make the choice ambiguous.
fn use_ring() -> anyhow::Result<()> {
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))
}

/// Runs something for a person, to its end.
fn wait_for(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(work);
    // A read of standard input can't be taken back: waiting for it would be waiting for whoever is at its other end.
    runtime.shutdown_background();
    done
}

/// The first signal asks for an orderly end, the second one ends at once.
async fn signals(stop: CancellationToken) {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    for orderly in [true, false] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if orderly {
            stop.cancel();
        } else {
            std::process::exit(130);
        }
    }
}
