//! A certificate authority: what signs, and for whom it signs what.

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::identity::{AGENT_DNS, COORDINATOR_DNS, Identity};
use quartermaster_proto::tls::Validity;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::OffsetDateTime;

use super::rotation::SKEW;

/// Why there is no authority, or no certificate from it.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The Secret or the ConfigMap could not be read or written.
    #[error("the certificate authority's {0} quartermaster-ca could not be read or written: {1}")]
    Api(&'static str, #[source] Box<kube::Error>),
    /// The Secret does not hold what it should.
    #[error(
        "the Secret quartermaster-ca holds no usable certificate authority ({0}); delete it to have a new one made, then delete the agents' pods"
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
    validity: Validity,
}

/// A certificate and its key.
pub struct Credentials {
    /// The certificate in PEM.
    pub certificate_pem: String,
    /// Its private key in PEM. It stays in memory, but for an authority's, which is in the Secret.
    pub key_pem: String,
}

impl Authority {
    /// Makes a new one.
    pub(super) fn make(life: SignedDuration) -> Result<Credentials, AuthorityError> {
        let broken = |error: rcgen::Error| AuthorityError::Broken(error.to_string());
        let key = KeyPair::generate().map_err(broken)?;
        let mut params = params(life);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
            .distinguished_name
            .push(DnType::CommonName, "Quartermaster");
        let certificate = params.self_signed(&key).map_err(broken)?;
        Ok(Credentials {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
        })
    }

    /// The authority of this certificate and key.
    ///
    /// # Errors
    /// When they can't be read or do not belong together.
    pub fn from_pem(credentials: &Credentials) -> Result<Self, AuthorityError> {
        let broken = |error: rcgen::Error| AuthorityError::Broken(error.to_string());
        let key = KeyPair::from_pem(&credentials.key_pem).map_err(broken)?;
        let public = key.subject_public_key_info();
        let certificate_der = CertificateDer::from_pem_slice(credentials.certificate_pem.as_bytes())
            .map_err(|error| AuthorityError::Broken(error.to_string()))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate_der)
            .map_err(|error| AuthorityError::Broken(error.to_string()))?;
        if parsed.public_key().raw != public.as_slice() {
            return Err(AuthorityError::Broken(
                "the certificate is of another key".to_owned(),
            ));
        }
        let validity = Validity::of(&certificate_der)
            .ok_or_else(|| AuthorityError::Broken("the certificate has no dates".to_owned()))?;
        let issuer = Issuer::from_ca_cert_pem(&credentials.certificate_pem, key).map_err(broken)?;
        Ok(Self {
            issuer,
            certificate_pem: credentials.certificate_pem.clone(),
            certificate_der,
            validity,
        })
    }

    /// The authority's certificate, in PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The authority's certificate, in DER.
    pub fn certificate_der(&self) -> &CertificateDer<'static> {
        &self.certificate_der
    }

    /// When it was made, and when it ends.
    pub(super) fn made_and_ends(&self) -> (Timestamp, Timestamp) {
        let at = |seconds| Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
        (at(self.validity.from) + SKEW, at(self.validity.until))
    }

    /// Makes a key and a certificate for a coordinator that is reached under these DNS names.
    ///
    /// # Errors
    /// When a name is none.
    pub fn coordinator(
        &self,
        dns_names: &[String],
        life: SignedDuration,
    ) -> Result<Credentials, AuthorityError> {
        let refused = |error: rcgen::Error| AuthorityError::Request(error.to_string());
        let key = KeyPair::generate().map_err(refused)?;
        let mut params = holder(&Identity::Coordinator, COORDINATOR_DNS, life)?;
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
    ///
    /// # Errors
    /// When the request can't be read, or its key did not sign it.
    pub fn sign_agent(
        &self,
        csr_pem: &str,
        node: &str,
        life: SignedDuration,
    ) -> Result<String, AuthorityError> {
        let refused = |error: rcgen::Error| AuthorityError::Request(error.to_string());
        let mut request = CertificateSigningRequestParams::from_pem(csr_pem).map_err(refused)?;
        request.params = holder(&Identity::Agent(node.to_owned()), AGENT_DNS, life)?;
        let certificate = request.signed_by(&self.issuer).map_err(refused)?;
        Ok(certificate.pem())
    }
}

fn params(life: SignedDuration) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = OffsetDateTime::now_utc();
    params.not_before = now - time::Duration::seconds(SKEW.as_secs());
    params.not_after = now + time::Duration::seconds(life.as_secs());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
}

fn holder(identity: &Identity, dns: &str, life: SignedDuration) -> Result<CertificateParams, AuthorityError> {
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
        let made = Self::make(SignedDuration::from_hours(24)).expect("an authority");
        Self::from_pem(&made).expect("an authority")
    }
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::tls::identity_of;

    use super::*;

    const LIFE: SignedDuration = SignedDuration::from_hours(12);

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
        let signed = authority
            .sign_agent(&csr, "worker-1", LIFE)
            .expect("a certificate");
        let der = CertificateDer::from_pem_slice(signed.as_bytes()).expect("DER");
        assert_eq!(identity_of(&der), Some(Identity::Agent("worker-1".into())));
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).expect("a certificate");
        assert!(!parsed.is_ca());
        let validity = Validity::of(&der).expect("dates");
        assert_eq!(validity.until - validity.from, (LIFE + SKEW).as_secs());
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let refused = Authority::for_tests().sign_agent("-----BEGIN NONSENSE-----", "worker-1", LIFE);
        assert!(matches!(refused, Err(AuthorityError::Request(_))));
    }

    #[test]
    fn a_certificate_with_the_key_of_another_is_no_authority_and_says_what_to_do() {
        let one = Authority::make(LIFE).expect("an authority");
        let other = Authority::make(LIFE).expect("an authority");
        let mixed = Credentials {
            certificate_pem: one.certificate_pem,
            key_pem: other.key_pem,
        };
        let Err(error) = Authority::from_pem(&mixed) else {
            panic!("it is an authority")
        };
        assert!(
            error.to_string().contains("delete it to have a new one made"),
            "{error}"
        );
    }
}
