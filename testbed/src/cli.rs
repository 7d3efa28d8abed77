//! The command line: what a person types, and what they read.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use testbed::fleet::{self, Chaos, Scenario, Temper};
use testbed::layout::State;
use testbed::record::Record;
use testbed::{Cluster, Progress, Spec, forwarder, teardown};

/// A real Kubernetes cluster on this machine: systemd nodes with their own containerd, a control plane and a registry, in
/// namespaces of their own.
#[derive(Parser)]
#[command(name = "testbed", version)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Bring a testbed up and wait until its nodes are Ready.
    Up {
        #[command(flatten)]
        testbed: Name,
        /// Nodes and the series of their containerd: 1.6, 1.7, 2.1 or 2.4.
        #[arg(long, default_value = "worker-1=1.7,worker-2=2.1,worker-3=2.4")]
        nodes: String,
        /// Take down first what stands under this name.
        #[arg(long)]
        recreate: bool,
    },
    /// Take a testbed down: every process, namespace, cgroup and file of it, also after a crash.
    Down {
        #[command(flatten)]
        testbed: Name,
    },
    /// Show every testbed of this machine and its nodes.
    Status,
    /// Run kubectl as the administrator.
    #[command(disable_help_flag = true)]
    Kubectl(Passed),
    /// Run helm as the administrator.
    #[command(disable_help_flag = true)]
    Helm(Passed),
    /// Run a command on a node as root; a shell if none is given.
    Exec {
        #[command(flatten)]
        testbed: Name,
        /// The node.
        node: String,
        /// The command, best after `--`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Run a command of this machine in the testbed's network, where pods and services are within reach.
    InFabric {
        #[command(flatten)]
        testbed: Name,
        /// The command, best after `--`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// Put an image into the testbed's registry.
    Push {
        #[command(flatten)]
        testbed: Name,
        /// An OCI archive, a Docker archive, an OCI layout, or the name of an image that Docker or buildah has here.
        image: PathBuf,
        /// What it is called there: server:1.0. Pods name it registry.testbed:5000/server:1.0.
        #[arg(value_name = "NAME:TAG")]
        reference: String,
    },
    /// Cut a node's power; its disk stays.
    Stop {
        #[command(flatten)]
        testbed: Name,
        /// The node.
        node: String,
    },
    /// Boot a node again from its disk.
    Start {
        #[command(flatten)]
        testbed: Name,
        /// The node.
        node: String,
    },
    /// Print the path of the kubeconfig, for your own kubectl.
    Kubeconfig {
        #[command(flatten)]
        testbed: Name,
    },
    /// Put the real coordinator before thousands of simulated nodes, on a testbed of its own, and measure it.
    Fleet {
        /// Name of the testbed.
        #[arg(long, default_value = "fleet")]
        name: String,
        /// How many nodes.
        #[arg(long, default_value_t = 500)]
        nodes: usize,
        /// How many images.
        #[arg(long, default_value_t = 100)]
        images: usize,
        /// What times, failures and losses are drawn from.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// What is done with the fleet.
        #[arg(
            long,
            value_enum,
            value_delimiter = ',',
            default_value = "absent,present,restart,provision"
        )]
        scenario: Vec<Scenario>,
        /// Mean time in which an agent pulls an image, in milliseconds; three are pulled at once.
        #[arg(long, default_value_t = 150)]
        latency: u64,
        /// The part of commands and pulls that fail, from 0 to 1.
        #[arg(long, default_value_t = 0.0)]
        failures: f64,
        /// The part of commands whose connection is lost in the middle, from 0 to 1.
        #[arg(long, default_value_t = 0.0)]
        losses: f64,
    },
    /// Deal out faults at random to simulated nodes, two coordinators and the API server, and check what must hold.
    Chaos {
        /// Name of the testbed.
        #[arg(long, default_value = "chaos")]
        name: String,
        /// How many nodes.
        #[arg(long, default_value_t = 40)]
        nodes: usize,
        /// What is drawn from; one of the clock's if none is given. It is printed.
        #[arg(long)]
        seed: Option<u64>,
        /// For how long, such as 120s, 2m or 1h.
        #[arg(long, default_value = "2m", value_parser = fleet::duration)]
        duration: Duration,
        /// How many nodes may be down by us.
        #[arg(long, default_value_t = 4)]
        max_unavailable: usize,
    },
    /// Carries connections from the host to the API server; started by `up`.
    #[command(name = forwarder::SUBCOMMAND, hide = true)]
    Forward {
        network: PathBuf,
        target: SocketAddr,
        port_file: PathBuf,
    },
}

#[derive(clap::Args)]
struct Name {
    /// Name of the testbed.
    #[arg(long, default_value = "qm", env = "TESTBED_NAME")]
    name: String,
}

/// A command line for a program of the testbed's own.
#[derive(clap::Args)]
struct Passed {
    #[command(flatten)]
    testbed: Name,
    /// What it is given.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Does what the command line says; returns the exit code, which for `kubectl` and `exec` is that of the command.
pub(crate) fn run() -> ExitCode {
    match act(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testbed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(action: Action) -> Result<()> {
    match action {
        Action::Up {
            testbed: Name { name },
            nodes,
            recreate,
        } => up(&name, &nodes, recreate),
        Action::Down {
            testbed: Name { name },
        } => {
            testbed::host::check()?;
            teardown::down(&name, &Progress::terminal())
        }
        Action::Status => status(),
        Action::Kubectl(Passed { testbed, args }) => {
            let cluster = Cluster::open(&testbed.name)?;
            become_program(
                Command::new(cluster.program("kubectl"))
                    .args(args)
                    .env("KUBECONFIG", cluster.kubeconfig())
                    .env(
                        "KUBECACHEDIR",
                        State::of(&testbed.name).root().join("kubectl-cache"),
                    ),
            )
        }
        Action::Helm(Passed { testbed, args }) => {
            let cluster = Cluster::open(&testbed.name)?;
            become_program(
                Command::new(cluster.program("helm"))
                    .args(args)
                    .envs(cluster.helm_env()),
            )
        }
        Action::Exec {
            testbed: Name { name },
            node,
            command,
        } => {
            let line = Cluster::open(&name)?.enter_node(&node)?;
            let shell = [OsString::from("bash"), OsString::from("-l")];
            let command = if command.is_empty() { &shell[..] } else { &command };
            become_program(Command::new(&line[0]).args(&line[1..]).args(command))
        }
        Action::InFabric {
            testbed: Name { name },
            command,
        } => {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            print!("{}", Cluster::open(&name)?.in_fabric(&words)?);
            Ok(())
        }
        Action::Push {
            testbed: Name { name },
            image,
            reference,
        } => Progress::terminal().step(&format!("{reference} pushed"), || {
            Cluster::open(&name)?.push(image, &reference)
        }),
        Action::Stop {
            testbed: Name { name },
            node,
        } => Progress::terminal().step(&format!("{node} is off"), || {
            Cluster::open(&name)?.stop_node(&node)
        }),
        Action::Start {
            testbed: Name { name },
            node,
        } => {
            let cluster = Cluster::open(&name)?;
            let progress = Progress::terminal();
            progress.step(&format!("{node} booted"), || cluster.start_node(&node))?;
            progress.step(&format!("{node} Ready"), || {
                cluster.wait_until_ready(&[&node], Duration::from_secs(120))
            })
        }
        Action::Kubeconfig {
            testbed: Name { name },
        } => {
            println!("{}", Cluster::open(&name)?.kubeconfig().display());
            Ok(())
        }
        Action::Fleet {
            name,
            nodes,
            images,
            seed,
            scenario,
            latency,
            failures,
            losses,
        } => {
            let options = fleet::Options {
                name,
                nodes,
                images,
                seed,
                scenarios: scenario,
                temper: Temper {
                    image: Duration::from_millis(latency),
                    failures,
                    losses,
                    ..Temper::default()
                },
            };
            let measured = fleet::run(options, &Progress::terminal())?;
            print!("{}", fleet::table(&measured));
            Ok(())
        }
        Action::Chaos {
            name,
            nodes,
            seed,
            duration,
            max_unavailable,
        } => {
            let chaos = Chaos {
                name,
                nodes,
                seed: seed.unwrap_or_else(fleet::seed_of_the_clock),
                duration,
                max_unavailable,
            };
            for line in fleet::chaos(&chaos, &Progress::terminal())? {
                println!("{line}");
            }
            Ok(())
        }
        Action::Forward {
            network,
            target,
            port_file,
        } => forwarder::serve(&network, target, &port_file),
    }
}

fn up(name: &str, nodes: &str, recreate: bool) -> Result<()> {
    let start = Instant::now();
    let spec = Spec::parse(name, nodes)?;
    testbed::host::check()?;
    let progress = Progress::terminal();
    if recreate {
        teardown::down(name, &progress)?;
    }
    let cluster = Cluster::up(&spec, &progress).with_context(|| {
        format!("testbed {name} did not come up; what is there of it goes with: testbed down --name {name}")
    })?;
    eprintln!();
    eprint!("{}", cluster.kubectl(&["get", "nodes", "--output=wide"])?);
    eprintln!(
        "\nTestbed {name} is up after {:.1} s. Use it with\n  testbed kubectl --name {name} get pods -A\n  \
         export KUBECONFIG={}",
        start.elapsed().as_secs_f64(),
        cluster.kubeconfig().display()
    );
    Ok(())
}

fn status() -> Result<()> {
    let names = teardown::names()?;
    if names.is_empty() {
        println!("no testbed is up");
    }
    for name in names {
        let state = State::of(&name);
        match Cluster::open(&name) {
            Ok(cluster) => {
                let whole = Record::read(&state).is_ok_and(|record| record.is_complete());
                let note = if whole {
                    ""
                } else {
                    " (not complete: up is still at work, or was broken off)"
                };
                println!("{name}{note}\n  kubeconfig {}", cluster.kubeconfig().display());
                for node in &cluster.spec().nodes {
                    let running = if cluster.is_running(&node.name)? {
                        "running"
                    } else {
                        "off"
                    };
                    println!("  {:<20} containerd {:<5} {running}", node.name, node.containerd);
                }
            }
            Err(error) => println!("{name}: broken: {error:#}\n  end it with: testbed down --name {name}"),
        }
    }
    Ok(())
}

/// Ends this program and goes on as another, so that its signals, terminal and exit code are its own.
fn become_program(command: &mut Command) -> Result<()> {
    let error = command.exec();
    let program: &OsStr = command.get_program();
    bail!("can't run {}: {error}", program.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn kubectls_own_flags_reach_kubectl() {
        let cli = Cli::try_parse_from([
            "testbed", "kubectl", "--name", "tb", "get", "pods", "-A", "--help",
        ])
        .unwrap();
        let Action::Kubectl(Passed { testbed, args }) = cli.command else {
            panic!("not kubectl");
        };
        assert_eq!(testbed.name, "tb");
        assert_eq!(args, ["get", "pods", "-A", "--help"]);
    }

    #[test]
    fn a_command_for_a_node_may_begin_with_a_dash() {
        let cli = Cli::try_parse_from(["testbed", "exec", "worker-1", "--", "-x", "y"]).unwrap();
        let Action::Exec { node, command, .. } = cli.command else {
            panic!("not exec");
        };
        assert_eq!((node.as_str(), command.len()), ("worker-1", 2));
    }
}
