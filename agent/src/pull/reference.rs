//! Image references, normalised as docker, containerd and the kubelet do it.

use thiserror::Error;

const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// Why a text is no reference.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{reference:?} is not an image reference: {why}")]
pub struct InvalidReference {
    /// As it was given.
    pub reference: String,
    /// What is wrong.
    pub why: &'static str,
}

/// The full form of a reference: registry, repository, and tag or digest. A tag beside a digest is dropped, since
/// the digest alone says which image it is, and CRI stores nothing under both.
///
/// # Errors
/// [`InvalidReference`].
pub fn normalise(reference: &str) -> Result<String, InvalidReference> {
    let wrong = |why| {
        Err(InvalidReference {
            reference: crate::failure::cut(reference, 200),
            why,
        })
    };
    let (rest, digest) = match reference.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (reference, None),
    };
    // A colon after the last slash begins a tag; one before it belongs to a registry's port.
    let slash = rest.rfind('/').map_or(0, |at| at + 1);
    let (name, tag) = match rest[slash..].find(':') {
        Some(at) => (&rest[..slash + at], Some(&rest[slash + at + 1..])),
        None => (rest, None),
    };
    if name.is_empty() {
        return wrong("it names no repository");
    }
    let (domain, path) = match name.split_once('/') {
        Some((first, path))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|byte| byte.is_ascii_uppercase()) =>
        {
            (first, path.to_owned())
        }
        _ => ("docker.io", name.to_owned()),
    };
    let domain = if domain == "index.docker.io" {
        "docker.io"
    } else {
        domain
    };
    let path = if domain == "docker.io" && !path.contains('/') {
        format!("library/{path}")
    } else {
        path
    };
    if !is_domain(domain) {
        return wrong("its registry is not a host name with an optional port");
    }
    if !path.split('/').all(is_component) {
        return wrong("a part of its repository is not lower-case letters, digits and single separators");
    }
    if domain.len() + path.len() + 1 > MAX_NAME {
        return wrong("its name is longer than 255 characters");
    }
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return wrong("its tag is not one of up to 128 letters, digits, dots, dashes and underscores");
    }
    if digest.is_none() && tag.is_none() && name.len() == 64 && is_hex(name) {
        return wrong("64 hexadecimal digits are an id, not a name");
    }
    match (digest, tag) {
        (Some(digest), _) if !is_digest(digest) => {
            wrong("its digest is not sha256: and 64 hexadecimal digits")
        }
        (Some(digest), _) => Ok(format!("{domain}/{path}@{digest}")),
        (None, tag) => Ok(format!("{domain}/{path}:{}", tag.unwrap_or("latest"))),
    }
}

/// Registry of a full name, as in `host:5000`.
pub(crate) fn registry_of(name: &str) -> &str {
    name.split('/').next().unwrap_or_default()
}

/// Registry and repository of a full name, without tag and digest.
pub(crate) fn repository_of(name: &str) -> &str {
    let name = name.split('@').next().unwrap_or_default();
    let slash = name.rfind('/').map_or(0, |at| at + 1);
    match name[slash..].find(':') {
        Some(at) => &name[..slash + at],
        None => name,
    }
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !host.ends_with(':') => (host, Some(port)),
        _ => (domain, None),
    };
    if port.is_some_and(|port| port.is_empty() || port.parse::<u16>().is_err()) {
        return false;
    }
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return address.parse::<std::net::Ipv6Addr>().is_ok();
    }
    host.split('.').all(|label| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    })
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_component(part: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    let ends = |byte: Option<&u8>| byte.is_some_and(|byte| plain(*byte));
    if !ends(bytes.first()) || !ends(bytes.last()) {
        return false;
    }
    part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .filter(|separator| !separator.is_empty())
        .all(|separator| matches!(separator, "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= MAX_TAG
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || byte == b'.' || byte == b'-')
}

fn is_digest(digest: &str) -> bool {
    match digest.split_once(':') {
        Some(("sha256", hex)) => hex.len() == 64 && is_hex(hex),
        Some(("sha384", hex)) => hex.len() == 96 && is_hex(hex),
        Some(("sha512", hex)) => hex.len() == 128 && is_hex(hex),
        _ => false,
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_what_containerd_stores() {
        let digest = format!("sha256:{}", "a1".repeat(32));
        for (given, wanted) in [
            ("nginx", "docker.io/library/nginx:latest".to_owned()),
            ("nginx:1.27", "docker.io/library/nginx:1.27".to_owned()),
            ("bitnami/redis", "docker.io/bitnami/redis:latest".to_owned()),
            (
                "index.docker.io/nginx",
                "docker.io/library/nginx:latest".to_owned(),
            ),
            ("host:5000/x", "host:5000/x:latest".to_owned()),
            ("host:5000/x:2", "host:5000/x:2".to_owned()),
            ("localhost/x", "localhost/x:latest".to_owned()),
            (
                "registry.k8s.io/pause:3.10",
                "registry.k8s.io/pause:3.10".to_owned(),
            ),
            ("[::1]:5000/a__b/c--d", "[::1]:5000/a__b/c--d:latest".to_owned()),
            (
                &format!("nginx@{digest}"),
                format!("docker.io/library/nginx@{digest}"),
            ),
            (
                &format!("host:5000/x:2@{digest}"),
                format!("host:5000/x@{digest}"),
            ),
        ] {
            assert_eq!(normalise(given), Ok(wanted), "{given}");
        }
    }

    #[test]
    fn parts_of_full_names_are_found() {
        for (name, registry, repository) in [
            ("host:5000/a/b:1", "host:5000", "host:5000/a/b"),
            ("host:5000/x@sha256:12", "host:5000", "host:5000/x"),
            (
                "docker.io/library/nginx:1",
                "docker.io",
                "docker.io/library/nginx",
            ),
        ] {
            assert_eq!((registry_of(name), repository_of(name)), (registry, repository));
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        let long = "a".repeat(300);
        let id = "0123456789abcdef".repeat(4);
        for given in [
            "",
            ":tag",
            "@",
            "UPPER/case/Path",
            "a//b",
            "a/",
            "/a",
            "a:",
            "a:-x",
            "a b",
            "a___b",
            "-a",
            "a-",
            "host:99999/x",
            "host:/x",
            "a@sha256:12",
            "a@md5:12",
            "a:tag:tag",
            "ä",
            "https://host/x",
            "a@b@c",
            &long,
            &id,
        ] {
            assert!(normalise(given).is_err(), "{given:?} was accepted");
        }
    }
}
