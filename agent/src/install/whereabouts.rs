//! In which folder a node has what is installed, or gets it. It is known before anything else is: the lock and the
//! open journal lie there, and a node in the middle of a swap has no containerd to ask.

use std::path::Path;

use quartermaster_proto::v1::FailureReason;
use thiserror::Error;

use super::detect::judged;
use super::layout::{BadPrefix, INSTALLED, JOURNAL, Layout};
use super::record::Installed;
use crate::failure::Reported;
use crate::host::{HostRoot, Overrides, PREFIXES, Systemd, read_facts};

/// Why no folder can be told.
#[derive(Debug, Error)]
pub enum WhereaboutsError {
    /// A path that cannot be a prefix.
    #[error(transparent)]
    Bad(#[from] BadPrefix),
    /// An installation below another prefix.
    #[error("this node has an installation below {there} already, and {said} was given")]
    Elsewhere {
        /// Where it is.
        there: String,
        /// What was given.
        said: String,
    },
}

impl Reported for WhereaboutsError {
    fn reason(&self) -> FailureReason {
        FailureReason::UnsupportedHost
    }

    fn remedy(&self) -> String {
        match self {
            Self::Bad(_) => "Give another folder with --prefix.".into(),
            Self::Elsewhere { there, .. } => {
                format!("Leave --prefix out, or `uninstall --prefix {there}` first.")
            }
        }
    }
}

/// The node's install folder: what an operator says, or where an installation is found, or where this kind of host
/// lets programs run.
///
/// # Errors
/// A [`WhereaboutsError`] when what was said cannot be.
pub(crate) async fn locate(root: &HostRoot, overrides: &Overrides) -> Result<Layout, WhereaboutsError> {
    let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let there = installed(root, &program);
    let Some(said) = &overrides.prefix else {
        return Ok(match there {
            Some(there) => there,
            None => usual(root, overrides).await?,
        });
    };
    let said = Layout::below(said)?;
    match there {
        Some(there) if there != said && !holds(root, &said) => Err(WhereaboutsError::Elsewhere {
            there: there.prefix().to_owned(),
            said: said.prefix().to_owned(),
        }),
        _ => Ok(said),
    }
}

/// Where an installation is: below one of the usual prefixes, or where this program is the copy of one.
fn installed(root: &HostRoot, program: &Path) -> Option<Layout> {
    let usual = PREFIXES.iter().filter_map(|prefix| Layout::below(prefix).ok());
    let found = usual
        .chain(Layout::of_program(program))
        .find(|layout| holds(root, layout))?;
    // A program knows itself without links; the configuration has the prefix as it was said.
    let state = root.dir(&found.state_dir()).ok()?;
    let recorded = Installed::read(&state).ok().flatten();
    let recorded = recorded.and_then(|installed| Layout::below(&installed.prefix).ok());
    Some(recorded.filter(|layout| holds(root, layout)).unwrap_or(found))
}

fn holds(root: &HostRoot, layout: &Layout) -> bool {
    [INSTALLED, JOURNAL]
        .iter()
        .any(|name| root.exists(&format!("{}/{name}", layout.state_dir())))
}

/// A host that cannot be judged is refused later, with its own words.
async fn usual(root: &HostRoot, overrides: &Overrides) -> Result<Layout, BadPrefix> {
    let Ok(systemd) = Systemd::connect(root).await else {
        return Ok(Layout::default());
    };
    match read_facts(root, &systemd)
        .await
        .map(|facts| judged(&facts, overrides))
    {
        Ok(Ok(host)) => Layout::below(&host.prefix),
        _ => Ok(Layout::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        (dir, root)
    }

    fn install(root: &HostRoot, at: &str, recorded: &str) {
        let layout = Layout::below(at).unwrap();
        let record = Installed {
            format: 1,
            prefix: recorded.to_owned(),
            config_path: "/etc/containerd/config.toml".into(),
            had_file: true,
            edited_sha256: None,
            pieces: Vec::new(),
            verified: true,
            kwasm: None,
        };
        let state = root.make_dir(&layout.state_dir()).unwrap();
        record.write_alone(&state).unwrap();
    }

    fn said(prefix: &str) -> Overrides {
        Overrides {
            prefix: Some(prefix.to_owned()),
            ..Overrides::default()
        }
    }

    #[tokio::test]
    async fn an_installation_is_found_below_any_usual_prefix() {
        for prefix in PREFIXES {
            let (_dir, root) = host();
            install(&root, prefix, prefix);
            let found = locate(&root, &Overrides::default()).await.unwrap();
            assert_eq!(found.prefix(), prefix);
        }
    }

    #[tokio::test]
    async fn a_second_installation_below_another_prefix_is_refused() {
        let (_dir, root) = host();
        assert_eq!(locate(&root, &said("/srv")).await.unwrap().prefix(), "/srv");
        install(&root, "/home/kubernetes/bin", "/home/kubernetes/bin");
        let error = locate(&root, &said("/srv")).await.unwrap_err();
        assert!(
            matches!(error, WhereaboutsError::Elsewhere { ref there, .. } if there == "/home/kubernetes/bin"),
            "{error}"
        );
        let same = locate(&root, &said("/home/kubernetes/bin/")).await.unwrap();
        assert_eq!(same.prefix(), "/home/kubernetes/bin");
    }

    #[test]
    fn the_copy_finds_the_installation_it_is_part_of_by_the_name_that_was_recorded() {
        let (dir, root) = host();
        install(&root, "/data/x", "/srv");
        std::os::unix::fs::symlink("/data/x", dir.path().join("srv")).unwrap();
        let copy = Path::new("/data/x/quartermaster/0.1.0-abc/bin/quartermaster-agent");
        assert_eq!(installed(&root, copy).unwrap().prefix(), "/srv");
        assert_eq!(installed(&root, Path::new("/root/quartermaster-agent")), None);
    }
}
