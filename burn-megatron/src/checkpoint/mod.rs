//! Checkpoints that survive a kill at any moment and load under any layout.
//!
//! A save is a directory `iter_0000100/` of one safetensors file for each rank that owns data, and a
//! [`Manifest`] that says of every tensor which elements of the whole lie where, with a checksum of each
//! mebibyte. It is written aside, flushed to the disk, renamed, and only then named by the file `latest`:
//! whoever finds a checkpoint finds it whole, and the one before it stays until then.
//!
//! Loading knows nothing of the layout that saved: a rank asks for elements of whole tensors, and reads
//! those alone from the mapped files.

#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian values as they lie in memory");

mod manifest;
mod read;
mod saver;
mod write;

pub use manifest::{
    Kind, Manifest, Piece, Progress, SavedFile, SavedLayout, SavedTensor, Split, Stored,
};
pub use read::{Checkpoint, Fault};
pub use saver::Saver;
pub(crate) use write::SnapshotPart;
pub use write::{Retention, SaveTo, Saved, Snapshot};

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file that names the newest checkpoint.
const LATEST: &str = "latest";
const MANIFEST: &str = "manifest.json";

/// Bytes of a tensor under one checksum.
const BLOCK: usize = 1 << 20;

/// A whole checkpoint's directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    /// When it was written: an older run may have got further.
    written: SystemTime,
    iteration: u64,
    /// Which of several saves of the iteration.
    repetition: u64,
    path: PathBuf,
}

impl Entry {
    fn new(dir: &Path, iteration: u64, repetition: u64) -> Self {
        let name = match repetition {
            0 => format!("iter_{iteration:07}"),
            n => format!("iter_{iteration:07}.{n}"),
        };
        Entry {
            written: SystemTime::now(),
            iteration,
            repetition,
            path: dir.join(name),
        }
    }

    /// The one in that directory: it was renamed when it was whole. A manifest is missing only where
    /// somebody removed it.
    fn of(path: PathBuf) -> Option<Self> {
        let written = std::fs::metadata(path.join(MANIFEST)).and_then(|m| m.modified());
        let name = path.file_name()?.to_str()?.strip_prefix("iter_")?;
        let (iteration, repetition) = name.split_once('.').unwrap_or((name, "0"));
        Some(Entry {
            written: written.ok()?,
            iteration: iteration.parse().ok()?,
            repetition: repetition.parse().ok()?,
            path,
        })
    }

    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// The whole checkpoints of a directory, oldest first.
fn entries(dir: &Path) -> std::io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        entries.extend(Entry::of(entry?.path()));
    }
    entries.sort();
    Ok(entries)
}
