//! A coverage-guided fuzzer of the edit and its undoing: the laws of the property tests, held against bytes that
//! libFuzzer makes up from the shapes of the fixtures.
#![no_main]

// Its own sources and not the agent's crate, so that only what is fuzzed is instrumented and built.
#[path = "../../agent/src/config/mod.rs"]
#[allow(dead_code, unreachable_pub, unused_imports)]
mod config;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let daemon = config::laws::DAEMONS[usize::from(*choice) % config::laws::DAEMONS.len()];
    // Half of the time something foreign stands before, a quarter of the time behind too.
    let head = if choice & 4 == 0 { "" } else { "before" };
    let tail = if choice & 8 == 0 { "" } else { "behind" };
    config::laws::hold(rest, daemon, head, tail);
});
