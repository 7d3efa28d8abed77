//! Spreading what is repeated, so that a fleet that began in one go is not looked at again in one go.

use jiff::SignedDuration;
use sha2::{Digest, Sha256};

/// 90 to 110 percent of a duration, ever the same for the same node, so that a fleet that was provisioned
/// in one go is not checked again in one go.
pub fn jittered(duration: SignedDuration, node: &str) -> SignedDuration {
    let byte = i64::from(Sha256::digest(node)[0]);
    SignedDuration::from_millis(
        i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 256) / 1000 * (900 + byte * 200 / 255),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_spread_over_a_fifth_of_the_time_and_each_keeps_its_place() {
        let hour = SignedDuration::from_hours(1);
        let all: Vec<i64> = (0..200)
            .map(|n| jittered(hour, &format!("node-{n}")).as_secs())
            .collect();
        assert!(all.iter().all(|seconds| (3240..=3960).contains(seconds)));
        let (least, most) = (all.iter().min(), all.iter().max());
        assert!(most.zip(least).is_some_and(|(most, least)| most - least > 600));
        assert_eq!(jittered(hour, "node-7"), jittered(hour, "node-7"));
    }
}
