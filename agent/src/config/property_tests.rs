//! Properties over generated files of containerd's kind. `QUARTERMASTER_PROPERTY_SECONDS` says how long they are
//! tried; without it a few hundred files have to do.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestError, TestRunner};

use super::laws::{DAEMONS, hold};

const CASES: u32 = 400;

fn scalar() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<bool>().prop_map(|b| b.to_string()),
        any::<i32>().prop_map(|n| n.to_string()),
        "[0-9]{1,2}\\.[0-9]{1,2}",
        Just("1979-05-27T07:32:00Z".to_owned()),
        "[a-zA-Z/. #=\\[\\]]{0,12}".prop_map(|s| format!("\"{s}\"")),
        "[a-z/.# \"]{0,12}".prop_map(|s| format!("'{s}'")),
        Just("\"\"\"\n[plugins.cri]\n# no comment\n\"\"\"".to_owned()),
        Just("'''\nrunc = \"x\"'''".to_owned()),
        Just("\"\\u0063run\"".to_owned()),
        Just("\"${RUNTIME}\"".to_owned()),
    ]
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => scalar(),
        1 => proptest::collection::vec(scalar(), 0..3).prop_map(|all| format!("[{}]", all.join(" , "))),
        1 => proptest::collection::vec(scalar(), 1..3).prop_map(|all| format!("[\n  {}, # one\n]", all.join(",\n  "))),
        1 => (scalar(), scalar()).prop_map(|(a, b)| format!("{{ a = {a}, b.c = {b} }}").replace('\n', " ")),
    ]
}

fn comment() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just(String::new()),
        1 => "# [a-zA-Z=\"\\[\\]{} ]{0,20}\n",
        1 => Just("\n".to_owned()),
        1 => Just("\t \n\n".to_owned()),
        1 => Just("# [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]\n".to_owned()),
    ]
}

fn body() -> impl Strategy<Value = String> {
    let line = ("[ \\t]{0,4}", value(), "( |)=( |\t|)", "(|  # x|\t)");
    proptest::collection::vec(line, 0..4).prop_map(|lines| {
        lines
            .into_iter()
            .enumerate()
            .map(|(n, (indent, value, equals, end))| format!("{indent}key{n}{equals}{value}{end}\n"))
            .collect()
    })
}

/// Ways to write the id of a plugin.
fn id() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("\"io.containerd.grpc.v1.cri\"".to_owned()),
        2 => Just("'io.containerd.grpc.v1.cri'".to_owned()),
        4 => Just("\"io.containerd.cri.v1.runtime\"".to_owned()),
        2 => Just("'io.containerd.cri.v1.runtime'".to_owned()),
        2 => Just("cri".to_owned()),
        1 => Just("\"io.containerd.grpc.v1.cr\\u0069\"".to_owned()),
    ]
}

fn runtime() -> impl Strategy<Value = String> {
    prop_oneof![
        5 => Just("runc".to_owned()),
        1 => Just("\"runc\"".to_owned()),
        2 => Just("kata".to_owned()),
        1 => Just("'nvidia'".to_owned()),
        1 => Just("crun".to_owned()),
    ]
}

const RUNC: &str = "runtime_type = \"io.containerd.runc.v2\"\n";

/// One table, or several that belong together, as people and tools write them.
fn table() -> impl Strategy<Value = String> {
    prop_oneof![
        2 => (id(), body()).prop_map(|(id, body)| format!("[plugins.{id}]\n{body}")),
        1 => (id(), body()).prop_map(|(id, body)| format!("[ plugins . {id} ]\n{body}")),
        2 => (id(), body()).prop_map(|(id, body)| format!("  [plugins.{id}.cni]\n{body}")),
        2 => id().prop_map(|id| format!("[plugins.{id}.containerd]\n  default_runtime_name = \"runc\"\n")),
        1 => (id(), runtime()).prop_map(|(id, name)| format!(
            "[plugins.{id}.containerd]\n  default_runtime_name = {}\n",
            if name.starts_with(['"', '\'']) { name } else { format!("\"{name}\"") }
        )),
        4 => (id(), runtime(), body()).prop_map(|(id, name, body)| format!(
            "[plugins.{id}.containerd.runtimes.{name}]\n  {RUNC}{body}"
        )),
        3 => (id(), runtime(), any::<bool>()).prop_map(|(id, name, on)| format!(
            "[plugins.{id}.containerd.runtimes.{name}.options]\n    SystemdCgroup = {on}\n"
        )),
        1 => (id(), any::<bool>(), "( |)").prop_map(|(id, on, space)| format!(
            "[plugins.{id}.containerd]\nruntimes = {{{space}runc = {{ runtime_type = \"io.containerd.runc.v2\", options = {{ SystemdCgroup = {on} }} }}{space}}}\n"
        )),
        1 => id().prop_map(|id| format!("[plugins]\n{id}.containerd = {{ }}\n")),
        1 => id().prop_map(|id| format!("[plugins.{id}]\ncontainerd.runtimes.runc.{RUNC}")),
        1 => id().prop_map(|id| format!(
            "[plugins.{id}.containerd.default_runtime]\n{RUNC}[plugins.{id}.containerd.default_runtime.options]\nSystemdCgroup = true\n"
        )),
        1 => body().prop_map(|body| format!("[grpc]\n{body}")),
        1 => body().prop_map(|body| format!("[[proxies]]\n{body}[[proxies]]\n{body}")),
        1 => body().prop_map(|body| format!("[plugins.\"io.containerd.internal.v1.opt\"]\n{body}")),
        1 => Just("[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n  differ = \"walking\"\n".to_owned()),
        1 => id().prop_map(|id| format!(
            "[plugins.{id}.containerd.runtimes.crun]\n{RUNC}[plugins.{id}.containerd.runtimes.crun.options]\nBinaryName = \"/opt/kwasm/bin/crun\"\n"
        )),
    ]
}

fn file() -> impl Strategy<Value = String> {
    let version = prop_oneof![
        4 => Just("version = 2\n".to_owned()),
        4 => Just("version = 3\n".to_owned()),
        1 => Just("version = 4\n".to_owned()),
        1 => Just("version=1\n".to_owned()),
        2 => Just(String::new()),
    ];
    let head = prop_oneof![
        6 => Just(String::new()),
        1 => Just("imports = [\"/etc/containerd/conf.d/*.toml\"]\n".to_owned()),
        1 => Just("disabled_plugins = []\nroot = '/var/lib/containerd'\n".to_owned()),
        1 => Just("plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.runtime_type = \"x\"\n".to_owned()),
    ];
    let tables = proptest::collection::vec((comment(), table()), 0..7);
    (
        comment(),
        version,
        head,
        tables,
        any::<bool>(),
        any::<bool>(),
        proptest::bool::weighted(0.05),
    )
        .prop_map(|(comment, version, head, tables, crlf, cut, bom)| {
            let tables: String = tables
                .into_iter()
                .map(|(comment, table)| comment + &table)
                .collect();
            let mut text = format!("{comment}{version}{head}{tables}");
            if cut {
                text.truncate(text.trim_end().len());
            }
            if crlf {
                text = text.replace('\n', "\r\n");
            }
            if bom {
                text.insert(0, '\u{feff}');
            }
            text
        })
}

#[test]
fn the_laws_hold_for_files_of_every_kind() {
    let seconds = std::env::var("QUARTERMASTER_PROPERTY_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let deadline = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let strategy = (file(), 0..DAEMONS.len(), "(|[ -~]{0,12})", "(|[ -~]{0,12})");
    let (edits, cases) = (std::cell::Cell::new(0u64), std::cell::Cell::new(0u64));
    loop {
        let mut runner = TestRunner::new(ProptestConfig {
            cases: CASES,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let outcome = runner.run(&strategy, |(text, daemon, head, tail)| {
            let daemon = DAEMONS[daemon];
            let held = std::panic::catch_unwind(|| hold(text.as_bytes(), daemon, &head, &tail));
            cases.set(cases.get() + 1);
            match held {
                Ok(edited) => {
                    edits.set(edits.get() + u64::from(edited));
                    Ok(())
                }
                Err(panic) => {
                    let why = panic
                        .downcast_ref::<String>()
                        .cloned()
                        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                    Err(TestCaseError::fail(why.unwrap_or_default()))
                }
            }
        });
        if let Err(TestError::Fail(why, (text, daemon, head, tail))) = &outcome {
            panic!(
                "{why}\non containerd {}, with {head:?} before and {tail:?} behind:\n{text:?}\n{text}",
                DAEMONS[*daemon]
            );
        }
        assert!(outcome.is_ok(), "{outcome:?}");
        if deadline.is_none_or(|deadline| Instant::now() > deadline) {
            break;
        }
    }
    println!("{} files, {} of them edited", cases.get(), edits.get());
    // A generator whose files are all refused would prove nothing.
    assert!(
        edits.get() * 4 > cases.get(),
        "only {} of {} files were edited",
        edits.get(),
        cases.get()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_plan_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), daemon in 0..DAEMONS.len()) {
        hold(&bytes, DAEMONS[daemon], "", "");
    }
}
