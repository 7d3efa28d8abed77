//! Effect: keeps the authorities in their Secret, publishes whom to trust in a ConfigMap, and renews what this
//! coordinator itself shows.
//!
//! Every replica does it. A write that another's came before is a conflict, and then the Secret is read again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::authority::{Authority, AuthorityError, Credentials};
use super::current::Current;
use super::rotation::{Authorities, Lives, Step, renewal, step};
use crate::report::Metrics;

/// Name of both the Secret and the ConfigMap.
const OBJECT: &str = "quartermaster-ca";
/// A person asks for a rotation with this annotation on the Secret, whatever its value.
const ROTATE: &str = "kwasm.sh/rotate";
const BUNDLE: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
const PREVIOUS_CERTIFICATE: &str = "previous.crt";
/// After a failure, and at the longest between two looks: clocks can be set.
const AGAIN: Duration = Duration::from_secs(15);
const LONGEST: Duration = Duration::from_secs(3600);
/// Writes of others that may come before ours in one go.
const CONFLICTS: usize = 8;

/// The authorities of one namespace.
pub struct Vault {
    secrets: Api<Secret>,
    maps: Api<ConfigMap>,
    lives: Lives,
    /// DNS names under which this coordinator is reached.
    names: Vec<String>,
    metrics: Arc<Metrics>,
    current: watch::Sender<Arc<Current>>,
}

impl Vault {
    /// Reads the authorities, makes one if there is none yet, and does what is due.
    ///
    /// # Errors
    /// When the API server can't be asked, or the Secret holds something else.
    pub async fn open(
        client: &kube::Client,
        namespace: &str,
        lives: Lives,
        names: Vec<String>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, AuthorityError> {
        let secrets = Api::namespaced(client.clone(), namespace);
        let maps = Api::namespaced(client.clone(), namespace);
        let (secret, _) = settle(&secrets, &lives).await?;
        let current = adopt(&secret, &names, &lives)?;
        let vault = Self {
            secrets,
            maps,
            lives,
            names,
            metrics,
            current: watch::Sender::new(Arc::new(current)),
        };
        vault.publish().await?;
        vault.report();
        Ok(vault)
    }

    /// What is shown and trusted, as it changes.
    pub fn current(&self) -> watch::Receiver<Arc<Current>> {
        self.current.subscribe()
    }

    /// Until `stop`: follows the Secret, and does what is due when it is.
    pub async fn keep(self, stop: CancellationToken) {
        let only = watcher::Config::default().fields(&format!("metadata.name={OBJECT}"));
        let mut events = std::pin::pin!(watcher(self.secrets.clone(), only).default_backoff());
        loop {
            let wait = match self.tend().await {
                Ok(until) => {
                    let wait = until.duration_since(Timestamp::now());
                    Duration::try_from(wait).unwrap_or(Duration::ZERO).min(LONGEST)
                }
                Err(error) => {
                    error!(%error, "the certificate authority can't be kept; what was is used on");
                    AGAIN
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                Some(_) = events.next() => {
                    // The events of one change come together.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                () = tokio::time::sleep(wait.max(Duration::from_millis(500))) => {}
            }
        }
    }

    /// Does what is due; returns until when there is nothing to do.
    async fn tend(&self) -> Result<Timestamp, AuthorityError> {
        let (secret, rest) = settle(&self.secrets, &self.lives).await?;
        let fresh = adopt(&secret, &self.names, &self.lives)?;
        let now = Timestamp::now();
        let replaced = self.current.send_if_modified(|current| {
            let due = now >= renewal(current.made, &self.lives);
            let same = current.bundle_pem == fresh.bundle_pem;
            if same && !due {
                return false;
            }
            *current = Arc::new(fresh);
            true
        });
        self.publish().await?;
        if replaced {
            info!("the coordinator has a new certificate");
            self.report();
        }
        let renew = renewal(self.current.borrow().made, &self.lives);
        Ok(rest.min(renew))
    }

    async fn publish(&self) -> Result<(), AuthorityError> {
        let api = |error| AuthorityError::Api("ConfigMap", Box::new(error));
        let bundle = self.current.borrow().bundle_pem.clone();
        let data = [(BUNDLE.to_owned(), bundle)].into();
        if let Some(found) = self.maps.get_opt(OBJECT).await.map_err(api)?
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
        self.maps
            .patch(OBJECT, &apply, &Patch::Apply(&map))
            .await
            .map_err(api)?;
        Ok(())
    }

    fn report(&self) {
        let current = self.current.borrow();
        let (_, ends) = current.authority.made_and_ends();
        self.metrics.expiry("authority", ends.as_second());
        let own = current.made + self.lives.certificate;
        self.metrics.expiry("coordinator", own.as_second());
    }
}

/// Takes steps until there is none to take; returns the Secret, and until when it can rest.
async fn settle(secrets: &Api<Secret>, lives: &Lives) -> Result<(Secret, Timestamp), AuthorityError> {
    let api = |error| AuthorityError::Api("Secret", Box::new(error));
    for _ in 0..CONFLICTS {
        let Some(secret) = secrets.get_opt(OBJECT).await.map_err(api)? else {
            let fresh = Secret {
                metadata: ObjectMeta {
                    name: Some(OBJECT.to_owned()),
                    ..ObjectMeta::default()
                },
                type_: Some("kubernetes.io/tls".to_owned()),
                data: Some(pair(CERTIFICATE, KEY, &Authority::make(lives.authority)?)),
                ..Secret::default()
            };
            match secrets.create(&PostParams::default(), &fresh).await {
                Ok(_) => info!("a certificate authority was made"),
                // Another replica was quicker: what it made is what counts.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(api(error)),
            }
            continue;
        };
        let taken = step(&authorities(&secret)?, lives, Timestamp::now());
        if let Step::Rest(until) = taken {
            return Ok((secret, until));
        }
        let changed = carry_out(secret, &taken, lives)?;
        match secrets.replace(OBJECT, &PostParams::default(), &changed).await {
            Ok(_) => info!(step = ?taken, "the certificate authority is rotated"),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(api(error)),
        }
    }
    Err(AuthorityError::Broken("it changes all the time".to_owned()))
}

/// What the Secret is to hold after a step.
fn carry_out(mut secret: Secret, step: &Step, lives: &Lives) -> Result<Secret, AuthorityError> {
    let data = secret.data.get_or_insert_default();
    match step {
        Step::Prepare => {
            data.extend(pair(
                NEXT_CERTIFICATE,
                NEXT_KEY,
                &Authority::make(lives.authority)?,
            ));
            data.remove(PREVIOUS_CERTIFICATE);
            if let Some(annotations) = &mut secret.metadata.annotations {
                annotations.remove(ROTATE);
            }
        }
        Step::Switch => {
            if let (Some(certificate), Some(key)) = (data.remove(NEXT_CERTIFICATE), data.remove(NEXT_KEY)) {
                if let Some(previous) = data.insert(CERTIFICATE.to_owned(), certificate) {
                    data.insert(PREVIOUS_CERTIFICATE.to_owned(), previous);
                }
                data.insert(KEY.to_owned(), key);
            }
        }
        Step::Forget => {
            data.remove(PREVIOUS_CERTIFICATE);
        }
        Step::Rest(_) => {}
    }
    secret.metadata.managed_fields = None;
    Ok(secret)
}

fn authorities(secret: &Secret) -> Result<Authorities, AuthorityError> {
    let current = read(secret, CERTIFICATE, KEY)?;
    let next = has(secret, NEXT_CERTIFICATE)
        .then(|| read(secret, NEXT_CERTIFICATE, NEXT_KEY))
        .transpose()?;
    let annotations = secret.metadata.annotations.as_ref();
    Ok(Authorities {
        current: current.made_and_ends(),
        next: next.map(|next| next.made_and_ends().0),
        previous: has(secret, PREVIOUS_CERTIFICATE),
        asked: annotations.is_some_and(|annotations| annotations.contains_key(ROTATE)),
    })
}

fn adopt(secret: &Secret, names: &[String], lives: &Lives) -> Result<Current, AuthorityError> {
    let authority = read(secret, CERTIFICATE, KEY)?;
    let others: Vec<String> = [NEXT_CERTIFICATE, PREVIOUS_CERTIFICATE]
        .into_iter()
        .filter(|key| has(secret, key))
        .map(|key| text(secret, key))
        .collect::<Result<_, _>>()?;
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    Current::new(authority, &others, names, lives.certificate)
}

fn read(secret: &Secret, certificate: &str, key: &str) -> Result<Authority, AuthorityError> {
    Authority::from_pem(&Credentials {
        certificate_pem: text(secret, certificate)?,
        key_pem: text(secret, key)?,
    })
}

fn has(secret: &Secret, key: &str) -> bool {
    secret.data.as_ref().is_some_and(|data| data.contains_key(key))
}

fn text(secret: &Secret, key: &str) -> Result<String, AuthorityError> {
    let bytes = secret.data.as_ref().and_then(|data| data.get(key));
    bytes
        .and_then(|bytes| String::from_utf8(bytes.0.clone()).ok())
        .ok_or_else(|| AuthorityError::Broken(format!("it has no {key}")))
}

fn pair(certificate: &str, key: &str, credentials: &Credentials) -> BTreeMap<String, ByteString> {
    let bytes = |pem: &str| ByteString(pem.as_bytes().to_vec());
    [
        (certificate.to_owned(), bytes(&credentials.certificate_pem)),
        (key.to_owned(), bytes(&credentials.key_pem)),
    ]
    .into()
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    const LIVES: Lives = Lives {
        authority: SignedDuration::from_hours(300),
        certificate: SignedDuration::from_hours(12),
    };

    fn secret() -> Secret {
        let made = Authority::make(LIVES.authority).expect("an authority");
        let mut secret = Secret {
            data: Some(pair(CERTIFICATE, KEY, &made)),
            ..Secret::default()
        };
        secret.metadata.annotations = Some([(ROTATE.to_owned(), "please".to_owned())].into());
        secret
    }

    fn trusted(secret: &Secret) -> usize {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let current = adopt(secret, &[], &LIVES).expect("a certificate");
        current.bundle_pem.matches("BEGIN CERTIFICATE").count()
    }

    #[test]
    fn a_rotation_trusts_the_next_before_it_signs_and_the_previous_after() {
        let first = secret();
        let old = text(&first, CERTIFICATE).expect("a certificate");
        assert!(authorities(&first).expect("authorities").asked);
        assert_eq!(trusted(&first), 1);

        let prepared = carry_out(first, &Step::Prepare, &LIVES).expect("a next one");
        assert!(!authorities(&prepared).expect("authorities").asked);
        assert_eq!(text(&prepared, CERTIFICATE).expect("a certificate"), old);
        let next = text(&prepared, NEXT_CERTIFICATE).expect("a next one");
        assert_eq!(trusted(&prepared), 2);

        let switched = carry_out(prepared, &Step::Switch, &LIVES).expect("a switch");
        assert_eq!(text(&switched, CERTIFICATE).expect("a certificate"), next);
        assert_eq!(text(&switched, PREVIOUS_CERTIFICATE).expect("the old one"), old);
        assert!(!has(&switched, NEXT_KEY));
        assert_eq!(trusted(&switched), 2);

        let forgotten = carry_out(switched, &Step::Forget, &LIVES).expect("an end");
        assert_eq!(trusted(&forgotten), 1);
        assert_eq!(text(&forgotten, CERTIFICATE).expect("a certificate"), next);
    }

    #[test]
    fn a_secret_without_a_key_says_what_to_do() {
        let Err(error) = authorities(&Secret::default()) else {
            panic!("an empty Secret makes no authority")
        };
        assert!(
            error.to_string().contains("delete it to have a new one made"),
            "{error}"
        );
    }
}
