//! The certificates of a testbed and the kubeconfigs made with them.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

/// How long certificates are good for. A testbed that stands longer is made anew.
const VALID_FOR: Duration = Duration::days(30);

/// The testbed's own authority. Its key lies in the state folder: the controller manager signs with it too.
pub struct Authority {
    dir: PathBuf,
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// Whom a certificate is for.
pub struct Subject<'a> {
    /// Names the files: `<file>.crt`, `<file>.key`.
    pub file: &'a str,
    /// Common name: Kubernetes' user name.
    pub user: &'a str,
    /// Organisation: Kubernetes' group.
    pub group: Option<&'a str>,
    /// DNS names it serves as.
    pub names: &'a [&'a str],
    /// Addresses it serves at.
    pub addresses: &'a [Ipv4Addr],
}

/// A certificate and its key, as PEM.
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its private key (PKCS #8).
    pub key: String,
}

impl Authority {
    /// Makes a new authority in `dir`: `ca.crt` and `ca.key`.
    ///
    /// # Errors
    /// If a key can't be made or a file not written.
    pub fn make(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("can't make {}", dir.display()))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
        let key = KeyPair::generate()?;
        let mut params = params("testbed-ca", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?.pem();
        write(&dir.join("ca.crt"), &certificate, 0o644)?;
        write(&dir.join("ca.key"), &key.serialize_pem(), 0o600)?;
        Ok(Self {
            dir: dir.to_owned(),
            certificate,
            issuer: Issuer::new(params, key),
        })
    }

    /// The authority's certificate, as PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Signs a certificate for clients and servers, and writes it beside the authority's own.
    ///
    /// # Errors
    /// If a key can't be made or a file not written.
    pub fn issue(&self, subject: &Subject<'_>) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let mut params = params(subject.user, subject.group);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ClientAuth,
            ExtendedKeyUsagePurpose::ServerAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        for name in subject.names {
            params
                .subject_alt_names
                .push(SanType::DnsName((*name).try_into()?));
        }
        for address in subject.addresses {
            params
                .subject_alt_names
                .push(SanType::IpAddress(IpAddr::V4(*address)));
        }
        let certificate = params.signed_by(&key, &self.issuer)?;
        let identity = Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        };
        let file = |extension: &str| self.dir.join(format!("{}.{extension}", subject.file));
        write(&file("crt"), &identity.certificate, 0o644)?;
        write(&file("key"), &identity.key, 0o600)?;
        Ok(identity)
    }

    /// Signs a client's certificate and writes the kubeconfig it uses: `<file>.kubeconfig`.
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn kubeconfig(&self, subject: &Subject<'_>, server: &str) -> Result<PathBuf> {
        let identity = self.issue(subject)?;
        let path = self.dir.join(format!("{}.kubeconfig", subject.file));
        let text = kubeconfig(server, &self.certificate, &identity, "testbed")?;
        write(&path, &text, 0o600)?;
        Ok(path)
    }
}

/// The key that service-account tokens are signed with: `sa.key` and `sa.pub` in `dir`.
///
/// # Errors
/// If a key can't be made or a file not written.
pub fn service_account_key(dir: &Path) -> Result<()> {
    let key = KeyPair::generate()?;
    write(&dir.join("sa.key"), &key.serialize_pem(), 0o600)?;
    write(&dir.join("sa.pub"), &key.public_key_pem(), 0o644)
}

/// A kubeconfig with everything inside it. It is JSON, which is YAML too.
///
/// # Errors
/// Never in practice: only if JSON can't be written.
pub fn kubeconfig(server: &str, ca: &str, identity: &Identity, name: &str) -> Result<String> {
    let data = |pem: &str| BASE64.encode(pem);
    let config = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {
            "server": server,
            "certificate-authority-data": data(ca),
        }}],
        "users": [{"name": name, "user": {
            "client-certificate-data": data(&identity.certificate),
            "client-key-data": data(&identity.key),
        }}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    });
    Ok(serde_json::to_string_pretty(&config)?)
}

fn params(user: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::hours(1);
    params.not_after = now + VALID_FOR;
    params
}

pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let result = fs::File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    result.with_context(|| format!("can't write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_carries_the_server_and_all_three_certificates() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::make(dir.path()).unwrap();
        let subject = Subject {
            file: "admin",
            user: "admin",
            group: Some("system:masters"),
            names: &[],
            addresses: &[],
        };
        let path = authority.kubeconfig(&subject, "https://127.0.0.1:1234").unwrap();
        let config: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(
            config["clusters"][0]["cluster"]["server"],
            "https://127.0.0.1:1234"
        );
        for data in [
            &config["clusters"][0]["cluster"]["certificate-authority-data"],
            &config["users"][0]["user"]["client-certificate-data"],
            &config["users"][0]["user"]["client-key-data"],
        ] {
            assert!(data.as_str().unwrap().starts_with("LS0tLS1CRUdJTi"));
        }
    }

    #[test]
    fn keys_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        Authority::make(dir.path()).unwrap();
        let mode = fs::metadata(dir.path().join("ca.key"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
