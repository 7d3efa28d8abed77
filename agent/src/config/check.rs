//! What stands in the way of any edit: files that containerd itself cannot read, that others own, or that say that
//! CRI is not served.

use toml_edit::Document;

use super::facts::{ConfigFacts, Family, ImportedFile};
use super::lines::{line_at, line_of, line_of_text};
use super::refusal::{Refusal, RefusalKind};
use super::tree::Tree;

const BOM: &str = "\u{feff}";

/// How refusals of one file are worded: with its path, and with the line if one is to blame.
pub(super) struct Refusing<'a> {
    pub(super) path: &'a str,
}

impl Refusing<'_> {
    pub(super) fn because(&self, line: Option<usize>, what: impl AsRef<str>, remedy: &str) -> Refusal {
        self.of_kind(RefusalKind::Configuration, line, what, remedy)
    }

    pub(super) fn of_kind(
        &self,
        kind: RefusalKind,
        line: Option<usize>,
        what: impl AsRef<str>,
        remedy: &str,
    ) -> Refusal {
        let what = what.as_ref();
        Refusal {
            kind,
            path: self.path.to_owned(),
            line,
            message: match line {
                Some(line) => format!("{}, line {line}: {what}", self.path),
                None => format!("{}: {what}", self.path),
            },
            remedy: remedy.to_owned(),
        }
    }
}

/// The text of a file that containerd can read.
pub(super) fn readable<'a>(
    bytes: &'a [u8],
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<&'a str, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        let line = line_at(&String::from_utf8_lossy(&bytes[..at]), at);
        refusing.because(
            Some(line),
            format!("the file is not UTF-8 (byte {at})"),
            "Save the file as UTF-8, then try again.",
        )
    })?;
    if text.starts_with(BOM) && facts.containerd.major >= 2 {
        return Err(refusing.because(
            Some(1),
            "the file begins with a byte order mark, which containerd 2 does not accept",
            "Save the file without a byte order mark, then try again.",
        ));
    }
    Ok(text)
}

/// Whether the file is the one to write to, and not made from another.
pub(super) fn check_whose(bytes: &[u8], refusing: &Refusing<'_>) -> Result<(), Refusal> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Ok(());
    };
    for (number, line) in text.lines().enumerate().take_while(|(_, line)| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#')
    }) {
        let number = Some(number + 1);
        if line.contains("k0s_managed=true") {
            return Err(refusing.because(
                number,
                "the file belongs to k0s, which writes it anew",
                "On a k0s node the handler goes into a file in /etc/k0s/containerd.d, which the agent writes where k0s runs; elsewhere take that line out, and the file is yours.",
            ));
        }
        if line.contains("DO NOT EDIT") {
            return Err(refusing.because(
                number,
                format!(
                    "the file is generated and would be written over ({:?})",
                    line.trim().trim_start_matches('#').trim()
                ),
                "Change what it is generated from. On k3s and rke2 the agent writes the template config.toml.tmpl or config-v3.toml.tmpl beside it by itself.",
            ));
        }
    }
    Ok(())
}

/// The refusal of a text that is no TOML.
pub(super) fn not_toml(error: &toml_edit::TomlError, text: &str, refusing: &Refusing<'_>) -> Refusal {
    if let Some((at, template)) = template_line(text) {
        return refusing.because(
            Some(at),
            format!("the file is a template, not what containerd reads ({template:?})"),
            "Give the agent the file that containerd reads; on k3s, rke2 and microk8s it finds the template by itself.",
        );
    }
    let line = error.span().map_or(1, |span| line_at(text, span.start));
    refusing.because(
        Some(line),
        format!("the file is not valid TOML, so containerd does not start with it: {}", words(error)),
        "Repair that line (`containerd --config FILE config dump` shows whether containerd accepts it), then try again.",
    )
}

fn template_line(text: &str) -> Option<(usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.trim()))
        .find(|(_, line)| !line.starts_with('#') && line.contains("{{") && line.contains("}}"))
}

pub(super) fn words(error: &toml_edit::TomlError) -> String {
    error.message().lines().collect::<Vec<_>>().join("; ")
}

pub(super) fn header_version(
    document: &Document<&str>,
    root: &Tree,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<i64, Refusal> {
    let line = line_of(document, &["version"]);
    let version = match root.get(&["version"]) {
        None => 1,
        Some(Tree::Integer(version)) => *version,
        Some(_) => {
            return Err(refusing.because(
                line,
                "`version` is not a number",
                "Set `version` to 2 or 3 as containerd's documents say, then try again.",
            ));
        }
    };
    let daemon = facts.containerd;
    match version {
        // 1.6 does not look at a version above 2, and reads the file as if it were 2.
        3.. if (daemon.major, daemon.minor) == (1, 7) => Err(refusing.because(
            line,
            format!("`version = {version}`, which containerd {daemon} does not read"),
            "Write the file in version 2, restart containerd, then try again.",
        )),
        4 if daemon.major == 2 && daemon.minor < 3 => Err(refusing.because(
            line,
            format!("`version = 4`, which containerd {daemon} does not read"),
            "Write the file in version 3, restart containerd, then try again.",
        )),
        5.. if daemon.major >= 2 => Err(refusing.because(
            line,
            format!("`version = {version}`, which this agent does not know"),
            "Use a newer agent.",
        )),
        _ => Ok(version),
    }
}

pub(super) fn check_imports(
    document: &Document<&str>,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<(), Refusal> {
    if let Some(missing) = facts.missing_imports.first() {
        let name = missing.rsplit('/').next().unwrap_or(missing);
        let line = line_of_text(document, &["imports"], &|text| text.ends_with(name));
        return Err(refusing.because(
            line.or_else(|| line_of(document, &["imports"])),
            format!("imports {missing}, which does not exist: containerd does not start with it"),
            "Create that file or take it out of `imports`, then try again.",
        ));
    }
    if facts.containerd.major >= 2 {
        return Ok(());
    }
    for import in &facts.imports {
        let tree = imported(import, refusing)?;
        let other = Refusing { path: &import.path };
        for family in [Family::V1, Family::V2, Family::V3] {
            if tree.get(&["plugins", family.id()]).is_some() {
                // 1.x replaces the whole CRI table by the imported one, so an edit of the root would be lost.
                let line = parsed(import).and_then(|document| line_of(&document, &["plugins", family.id()]));
                return Err(other.because(
                    line,
                    format!(
                        "{} imports this file, whose CRI table replaces that of the importing file as a whole on containerd {}",
                        facts.path, facts.containerd
                    ),
                    "Move the CRI settings of that import into the main file, restart containerd, then try again.",
                ));
            }
        }
        if let (Some(document), Some(_)) = (parsed(import), tree.get(&["disabled_plugins"])) {
            check_enabled(&document, &tree, facts, &other)?;
        }
    }
    Ok(())
}

fn parsed(import: &ImportedFile) -> Option<Document<&str>> {
    Document::parse(std::str::from_utf8(&import.bytes).ok()?).ok()
}

pub(super) fn imported(import: &ImportedFile, refusing: &Refusing<'_>) -> Result<Tree, Refusal> {
    let broken = |line, why: String| {
        Refusing { path: &import.path }.because(
            line,
            format!("{} imports this file, which {why}", refusing.path),
            "Repair or remove that file so that containerd itself accepts it, then try again.",
        )
    };
    let text = std::str::from_utf8(&import.bytes).map_err(|_| broken(None, "is not UTF-8".into()))?;
    let document = Document::parse(text).map_err(|error| {
        let line = error.span().map(|span| line_at(text, span.start));
        broken(line, format!("is not valid TOML: {}", words(&error)))
    })?;
    Ok(Tree::of(&document))
}

fn is_placeholder(text: &str) -> bool {
    text.contains("${") || text.contains("{{")
}

pub(super) fn check_enabled(
    document: &Document<&str>,
    tree: &Tree,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<(), Refusal> {
    const SPELLINGS: [&str; 4] = [
        "cri",
        "io.containerd.grpc.v1.cri",
        "io.containerd.cri.v1.runtime",
        "io.containerd.cri.v1.images",
    ];
    if let Some(name) = tree
        .texts(&["disabled_plugins"])
        .into_iter()
        .find(|name| SPELLINGS.contains(name))
    {
        return Err(refusing.because(
            line_of_text(document, &["disabled_plugins"], &|text| text == name),
            format!("`disabled_plugins` names {name:?}, so this containerd serves no kubelet"),
            "Take that name out of `disabled_plugins` and restart containerd, or provision the runtime that the kubelet really uses.",
        ));
    }
    for id in ["cri", Family::V2.id(), Family::V3.id()] {
        if let Some(part) = tree.get(&["plugins", id])
            && let Some(text) = part.find_text(&is_placeholder)
        {
            return Err(refusing.because(
                line_of_text(document, &["plugins", id], &is_placeholder),
                format!("the file is a template, not what containerd reads ({text:?})"),
                "Give the agent the file that containerd reads; on k3s, rke2 and microk8s it finds the template by itself.",
            ));
        }
    }
    if matches!(tree.get(&["plugins"]), Some(Tree::Tables(_))) {
        return Err(refusing.because(
            line_of(document, &["plugins"]),
            format!(
                "[[plugins]] is an array, where containerd {} wants a table",
                facts.containerd
            ),
            "Repair the file so that containerd itself accepts it, then try again.",
        ));
    }
    Ok(())
}
