//! The demo: three nodes, each with another containerd, become able to run WebAssembly and get images before
//! they are needed. Every step is shown with its time, every claim with its proof, and a claim that does not
//! hold ends it with an error.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::deployment::{self, Options};
use testbed::{Cluster, Progress, Spec, wait_for};

const NAME: &str = "qm";
const NODES: &str = "worker-1=1.7,worker-2=2.1,worker-3=2.4";
const WORKERS: [&str; 3] = ["worker-1", "worker-2", "worker-3"];
const WASM_POD: &str = include_str!("../../../manifests/samples/wasm-pod.yaml");
const PREFETCH: &str = include_str!("../../../manifests/samples/prefetch.yaml");
const DEPLOYMENT: &str = include_str!("../../assets/demo/deployment.yaml");

fn main() -> ExitCode {
    let mut screen = Screen::new();
    match demo(&mut screen) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen.fail(&error);
            ExitCode::FAILURE
        }
    }
}

fn demo(screen: &mut Screen) -> Result<()> {
    screen.title("A cluster of three nodes, with containerd 1.7, 2.1 and 2.4");
    let spec = Spec::parse(NAME, NODES)?;
    // The cluster of an earlier run is taken as it is.
    let (cluster, product) = deployment::set(&spec, true, &Progress::terminal())?;
    screen.step("kubectl apply -k manifests", || {
        let options = Options {
            linger: Some("5s".to_owned()),
            ..Options::default()
        };
        deployment::deploy(&cluster, &product, &options)
    })?;

    screen.title("worker-1 becomes able to run WebAssembly");
    provision(screen, &cluster, "worker-1", true)?;
    let pod = WASM_POD.replace(
        "  restartPolicy",
        "  nodeSelector: {kubernetes.io/hostname: worker-1}\n  restartPolicy",
    );
    run_wasm(screen, &cluster, &pod, "wasmedge")?;

    screen.title("worker-2 and worker-3 do too, one restart of containerd at a time");
    screen.command("kubectl annotate node worker-2 worker-3 kwasm.sh/kwasm-node=true");
    deployment::annotate(&cluster, &["worker-2", "worker-3"], "kwasm.sh/kwasm-node=true")?;
    for node in ["worker-2", "worker-3"] {
        screen.step(&format!("{node} is provisioned"), || {
            deployment::wait_until_provisioned(&cluster, node, Duration::from_secs(120))
        })?;
    }
    let pod = WASM_POD
        .replace("runtimeClassName: wasmedge", "runtimeClassName: crun")
        .replace(
            "  restartPolicy",
            "  nodeSelector: {kubernetes.io/hostname: worker-3}\n  restartPolicy",
        );
    run_wasm(screen, &cluster, &pod, "crun")?;

    screen.title("The images of tomorrow's workload, on every node before it needs them");
    cluster.kubectl(&["delete", "deployment", "nginx", "--ignore-not-found", "--wait"])?;
    screen.command("kubectl apply -f deployment.yaml   # app: nginx, two replicas that no node has room for");
    cluster.apply(DEPLOYMENT)?;
    screen.command("kubectl apply -f prefetch.yaml");
    cluster.kubectl(&["delete", "prefetch", "prefetch-sample", "--ignore-not-found"])?;
    cluster.apply(PREFETCH)?;
    screen.step("the Prefetch is READY", || {
        wait_for("the Prefetch to be READY", Duration::from_secs(120), || {
            let prefetch = deployment::get(&cluster, &["prefetch", "prefetch-sample"])?;
            let phase = prefetch["status"]["phase"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            ensure!(phase == "READY", "it is {phase}: {}", prefetch["status"]);
            Ok(Some(()))
        })
        .with_context(|| deployment::coordinator_log(&cluster))
    })?;
    screen.command("kubectl get prefetch");
    screen.output(&cluster.kubectl(&["get", "prefetch"])?);
    for node in WORKERS {
        screen.command(&format!("crictl images      # on {node}"));
        let images = cluster.exec(node, &["crictl", "images"])?;
        let ours: Vec<&str> = images
            .lines()
            .filter(|line| line.starts_with("IMAGE") || line.contains("/server"))
            .collect();
        screen.output(&ours.join("\n"));
        for image in ["server ", "server-init "] {
            ensure!(
                images.lines().any(|line| line.contains(&format!("/{image}"))),
                "{node} lacks the image {image}:\n{images}"
            );
        }
    }

    screen.title("Nothing is left running when there is nothing to do");
    screen.step("the agents are gone", || {
        deployment::wait_until_agents_are_gone(&cluster, Duration::from_secs(120))
    })?;
    screen.command("kubectl get pods -n quartermaster");
    screen.output(&cluster.kubectl(&["get", "pods", "--namespace=quartermaster"])?);
    screen.command("kubectl get nodes -L kwasm.sh/kwasm-provisioned,kwasm.sh/crun");
    screen.output(&cluster.kubectl(&["get", "nodes", "-L", "kwasm.sh/kwasm-provisioned,kwasm.sh/crun"])?);

    screen.title("And undone without a trace");
    let before = cluster.exec("worker-1", &["cat", "/etc/containerd/config.toml"])?;
    ensure!(
        before.contains("runtimes.crun"),
        "worker-1 has no handler crun:\n{before}"
    );
    screen.command("kubectl annotate node worker-1 kwasm.sh/kwasm-node-");
    cluster.kubectl(&["delete", "pod", "hello-wasm", "--ignore-not-found", "--wait"])?;
    deployment::annotate(&cluster, &["worker-1"], "kwasm.sh/kwasm-node-")?;
    screen.step("worker-1 is as it was", || {
        wait_for("worker-1 to carry no mark", Duration::from_secs(120), || {
            let left = deployment::marks(&cluster, "worker-1")?;
            let left: Vec<_> = left
                .iter()
                .filter(|mark| mark.starts_with("kwasm.sh/kwasm-p") || *mark == "WasmRuntimeReady")
                .collect();
            ensure!(left.is_empty(), "it still carries {left:?}");
            Ok(Some(()))
        })
        .with_context(|| deployment::coordinator_log(&cluster))
    })?;
    let after = cluster.exec("worker-1", &["cat", "/etc/containerd/config.toml"])?;
    let original = cluster.exec("worker-1", &["cat", "/run/demo-config.toml"])?;
    ensure!(
        after == original,
        "containerd's configuration differs from what it was:\n{after}"
    );
    screen.note("containerd's configuration is byte for byte what it was");
    screen.done();
    Ok(())
}

/// Annotates a node and waits, showing its agent's health on the way.
fn provision(screen: &mut Screen, cluster: &Cluster, node: &str, probe: bool) -> Result<()> {
    cluster.exec(
        node,
        &["cp", "/etc/containerd/config.toml", "/run/demo-config.toml"],
    )?;
    screen.command(&format!("kubectl annotate node {node} kwasm.sh/kwasm-node=true"));
    deployment::annotate(cluster, &[node], "kwasm.sh/kwasm-node=true")?;
    screen.step(&format!("{node} is provisioned"), || {
        deployment::wait_until_provisioned(cluster, node, Duration::from_secs(120))
    })?;
    if probe {
        let health = screen.step("an agent answers for its health", || {
            wait_for("an agent to answer", Duration::from_secs(30), || {
                let pods = deployment::get(
                    cluster,
                    &[
                        "pods",
                        "--namespace=quartermaster",
                        "--selector=app.kubernetes.io/component=agent",
                    ],
                )?;
                let ip = pods["items"][0]["status"]["podIP"]
                    .as_str()
                    .context("the agent has no address yet")?
                    .to_owned();
                let address = format!("-addr={ip}:7445");
                cluster
                    .in_fabric(&[
                        "grpc-health-probe",
                        &address,
                        "-connect-timeout=2s",
                        "-rpc-timeout=2s",
                    ])
                    .map(|answer| Some((ip, answer)))
            })
            .map_err(Into::into)
        })?;
        screen.command(&format!("grpc-health-probe -addr={}:7445", health.0));
        screen.output(if health.1.trim().is_empty() {
            "status: SERVING"
        } else {
            health.1.trim()
        });
    }
    screen.command(&format!("kubectl describe node {node}      # its Events"));
    let events = cluster.kubectl(&[
        "get",
        "events",
        "--namespace=default",
        &format!("--field-selector=involvedObject.kind=Node,involvedObject.name={node},reason=Provisioned"),
        "--output=custom-columns=REASON:.reason,MESSAGE:.message",
    ])?;
    screen.output(&events);
    Ok(())
}

fn run_wasm(screen: &mut Screen, cluster: &Cluster, pod: &str, class: &str) -> Result<()> {
    cluster.kubectl(&["delete", "pod", "hello-wasm", "--ignore-not-found", "--wait"])?;
    screen.command(&format!(
        "kubectl apply -f wasm-pod.yaml      # runtimeClassName: {class}"
    ));
    cluster.apply(pod)?;
    screen.step("the Wasm pod has run", || {
        wait_for("the Wasm pod to run to its end", Duration::from_secs(60), || {
            let pod = deployment::get(cluster, &["pod", "hello-wasm"])?;
            let phase = pod["status"]["phase"].as_str().unwrap_or_default().to_owned();
            ensure!(phase == "Succeeded", "it is {phase}: {}", pod["status"]);
            Ok(Some(()))
        })
        .map_err(Into::into)
    })?;
    screen.command("kubectl logs hello-wasm");
    let log = cluster.kubectl(&["logs", "hello-wasm"])?;
    screen.output(&log);
    ensure!(
        log.contains("hello from WebAssembly"),
        "the module did not print its line: {log}"
    );
    Ok(())
}

/// What is shown, with colours on a terminal.
struct Screen {
    colours: bool,
    start: Instant,
}

impl Screen {
    fn new() -> Self {
        Self {
            colours: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            start: Instant::now(),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn title(&self, text: &str) {
        println!("\n{}", self.paint("1", text));
    }

    fn command(&self, line: &str) {
        println!("  {}", self.paint("36", &format!("$ {line}")));
    }

    fn output(&self, text: &str) {
        for line in text.trim_end().lines() {
            println!("      {line}");
        }
    }

    fn note(&self, text: &str) {
        println!("  {} {text}", self.paint("32", "✓"));
    }

    fn step<T>(&self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = work().with_context(|| what.to_owned())?;
        let took = format!("{:>6.1} s", start.elapsed().as_secs_f64());
        println!(
            "  {} {what:<58} {}",
            self.paint("32", "✓"),
            self.paint("2", &took)
        );
        Ok(result)
    }

    fn done(&self) {
        let all = self.start.elapsed().as_secs_f64();
        println!(
            "\n{}",
            self.paint("1;32", &format!("All of it holds. {all:.0} s in all."))
        );
        println!("The cluster stays up: try `make kubectl`, and end it with `make demo-down`.");
    }

    fn fail(&self, error: &anyhow::Error) {
        println!("\n{} {error:#}", self.paint("1;31", "The demo failed:"));
    }
}
