//! Full, unsharded weights in safetensors files, under the module tree's names (Megatron-Core's for
//! the models of this library).

use super::ParamRecord;
use crate::comm::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::launch::ProcessGroups;
use memmap2::Mmap;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A file of full weights, memory-mapped: each rank reads only its own part.
pub struct FullWeights {
    path: PathBuf,
    file: Mmap,
}

impl std::fmt::Debug for FullWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FullWeights({})", self.path.display())
    }
}

impl FullWeights {
    /// Opens a safetensors file.
    ///
    /// # Errors
    /// If it cannot be read, or is not a whole safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        // SAFETY: the mapping is read-only. Were another process to truncate the file meanwhile,
        // reads would fault, as with every memory-mapped dataset; weights are not written in place.
        let file = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, e))?;
        let weights = FullWeights { path, file };
        weights.tensors()?;
        Ok(weights)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.file)
            .map_err(|e| Error::data(&self.path, None, format!("not a safetensors file: {e}")))
    }

    /// This rank's part of every parameter, in a flat buffer of `elements`. Rows of vocabulary padding are zeros.
    /// `names` are those of the whole model, over all pipeline stages.
    pub(super) fn read(
        &self,
        params: &[ParamRecord],
        elements: usize,
        names: &BTreeSet<String>,
    ) -> Result<Vec<f32>> {
        let tensors = self.tensors()?;
        let mut problems = Vec::new();
        let mut flat = vec![0f32; elements];
        for param in params {
            match tensors.tensor(&param.name) {
                Err(_) => problems.push(format!("{} is missing", param.name)),
                Ok(tensor) => match mismatch(param, &tensor) {
                    Some(problem) => problems.push(format!("{} {problem}", param.name)),
                    None => copy_part(param, tensor.data(), &mut flat[param.range.clone()]),
                },
            }
        }
        let stored: BTreeSet<&str> = tensors.names().into_iter().collect();
        let unknown = stored.into_iter().filter(|name| !names.contains(*name));
        problems.extend(unknown.map(|name| format!("{name} is not of this model")));
        if problems.is_empty() {
            return Ok(flat);
        }
        let path = self.path.clone();
        Err(ErrorKind::Weights { path, problems }.into())
    }
}

/// How a stored tensor differs from what the parameter asks for.
fn mismatch(param: &ParamRecord, tensor: &TensorView<'_>) -> Option<String> {
    if tensor.dtype() != Dtype::F32 {
        return Some(format!("has type {:?}, not F32", tensor.dtype()));
    }
    let (stored, want) = (tensor.shape(), param.spec.stored_shape());
    // A vocabulary that was padded for another layout: its padding is dropped.
    let padded = param.spec.unpadded_rows.is_some()
        && stored.len() == want.len()
        && stored[0] >= want[0]
        && stored[1..] == want[1..];
    (stored != want && !padded).then(|| format!("has shape {stored:?}, not {want:?}"))
}

/// Copies the rank's runs out of the stored bytes; what lies beyond them is padding.
fn copy_part(param: &ParamRecord, stored: &[u8], out: &mut [f32]) {
    let known = param.spec.stored_shape().iter().product::<usize>();
    let mut rest = out;
    for run in param.spec.runs() {
        let (now, later) = rest.split_at_mut(run.len());
        let end = run.end.min(known);
        if run.start < end {
            let bytes = stored[4 * run.start..4 * end].chunks_exact(4);
            for (value, bytes) in now.iter_mut().zip(bytes) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        rest = later;
    }
}

/// A parameter's name, its shape without vocabulary padding, and its bytes (little endian f32).
type Full = (String, Vec<usize>, Vec<u8>);

/// Gathers every parameter over the tensor-parallel group, and the stages over the pipeline; rank 0
/// of both writes them all.
pub(super) fn save(
    path: &Path,
    params: &[ParamRecord],
    flat: &[f32],
    groups: &ProcessGroups,
) -> Result<()> {
    let (tp, pp) = (&*groups.tp.comm, &*groups.pp.comm);
    let mut full: Vec<Full> = Vec::with_capacity(params.len());
    for param in params {
        let mut values = gather(param, &flat[param.range.clone()], tp)?;
        let shape = param.spec.stored_shape();
        values.truncate(4 * shape.iter().product::<usize>());
        full.push((param.name.clone(), shape, values));
    }
    if tp.rank() != 0 {
        return Ok(());
    }
    if pp.rank() != 0 {
        return send_stage(path, &full, pp);
    }
    for stage in 1..pp.size() {
        for theirs in receive_stage(path, stage, pp)? {
            // The last stage's copy of a tied table is the same as the first's.
            if !full.iter().any(|(name, ..)| *name == theirs.0) {
                full.push(theirs);
            }
        }
    }
    // Written aside: whoever finds a file of this name finds it whole.
    let aside = path.with_added_extension("tmp");
    let written = views(&full).and_then(|v| safetensors::serialize_to_file(v, None, &aside));
    written.map_err(|error| stored_badly(&aside, error))?;
    std::fs::rename(&aside, path).map_err(|e| Error::io(path, e))
}

fn views(full: &[Full]) -> std::result::Result<Vec<(&str, TensorView<'_>)>, SafeTensorError> {
    (full.iter())
        .map(|(name, shape, bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes)?;
            Ok((name.as_str(), view))
        })
        .collect()
}

fn stored_badly(path: &Path, error: SafeTensorError) -> Error {
    match error {
        SafeTensorError::IoError(source) => Error::io(path, source),
        other => Error::io(path, std::io::Error::other(other)),
    }
}

/// Sends a stage's parameters to the pipeline's rank 0, as a safetensors file after its length.
fn send_stage(path: &Path, full: &[Full], pp: &dyn Communicator) -> Result<()> {
    let file = views(full).and_then(|views| safetensors::serialize(views, None));
    let file = file.map_err(|error| stored_badly(path, error))?;
    pp.send((file.len() as u64).to_le_bytes().to_vec(), 0)?;
    pp.send(file, 0)
}

fn receive_stage(path: &Path, stage: usize, pp: &dyn Communicator) -> Result<Vec<Full>> {
    let length = pp.receive(size_of::<u64>(), stage)?;
    let length = u64::from_le_bytes(length.try_into().expect("as long as asked for"));
    let file = pp.receive(length as usize, stage)?;
    let tensors = SafeTensors::deserialize(&file).map_err(|error| stored_badly(path, error))?;
    let full = tensors.iter().map(|(name, tensor)| {
        let (shape, bytes) = (tensor.shape().to_vec(), tensor.data().to_vec());
        (name.to_string(), shape, bytes)
    });
    Ok(full.collect())
}

/// The bytes (little endian f32) of the whole parameter.
fn gather(param: &ParamRecord, part: &[f32], tp: &dyn Communicator) -> Result<Vec<u8>> {
    let mut values = vec![0f32; param.spec.full_elements()];
    if let super::Sharding::Split {
        dim, parts, blocks, ..
    } = param.spec.sharding
    {
        let mut all = vec![0f32; part.len() * parts];
        tp.all_gather(
            bytemuck::cast_slice(part),
            bytemuck::cast_slice_mut(&mut all),
        )?;
        for (index, mut theirs) in all.chunks(part.len()).enumerate() {
            let mut spec = param.spec.clone();
            spec.sharding = super::Sharding::Split {
                dim,
                index,
                parts,
                blocks,
            };
            for run in spec.runs() {
                let (now, later) = theirs.split_at(run.len());
                values[run].copy_from_slice(now);
                theirs = later;
            }
        }
    } else {
        values.copy_from_slice(part);
    }
    Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect())
}
