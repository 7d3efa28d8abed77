//! Standard input and output joined to the operator's socket: a program outside of the cluster speaks to the leader
//! through `pods/exec` of this.

use std::path::Path;

use anyhow::Context as _;
use tokio::io::{copy, stdin, stdout};
use tokio::net::UnixStream;

/// Joins standard input and output to the socket until either side ends.
///
/// # Errors
/// When nobody answers on the socket, or a side breaks.
pub async fn relay(socket: &Path) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(socket).await.with_context(|| {
        format!(
            "nobody answers on {}; this works inside a coordinator's pod",
            socket.display()
        )
    })?;
    let (mut answers, mut questions) = stream.split();
    let (mut stdin, mut stdout) = (stdin(), stdout());
    let joined = tokio::select! {
        asked = copy(&mut stdin, &mut questions) => asked,
        answered = copy(&mut answers, &mut stdout) => answered,
    };
    joined.map(drop).context("the connection has broken")
}
