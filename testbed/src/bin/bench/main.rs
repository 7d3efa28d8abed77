//! The numbers that are published: measured on the testbed, printed as a table, and written to
//! `target/bench.json` as an array of name, value and unit. What it is compared with runs beside it.

mod prefetch;
mod provision;
mod table;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::deployment::{self, Options, workspace};
use testbed::fleet::{self, Scenario, Temper};
use testbed::layout::Cache;
use testbed::{Cluster, Progress, Spec, images};

use prefetch::prefetch;
use provision::{agent_memory, provision};
use table::{Table, megabytes};

const PARTS: [&str; 4] = ["provision", "prefetch", "fleet", "size"];
const NAME: &str = "bench";
const NODES: &str = "worker-1=1.7,worker-2=2.1,worker-3=2.4";
const WORKERS: [&str; 3] = ["worker-1", "worker-2", "worker-3"];
const DEADLINE: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    for part in &parts {
        ensure!(
            PARTS.contains(&part.as_str()),
            "there is no part {part}; the parts are {}",
            PARTS.join(", ")
        );
    }
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);

    let mut table = Table::default();
    if wanted("provision") || wanted("prefetch") {
        on_three_nodes(&wanted, &mut table)?;
    }
    if wanted("size") {
        sizes(&mut table)?;
    }
    if wanted("fleet") {
        fleets(&mut table)?;
    }
    let machine = machine();
    println!("\n{machine}\n\n{}", table.text());
    let target = workspace().join("target");
    let json = serde_json::to_string_pretty(&table.rows)?;
    fs::write(target.join("bench.json"), json).context("target/bench.json")?;
    let page = format!("{machine}\n\n{}", table.markdown());
    fs::write(target.join("bench.md"), page).context("target/bench.md")?;
    println!("\nAlso in target/bench.json, and as a table in target/bench.md.");
    Ok(())
}

fn on_three_nodes(wanted: &impl Fn(&str) -> bool, table: &mut Table) -> Result<()> {
    let spec = Spec::parse(NAME, NODES)?;
    Cluster::down(NAME)?;
    let start = Instant::now();
    Cluster::up(&spec, &Progress::terminal())?;
    table.add(
        "testbed up with caches, three nodes",
        &[start.elapsed().as_secs_f64()],
        "s",
    );
    let (cluster, product) = deployment::set(&spec, true, &Progress::terminal())?;
    deployment::deploy(
        &cluster,
        &product,
        &Options {
            linger: Some("2s".to_owned()),
            ..Options::default()
        },
    )?;
    if wanted("provision") {
        provision(&cluster, &product, table)?;
    }
    if wanted("prefetch") {
        prefetch(&cluster, table)?;
    }
    Cluster::down(NAME)
}

/// How large the images are, and what makes them so.
fn sizes(table: &mut Table) -> Result<()> {
    let product = images::product(Cache::locate().root(), &workspace(), &Progress::terminal())?;
    for image in [&product.agent, &product.coordinator] {
        let name = image.name.split(':').next().unwrap_or_default();
        let compressed = fs::metadata(&image.archive)?.len();
        table.add(
            &format!("image {name}, compressed"),
            &[megabytes(compressed)],
            "MB",
        );
    }
    Ok(())
}

/// What everything was measured on.
fn machine() -> String {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (cpus, memory, kernel) = (
        read("/proc/cpuinfo"),
        read("/proc/meminfo"),
        read("/proc/sys/kernel/osrelease"),
    );
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("an unnamed processor", |(_, name)| name);
    let kib: u64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(0);
    let load = read("/proc/loadavg");
    format!(
        "{cores} cores ({model}), {} GiB of memory, Linux {}, load {} at the end",
        kib.div_ceil(1 << 20),
        kernel.trim(),
        load.split(' ').next().unwrap_or_default()
    )
}

/// Simulated fleets of growing size, or of the sizes in `FLEET_NODES`: also a table of their own and a picture.
fn fleets(table: &mut Table) -> Result<()> {
    let sizes = std::env::var("FLEET_NODES").unwrap_or_else(|_| "100,500,1000,2500,5000".to_owned());
    let mut measured = Vec::new();
    for size in sizes.split(',') {
        let options = fleet::Options {
            name: "bench-fleet".to_owned(),
            nodes: size.trim().parse().context("FLEET_NODES")?,
            images: 100,
            seed: 1,
            scenarios: Scenario::all(),
            temper: Temper {
                image: Duration::from_millis(150),
                ..Temper::default()
            },
        };
        let these = fleet::run(options, &Progress::terminal())?;
        for m in &these {
            let name = format!("{} nodes, {}", m.nodes, m.what);
            match m.goal {
                Some(goal) => table.goal(&name, &[m.value], m.unit, goal),
                None => table.add(&name, &[m.value], m.unit),
            }
        }
        measured.extend(these);
    }
    let text = fleet::table(&measured);
    println!("\n{text}");
    fs::write(workspace().join("target/fleet.md"), text).context("target/fleet.md")?;
    fs::write(workspace().join("target/fleet.svg"), fleet::growth(&measured)?).context("target/fleet.svg")?;
    println!("Also in target/fleet.md, and as a picture in target/fleet.svg.");
    Ok(())
}
