use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::super::facts_of_nothing;
use super::super::finding::Level;
use super::*;
use crate::status::Status;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).expect("a time")
}

fn lease(name: &str, second: i64) -> Lease {
    let mut lease = Lease::default();
    lease.metadata.name = Some(name.into());
    lease.spec.get_or_insert_default().renew_time = Some(MicroTime(at(second)));
    lease
}

fn node(name: &str, ready: &str, wasm: Option<(&str, &str)>) -> Node {
    let wasm = wasm.map_or(String::new(), |(status, reason)| {
        format!(", {{type: WasmRuntimeReady, status: '{status}', reason: {reason}, message: words}}")
    });
    serde_yaml_ng::from_str(&format!(
        "metadata: {{name: {name}}}\nstatus: {{conditions: [{{type: Ready, status: '{ready}'}}{wasm}]}}"
    ))
    .expect("a Node")
}

fn told(findings: &[Finding]) -> Vec<(Level, &str)> {
    findings
        .iter()
        .map(|finding| (finding.level, finding.what.as_str()))
        .collect()
}

fn led() -> Facts {
    Facts {
        leader: Ok(Status {
            leader: "q-1".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            synced: true,
            ..Status::default()
        }),
        lease: Ok(Some(lease("quartermaster-coordinator", -1))),
        time: Ok((at(0), at(0))),
        ..facts_of_nothing()
    }
}

#[test]
fn nobody_who_leads_is_told_by_how_old_the_lease_is() {
    let mut facts = facts_of_nothing();
    facts.time = Ok((at(0), at(0)));
    facts.lease = Ok(Some(lease("quartermaster-coordinator", -600)));
    assert_eq!(
        told(&leader(&facts)),
        [(
            Level::Wrong,
            "nobody leads: the Lease was last renewed 10 min ago"
        )]
    );
}

#[test]
fn a_halt_and_a_failed_prefetch_are_wrong_and_a_pause_is_worth_knowing() {
    let mut facts = led();
    let status = facts.leader.as_mut().expect("a status");
    status.paused = true;
    status.halted = Some("3 restarts in a row failed".into());
    status.prefetches.push(crate::status::Prefetch {
        namespace: "shop".into(),
        name: "a".into(),
        phase: "FAILED".into(),
        message: "1 of 4 missing".into(),
        ..Default::default()
    });
    let findings = leader(&facts);
    assert_eq!(
        told(&findings)[1..],
        [
            (Level::Note, "it is paused: nothing is begun"),
            (Level::Wrong, "the rollout is halted: 3 restarts in a row failed"),
            (Level::Wrong, "the Prefetch shop/a is FAILED: 1 of 4 missing"),
        ]
    );
}

#[test]
fn nodes_that_fail_alike_are_one_finding() {
    let mut facts = led();
    facts.nodes = Ok(vec![
        node("a", "True", Some(("True", "Provisioned"))),
        node("b", "True", Some(("False", "AgentUnavailable"))),
        node("c", "True", Some(("False", "AgentUnavailable"))),
        node("d", "True", Some(("False", "Installing"))),
        node("e", "True", Some(("True", "RemovalBlocked"))),
        node("f", "True", None),
    ]);
    let findings = nodes(&facts);
    assert_eq!(
        told(&findings),
        [
            (Level::Good, "1 of 6 nodes run WebAssembly"),
            (Level::Wrong, "b, c: AgentUnavailable: words"),
            (Level::Note, "e can't be put back yet: pods use the handler"),
        ]
    );
    assert!(
        findings[1].remedy.contains("spec.nodeName=b"),
        "{}",
        findings[1].remedy
    );
}

#[test]
fn clocks_are_compared_with_the_api_servers() {
    let mut facts = led();
    let ready = |name: &str| node(name, "True", None);
    facts.nodes = Ok(vec![
        ready("good"),
        ready("ahead"),
        ready("behind"),
        node("dead", "Unknown", None),
    ]);
    facts.heartbeats = Ok(vec![
        lease("good", -9),
        lease("ahead", 40),
        lease("behind", -700),
        lease("dead", -5000),
    ]);
    let findings = clocks(&facts);
    assert_eq!(
        told(&findings),
        [
            (
                Level::Wrong,
                "the clock of behind is 11 min behind the API server's: certificates signed for it are not good at once"
            ),
            (
                Level::Note,
                "the clock of ahead is 39 s ahead of the API server's"
            ),
        ]
    );
    facts.lease = Ok(Some(lease("quartermaster-coordinator", -60)));
    assert!(
        told(&clocks(&facts))[0]
            .1
            .starts_with("the clock of the leader is 55 s behind")
    );
}

#[test]
fn clocks_that_agree_are_said_to() {
    let mut facts = led();
    facts.nodes = Ok(vec![node("a", "True", None)]);
    facts.heartbeats = Ok(vec![lease("a", -12)]);
    assert_eq!(clocks(&facts)[0].level, Level::Good);
    facts.heartbeats = Err("leases is forbidden".into());
    assert_eq!(clocks(&facts)[0].level, Level::Unseen);
}

#[test]
fn another_operator_is_wrong_while_it_runs_and_worth_knowing_when_it_left_something() {
    use crate::migrate::{Leftover, Operator, Predecessors};
    let mut facts = led();
    let mut found = Predecessors {
        operators: vec![Operator {
            of: Predecessor::Kwasm,
            namespace: "kwasm".into(),
            name: "kwasm-operator".into(),
            replicas: 1,
            release: None,
        }],
        jobs: vec![Leftover {
            namespace: "kwasm".into(),
            name: "a-provision-kwasm".into(),
            active: false,
        }],
        ..Predecessors::default()
    };
    facts.predecessors = Ok(found.clone());
    assert_eq!(
        told(&predecessors(&facts)),
        [
            (
                Level::Wrong,
                "the KWasm operator still runs (kwasm/kwasm-operator): nothing is provisioned beside it"
            ),
            (
                Level::Note,
                "1 Job and 0 pods of operators that came before are left over"
            ),
        ]
    );
    found.operators[0].replicas = 0;
    found.jobs.clear();
    facts.predecessors = Ok(found);
    assert_eq!(predecessors(&facts)[0].level, Level::Good);
}
