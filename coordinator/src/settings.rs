//! What a coordinator can be told, by flags or environment variables.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::{SignedDuration, Span};

use crate::node::{MaxUnavailable, Policy, Window};
use crate::operator::Ask;
use crate::prefetch::Limits;

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
    /// Ask the leader, from inside its pod.
    #[command(flatten)]
    Ask(Ask),
    /// Join standard input and output to the operator's socket, for kubectl-quartermaster.
    #[command(hide = true)]
    Relay,
    /// Put every node back, by the rules of the rollout, and say what is left.
    ///
    /// It is recorded, and overrides annotations and --auto-provision until the record is deleted; if this is
    /// interrupted, the coordinator goes on with it.
    RemoveAll {
        /// The namespace in which the coordinator runs.
        #[arg(long, env = "QUARTERMASTER_NAMESPACE", default_value = "quartermaster")]
        namespace: String,
        /// How long to wait for the end of it.
        #[arg(long, default_value = "10m", value_parser = duration)]
        wait: SignedDuration,
    },
}

/// The socket of the operator's interface.
pub const OPERATOR_SOCKET: &str = "/run/quartermaster/operator.sock";

/// How logs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A JSON object in each line.
    Json,
    /// For a person.
    Text,
}

/// How long agents stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Agents {
    /// While their node has work, and for `--linger`.
    Summoned,
    /// Always, on nodes where anything is wanted.
    Parked,
}

/// How the coordinator runs.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Provision every node but those annotated kwasm.sh/kwasm-node=false.
    #[arg(long, env = "QUARTERMASTER_AUTO_PROVISION", default_value_t = false, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub auto_provision: bool,

    /// How many nodes may have their containerd restarted at once: a number, or a percentage such as 10%.
    #[arg(long, env = "QUARTERMASTER_MAX_UNAVAILABLE", default_value = "1")]
    pub max_unavailable: MaxUnavailable,

    /// How long to wait after a restart before the next one, such as 30s.
    #[arg(long, env = "QUARTERMASTER_PAUSE_BETWEEN", default_value = "0s", value_parser = duration)]
    pub pause_between: SignedDuration,

    /// Hours of the day in which containerd may be restarted, such as 22:00-04:00, or "22:00-04:00 Europe/Berlin"; at
    /// any time by default.
    #[arg(long, env = "QUARTERMASTER_WINDOW", value_parser = window)]
    pub window: Option<OptionalWindow>,

    /// After how many failures in a row nodes that are in service are left alone until it is resumed.
    #[arg(long, env = "QUARTERMASTER_HALT_AFTER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub halt_after: u32,

    /// Whether an agent comes when its node has work and goes afterwards, or stays asleep where anything is wanted.
    #[arg(long, env = "QUARTERMASTER_AGENTS", default_value = "summoned")]
    pub agents: Agents,

    /// How long a new node that registered with the taint kwasm.sh/not-ready:NoSchedule is kept out of service at most.
    #[arg(long, env = "QUARTERMASTER_GATE_DEADLINE", default_value = "10m", value_parser = duration)]
    pub gate_deadline: SignedDuration,

    /// How long an agent stays on a node after its last work, such as 60s.
    #[arg(long, env = "QUARTERMASTER_LINGER", default_value = "60s", value_parser = duration)]
    pub linger: SignedDuration,

    /// After how long images that were there are looked for again, such as 6h.
    #[arg(long, env = "QUARTERMASTER_RECHECK", default_value = "6h", value_parser = duration)]
    pub recheck: SignedDuration,

    /// Registries and repositories from which a Prefetch may pull, such as registry.example.com/team; all by default.
    #[arg(long, env = "QUARTERMASTER_PREFETCH_REPOSITORIES", value_delimiter = ',')]
    pub prefetch_repositories: Vec<String>,

    /// How many images one Prefetch may want.
    #[arg(long, env = "QUARTERMASTER_PREFETCH_MAX_IMAGES", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub prefetch_max_images: u32,

    /// How many nodes one Prefetch may mean; 0 is without bound.
    #[arg(long, env = "QUARTERMASTER_PREFETCH_MAX_NODES", default_value_t = 0)]
    pub prefetch_max_nodes: u32,

    /// How many bytes the images of one Prefetch may have on a node, as far as their sizes are known; 0 is without bound.
    #[arg(long, env = "QUARTERMASTER_PREFETCH_MAX_BYTES", default_value_t = 0)]
    pub prefetch_max_bytes: u64,

    /// Whether a Prefetch may follow workloads of other namespaces, as filter_by_labels does.
    #[arg(long, env = "QUARTERMASTER_PREFETCH_ACROSS_NAMESPACES", default_value_t = true, action = clap::ArgAction::Set)]
    pub prefetch_across_namespaces: bool,

    /// Namespaces whose pull secrets may be read for the Prefetches there; each needs the role bound in it.
    #[arg(long, env = "QUARTERMASTER_SECRET_NAMESPACES", value_delimiter = ',')]
    pub secret_namespaces: Vec<String>,

    /// Whether the kubelet's credential providers are asked, as the kubelet asks them.
    #[arg(long, env = "QUARTERMASTER_NODE_CREDENTIAL_PROVIDERS", default_value_t = true, action = clap::ArgAction::Set)]
    pub node_credential_providers: bool,

    /// Percent of a node's disk that pulls leave free; 0 stays clear of the kubelet's own eviction thresholds.
    #[arg(long, env = "QUARTERMASTER_DISK_RESERVE", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=90))]
    pub disk_reserve: u32,

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

    /// The socket on which people in this pod reach the leader.
    #[arg(long, env = "QUARTERMASTER_OPERATOR_SOCKET", default_value = OPERATOR_SOCKET)]
    pub operator_socket: PathBuf,

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

/// A window, or none where the text is empty, as a chart renders a value that is not set.
#[derive(Debug, Clone, PartialEq)]
pub struct OptionalWindow(pub Option<Window>);

fn window(text: &str) -> Result<OptionalWindow, String> {
    if text.trim().is_empty() {
        return Ok(OptionalWindow(None));
    }
    text.parse().map(|window| OptionalWindow(Some(window)))
}

impl Settings {
    /// By what rules restarts are rationed.
    pub fn policy(&self) -> Policy {
        Policy {
            max_unavailable: self.max_unavailable,
            pause_between: self.pause_between,
            window: self.window.clone().and_then(|window| window.0),
            halted: false,
        }
    }

    /// Bounds of every Prefetch.
    pub fn limits(&self) -> Limits {
        Limits {
            repositories: self.prefetch_repositories.clone(),
            images: usize::try_from(self.prefetch_max_images).unwrap_or(usize::MAX),
            nodes: usize::try_from(self.prefetch_max_nodes).unwrap_or(usize::MAX),
            bytes: self.prefetch_max_bytes,
            across_namespaces: self.prefetch_across_namespaces,
        }
    }
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
            _ => unreachable!("run was asked for"),
        })
    }

    #[test]
    fn the_defaults_are_those_that_the_documents_name() {
        let settings = settings(&[]).expect("settings");
        assert!(!settings.auto_provision);
        assert_eq!(settings.max_unavailable, MaxUnavailable::Nodes(1));
        assert_eq!(settings.halt_after, 3);
        assert_eq!(settings.agents, Agents::Summoned);
        assert_eq!(settings.gate_deadline, SignedDuration::from_mins(10));
        assert_eq!(settings.policy().window, None);
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
    fn an_empty_window_is_none() {
        assert_eq!(settings(&["--window="]).expect("settings").policy().window, None);
        let set = settings(&["--window", "22:00-04:00 Europe/Berlin"]).expect("settings");
        assert!(set.policy().window.is_some());
    }

    #[test]
    fn values_that_make_no_sense_are_refused() {
        for flag in [
            "--max-unavailable=0",
            "--max-unavailable=200%",
            "--window=22-4",
            "--halt-after=0",
            "--agents=sometimes",
            "--linger=-5s",
            "--linger=soon",
            "--recheck=9999999h",
            "--log-format=xml",
        ] {
            assert!(settings(&[flag]).is_err(), "{flag}");
        }
    }
}
