//! The decision what an attempt at running the module says about the handler.

use tonic::Status;

use super::verify::VerifyError;

/// The step that fails where the sandbox image is missing.
pub(super) const SANDBOX_IMAGE: &str = "sandbox image";
const PREFIX: &str = "quartermaster-verified ";

/// One attempt's end.
pub(super) enum Attempt {
    /// A reason that another attempt may not have.
    Again { step: &'static str, why: String },
    /// One that it would have too.
    Never(VerifyError),
}

pub(super) fn again(step: &'static str) -> impl FnOnce(Status) -> Attempt {
    move |status| Attempt::Again {
        step,
        why: status.message().to_owned(),
    }
}
pub(super) fn sandbox_failed(status: Status) -> Attempt {
    let why = status.message().to_owned();
    // The one image that a sandbox needs is the sandbox image; 2.x does not call it by that name.
    let pulling = ["sandbox image", "failed to pull", "failed to resolve image"];
    let step = if pulling.iter().any(|words| why.contains(words)) {
        SANDBOX_IMAGE
    } else {
        "RunPodSandbox"
    };
    Attempt::Again { step, why }
}

/// Whether a container's log shows that the module ran.
pub(super) fn judge(log: &str, word: &str, exit_code: i32) -> Result<(), Attempt> {
    let printed = printed(log);
    let turned: String = word.chars().rev().collect();
    if printed.trim() == format!("{PREFIX}{turned}") {
        return Ok(());
    }
    // The kubelet ends sandboxes that it does not know, within two seconds: that says nothing about the handler.
    if printed.is_empty() || [137, 143].contains(&exit_code) {
        return Err(Attempt::Again {
            step: "module",
            why: format!("it printed {printed:?} and exited with {exit_code}"),
        });
    }
    Err(Attempt::Never(VerifyError::Output(crate::failure::cut(
        &printed, 500,
    ))))
}

/// What a container printed, from CRI's log: each line is a time, a stream, a tag and the text.
fn printed(log: &str) -> String {
    log.lines()
        .filter_map(|line| line.splitn(4, ' ').nth(3))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_turned_round_is_a_proof() {
        let line = |text: &str| format!("2026-11-30T10:00:00.1Z stdout F {text}\n");
        assert!(judge(&line("quartermaster-verified cba"), "abc", 0).is_ok());
        assert!(judge(&line("quartermaster-verified cba"), "abc", 143).is_ok());
        for text in ["quartermaster-verified abc", "abc", "exec format error"] {
            assert!(matches!(
                judge(&line(text), "abc", 0),
                Err(Attempt::Never(VerifyError::Output(_)))
            ));
        }
        assert!(matches!(judge("", "abc", 0), Err(Attempt::Again { .. })));
        assert!(matches!(
            judge(&line("x"), "abc", 143),
            Err(Attempt::Again { .. })
        ));
    }

    #[test]
    fn a_missing_sandbox_image_is_told_from_other_failures() {
        for (words, wanted) in [
            (
                "failed to get sandbox image \"pause:3.10\": failed to pull",
                SANDBOX_IMAGE,
            ),
            (
                "failed to pull image \"pause:3.10\": failed to resolve image",
                SANDBOX_IMAGE,
            ),
            ("failed to create shim task", "RunPodSandbox"),
        ] {
            let Attempt::Again { step, .. } = sandbox_failed(Status::unknown(words)) else {
                panic!("{words} is final");
            };
            assert_eq!(step, wanted, "{words}");
        }
    }
}
