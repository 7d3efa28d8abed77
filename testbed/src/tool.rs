//! Running a program to its end, with its words kept for the error.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program could not be run, or said no.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It is not there, or can't be executed.
    #[error("can't run {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// It ended with a failure.
    #[error("{what} failed ({status}){}", told(.tail, .log.as_deref()))]
    Failed {
        /// What it was for, or its command line.
        what: String,
        /// `exit status: 1`, `signal: 9`.
        status: String,
        /// The last lines it said.
        tail: String,
        /// The file with all of them, where there is one.
        log: Option<PathBuf>,
    },
    /// Its log can't be written.
    #[error("can't write {path}: {source}")]
    Log {
        /// The log.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

fn told(tail: &str, log: Option<&Path>) -> String {
    let mut text = String::new();
    if !tail.is_empty() {
        text.push_str(":\n");
        for line in tail.lines() {
            text.push_str("    ");
            text.push_str(line);
            text.push('\n');
        }
    }
    if let Some(log) = log {
        text.push_str(&format!("  its whole log: {}", log.display()));
    }
    text.trim_end().to_owned()
}

/// A command line to be run to its end.
#[derive(Debug)]
pub struct Tool {
    args: Vec<OsString>,
    what: Option<String>,
    env: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    input: Option<Vec<u8>>,
}

impl Tool {
    /// A command with its arguments still to come.
    #[must_use]
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            args: vec![program.as_ref().to_owned()],
            what: None,
            env: Vec::new(),
            dir: None,
            input: None,
        }
    }

    /// One more argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        self.args
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// What an error calls it, in place of the command line.
    #[must_use]
    pub fn called(mut self, what: impl Into<String>) -> Self {
        self.what = Some(what.into());
        self
    }

    /// A variable in its environment.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// The folder it runs in.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// What it reads from standard input.
    #[must_use]
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.input = Some(input.into());
        self
    }

    /// Runs it and returns what it printed to standard output.
    ///
    /// # Errors
    /// [`ToolError`]; a failure holds what it printed to standard error.
    pub fn output(self) -> Result<String, ToolError> {
        let mut command = self.command();
        command
            .stdin(match self.input {
                Some(_) => Stdio::piped(),
                None => Stdio::null(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let start_error = |source| ToolError::Start {
            program: self.program(),
            source,
        };
        let mut child = command.spawn().map_err(start_error)?;
        let writer = match (self.input.clone(), child.stdin.take()) {
            // Its own thread: a child that prints before it has read all would block us both.
            (Some(bytes), Some(mut stdin)) => Some(std::thread::spawn(move || stdin.write_all(&bytes))),
            _ => None,
        };
        let output = child.wait_with_output().map_err(start_error)?;
        if let Some(writer) = writer {
            // A child that did not read its input says so by its own exit status.
            let _ = writer.join();
        }
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(stdout);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let words = if stderr.trim().is_empty() {
            &stdout
        } else {
            stderr.as_ref()
        };
        Err(ToolError::Failed {
            what: self.what(),
            status: output.status.to_string(),
            tail: last_lines(words, 30),
            log: None,
        })
    }

    /// Runs it with all it says going to `log`.
    ///
    /// # Errors
    /// [`ToolError`]; a failure holds the log's last lines and its path.
    pub fn logged(self, log: &Path) -> Result<(), ToolError> {
        let open = || -> std::io::Result<File> {
            if let Some(dir) = log.parent() {
                fs::create_dir_all(dir)?;
            }
            File::options().create(true).append(true).open(log)
        };
        let log_error = |source| ToolError::Log {
            path: log.to_owned(),
            source,
        };
        let mut out = open().map_err(log_error)?;
        writeln!(out, "+ {}", self.line()).map_err(log_error)?;
        let err = out.try_clone().map_err(log_error)?;
        let status = self
            .command()
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .status()
            .map_err(|source| ToolError::Start {
                program: self.program(),
                source,
            })?;
        if status.success() {
            return Ok(());
        }
        Err(ToolError::Failed {
            what: self.what(),
            status: status.to_string(),
            tail: tail_of(log, 15),
            log: Some(log.to_owned()),
        })
    }

    fn program(&self) -> String {
        self.args[0].to_string_lossy().into_owned()
    }

    fn line(&self) -> String {
        let words: Vec<_> = self.args.iter().map(|arg| arg.to_string_lossy()).collect();
        words.join(" ")
    }

    fn what(&self) -> String {
        self.what.clone().unwrap_or_else(|| self.line())
    }

    /// The kernel ends it when the thread that runs it ends: a killed `up` leaves no build and no half-done push behind.
    fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(&self.args);
        self.place(&mut command);
        command
    }

    fn place(&self, command: &mut Command) {
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
    }
}

/// The last `count` lines of a file; empty if it can't be read.
#[must_use]
pub fn tail_of(path: &Path, count: usize) -> String {
    fs::read(path)
        .map(|bytes| last_lines(&String::from_utf8_lossy(&bytes), count))
        .unwrap_or_default()
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_holds_the_programs_own_words() {
        let error = Tool::new("sh")
            .args(["-c", "echo out; echo no such bridge >&2; exit 3"])
            .called("making the bridge")
            .output()
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "making the bridge failed (exit status: 3):\n    no such bridge"
        );
    }

    #[test]
    fn gives_input_larger_than_a_pipe_to_a_program_that_echoes_it() {
        let big = "x".repeat(1 << 20);
        let echoed = Tool::new("cat").input(big.as_bytes()).output().unwrap();
        assert_eq!(echoed.len(), big.len());
    }

    #[test]
    fn a_logged_failure_names_the_log_and_shows_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("deep/build.log");
        let error = Tool::new("sh")
            .args(["-c", "seq 1 40; exit 1"])
            .called("the build")
            .logged(&log)
            .unwrap_err()
            .to_string();
        assert!(error.contains("build.log"), "{error}");
        assert!(error.contains("    40\n"), "{error}");
        assert!(!error.contains("    25\n"), "{error}");
    }

    #[test]
    fn names_a_program_that_is_not_there() {
        let error = Tool::new("no-such-program").output().unwrap_err();
        assert!(error.to_string().contains("no-such-program"));
    }
}
