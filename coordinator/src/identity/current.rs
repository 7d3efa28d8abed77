//! What a coordinator shows and trusts now: one value, replaced as a whole when anything of it is renewed.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rustls::client::WebPkiServerVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::authority::{Authority, AuthorityError};

/// What a coordinator shows and trusts.
pub struct Current {
    /// What signs.
    pub(super) authority: Authority,
    /// Who is trusted, in PEM.
    pub(super) bundle_pem: String,
    /// Checks chains to any of them.
    pub(super) verifier: Arc<WebPkiServerVerifier>,
    /// Our own certificate.
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// Its key.
    pub(super) key: PrivateKeyDer<'static>,
    /// When our own certificate was made.
    pub(super) made: Timestamp,
    /// How long certificates are good for.
    pub(super) life: SignedDuration,
    /// How enrolment is served.
    pub(super) enrolment: Arc<ServerConfig>,
}

impl Current {
    /// With a certificate of our own for these DNS names, signed by `authority`; whoever holds one of it or of
    /// `others` (certificates in PEM) is trusted.
    pub(super) fn new(
        authority: Authority,
        others: &[&str],
        names: &[String],
        life: SignedDuration,
    ) -> Result<Self, AuthorityError> {
        let broken = |error: &dyn std::fmt::Display| AuthorityError::Broken(error.to_string());
        let mut bundle_pem = authority.certificate_pem().to_owned();
        for other in others {
            bundle_pem.push_str(other);
        }
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle_pem.as_bytes()) {
            let certificate = certificate.map_err(|error| broken(&error))?;
            roots.add(certificate).map_err(|error| broken(&error))?;
        }
        let verifier = WebPkiServerVerifier::builder(Arc::new(roots))
            .build()
            .map_err(|error| broken(&error))?;
        let own = authority.coordinator(names, life)?;
        let chain = vec![
            CertificateDer::from_pem_slice(own.certificate_pem.as_bytes()).map_err(|error| broken(&error))?,
        ];
        let key = PrivateKeyDer::from_pem_slice(own.key_pem.as_bytes()).map_err(|error| broken(&error))?;
        let mut enrolment = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(|error| broken(&error))?;
        enrolment.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self {
            authority,
            bundle_pem,
            verifier,
            chain,
            key,
            made: Timestamp::now(),
            life,
            enrolment: Arc::new(enrolment),
        })
    }

    /// How enrolment is served.
    pub fn enrolment(&self) -> Arc<ServerConfig> {
        self.enrolment.clone()
    }
}

#[cfg(test)]
impl Current {
    /// Of this authority, for tests: one that never changes.
    pub(crate) fn fixed(authority: Authority) -> tokio::sync::watch::Receiver<Arc<Self>> {
        let life = SignedDuration::from_hours(12);
        let current = Self::new(authority, &[], &[], life).expect("a certificate");
        tokio::sync::watch::channel(Arc::new(current)).1
    }
}
