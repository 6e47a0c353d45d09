//! Writing a checkpoint so that it is seen whole or not at all.

use super::manifest::{Manifest, Piece, Progress, SavedFile, SavedLayout, SavedTensor, Stored};
use super::{BLOCK, Entry, Kind, LATEST, MANIFEST, entries};
use crate::comm::{Communicator, all_gather_bytes};
use crate::error::{Error, Result};
use crate::shard::ParamSpec;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where checkpoints go, and which of the older ones stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveTo {
    pub dir: PathBuf,
    pub retention: Retention,
}

/// Which checkpoints stay when a new one is whole: all, unless one of the two is given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many.
    pub keep_last: Option<usize>,
    /// Those of every so many iterations, for ever.
    pub save_retain_interval: Option<u64>,
}

/// One rank's part of a checkpoint, as of one step.
#[derive(Debug, Clone)]
pub struct Snapshot<'a> {
    pub(crate) progress: Progress,
    pub(crate) layout: SavedLayout,
    pub(crate) run: Value,
    /// Packed buffers of each kind.
    pub(crate) values: Vec<(Kind, Cow<'a, [f32]>)>,
    pub(crate) parts: Vec<SnapshotPart>,
}

/// Elements of a parameter in a snapshot's buffers.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotPart {
    pub name: String,
    pub spec: ParamSpec,
    /// Of the rank's part of the parameter.
    pub within: Range<usize>,
    /// Their place in the packed buffers.
    pub packed: Range<usize>,
}

impl Snapshot<'_> {
    /// The same with buffers of its own, for a thread that writes while the training goes on.
    pub fn into_owned(self) -> Snapshot<'static> {
        let values = self.values.into_iter();
        Snapshot {
            progress: self.progress,
            layout: self.layout,
            run: self.run,
            values: values
                .map(|(kind, values)| (kind, Cow::Owned(values.into_owned())))
                .collect(),
            parts: self.parts,
        }
    }
}

/// A checkpoint that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    pub iteration: u64,
    pub path: PathBuf,
    /// Of all ranks' files.
    pub bytes: u64,
}

/// What a rank wrote: its part of the manifest.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Written {
    files: BTreeMap<String, SavedFile>,
    tensors: BTreeMap<String, SavedTensor>,
}

/// Writes a checkpoint of every rank's snapshot. Every rank of `world` calls it.
///
/// # Errors
/// The same on every rank: the first rank's that could not write. Nothing of this checkpoint is left then,
/// and the ones before it are as they were.
pub(super) fn write(
    snapshot: &Snapshot<'_>,
    to: &SaveTo,
    world: &dyn Communicator,
) -> Result<Saved> {
    let (rank, iteration) = (world.rank(), snapshot.progress.iteration);
    let aside = to.dir.join(format!(".iter_{iteration:07}.writing"));
    let outcome = write_aside(snapshot, to, &aside, world);
    if outcome.is_err() && rank == 0 {
        // What cannot be removed is removed by the next save.
        let _ = fs::remove_dir_all(&aside);
    }
    outcome
}

fn write_aside(
    snapshot: &Snapshot<'_>,
    to: &SaveTo,
    aside: &Path,
    world: &dyn Communicator,
) -> Result<Saved> {
    let rank = world.rank();
    let prepared = match rank {
        0 => prepare(&to.dir, aside),
        _ => Ok(()),
    };
    agree(world, prepared)?;
    let written = write_rank(snapshot, rank, aside);
    let written = agree(world, written)?;
    let all = all_gather_bytes(world, &encoded(&written)?)?;
    let committed = match rank {
        0 => commit(snapshot, to, aside, &all),
        _ => Ok((PathBuf::new(), 0)),
    };
    let (path, bytes) = agree(world, committed)?;
    // What rank 0 found, for all.
    let found = all_gather_bytes(world, &encoded(&(path, bytes))?)?;
    let (path, bytes) = decoded(&found[0])?;
    Ok(Saved {
        iteration: snapshot.progress.iteration,
        path,
        bytes,
    })
}

/// The rank's own result if every rank has one, else the first error of any rank, on all of them.
fn agree<T>(world: &dyn Communicator, mine: Result<T>) -> Result<T> {
    let text = match &mine {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    let all = all_gather_bytes(world, text.as_bytes())?;
    let first = all.iter().position(|text| !text.is_empty());
    match (first, mine) {
        (None, mine) => mine,
        (Some(rank), Err(error)) if rank == world.rank() => Err(error),
        (Some(rank), _) => {
            let reason = String::from_utf8_lossy(&all[rank]).into_owned();
            let error = io::Error::other(format!("rank {rank} could not write: {reason}"));
            Err(Error::io("checkpoint", error))
        }
    }
}

fn encoded(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::io("checkpoint", e.into()))
}

fn decoded<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::io("checkpoint", e.into()))
}

/// Makes the directories, and removes what killed saves left.
fn prepare(dir: &Path, aside: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
    for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let path = entry.map_err(|e| Error::io(dir, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(".iter_") {
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        }
    }
    fs::create_dir(aside).map_err(|e| Error::io(aside, e))
}

/// Writes this rank's file, if it owns anything.
fn write_rank(snapshot: &Snapshot<'_>, rank: usize, aside: &Path) -> Result<Written> {
    let mut written = Written::default();
    if snapshot.parts.is_empty() {
        return Ok(written);
    }
    let file = format!("rank_{rank:05}.safetensors");
    let path = aside.join(&file);
    let mut values: Vec<(String, TensorInfo, &[u8])> = Vec::new();
    let mut end = 0;
    for part in &snapshot.parts {
        let mut piece = Piece::of(&part.spec, part.within.clone(), &file);
        let local = part.spec.local_shape();
        let whole = part.within.len() == local.iter().product::<usize>();
        for (kind, buffer) in &snapshot.values {
            let name = match whole {
                true => format!("{}/{}", kind.name(), part.name),
                false => format!("{}/{}@{}", kind.name(), part.name, part.within.start),
            };
            let bytes: &[u8] = bytemuck::cast_slice(&buffer[part.packed.clone()]);
            let start = end;
            end += bytes.len();
            let info = TensorInfo {
                dtype: Dtype::F32,
                shape: match whole {
                    true => local.clone(),
                    false => vec![part.within.len()],
                },
                data_offsets: (start, end),
            };
            let stored = Stored {
                name: name.clone(),
                offset: start as u64,
                crc32: bytes.chunks(BLOCK).map(crc32fast::hash).collect(),
            };
            values.push((name, info, bytes));
            piece.values.insert(*kind, stored);
        }
        let tensor = written.tensors.entry(part.name.clone());
        let tensor = tensor.or_insert_with(|| SavedTensor {
            shape: part.spec.stored_shape(),
            dtype: "F32".into(),
            pieces: Vec::new(),
        });
        tensor.pieces.push(piece);
    }
    let header = header(&values).map_err(|e| Error::io(&path, e))?;
    let parts = std::iter::once(&header[..]).chain(values.iter().map(|(.., bytes)| *bytes));
    write_flushed(&path, parts).map_err(|e| Error::io(&path, e))?;
    // What was counted from the data's start counts from the file's.
    let pieces = written.tensors.values_mut().flat_map(|t| &mut t.pieces);
    for stored in pieces.flat_map(|piece| piece.values.values_mut()) {
        stored.offset += header.len() as u64;
    }
    let saved = SavedFile {
        bytes: (header.len() + end) as u64,
        header_bytes: header.len() as u64,
        header_crc32: crc32fast::hash(&header),
    };
    written.files.insert(file, saved);
    Ok(written)
}

/// The start of a safetensors file: the header's length, and the header.
fn header(values: &[(String, TensorInfo, &[u8])]) -> io::Result<Vec<u8>> {
    let infos = values
        .iter()
        .map(|(name, info, _)| (name.clone(), info.clone()));
    let metadata = Metadata::new(None, infos.collect()).map_err(io::Error::other)?;
    let mut text = serde_json::to_vec(&metadata)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok(header)
}

/// Writes a file and returns once the disk has it.
fn write_flushed<'a>(path: &Path, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
    let mut file = io::BufWriter::with_capacity(BLOCK, File::create(path)?);
    for part in parts {
        file.write_all(part)?;
    }
    file.into_inner()?.sync_all()
}

/// Joins what the ranks wrote, and makes it the newest checkpoint. Returns its directory and size.
fn commit(
    snapshot: &Snapshot<'_>,
    to: &SaveTo,
    aside: &Path,
    written: &[Vec<u8>],
) -> Result<(PathBuf, u64)> {
    let mut manifest = Manifest::new(snapshot.progress, snapshot.layout, snapshot.run.clone());
    for bytes in written {
        let Written { files, tensors } = decoded(bytes)?;
        manifest.files.extend(files);
        for (name, tensor) in tensors {
            match manifest.tensors.entry(name) {
                MapEntry::Occupied(mut known) => known.get_mut().pieces.extend(tensor.pieces),
                MapEntry::Vacant(new) => {
                    new.insert(tensor);
                }
            }
        }
    }
    let path = aside.join(MANIFEST);
    let text = manifest
        .to_bytes()
        .map_err(|e| Error::io(&path, e.into()))?;
    write_flushed(&path, std::iter::once(&text[..])).map_err(|e| Error::io(&path, e))?;
    flush_directory(aside)?;

    let (dir, iteration) = (&to.dir, snapshot.progress.iteration);
    let known = entries(dir).map_err(|e| Error::io(dir, e))?;
    let same = known.iter().filter(|entry| entry.iteration == iteration);
    let repetition = same.map(|entry| entry.repetition + 1).max().unwrap_or(0);
    let new = Entry::new(dir, iteration, repetition);
    fs::rename(aside, &new.path).map_err(|e| Error::io(&new.path, e))?;
    flush_directory(dir)?;

    let (latest, next) = (dir.join(LATEST), dir.join(".latest.writing"));
    let name = format!("{}\n", new.name());
    write_flushed(&next, std::iter::once(name.as_bytes())).map_err(|e| Error::io(&next, e))?;
    fs::rename(&next, &latest).map_err(|e| Error::io(&latest, e))?;
    flush_directory(dir)?;
    retire(&known, &new, to.retention);
    Ok((new.path, manifest.bytes()))
}

/// Makes renames in a directory last.
fn flush_directory(dir: &Path) -> Result<()> {
    // Only Unix opens directories; elsewhere renames are flushed by the system.
    #[cfg(unix)]
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| Error::io(dir, e))?;
    let _ = dir;
    Ok(())
}

/// Removes the older checkpoints that are not to stay. What cannot be removed stays as well: no reason to
/// call the new one lost.
fn retire(known: &[Entry], new: &Entry, retention: Retention) {
    let Retention {
        keep_last,
        save_retain_interval,
    } = retention;
    let newest = match (keep_last, save_retain_interval) {
        (None, None) => usize::MAX,
        (None, Some(_)) => 1,
        (Some(count), _) => count.max(1),
    };
    let stays = |entry: &Entry| {
        let interval = save_retain_interval.filter(|interval| *interval > 0);
        interval.is_some_and(|interval| entry.iteration.is_multiple_of(interval))
    };
    let older = known.iter().rev().filter(|entry| entry.path != new.path);
    for (place, entry) in (2..).zip(older) {
        let replaced = entry.iteration == new.iteration;
        if replaced || place > newest && !stays(entry) {
            let _ = fs::remove_dir_all(&entry.path);
        }
    }
}
