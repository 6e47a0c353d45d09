//! What the program says when it cannot go on: the cause in one line, then what to do next.

use burn_megatron::{Error, ErrorKind};
use std::fmt;
use std::path::Path;
use std::process::ExitCode;

/// `Result` of the program's own functions.
pub type Result<T> = std::result::Result<T, Failure>;

/// The exit status of a run that failed.
const RUN_FAILED: u8 = 1;
/// The exit status of a wrong command line or configuration; clap uses the same.
const USAGE: u8 = 2;
/// The exit status of a run that a signal ended, as shells count it (128 + SIGINT).
pub const INTERRUPTED: u8 = 130;

/// A failure as the user reads it.
#[derive(Debug)]
pub struct Failure {
    status: u8,
    cause: String,
    next: Option<String>,
}

impl Failure {
    /// A command line or configuration that cannot be run.
    pub fn usage(cause: impl Into<String>, next: impl Into<String>) -> Self {
        Failure {
            status: USAGE,
            cause: cause.into(),
            next: Some(next.into()),
        }
    }

    /// Something that went wrong while running.
    pub fn run(cause: impl Into<String>, next: impl Into<String>) -> Self {
        Failure {
            status: RUN_FAILED,
            cause: cause.into(),
            next: Some(next.into()),
        }
    }

    /// A file that could not be read or written.
    pub fn io(path: &Path, source: &std::io::Error) -> Self {
        let next = match source.kind() {
            std::io::ErrorKind::NotFound => {
                "check the path; relative paths start at the current directory"
            }
            std::io::ErrorKind::PermissionDenied => "check the permissions of the file and folder",
            std::io::ErrorKind::StorageFull => "free some space on that disk",
            _ => "check the file and the disk it is on",
        };
        Failure::run(format!("{}: {source}", path.display()), next)
    }

    /// A line of JSON that cannot be used; any other failure of the library as usual.
    pub fn bad_line(error: Error, next: &str) -> Self {
        match error.kind() {
            ErrorKind::Data { reason, .. } if reason.starts_with("line ") => {
                Failure::run(error.to_string(), next)
            }
            _ => error.into(),
        }
    }

    /// Prints the failure and gives the program's exit status.
    pub fn report(&self) -> ExitCode {
        eprintln!("error: {self}");
        ExitCode::from(self.status)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)?;
        match &self.next {
            Some(next) => write!(f, "\n  help: {next}"),
            None => Ok(()),
        }
    }
}

/// The library says what failed and where; what to do about it is the program's part.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let cause = error.to_string();
        match error.kind() {
            ErrorKind::Config(_) => Failure::usage(
                cause,
                "change these values in the TOML file, or by flags of the same names",
            ),
            ErrorKind::Io { path, source } => Failure::io(path, source),
            ErrorKind::Data { .. } => Failure::run(
                cause,
                "the file is damaged or of another kind; make it again, or name another",
            ),
            ErrorKind::Weights { .. } => Failure::run(
                cause,
                "give weights, or a checkpoint, of this very model, or change [model]",
            ),
            ErrorKind::NoCheckpoint { .. } => Failure::run(
                cause,
                "check --load and --ckpt-step; --no-exit-on-missing-checkpoint starts from step 1 where there is \
                 none",
            ),
            ErrorKind::Comm { .. } => Failure::run(
                cause,
                "the rank named above failed or fell behind; the ranks' messages say why",
            ),
            ErrorKind::Rank { reason, .. } if reason.starts_with("found a ") => Failure::run(
                cause,
                "lower --lr, warm up for longer (--lr-warmup-iters), or look at that batch; \
                 --no-check-for-nan-in-loss-and-grad goes on",
            ),
            ErrorKind::Rank { .. } => Failure::run(
                cause,
                "the other ranks were stopped; what they had not saved is lost",
            ),
            _ => Failure {
                status: RUN_FAILED,
                cause,
                next: None,
            },
        }
    }
}
