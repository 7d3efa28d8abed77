//! The custom resource `Prefetch` of `cache.techsquad.rocks/v1`: its shape, bounds and words, and nothing of what is
//! made of it.

mod spec;
mod status;

pub(super) use spec::{NodesSpec, Order, PullPolicy, PullSpec};
pub use spec::{Prefetch, PrefetchSpec, Retention, WorkloadKind};
pub use status::{
    ImageReason, ImageStatus, NodeCounts, PairCounts, PrefetchPhase, PrefetchStatus, StatusCondition,
};

/// The CustomResourceDefinition in YAML, as `manifests/chart/files/crd.yaml` holds it.
pub fn yaml() -> anyhow::Result<String> {
    use kube::CustomResourceExt;
    Ok(serde_yaml_ng::to_string(&Prefetch::crd())?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_crd_in_the_manifests_is_the_one_in_the_code() {
        let kept = include_str!("../../../../manifests/chart/files/crd.yaml");
        assert_eq!(
            kept,
            super::yaml().expect("a CRD"),
            "run `make generate` and commit manifests/chart/files/crd.yaml"
        );
    }
}
