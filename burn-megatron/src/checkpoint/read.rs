//! Reading elements of whole tensors, whoever saved which.

use super::manifest::{Manifest, Piece, SavedTensor, Stored, clipped};
use super::{BLOCK, Kind, LATEST, MANIFEST, entries};
use crate::error::{Error, ErrorKind, Result};
use crate::shard::{ParamRecord, ParamSpec};
use memmap2::Mmap;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A whole checkpoint, its files mapped into memory.
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Mmap>,
    /// Blocks whose checksum was found right, by file and offset.
    verified: Mutex<HashSet<(String, u64)>>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({})", self.path.display())
    }
}

/// A part of a checkpoint that is not what was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub file: PathBuf,
    pub offset: Option<u64>,
    pub reason: String,
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::data(fault.file, fault.offset, fault.reason)
    }
}

impl Checkpoint {
    /// The checkpoint of `iteration` in the directory of a run's checkpoints; where none is given the one
    /// that `latest` names, and without that file the newest. A checkpoint's own directory will do as well.
    ///
    /// # Errors
    /// [`ErrorKind::NoCheckpoint`] if there is none; or if it is damaged.
    pub fn find(dir: &Path, iteration: Option<u64>) -> Result<Self> {
        let missing = |reason: String| -> Error {
            let path = dir.to_path_buf();
            ErrorKind::NoCheckpoint { path, reason }.into()
        };
        if dir.join(MANIFEST).is_file() {
            return Checkpoint::open(dir);
        }
        if !dir.is_dir() {
            return Err(missing("is not a directory".into()));
        }
        let all = entries(dir).map_err(|e| Error::io(dir, e))?;
        let found = match (iteration, std::fs::read_to_string(dir.join(LATEST))) {
            (Some(iteration), _) => {
                let found = all.iter().rfind(|entry| entry.iteration == iteration);
                let known: Vec<String> = all.iter().map(|e| e.iteration.to_string()).collect();
                found.ok_or_else(|| {
                    missing(format!(
                        "has no checkpoint of iteration {iteration}, but of [{}]",
                        known.join(", ")
                    ))
                })?
            }
            (None, Ok(name)) => {
                let found = all.iter().find(|entry| entry.name() == name.trim());
                found.ok_or_else(|| {
                    missing(format!(
                        "has no checkpoint {}, which its file {LATEST} names",
                        name.trim()
                    ))
                })?
            }
            (None, Err(_)) => all
                .last()
                .ok_or_else(|| missing("has no checkpoint".into()))?,
        };
        Checkpoint::open(&found.path)
    }

    /// The iterations of a run's checkpoints, oldest first.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn iterations(dir: &Path) -> Result<Vec<u64>> {
        let all = entries(dir).map_err(|e| Error::io(dir, e))?;
        Ok(all.iter().map(|entry| entry.iteration).collect())
    }

    /// The checkpoint in this very directory.
    ///
    /// # Errors
    /// If its manifest or a file is missing or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let index = path.join(MANIFEST);
        let text = std::fs::read(&index).map_err(|e| Error::io(&index, e))?;
        let manifest = Manifest::from_bytes(&index, text)?;
        let mut files = BTreeMap::new();
        for (name, saved) in &manifest.files {
            let path = path.join(name);
            let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
            let bytes = file.metadata().map_err(|e| Error::io(&path, e))?.len();
            if bytes != saved.bytes {
                let reason = format!("has {bytes} bytes, not the {} that were saved", saved.bytes);
                return Err(Error::data(path, None, reason));
            }
            // SAFETY: the mapping is read-only, and nobody writes to a checkpoint that is whole. Were
            // another process to cut the file off meanwhile, reads would fault.
            let file = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, e))?;
            files.insert(name.clone(), file);
        }
        let checkpoint = Checkpoint {
            path: path.to_path_buf(),
            manifest,
            files,
            verified: Mutex::default(),
        };
        checkpoint.check_places()?;
        Ok(checkpoint)
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Every header and every block against its checksum.
    pub fn verify(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (name, saved) in &self.manifest.files {
            let header = &self.files[name][..saved.header_bytes as usize];
            if crc32fast::hash(header) != saved.header_crc32 {
                faults.push(Fault {
                    file: self.path.join(name),
                    offset: Some(0),
                    reason: "the header is damaged: its checksum is another".into(),
                });
            }
        }
        for (tensor, saved) in &self.manifest.tensors {
            for piece in &saved.pieces {
                for stored in piece.values.values() {
                    let blocks = 0..stored.crc32.len();
                    let broken =
                        blocks.filter_map(|b| self.verify_block(tensor, piece, stored, b).err());
                    faults.extend(broken);
                }
            }
        }
        faults
    }

    /// What keeps the checkpoint from being of the model with these parameters on this rank, and of these
    /// names over all ranks.
    pub(crate) fn misfits(&self, params: &[ParamRecord], names: &BTreeSet<String>) -> Vec<String> {
        let mine = params.iter().filter_map(|param| {
            let want = param.spec.stored_shape();
            match self.manifest.tensors.get(&param.name) {
                None => Some(format!("{} is missing", param.name)),
                Some(saved) if saved.shape == want => None,
                Some(saved) => Some(format!(
                    "{} has shape {:?}, not {want:?}",
                    param.name, saved.shape
                )),
            }
        });
        let unknown = self.manifest.tensors.keys();
        let unknown = unknown.filter(|name| !names.contains(*name));
        mine.chain(unknown.map(|name| format!("{name} is not of this model")))
            .collect()
    }

    /// The values of one kind of some elements of a rank's part of a parameter, into `out`. Elements that
    /// nobody saved because they are padding of the vocabulary are zeros. The tensor has the parameter's
    /// shape.
    ///
    /// # Errors
    /// If the checkpoint has no such tensor, or is damaged where it is read.
    pub fn read(
        &self,
        kind: Kind,
        name: &str,
        spec: &ParamSpec,
        within: &Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let saved = self.tensor(name)?;
        let known: usize = saved.shape.iter().product();
        let pieces: Vec<_> = (saved.pieces.iter())
            .map(|piece| (piece, piece.runs()))
            .collect();
        for (wanted, at) in clipped(spec, within) {
            let end = wanted.end.min(known);
            out[at..at + wanted.len()].fill(0.0);
            let mut next = wanted.start;
            while next < end {
                let here = pieces.iter().find_map(|(piece, runs)| {
                    // The last run that starts no later.
                    let index = runs.partition_point(|(run, _)| run.start <= next);
                    let (run, place) = runs.get(index.checked_sub(1)?)?;
                    run.contains(&next).then_some((*piece, run, *place))
                });
                let Some((piece, run, place)) = here else {
                    let reason = format!("element {next} of {name} is in no file");
                    return Err(Error::data(self.path.join(MANIFEST), None, reason));
                };
                let stop = end.min(run.end);
                let from = place + next - run.start;
                let to = at + next - wanted.start;
                let into = &mut out[to..to + (stop - next)];
                self.copy(kind, name, piece, from, into)?;
                next = stop;
            }
        }
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&SavedTensor> {
        let saved = self.manifest.tensors.get(name);
        saved.ok_or_else(|| {
            let (path, problems) = (self.path.clone(), vec![format!("{name} is missing")]);
            ErrorKind::Weights { path, problems }.into()
        })
    }

    /// Copies values of a piece from its element `from` on.
    fn copy(
        &self,
        kind: Kind,
        tensor: &str,
        piece: &Piece,
        from: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let Some(stored) = piece.values.get(&kind) else {
            let problems = vec![format!("{tensor} has no {}", kind.name())];
            let path = self.path.clone();
            return Err(ErrorKind::Weights { path, problems }.into());
        };
        let bytes = 4 * from..4 * (from + out.len());
        for block in bytes.start / BLOCK..bytes.end.div_ceil(BLOCK) {
            let all = block * BLOCK..(4 * piece.within.len()).min((block + 1) * BLOCK);
            let wanted = all.start.max(bytes.start)..all.end.min(bytes.end);
            let into = &mut out[(wanted.start - bytes.start) / 4..(wanted.end - bytes.start) / 4];
            let start = stored.offset as usize + wanted.start;
            let values = &self.files[&piece.file][start..start + wanted.len()];
            for (value, bytes) in into.iter_mut().zip(values.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
            // A whole block is checked where it was copied to, in the processor's cache.
            match wanted == all {
                true => {
                    self.check_block(tensor, piece, stored, block, bytemuck::cast_slice(into))?
                }
                false => self.verify_block(tensor, piece, stored, block)?,
            }
        }
        Ok(())
    }

    /// A block in its file against its checksum.
    fn verify_block(
        &self,
        tensor: &str,
        piece: &Piece,
        stored: &Stored,
        block: usize,
    ) -> Result<(), Fault> {
        let end = stored.offset as usize + 4 * piece.within.len();
        let start = stored.offset as usize + block * BLOCK;
        let bytes = &self.files[&piece.file][start..end.min(start + BLOCK)];
        self.check_block(tensor, piece, stored, block, bytes)
    }

    fn check_block(
        &self,
        tensor: &str,
        piece: &Piece,
        stored: &Stored,
        block: usize,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let start = stored.offset + (block * BLOCK) as u64;
        let key = (piece.file.clone(), start);
        let verified = || self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified().contains(&key) {
            return Ok(());
        }
        if stored.crc32.get(block) == Some(&crc32fast::hash(bytes)) {
            verified().insert(key);
            return Ok(());
        }
        Err(Fault {
            file: self.path.join(&piece.file),
            offset: Some(start),
            reason: format!(
                "{} of {tensor} is damaged: the checksum of {} bytes from here is another",
                stored.name,
                bytes.len()
            ),
        })
    }

    /// That every stored tensor lies in its file.
    fn check_places(&self) -> Result<()> {
        for (name, tensor) in &self.manifest.tensors {
            for piece in &tensor.pieces {
                let bytes = self.files.get(&piece.file).map_or(0, |file| file.len());
                let fits = |stored: &Stored| {
                    let len = 4 * piece.within.len();
                    let end = (stored.offset as usize).checked_add(len);
                    end.is_some_and(|end| end <= bytes) && stored.crc32.len() == len.div_ceil(BLOCK)
                };
                if !piece.values.values().all(fits) {
                    let reason = format!("{name} does not lie in {}", piece.file);
                    return Err(Error::data(self.path.join(MANIFEST), None, reason));
                }
            }
        }
        Ok(())
    }
}
