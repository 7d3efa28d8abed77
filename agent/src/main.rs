//! `quartermaster-agent`; see the library for what it does.

use std::process::ExitCode;

use clap::Parser;
use quartermaster_agent::cli::Cli;

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(quartermaster_agent::run(cli))
}
