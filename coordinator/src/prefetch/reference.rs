//! Image references as the kubelet reads them.

use oci_spec::distribution::Reference;

/// The full form of a reference: `nginx` is `docker.io/library/nginx:latest`. A reference with a digest
/// loses its tag, which says nothing beside it. The error says what is wrong with the reference.
pub fn normalise(image: &str) -> Result<String, String> {
    let trimmed = image.trim();
    if trimmed.len() > 512 {
        return Err("the reference is longer than 512 bytes".to_owned());
    }
    let reference: Reference = trimmed.parse().map_err(|error| format!("{error}"))?;
    let name = format!("{}/{}", reference.registry(), reference.repository());
    Ok(match (reference.digest(), reference.tag()) {
        (Some(digest), _) => format!("{name}@{digest}"),
        (None, tag) => format!("{name}:{}", tag.unwrap_or("latest")),
    })
}

#[cfg(test)]
mod tests {
    use super::normalise;

    const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn references_become_what_the_kubelet_asks_for() {
        for (image, full) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("nginx:1.27", "docker.io/library/nginx:1.27"),
            ("team/app", "docker.io/team/app:latest"),
            ("host:5000/x", "host:5000/x:latest"),
            ("registry.example.com/a/b:c", "registry.example.com/a/b:c"),
        ] {
            assert_eq!(normalise(image).as_deref(), Ok(full), "{image}");
        }
        assert_eq!(
            normalise(&format!("nginx:1.27@{DIGEST}")),
            Ok(format!("docker.io/library/nginx@{DIGEST}"))
        );
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for image in ["", "upper/CASE", "a b", "x:", "-x/y", &"a".repeat(600)] {
            assert!(normalise(image).is_err(), "{image}");
        }
    }
}
