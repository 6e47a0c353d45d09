//! The library's one error: what failed, where (rank, file, offset), and what was expected.

use std::fmt;
use std::path::{Path, PathBuf};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this library. Opaque but for its [`kind`](Error::kind): kinds will be added.
pub struct Error(Box<ErrorKind>);

/// What went wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration breaks one or more rules; every one of them is listed.
    Config(Vec<Violation>),
    /// A file could not be opened, read or written.
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file's content is not what its format promises. `offset` is in bytes.
    Data {
        path: PathBuf,
        offset: Option<u64>,
        reason: String,
    },
    /// Weights do not fit the model; every tensor that does not is listed.
    Weights {
        path: PathBuf,
        problems: Vec<String>,
    },
    /// There is no checkpoint to load.
    NoCheckpoint { path: PathBuf, reason: String },
    /// A rank ended without a result.
    Rank { rank: usize, reason: String },
    /// A collective could not complete: who waited, in what, and for whom.
    Comm {
        rank: usize,
        op: &'static str,
        reason: String,
    },
}

/// One broken rule of a configuration, with what would satisfy it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The rule and the values that break it, as a sentence.
    pub rule: String,
    /// The nearest legal values, as the user would write them; empty where there is no such thing.
    pub nearest: Vec<String>,
}

impl Violation {
    /// A broken rule and the nearest legal values.
    pub fn new<S: Into<String>>(
        rule: impl Into<String>,
        nearest: impl IntoIterator<Item = S>,
    ) -> Self {
        Violation {
            rule: rule.into(),
            nearest: nearest.into_iter().map(Into::into).collect(),
        }
    }
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0
    }

    /// An error about one or more broken rules of a configuration.
    pub fn config(violations: Vec<Violation>) -> Self {
        ErrorKind::Config(violations).into()
    }

    /// An operating system's error about a file.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        ErrorKind::Io { path, source }.into()
    }

    /// An error about the content of a file, at a byte offset where one is known.
    pub fn data(
        path: impl AsRef<Path>,
        offset: impl Into<Option<u64>>,
        reason: impl Into<String>,
    ) -> Self {
        ErrorKind::Data {
            path: path.as_ref().to_path_buf(),
            offset: offset.into(),
            reason: reason.into(),
        }
        .into()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Error(Box::new(kind))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            ErrorKind::Config(violations) => {
                let n = violations.len();
                let s = if n == 1 { "" } else { "s" };
                write!(f, "the configuration breaks {n} rule{s}:")?;
                violations.iter().try_for_each(|v| write!(f, "\n  - {v}"))
            }
            ErrorKind::Io { path, source } => write!(f, "{}: {source}", path.display()),
            ErrorKind::Data {
                path,
                offset,
                reason,
            } => match offset {
                Some(offset) => write!(f, "{} at byte {offset}: {reason}", path.display()),
                None => write!(f, "{}: {reason}", path.display()),
            },
            ErrorKind::Weights { path, problems } => {
                let n = problems.len();
                write!(f, "{}: {n} tensors do not fit the model:", path.display())?;
                problems.iter().try_for_each(|p| write!(f, "\n  - {p}"))
            }
            ErrorKind::NoCheckpoint { path, reason } => write!(f, "{} {reason}", path.display()),
            ErrorKind::Rank { rank, reason } => write!(f, "rank {rank} {reason}"),
            ErrorKind::Comm { rank, op, reason } => write!(f, "rank {rank}, {op}: {reason}"),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.rule)?;
        if !self.nearest.is_empty() {
            write!(f, "; nearest legal: {}", self.nearest.join(", "))?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            ErrorKind::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
