//! Where the running daemon has its configuration and its socket: from its command line and its file, not from
//! guesses.

use thiserror::Error;
use toml_edit::Document;

use crate::config::{ImportedFile, imports_of};
use crate::host::HostRoot;

/// Default of `--config`.
pub const DEFAULT_CONFIG: &str = "/etc/containerd/config.toml";
/// Default of `--address`.
const SOCKET: &str = "/run/containerd/containerd.sock";
/// Largest configuration that is read, in bytes.
const LIMIT: usize = 1024 * 1024;
/// Most imported files that are read.
const MAX_IMPORTS: usize = 64;

/// The daemon's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonSettings {
    /// Path of the configuration on the host.
    pub config_path: String,
    /// Its bytes; `None` when there is no such file.
    pub file: Option<Vec<u8>>,
    /// What it imports, in the daemon's order.
    pub imports: Vec<ImportedFile>,
    /// Imports named outright that are not there.
    pub missing_imports: Vec<String>,
    /// Path of the socket on the host.
    pub socket: String,
}

/// Why the daemon's files cannot be read.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// A file that is there and cannot be read.
    #[error("{path} cannot be read: {why}")]
    Unreadable {
        /// On the host.
        path: String,
        /// The system's words.
        why: std::io::Error,
    },
    /// More imports than any configuration needs.
    #[error("{0} imports more than {MAX_IMPORTS} files")]
    TooManyImports(String),
}

/// Reads the files of a daemon that was started with these arguments.
///
/// # Errors
/// [`SettingsError`] when one of them cannot be read.
pub fn read_settings(root: &HostRoot, arguments: &[String]) -> Result<DaemonSettings, SettingsError> {
    let config_path = flag(arguments, "config", Some('c')).unwrap_or_else(|| DEFAULT_CONFIG.to_owned());
    let file = read(root, &config_path)?;
    let mut imports = Imports {
        root,
        files: Vec::new(),
        missing: Vec::new(),
        seen: vec![config_path.clone()],
    };
    if let Some(bytes) = &file {
        imports.follow(&config_path, bytes)?;
    }
    let socket = flag(arguments, "address", Some('a'))
        .or_else(|| file.as_deref().and_then(address))
        .unwrap_or_else(|| SOCKET.to_owned());
    Ok(DaemonSettings {
        config_path,
        imports: imports.files,
        missing_imports: imports.missing,
        socket,
        file,
    })
}

fn read(root: &HostRoot, path: &str) -> Result<Option<Vec<u8>>, SettingsError> {
    match root.read(path, LIMIT) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(why) => Err(SettingsError::Unreadable {
            path: path.to_owned(),
            why,
        }),
    }
}

/// The value of a flag as Go programs take it: `--name value`, `--name=value`, one dash or two.
fn flag(arguments: &[String], name: &str, short: Option<char>) -> Option<String> {
    let mut arguments = arguments.iter().skip(1);
    let mut found = None;
    while let Some(argument) = arguments.next() {
        let Some(body) = argument.strip_prefix('-') else {
            continue;
        };
        let body = body.strip_prefix('-').unwrap_or(body);
        let (key, value) = match body.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (body, None),
        };
        let is_short = short.is_some_and(|short| key.len() == 1 && key.starts_with(short));
        if key == name || is_short {
            found = value.or_else(|| arguments.next().cloned());
        }
    }
    found.filter(|value| !value.is_empty())
}

fn address(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let document = Document::parse(text).ok()?;
    let table = document.as_table();
    let grpc = table.get("grpc").and_then(|grpc| grpc.get("address"));
    // From version 4 on the server is a plugin like any other.
    let plugin = table
        .get("plugins")
        .and_then(|plugins| plugins.get("io.containerd.server.v1.grpc"))
        .and_then(|grpc| grpc.get("address"));
    grpc.or(plugin)
        .and_then(|address| address.as_str())
        .filter(|address| !address.is_empty())
        .map(str::to_owned)
}

struct Imports<'a> {
    root: &'a HostRoot,
    files: Vec<ImportedFile>,
    missing: Vec<String>,
    seen: Vec<String>,
}

impl Imports<'_> {
    fn follow(&mut self, from: &str, bytes: &[u8]) -> Result<(), SettingsError> {
        // A file that is no TOML imports nothing; the plan refuses it.
        for pattern in imports_of(bytes).unwrap_or_default() {
            let pattern = if pattern.starts_with('/') {
                pattern
            } else {
                let folder = from.rsplit_once('/').map_or("", |(folder, _)| folder);
                format!("{folder}/{pattern}")
            };
            let pattern = cleaned(&pattern);
            let is_glob = pattern.contains(['*', '?', '[']);
            let paths = if is_glob {
                self.matches(&pattern)
            } else {
                vec![pattern.clone()]
            };
            for path in paths {
                if self.seen.contains(&path) {
                    continue;
                }
                if self.seen.len() > MAX_IMPORTS {
                    return Err(SettingsError::TooManyImports(from.to_owned()));
                }
                self.seen.push(path.clone());
                match read(self.root, &path)? {
                    Some(bytes) => {
                        self.files.push(ImportedFile {
                            path: path.clone(),
                            bytes: bytes.clone(),
                        });
                        self.follow(&path, &bytes)?;
                    }
                    None if is_glob => {}
                    None => self.missing.push(path),
                }
            }
        }
        Ok(())
    }

    fn matches(&self, pattern: &str) -> Vec<String> {
        let mut found = vec![String::new()];
        for part in pattern.split('/').filter(|part| !part.is_empty()) {
            let glob = part.contains(['*', '?', '[']);
            found = found
                .iter()
                .flat_map(|folder| {
                    if glob {
                        let names = self.root.list(if folder.is_empty() { "/" } else { folder });
                        names
                            .unwrap_or_default()
                            .into_iter()
                            .filter(|name| matches_name(part.as_bytes(), name.as_bytes()))
                            .map(|name| format!("{folder}/{name}"))
                            .collect()
                    } else {
                        vec![format!("{folder}/{part}")]
                    }
                })
                .take(MAX_IMPORTS + 1)
                .collect();
        }
        found
    }
}

/// Go's `filepath.Clean` for an absolute path.
fn cleaned(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Go's `filepath.Match` for one part of a path.
fn matches_name(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.first(), name.first()) {
        (None, None) => true,
        (Some(b'*'), _) => {
            matches_name(&pattern[1..], name) || (!name.is_empty() && matches_name(pattern, &name[1..]))
        }
        (Some(b'?'), Some(_)) => matches_name(&pattern[1..], &name[1..]),
        (Some(b'['), Some(letter)) => {
            let Some(end) = pattern.iter().position(|byte| *byte == b']') else {
                return false;
            };
            let class = &pattern[1..end];
            let (negated, class) = match class.first() {
                Some(b'^') => (true, &class[1..]),
                _ => (false, class),
            };
            let mut inside = false;
            let mut at = 0;
            while at < class.len() {
                if at + 2 < class.len() && class[at + 1] == b'-' {
                    inside |= (class[at]..=class[at + 2]).contains(letter);
                    at += 3;
                } else {
                    inside |= class[at] == *letter;
                    at += 1;
                }
            }
            inside != negated && matches_name(&pattern[end + 1..], &name[1..])
        }
        (Some(b'\\'), Some(letter)) if pattern.len() > 1 => {
            pattern[1] == *letter && matches_name(&pattern[2..], &name[1..])
        }
        (Some(byte), Some(letter)) => byte == letter && matches_name(&pattern[1..], &name[1..]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let root = HostRoot::open(dir.path()).unwrap();
        (dir, root)
    }

    fn arguments(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn flags_are_taken_in_every_spelling() {
        let (_dir, root) = root(&[("x/c.toml", "[grpc]\naddress = \"/run/file.sock\"\n")]);
        for (line, config, socket) in [
            ("/usr/bin/containerd", DEFAULT_CONFIG, SOCKET),
            ("containerd --config /x/c.toml", "/x/c.toml", "/run/file.sock"),
            (
                "containerd -c=/x/c.toml -a /run/a.sock",
                "/x/c.toml",
                "/run/a.sock",
            ),
            (
                "containerd -config=/x/c.toml --address=/run/b.sock",
                "/x/c.toml",
                "/run/b.sock",
            ),
        ] {
            let settings = read_settings(&root, &arguments(line)).unwrap();
            assert_eq!(
                (settings.config_path.as_str(), settings.socket.as_str()),
                (config, socket)
            );
        }
    }

    #[test]
    fn imports_are_followed_in_order_relative_and_by_glob() {
        let (_dir, root) = root(&[
            (
                "etc/containerd/config.toml",
                "imports = [\"/etc/containerd/conf.d/*.toml\", \"./debug.toml\", \"more/[a-b]?.toml\"]\n",
            ),
            (
                "etc/containerd/conf.d/20-b.toml",
                "imports = [\"../config.toml\"]",
            ),
            ("etc/containerd/conf.d/10-a.toml", ""),
            ("etc/containerd/conf.d/note.txt", ""),
            ("etc/containerd/more/a1.toml", ""),
            ("etc/containerd/more/c1.toml", ""),
        ]);
        let settings = read_settings(&root, &arguments("containerd")).unwrap();
        let paths: Vec<_> = settings
            .imports
            .iter()
            .map(|import| import.path.as_str())
            .collect();
        assert_eq!(
            &paths[..2],
            [
                "/etc/containerd/conf.d/10-a.toml",
                "/etc/containerd/conf.d/20-b.toml"
            ]
        );
        assert!(paths.contains(&"/etc/containerd/more/a1.toml"));
        assert!(
            !paths
                .iter()
                .any(|path| path.contains("c1") || path.contains("note"))
        );
        assert_eq!(
            paths.iter().filter(|path| path.ends_with("config.toml")).count(),
            0
        );
        assert_eq!(settings.missing_imports, ["/etc/containerd/debug.toml"]);
    }

    #[test]
    fn an_absent_file_is_no_error() {
        let (_dir, root) = root(&[]);
        let settings = read_settings(&root, &arguments("containerd")).unwrap();
        assert_eq!(settings.file, None);
        assert_eq!(settings.socket, SOCKET);
    }
}
