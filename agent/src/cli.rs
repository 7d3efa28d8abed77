//! The command line.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Makes a node able to run WebAssembly, and brings images onto it.
#[derive(Debug, Parser)]
#[command(name = "quartermaster-agent", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 error, 2 usage, 3 refused, 4 nothing to do, 5 rolled back.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what `install` would change, and touch nothing
    ///
    /// Finds containerd through its systemd unit, reads its configuration, and prints the unified diff of the edit
    /// that adds the runtime handler `crun`; or says why this node is refused.
    Plan {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Install the runtime and its handler on this node
    ///
    /// Rehearses the change on a containerd of its own first, swaps the file and restarts containerd under systemd,
    /// runs a Wasm module through the handler, and puts everything back if any of it fails.
    Install {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// Stop before anything that disturbs the node: payload and rehearsal only
        #[arg(long)]
        prepare_only: bool,
    },
    /// Take out what `install` put in
    Uninstall {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// End pods that use the handler instead of refusing
        #[arg(long)]
        force: bool,
    },
    /// Show what is installed on this node
    Status {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Pull images into the store that the kubelet sees
    Pull {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// References as in a pod specification
        #[arg(required = true)]
        images: Vec<String>,
        /// Images at once
        #[arg(long, default_value_t = 3)]
        parallelism: u32,
        /// Attempts at each image
        #[arg(long, default_value_t = 3)]
        attempts: u32,
        /// Seconds for each attempt
        #[arg(long, default_value_t = 600)]
        deadline: u64,
    },
    /// Serve the coordinator's commands; what the agent's pod runs
    Serve(Box<Serve>),
    /// Carry out the open journal on the host; what the host unit runs
    #[command(hide = true)]
    Apply {
        /// Of the journal.
        journal: PathBuf,
    },
}

/// Where the host is and what is installed.
#[derive(Debug, Args)]
pub struct Host {
    /// Folder below which the host's file system lies
    #[arg(long, default_value = "/", env = "QUARTERMASTER_HOST_ROOT")]
    pub host_root: PathBuf,
    /// Folder with bin, lib and SHA256SUMS
    #[arg(long, default_value = "/payload", env = "QUARTERMASTER_PAYLOAD")]
    pub payload: PathBuf,
}

/// How the agent serves.
#[derive(Debug, Args)]
pub struct Serve {
    /// Folder below which the host's file system is mounted
    #[arg(long, default_value = "/host", env = "QUARTERMASTER_HOST_ROOT")]
    pub host_root: PathBuf,
    /// Folder with bin, lib and SHA256SUMS
    #[arg(long, default_value = "/payload", env = "QUARTERMASTER_PAYLOAD")]
    pub payload: PathBuf,
    /// Name of the node in the cluster
    #[arg(long, env = "QUARTERMASTER_NODE_NAME")]
    pub node_name: String,
    /// The pod's own address
    #[arg(long, env = "QUARTERMASTER_POD_IP")]
    pub pod_ip: Option<IpAddr>,
    /// Where to enrol
    #[arg(
        long,
        env = "QUARTERMASTER_ENROLL_URL",
        default_value = "https://quartermaster-coordinator.quartermaster.svc:7444"
    )]
    pub enroll_url: String,
    /// The coordinator's CA, in PEM
    #[arg(
        long,
        env = "QUARTERMASTER_CA_FILE",
        default_value = "/etc/quartermaster/ca/ca.crt"
    )]
    pub ca_file: PathBuf,
    /// The pod's projected token
    #[arg(
        long,
        env = "QUARTERMASTER_TOKEN_FILE",
        default_value = "/var/run/secrets/quartermaster/token"
    )]
    pub token_file: PathBuf,
    /// Commands, over mutual TLS
    #[arg(long, env = "QUARTERMASTER_LISTEN", default_value = "0.0.0.0:7443")]
    pub listen: SocketAddr,
    /// gRPC health, in plaintext
    #[arg(long, env = "QUARTERMASTER_HEALTH_LISTEN", default_value = "0.0.0.0:7445")]
    pub health_listen: SocketAddr,
    /// Prometheus metrics, in plaintext
    #[arg(long, env = "QUARTERMASTER_METRICS_LISTEN", default_value = "0.0.0.0:7446")]
    pub metrics_listen: SocketAddr,
    /// Form of the log
    #[arg(long, env = "QUARTERMASTER_LOG_FORMAT", default_value = "json")]
    pub log_format: LogFormat,
}

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
