//! The same interface from inside the pod, for a person who has nothing but kubectl.

use std::path::Path;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use hyper_util::rt::TokioIo;
use quartermaster_proto::v1;
use quartermaster_proto::v1::operator_client::OperatorClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::LONGEST_ANSWER;

/// What can be asked of the leader.
#[derive(Debug, Clone, Subcommand)]
pub enum Ask {
    /// Show nodes and Prefetches.
    Status,
    /// Show what provisioning would change on a node.
    Plan {
        /// Name of the Node.
        node: String,
    },
    /// Stop everything: what is under way goes on to its end, nothing else is begun.
    Pause,
    /// End a pause, or a halt after a run of failures.
    Resume,
    /// Show the last reports of nodes, also of agents that are gone.
    Reports {
        /// Names of Nodes; all by default.
        nodes: Vec<String>,
    },
}

/// Asks and prints the answer.
///
/// # Errors
/// When nobody answers on the socket, or the answer is no.
pub async fn ask(what: Ask, socket: &Path) -> anyhow::Result<()> {
    let mut leader = OperatorClient::new(dial(socket).await?).max_decoding_message_size(LONGEST_ANSWER);
    match what {
        Ask::Status => print_status(
            &leader
                .status(v1::StatusRequest {})
                .await
                .map_err(said)?
                .into_inner(),
        ),
        Ask::Plan { node } => {
            let request = v1::PlanRequest { node, timeout: None };
            let answer = leader.plan(request).await.map_err(said)?.into_inner();
            let preview = answer.preview.unwrap_or_default();
            if let Some(refusal) = preview.refusal {
                bail!(
                    "the node would be refused: {} {}",
                    refusal.message,
                    refusal.remedy
                );
            }
            if preview.diff.is_empty() {
                println!("nothing would change");
            }
            print!("{}", preview.diff);
        }
        Ask::Pause => print_control(
            leader
                .pause(v1::PauseRequest {})
                .await
                .map_err(said)?
                .into_inner(),
        ),
        Ask::Resume => print_control(
            leader
                .resume(v1::ResumeRequest {})
                .await
                .map_err(said)?
                .into_inner(),
        ),
        Ask::Reports { nodes } => {
            let answer = leader.reports(v1::ReportsRequest { nodes }).await.map_err(said)?;
            for report in answer.into_inner().reports {
                println!("{}\n{}\n", report.node, report.text);
            }
        }
    }
    Ok(())
}

async fn dial(socket: &Path) -> anyhow::Result<Channel> {
    let path = socket.to_owned();
    // The address is never looked at: the connector goes to the socket.
    Endpoint::from_static("http://operator.local")
        .connect_with_connector(service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .with_context(|| {
            format!(
                "nobody answers on {}; this works inside a coordinator's pod",
                socket.display()
            )
        })
}

fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

fn print_control(answer: v1::ControlResponse) {
    let control = answer.control.unwrap_or_default();
    println!(
        "paused: {}, halted: {}, removing: {}",
        control.paused,
        if control.halted.is_empty() {
            "no"
        } else {
            &control.halted
        },
        control.removing
    );
}

fn print_status(status: &v1::StatusResponse) {
    let control = status.control.clone().unwrap_or_default();
    if control.paused {
        println!("PAUSED: nothing is begun until it is resumed");
    }
    if !control.halted.is_empty() {
        println!("HALTED: {}", control.halted);
    }
    if control.removing {
        println!("REMOVING: every node is put back");
    }
    println!(
        "{:<40} {:<8} {:<7} {:<20} {:<12} MESSAGE",
        "NODE", "WANTED", "WASM", "REASON", "WORK"
    );
    for node in &status.nodes {
        let wasm = if node.condition.is_empty() {
            "-"
        } else {
            &node.condition
        };
        let work = if node.waits { "waits" } else { node.work.as_str() };
        println!(
            "{:<40} {:<8} {wasm:<7} {:<20} {work:<12} {}",
            node.name, node.wanted, node.reason, node.message
        );
    }
    if status.prefetches.is_empty() {
        return;
    }
    println!(
        "\n{:<40} {:<8} {:>6} {:>6} {:>7} {:>7}  MESSAGE",
        "PREFETCH", "PHASE", "IMAGES", "NODES", "READY", "FAILED"
    );
    for prefetch in &status.prefetches {
        let name = format!("{}/{}", prefetch.namespace, prefetch.name);
        println!(
            "{name:<40} {:<8} {:>6} {:>6} {:>7} {:>7}  {}",
            prefetch.phase,
            prefetch.images,
            prefetch.nodes,
            prefetch.ready,
            prefetch.failed,
            prefetch.message
        );
    }
}
