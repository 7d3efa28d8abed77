//! The certificate authority: a key and a certificate in a Secret, the certificate also in a ConfigMap.

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use quartermaster_proto::identity::{AGENT_DNS, COORDINATOR_DNS, Identity};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};

/// Name of both the Secret and the ConfigMap.
const OBJECT: &str = "quartermaster-ca";
const CERTIFICATE: &str = "ca.crt";
const SECRET_CERTIFICATE: &str = "tls.crt";
const SECRET_KEY: &str = "tls.key";

const AUTHORITY_LIFE: Duration = Duration::days(3650);
const COORDINATOR_LIFE: Duration = Duration::days(30);
const AGENT_LIFE: Duration = Duration::hours(24);
/// Certificates begin in the past, since clocks of nodes differ.
const SKEW: Duration = Duration::minutes(5);

/// Why there is no authority, or no certificate from it.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The Secret or the ConfigMap could not be read or written.
    #[error("the certificate authority's {0} {OBJECT} could not be read or written: {1}")]
    Api(&'static str, #[source] Box<kube::Error>),
    /// The Secret does not hold what it should.
    #[error(
        "the Secret {OBJECT} holds no usable certificate authority ({0}); delete it to have a new one made, then restart the coordinator and the agents"
    )]
    Broken(String),
    /// A request for a certificate that can't be signed.
    #[error("the certificate request can't be signed: {0}")]
    Request(String),
}

/// The certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    certificate_der: CertificateDer<'static>,
}

/// A certificate and its key.
pub struct Credentials {
    /// The certificate in PEM.
    pub certificate_pem: String,
    /// Its private key in PEM. It stays in memory.
    pub key_pem: String,
}

impl Authority {
    /// Reads the authority of this namespace, making one if there is none yet, and publishes its certificate.
    pub async fn load_or_make(client: &kube::Client, namespace: &str) -> Result<Self, AuthorityError> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let api = |error| AuthorityError::Api("Secret", Box::new(error));
        let secret = match secrets.get_opt(OBJECT).await.map_err(api)? {
            Some(secret) => secret,
            None => {
                let fresh = Self::make()?;
                match secrets.create(&PostParams::default(), &fresh).await {
                    Ok(secret) => secret,
                    // The other replica was quicker: what it made is what counts.
                    Err(kube::Error::Api(status)) if status.code == 409 => {
                        secrets.get(OBJECT).await.map_err(api)?
                    }
                    Err(error) => return Err(api(error)),
                }
            }
        };
        let authority = Self::read(&secret)?;
        authority.publish(client, namespace).await?;
        Ok(authority)
    }

    fn make() -> Result<Secret, AuthorityError> {
        let broken = |error: rcgen::Error| AuthorityError::Broken(error.to_string());
        let key = KeyPair::generate().map_err(broken)?;
        let mut params = params(AUTHORITY_LIFE);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
            .distinguished_name
            .push(DnType::CommonName, "Quartermaster");
        let certificate = params.self_signed(&key).map_err(broken)?;
        Ok(Secret {
            metadata: ObjectMeta {
                name: Some(OBJECT.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            string_data: Some(
                [
                    (SECRET_CERTIFICATE.to_owned(), certificate.pem()),
                    (SECRET_KEY.to_owned(), key.serialize_pem()),
                ]
                .into(),
            ),
            ..Secret::default()
        })
    }

    fn read(secret: &Secret) -> Result<Self, AuthorityError> {
        let text = |key: &str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(key));
            bytes
                .and_then(|bytes| String::from_utf8(bytes.0.clone()).ok())
                .ok_or_else(|| AuthorityError::Broken(format!("it has no {key}")))
        };
        Self::from_pem(text(SECRET_CERTIFICATE)?, &text(SECRET_KEY)?)
    }

    fn from_pem(certificate_pem: String, key_pem: &str) -> Result<Self, AuthorityError> {
        let broken = |error: rcgen::Error| AuthorityError::Broken(error.to_string());
        let key = KeyPair::from_pem(key_pem).map_err(broken)?;
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, key).map_err(broken)?;
        let certificate_der = CertificateDer::from_pem_slice(certificate_pem.as_bytes())
            .map_err(|error| AuthorityError::Broken(error.to_string()))?;
        Ok(Self {
            issuer,
            certificate_pem,
            certificate_der,
        })
    }

    async fn publish(&self, client: &kube::Client, namespace: &str) -> Result<(), AuthorityError> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let api = |error| AuthorityError::Api("ConfigMap", Box::new(error));
        let data = [(CERTIFICATE.to_owned(), self.certificate_pem.clone())].into();
        if let Some(found) = maps.get_opt(OBJECT).await.map_err(api)?
            && found.data.as_ref() == Some(&data)
        {
            return Ok(());
        }
        let map = ConfigMap {
            metadata: ObjectMeta {
                name: Some(OBJECT.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some(data),
            ..ConfigMap::default()
        };
        let apply = PatchParams::apply("quartermaster-authority").force();
        maps.patch(OBJECT, &apply, &Patch::Apply(&map))
            .await
            .map_err(api)?;
        Ok(())
    }

    /// The authority's certificate, in PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The authority's certificate, in DER.
    pub fn certificate_der(&self) -> &CertificateDer<'static> {
        &self.certificate_der
    }

    /// Makes a key and a certificate for a coordinator that is reached under these DNS names.
    pub fn coordinator(&self, dns_names: &[String]) -> Result<Credentials, AuthorityError> {
        let refused = |error: rcgen::Error| AuthorityError::Request(error.to_string());
        let key = KeyPair::generate().map_err(refused)?;
        let mut params = holder(&Identity::Coordinator, COORDINATOR_DNS, COORDINATOR_LIFE)?;
        for name in dns_names {
            params
                .subject_alt_names
                .push(SanType::DnsName(name.as_str().try_into().map_err(refused)?));
        }
        let certificate = params.signed_by(&key, &self.issuer).map_err(refused)?;
        Ok(Credentials {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
        })
    }

    /// Signs the key of a request for the agent of `node`, whatever names the request holds.
    pub fn sign_agent(&self, csr_pem: &str, node: &str) -> Result<String, AuthorityError> {
        let refused = |error: rcgen::Error| AuthorityError::Request(error.to_string());
        let mut request = CertificateSigningRequestParams::from_pem(csr_pem).map_err(refused)?;
        request.params = holder(&Identity::Agent(node.to_owned()), AGENT_DNS, AGENT_LIFE)?;
        let certificate = request.signed_by(&self.issuer).map_err(refused)?;
        Ok(certificate.pem())
    }
}

fn params(life: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = OffsetDateTime::now_utc();
    params.not_before = now - SKEW;
    params.not_after = now + life;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
}

fn holder(identity: &Identity, dns: &str, life: Duration) -> Result<CertificateParams, AuthorityError> {
    let refused = |error: rcgen::Error| AuthorityError::Request(error.to_string());
    let mut params = params(life);
    params.subject_alt_names = vec![
        SanType::URI(identity.uri().try_into().map_err(refused)?),
        SanType::DnsName(dns.try_into().map_err(refused)?),
    ];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

#[cfg(test)]
impl Authority {
    pub(crate) fn for_tests() -> Self {
        let secret = Self::make().expect("an authority");
        let mut data = secret.string_data.expect("data");
        Self::from_pem(
            data.remove(SECRET_CERTIFICATE).expect("a certificate"),
            &data[SECRET_KEY],
        )
        .expect("an authority")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::dial::identity_of;

    #[test]
    fn an_agents_certificate_names_its_node_whatever_it_asked_for() {
        let authority = Authority::for_tests();
        let key = KeyPair::generate().expect("a key");
        let asked = CertificateParams::new(vec!["worker-2".to_owned()]).expect("params");
        let csr = asked
            .serialize_request(&key)
            .expect("a request")
            .pem()
            .expect("PEM");
        let signed = authority.sign_agent(&csr, "worker-1").expect("a certificate");
        let der = CertificateDer::from_pem_slice(signed.as_bytes()).expect("DER");
        assert_eq!(identity_of(&der), Some(Identity::Agent("worker-1".into())));
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).expect("a certificate");
        assert!(!parsed.is_ca());
        let life = parsed.validity().not_after.timestamp() - parsed.validity().not_before.timestamp();
        assert_eq!(life, (AGENT_LIFE + SKEW).whole_seconds());
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let refused = Authority::for_tests().sign_agent("-----BEGIN NONSENSE-----", "worker-1");
        assert!(matches!(refused, Err(AuthorityError::Request(_))));
    }

    #[test]
    fn a_secret_without_a_key_says_what_to_do() {
        let Err(error) = Authority::read(&Secret::default()) else {
            panic!("an empty Secret makes no authority")
        };
        assert!(
            error.to_string().contains("delete it to have a new one made"),
            "{error}"
        );
    }
}
