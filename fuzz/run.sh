#!/usr/bin/env bash
# Fuzzes the edit for $1 seconds; with `build` it is only built. What it finds lies in target/fuzz/findings, and the command that shows it again is
# printed. New paths are kept in target/fuzz/corpus, so a next run goes on from there.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?how many seconds, or build}
target=${CARGO_TARGET_DIR:-target}/fuzz
host=$(rustc -vV | awk '/^host:/ {print $2}')
mkdir -p "$target/corpus" "$target/findings" "$target/shapes"
# libFuzzer's instrumentation is a pass of LLVM that stable Rust has too; only its sanitizers need nightly. With a target
# named, what runs at build time is left without it.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
cargo build --manifest-path fuzz/Cargo.toml --locked --release --quiet --target "$host" --target-dir "$target"
[ "$seconds" = build ] && exit
# Each fixture once for each daemon: the first byte chooses it.
for shape in agent/tests/fixtures/configurations/*.toml; do
  for daemon in 0 1 2 3 e f; do
    { printf '%b' "\\x0$daemon"; cat "$shape"; } >"$target/shapes/$daemon-$(basename "$shape" .toml)"
  done
done
log=$target/fuzz.log
if ! "$target/$host/release/quartermaster-fuzz" "$target/corpus" fuzz/seeds "$target/shapes" \
  -dict=fuzz/toml.dict -max_total_time="$seconds" -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
  -artifact_prefix="$target/findings/" -print_final_stats=1 >"$log" 2>&1; then
  tail -n 40 "$log"
  echo "a finding: $target/$host/release/quartermaster-fuzz $target/findings/…, see $log"
  exit 1
fi
awk '/stat::number_of_executed_units/ {n=$2} /stat::new_units_added/ {p=$2} END {print "fuzzer: " n " executions, " p " new paths, no finding"}' "$log"
