//! What the manifests give to whom: the whole of it, so that a right that is added is added here too.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_yaml_ng::Value;

/// Every object of `manifests/base`, as its kustomization lists them.
fn objects() -> Vec<Value> {
    listed(&manifests().join("base"))
}

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests")
}

/// Every object of a kustomization, and of those that it names.
fn listed(folder: &Path) -> Vec<Value> {
    let list = documents(&folder.join("kustomization.yaml")).remove(0);
    let resources = list["resources"].as_sequence().unwrap();
    let paths = resources.iter().map(|path| folder.join(path.as_str().unwrap()));
    paths
        .flat_map(|path| {
            if path.is_dir() {
                listed(&path)
            } else {
                documents(&path)
            }
        })
        .collect()
}

fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

fn words(value: &Value) -> Vec<String> {
    let items = value.as_sequence().into_iter().flatten();
    items.map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// `group/resource[/name] verb`, one for each right of these rules.
fn rights(rules: &Value) -> BTreeSet<String> {
    let mut rights = BTreeSet::new();
    for rule in rules.as_sequence().unwrap() {
        let names = match words(&rule["resourceNames"]) {
            none if none.is_empty() => vec![String::new()],
            names => names.into_iter().map(|name| format!("/{name}")).collect(),
        };
        for group in words(&rule["apiGroups"]) {
            let group = if group.is_empty() {
                "core".to_owned()
            } else {
                group
            };
            for resource in words(&rule["resources"]) {
                for name in &names {
                    for verb in words(&rule["verbs"]) {
                        rights.insert(format!("{group}/{resource}{name} {verb}"));
                    }
                }
            }
        }
    }
    rights
}

/// The rights that bindings of this kind give to a service account of ours.
fn bound(objects: &[Value], binding: &str, account: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for binding in of_kind(objects, binding) {
        let subjects = binding["subjects"].as_sequence().unwrap();
        let ours = subjects.iter().any(|subject| {
            subject["kind"] == "ServiceAccount"
                && subject["name"] == account
                && subject["namespace"] == "quartermaster"
        });
        if !ours {
            continue;
        }
        let role = &binding["roleRef"];
        let found = of_kind(objects, role["kind"].as_str().unwrap())
            .find(|candidate| candidate["metadata"]["name"] == role["name"])
            .unwrap_or_else(|| panic!("{role:?} is bound and not there"));
        all.extend(rights(&found["rules"]));
    }
    all
}

fn set(lines: &str) -> BTreeSet<String> {
    let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
    lines
        .flat_map(|line| {
            let (resource, verbs) = line.split_once(": ").unwrap();
            verbs.split(' ').map(move |verb| format!("{resource} {verb}"))
        })
        .collect()
}

#[test]
fn the_coordinator_has_these_rights_in_the_whole_cluster_and_no_other() {
    let wanted = set("
        core/nodes: get list watch patch
        core/nodes/status: patch
        cache.techsquad.rocks/prefetches: get list watch
        cache.techsquad.rocks/prefetches/status: patch
        apps/deployments: get list watch
        apps/statefulsets: get list watch
        apps/daemonsets: get list watch
        apps/replicasets: get list watch
        batch/cronjobs: get list watch
        batch/jobs: get list watch
        authentication.k8s.io/tokenreviews: create
        events.k8s.io/events: create patch
        node.k8s.io/runtimeclasses/crun: get
        node.k8s.io/runtimeclasses/wasmedge: get
    ");
    assert_eq!(
        bound(&objects(), "ClusterRoleBinding", "quartermaster-coordinator"),
        wanted
    );
}

#[test]
fn the_coordinator_has_these_rights_in_its_own_namespace_and_no_other() {
    let mut wanted = set("
        core/pods: get list watch
        core/secrets: create
        core/secrets/quartermaster-ca: get list watch update
        core/configmaps: create
        core/configmaps/quartermaster-ca: get patch
        core/configmaps/quartermaster-control: get list watch patch
        coordination.k8s.io/leases: create
        coordination.k8s.io/leases/quartermaster-coordinator: get list watch update
    ");
    for shard in 0..16 {
        for verb in ["get", "patch"] {
            wanted.insert(format!("core/configmaps/quartermaster-reports-{shard} {verb}"));
        }
    }
    assert_eq!(
        bound(&objects(), "RoleBinding", "quartermaster-coordinator"),
        wanted
    );
}

#[test]
fn the_agent_has_no_right_at_all() {
    let objects = objects();
    for binding in ["ClusterRoleBinding", "RoleBinding"] {
        assert_eq!(
            bound(&objects, binding, "quartermaster-agent"),
            BTreeSet::new(),
            "{binding}"
        );
    }
}

#[test]
fn there_is_no_wildcard_and_nobody_may_read_the_secrets_of_the_whole_cluster() {
    let objects = objects();
    for kind in ["ClusterRole", "Role"] {
        for role in of_kind(&objects, kind) {
            for right in rights(&role["rules"]) {
                assert!(!right.contains('*'), "{right}");
            }
            assert!(
                role["aggregationRule"].is_null(),
                "what is aggregated can't be read here"
            );
        }
    }
    let everywhere = bound(&objects, "ClusterRoleBinding", "quartermaster-coordinator");
    assert!(everywhere.iter().all(|right| !right.starts_with("core/secrets")));
    // What no binding of ours uses is for an administrator to bind, in the namespaces that he chooses.
    for role in of_kind(&objects, "ClusterRole") {
        let name = role["metadata"]["name"].as_str().unwrap();
        if name != "quartermaster-coordinator" {
            assert_eq!(
                rights(&role["rules"]),
                set("core/secrets: get\ncore/serviceaccounts: get"),
                "{name}"
            );
        }
    }
}

#[test]
fn a_token_is_mounted_only_where_it_is_used() {
    let objects = objects();
    for account in of_kind(&objects, "ServiceAccount") {
        assert_eq!(account["automountServiceAccountToken"], false, "{account:?}");
    }
    let mounts = |kind: &str| {
        let workload = of_kind(&objects, kind).next().unwrap();
        workload["spec"]["template"]["spec"].clone()
    };
    assert_eq!(mounts("Deployment")["automountServiceAccountToken"], true);
    let agent = mounts("DaemonSet");
    assert_eq!(agent["automountServiceAccountToken"], false);
    // Its one token is good for enrolment alone: the API server refuses it.
    let volumes = agent["volumes"].as_sequence().unwrap();
    let audiences: Vec<&Value> = volumes
        .iter()
        .filter_map(|volume| volume["projected"]["sources"].as_sequence())
        .flatten()
        .map(|source| &source["serviceAccountToken"]["audience"])
        .collect();
    assert_eq!(audiences, ["quartermaster"]);
}

#[test]
fn both_pods_drop_every_capability_and_only_the_agent_sees_the_host() {
    let objects = objects();
    for (kind, host) in [("Deployment", false), ("DaemonSet", true)] {
        let workload = of_kind(&objects, kind).next().unwrap();
        let pod = &workload["spec"]["template"]["spec"];
        for container in pod["containers"].as_sequence().unwrap() {
            let context = &container["securityContext"];
            assert_eq!(words(&context["capabilities"]["drop"]), ["ALL"], "{kind}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{kind}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{kind}");
            assert_ne!(context["privileged"], true, "{kind}");
        }
        for field in ["hostNetwork", "hostPID", "hostIPC"] {
            assert_ne!(pod[field], true, "{kind} {field}");
        }
        let volumes = pod["volumes"].as_sequence().cloned().unwrap_or_default();
        let mounted = volumes.iter().any(|volume| !volume["hostPath"].is_null());
        assert_eq!(mounted, host, "{kind}");
    }
}

#[test]
fn the_network_policies_let_through_what_the_ports_are_for() {
    let objects = objects();
    let ports = |policy: &str, way: &str| -> BTreeSet<u64> {
        let policy = of_kind(&objects, "NetworkPolicy")
            .find(|object| object["metadata"]["name"] == policy)
            .unwrap();
        assert_eq!(words(&policy["spec"]["policyTypes"]), ["Ingress", "Egress"]);
        let rules = policy["spec"][way].as_sequence().unwrap().iter();
        rules
            .flat_map(|rule| rule["ports"].as_sequence().unwrap().clone())
            .map(|port| port["port"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(ports("quartermaster-coordinator", "ingress"), [7444, 7446].into());
    assert_eq!(
        ports("quartermaster-coordinator", "egress"),
        [53, 443, 6443, 7443].into()
    );
    assert_eq!(ports("quartermaster-agent", "ingress"), [7443, 7445, 7446].into());
    assert_eq!(ports("quartermaster-agent", "egress"), [53, 7444].into());
}

/// What `helm uninstall` is given while it puts nodes back.
#[test]
fn the_uninstall_hook_tells_the_coordinator_and_looks_at_nodes_and_no_more() {
    let objects = documents(&manifests().join("chart/files/uninstall-rbac.yaml"));
    assert_eq!(
        bound(&objects, "RoleBinding", "quartermaster-uninstall"),
        set("core/configmaps/quartermaster-control: get patch")
    );
    assert_eq!(
        bound(&objects, "ClusterRoleBinding", "quartermaster-uninstall"),
        set("core/nodes: list")
    );
    for object in &objects {
        // They are there while it runs, before its job (whose weight is 0), and go with it.
        let annotations = &object["metadata"]["annotations"];
        assert_eq!(annotations["helm.sh/hook"], "pre-delete", "{object:?}");
        assert_eq!(annotations["helm.sh/hook-weight"], "-1", "{object:?}");
        assert_eq!(
            annotations["helm.sh/hook-delete-policy"], "before-hook-creation,hook-succeeded",
            "{object:?}"
        );
    }
}
