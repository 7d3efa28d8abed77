//! The kubelet's credential providers: which are configured, which are for an image, and what they say.
//!
//! The rules are those of `k8s.io/kubernetes/pkg/credentialprovider/plugin`.

use std::collections::BTreeMap;

use quartermaster_proto::keyring;
use quartermaster_proto::v1::Credential;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zeroize::Zeroizing;

const GROUP: &str = "kubelet.config.k8s.io/";
const PROTOCOL: &str = "credentialprovider.kubelet.k8s.io/";
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];

/// Why a configuration or an answer is not taken. It quotes no answer: that would be a secret.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum ProviderError {
    #[error("{0} can't be read: {1}")]
    File(String, String),
    #[error("{0} is not a CredentialProviderConfig: {1}")]
    NotAConfig(String, String),
    #[error("the credential provider {0} is configured twice")]
    Twice(String),
    #[error("the credential provider {0} answered something that is no CredentialProviderResponse of {1}")]
    Answer(String, String),
    #[error("the credential provider {0} can't be run: {1}")]
    Run(String, String),
    #[error(
        "the credential provider {0} wants the token of a pod's service account, which a prefetch has none of"
    )]
    WantsToken(String),
}

/// One provider.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Provider {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) match_images: Vec<String>,
    pub(crate) api_version: String,
    #[serde(default)]
    pub(crate) args: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) env: Option<Vec<Variable>>,
    #[serde(default)]
    pub(crate) token_attributes: Option<TokenAttributes>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Variable {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) value: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TokenAttributes {
    #[serde(default)]
    pub(crate) require_service_account: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    kind: String,
    api_version: String,
    #[serde(default)]
    providers: Vec<Provider>,
}

/// Reads the files of a configuration, in the kubelet's order.
pub(crate) fn parse(files: &[(String, Vec<u8>)]) -> Result<Vec<Provider>, ProviderError> {
    let mut providers: Vec<Provider> = Vec::new();
    for (path, bytes) in files {
        let wrong = |why: String| ProviderError::NotAConfig(path.clone(), why);
        // YAML holds JSON too.
        let config: Config = serde_yaml_ng::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        let version = config.api_version.strip_prefix(GROUP);
        if config.kind != "CredentialProviderConfig"
            || !version.is_some_and(|version| VERSIONS.contains(&version))
        {
            return Err(wrong(format!("it is {} of {}", config.kind, config.api_version)));
        }
        for provider in config.providers {
            let version = provider.api_version.strip_prefix(PROTOCOL);
            if !version.is_some_and(|version| VERSIONS.contains(&version)) {
                return Err(wrong(format!(
                    "{} speaks {}",
                    provider.name, provider.api_version
                )));
            }
            // The name is that of a program in one folder.
            if provider.name.contains(['/', ' ']) || matches!(provider.name.as_str(), "" | "." | "..") {
                return Err(wrong(format!("{:?} is no name of a provider", provider.name)));
            }
            if providers.iter().any(|known| known.name == provider.name) {
                return Err(ProviderError::Twice(provider.name));
            }
            providers.push(provider);
        }
    }
    Ok(providers)
}

impl Provider {
    /// Whether the kubelet would ask it about this repository.
    pub(crate) fn is_for(&self, repository: &str) -> bool {
        self.match_images
            .iter()
            .any(|pattern| keyring::matches(pattern, repository))
    }

    /// What it is sent.
    pub(crate) fn request(&self, repository: &str) -> Vec<u8> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Ask<'a> {
            kind: &'a str,
            api_version: &'a str,
            image: &'a str,
        }
        serde_json::to_vec(&Ask {
            kind: "CredentialProviderRequest",
            api_version: &self.api_version,
            image: repository,
        })
        .unwrap_or_default()
    }
}

/// For how many images an answer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum CacheKeyType {
    Image,
    Registry,
    Global,
}

/// What a provider says.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) holds_for: CacheKeyType,
    pub(crate) credentials: Vec<Credential>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    kind: String,
    api_version: String,
    cache_key_type: CacheKeyType,
    #[serde(default)]
    auth: Option<BTreeMap<String, Pair>>,
}

#[derive(Deserialize)]
struct Pair {
    #[serde(default)]
    username: Zeroizing<String>,
    #[serde(default)]
    password: Zeroizing<String>,
}

/// Reads the answer of a provider.
pub(crate) fn answer(provider: &Provider, bytes: &[u8]) -> Result<Answer, ProviderError> {
    let wrong = || ProviderError::Answer(provider.name.clone(), provider.api_version.clone());
    // serde's own words would quote what it stumbled over.
    let response: Response = serde_json::from_slice(bytes).map_err(|_| wrong())?;
    let is_ours = response.api_version.strip_prefix(PROTOCOL);
    if response.kind != "CredentialProviderResponse"
        || !is_ours.is_some_and(|version| VERSIONS.contains(&version))
    {
        return Err(wrong());
    }
    let credentials = response.auth.unwrap_or_default().into_iter().map(|(key, pair)| {
        let mut credential = Credential::default();
        credential.r#match = key;
        credential.username = (*pair.username).clone();
        credential.password = (*pair.password).clone();
        credential
    });
    Ok(Answer {
        holds_for: response.cache_key_type,
        credentials: credentials.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: &str, providers: &str) -> (String, Vec<u8>) {
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/{version}\nkind: CredentialProviderConfig\nproviders:\n{providers}"
        );
        ("/etc/kubernetes/providers.yaml".into(), text.into_bytes())
    }

    const ECR: &str = "- name: ecr-credential-provider\n  matchImages: ['*.dkr.ecr.*.amazonaws.com', 'registry.io:8080/path']\n  defaultCacheDuration: 12h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get-credentials]\n  env: [{name: AWS_PROFILE, value: x}]\n";

    #[test]
    fn configurations_of_all_versions_are_read() {
        for version in ["v1", "v1beta1", "v1alpha1"] {
            let providers = parse(&[file(version, ECR)]).unwrap();
            let provider = &providers[0];
            assert_eq!(provider.args.as_deref().unwrap(), ["get-credentials"]);
            assert_eq!(provider.env.as_deref().unwrap()[0].value, "x");
            assert!(provider.is_for("1.dkr.ecr.eu.amazonaws.com/a"));
            assert!(provider.is_for("registry.io:8080/path/a"));
            assert!(!provider.is_for("registry.io/path/a"));
        }
        let json =
            br#"{"kind":"CredentialProviderConfig","apiVersion":"kubelet.config.k8s.io/v1","providers":[]}"#;
        assert!(parse(&[("a.json".into(), json.to_vec())]).unwrap().is_empty());
    }

    #[test]
    fn what_the_kubelet_refuses_is_refused() {
        let other = |old: &str, new: &str| parse(&[file("v1", &ECR.replace(old, new))]);
        assert!(parse(&[file("v2", ECR)]).is_err());
        assert!(other("k8s.io/v1\n", "k8s.io/v9\n").is_err());
        assert!(other("ecr-credential-provider", "../../bin/sh").is_err());
        assert_eq!(
            parse(&[file("v1", ECR), file("v1", ECR)]),
            Err(ProviderError::Twice("ecr-credential-provider".into()))
        );
    }

    #[test]
    fn a_provider_is_asked_in_its_own_version() {
        let provider = &parse(&[file("v1", ECR)]).unwrap()[0];
        assert_eq!(
            String::from_utf8(provider.request("a.io/x")).unwrap(),
            r#"{"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"a.io/x"}"#
        );
    }

    #[test]
    fn answers_are_read_and_never_quoted() {
        let provider = &parse(&[file("v1", ECR)]).unwrap()[0];
        let good = br#"{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Registry","cacheDuration":"6h","auth":{"a.io":{"username":"u","password":"p"}}}"#;
        let read = answer(provider, good).unwrap();
        assert_eq!(read.holds_for, CacheKeyType::Registry);
        assert_eq!(read.credentials[0].password, "p");
        let none = br#"{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Image"}"#;
        assert!(answer(provider, none).unwrap().credentials.is_empty());
        for bad in [
            "hunter2",
            r#"{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"hunter2"}"#,
            r#"{"kind":"hunter2","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Image"}"#,
        ] {
            let error = answer(provider, bad.as_bytes()).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
