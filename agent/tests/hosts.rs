//! What is found of each kind of host, from its files alone.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use quartermaster_agent::config::{ConfigEdit, Plan};
use quartermaster_agent::host::{Distribution, HostRoot, Overrides};
use quartermaster_agent::install::{FolderHost, plan_folder};

const PLAIN: &str = "/etc/containerd/config.toml";
const SOCKET: &str = "/run/containerd/containerd.sock";
const K3S: &str = "/var/lib/rancher/k3s/agent/etc/containerd";
const RKE2: &str = "/var/lib/rancher/rke2/agent/etc/containerd";
const RANCHER_SOCKET: &str = "/run/k3s/containerd/containerd.sock";

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/hosts")
        .join(name)
}

fn looked_at(name: &str, overrides: &Overrides) -> (FolderHost, ConfigEdit) {
    let root = HostRoot::open(folder(name)).unwrap();
    match plan_folder(&root, overrides) {
        Ok((host, Ok(Plan::Edit(edit)))) => (host, edit),
        other => panic!("{name}: expected an edit, got {other:?}"),
    }
}

fn version(text: &str) -> Overrides {
    Overrides {
        containerd_version: Some(text.to_owned()),
        ..Overrides::default()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

struct Found {
    host: &'static str,
    containerd: &'static str,
    name: &'static str,
    distribution: Distribution,
    unit: &'static str,
    control_plane: bool,
    prefix: &'static str,
    read: String,
    written: String,
    socket: &'static str,
    /// What the inserted text has to hold.
    says: &'static str,
}

fn plain(host: &'static str, containerd: &'static str, name: &'static str, says: &'static str) -> Found {
    Found {
        host,
        containerd,
        name,
        distribution: Distribution::Plain,
        unit: "containerd.service",
        control_plane: false,
        prefix: "/opt",
        read: PLAIN.into(),
        written: PLAIN.into(),
        socket: SOCKET,
        says,
    }
}

const V2: &str = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun.options]";
const V3: &str = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.crun.options]";

fn hosts() -> Vec<Found> {
    let cos = Found {
        prefix: "/home/kubernetes/bin",
        ..plain(
            "gke-cos",
            "1.7.24",
            "GKE on Container-Optimized OS from Google",
            V2,
        )
    };
    let eks = Found {
        socket: "/run/foo/foo.sock",
        ..plain("eks-al2023", "2.1.5", "EKS on Amazon Linux 2023", V3)
    };
    let k3s =
        |host, containerd, distribution, unit, control_plane, folder: &str, template: &str, says| Found {
            distribution,
            unit,
            control_plane,
            read: format!("{folder}/config.toml"),
            written: format!("{folder}/{template}"),
            socket: RANCHER_SOCKET,
            ..plain(host, containerd, "", says)
        };
    vec![
        plain("debian", "", "Debian GNU/Linux 12 (bookworm)", V2),
        plain("ubuntu", "1.7.28", "Ubuntu 24.04.2 LTS", V2),
        plain("fedora", "2.0.5", "Fedora Linux 42 (Server Edition)", V3),
        eks,
        plain("aks-containerd1", "1.7.27", "AKS on Ubuntu 22.04.5 LTS", V2),
        plain("aks-containerd2", "2.0.5", "AKS on Ubuntu 22.04.5 LTS", V3),
        plain("gke-ubuntu", "1.7.24", "GKE on Ubuntu 22.04.5 LTS", V2),
        cos,
        plain(
            "flatcar",
            "2.0.5",
            "Flatcar Container Linux by Kinvolk 4230.2.1 (Oklo)",
            V2,
        ),
        plain("kind", "2.3.0", "kind on Debian GNU/Linux 12 (bookworm)", V2),
        plain("minikube", "1.7.27", "minikube on Ubuntu 22.04.5 LTS", V2),
        Found {
            name: "k3s on SUSE Linux Enterprise Server 15 SP6",
            ..k3s(
                "k3s-server",
                "2.1.5",
                Distribution::K3s,
                "k3s.service",
                true,
                K3S,
                "config-v3.toml.tmpl",
                V3,
            )
        },
        Found {
            name: "k3s on Debian GNU/Linux 12 (bookworm)",
            ..k3s(
                "k3s-agent-1.x",
                "1.7.23",
                Distribution::K3s,
                "k3s-agent.service",
                false,
                "/data/k3s/agent/etc/containerd",
                "config.toml.tmpl",
                V2,
            )
        },
        Found {
            name: "RKE2 on Rocky Linux 9.5 (Blue Onyx)",
            ..k3s(
                "rke2-server",
                "2.1.5",
                Distribution::Rke2,
                "rke2-server.service",
                true,
                RKE2,
                "config-v3.toml.tmpl",
                V3,
            )
        },
        Found {
            name: "RKE2 on Rocky Linux 9.5 (Blue Onyx)",
            ..k3s(
                "rke2-agent",
                "2.1.5",
                Distribution::Rke2,
                "rke2-agent.service",
                false,
                RKE2,
                "config-v3.toml.tmpl",
                V3,
            )
        },
        Found {
            distribution: Distribution::Microk8s,
            unit: "snap.microk8s.daemon-containerd.service",
            prefix: "/var/snap/microk8s/common",
            read: "/var/snap/microk8s/current/args/containerd.toml".into(),
            written: "/var/snap/microk8s/current/args/containerd-template.toml".into(),
            socket: "/var/snap/microk8s/common/run/containerd.sock",
            ..plain("microk8s", "1.7.27", "MicroK8s on Ubuntu 24.04.2 LTS", V2)
        },
        Found {
            distribution: Distribution::K0s,
            unit: "k0sworker.service",
            read: "/etc/k0s/containerd.toml".into(),
            written: "/etc/k0s/containerd.d/quartermaster.toml".into(),
            socket: "/run/k0s/containerd.sock",
            ..plain("k0s", "2.1.5", "k0s on Ubuntu 24.04.2 LTS", V3)
        },
    ]
}

#[test]
fn every_served_host_is_found_with_its_unit_files_socket_and_prefix() {
    for found in hosts() {
        let overrides = if found.containerd.is_empty() {
            Overrides::default()
        } else {
            version(found.containerd)
        };
        let (host, edit) = looked_at(found.host, &overrides);
        let name = found.host;
        assert_eq!(host.host.name, found.name, "{name}");
        assert_eq!(host.host.distribution, found.distribution, "{name}");
        assert_eq!(host.host.unit, found.unit, "{name}");
        assert_eq!(host.host.control_plane, found.control_plane, "{name}");
        assert_eq!(host.host.prefix, found.prefix, "{name}");
        assert_eq!(host.config.path, found.read, "{name}");
        assert_eq!(
            (host.written_path(), edit.path.as_str()),
            (found.written.as_str(), found.written.as_str())
        );
        assert_eq!(host.socket, found.socket, "{name}");
        let after = text(&edit.after);
        assert!(after.contains(found.says), "{name}:\n{after}");
        let binary = format!("BinaryName = \"{}/quartermaster/current/bin/crun\"", found.prefix);
        assert!(after.contains(&binary), "{name}:\n{after}");
        if let Some(before) = &edit.before {
            assert!(
                after.starts_with(&text(before)),
                "{name}: a byte of the file changed"
            );
        }
    }
}

#[test]
fn a_package_tells_containerds_version() {
    let (host, edit) = looked_at("debian", &Overrides::default());
    assert_eq!(host.version.to_string(), "1.6.20");
    assert!(host.version_from.unwrap().contains("dpkg"));
    assert!(text(&edit.after).contains("runtimes.runc]"));
}

#[test]
fn a_template_is_rehearsed_as_it_will_be_rendered() {
    let (host, edit) = looked_at("microk8s", &version("1.7.27"));
    let read = text(edit.read.as_ref().unwrap());
    let rendered = text(host.config.file.as_ref().unwrap());
    assert!(read.starts_with(&rendered) && read.contains(V2), "{read}");
    assert!(!read.contains("${"), "{read}");
    let added = text(&edit.after)[edit.before.unwrap().len()..].to_owned();
    assert_eq!(read, rendered + &added);

    let (_, edit) = looked_at("k3s-server", &version("2.1.5"));
    assert_eq!(edit.before, None);
    assert!(text(&edit.after).starts_with("{{ template \"base\" . }}\n"));
    assert!(text(&edit.after).contains("SystemdCgroup = true"));
}

#[test]
fn what_an_operator_says_goes_before_what_is_found() {
    let overrides = Overrides {
        distribution: Some(Distribution::Plain),
        config: Some("/data/k3s/agent/etc/containerd/config.toml".into()),
        containerd_version: Some("1.7.23".into()),
        socket: Some("/run/own.sock".into()),
        unit: Some("own.service".into()),
        prefix: Some("/srv".into()),
        data_dir: None,
        systemd_cgroup: Some(true),
    };
    let root = HostRoot::open(folder("k3s-agent-1.x")).unwrap();
    let (host, planned) = plan_folder(&root, &overrides).unwrap();
    assert_eq!(host.host.distribution, Distribution::Plain);
    assert_eq!(
        (
            host.host.unit.as_str(),
            host.socket.as_str(),
            host.host.prefix.as_str()
        ),
        ("own.service", "/run/own.sock", "/srv")
    );
    // As a plain containerd's it is a generated file, and refused.
    let refusal = planned.unwrap_err();
    assert_eq!(
        (refusal.path.as_str(), refusal.line),
        ("/data/k3s/agent/etc/containerd/config.toml", Some(2))
    );

    let root = HostRoot::open(folder("ubuntu")).unwrap();
    let overrides = Overrides {
        systemd_cgroup: Some(true),
        ..version("2.1.5")
    };
    let (_, planned) = plan_folder(&root, &overrides).unwrap();
    let Ok(Plan::Edit(edit)) = planned else {
        panic!("expected an edit");
    };
    assert!(text(&edit.after).contains("SystemdCgroup = true"));
}

#[test]
fn every_other_host_is_refused_with_what_to_do() {
    for (name, why, remedy) in [
        ("bottlerocket", "runs Bottlerocket OS", "system extensions"),
        ("talos", "runs Talos", "system extensions"),
        ("crio", "CRI-O (crio.service)", "CRI-O is not served"),
        ("openshift", "CRI-O (OpenShift)", "CRI-O is not served"),
        ("docker", "runs Docker", "Install containerd"),
        ("kills-shims", "KillMode=control-group", "Set KillMode=process"),
        (
            "flatcar-stock",
            "/usr/share/containerd/config.toml",
            "CONTAINERD_CONFIG",
        ),
    ] {
        let root = HostRoot::open(folder(name)).unwrap();
        let failure = plan_folder(&root, &Overrides::default()).unwrap_err();
        assert!(failure.message.contains(why), "{name}: {}", failure.message);
        assert!(failure.remedy.contains(remedy), "{name}: {}", failure.remedy);
    }
    let root = HostRoot::open(folder("k3s-with-crun")).unwrap();
    let (_, planned) = plan_folder(&root, &version("1.7.23")).unwrap();
    let refusal = planned.unwrap_err();
    assert!(refusal.message.contains("/usr/bin/crun"), "{refusal}");
    assert!(refusal.remedy.contains("on their PATH"), "{}", refusal.remedy);
}

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quartermaster-agent"))
        .arg("plan")
        .args(arguments)
        .env_clear()
        .output()
        .unwrap()
}

#[test]
fn the_command_prints_a_diff_writes_the_file_and_tells_by_its_exit_code() {
    let output = tempfile::tempdir().unwrap();
    let (host, after) = (folder("kind"), output.path().to_str().unwrap());
    let host = host.to_str().unwrap();
    let first = plan(&["--root", host, "--containerd-version", "2.3.0", "--output", after]);
    assert_eq!(first.status.code(), Some(0), "{first:?}");
    let shown = text(&first.stdout);
    assert!(
        shown.starts_with("kind on Debian GNU/Linux 12 (bookworm), containerd 2.3.0\n"),
        "{shown}"
    );
    assert!(
        shown.contains("--- /etc/containerd/config.toml\n+++ /etc/containerd/config.toml\n"),
        "{shown}"
    );
    assert!(
        shown.contains("+[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]"),
        "{shown}"
    );
    assert!(!shown.contains('\u{1b}'), "colours into a pipe");

    let again = plan(&["--root", after, "--containerd-version", "2.3.0"]);
    assert_eq!(again.status.code(), Some(4), "{again:?}");

    let refused = plan(&["--root", folder("bottlerocket").to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let nowhere = plan(&["--root", "/nonexistent"]);
    assert_eq!(nowhere.status.code(), Some(1), "{nowhere:?}");
    let empty = tempfile::tempdir().unwrap();
    let empty = plan(&["--root", empty.path().to_str().unwrap()]);
    assert_eq!(empty.status.code(), Some(3), "{empty:?}");
    assert_eq!(plan(&["--rot", host]).status.code(), Some(2));
}

#[test]
fn machines_get_the_same_as_json() {
    let json = |arguments: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&plan(&[arguments, &["--json"]].concat()).stdout).unwrap()
    };
    let edit = json(&[
        "--root",
        folder("rke2-server").to_str().unwrap(),
        "--containerd-version",
        "2.1.5",
    ]);
    assert_eq!(edit["outcome"], "edit");
    assert_eq!(edit["restart"], "controlPlane");
    assert_eq!(edit["file"], format!("{RKE2}/config-v3.toml.tmpl"));
    assert!(
        edit["diff"]
            .as_str()
            .unwrap()
            .contains("+    SystemdCgroup = true")
    );

    let root = tempfile::tempdir().unwrap();
    let config = root.path().join("etc/containerd");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::write(config.join("config.toml"), "version = 2\nimports = [ , ]\n").unwrap();
    let refused = json(&["--root", root.path().to_str().unwrap()]);
    assert_eq!(refused["outcome"], "refusal");
    assert_eq!(refused["refusal"]["reason"], "UnsupportedConfiguration");
    assert_eq!(refused["refusal"]["file"], PLAIN);
    assert_eq!(refused["refusal"]["line"], 2);
}
