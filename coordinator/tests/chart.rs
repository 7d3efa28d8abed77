//! Everything that the coordinator can be told is a value of the chart, with the same default.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory;
use quartermaster_coordinator::Cli;
use serde_yaml_ng::Value;

/// What the chart says by itself: where the pod is, and the ports that its Services and policies name.
const WIRED: [&str; 6] = [
    "namespace",
    "pod-name",
    "operator-socket",
    "enrollment-listen",
    "health-listen",
    "metrics-listen",
];

fn read(file: &str) -> Value {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/chart");
    serde_yaml_ng::from_str(&std::fs::read_to_string(chart.join(file)).unwrap()).unwrap()
}

/// `max-unavailable` is the value `maxUnavailable`.
fn camel_case(flag: &str) -> String {
    let mut words = flag.split('-');
    let first = words.next().unwrap().to_owned();
    words.fold(first, |name, word| {
        name + &word[..1].to_ascii_uppercase() + &word[1..]
    })
}

/// Flags of `run` with their defaults in words.
fn flags() -> Vec<(String, String)> {
    let cli = Cli::command();
    let run = cli.find_subcommand("run").unwrap();
    run.get_arguments()
        .filter_map(|argument| {
            let defaults = argument.get_default_values().iter();
            let default: Vec<&str> = defaults.map(|value| value.to_str().unwrap()).collect();
            Some((argument.get_long()?.to_owned(), default.join(",")))
        })
        .filter(|(flag, _)| flag != "help")
        .collect()
}

fn in_words(value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::String(value) => value.clone(),
        Value::Sequence(values) => values.iter().map(in_words).collect::<Vec<_>>().join(","),
        other => panic!("no flag has a value like this: {other:?}"),
    }
}

#[test]
fn every_flag_is_a_value_with_the_same_default_and_a_type() {
    let (values, schema) = (read("values.yaml"), read("values.schema.json"));
    let settings = &values["coordinator"]["settings"];
    let types = &schema["properties"]["coordinator"]["properties"]["settings"]["properties"];
    let mut known = BTreeSet::new();
    for (flag, default) in flags() {
        if WIRED.contains(&flag.as_str()) {
            continue;
        }
        if flag == "auto-provision" {
            // Users of the KWasm chart know it by this name.
            assert_eq!(in_words(&values["kwasmOperator"]["autoProvision"]), default);
            continue;
        }
        let name = camel_case(&flag);
        assert_eq!(in_words(&settings[&name]), default, "coordinator.settings.{name}");
        assert!(types[&name].is_mapping(), "{name} is not in values.schema.json");
        known.insert(name);
    }
    for (which, there) in [("values.yaml", settings), ("values.schema.json", types)] {
        let names = there.as_mapping().unwrap().keys().map(in_words);
        let unknown: Vec<String> = names.filter(|name| !known.contains(name)).collect();
        assert!(unknown.is_empty(), "{which} has what is no flag: {unknown:?}");
    }
}

#[test]
fn the_chart_has_the_version_of_the_program() {
    let chart = read("Chart.yaml");
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
}
