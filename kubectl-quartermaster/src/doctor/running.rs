//! Judges what runs: the leader, nodes, clocks, Prefetches, and whether another operator runs as well.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;

use super::facts::Facts;
use super::finding::Finding;
use crate::look::{counted, named};
use crate::migrate::Predecessor;
use crate::status::UNDER_WAY;
use crate::trouble::Trouble;

/// A clock that is off by more is worth knowing.
const NOTED: SignedDuration = SignedDuration::from_secs(5);
/// The API server dates its answers by the second.
const SECOND: SignedDuration = SignedDuration::from_secs(1);
/// Certificates are good from so long before they were signed: with a clock that is off by more they are not good yet.
const SKEW: SignedDuration = SignedDuration::from_mins(5);
/// A kubelet's heartbeat comes every ten seconds, and after forty without one its node is not Ready.
const HEARTBEAT: SignedDuration = SignedDuration::from_secs(40);
/// The leader renews its Lease every two seconds or so.
const RENEWAL: SignedDuration = SignedDuration::from_secs(5);

pub(super) fn leader(facts: &Facts) -> Vec<Finding> {
    let status = match &facts.leader {
        Ok(status) => status,
        Err(trouble) => return vec![no_leader(facts, trouble)],
    };
    let mut findings = Vec::new();
    let ours = env!("CARGO_PKG_VERSION");
    if status.version == ours {
        findings.push(Finding::good(format!(
            "{} leads and answers, version {ours}",
            status.leader
        )));
    } else {
        findings.push(Finding::note(
            format!(
                "{} leads and answers; it is of version {}, this program of {ours}",
                status.leader, status.version
            ),
            "use the same version of both",
        ));
    }
    if status.paused {
        findings.push(Finding::note(
            "it is paused: nothing is begun",
            "kubectl quartermaster resume",
        ));
    }
    if let Some(why) = &status.halted {
        findings.push(Finding::wrong(
            format!("the rollout is halted: {why}"),
            "look at `kubectl quartermaster logs NODE`, put right what failed, then `kubectl quartermaster resume`",
        ));
    }
    if status.removing {
        findings.push(Finding::note(
            "everything is being removed from the cluster, whatever annotations say",
            "when that is over, or was a mistake: kubectl delete configmap quartermaster-control, and install again",
        ));
    }
    let failed = status
        .prefetches
        .iter()
        .filter(|prefetch| prefetch.phase == "FAILED");
    findings.extend(failed.map(|prefetch| {
        Finding::wrong(
            format!(
                "the Prefetch {}/{} is FAILED: {}",
                prefetch.namespace, prefetch.name, prefetch.message
            ),
            format!(
                "kubectl get prefetch -n {} {} -o yaml shows each image's reasons",
                prefetch.namespace, prefetch.name
            ),
        )
    }));
    findings
}

fn no_leader(facts: &Facts, trouble: &Trouble) -> Finding {
    let namespace = &facts.namespace;
    let held = facts
        .lease
        .as_ref()
        .ok()
        .and_then(|lease| lease.as_ref())
        .and_then(renewed);
    if let (Some(renewed), Ok((now, _))) = (held, &facts.time) {
        let age = now.duration_since(renewed);
        if age > SignedDuration::from_secs(30) {
            return Finding::wrong(
                format!("nobody leads: the Lease was last renewed {} ago", words(age)),
                format!("kubectl logs -n {namespace} -l app.kubernetes.io/component=coordinator"),
            );
        }
    }
    let remedy = match trouble {
        Trouble::Forbidden { .. } => String::new(),
        _ => format!("kubectl get pods,lease -n {namespace}, then the coordinator's log"),
    };
    Finding::wrong(trouble.to_string(), remedy)
}

pub(super) fn nodes(facts: &Facts) -> Vec<Finding> {
    let nodes = match &facts.nodes {
        Ok(nodes) => nodes,
        Err(why) => return vec![Finding::unseen("the nodes", why)],
    };
    let mut failed: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    let mut blocked = Vec::new();
    let mut running = 0;
    for node in nodes {
        let Some((status, reason, message)) = condition(node) else {
            continue;
        };
        match (status, reason) {
            (_, "RemovalBlocked") => blocked.push(node.name_any()),
            ("True", _) => running += 1,
            // What runs beside us is a finding of its own.
            (_, reason) if UNDER_WAY.contains(&reason) || reason == "AnotherOperator" => {}
            (_, reason) => {
                let key = (reason.to_owned(), message.to_owned());
                failed.entry(key).or_default().push(node.name_any());
            }
        }
    }
    let mut findings = vec![Finding::good(format!(
        "{running} of {} run WebAssembly",
        counted(nodes.len(), "node")
    ))];
    findings.extend(failed.iter().map(|((reason, message), names)| {
        Finding::wrong(
            format!("{}: {reason}: {message}", named(names, 6)),
            remedy(reason, &names[0], &facts.namespace),
        )
    }));
    if !blocked.is_empty() {
        findings.push(Finding::note(
            format!(
                "{} can't be put back yet: pods use the handler",
                named(&blocked, 6)
            ),
            format!("kubectl quartermaster status {} names them", blocked[0]),
        ));
    }
    findings
}

fn remedy(reason: &str, node: &str, namespace: &str) -> String {
    match reason {
        "UnsupportedHost" | "UnsupportedConfiguration" | "HandlerConflict" => {
            format!(
                "kubectl quartermaster plan {node} shows what stands in the way; `unprovision` takes the wish back"
            )
        }
        "AgentUnavailable" => format!(
            "kubectl get pods -n {namespace} -o wide --field-selector spec.nodeName={node}, and the Events of that pod; \
             if there is none: the node's taints and its free resources"
        ),
        _ => format!("kubectl quartermaster logs {node}; it is tried again by itself"),
    }
}

pub(super) fn clocks(facts: &Facts) -> Vec<Finding> {
    let (now, here) = match &facts.time {
        Ok(time) => *time,
        Err(why) => return vec![Finding::unseen("clocks", why)],
    };
    let mut findings = Vec::new();
    if let Some(off) = off(here, now, SECOND) {
        findings.push(skewed("this machine", off, true));
    }
    if facts.leader.is_ok()
        && let Some(renewed) = facts
            .lease
            .as_ref()
            .ok()
            .and_then(|lease| lease.as_ref())
            .and_then(renewed)
        && let Some(off) = off(renewed, now, RENEWAL)
    {
        findings.push(skewed("the leader", off, false));
    }
    match (&facts.heartbeats, &facts.nodes) {
        (Ok(beats), Ok(nodes)) => findings.extend(of_nodes(beats, nodes, now)),
        (Err(why), _) => findings.push(Finding::unseen("the clocks of nodes", why)),
        _ => {}
    }
    if findings.is_empty() {
        findings.push(Finding::good(
            "the clocks of the leader and of the nodes agree with the API server's",
        ));
    }
    findings
}

/// How far a clock is off that said `told` when it was `now`; what it said may be so old.
fn off(told: Timestamp, now: Timestamp, old: SignedDuration) -> Option<SignedDuration> {
    let ahead = told.duration_since(now + SECOND);
    let behind = (now - old).duration_since(told);
    if ahead > NOTED {
        Some(ahead)
    } else if behind > NOTED {
        Some(-behind)
    } else {
        None
    }
}

fn skewed(whose: &str, off: SignedDuration, harmless: bool) -> Finding {
    let way = if off.is_positive() { "ahead of" } else { "behind" };
    let what = format!(
        "the clock of {whose} is {} {way} the API server's",
        words(off.abs())
    );
    let remedy = "set it by NTP (timedatectl, chronyc tracking)";
    if off.abs() >= SKEW && !harmless {
        Finding::wrong(
            format!("{what}: certificates signed for it are not good at once"),
            remedy,
        )
    } else {
        Finding::note(what, remedy)
    }
}

fn of_nodes(beats: &[Lease], nodes: &[Node], now: Timestamp) -> Vec<Finding> {
    let mut off_nodes: Vec<(SignedDuration, String)> = nodes
        .iter()
        // Whose kubelet is silent has an old heartbeat, whatever its clock says.
        .filter(|node| is_ready(node))
        .filter_map(|node| {
            let name = node.name_any();
            let beat = beats.iter().find(|beat| beat.name_any() == name)?;
            Some((off(renewed(beat)?, now, HEARTBEAT)?, name))
        })
        .collect();
    off_nodes.sort_by_key(|(off, _)| std::cmp::Reverse(off.abs()));
    const SHOWN: usize = 5;
    let mut findings: Vec<Finding> = off_nodes
        .iter()
        .take(SHOWN)
        .map(|(off, name)| skewed(name, *off, false))
        .collect();
    if let Some(more @ 1..) = off_nodes.len().checked_sub(SHOWN) {
        findings.push(Finding::note(
            format!("the clocks of {more} more nodes are off, by less"),
            "",
        ));
    }
    findings
}

pub(super) fn predecessors(facts: &Facts) -> Vec<Finding> {
    let found = match &facts.predecessors {
        Ok(found) => found,
        Err(why) => return vec![Finding::unseen("other operators", why)],
    };
    let migrate = "kubectl quartermaster migrate takes over from it";
    let mut findings: Vec<Finding> = found
        .running()
        .map(|operator| {
            Finding::wrong(
                format!(
                    "{} still runs ({}/{}): {}",
                    operator.of.name(),
                    operator.namespace,
                    operator.name,
                    match operator.of {
                        Predecessor::Kwasm => "nothing is provisioned beside it",
                        Predecessor::Prefetch => "images are pulled twice",
                    }
                ),
                migrate,
            )
        })
        .collect();
    let left = found.jobs.len() + found.pods.len();
    if left > 0 {
        findings.push(Finding::note(
            format!(
                "{} and {} of operators that came before are left over",
                counted(found.jobs.len(), "Job"),
                counted(found.pods.len(), "pod")
            ),
            "kubectl quartermaster migrate deletes them",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::good("no other operator works on the same nodes"));
    }
    findings
}

fn condition(node: &Node) -> Option<(&str, &str, &str)> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ours = conditions
        .iter()
        .find(|condition| condition.type_ == "WasmRuntimeReady")?;
    Some((
        ours.status.as_str(),
        ours.reason.as_deref().unwrap_or_default(),
        ours.message.as_deref().unwrap_or_default(),
    ))
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn renewed(lease: &Lease) -> Option<Timestamp> {
    let renewed = lease.spec.as_ref()?.renew_time.as_ref()?;
    Some(renewed.0)
}

/// Seconds, minutes or hours.
fn words(duration: SignedDuration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
#[path = "running_tests.rs"]
mod tests;
