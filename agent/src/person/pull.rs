//! The `pull` command.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use super::output::{ERROR, Paint, milliseconds, say};
use super::target;
use crate::cli::Host;
use crate::describe::locate;
use crate::pull::{ImageEvent, Order, Sink, pull};

/// `pull`
pub(crate) async fn pull_images(
    host: &Host,
    images: Vec<String>,
    parallelism: u32,
    attempts: u32,
    deadline: Duration,
) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    let order = Order::new(images, parallelism, Some(deadline), attempts)?;
    let daemon = locate(&target.root).await;
    let sink: Sink = Arc::new(move |event| match event {
        ImageEvent::Started(image) => say(&format!("  {image}")),
        ImageEvent::Ready(image, ready) => say(&format!(
            "{} {image} {}",
            paint.good("✓"),
            paint.dim(&if ready.was_present {
                "was here".to_owned()
            } else {
                format!(
                    "{:.1} MB in {}",
                    ready.size as f64 / 1e6,
                    milliseconds(ready.took)
                )
            })
        )),
        ImageEvent::Failed {
            image,
            reason,
            message,
            remedy,
            attempts,
        } => {
            say(&format!(
                "{} {image} {} after {attempts} attempt(s): {message}",
                paint.bad("✗"),
                reason.camel_case()
            ));
            if !remedy.is_empty() {
                say(&format!("  {remedy}"));
            }
        }
    });
    let tally = pull(&daemon, &order, &sink).await;
    Ok(ExitCode::from(if tally.failed == 0 { 0 } else { ERROR }))
}
