//! From what containerd says of a failed pull to the reason that a status shows.

use quartermaster_proto::v1::FailureReason;
use tonic::Code;

/// The reason in a failed call. containerd reports almost everything as one code, so its words decide.
pub fn reason_of(code: Code, message: &str) -> FailureReason {
    let message = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if says(&["invalid reference format", "failed to parse image reference"]) {
        FailureReason::InvalidReference
    } else if says(&["no space left", "disk quota exceeded"]) {
        FailureReason::NoSpace
    } else if says(&["429 too many", "too many requests", "toomanyrequests"]) {
        FailureReason::RateLimited
    } else if says(&["503 service unavailable"]) {
        FailureReason::RegistryOverloaded
    } else if says(&[
        "unauthorized",
        "authorization failed",
        "authentication required",
        "access denied",
        "insufficient_scope",
        "forbidden",
        "no basic auth credentials",
    ]) {
        FailureReason::Unauthorized
    } else if says(&["no match for platform"]) {
        FailureReason::NotForThisNode
    } else if says(&["blob not found"]) {
        // Of the node's own store, which has lost what it has noted.
        FailureReason::PullFailed
    } else if says(&["not found", "manifest unknown", "name unknown"]) {
        FailureReason::ImageNotFound
    } else if says(&["context deadline exceeded"]) || code == Code::DeadlineExceeded {
        FailureReason::DeadlineExceeded
    } else if says(&[
        "connection refused",
        "connection reset",
        "no such host",
        "no route to host",
        "network is unreachable",
        "i/o timeout",
        "tls handshake",
        "tls: ",
        "x509: ",
        "server misbehaving",
        "name resolution",
        "http response to https client",
        "500 internal server error",
        "502 bad gateway",
        "504 gateway",
        "unexpected eof",
        ": eof",
        "dial tcp",
    ]) {
        FailureReason::RegistryUnreachable
    } else if code == Code::Unavailable || says(&["transport error", "tcp connect error"]) {
        FailureReason::ContainerdUnreachable
    } else {
        FailureReason::PullFailed
    }
}

/// Whether another attempt within the same command may end otherwise.
pub(crate) fn is_worth_another_attempt(reason: FailureReason) -> bool {
    !matches!(
        reason,
        FailureReason::InvalidReference
            | FailureReason::ImageNotFound
            | FailureReason::Unauthorized
            | FailureReason::NoSpace
            | FailureReason::DiskReserve
            | FailureReason::DoesNotFit
            | FailureReason::NotForThisNode
            | FailureReason::Cancelled
    )
}

/// Whether another credential, or none, may be answered otherwise. A registry may deny that an image exists to who
/// may not see it.
pub(crate) fn is_about_credentials(reason: FailureReason) -> bool {
    matches!(reason, FailureReason::Unauthorized | FailureReason::ImageNotFound)
}

/// What an operator can do.
pub(crate) fn remedy_of(reason: FailureReason) -> &'static str {
    match reason {
        FailureReason::InvalidReference => "Correct the reference where it is written.",
        FailureReason::ImageNotFound => "Check the name and the tag; the registry does not have this image.",
        FailureReason::Unauthorized => {
            "The registry wants credentials, or hides that it does not have the image."
        }
        FailureReason::RegistryUnreachable => {
            "Check from the node that the registry can be reached, and containerd's hosts.toml for it."
        }
        FailureReason::RateLimited => "The registry limits pulls; use a mirror or wait.",
        FailureReason::DeadlineExceeded => "The pull was too slow; allow it more time.",
        FailureReason::NoSpace => "Free space where containerd keeps its images.",
        FailureReason::RegistryOverloaded => "The registry is there and can't serve now; it is tried again.",
        FailureReason::RegistryStalled => {
            "The registry, or what is between, took the request and sends nothing; look at it from this node."
        }
        FailureReason::DiskReserve | FailureReason::DoesNotFit => {
            "Free space where containerd keeps its images, or want fewer images on this node."
        }
        FailureReason::NotForThisNode => {
            "The image has no variant for the node's operating system and processor."
        }
        FailureReason::ContainerdUnreachable => "`systemctl status containerd` on the node says more.",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerds_words_become_reasons() {
        for (message, wanted) in [
            (
                "failed to parse image reference \"UPPER/x:1\": invalid reference format: repository name must be lowercase",
                FailureReason::InvalidReference,
            ),
            (
                "failed to pull and unpack image \"docker.io/library/x:1\": failed to resolve reference \"docker.io/library/x:1\": docker.io/library/x:1: not found",
                FailureReason::ImageNotFound,
            ),
            (
                "failed to resolve reference \"docker.io/library/x:latest\": pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed",
                FailureReason::Unauthorized,
            ),
            (
                "failed to authorize: failed to fetch anonymous token: unexpected status from GET request to https://r/token: 403 Forbidden",
                FailureReason::Unauthorized,
            ),
            (
                "failed to do request: Head \"http://10.0.0.1:5000/v2/x/manifests/1\": dial tcp 10.0.0.1:5000: connect: connection refused",
                FailureReason::RegistryUnreachable,
            ),
            (
                "failed to do request: Head \"https://nowhere/v2/x\": dial tcp: lookup nowhere: no such host",
                FailureReason::RegistryUnreachable,
            ),
            (
                "unexpected status code https://r/v2/x/manifests/1: 429 Too Many Requests",
                FailureReason::RateLimited,
            ),
            (
                "failed to extract layer: write /var/lib/containerd/x: no space left on device",
                FailureReason::NoSpace,
            ),
            (
                "no match for platform in manifest: not found",
                FailureReason::NotForThisNode,
            ),
            (
                "blob sha256:1b expected at /var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/1b: blob not found: not found",
                FailureReason::PullFailed,
            ),
            (
                "unexpected status code https://r/v2/x/manifests/1: 503 Service Unavailable",
                FailureReason::RegistryOverloaded,
            ),
            ("something new", FailureReason::PullFailed),
        ] {
            assert_eq!(reason_of(Code::Unknown, message), wanted, "{message}");
        }
        assert_eq!(
            reason_of(Code::Unavailable, "transport error"),
            FailureReason::ContainerdUnreachable
        );
    }

    #[test]
    fn what_will_not_change_is_not_tried_again() {
        assert!(!is_worth_another_attempt(FailureReason::ImageNotFound));
        assert!(is_worth_another_attempt(FailureReason::RateLimited));
    }
}
