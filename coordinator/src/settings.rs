//! What a coordinator can be told, by flags or environment variables.

use std::net::SocketAddr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::{SignedDuration, Span};

/// Coordinates the agents of Quartermaster: which nodes become able to run WebAssembly, and which images
/// are pulled to which nodes before they are needed.
#[derive(Debug, Parser)]
#[command(name = "quartermaster-coordinator", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the coordinator inside a cluster.
    Run(Box<Settings>),
    /// Print the CustomResourceDefinition of Prefetch.
    Crd,
}

/// How logs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A JSON object in each line.
    Json,
    /// For a person.
    Text,
}

/// How the coordinator runs.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Provision every node but those annotated kwasm.sh/kwasm-node=false.
    #[arg(long, env = "QUARTERMASTER_AUTO_PROVISION", default_value_t = false, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub auto_provision: bool,

    /// How many nodes may have their containerd restarted at once.
    #[arg(long, env = "QUARTERMASTER_MAX_UNAVAILABLE", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub max_unavailable: u32,

    /// How long an agent stays on a node after its last work, such as 60s.
    #[arg(long, env = "QUARTERMASTER_LINGER", default_value = "60s", value_parser = duration)]
    pub linger: SignedDuration,

    /// After how long images that were there are looked for again, such as 6h.
    #[arg(long, env = "QUARTERMASTER_RECHECK", default_value = "6h", value_parser = duration)]
    pub recheck: SignedDuration,

    /// How long the certificates of agents and coordinators are good for; they are renewed long before.
    #[arg(long, env = "QUARTERMASTER_CERTIFICATE_LIFE", default_value = "12h", value_parser = duration)]
    pub certificate_life: SignedDuration,

    /// How long a certificate authority is good for. When a third of it is left, another one follows.
    #[arg(long, env = "QUARTERMASTER_AUTHORITY_LIFE", default_value = "8760h", value_parser = duration)]
    pub authority_life: SignedDuration,

    /// The namespace in which coordinator and agents run.
    #[arg(long, env = "QUARTERMASTER_NAMESPACE", default_value = "quartermaster")]
    pub namespace: String,

    /// The name of this pod, which holds the Lease under it.
    #[arg(
        long,
        env = "QUARTERMASTER_POD_NAME",
        default_value = "quartermaster-coordinator"
    )]
    pub pod_name: String,

    /// Where agents enrol.
    #[arg(long, env = "QUARTERMASTER_ENROLLMENT_LISTEN", default_value = "[::]:7444")]
    pub enrollment_listen: SocketAddr,

    /// Where the gRPC health service answers.
    #[arg(long, env = "QUARTERMASTER_HEALTH_LISTEN", default_value = "[::]:7445")]
    pub health_listen: SocketAddr,

    /// Where /metrics, /healthz and /readyz answer.
    #[arg(long, env = "QUARTERMASTER_METRICS_LISTEN", default_value = "[::]:7446")]
    pub metrics_listen: SocketAddr,

    /// How logs are written.
    #[arg(long, env = "QUARTERMASTER_LOG_FORMAT", default_value = "json")]
    pub log_format: LogFormat,
}

/// A duration such as `60s`, `10m` or `6h`, of a second at least and a year at most; days are not taken,
/// since they may have 23 hours.
fn duration(text: &str) -> Result<SignedDuration, String> {
    let span: Span = text.parse().map_err(|error| format!("{error}"))?;
    let duration = SignedDuration::try_from(span).map_err(|error| format!("{error}"))?;
    if duration < SignedDuration::ZERO || duration > SignedDuration::from_hours(24 * 365) {
        return Err("it must be between 0s and a year".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(flags: &[&str]) -> Result<Settings, clap::Error> {
        let words = ["quartermaster-coordinator", "run"].iter().chain(flags);
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Run(settings) => *settings,
            Command::Crd => unreachable!("run was asked for"),
        })
    }

    #[test]
    fn the_defaults_are_those_that_the_documents_name() {
        let settings = settings(&[]).expect("settings");
        assert!(!settings.auto_provision);
        assert_eq!(settings.max_unavailable, 1);
        assert_eq!(settings.linger, SignedDuration::from_secs(60));
        assert_eq!(settings.recheck, SignedDuration::from_hours(6));
    }

    #[test]
    fn auto_provision_is_a_switch_that_also_takes_a_value() {
        for (flags, wanted) in [
            (vec!["--auto-provision"], true),
            (vec!["--auto-provision=true"], true),
            (vec!["--auto-provision=false"], false),
        ] {
            assert_eq!(settings(&flags).expect("settings").auto_provision, wanted);
        }
    }

    #[test]
    fn values_that_make_no_sense_are_refused() {
        for flag in [
            "--max-unavailable=0",
            "--linger=-5s",
            "--linger=soon",
            "--recheck=9999999h",
            "--log-format=xml",
        ] {
            assert!(settings(&[flag]).is_err(), "{flag}");
        }
    }
}
