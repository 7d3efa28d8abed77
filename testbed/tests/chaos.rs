//! Faults at random, on a small fleet with two coordinators, for two minutes or for as long as `TESTBED_CHAOS` says (`1h`).
//! `TESTBED_SEED` draws the same faults again.

use std::process::ExitCode;

use anyhow::Context;
use libtest_mimic::{Arguments, Failed, Trial};
use testbed::Progress;
use testbed::fleet::{self, Chaos};

const NAME: &str = "chaos-test";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trial = Trial::test("whatever_fails_the_rules_hold_and_all_ends_right", || {
        run().map_err(|error| Failed::from(format!("{error:#}")))
    });
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn run() -> anyhow::Result<()> {
    let setting = |name: &str| std::env::var(name).ok();
    let duration = setting("TESTBED_CHAOS").unwrap_or_else(|| "2m".to_owned());
    let seed = setting("TESTBED_SEED").map(|text| text.parse().context("TESTBED_SEED"));
    let chaos = Chaos {
        name: NAME.to_owned(),
        nodes: 40,
        seed: seed.transpose()?.unwrap_or_else(fleet::seed_of_the_clock),
        duration: fleet::duration(&duration)
            .map_err(anyhow::Error::msg)
            .context("TESTBED_CHAOS")?,
        max_unavailable: 4,
    };
    for line in fleet::chaos(&chaos, &Progress::terminal())? {
        eprintln!("{line}");
    }
    Ok(())
}
