//! Mutual TLS as both ends speak it: who a certificate says its holder is, and connections that are taken with
//! whatever certificate is current when they come.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::identity::Identity;

/// For a handshake: who connects and says nothing is not waited for.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once; more wait in the listener's queue.
const HANDSHAKES: usize = 64;
/// After a failure to accept, which is for want of descriptors: without a pause this would take the processor too.
const PAUSE: Duration = Duration::from_millis(100);

/// From when until when a certificate is good, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Not before.
    pub from: i64,
    /// Not after.
    pub until: i64,
}

impl Validity {
    /// Of a certificate; `None` for what is none.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let validity = parsed.validity();
        Some(Self {
            from: validity.not_before.timestamp(),
            until: validity.not_after.timestamp(),
        })
    }
}

/// Who a certificate says its holder is; only a certificate with exactly one URI says it.
pub fn identity_of(certificate: &[u8]) -> Option<Identity> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    let mut uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let uri = uris.next()?;
    uris.next().is_none().then(|| Identity::from_uri(uri))?
}

/// Connections whose handshake succeeded, each with the configuration that `current` gives when it comes.
pub fn incoming(
    listener: TcpListener,
    current: impl Fn() -> Arc<ServerConfig> + Send + 'static,
) -> ReceiverStream<io::Result<TlsStream<TcpStream>>> {
    let (sender, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(HANDSHAKES));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let stream = tokio::select! {
                () = sender.closed() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(_) => {
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                },
            };
            // Streams of events are small messages: none should wait for the next.
            let _ = stream.set_nodelay(true);
            let (acceptor, sender) = (TlsAcceptor::from(current()), sender.clone());
            tokio::spawn(async move {
                let handshake = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
                drop(place);
                // Who failed to prove itself is told so by TLS; there is nobody else to tell.
                if let Ok(Ok(stream)) = handshake {
                    let _ = sender.send(Ok(stream)).await;
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn certificate(uris: &[&str]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["x.internal".to_owned()]).expect("params");
        for uri in uris {
            params
                .subject_alt_names
                .push(SanType::URI((*uri).try_into().expect("a URI")));
        }
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("a certificate").der().clone()
    }

    #[test]
    fn one_uri_names_the_holder_and_two_name_nobody() {
        let coordinator = Identity::Coordinator.uri();
        let agent = Identity::Agent("worker-1".into()).uri();
        let of = |uris: &[&str]| identity_of(&certificate(uris));
        assert_eq!(of(&[&coordinator]), Some(Identity::Coordinator));
        assert_eq!(of(&[&agent]), Some(Identity::Agent("worker-1".into())));
        assert_eq!(of(&[&coordinator, &agent]), None);
        assert_eq!(of(&[]), None);
        assert_eq!(identity_of(b"junk"), None);
        assert_eq!(Validity::of(&CertificateDer::from(b"junk".as_slice())), None);
    }
}
