//! The list of a payload's files with their SHA-256, as `sha256sum` writes it.

const MAX_FILES: usize = 4096;

/// A file of the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) sha256: [u8; 32],
    /// Relative, and leading nowhere else.
    pub(crate) path: String,
}

pub(crate) fn parse(text: &str) -> Result<Vec<Entry>, String> {
    let mut files = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let wrong = |why: &str| format!("line {}: {why}", number + 1);
        let (sum, path) = line.split_once("  ").ok_or_else(|| wrong("no two columns"))?;
        let path = path.trim_start_matches("./");
        let safe = !path.is_empty()
            && path
                .split('/')
                .all(|part| !part.is_empty() && part != "." && part != "..");
        if !safe {
            return Err(wrong("a path that leads elsewhere"));
        }
        files.push(Entry {
            sha256: unhex(sum).ok_or_else(|| wrong("no SHA-256"))?,
            path: path.to_owned(),
        });
        if files.len() > MAX_FILES {
            return Err(wrong("too many files"));
        }
    }
    if !files.iter().any(|entry| entry.path == "bin/crun") {
        return Err("it does not name bin/crun".into());
    }
    Ok(files)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_lead_elsewhere_are_refused() {
        let sum = "0".repeat(64);
        for text in [
            format!("{sum}  ../bin/crun\n"),
            format!("{sum}  /bin/crun\n"),
            format!("{sum}  bin//crun\n"),
            "xyz  bin/crun\n".to_owned(),
            format!("{sum}  lib/other\n"),
            String::new(),
        ] {
            assert!(parse(&text).is_err(), "{text}");
        }
        assert_eq!(
            parse(&format!("{sum}  ./bin/crun\n")).unwrap()[0].path,
            "bin/crun"
        );
    }
}
