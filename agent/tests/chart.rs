//! Everything that an agent can be told about its host is a value of the chart.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory;
use quartermaster_agent::cli::Cli;
use serde_yaml_ng::Value;

/// What the chart says by itself: what is mounted where in the pod, and the ports that policies name.
const WIRED: [&str; 10] = [
    "host-root",
    "payload",
    "node-name",
    "pod-ip",
    "enroll-url",
    "ca-file",
    "token-file",
    "listen",
    "health-listen",
    "metrics-listen",
];

fn names(value: &Value) -> BTreeSet<String> {
    let keys = value.as_mapping().unwrap().keys();
    keys.map(|name| name.as_str().unwrap().to_owned()).collect()
}

/// `dataDir` becomes the variable `QUARTERMASTER_DATA_DIR`, as the chart's template makes it.
fn variable(setting: &str) -> String {
    let words = setting.chars().map(|letter| match letter {
        'A'..='Z' => format!("_{letter}"),
        other => other.to_ascii_uppercase().to_string(),
    });
    format!("QUARTERMASTER_{}", words.collect::<String>())
}

#[test]
fn every_setting_of_the_agent_is_a_value() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/chart");
    let read = |file: &str| -> Value {
        serde_yaml_ng::from_str(&std::fs::read_to_string(chart.join(file)).unwrap()).unwrap()
    };
    let (values, schema) = (read("values.yaml"), read("values.schema.json"));
    let settings = names(&values["agent"]["settings"]);
    let types = &schema["properties"]["agent"]["properties"]["settings"]["properties"];
    assert_eq!(settings, names(types), "values.yaml and values.schema.json");

    let cli = Cli::command();
    let serve = cli.find_subcommand("serve").unwrap();
    let variables: BTreeSet<String> = serve
        .get_arguments()
        .filter(|argument| argument.get_long().is_some_and(|flag| !WIRED.contains(&flag)))
        .filter_map(|argument| Some(argument.get_env()?.to_str()?.to_owned()))
        .collect();
    let said: BTreeSet<String> = settings.iter().map(|setting| variable(setting)).collect();
    assert_eq!(said, variables);
}
