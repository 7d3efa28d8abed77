//! Which credentials are for an image, as the kubelet decides it for `imagePullSecrets`.
//!
//! A key is a host with an optional port and path, with or without a scheme; globs stand for labels of the host
//! (`*.io` is not `a.b.io`), the path is a prefix. Everything that matches is tried, the most specific first.
//! The rules are those of `k8s.io/kubernetes/pkg/credentialprovider`, so that an image which a pod could pull with
//! a secret can be pulled here with it, and no other.

use crate::v1::Credential;

const DEFAULT_REGISTRY: &str = "index.docker.io";

/// Those of `credentials` that are for the image, in the order in which they are tried.
///
/// `repository` is the full name without tag and digest, such as `docker.io/library/nginx`.
pub fn matching<'a>(
    credentials: impl IntoIterator<Item = &'a Credential>,
    repository: &str,
) -> Vec<&'a Credential> {
    let mut keyed: Vec<(String, &Credential)> = credentials
        .into_iter()
        .map(|credential| (key(&credential.r#match), credential))
        .collect();
    // Descending by key, which is how the kubelet gets the longer of two prefixes first; entries of one key stay
    // in the order given.
    keyed.sort_by(|left, right| right.0.cmp(&left.0));
    let found: Vec<_> = keyed
        .iter()
        .filter(|(key, _)| matches(key, repository))
        .map(|(_, credential)| *credential)
        .collect();
    if !found.is_empty() || !is_of_default_registry(repository) {
        return found;
    }
    keyed
        .iter()
        .filter(|(key, _)| key == DEFAULT_REGISTRY)
        .map(|(_, credential)| *credential)
        .collect()
}

/// A key without scheme and without the `/v1/` or `/v2/` of the registry's API.
fn key(given: &str) -> String {
    let rest = given
        .strip_prefix("https://")
        .or_else(|| given.strip_prefix("http://"))
        .unwrap_or(given);
    let (host, path) = split(rest);
    let path = path
        .strip_prefix("/v1/")
        .or_else(|| path.strip_prefix("/v2/"))
        .map_or(path.to_owned(), |rest| format!("/{rest}"));
    if path == "/" {
        host.to_owned()
    } else {
        format!("{host}{path}")
    }
}

/// Host with port, and the path from its slash on.
fn split(name: &str) -> (&str, &str) {
    name.find('/')
        .map_or((name, ""), |slash| (&name[..slash], &name[slash..]))
}

/// Whether a key, or an entry of a credential provider's `matchImages`, is for this repository.
pub fn matches(pattern: &str, repository: &str) -> bool {
    let (pattern_host, pattern_path) = split(pattern);
    let (host, path) = split(repository);
    let (pattern_host, pattern_port) = port(pattern_host);
    let (host, port) = port(host);
    let (patterns, labels): (Vec<_>, Vec<_>) = (pattern_host.split('.').collect(), host.split('.').collect());
    pattern_port == port
        && patterns.len() == labels.len()
        && path.starts_with(pattern_path)
        && patterns
            .iter()
            .zip(&labels)
            .all(|(pattern, label)| glob(pattern, label))
}

fn port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port),
        _ => (host, ""),
    }
}

fn is_of_default_registry(repository: &str) -> bool {
    match repository.split_once('/') {
        None => !repository.is_empty(),
        Some((first, _)) => {
            first == "docker.io"
                || first == DEFAULT_REGISTRY
                || (!first.is_empty() && !first.contains(['.', ':']))
        }
    }
}

/// Go's `filepath.Match` for one label of a host: `*`, `?`, `[a-z]`, `[^a-z]` and `\` before a character. A pattern
/// that is not well-formed matches nothing.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    // Where the last star stood, and how much of the text it has taken so far.
    let (mut at, mut seen, mut star) = (0, 0, None);
    loop {
        if seen == text.len() {
            return pattern[at..].iter().all(|c| *c == '*');
        }
        let next = match pattern.get(at) {
            Some('*') => {
                star = Some((at, seen));
                at += 1;
                continue;
            }
            Some(_) => one(&pattern[at..], text[seen]),
            None => Some(0),
        };
        match (next, star) {
            (None, _) => return false,
            (Some(0), None) => return false,
            (Some(0), Some((place, taken))) => {
                star = Some((place, taken + 1));
                (at, seen) = (place + 1, taken + 1);
            }
            (Some(length), _) => {
                at += length;
                seen += 1;
            }
        }
    }
}

/// How many characters of the pattern match this one: 0 for none, nothing for a pattern that is broken.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern[0] {
        '?' => Some(1),
        '\\' => {
            let escaped = *pattern.get(1)?;
            Some(if escaped == c { 2 } else { 0 })
        }
        '[' => {
            let end = pattern.iter().skip(2).position(|c| *c == ']')? + 2;
            let (negated, set) = match pattern[1] {
                '^' => (true, &pattern[2..end]),
                _ => (false, &pattern[1..end]),
            };
            let mut found = false;
            let mut rest = set;
            while let [first, tail @ ..] = rest {
                if let ['-', last, tail @ ..] = tail {
                    found |= (*first..=*last).contains(&c);
                    rest = tail;
                } else {
                    found |= *first == c;
                    rest = tail;
                }
            }
            Some(if found != negated { end + 1 } else { 0 })
        }
        plain => Some(usize::from(plain == c)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_by_host_port_labels_and_path_prefix() {
        for (pattern, repository, wanted) in [
            ("a.io", "a.io/x", true),
            ("a.io", "b.io/x", false),
            ("a.io:5000", "a.io:5000/x", true),
            ("a.io", "a.io:5000/x", false),
            ("a.io:5000", "a.io/x", false),
            ("a.io/team", "a.io/team/x", true),
            ("a.io/team", "a.io/other/x", false),
            ("*.io", "a.io/x", true),
            ("*.io", "b.a.io/x", false),
            ("*.*.io", "b.a.io/x", true),
            (
                "*.dkr.ecr.*.amazonaws.com",
                "123.dkr.ecr.eu-west-1.amazonaws.com/x",
                true,
            ),
            ("pre*fix.io", "pre-and-fix.io/x", true),
            ("pre*fix.io", "pre-and-fi.io/x", false),
            ("r?.io", "r1.io/x", true),
            ("r[0-9].io", "r1.io/x", true),
            ("r[^0-9].io", "r1.io/x", false),
            ("r[0-9.io", "r1.io/x", false),
            ("a.io/te*", "a.io/team/x", false),
        ] {
            assert_eq!(matches(pattern, repository), wanted, "{pattern} for {repository}");
        }
    }

    fn credential(key: &str, username: &str) -> Credential {
        let mut credential = Credential::default();
        credential.r#match = key.to_owned();
        credential.username = username.to_owned();
        credential
    }

    fn found(credentials: &[Credential], repository: &str) -> Vec<String> {
        matching(credentials, repository)
            .iter()
            .map(|credential| credential.username.clone())
            .collect()
    }

    #[test]
    fn all_that_match_are_tried_and_the_most_specific_first() {
        let credentials = [
            credential("https://a.io/v1/", "host"),
            credential("a.io/team/x", "image"),
            credential("a.io/team", "team"),
            credential("a.io", "second"),
            credential("b.io", "other"),
        ];
        assert_eq!(
            found(&credentials, "a.io/team/x"),
            ["image", "team", "host", "second"]
        );
        assert_eq!(found(&credentials, "a.io/x"), ["host", "second"]);
        assert!(found(&credentials, "c.io/x").is_empty());
    }

    #[test]
    fn docker_hub_is_meant_by_its_old_name() {
        let credentials = [credential("https://index.docker.io/v1/", "hub")];
        assert_eq!(found(&credentials, "docker.io/library/nginx"), ["hub"]);
        let both = [
            credential("https://index.docker.io/v1/", "hub"),
            credential("docker.io/library", "library"),
        ];
        assert_eq!(found(&both, "docker.io/library/nginx"), ["library"]);
        assert_eq!(found(&both, "docker.io/team/x"), ["hub"]);
    }
}
