//! What a checkpoint says of itself.

use crate::error::{Error, Result};
use crate::optim::LossScale;
use crate::shard::{Init, ParamSpec, Sharding};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const FORMAT: &str = "burn-megatron checkpoint";
/// Raised by every change after which older readers would misread.
const VERSION: u32 = 1;

/// The index of a checkpoint: `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: String,
    pub version: u32,
    pub progress: Progress,
    /// Which ranks saved it. Nothing that loads depends on it.
    pub layout: SavedLayout,
    /// What the program that saved it wants to find again.
    pub run: Value,
    /// By name.
    pub files: BTreeMap<String, SavedFile>,
    /// By the module tree's path.
    pub tensors: BTreeMap<String, SavedTensor>,
    /// CRC-32 of this file with these digits as zeros.
    pub checksum: String,
}

/// How far the training is: every counter that the next step depends on. The masks of dropout and the
/// initial weights are functions of the seed and these.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps so far.
    pub iteration: u64,
    /// Samples of all of them, over all ranks.
    pub consumed_samples: u64,
    /// Steps of them that updated nothing, for gradients that were not finite.
    pub skipped_iterations: u64,
    /// Samples of those steps, which no schedule counts.
    #[serde(default)]
    pub skipped_samples: u64,
    /// Under fp16.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// Updates of the optimizer's state.
    pub optimizer_steps: u64,
    pub seed: u64,
}

/// The layout that saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedLayout {
    pub tensor_model_parallel_size: usize,
    pub pipeline_model_parallel_size: usize,
    pub virtual_stages: usize,
    pub data_parallel_size: usize,
    pub use_distributed_optimizer: bool,
}

/// A rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    pub bytes: u64,
    /// Of them the safetensors header and its length.
    pub header_bytes: u64,
    pub header_crc32: u32,
}

/// A whole parameter, with the optimizer's state of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedTensor {
    /// Without padding of the vocabulary.
    pub shape: Vec<usize>,
    pub dtype: String,
    pub pieces: Vec<Piece>,
}

/// Elements of a parameter that lie in one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    pub file: String,
    /// The whole parameter's, with padding.
    pub padded_shape: Vec<usize>,
    /// The tensor-parallel rank's part of it; none where every rank has all.
    pub split: Option<Split>,
    /// Of the elements of that part, row major.
    pub within: Range<usize>,
    pub values: BTreeMap<Kind, Stored>,
}

/// An equal part along one dimension, as in [`Sharding::Split`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    pub dim: usize,
    pub index: usize,
    pub parts: usize,
    pub blocks: usize,
}

/// What is kept of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The master weight.
    Weight,
    /// Adam's first moment.
    ExpAvg,
    /// Adam's second moment.
    ExpAvgSq,
    /// SGD's momentum.
    MomentumBuffer,
}

impl Kind {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Weight => "weight",
            Kind::ExpAvg => "exp_avg",
            Kind::ExpAvgSq => "exp_avg_sq",
            Kind::MomentumBuffer => "momentum_buffer",
        }
    }
}

/// A piece's values of one kind: a tensor of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    pub name: String,
    /// In bytes, from the file's start.
    pub offset: u64,
    /// CRC-32 of each mebibyte.
    pub crc32: Vec<u32>,
}

impl Piece {
    /// Elements of `spec` that a rank stores.
    pub(super) fn of(spec: &ParamSpec, within: Range<usize>, file: &str) -> Self {
        Piece {
            file: file.into(),
            padded_shape: spec.full_shape.clone(),
            split: match spec.sharding {
                Sharding::Replicated => None,
                Sharding::Split {
                    dim,
                    index,
                    parts,
                    blocks,
                } => Some(Split {
                    dim,
                    index,
                    parts,
                    blocks,
                }),
            },
            within,
            values: BTreeMap::new(),
        }
    }

    /// Its elements of the whole, in order, each run with its place in the piece.
    pub(super) fn runs(&self) -> Vec<(Range<usize>, usize)> {
        let sharding = match self.split {
            None => Sharding::Replicated,
            Some(Split {
                dim,
                index,
                parts,
                blocks,
            }) => Sharding::Split {
                dim,
                index,
                parts,
                blocks,
            },
        };
        let spec = ParamSpec {
            sharding,
            ..ParamSpec::replicated(self.padded_shape.clone(), Init::Zeros)
        };
        clipped(&spec, &self.within)
    }
}

/// The runs of a rank's part of a parameter that lie within some of the part's elements, each with its place
/// among them.
pub(super) fn clipped(spec: &ParamSpec, within: &Range<usize>) -> Vec<(Range<usize>, usize)> {
    let (mut runs, mut at) = (Vec::new(), 0);
    for run in spec.runs() {
        let here = at..at + run.len();
        at = here.end;
        let (start, end) = (here.start.max(within.start), here.end.min(within.end));
        if start < end {
            let first = run.start + start - here.start;
            runs.push((first..first + (end - start), start - within.start));
        }
    }
    runs
}

impl Manifest {
    pub(super) fn new(progress: Progress, layout: SavedLayout, run: Value) -> Self {
        Manifest {
            format: FORMAT.into(),
            version: VERSION,
            progress,
            layout,
            run,
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
            checksum: hex(0),
        }
    }

    /// Bytes of the weights and of the optimizer's state, padding included.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes).sum()
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let unsigned = Manifest {
            checksum: hex(0),
            ..self.clone()
        };
        let mut text = serde_json::to_vec_pretty(&unsigned)?;
        text.push(b'\n');
        let checksum = hex(crc32fast::hash(&text));
        if let Some(at) = checksum_place(&text) {
            text[at].copy_from_slice(checksum.as_bytes());
        }
        Ok(text)
    }

    pub(super) fn from_bytes(path: &Path, mut text: Vec<u8>) -> Result<Self> {
        let broken = |reason: String| Error::data(path, None, reason);
        let place = checksum_place(&text);
        let place =
            place.ok_or_else(|| broken("not a checkpoint's manifest, or cut off".into()))?;
        let found = text[place.clone()].to_vec();
        text[place].copy_from_slice(hex(0).as_bytes());
        let computed = hex(crc32fast::hash(&text));
        if found != computed.as_bytes() {
            let reason = format!(
                "the manifest is damaged: its checksum is {computed}, not {}",
                String::from_utf8_lossy(&found)
            );
            return Err(broken(reason));
        }
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|e| broken(format!("not a checkpoint's manifest: {e}")))?;
        match manifest.version {
            VERSION => Ok(manifest),
            other => Err(broken(format!(
                "the checkpoint has format version {other}, this program reads {VERSION}"
            ))),
        }
    }
}

fn hex(crc32: u32) -> String {
    format!("{crc32:08x}")
}

/// Where the checksum's digits stand: it is the last field.
fn checksum_place(text: &[u8]) -> Option<Range<usize>> {
    let key = b"\"checksum\": \"";
    let at = text.windows(key.len()).rposition(|window| window == key)?;
    let start = at + key.len();
    (start + 8 < text.len()).then_some(start..start + 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let progress = Progress {
            iteration: 7,
            ..Progress::default()
        };
        let mut manifest = Manifest::new(progress, SavedLayout::default(), Value::Null);
        let tensor = SavedTensor {
            shape: vec![4, 6],
            dtype: "F32".into(),
            pieces: Vec::new(),
        };
        manifest.tensors.insert("a.weight".into(), tensor);
        manifest
    }

    #[test]
    fn any_flipped_byte_of_a_manifest_is_found() {
        let path = Path::new("manifest.json");
        let bytes = manifest().to_bytes().unwrap();
        let read = Manifest::from_bytes(path, bytes.clone()).unwrap();
        assert_eq!(read.tensors, manifest().tensors);
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1;
            assert!(Manifest::from_bytes(path, broken).is_err(), "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(Manifest::from_bytes(path, bytes[..len].to_vec()).is_err());
        }
    }

    #[test]
    fn runs_within_a_part_are_those_of_the_part() {
        let spec = ParamSpec::split([4, 6], 1, (1, 2), Init::Zeros);
        let all: Vec<usize> = spec.runs().flatten().collect();
        for start in 0..12 {
            for end in start..=12 {
                let runs = clipped(&spec, &(start..end));
                let elements: Vec<usize> = runs.iter().flat_map(|(run, _)| run.clone()).collect();
                assert_eq!(elements, all[start..end]);
                let places = runs.iter().flat_map(|(run, at)| *at..at + run.len());
                assert!(places.eq(0..end - start));
            }
        }
    }
}
