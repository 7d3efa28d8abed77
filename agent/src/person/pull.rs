//! The `pull` and `release` commands.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use quartermaster_proto::credentials::{self, Format};
use quartermaster_proto::v1::PullWay;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::bars::Bars;
use super::output::{ERROR, NOTHING_TO_DO, Paint, milliseconds, say};
use super::target;
use crate::cli::{Host, Pull};
use crate::describe::pulls;
use crate::pull::{
    CredentialSet, Failed, ImageEvent, Order, Pin, Pinned, Ready, Release, Reserve, Sink, Tally, Wanted,
    pull, release, remedy_of,
};

const MAX_CREDENTIALS: u64 = 1024 * 1024;

/// `pull`
pub(crate) async fn pull_images(host: &Host, arguments: Pull) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    let order = order(&arguments)?;
    let node = pulls(&target).await;
    let is_json = arguments.json;
    let bars = Bars::new(std::io::stdout().is_terminal() && !is_json);
    let sink: Sink = Arc::new(move |event| match event {
        ImageEvent::Progress(image, progress) => bars.show(&image, &progress),
        ImageEvent::Ready(image, ready) if is_json => say(&ready_json(&image, &ready)),
        ImageEvent::Failed(image, failed) if is_json => say(&failed_json(&image, &failed)),
        ImageEvent::Ready(image, ready) => bars.end(&image, &ready_line(&image, &ready, paint)),
        ImageEvent::Failed(image, failed) => bars.end(&image, &failed_line(&image, &failed, paint)),
    });
    let cancelled = CancellationToken::new();
    let interrupt = cancelled.clone();
    tokio::spawn(async move {
        // What runs is stopped in containerd too; a second one ends the program at once.
        if tokio::signal::ctrl_c().await.is_ok() {
            interrupt.cancel();
            let _ = tokio::signal::ctrl_c().await;
            std::process::exit(130);
        }
    });
    let begun = std::time::Instant::now();
    let tally = pull(&node, &order, &sink, &cancelled).await;
    if !is_json && order.images.len() > 1 {
        say(&paint.dim(&sum(&tally, begun.elapsed())));
    }
    Ok(ExitCode::from(if tally.failed == 0 { 0 } else { ERROR }))
}

fn order(arguments: &Pull) -> anyhow::Result<Order> {
    let credentials = arguments
        .credentials
        .iter()
        .map(|path| read_credentials(path))
        .collect::<anyhow::Result<Vec<CredentialSet>>>()?;
    let seconds = |value: u32| Duration::from_secs(u64::from(value.max(1)));
    let wanted = |image: &String| Wanted {
        deadline: seconds(arguments.deadline),
        attempts: arguments.attempts.max(1),
        always: arguments.always,
        credentials: credentials.clone(),
        pins: arguments
            .pin
            .iter()
            .map(|owner| Pin {
                owner: owner.clone(),
                until: None,
            })
            .collect(),
        ..Wanted::new(image)
    };
    Ok(Order {
        parallelism: arguments.parallelism.clamp(1, 16) as usize,
        use_providers: arguments.credential_providers,
        reserve: Reserve {
            percent: arguments.keep_free,
            bytes: 0,
        },
        stall_after: seconds(arguments.stall_after),
        ..Order::new(arguments.images.iter().map(wanted).collect())
    })
}

fn read_credentials(path: &std::path::Path) -> anyhow::Result<CredentialSet> {
    use std::io::Read;
    let mut bytes = zeroize::Zeroizing::new(Vec::new());
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_CREDENTIALS).read_to_end(&mut bytes))
        .with_context(|| format!("{} can't be read", path.display()))?;
    let secret = credentials::parse(Format::ConfigJson, &bytes)
        .or_else(|error| credentials::parse(Format::Legacy, &bytes).map_err(|_| error))
        .with_context(|| format!("{} can't be used", path.display()))?;
    Ok(Arc::new(secret.credentials))
}

fn ready_line(image: &str, ready: &Ready, paint: Paint) -> String {
    let what = match (ready.way, ready.was_present) {
        (PullWay::Unspecified, _) => "was here".to_owned(),
        (_, true) => format!("has not moved, {}", milliseconds(ready.took)),
        _ => format!(
            "{:.1} MB in {}{}",
            ready.size as f64 / 1e6,
            milliseconds(ready.took),
            if ready.fetched == 0 {
                ", nothing fetched"
            } else {
                ""
            }
        ),
    };
    let pin = match &ready.pinned {
        Pinned::NotAsked => String::new(),
        Pinned::Pinned => ", pinned".to_owned(),
        Pinned::Unsupported => ", not pinned: this containerd can't".to_owned(),
        Pinned::Failed(why) => format!(", not pinned: {why}"),
    };
    format!("{} {image} {}", paint.good("✓"), paint.dim(&(what + &pin)))
}

fn failed_line(image: &str, failed: &Failed, paint: Paint) -> String {
    let line = format!(
        "{} {image} {} after {} attempt(s): {}",
        paint.bad("✗"),
        failed.reason.camel_case(),
        failed.attempts,
        failed.message
    );
    match remedy_of(failed.reason) {
        "" => line,
        remedy => format!("{line}\n  {remedy}"),
    }
}

fn ready_json(image: &str, ready: &Ready) -> String {
    json!({
        "image": image,
        "ready": true,
        "digest": ready.digest,
        "wasPresent": ready.was_present,
        "size": ready.size,
        "fetched": ready.fetched,
        "milliseconds": u64::try_from(ready.took.as_millis()).unwrap_or(u64::MAX),
        "way": ready.way.as_str_name(),
        "attempts": ready.attempts,
        "pinned": match &ready.pinned {
            Pinned::NotAsked => "no",
            Pinned::Pinned => "yes",
            Pinned::Unsupported => "unsupported",
            Pinned::Failed(_) => "failed",
        },
    })
    .to_string()
}

fn failed_json(image: &str, failed: &Failed) -> String {
    json!({
        "image": image,
        "ready": false,
        "reason": failed.reason.camel_case(),
        "message": failed.message,
        "remedy": remedy_of(failed.reason),
        "attempts": failed.attempts,
    })
    .to_string()
}

fn sum(tally: &Tally, took: Duration) -> String {
    let failed = match tally.failed {
        0 => String::new(),
        failed => format!(", {failed} failed"),
    };
    format!(
        "{} images{failed}, {:.1} MB fetched in {:.1} s",
        tally.ready,
        tally.fetched as f64 / 1e6,
        took.as_secs_f64()
    )
}

/// `release`
pub(crate) async fn release_images(host: &Host, order: &Release) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let node = pulls(&target).await;
    let released = release(&node.daemon, order)
        .await
        .map_err(|status| anyhow::anyhow!("containerd: {}", status.message()))?;
    say(&format!(
        "{} let go, {} removed, {} still held",
        released.released,
        released.removed,
        released.held.len()
    ));
    for (image, pins) in &released.held {
        let owners: Vec<&str> = pins.iter().map(|pin| pin.owner.as_str()).collect();
        say(&format!("  {image} by {}", owners.join(", ")));
    }
    Ok(ExitCode::from(if released.released == 0 {
        NOTHING_TO_DO
    } else {
        0
    }))
}
