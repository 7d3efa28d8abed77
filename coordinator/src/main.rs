//! `quartermaster-coordinator`: see the library for what it does.

use clap::Parser;
use quartermaster_coordinator::{Cli, Command, LogFormat, crd_yaml, run};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let settings = match Cli::parse().command {
        Command::Crd => {
            print!("{}", crd_yaml()?);
            return Ok(());
        }
        Command::Run(settings) => settings,
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    match settings.log_format {
        LogFormat::Json => log.json().flatten_event(true).init(),
        LogFormat::Text => log.init(),
    }
    // One provider for all of TLS, named outright: a second one in the tree would make the choice ambiguous.
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            let stop = CancellationToken::new();
            tokio::spawn(signals(stop.clone()));
            run(*settings, stop).await
        })
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
