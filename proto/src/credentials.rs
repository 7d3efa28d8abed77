//! Pull secrets, from the bytes of a Secret to what is sent with a command.
//!
//! Nothing here says a secret: neither `Debug` nor any error. What a [`Credential`] held is overwritten when it is
//! dropped.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

use crate::v1::Credential;

/// Docker pads its `auth`, other tools do not.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("match", &self.r#match)
            .finish_non_exhaustive()
    }
}

impl Drop for Credential {
    fn drop(&mut self) {
        self.username.zeroize();
        self.password.zeroize();
        self.identity_token.zeroize();
        self.registry_token.zeroize();
    }
}

/// The two forms of a pull secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `kubernetes.io/dockerconfigjson`: the entries stand below `auths`.
    ConfigJson,
    /// `kubernetes.io/dockercfg`: the entries stand at the top.
    Legacy,
}

impl Format {
    /// The format of a Secret of this type; `None` where it is no pull secret.
    pub fn of_secret_type(secret_type: &str) -> Option<Self> {
        match secret_type {
            "kubernetes.io/dockerconfigjson" => Some(Self::ConfigJson),
            "kubernetes.io/dockercfg" => Some(Self::Legacy),
            _ => None,
        }
    }

    /// Under which key of the Secret's data the bytes are.
    pub fn data_key(self) -> &'static str {
        match self {
            Self::ConfigJson => ".dockerconfigjson",
            Self::Legacy => ".dockercfg",
        }
    }
}

/// Why a pull secret can't be read. It names places, never values.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CredentialsError {
    /// Not JSON.
    #[error("it is not JSON (line {line}, column {column})")]
    NotJson {
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
    },
    /// JSON of another shape.
    #[error("it is not a docker configuration: {0}")]
    Shape(&'static str),
}

/// What a pull secret holds.
#[derive(Debug, Default)]
pub struct PullSecret {
    /// Entries that can be used, sorted by key.
    pub credentials: Vec<Credential>,
    /// Keys of entries that can't: no secret in them, or one that can't be decoded.
    pub unusable: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    username: Option<Zeroizing<String>>,
    password: Option<Zeroizing<String>>,
    auth: Option<Zeroizing<String>>,
    #[serde(alias = "identityToken")]
    identitytoken: Option<Zeroizing<String>>,
    #[serde(alias = "registryToken")]
    registrytoken: Option<Zeroizing<String>>,
}

#[derive(Deserialize)]
struct ConfigJson {
    auths: Option<BTreeMap<String, Entry>>,
}

/// Reads the bytes of a pull secret (as they are in the Secret once its base64 is taken off).
///
/// One entry that makes no sense does not spoil the others; they are named in [`PullSecret::unusable`].
///
/// # Errors
/// [`CredentialsError`].
pub fn parse(format: Format, bytes: &[u8]) -> Result<PullSecret, CredentialsError> {
    let entries = match format {
        Format::ConfigJson => serde_json::from_slice::<ConfigJson>(bytes)
            .map_err(|error| refused(&error))?
            .auths
            .ok_or(CredentialsError::Shape("it has no `auths`"))?,
        Format::Legacy => {
            serde_json::from_slice::<BTreeMap<String, Entry>>(bytes).map_err(|error| refused(&error))?
        }
    };
    let mut secret = PullSecret::default();
    for (key, entry) in entries {
        match credential(&key, &entry) {
            Some(credential) => secret.credentials.push(credential),
            None => secret.unusable.push(key),
        }
    }
    Ok(secret)
}

/// serde's own words quote the value that it stumbled over.
fn refused(error: &serde_json::Error) -> CredentialsError {
    if error.is_data() {
        CredentialsError::Shape("an entry is not a set of texts")
    } else {
        CredentialsError::NotJson {
            line: error.line(),
            column: error.column(),
        }
    }
}

/// As the kubelet and docker read it: `auth` beats `username` and `password`.
fn credential(key: &str, entry: &Entry) -> Option<Credential> {
    let text = |value: &Option<Zeroizing<String>>| value.as_deref().cloned().unwrap_or_default();
    let mut credential = Credential {
        r#match: key.to_owned(),
        username: text(&entry.username),
        password: text(&entry.password),
        identity_token: text(&entry.identitytoken),
        registry_token: text(&entry.registrytoken),
    };
    if let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) {
        let decoded = Zeroizing::new(BASE64.decode(auth.trim()).ok()?);
        let pair = std::str::from_utf8(&decoded).ok()?;
        let (username, password) = pair.split_once(':')?;
        credential.username.zeroize();
        credential.password.zeroize();
        credential.username = username.to_owned();
        // docker pads what it encodes with NUL.
        credential.password = password.trim_end_matches('\0').to_owned();
    }
    let usable = !credential.identity_token.is_empty()
        || !credential.registry_token.is_empty()
        || !credential.username.is_empty()
        || !credential.password.is_empty();
    usable.then_some(credential)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(secret: &PullSecret) -> Vec<(&str, &str, &str)> {
        secret
            .credentials
            .iter()
            .map(|c| (c.r#match.as_str(), c.username.as_str(), c.password.as_str()))
            .collect()
    }

    #[test]
    fn both_formats_give_the_same_entries() {
        let entries =
            r#"{"a.io": {"username": "u", "password": "p"}, "b.io:5000/x": {"auth": "dXNlcjpwYTpzcw=="}}"#;
        let wanted = [("a.io", "u", "p"), ("b.io:5000/x", "user", "pa:ss")];
        let new = parse(
            Format::ConfigJson,
            format!(r#"{{"auths": {entries}}}"#).as_bytes(),
        )
        .unwrap();
        assert_eq!(pairs(&new), wanted);
        let legacy = parse(Format::Legacy, entries.as_bytes()).unwrap();
        assert_eq!(pairs(&legacy), wanted);
    }

    #[test]
    fn auth_beats_username_and_password_and_needs_no_padding() {
        let text = r#"{"a.io": {"username": "old", "password": "old", "auth": "dXNlcjpwYTpzcw"}}"#;
        let secret = parse(Format::Legacy, text.as_bytes()).unwrap();
        assert_eq!(pairs(&secret), [("a.io", "user", "pa:ss")]);
    }

    #[test]
    fn tokens_are_read_in_either_spelling() {
        let text = r#"{"auths": {"a.io": {"identitytoken": "i"}, "b.io": {"registryToken": "r"}}}"#;
        let secret = parse(Format::ConfigJson, text.as_bytes()).unwrap();
        assert_eq!(secret.credentials[0].identity_token, "i");
        assert_eq!(secret.credentials[1].registry_token, "r");
    }

    #[test]
    fn a_senseless_entry_does_not_spoil_the_others() {
        let text = r#"{"auths": {"a.io": {"auth": "!"}, "b.io": {}, "c.io": {"auth": "bm9jb2xvbg=="}, "d.io": {"username": "u", "password": "p", "email": "e"}}, "credsStore": "x"}"#;
        let secret = parse(Format::ConfigJson, text.as_bytes()).unwrap();
        assert_eq!(pairs(&secret), [("d.io", "u", "p")]);
        assert_eq!(secret.unusable, ["a.io", "b.io", "c.io"]);
    }

    #[test]
    fn no_error_and_no_debug_shows_a_secret() {
        for text in [
            r#"{"auths": {"a.io": "hunter2"}}"#,
            r#"{"auths": {"a.io": {"password": ["hunter2"]}}}"#,
            r#"{"auths": {"a.io": {"password": "hunter2"}"#,
            r#"{"hunter2": {}}"#,
            "hunter2",
        ] {
            let error = parse(Format::ConfigJson, text.as_bytes()).unwrap_err();
            let words = format!("{error} {error:?}");
            assert!(!words.contains("hunter2"), "{words}");
        }
        let text = r#"{"a.io": {"username": "hunter1", "password": "hunter2", "identitytoken": "hunter3"}}"#;
        let secret = parse(Format::Legacy, text.as_bytes()).unwrap();
        let request = crate::v1::PullRequest {
            credential_sets: vec![crate::v1::CredentialSet {
                credentials: secret.credentials,
            }],
            ..Default::default()
        };
        let words = format!("{request:?}");
        assert!(words.contains("a.io") && !words.contains("hunter"), "{words}");
    }

    #[test]
    fn a_secret_of_another_type_is_none_of_ours() {
        assert_eq!(Format::of_secret_type("Opaque"), None);
        let format = Format::of_secret_type("kubernetes.io/dockercfg").unwrap();
        assert_eq!(format.data_key(), ".dockercfg");
    }
}
