//! Who may command: the holder of a coordinator's certificate, whatever address it dials from.

use quartermaster_proto::identity::Identity;
use tonic::{Request, Status};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Lets a call pass if the peer's certificate names a coordinator. TLS has checked the chain before.
///
/// # Errors
/// `UNAUTHENTICATED` without a certificate, `PERMISSION_DENIED` with another name in it.
pub(crate) fn require_coordinator(request: Request<()>) -> Result<Request<()>, Status> {
    let certificates = request
        .peer_certs()
        .ok_or_else(|| Status::unauthenticated("commands are taken over mutual TLS only"))?;
    let leaf = certificates
        .first()
        .ok_or_else(|| Status::unauthenticated("the peer showed no certificate"))?;
    match identity_of(leaf.as_ref()) {
        Some(Identity::Coordinator) => Ok(request),
        other => {
            tracing::warn!(
                ?other,
                "a call by somebody who is not the coordinator was refused"
            );
            Err(Status::permission_denied(
                "only a coordinator may command an agent",
            ))
        }
    }
}

/// The one identity in a certificate; `None` where there is none of ours, or more than one.
fn identity_of(der: &[u8]) -> Option<Identity> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let mut uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let uri = uris.next()?;
    uris.next().is_none().then(|| Identity::from_uri(uri))?
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn certificate(uris: &[&str]) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["x.internal".to_owned()]).unwrap();
        for uri in uris {
            params
                .subject_alt_names
                .push(SanType::URI((*uri).try_into().unwrap()));
        }
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn one_uri_names_the_peer_and_two_name_nobody() {
        let coordinator = Identity::Coordinator.uri();
        let agent = Identity::Agent("worker-1".into()).uri();
        assert_eq!(
            identity_of(&certificate(&[&coordinator])),
            Some(Identity::Coordinator)
        );
        assert_eq!(
            identity_of(&certificate(&[&agent])),
            Some(Identity::Agent("worker-1".into()))
        );
        assert_eq!(identity_of(&certificate(&[&coordinator, &agent])), None);
        assert_eq!(identity_of(&certificate(&[])), None);
        assert_eq!(identity_of(b"junk"), None);
    }

    #[test]
    fn a_call_without_a_certificate_is_refused() {
        let status = require_coordinator(Request::new(())).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
    }
}
