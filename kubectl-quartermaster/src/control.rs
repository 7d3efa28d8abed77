//! `pause` and `resume`.

use quartermaster_proto::v1;

use crate::leader::Leader;
use crate::look::Look;
use crate::output;
use crate::trouble::Trouble;

/// `pause`
///
/// # Errors
/// When the leader can't be told.
pub(crate) async fn pause(leader: &Leader) -> Result<(), Trouble> {
    leader
        .ask(|mut leader| async move { leader.pause(v1::PauseRequest {}).await })
        .await?;
    let text = "Paused. What is under way goes on to its end; nothing else is begun until `kubectl quartermaster resume`.";
    output::say(&Look::of_stdout().wrapped(text, 0));
    Ok(())
}

/// `resume`
///
/// # Errors
/// When the leader can't be told.
pub(crate) async fn resume(leader: &Leader) -> Result<(), Trouble> {
    let before = leader
        .ask(|mut leader| async move { leader.status(v1::StatusRequest {}).await })
        .await?
        .control
        .unwrap_or_default();
    leader
        .ask(|mut leader| async move { leader.resume(v1::ResumeRequest {}).await })
        .await?;
    output::say(&resumed(&before));
    Ok(())
}

/// What a resume has ended.
fn resumed(before: &v1::Control) -> String {
    let mut text = String::new();
    if before.paused {
        text += "Resumed.\n";
    }
    if !before.halted.is_empty() {
        text += &format!("Resumed after a halt: {}.\n", before.halted);
    }
    if text.is_empty() {
        text += "Nothing was paused or halted.\n";
    }
    if before.removing {
        text += "Everything is still being removed: a resume does not end that.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resume_says_what_it_has_ended() {
        let mut control = v1::Control::default();
        assert_eq!(resumed(&control), "Nothing was paused or halted.\n");
        control.halted = "3 restarts in a row failed".into();
        assert_eq!(
            resumed(&control),
            "Resumed after a halt: 3 restarts in a row failed.\n"
        );
        control.paused = true;
        control.removing = true;
        assert!(resumed(&control).starts_with("Resumed.\n"));
        assert!(resumed(&control).ends_with("a resume does not end that.\n"));
    }
}
