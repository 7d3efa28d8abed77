#!/bin/sh
# Removes Quartermaster from the cluster of the kubeconfig, but not while a node carries something of it: without the
# coordinator nobody would take that out again. The CustomResourceDefinition stays, and with it every Prefetch.
set -eu
kubectl=${KUBECTL:-kubectl}

left=$($kubectl get nodes --output=jsonpath='{range .items[*]}{.metadata.name}{"\t"}{.metadata.annotations.kwasm\.sh/spec-hash}{.metadata.annotations.kwasm\.sh/restart}{.metadata.labels.kwasm\.sh/crun}{"\n"}{end}' | awk -F '\t' '$2 != "" {print $1}')
if [ -n "$left" ]; then
    echo "These nodes are provisioned, and removing Quartermaster now would leave them so:" >&2
    echo "$left" | sed 's/^/  /' >&2
    echo "Have them put back first, and try again when their label kwasm.sh/kwasm-provisioned is gone:" >&2
    echo "  kubectl annotate node $(echo "$left" | tr '\n' ' ')kwasm.sh/kwasm-node=false --overwrite" >&2
    exit 1
fi

$kubectl delete --ignore-not-found runtimeclass crun wasmedge
$kubectl delete --ignore-not-found clusterrolebinding,clusterrole quartermaster-coordinator
$kubectl delete --ignore-not-found namespace quartermaster
$kubectl get nodes --output=name --selector=kwasm.sh/agent | while read -r node; do
    $kubectl label "$node" kwasm.sh/agent-
done
$kubectl annotate node --all cache.techsquad.rocks/images-verified- >/dev/null
echo "Quartermaster is removed. Prefetch objects and their definition stay; 'make uninstall' removes them."
