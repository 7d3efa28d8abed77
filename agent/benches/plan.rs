//! How long a plan takes for a configuration of 500 lines: the decision alone, and the command from its start to its
//! exit.
#![allow(clippy::unwrap_used, reason = "a measurement ends where it fails")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use quartermaster_agent::config::{ConfigFacts, Handler, Plan, Version, plan};

const LINES: usize = 500;

fn main() {
    let shape =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configurations/35-default-1.7.28-v2.toml");
    let mut text = std::fs::read_to_string(shape).unwrap();
    for n in 0.. {
        if text.lines().count() + 3 > LINES {
            break;
        }
        text.push_str(&format!(
            "\n[proxy_plugins.p{n}]\n  address = \"/run/p{n}.sock\"\n"
        ));
    }
    let facts = ConfigFacts {
        containerd: Version::parse("1.7.28").unwrap(),
        path: "/etc/containerd/config.toml".into(),
        file: Some(text.clone().into_bytes()),
        imports: Vec::new(),
        missing_imports: Vec::new(),
        live_systemd_cgroup: None,
    };
    let handler = Handler {
        name: "crun".into(),
        binary: "/opt/quartermaster/current/bin/crun".into(),
    };
    let decision = median(200, || {
        assert!(matches!(plan(&facts, &handler), Ok(Plan::Edit(_))));
    });
    let host = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(host.path().join("etc/containerd")).unwrap();
    std::fs::write(host.path().join("etc/containerd/config.toml"), &text).unwrap();
    let command = median(50, || {
        let status = Command::new(env!("CARGO_BIN_EXE_quartermaster-agent"))
            .args(["plan", "--containerd-version", "1.7.28", "--root"])
            .arg(host.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
    });
    println!(
        "plan of {} lines: {:.2} ms; the command from start to exit: {:.2} ms (medians)",
        text.lines().count(),
        decision.as_secs_f64() * 1e3,
        command.as_secs_f64() * 1e3
    );
}

fn median(times: usize, mut run: impl FnMut()) -> Duration {
    let mut taken: Vec<Duration> = (0..times)
        .map(|_| {
            let begun = Instant::now();
            run();
            begun.elapsed()
        })
        .collect();
    taken.sort();
    taken[times / 2]
}
