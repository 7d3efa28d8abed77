//! Asking a person before something is done that is not easily taken back.

use std::io::{IsTerminal as _, Write as _};

/// Whether the person agrees; `yes` was said on the command line.
///
/// # Errors
/// When there is nobody to ask.
pub(crate) fn asked(question: &str, yes: bool) -> anyhow::Result<bool> {
    if yes {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        anyhow::bail!("there is no terminal to ask on: say --yes if this is meant");
    }
    print!("{question} [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
