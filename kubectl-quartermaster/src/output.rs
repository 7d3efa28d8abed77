//! What is printed, and in which form.

use std::io::Write;

use serde::Serialize;

use crate::cli::Format;

/// Prints a text as it is.
pub(crate) fn say(text: &str) {
    // A reader that is gone (`| head`) is no failure of ours.
    let _ = write!(std::io::stdout(), "{text}");
}

/// The answer as JSON or YAML, where that is asked for.
///
/// # Errors
/// When it can't be written so.
pub(crate) fn structured(answer: &impl Serialize, format: Option<Format>) -> anyhow::Result<Option<String>> {
    Ok(match format {
        Some(Format::Json) => Some(serde_json::to_string_pretty(answer)? + "\n"),
        Some(Format::Yaml) => Some(serde_yaml_ng::to_string(answer)?),
        Some(Format::Wide) | None => None,
    })
}
