//! systemd's unit files as they lie in a folder, for a host whose systemd cannot be asked.

use super::HostRoot;

/// Where systemd looks for units, the strongest first.
const FOLDERS: [&str; 4] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
const LIMIT: usize = 256 * 1024;

/// What a unit file with its drop-ins says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitFile {
    /// Arguments of `ExecStart`, the first of which is the program, variables resolved.
    pub exec: Vec<String>,
    /// `KillMode`; empty where it is left at its default.
    pub kill_mode: String,
}

impl UnitFile {
    /// Reads a unit with its drop-ins; `None` where there is no such file.
    pub fn read(root: &HostRoot, name: &str) -> Option<Self> {
        let read = |path: &str| {
            let bytes = root.read(path, LIMIT).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        let mut text = FOLDERS
            .iter()
            .find_map(|folder| read(&format!("{folder}/{name}")))?;
        // Drop-ins of all folders count, in the order of their names.
        let mut parts: Vec<(String, String)> = FOLDERS
            .iter()
            .flat_map(|folder| {
                let folder = format!("{folder}/{name}.d");
                let names = root.list(&folder).unwrap_or_default();
                names
                    .into_iter()
                    .map(move |part| (part.clone(), format!("{folder}/{part}")))
            })
            .filter(|(part, _)| part.ends_with(".conf"))
            .collect();
        parts.sort();
        for (_, path) in parts {
            text.push('\n');
            text.push_str(&read(&path).unwrap_or_default());
        }
        Some(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let mut unit = Self::default();
        let mut variables: Vec<(String, String)> = Vec::new();
        let mut line = String::new();
        let mut exec = String::new();
        for part in text.lines() {
            let part = part.trim();
            if part.starts_with(['#', ';']) {
                continue;
            }
            if let Some(begun) = part.strip_suffix('\\') {
                line.push_str(begun);
                line.push(' ');
                continue;
            }
            line.push_str(part);
            let whole = std::mem::take(&mut line);
            let Some((key, value)) = whole.split_once('=') else {
                continue;
            };
            match key.trim() {
                // An empty value takes back what stood before.
                "ExecStart" => value.trim().clone_into(&mut exec),
                "KillMode" => value.trim().clone_into(&mut unit.kill_mode),
                "Environment" => {
                    for pair in words(value) {
                        if let Some((name, value)) = pair.split_once('=') {
                            variables.push((name.to_owned(), value.to_owned()));
                        }
                    }
                }
                _ => {}
            }
        }
        let program = exec.trim_start_matches(['-', '@', ':', '+', '!']);
        unit.exec = words(program)
            .into_iter()
            .map(|word| resolved(word, &variables))
            .collect();
        unit
    }
}

fn resolved(mut word: String, variables: &[(String, String)]) -> String {
    for (name, value) in variables.iter().rev() {
        word = word.replace(&format!("${{{name}}}"), value);
        if word == format!("${name}") {
            word.clone_from(value);
        }
    }
    word
}

/// Words of a line, quotes taken off.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut begun = false;
    for c in line.trim().chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                begun = true;
            }
            (None, c) if c.is_whitespace() => {
                if begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (_, c) => word.push(c),
        }
    }
    if begun || !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_read_with_its_drop_ins_and_variables() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "usr/lib/systemd/system/containerd.service",
            "[Service]\nEnvironment=CONTAINERD_CONFIG=/usr/share/containerd/config.toml\n# KillMode=mixed\nKillMode=process\nExecStart=/usr/bin/containerd \\\n  --config ${CONTAINERD_CONFIG}\n",
        );
        let root = HostRoot::open(dir.path()).unwrap();
        let unit = UnitFile::read(&root, "containerd.service").unwrap();
        assert_eq!(
            unit.exec,
            [
                "/usr/bin/containerd",
                "--config",
                "/usr/share/containerd/config.toml"
            ]
        );
        assert_eq!(unit.kill_mode, "process");
        write(
            "etc/systemd/system/containerd.service.d/10-own.conf",
            "[Service]\nEnvironment=\"CONTAINERD_CONFIG=/etc/containerd/own config.toml\"\nKillMode=mixed\n",
        );
        let unit = UnitFile::read(&root, "containerd.service").unwrap();
        assert_eq!(unit.exec[2], "/etc/containerd/own config.toml");
        assert_eq!(unit.kill_mode, "mixed");
        write(
            "etc/systemd/system/containerd.service.d/20-exec.conf",
            "[Service]\nExecStart=\nExecStart=-/opt/bin/containerd -c '/x y'\n",
        );
        let unit = UnitFile::read(&root, "containerd.service").unwrap();
        assert_eq!(unit.exec, ["/opt/bin/containerd", "-c", "/x y"]);
        assert_eq!(UnitFile::read(&root, "other.service"), None);
    }
}
