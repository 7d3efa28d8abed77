//! `doctor`: finds what is wrong, and says what to do about it. `facts` looks, `installation` and `running` judge.

mod facts;
mod finding;
mod installation;
mod rights;
mod running;

use std::process::ExitCode;

use crate::cli::Format;
use crate::cluster::Cluster;
use crate::leader::Leader;
use crate::look::Look;
use crate::output;
use crate::progress::Progress;

use facts::Facts;
use finding::{Finding, Level};

/// `doctor`
///
/// # Errors
/// When its answer can't be written.
pub(crate) async fn doctor(
    cluster: &Cluster,
    leader: &Leader,
    format: Option<Format>,
) -> anyhow::Result<ExitCode> {
    let progress = Progress::new();
    if format.is_none() {
        progress.now("looking at the cluster");
    }
    let facts = facts::gather(cluster, leader).await;
    progress.end();
    let findings = judge(&facts);
    match output::structured(&findings, format)? {
        Some(text) => output::say(&text),
        None => output::say(&finding::text(&findings, Look::of_stdout())),
    }
    let wrong = findings.iter().any(|finding| finding.level == Level::Wrong);
    Ok(if wrong {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![installation::version(facts)];
    findings.extend(installation::rights(facts));
    findings.push(installation::definition(facts));
    findings.extend(installation::classes(facts));
    findings.push(installation::coordinator(facts));
    findings.extend(installation::agents(facts));
    findings.extend(running::leader(facts));
    findings.extend(running::nodes(facts));
    findings.extend(running::clocks(facts));
    findings.extend(running::predecessors(facts));
    findings
}

/// A cluster in which there is nothing, and whose leader is not reached.
#[cfg(test)]
fn facts_of_nothing() -> Facts {
    Facts {
        namespace: "quartermaster".into(),
        version: Ok((1, 34)),
        time: Err("not looked at".into()),
        missing_rights: Ok(Vec::new()),
        missing_of_coordinator: Ok(Vec::new()),
        crd: Ok(None),
        classes: Ok(Vec::new()),
        deployment: Ok(None),
        daemon_set: Ok(None),
        pods: Ok(Vec::new()),
        lease: Ok(None),
        leader: Err(crate::trouble::Trouble::NotInstalled("quartermaster".into())),
        nodes: Ok(Vec::new()),
        heartbeats: Ok(Vec::new()),
        predecessors: Ok(crate::migrate::Predecessors::default()),
    }
}
