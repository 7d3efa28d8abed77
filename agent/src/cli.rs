//! The command line.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::host::Overrides;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 error, 2 usage, 3 refused, 4 nothing to do, 5 rolled back.";

const LONG: &str = "\
On one node, as root, without a cluster:
  quartermaster-agent plan                       what would change; touches nothing
  quartermaster-agent install --payload FOLDER   makes the change, proves it, or puts everything back
  quartermaster-agent status                     what is installed, and who uses it
  quartermaster-agent uninstall                  takes it out, byte for byte

A copy stays on the node, so that it can be put back when nothing else is left:
  /opt/quartermaster/current/bin/quartermaster-agent uninstall

Exit codes:
  0  done
  1  an error; the message says what failed and what the node is now
  2  usage
  3  refused: nothing was touched, the message says why and what to do
  4  nothing to do: it is so already
  5  rolled back: something failed after the change, and the node is as it was

Set NO_COLOR to have no colours. Where the output is no terminal, plain lines are printed; --json is for programs.";

const INSTALL: &str = "\
The stages:
  detect    what runs here: system, containerd, its unit, its configuration
  plan      which lines to add; every other byte of the file stays
  payload   crun, WasmEdge and every library they need, into /opt/quartermaster/VERSION
  rehearse  the node's own containerd is booted on the changed file, in a sandbox, and compared
  swap      the file is replaced and containerd restarted, by a unit of the host that outlives this program
  verify    a Wasm module has to run through the handler
  commit    what was done is written down for `uninstall`

Running pods keep running. Interrupted at any point, the node ends wholly old or wholly new; `status` tells, and
`install` or `uninstall` goes on from there.

The payload is in the agent's image, under /payload:
  ctr images mount IMAGE /mnt && /mnt/quartermaster-agent install --payload /mnt/payload

Exit codes: 0 done, 1 error, 2 usage, 3 refused, 4 nothing to do, 5 rolled back.";

const UNINSTALL: &str = "\
Pods that use the handler are named, and nothing is done while there are any; --force ends them.
The configuration becomes byte for byte what it was, if nobody else has changed it since. If somebody has, only what
`install` added goes. At the end nothing of Quartermaster is on the node.

Exit codes: 0 done, 1 error, 2 usage, 3 refused, 4 nothing to do, 5 rolled back.";

/// Makes a node able to run WebAssembly, and brings images onto it.
#[derive(Debug, Parser)]
#[command(name = "quartermaster-agent", version, max_term_width = 100)]
#[command(after_help = EXIT_CODES, after_long_help = LONG)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const PLAN_EXAMPLES: &str = "\
Examples:
  quartermaster-agent plan                                              this node, as it runs
  quartermaster-agent plan --root ./worker-1 --containerd-version 1.7.24
  quartermaster-agent plan --root ./worker-1 --output ./after           and write the resulting file below ./after
  quartermaster-agent plan --root ./worker-1 --json | jq -r .refusal.remedy

Exit codes: 0 an edit, 1 error, 2 usage, 3 refused, 4 nothing to do.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what `install` would change, and touch nothing
    ///
    /// Finds containerd through its systemd unit, reads its configuration, and prints the unified diff of the edit
    /// that adds the runtime handler `crun`; or says why this node is refused, with the file, the line and what to
    /// do about it.
    ///
    /// With --root it plans for a host whose files lie in a folder, without any daemon: copy what you have of
    /// /etc/containerd, /etc/os-release, the unit files and the folders of k3s, RKE2, MicroK8s or k0s below it under
    /// their own paths. A configuration alone is enough.
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(Box<Plan>),
    /// Install the runtime and its handler on this node
    ///
    /// Rehearses the change on a containerd of its own first, swaps the file and restarts containerd under systemd,
    /// runs a Wasm module through the handler, and puts everything back if any of it fails.
    #[command(after_long_help = INSTALL)]
    Install {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// Stop before anything that disturbs the node: payload and rehearsal only
        #[arg(long)]
        prepare_only: bool,
        /// Print JSON: one object a line, the last one with the outcome
        #[arg(long)]
        json: bool,
    },
    /// Take out what `install` put in
    #[command(after_long_help = UNINSTALL)]
    Uninstall {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// End pods that use the handler instead of refusing
        #[arg(long)]
        force: bool,
        /// Print JSON: one object a line, the last one with the outcome
        #[arg(long)]
        json: bool,
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
    ///
    /// Asks containerd to pull each of them, with the mirrors and certificates that the node has set, and CRI for
    /// the proof. With a terminal it shows how far each image is.
    Pull {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// What to pull and how.
        #[command(flatten)]
        pull: Pull,
    },
    /// Let go of images that `pull --pin` or the coordinator has pinned
    Release {
        /// Where the host is.
        #[command(flatten)]
        host: Host,
        /// Whose pins; everybody's that Quartermaster has set where none is named
        #[arg(long)]
        owner: Option<String>,
        /// Keep the pins of these images
        #[arg(long, value_name = "IMAGE")]
        keep: Vec<String>,
        /// Remove images that were let go, if they are here because of Quartermaster and no container uses them
        #[arg(long)]
        remove_unused: bool,
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

/// What is planned, and how it is shown.
#[derive(Debug, Args)]
pub struct Plan {
    /// Where the host is.
    #[command(flatten)]
    pub host: Host,
    /// Plan for the host whose files lie below this folder, without any daemon
    #[arg(long, value_name = "DIR", conflicts_with = "host_root")]
    pub root: Option<PathBuf>,
    /// Write the resulting file below this folder, under its own path
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
    /// What an operator says instead of what would be found.
    #[command(flatten)]
    pub overrides: Overrides,
}

/// What to pull and how.
#[derive(Debug, Args)]
#[group(id = "order")]
pub struct Pull {
    /// References as in a pod specification
    #[arg(required = true)]
    pub images: Vec<String>,
    /// Images at once
    #[arg(long, default_value_t = 3)]
    pub parallelism: u32,
    /// Attempts at each image
    #[arg(long, default_value_t = 3)]
    pub attempts: u32,
    /// Seconds for each attempt
    #[arg(long, default_value_t = 600)]
    pub deadline: u32,
    /// Seconds without a byte after which an attempt is given up
    #[arg(long, default_value_t = 60)]
    pub stall_after: u32,
    /// Ask the registry also for images that are here: a tag may have moved
    #[arg(long)]
    pub always: bool,
    /// Pin the images for this owner, so that the kubelet does not collect them
    #[arg(long, value_name = "OWNER")]
    pub pin: Option<String>,
    /// Pull secrets: a docker config.json
    #[arg(long, value_name = "FILE")]
    pub credentials: Vec<PathBuf>,
    /// Ask the kubelet's credential providers too
    #[arg(long)]
    pub credential_providers: bool,
    /// Percent of the disk that stay free; without it what the kubelet's thresholds ask for
    #[arg(long, value_name = "PERCENT")]
    pub keep_free: Option<u32>,
    /// Print one line of JSON for each image
    #[arg(long)]
    pub json: bool,
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
        default_value = "https://quartermaster-enrollment.quartermaster.svc:7444"
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
    /// What an operator says instead of what would be found.
    #[command(flatten)]
    pub overrides: Overrides,
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
