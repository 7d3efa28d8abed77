//! Who may command: the holder of a coordinator's certificate, whatever address it dials from.

use quartermaster_proto::identity::Identity;
use quartermaster_proto::tls::identity_of;
use tonic::{Request, Status};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_without_a_certificate_is_refused() {
        let status = require_coordinator(Request::new(())).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
    }
}
