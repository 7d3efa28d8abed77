//! What becomes of each shape of configuration that is found in the field, by containerd's version.
//!
//! Each fixture stands for a shape; what it is about is told by its name and by the row here. The same files are
//! booted with the real daemons in the end-to-end tests.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::path::{Path, PathBuf};

use quartermaster_agent::config::{
    ConfigEdit, ConfigFacts, EditRecord, Handler, Plan, Refusal, RefusalKind, Undo, Version, plan, undo,
};
use quartermaster_agent::containerd::read_settings;
use quartermaster_agent::host::HostRoot;

const DAEMONS: [&str; 4] = ["1.6.20", "1.7.24", "2.1.9", "2.4.2"];
const CONFIG: &str = "/etc/containerd/config.toml";

/// What has to come of a shape on one daemon.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// An edit, which as a matter of course means the same but for the handler.
    Edit,
    /// An edit that also writes down the `runc` that 1.x would forget.
    EditWithRunc,
    /// A refusal that names this line, with these words in it and these in what to do.
    Refusal(usize, &'static str, &'static str),
}

use Outcome::{Edit, EditWithRunc};

const fn no(line: usize, why: &'static str, remedy: &'static str) -> Outcome {
    Outcome::Refusal(line, why, remedy)
}

/// All four daemons alike.
const fn all(outcome: Outcome) -> [Outcome; 4] {
    [outcome; 4]
}

/// A file of version 3: 1.6 reads it as one of version 2 that sets nothing, 1.7 does not start with it.
const fn version_3(line: usize) -> [Outcome; 4] {
    let refused = no(
        line,
        "`version = 3`, which containerd 1.7.24 does not read",
        "in version 2",
    );
    [EditWithRunc, refused, Edit, Edit]
}

const BROKEN: &str = "not valid TOML, so containerd does not start with it";
const TEMPLATE: &str = "the file is a template";
const GENERATED: &str = "the file is generated and would be written over";
const DISABLED: &str = "so this containerd serves no kubelet";
const NO_BOM: Outcome = no(
    1,
    "byte order mark, which containerd 2 does not accept",
    "without a byte order mark",
);

const SHAPES: &[(&str, [Outcome; 4])] = &[
    ("01-kind-v2", all(Edit)),
    ("02-minikube-kicbase-v2", all(Edit)),
    (
        "03-microk8s-template-v2",
        all(no(38, TEMPLATE, "the file that containerd reads")),
    ),
    ("04-eks-al2023-containerd1-v2", all(Edit)),
    ("05-eks-al2023-containerd2-v3-rendered", version_3(3)),
    ("06-eks-al2023-containerd2-v3-full-dump", version_3(1)),
    ("07-eks-al2023-nvidia-default-v3", version_3(3)),
    ("09-eks-al2-imports-v2", all(Edit)),
    ("10-aks-containerd1-v2", all(Edit)),
    // The header says 2 and the ids are those of 3, which 1.x does not know: there it is a file that sets nothing.
    (
        "11-aks-containerd2-v2-header-v3-ids",
        [EditWithRunc, EditWithRunc, Edit, Edit],
    ),
    ("14-bottlerocket-v2", all(Edit)),
    ("15-bottlerocket-nvidia-v2", all(Edit)),
    (
        "16-talos-root-v3",
        [
            no(
                13,
                "imports /etc/cri/conf.d/cri.toml, which does not exist",
                "Create that file",
            ),
            no(
                1,
                "`version = 3`, which containerd 1.7.24 does not read",
                "in version 2",
            ),
            no(
                13,
                "imports /etc/cri/conf.d/cri.toml, which does not exist",
                "Create that file",
            ),
            no(
                13,
                "imports /etc/cri/conf.d/cri.toml, which does not exist",
                "Create that file",
            ),
        ],
    ),
    ("17-talos-cri-part-v3", version_3(1)),
    // 2.x reads no `default_runtime` any more; 2.0 to 2.2 read nothing of CRI in a file of version 1.
    ("18-docker-era-v1", [EditWithRunc, EditWithRunc, Edit, Edit]),
    ("20-explicit-version1", all(Edit)),
    ("22-dropin-99-nvidia-v2", all(Edit)),
    (
        "23-docker-package-disabled-cri",
        all(no(3, DISABLED, "out of `disabled_plugins`")),
    ),
    ("24-k3s-rendered-v2", all(no(2, GENERATED, "config-v3.toml.tmpl"))),
    (
        "25-k3s-template-extending-base",
        all(no(1, TEMPLATE, "on k3s, rke2 and microk8s")),
    ),
    (
        "26-k3s-template-full-copy-v2",
        all(no(2, GENERATED, "config.toml.tmpl")),
    ),
    ("28-k3s-v1-template-rendered", all(Edit)),
    (
        "29-broken-k3s-double-bracket-plugins",
        all(no(5, BROKEN, "Repair that line")),
    ),
    (
        "30-corrupted-imports-empty-elements",
        all(no(2, BROKEN, "Repair that line")),
    ),
    (
        "31-k0s-managed-v3",
        all(no(1, "belongs to k0s", "/etc/k0s/containerd.d")),
    ),
    ("32-k0s-generated-cri-v3", version_3(1)),
    ("34-debian-package-v2", [EditWithRunc, EditWithRunc, Edit, Edit]),
    ("35-default-1.7.28-v2", all(Edit)),
    ("37-default-2.2.2-v3-confd", version_3(1)),
    ("40-version3-only-no-newline", version_3(1)),
    ("42-gke-node-v2", all(Edit)),
    (
        "44-manpage-example-v2",
        all(no(
            6,
            "imports /etc/containerd/debug.toml, which does not exist",
            "Create that file",
        )),
    ),
    ("51-made-inline-table", all(Edit)),
    ("52-made-crlf", all(Edit)),
    ("53-made-bom", [Edit, Edit, NO_BOM, NO_BOM]),
    ("55-made-duplicate-table", all(no(6, BROKEN, "Repair that line"))),
    ("56-made-word-only-in-comment", all(Edit)),
    (
        "57-made-disabled-cri-uri-v2",
        all(no(2, DISABLED, "out of `disabled_plugins`")),
    ),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configurations")
}

fn handler() -> Handler {
    Handler {
        name: "crun".into(),
        binary: "/opt/quartermaster/current/bin/crun".into(),
    }
}

/// Facts as they are read from a host that holds `bytes`.
fn facts(bytes: &[u8], daemon: &str) -> ConfigFacts {
    let host = tempfile::tempdir().unwrap();
    let path = host.path().join(CONFIG.trim_start_matches('/'));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let root = HostRoot::open(host.path()).unwrap();
    let settings = read_settings(&root, &["containerd".to_owned()]).unwrap();
    ConfigFacts {
        containerd: Version::parse(daemon).unwrap(),
        path: settings.config_path,
        file: settings.file,
        imports: settings.imports,
        missing_imports: settings.missing_imports,
        live_systemd_cgroup: None,
    }
}

fn outcome(name: &str, daemon: &str) -> (ConfigFacts, Result<Plan, Refusal>) {
    let bytes = std::fs::read(folder().join(format!("{name}.toml"))).unwrap();
    let facts = facts(&bytes, daemon);
    let planned = plan(&facts, &handler());
    (facts, planned)
}

fn edit(name: &str, daemon: &str, planned: Result<Plan, Refusal>) -> ConfigEdit {
    match planned {
        Ok(Plan::Edit(edit)) => edit,
        other => panic!("{name} on {daemon}: expected an edit, got {other:?}"),
    }
}

#[test]
fn every_shape_has_a_row_and_every_row_a_shape() {
    let mut files: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let rows: Vec<String> = SHAPES.iter().map(|(name, _)| format!("{name}.toml")).collect();
    assert_eq!(files, rows);
    assert_eq!(rows.len(), 38);
}

#[test]
fn every_shape_is_edited_or_refused_with_its_line_and_what_to_do() {
    for (name, outcomes) in SHAPES {
        for (daemon, wanted) in DAEMONS.iter().zip(outcomes) {
            let (_, planned) = outcome(name, daemon);
            match wanted {
                Outcome::Edit | Outcome::EditWithRunc => {
                    let edit = edit(name, daemon, planned);
                    let before = String::from_utf8(edit.before.unwrap()).unwrap();
                    let after = String::from_utf8(edit.after).unwrap();
                    let runc = |text: &str| text.matches(".runtimes.runc]").count();
                    let added = runc(&after) - runc(&before);
                    let expected = usize::from(matches!(wanted, Outcome::EditWithRunc));
                    assert_eq!(added, expected, "{name} on {daemon}:\n{after}");
                }
                Outcome::Refusal(line, why, remedy) => {
                    let refusal = planned.expect_err(&format!("{name} on {daemon}: expected a refusal"));
                    assert_eq!(refusal.kind, RefusalKind::Configuration, "{name} on {daemon}");
                    assert_eq!(refusal.path, CONFIG, "{name} on {daemon}");
                    assert_eq!(refusal.line, Some(*line), "{name} on {daemon}: {refusal}");
                    assert!(refusal.message.contains(why), "{name} on {daemon}: {refusal}");
                    assert!(
                        refusal.remedy.contains(remedy),
                        "{name} on {daemon}: {}",
                        refusal.remedy
                    );
                    assert!(
                        refusal.message.starts_with(&format!("{CONFIG}, line {line}: ")),
                        "{name} on {daemon}: {refusal}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_edit_of_every_shape_is_there_once_and_comes_out_again_byte_for_byte() {
    for (name, outcomes) in SHAPES {
        for (daemon, wanted) in DAEMONS.iter().zip(outcomes) {
            if matches!(wanted, Outcome::Refusal(..)) {
                continue;
            }
            let (facts, planned) = outcome(name, daemon);
            let edit = edit(name, daemon, planned);
            let again = ConfigFacts {
                file: Some(edit.after.clone()),
                ..facts.clone()
            };
            assert_eq!(
                plan(&again, &handler()),
                Ok(Plan::NothingToDo),
                "{name} on {daemon}"
            );
            let original = facts.file.unwrap();
            let record = EditRecord {
                before: edit.base,
                after: edit.after.clone(),
                pieces: edit.pieces,
            };
            assert_eq!(
                undo(&edit.after, Some(&record), &handler()),
                Ok(Undo::Rewrite(original.clone())),
                "{name} on {daemon}"
            );
            let mut changed = edit.after.clone();
            changed.extend_from_slice(b"\n# by somebody else\n");
            let Ok(Undo::Rewrite(rest)) = undo(&changed, Some(&record), &handler()) else {
                panic!("{name} on {daemon}: the edit cannot be taken out of a changed file");
            };
            let rest = String::from_utf8(rest).unwrap();
            let original = String::from_utf8(original).unwrap();
            assert!(rest.starts_with(&original), "{name} on {daemon}:\n{rest}");
            assert_eq!(
                rest[original.len()..].trim(),
                "# by somebody else",
                "{name} on {daemon}"
            );
        }
    }
}
