//! A coordinator, its agents and the command line may be one minor version apart: what was released stays as it was.
//!
//! `released.txt` has a line for each field, value of an enum and method of the last release. Something may be added; a
//! number, a name, a type or a method that is there may not change or go. At a release `released.txt` is written anew:
//! `QUARTERMASTER_RELEASE=1 cargo test -p quartermaster-proto --test compatibility`.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::BTreeSet;
use std::path::Path;

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto};

const FILES: [&str; 3] = [
    "quartermaster/v1/agent.proto",
    "quartermaster/v1/enrollment.proto",
    "quartermaster/v1/operator.proto",
];

fn of_message(prefix: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{prefix}.{}", message.name());
    for field in &message.field {
        // In which oneof a field is matters to a reader: two of one can't both be set.
        let oneof = field
            .oneof_index
            .and_then(|at| message.oneof_decl.get(usize::try_from(at).ok()?))
            .map(|oneof| format!(" in {}", oneof.name()))
            .unwrap_or_default();
        lines.insert(format!(
            "{name} {} = {} {} {:?} {:?}{oneof}",
            field.name(),
            field.number(),
            field.type_name(),
            field.r#type(),
            field.label()
        ));
    }
    for nested in &message.nested_type {
        of_message(&name, nested, lines);
    }
    for nested in &message.enum_type {
        of_enum(&name, nested, lines);
    }
}

fn of_enum(prefix: &str, values: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    for value in &values.value {
        lines.insert(format!(
            "{prefix}.{} {} = {}",
            values.name(),
            value.name(),
            value.number()
        ));
    }
}

fn of_file(file: &FileDescriptorProto, lines: &mut BTreeSet<String>) {
    let package = file.package();
    for message in &file.message_type {
        of_message(package, message, lines);
    }
    for values in &file.enum_type {
        of_enum(package, values, lines);
    }
    for service in &file.service {
        for method in &service.method {
            let stream = |streams: bool| if streams { "stream " } else { "" };
            lines.insert(format!(
                "{package}.{} rpc {}({}{}) returns ({}{})",
                service.name(),
                method.name(),
                stream(method.client_streaming()),
                method.input_type(),
                stream(method.server_streaming()),
                method.output_type()
            ));
        }
    }
}

fn now() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let all = protox::compile(FILES, [root]).unwrap();
    let mut lines = BTreeSet::new();
    for file in all.file.iter().filter(|file| FILES.contains(&file.name())) {
        of_file(file, &mut lines);
    }
    lines
}

#[test]
fn what_was_released_is_understood_for_ever() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/released.txt");
    let now = now();
    if std::env::var_os("QUARTERMASTER_RELEASE").is_some() {
        let text: Vec<String> = now.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&file, text.concat()).unwrap();
    }
    let released = std::fs::read_to_string(&file).unwrap();
    let gone: Vec<&str> = released.lines().filter(|line| !now.contains(*line)).collect();
    assert!(
        gone.is_empty(),
        "these are not as they were released, and the other side may be older or newer:\n{}",
        gone.join("\n")
    );
    assert!(released.lines().count() > 100, "nothing was released");
}
