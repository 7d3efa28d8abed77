//! Keepers against an API server in memory that can be slow, cut off, and lose answers; on a clock that is paused.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{Method, Request, Response, StatusCode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube::client::Body;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::keeper::Keeper;
use super::tenure::Tenure;

/// One Lease, and how it is reached.
#[derive(Default)]
struct Server {
    lease: Option<Lease>,
    version: u64,
    writes: u64,
}

/// How one client reaches it: milliseconds before a request arrives and before its answer does; `None` is never.
#[derive(Clone, Copy)]
struct Way {
    there: Option<u64>,
    back: Option<u64>,
}

const QUICK: Way = Way {
    there: Some(5),
    back: Some(5),
};
const CUT: Way = Way {
    there: None,
    back: None,
};

impl Server {
    fn answer(&mut self, method: &Method, body: &[u8]) -> (StatusCode, Vec<u8>) {
        let status = |code: u16, reason: &str| {
            let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason, "message": reason});
            (
                StatusCode::from_u16(code).expect("a code"),
                body.to_string().into_bytes(),
            )
        };
        if *method == Method::GET {
            return match &self.lease {
                Some(lease) => (StatusCode::OK, serde_json::to_vec(lease).expect("JSON")),
                None => status(404, "NotFound"),
            };
        }
        let mut sent: Lease = serde_json::from_slice(body).expect("a Lease");
        let known = self
            .lease
            .as_ref()
            .and_then(|lease| lease.metadata.resource_version.clone());
        match (method, known) {
            (&Method::POST, Some(_)) => return status(409, "AlreadyExists"),
            (&Method::PUT, None) => return status(404, "NotFound"),
            (&Method::PUT, known) if known != sent.metadata.resource_version => {
                return status(409, "Conflict");
            }
            _ => {}
        }
        self.version += 1;
        self.writes += 1;
        sent.metadata.resource_version = Some(self.version.to_string());
        let answer = serde_json::to_vec(&sent).expect("JSON");
        self.lease = Some(sent);
        (StatusCode::OK, answer)
    }
}

struct Replica {
    tenure: Arc<Tenure>,
    leads: watch::Receiver<Option<u64>>,
    way: watch::Sender<Way>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn replica(name: &str, server: &Arc<Mutex<Server>>) -> Replica {
    let (way, ways) = watch::channel(QUICK);
    let server = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (server, way) = (server.clone(), *ways.borrow());
        async move {
            let pass = async |ms: Option<u64>| match ms {
                Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
                None => std::future::pending().await,
            };
            pass(way.there).await;
            let (parts, body) = request.into_parts();
            // Without a watch: then it is the times alone that everything hangs on.
            let (code, answer) = if parts
                .uri
                .query()
                .is_some_and(|query| query.contains("fieldSelector"))
            {
                (StatusCode::SERVICE_UNAVAILABLE, Vec::new())
            } else {
                let body = body.collect_bytes().await.expect("a body");
                server.lock().expect("a lock").answer(&parts.method, &body)
            };
            pass(way.back).await;
            let mut response = Response::new(Body::from(answer));
            *response.status_mut() = code;
            Ok::<_, tower::BoxError>(response)
        }
    });
    let tenure = Tenure::new();
    let (sender, leads) = watch::channel(None);
    let keeper = Keeper {
        api: Api::namespaced(kube::Client::new(service, "quartermaster"), "quartermaster"),
        lease: "quartermaster-coordinator",
        me: name.to_owned(),
        tenure: tenure.clone(),
        leads: sender,
    };
    let stop = CancellationToken::new();
    let task = tokio::spawn(keeper.run(stop.clone()));
    Replica {
        tenure,
        leads,
        way,
        stop,
        task,
    }
}

async fn until_leads(replica: &Replica) -> u64 {
    let mut leads = replica.leads.clone();
    let term = tokio::time::timeout(Duration::from_secs(60), leads.wait_for(Option::is_some));
    term.await
        .expect("it leads in time")
        .expect("it lives")
        .expect("a term")
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_killed_is_followed_in_less_than_fifteen_seconds_with_a_later_term() {
    let server = Arc::default();
    let first = replica("a", &server);
    let term = until_leads(&first).await;
    let second = replica("b", &server);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(first.tenure.holds() && !second.tenure.holds());
    assert_eq!(*first.leads.borrow(), Some(term));
    first.task.abort();
    let killed = Instant::now();
    assert_eq!(until_leads(&second).await, term + 1);
    assert!(
        killed.elapsed() < Duration::from_secs(15),
        "{:?}",
        killed.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_leader_without_an_api_server_stops_before_another_may_begin_and_comes_back_with_a_later_term() {
    let server = Arc::default();
    let only = replica("a", &server);
    let term = until_leads(&only).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    only.way.send_replace(CUT);
    let cut = Instant::now();
    only.tenure.lapsed().await;
    assert!(cut.elapsed() <= Duration::from_secs(8), "{:?}", cut.elapsed());
    let mut leads = only.leads.clone();
    leads.wait_for(Option::is_none).await.expect("it lives");
    tokio::time::sleep(Duration::from_secs(60)).await;
    only.way.send_replace(QUICK);
    assert_eq!(until_leads(&only).await, term + 1);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_lease_is_written_every_three_seconds_and_given_back_at_the_end() {
    let server: Arc<Mutex<Server>> = Arc::default();
    let only = replica("a", &server);
    until_leads(&only).await;
    let writes = || server.lock().expect("a lock").writes;
    let before = writes();
    tokio::time::sleep(Duration::from_secs(300)).await;
    let renewals = writes() - before;
    assert!((90..=100).contains(&renewals), "{renewals} renewals in 300 s");
    only.stop.cancel();
    only.task.await.expect("an orderly end");
    assert!(!only.tenure.holds());
    let lease = server.lock().expect("a lock").lease.clone().expect("a Lease");
    let spec = lease.spec.expect("a spec");
    assert_eq!(spec.holder_identity, None);
    assert!(spec.lease_transitions >= Some(1), "the term is kept");
}

/// A generator of numbers, so that a failure can be had again.
struct Seed(u64);

impl Seed {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test(start_paused = true)]
async fn however_slow_or_cut_off_the_api_server_is_two_replicas_never_lead_at_once() {
    for seed in 1..=20 {
        let mut random = Seed(seed);
        let server = Arc::default();
        let replicas: Vec<Replica> = ["a", "b", "c"]
            .iter()
            .map(|name| replica(name, &server))
            .collect();
        let (mut last, mut led) = (0, 0);
        for _ in 0..1500 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if random.below(20) == 0 {
                let at = random.below(3);
                let mut slow = || (random.below(4) > 0).then(|| random.below(2500));
                let way = Way {
                    there: slow(),
                    back: slow(),
                };
                let way = if random.below(3) == 0 { QUICK } else { way };
                replicas[usize::try_from(at).expect("small")]
                    .way
                    .send_replace(way);
            }
            let leaders: Vec<&Replica> = replicas.iter().filter(|replica| replica.tenure.holds()).collect();
            assert!(leaders.len() <= 1, "seed {seed}: {} lead", leaders.len());
            for leader in leaders {
                let term = leader.leads.borrow().unwrap_or(last);
                assert!(term >= last, "seed {seed}: term {term} after {last}");
                last = term;
                led += 1;
            }
        }
        assert!(led > 300, "seed {seed}: somebody led in {led} of 1500 looks only");
        for replica in replicas {
            replica.task.abort();
        }
    }
}
