//! The documents: every reason has its paragraph, links lead somewhere, and what commands name is there.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use quartermaster_coordinator::{Cli, reason};
use quartermaster_proto::v1::FailureReason;

struct Document {
    path: PathBuf,
    headings: Vec<(HeadingLevel, String)>,
    links: Vec<String>,
    /// Lines of code blocks that a shell would take.
    commands: Vec<String>,
    /// Everything in backticks and blocks.
    code: Vec<String>,
}

fn root() -> PathBuf {
    std::fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap()
}

fn documents() -> Vec<Document> {
    let mut files = Vec::new();
    for folder in ["", "docs", "docs/adr"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            files.push(entry.unwrap().path());
        }
    }
    files.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    assert!(files.len() > 20, "only {} documents were found", files.len());
    files.sort();
    files.into_iter().map(read).collect()
}

fn read(path: PathBuf) -> Document {
    let text = std::fs::read_to_string(&path).unwrap();
    let mut document = Document {
        path,
        headings: Vec::new(),
        links: Vec::new(),
        commands: Vec::new(),
        code: Vec::new(),
    };
    let (mut heading, mut block) = (None::<String>, None::<(String, String)>);
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(level)) => {
                document.headings.push((level, heading.take().unwrap()));
            }
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(kind))) => {
                block = Some((kind.to_string(), String::new()));
            }
            Event::End(TagEnd::CodeBlock) => {
                if let Some((kind, text)) = block.take() {
                    document.commands.extend(commands(&kind, &text));
                    document.code.push(text);
                }
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push(dest_url.to_string());
            }
            Event::Text(text) => {
                if let Some((_, block)) = &mut block {
                    block.push_str(&text);
                } else if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            Event::Code(code) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&code);
                }
                document.code.push(code.to_string());
            }
            _ => {}
        }
    }
    document
}

/// Lines that are typed: all of a block of `sh`, and what follows a prompt in any other.
fn commands(kind: &str, text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim);
    if kind.split(' ').next() == Some("sh") {
        return lines.map(ToOwned::to_owned).collect();
    }
    let typed = lines.filter_map(|line| line.strip_prefix("$ "));
    typed.map(ToOwned::to_owned).collect()
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        letter if letter.is_alphanumeric() || letter == '-' || letter == '_' => Some(letter),
        _ => None,
    });
    kept.collect()
}

#[test]
fn every_reason_has_its_paragraph_and_no_paragraph_is_of_a_reason_that_is_gone() {
    let agents = (0..200).filter_map(|number| FailureReason::try_from(number).ok());
    let mut reasons: BTreeSet<String> = agents
        .filter(|reason| *reason != FailureReason::Unspecified)
        .map(FailureReason::camel_case)
        .collect();
    assert!(reasons.len() > 20, "only {reasons:?}");
    reasons.extend(reason::ALL.iter().map(ToString::to_string));

    let troubleshooting = read(root().join("docs/troubleshooting.md"));
    let paragraphs: BTreeSet<String> = troubleshooting
        .headings
        .into_iter()
        .filter(|(level, _)| *level == HeadingLevel::H3)
        .map(|(_, heading)| heading)
        .collect();
    let missing: Vec<_> = reasons.difference(&paragraphs).collect();
    let gone: Vec<_> = paragraphs.difference(&reasons).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "missing: {missing:?}, no reason any more: {gone:?}"
    );
}

#[test]
fn links_between_documents_lead_somewhere() {
    let documents = documents();
    let anchors: BTreeMap<&Path, BTreeSet<String>> = documents
        .iter()
        .map(|document| {
            let headings = document.headings.iter().map(|(_, heading)| anchor(heading));
            (document.path.as_path(), headings.collect())
        })
        .collect();
    let mut broken = Vec::new();
    let mut followed = 0;
    for document in &documents {
        for link in document.links.iter().filter(|link| !link.contains("://")) {
            followed += 1;
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => document.path.clone(),
                file => document.path.parent().unwrap().join(file),
            };
            let target = std::fs::canonicalize(&target).unwrap_or(target);
            let there = target.exists()
                && (fragment.is_empty()
                    || anchors
                        .get(target.as_path())
                        .is_some_and(|known| known.contains(fragment)));
            if !there {
                broken.push(format!("{}: {link}", document.path.display()));
            }
        }
    }
    assert!(followed > 50, "only {followed} links were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Words of all commands, with the document that they stand in.
fn typed() -> Vec<(String, Vec<String>)> {
    let all = documents().into_iter().flat_map(|document| {
        let name = document.path.strip_prefix(root()).unwrap().display().to_string();
        document.commands.into_iter().map(move |line| {
            let words = line.split('#').next().unwrap_or_default().split_whitespace();
            (name.clone(), words.map(ToOwned::to_owned).collect())
        })
    });
    all.collect()
}

#[test]
fn make_has_every_target_that_is_named() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter(|line| !line.starts_with(['\t', ' ', '.', '#']))
        .filter_map(|line| line.split_once(": ").or(line.split_once(':')))
        .map(|(target, _)| target)
        .collect();
    let mut asked = 0;
    let workflows = ["ci.yaml", "release.yaml"].into_iter().flat_map(|name| {
        let text = std::fs::read_to_string(root().join(".github/workflows").join(name)).unwrap();
        let made: Vec<String> = text
            .lines()
            .filter_map(|line| Some(line.split_once("make ")?.1.split(['#', '|']).next()?.to_owned()))
            .collect();
        made.into_iter().map(move |line| {
            let targets = line.split(" CHECKS=").next().unwrap().split_whitespace();
            let words = ["make"].into_iter().chain(targets);
            (name.to_owned(), words.map(ToOwned::to_owned).collect::<Vec<_>>())
        })
    });
    for (document, words) in typed().into_iter().chain(workflows) {
        if words.first().map(String::as_str) != Some("make") {
            continue;
        }
        for target in words[1..].iter().filter(|word| !word.contains('=')) {
            assert!(targets.contains(target.as_str()), "{document} says make {target}");
            asked += 1;
        }
    }
    assert!(asked > 5, "only {asked} targets were found");
}

#[test]
fn files_of_this_tree_that_commands_name_are_there() {
    let mut asked = 0;
    for (document, words) in typed() {
        for word in words {
            let ours = [
                "manifests/",
                "agent/",
                "coordinator/",
                "testbed/",
                "proto/",
                "docs/",
            ];
            if ours.iter().any(|folder| word.starts_with(folder)) && !word.contains("NAME") {
                assert!(root().join(&word).exists(), "{document} names {word}");
                asked += 1;
            }
        }
    }
    assert!(asked > 5, "only {asked} files were found");
}

#[test]
fn values_that_commands_set_are_values_of_the_chart() {
    let values = std::fs::read_to_string(root().join("manifests/chart/values.yaml")).unwrap();
    let values: serde_yaml_ng::Value = serde_yaml_ng::from_str(&values).unwrap();
    let mut asked = 0;
    for (document, words) in typed() {
        let sets = words
            .iter()
            .enumerate()
            .filter_map(|(at, word)| match word.as_str() {
                "--set" => words.get(at + 1).cloned(),
                word => word.strip_prefix("--set=").map(ToOwned::to_owned),
            });
        for set in sets {
            for pair in set.split(',') {
                let path = pair.split('=').next().unwrap();
                let mut at = &values;
                for part in path.split('.') {
                    let known = at.as_mapping().is_some_and(|map| map.contains_key(part));
                    assert!(known, "{document} sets {path}");
                    at = &at[part];
                }
                asked += 1;
            }
        }
    }
    assert!(asked > 3, "only {asked} values were found");
}

#[test]
fn flags_of_the_coordinator_that_are_told_of_are_there() {
    let cli = Cli::command();
    let known: BTreeSet<String> = cli
        .get_subcommands()
        .flat_map(|command| command.get_arguments())
        .filter_map(|argument| Some(format!("--{}", argument.get_long()?)))
        .collect();
    // Where nearly all that is written as `--…` is the coordinator's.
    let of_others = ["--register-with-taints", "--startup-taint"];
    let mut asked = BTreeSet::new();
    for name in ["rollout.md", "operations.md", "troubleshooting.md"] {
        for code in read(root().join("docs").join(name)).code {
            let first = code.split(['=', ' ']).next().unwrap();
            if code.starts_with("--") && !of_others.contains(&first) && first != "--take-ownership" {
                assert!(known.contains(first), "{name} speaks of {first}");
                asked.insert(first.to_owned());
            }
        }
    }
    assert!(asked.len() > 8, "only {asked:?}");
}
