//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use jiff::{SignedDuration, Span};

/// Asks and tells Quartermaster: which nodes run WebAssembly, which images are where, what would change, and what is
/// wrong. It uses your kubeconfig as kubectl does, and reaches the leader by pods/exec, so your own rights decide.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-quartermaster",
    bin_name = "kubectl quartermaster",
    version,
    after_help = "Exit codes: 0 done, 1 error or something is wrong, 2 usage, 3 the node is or would be refused."
)]
pub struct Cli {
    /// Which cluster.
    #[command(flatten)]
    pub reach: Reach,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster, as whom, and where Quartermaster is in it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Which cluster")]
pub struct Reach {
    /// The kubeconfig to use, instead of $KUBECONFIG or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig to use.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// The cluster of the kubeconfig to use.
    #[arg(long, global = true, value_name = "NAME")]
    pub cluster: Option<String>,
    /// The user of the kubeconfig to use.
    #[arg(long, global = true, value_name = "NAME")]
    pub user: Option<String>,
    /// Whom to act as, if you may.
    #[arg(long = "as", global = true, value_name = "USER")]
    pub act_as: Option<String>,
    /// Groups to act as; can be given several times.
    #[arg(long, global = true, value_name = "GROUP")]
    pub as_group: Vec<String>,
    /// The namespace in which Quartermaster is installed.
    #[arg(
        long,
        short,
        global = true,
        env = "QUARTERMASTER_NAMESPACE",
        default_value = "quartermaster"
    )]
    pub namespace: String,
    /// How long one request to the API server may take, such as 10s; 0 is without bound.
    #[arg(long, global = true, default_value = "30s", value_parser = duration, value_name = "TIME")]
    pub request_timeout: Duration,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show nodes and Prefetches at a glance.
    Status {
        /// Only these nodes, and no Prefetches.
        nodes: Vec<String>,
        /// How it is shown.
        #[arg(long, short, value_enum)]
        output: Option<Format>,
    },
    /// Show what provisioning would change on nodes, live from them. Nothing is changed.
    Plan(Plan),
    /// Make nodes able to run WebAssembly: sets their annotation kwasm.sh/kwasm-node.
    Provision {
        /// Names of Nodes.
        #[arg(required = true)]
        nodes: Vec<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Put nodes back as they were: takes their annotation away.
    Unprovision {
        /// Names of Nodes.
        #[arg(required = true)]
        nodes: Vec<String>,
        /// Do not wait for pods that still use the handler: those pods can't be started again there.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Bring images to nodes before they are needed there: makes a Prefetch of them.
    Prefetch(Prefetch),
    /// Begin nothing anywhere until it is resumed. What is under way goes on to its end.
    Pause,
    /// End a pause, or a halt after a run of failures.
    Resume,
    /// Show what the agents of nodes last reported, also when they are long gone.
    Logs {
        /// Names of Nodes; all that have reported by default.
        nodes: Vec<String>,
        /// Go on with what happens from now on.
        #[arg(long, short)]
        follow: bool,
    },
    /// Find what is wrong, and what to do about it.
    Doctor {
        /// How it is shown.
        #[arg(long, short, value_enum)]
        output: Option<Format>,
    },
    /// Take over from the KWasm operator and the Prefetch operator: stop them and delete what they have left.
    Migrate {
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
        /// Show what is there and what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Put every node back as it was, whatever annotations say.
    RemoveAll {
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Print the completion script of a shell.
    Completion {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Show what provisioning would change on nodes, live from them. Nothing is changed.
#[derive(Debug, Clone, Args)]
pub struct Plan {
    /// Names of Nodes.
    #[arg(required_unless_present = "all")]
    pub nodes: Vec<String>,
    /// Every node, grouped by what would change.
    #[arg(long, conflicts_with = "nodes")]
    pub all: bool,
    /// How long to wait for the agent of a node and its answer.
    #[arg(long, default_value = "2m", value_parser = duration, value_name = "TIME")]
    pub timeout: Duration,
    /// How it is shown.
    #[arg(long, short, value_enum)]
    pub output: Option<Format>,
}

/// Bring images to nodes before they are needed there: makes a Prefetch of them.
#[derive(Debug, Clone, Default, Args)]
pub struct Prefetch {
    /// References, as a Pod would name them.
    #[arg(required = true)]
    pub images: Vec<String>,
    /// Name of the Prefetch; made from the images by default, so that the same command means the same one.
    #[arg(long)]
    pub name: Option<String>,
    /// The nodes that are meant, by their labels, such as pool=gpu; all by default.
    #[arg(long, value_name = "SELECTOR")]
    pub nodes: Option<String>,
    /// The namespace of the Prefetch, in which pull secrets are looked for; that of your context by default.
    #[arg(long, value_name = "NAMESPACE")]
    pub into: Option<String>,
    /// A pull secret in that namespace; can be given several times.
    #[arg(long, value_name = "NAME")]
    pub secret: Vec<String>,
    /// Resolve tags again at every recheck, and pull what they then stand for.
    #[arg(long)]
    pub always: bool,
    /// Print the Prefetch and write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Whether to wait.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Whether to wait, and for how long.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct Waiting {
    /// Follow it to its end.
    #[arg(long, short)]
    pub wait: bool,
    /// How long to wait at most; the work goes on in the cluster after that.
    #[arg(long, default_value = "30m", value_parser = duration, value_name = "TIME")]
    pub timeout: Duration,
}

/// How an answer is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// As a table with all columns and rows.
    Wide,
    /// As JSON.
    Json,
    /// As YAML.
    Yaml,
}

/// A duration such as `30s` or `5m`; a bare `0` is one too, as kubectl takes it.
fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let span: Span = text.parse().map_err(|error| format!("{error}"))?;
    let duration = SignedDuration::try_from(span).map_err(|error| format!("{error}"))?;
    Duration::try_from(duration).map_err(|_| "it must not be negative".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_of_kubectl_are_taken_before_and_after_the_command() {
        for words in ["x --context a -n b status", "x status --context a --namespace b"] {
            let cli = Cli::try_parse_from(words.split(' ')).expect("a command line");
            assert_eq!(
                (cli.reach.context.as_deref(), cli.reach.namespace.as_str()),
                (Some("a"), "b"),
                "{words}"
            );
        }
    }

    #[test]
    fn a_plan_is_of_some_nodes_or_of_all() {
        assert!(Cli::try_parse_from(["x", "plan"]).is_err());
        assert!(Cli::try_parse_from(["x", "plan", "--all", "a"]).is_err());
        assert!(Cli::try_parse_from(["x", "plan", "--all"]).is_ok());
    }

    #[test]
    fn durations_are_as_kubectl_takes_them() {
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert!(duration("-5s").is_err() && duration("soon").is_err());
    }
}
