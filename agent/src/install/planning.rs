//! Stage 2: the plan for this node, from its files and from what an earlier installation recorded.

use quartermaster_proto::v1::Stage;
use similar::TextDiff;

use super::Target;
use super::command::at;
use super::detect::{DetectError, Detected, detect};
use super::record::Installed;
use crate::config::{EditRecord, Plan, Refusal, Undo, Written, plan, plan_written, undo};
use crate::failure::Failure;
use crate::host::HostDir;

/// The record of the installation that stands in the file, if its files are there.
pub(crate) fn record(state: &HostDir) -> Option<EditRecord> {
    Installed::read(state).ok()??.edit(state)
}

/// Plans; where an outdated entry of ours stands in the file, it is taken out by its record, which is exact.
pub(crate) fn plan_with(detected: &Detected, record: Option<&EditRecord>) -> Result<Plan, Refusal> {
    let handler = detected.layout.handler();
    let planned = plan_written(&detected.config, &detected.written, &handler)?;
    let (Plan::Edit(edit), Some(record)) = (&planned, record) else {
        return Ok(planned);
    };
    if edit.base == edit.before {
        return Ok(planned);
    }
    if detected.written != Written::InPlace {
        return Ok(planned);
    }
    let before = edit.before.as_deref().unwrap_or_default();
    let Ok(Undo::Rewrite(base)) = undo(before, Some(record), &handler) else {
        return Ok(planned);
    };
    let mut facts = detected.config.clone();
    facts.file = Some(base);
    match plan(&facts, &handler)? {
        Plan::Edit(mut exact) => {
            exact.before.clone_from(&edit.before);
            Ok(Plan::Edit(exact))
        }
        Plan::NothingToDo | Plan::Adopt(_) => Ok(planned),
    }
}

pub(crate) fn summarise(planned: &Plan, detected: &Detected) -> String {
    match planned {
        Plan::NothingToDo => format!("{} has the handler already", detected.written_path()),
        Plan::Adopt(adoption) => format!(
            "{} has KWasm's handler ({}), which is kept if it works",
            detected.written_path(),
            adoption.binary
        ),
        Plan::Edit(edit) => {
            let added: usize = edit
                .pieces
                .iter()
                .map(|piece| piece.text.lines().filter(|line| !line.is_empty()).count())
                .sum();
            format!("{added} lines to add to {} ({})", edit.path, edit.family.id())
        }
    }
}

/// The unified diff of a configuration; empty when nothing changes.
pub(crate) fn diff(path: &str, before: Option<&[u8]>, after: Option<&[u8]>) -> String {
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    let name = |bytes: Option<&[u8]>| {
        if bytes.is_some() {
            path.to_owned()
        } else {
            "/dev/null".to_owned()
        }
    };
    let (left, right) = (text(before), text(after));
    if left == right {
        return String::new();
    }
    TextDiff::from_lines(&left, &right)
        .unified_diff()
        .header(&name(before), &name(after))
        .to_string()
}
/// What installing would do, without doing any of it.
///
/// # Errors
/// A [`Failure`] when the node is refused.
pub async fn preview(target: &Target) -> Result<(Detected, Result<Plan, Refusal>), Failure> {
    let target = &target.located().await.map_err(at(Stage::Detect))?;
    let root = &target.root;
    let detected: Result<Detected, DetectError> = detect(root, &target.overrides).await;
    let detected = detected.map_err(at(Stage::Detect))?;
    let record = root
        .dir(&target.layout().state_dir())
        .ok()
        .and_then(|state| record(&state));
    let planned = plan_with(&detected, record.as_ref());
    Ok((detected, planned))
}

/// The unified diff of what installing would change; empty when it would change nothing.
///
/// # Errors
/// A [`Failure`] when the node is refused.
pub async fn preview_diff(target: &Target) -> Result<String, Failure> {
    let (_, planned) = preview(target).await?;
    match planned.map_err(at(Stage::Plan))? {
        Plan::Edit(edit) => Ok(diff(&edit.path, edit.before.as_deref(), Some(&edit.after))),
        Plan::NothingToDo | Plan::Adopt(_) => Ok(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_names_the_file_and_shows_what_is_added() {
        let shown = diff("/etc/x.toml", Some(b"a\n"), Some(b"a\nb\n"));
        assert!(
            shown.contains("--- /etc/x.toml") && shown.contains("\n+b\n"),
            "{shown}"
        );
        assert!(diff("/etc/x.toml", None, Some(b"a\n")).contains("--- /dev/null"));
        assert_eq!(diff("/etc/x.toml", Some(b"a"), Some(b"a")), "");
    }
}
