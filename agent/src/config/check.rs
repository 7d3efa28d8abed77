//! What stands in the way of any edit: files that containerd itself cannot read, that others own, or that say that
//! CRI is not served.

use toml_edit::Document;

use super::facts::{ConfigFacts, Family, ImportedFile};
use super::plan::{Refusal, RefusalKind};
use super::tree::Tree;

const BOM: &str = "\u{feff}";

pub(super) struct Refusing<'a> {
    pub(super) path: &'a str,
}

impl Refusing<'_> {
    pub(super) fn because(&self, what: impl AsRef<str>, remedy: &str) -> Refusal {
        Refusal {
            kind: RefusalKind::Configuration,
            message: format!("{} {}", self.path, what.as_ref()),
            remedy: remedy.to_owned(),
        }
    }
}

pub(super) fn readable<'a>(
    bytes: &'a [u8],
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<&'a str, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        refusing.because(
            format!("is not UTF-8 (byte {})", error.valid_up_to()),
            "Save the file as UTF-8, then try again.",
        )
    })?;
    if text.starts_with(BOM) && facts.containerd.major >= 2 {
        return Err(refusing.because(
            "begins with a byte order mark, which containerd 2 does not accept",
            "Save the file without a byte order mark, then try again.",
        ));
    }
    for line in text.lines().take_while(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#')
    }) {
        if line.contains("k0s_managed=true") {
            return Err(refusing.because(
                "belongs to k0s, which rewrites it",
                "k0s is not served yet. Install crun through /etc/k0s/containerd.d by hand.",
            ));
        }
        if line.contains("DO NOT EDIT") {
            return Err(refusing.because(
                format!(
                    "is generated and would be overwritten ({:?})",
                    line.trim().trim_start_matches('#').trim()
                ),
                "The distribution that generates it is not served yet; use its own template.",
            ));
        }
    }
    Ok(text)
}

pub(super) fn first_line(error: &toml_edit::TomlError, text: &str) -> String {
    let line = error.span().map_or(0, |span| {
        text[..span.start.min(text.len())].matches('\n').count() + 1
    });
    format!(
        "line {line}: {}",
        error.message().lines().collect::<Vec<_>>().join("; ")
    )
}

pub(super) fn header_version(
    root: &Tree,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<i64, Refusal> {
    let version = match root.get(&["version"]) {
        None => 1,
        Some(Tree::Integer(version)) => *version,
        Some(_) => {
            return Err(refusing.because(
                "has a `version` that is not a number",
                "Set `version` to 2 or 3 as containerd's documents say, then try again.",
            ));
        }
    };
    let daemon = facts.containerd;
    match version {
        3.. if daemon.major < 2 => Err(refusing.because(
            format!("says `version = {version}`, which containerd {daemon} cannot read"),
            "Write the file in version 2, then try again.",
        )),
        ..=1 if daemon.major >= 2 => Err(refusing.because(
            format!("is of version 1, whose CRI settings containerd {daemon} does not apply"),
            "Convert it with `containerd config migrate`, check the result, restart containerd, then try again.",
        )),
        4 if daemon.major == 2 && daemon.minor < 3 => Err(refusing.because(
            format!("says `version = 4`, which containerd {daemon} cannot read"),
            "Write the file in version 3, then try again.",
        )),
        5.. => Err(refusing.because(
            format!("says `version = {version}`, which this agent does not know"),
            "Use a newer agent.",
        )),
        _ => Ok(version),
    }
}

pub(super) fn check_imports(facts: &ConfigFacts, refusing: &Refusing<'_>) -> Result<(), Refusal> {
    if let Some(missing) = facts.missing_imports.first() {
        return Err(refusing.because(
            format!("imports {missing}, which does not exist: containerd would not start with it"),
            "Create that file or remove it from `imports`, then try again.",
        ));
    }
    if facts.containerd.major >= 2 {
        return Ok(());
    }
    for import in &facts.imports {
        let tree = imported(import, refusing)?;
        for family in [Family::V1, Family::V2, Family::V3] {
            if tree.get(&["plugins", family.id()]).is_some() {
                // 1.x replaces the whole CRI table by the imported one, so an edit of the root would be lost.
                return Err(refusing.because(
                    format!(
                        "imports {}, whose CRI table replaces that of the file as a whole on containerd {}",
                        import.path, facts.containerd
                    ),
                    "Move the CRI settings of that import into the main file, restart containerd, then try again.",
                ));
            }
        }
        if tree.get(&["disabled_plugins"]).is_some() {
            check_enabled(&tree, facts, refusing)?;
        }
    }
    Ok(())
}

pub(super) fn imported(import: &ImportedFile, refusing: &Refusing<'_>) -> Result<Tree, Refusal> {
    std::str::from_utf8(&import.bytes)
        .ok()
        .and_then(|text| Document::parse(text).ok().map(|document| Tree::of(&document)))
        .ok_or_else(|| {
            refusing.because(
                format!("imports {}, which is not valid TOML", import.path),
                "Repair or remove that file so that containerd itself accepts it, then try again.",
            )
        })
}

pub(super) fn check_enabled(
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
            format!("disables CRI (`disabled_plugins` names {name:?}), so no kubelet uses this containerd"),
            "Take that name out of `disabled_plugins` and restart containerd, or provision the runtime that the kubelet really uses.",
        ));
    }
    for id in ["cri", Family::V2.id(), Family::V3.id()] {
        if let Some(part) = tree.get(&["plugins", id])
            && let Some(text) = part.find_text(&|text| text.contains("${") || text.contains("{{"))
        {
            return Err(refusing.because(
                format!("is a template, not what containerd reads ({text:?})"),
                "Templates are not served yet.",
            ));
        }
    }
    if matches!(tree.get(&["plugins"]), Some(Tree::Tables(_))) {
        return Err(refusing.because(
            format!(
                "writes [[plugins]], an array where containerd {} wants a table",
                facts.containerd
            ),
            "Repair the file so that containerd itself accepts it, then try again.",
        ));
    }
    Ok(())
}
