//! What is to be pulled and how, within the protocol's bounds.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::{self, Credential};
use thiserror::Error;

use super::disk::Reserve;
use super::pins::Pin;

const MAX_IMAGES: usize = 1000;
const MAX_REFERENCE: usize = 512;
const MAX_PARALLELISM: u32 = 16;
const MAX_ATTEMPTS: u32 = 10;
const MAX_DEADLINE: Duration = Duration::from_secs(6 * 3600);
const MAX_CREDENTIALS: usize = 256;
const MAX_OWNER: usize = 256;
const MAX_PINS: usize = 64;

const DEADLINE: Duration = Duration::from_secs(600);
const ATTEMPTS: u32 = 3;
const PARALLELISM: u32 = 3;
const STALL: Duration = Duration::from_secs(60);

/// Secrets that belong together. Its `Debug` shows none.
pub type CredentialSet = Arc<Vec<Credential>>;

/// One image that is wanted.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// As in a pod specification.
    pub reference: String,
    /// For each attempt.
    pub deadline: Duration,
    /// At least one.
    pub attempts: u32,
    /// Resolve it again even when it is there.
    pub always: bool,
    /// Secrets that may be used for it.
    pub credentials: Vec<CredentialSet>,
    /// Who wants it pinned.
    pub pins: Vec<Pin>,
}

/// What is to be pulled and how.
#[derive(Debug, Clone)]
pub struct Order {
    /// In the order in which they are begun.
    pub images: Vec<Wanted>,
    /// Images at once.
    pub parallelism: usize,
    /// Ask the kubelet's credential providers too.
    pub use_providers: bool,
    /// What stays free of the disk.
    pub reserve: Reserve,
    /// How long a pull may go without a byte.
    pub stall_after: Duration,
}

/// Why an order is not carried out at all.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OrderError {
    /// Too many of something.
    #[error("{count} {what} in one command, at most {most} are allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// How many may be.
        most: usize,
    },
    /// Something longer than it can be.
    #[error("{what} of {length} bytes, 1 to {most} are allowed")]
    Length {
        /// What.
        what: &'static str,
        /// How long.
        length: usize,
        /// How long it may be.
        most: usize,
    },
    /// A duration that is none.
    #[error("a duration is negative or too long")]
    Duration,
    /// A place in a list that it does not have.
    #[error("{0} is asked for the credential set {1}, which was not sent")]
    NoSuchSet(String, u32),
}

fn at_most(what: &'static str, count: usize, most: usize) -> Result<(), OrderError> {
    if count > most {
        return Err(OrderError::TooMany { what, count, most });
    }
    Ok(())
}

fn or(value: u32, default: u32, most: u32) -> u32 {
    match value {
        0 => default,
        value => value.min(most),
    }
}

fn duration(given: Option<prost_types::Duration>, default: Duration) -> Result<Duration, OrderError> {
    let given = given
        .map(Duration::try_from)
        .transpose()
        .map_err(|_| OrderError::Duration)?;
    Ok(given
        .filter(|given| !given.is_zero())
        .unwrap_or(default)
        .min(MAX_DEADLINE))
}

impl Wanted {
    /// An image with the defaults: 10 minutes for each of 3 attempts, no pin, no secret.
    pub fn new(reference: impl Into<String>) -> Self {
        Self {
            reference: reference.into(),
            deadline: DEADLINE,
            attempts: ATTEMPTS,
            always: false,
            credentials: Vec::new(),
            pins: Vec::new(),
        }
    }
}

impl Order {
    /// An order of these images with the defaults: 3 at once, the kubelet's thresholds, 60 seconds without a byte.
    pub fn new(images: Vec<Wanted>) -> Self {
        Self {
            images,
            parallelism: PARALLELISM as usize,
            use_providers: false,
            reserve: Reserve::default(),
            stall_after: STALL,
        }
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`OrderError`] when it is larger than the protocol allows.
    pub fn of(request: v1::PullRequest) -> Result<Self, OrderError> {
        at_most("images", request.images.len(), MAX_IMAGES)?;
        let sets: Vec<CredentialSet> = request
            .credential_sets
            .into_iter()
            .map(|set| {
                at_most("credentials", set.credentials.len(), MAX_CREDENTIALS)?;
                Ok(Arc::new(set.credentials))
            })
            .collect::<Result<_, OrderError>>()?;
        let images = request
            .images
            .into_iter()
            .map(|image| wanted(image, &sets))
            .collect::<Result<_, OrderError>>()?;
        let disk = request.disk.unwrap_or_default();
        Ok(Self {
            images,
            parallelism: or(request.parallelism, PARALLELISM, MAX_PARALLELISM) as usize,
            use_providers: request.use_node_credential_providers,
            reserve: Reserve {
                percent: (disk.percent > 0).then_some(disk.percent),
                bytes: disk.bytes,
            },
            stall_after: duration(request.stall_after, STALL)?,
        })
    }
}

fn wanted(image: v1::WantedImage, sets: &[CredentialSet]) -> Result<Wanted, OrderError> {
    let length = |what, length: usize, most| OrderError::Length { what, length, most };
    if image.reference.len() > MAX_REFERENCE {
        return Err(length("a reference", image.reference.len(), MAX_REFERENCE));
    }
    at_most("pins of one image", image.pins.len(), MAX_PINS)?;
    if let Some(pin) = image
        .pins
        .iter()
        .find(|pin| pin.owner.is_empty() || pin.owner.len() > MAX_OWNER)
    {
        return Err(length("a pin's owner", pin.owner.len(), MAX_OWNER));
    }
    let credentials = image
        .credential_sets
        .iter()
        .map(|at| {
            let set = usize::try_from(*at).ok().and_then(|at| sets.get(at));
            set.cloned()
                .ok_or_else(|| OrderError::NoSuchSet(image.reference.clone(), *at))
        })
        .collect::<Result<_, _>>()?;
    Ok(Wanted {
        deadline: duration(image.deadline, DEADLINE)?,
        attempts: or(image.attempts, ATTEMPTS, MAX_ATTEMPTS),
        always: image.always,
        credentials,
        pins: image.pins.into_iter().map(Pin::from).collect(),
        reference: image.reference,
    })
}

impl From<v1::Pin> for Pin {
    fn from(pin: v1::Pin) -> Self {
        Self {
            until: pin.until.map(|until| u64::try_from(until.seconds).unwrap_or(0)),
            owner: pin.owner,
        }
    }
}

impl From<Pin> for v1::Pin {
    fn from(pin: Pin) -> Self {
        Self {
            owner: pin.owner,
            until: pin.until.map(|seconds| prost_types::Timestamp {
                seconds: i64::try_from(seconds).unwrap_or(i64::MAX),
                nanos: 0,
            }),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(images: Vec<v1::WantedImage>) -> v1::PullRequest {
        v1::PullRequest {
            images,
            ..Default::default()
        }
    }

    fn image(reference: &str) -> v1::WantedImage {
        v1::WantedImage {
            reference: reference.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn what_is_not_said_has_its_default() {
        let order = Order::of(request(vec![image("a")])).unwrap();
        assert_eq!((order.parallelism, order.images[0].attempts), (3, 3));
        assert_eq!(order.images[0].deadline, Duration::from_secs(600));
        assert_eq!(order.stall_after, Duration::from_secs(60));
        assert_eq!(order.reserve, Reserve::default());
    }

    #[test]
    fn orders_are_bounded() {
        let most = v1::WantedImage {
            attempts: 500,
            deadline: Some(prost_types::Duration {
                seconds: 1_000_000,
                nanos: 0,
            }),
            ..image("a")
        };
        let order = Order::of(v1::PullRequest {
            parallelism: 500,
            ..request(vec![most])
        })
        .unwrap();
        assert_eq!((order.parallelism, order.images[0].attempts), (16, 10));
        assert_eq!(order.images[0].deadline, MAX_DEADLINE);
        let negative = v1::WantedImage {
            deadline: Some(prost_types::Duration {
                seconds: -1,
                nanos: 0,
            }),
            ..image("a")
        };
        let no_owner = v1::WantedImage {
            pins: vec![v1::Pin::default()],
            ..image("a")
        };
        let no_set = v1::WantedImage {
            credential_sets: vec![0],
            ..image("a")
        };
        for images in [
            vec![image("a"); 1001],
            vec![image(&"a".repeat(513))],
            vec![negative],
            vec![no_owner],
            vec![no_set],
        ] {
            assert!(Order::of(request(images)).is_err());
        }
    }

    #[test]
    fn a_set_of_credentials_is_for_the_images_that_name_it() {
        let mut secret = Credential::default();
        secret.r#match = "a.io".to_owned();
        let named = v1::WantedImage {
            credential_sets: vec![0],
            ..image("a.io/x")
        };
        let order = Order::of(v1::PullRequest {
            credential_sets: vec![v1::CredentialSet {
                credentials: vec![secret],
            }],
            ..request(vec![named, image("a.io/y")])
        })
        .unwrap();
        assert_eq!(order.images[0].credentials[0][0].r#match, "a.io");
        assert!(order.images[1].credentials.is_empty());
    }
}
