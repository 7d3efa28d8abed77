//! `kubectl-quartermaster`: see the library for what it does.

use std::process::ExitCode;

use clap::Parser;
use kubectl_quartermaster::{Cli, run};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match try_main(cli) {
        Ok(code) => code,
        Err(error) => {
            eprint!("{}", kubectl_quartermaster::told(&error));
            ExitCode::FAILURE
        }
    }
}

fn try_main(cli: Cli) -> anyhow::Result<ExitCode> {
    // One provider for all of TLS, named outright: a second one in the tree would make the choice ambiguous.
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let code = runtime.block_on(run(cli));
    // What is still open leads to the leader, and is of no use to anybody any more.
    runtime.shutdown_background();
    code
}
