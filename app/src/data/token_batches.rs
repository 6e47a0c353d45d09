//! `--token-batches`: the run's batches, ready made, in one safetensors file.

use super::BatchSource;
use crate::error::{Failure, Result};
use burn_megatron::data::{Sampler, SamplerConfig, SamplerPosition};
use burn_megatron::train::MicroBatch;
use burn_megatron::{Error, Violation};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `tokens` [steps, global batch, sequence + 1] and, if asked for, `loss_mask`
/// [steps, global batch, sequence], memory-mapped.
#[derive(Debug)]
pub struct TokenBatches {
    path: PathBuf,
    file: Mmap,
    steps: usize,
    samples: usize,
    seq_length: usize,
    tokens: Region,
    loss_mask: Option<Region>,
}

/// A tensor's bytes in the file.
#[derive(Debug)]
struct Region {
    dtype: Dtype,
    bytes: Range<usize>,
}

/// What the file must hold for a run.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    pub steps: usize,
    pub global_batch_size: usize,
    pub seq_length: usize,
    pub vocab_size: usize,
    pub loss_mask: bool,
}

impl TokenBatches {
    /// Opens the file and checks names, types, shapes and token ids.
    ///
    /// # Errors
    /// The file is not safetensors, or does not hold what the run wants; everything is listed.
    pub fn open(path: &Path, wanted: Wanted) -> Result<Self> {
        let file = File::open(path).map_err(|e| Failure::io(path, &e))?;
        // SAFETY: the map is read-only; that nobody rewrites the file during the run is asked of
        // the user, as for every dataset.
        let file = unsafe { Mmap::map(&file) }.map_err(|e| Failure::io(path, &e))?;
        let broken = |e| Error::data(path, None, format!("not a safetensors file: {e}"));
        let tensors = SafeTensors::deserialize(&file).map_err(broken)?;
        let (steps, tokens, loss_mask) =
            check(&tensors, &file, wanted).map_err(|problems| misfit(path, &problems))?;
        let batches = TokenBatches {
            path: path.to_path_buf(),
            file,
            steps,
            samples: wanted.global_batch_size,
            seq_length: wanted.seq_length,
            tokens,
            loss_mask,
        };
        batches.check_ids(wanted)?;
        Ok(batches)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Steps that the file holds.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Every id of the steps to be taken, before any of them is: an id past the vocabulary would
    /// otherwise end a run in the middle.
    fn check_ids(&self, wanted: Wanted) -> Result<()> {
        let count = wanted.steps * self.samples * (self.seq_length + 1);
        let legal = 0..wanted.vocab_size as i64;
        match (0..count).find(|&at| !legal.contains(&self.token(at))) {
            None => Ok(()),
            Some(at) => Err(Failure::usage(
                format!(
                    "{}: token {} at position {at} is not below the vocabulary size {}",
                    self.path.display(),
                    self.token(at),
                    wanted.vocab_size
                ),
                "give the vocabulary size the batches were made for (--vocab-size)",
            )),
        }
    }

    fn token(&self, at: usize) -> i64 {
        let bytes = &self.file[self.tokens.bytes.clone()];
        match self.tokens.dtype {
            Dtype::I32 => i64::from(i32::from_le_bytes(element(bytes, at))),
            _ => i64::from_le_bytes(element(bytes, at)),
        }
    }

    /// Samples by number over all steps.
    fn micro_batch(&self, samples: Range<u64>) -> MicroBatch {
        let rows = samples.start as usize..samples.end as usize;
        let width = self.seq_length + 1;
        let tokens = (rows.start * width..rows.end * width).map(|at| self.token(at));
        let mask = self.loss_mask.as_ref().map(|mask| {
            let bytes = &self.file[mask.bytes.clone()];
            let places = rows.start * self.seq_length..rows.end * self.seq_length;
            places
                .map(|at| f32::from_le_bytes(element(bytes, at)))
                .collect()
        });
        MicroBatch {
            tokens: tokens.collect(),
            loss_mask: mask,
        }
    }
}

/// Element `at` of a little-endian array; the caller's `at` is within it.
fn element<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut element = [0; N];
    element.copy_from_slice(&bytes[at * N..(at + 1) * N]);
    element
}

/// The steps, tokens and mask that the file holds, or everything that keeps it from fitting.
fn check(
    tensors: &SafeTensors<'_>,
    file: &[u8],
    wanted: Wanted,
) -> std::result::Result<(usize, Region, Option<Region>), Vec<Violation>> {
    let mut problems = Vec::new();
    let (samples, seq_length) = (wanted.global_batch_size, wanted.seq_length);
    let tokens = find(tensors, file, "tokens", &mut problems);
    let mut steps = 0;
    if let Some((region, shape)) = &tokens {
        steps = shape.first().copied().unwrap_or(0);
        if !matches!(region.dtype, Dtype::I64 | Dtype::I32) {
            problems.push(problem("tokens", "must be i64 or i32, not", region.dtype));
        }
        check_shape("tokens", shape, [samples, seq_length + 1], &mut problems);
    }
    let mut loss_mask = None;
    if wanted.loss_mask
        && let Some((region, shape)) = find(tensors, file, "loss_mask", &mut problems)
    {
        if region.dtype != Dtype::F32 {
            problems.push(problem("loss_mask", "must be f32, not", region.dtype));
        }
        check_shape("loss_mask", &shape, [samples, seq_length], &mut problems);
        if tokens.is_some() && shape.first() != Some(&steps) {
            problems.push(problem(
                "loss_mask",
                "must have as many steps as tokens, not",
                shape,
            ));
        }
        loss_mask = Some(region);
    }
    if problems.is_empty() && steps < wanted.steps {
        problems.push(Violation {
            rule: format!("it holds {steps} steps, train_iters is {}", wanted.steps),
            nearest: vec![format!("--train-iters {steps}")],
        });
    }
    match tokens {
        Some((tokens, _)) if problems.is_empty() => Ok((steps, tokens, loss_mask)),
        _ => Err(problems),
    }
}

/// A tensor's region and shape; its absence is a problem.
fn find(
    tensors: &SafeTensors<'_>,
    file: &[u8],
    name: &str,
    problems: &mut Vec<Violation>,
) -> Option<(Region, Vec<usize>)> {
    let Ok(view) = tensors.tensor(name) else {
        let names = tensors.names();
        problems.push(problem(name, "is missing; there are", names));
        return None;
    };
    // safetensors has checked that the view lies in the file.
    let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
    let region = Region {
        dtype: view.dtype(),
        bytes: start..start + view.data().len(),
    };
    Some((region, view.shape().to_vec()))
}

fn check_shape(name: &str, shape: &[usize], sample: [usize; 2], problems: &mut Vec<Violation>) {
    if shape.len() != 3 || shape[1..] != sample {
        let [samples, width] = sample;
        let rule = format!("must be [steps, {samples}, {width}], not");
        problems.push(problem(name, &rule, shape));
    }
}

fn problem(name: &str, rule: &str, found: impl std::fmt::Debug) -> Violation {
    Violation {
        rule: format!("tensor {name} {rule} {found:?}"),
        nearest: Vec::new(),
    }
}

fn misfit(path: &Path, problems: &[Violation]) -> Failure {
    let list: Vec<String> = problems.iter().map(|p| format!("\n  - {p}")).collect();
    Failure::usage(
        format!("{} does not fit the run:{}", path.display(), list.concat()),
        "tokens is [steps, global batch size, sequence length + 1]; change the file or those values",
    )
}

/// One data-parallel rank's way through the batches.
pub struct Cursor {
    batches: Arc<TokenBatches>,
    sampler: Sampler,
    step: usize,
}

impl Cursor {
    /// What a data-parallel rank takes of each global batch, from step `step` on.
    pub fn new(
        batches: Arc<TokenBatches>,
        share: SamplerConfig,
        step: usize,
    ) -> burn_megatron::Result<Self> {
        let samples = (batches.steps * batches.samples) as u64;
        Ok(Cursor {
            sampler: Sampler::new(share, samples)?,
            batches,
            step,
        })
    }
}

impl BatchSource for Cursor {
    fn next(&mut self) -> burn_megatron::Result<Vec<MicroBatch>> {
        let step = self.step;
        if step >= self.batches.steps {
            let reason = format!("it holds {} steps, all taken", self.batches.steps);
            return Err(Error::data(&self.batches.path, None, reason));
        }
        self.step += 1;
        let start = SamplerPosition::default();
        let position = self.sampler.after(start, step as u64);
        (0..self.sampler.num_microbatches())
            .map(|i| {
                let samples = self.sampler.samples(position, i)?;
                Ok(self.batches.micro_batch(samples))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    const WANTED: Wanted = Wanted {
        steps: 2,
        global_batch_size: 4,
        seq_length: 2,
        vocab_size: 100,
        loss_mask: false,
    };

    /// Two steps of four samples of three tokens, numbered through.
    fn write(path: &Path, first: i32) {
        let ids: Vec<u8> = (first..first + 24).flat_map(i32::to_le_bytes).collect();
        let view = TensorView::new(Dtype::I32, vec![2, 4, 3], &ids).unwrap();
        safetensors::serialize_to_file([("tokens", view)], None, path).unwrap();
    }

    #[test]
    fn each_rank_takes_its_samples_in_megatrons_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.safetensors");
        write(&path, 0);
        let batches = Arc::new(TokenBatches::open(&path, WANTED).unwrap());
        let share = SamplerConfig {
            data_parallel_rank: 1,
            data_parallel_size: 2,
            micro_batch_size: 1,
            global_batch_size: 4,
        };
        let mut cursor = Cursor::new(batches, share, 1).unwrap();
        let taken = cursor.next().unwrap();
        let tokens: Vec<_> = taken.into_iter().map(|batch| batch.tokens).collect();
        assert_eq!(tokens, [[15, 16, 17], [21, 22, 23]]);
        assert!(cursor.next().is_err());
    }

    #[test]
    fn every_misfit_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.safetensors");
        write(&path, 0);
        let wanted = Wanted {
            global_batch_size: 8,
            loss_mask: true,
            ..WANTED
        };
        let message = TokenBatches::open(&path, wanted).unwrap_err().to_string();
        assert!(
            message.contains("[steps, 8, 3], not [2, 4, 3]"),
            "{message}"
        );
        assert!(message.contains("loss_mask is missing"), "{message}");
    }

    #[test]
    fn ids_past_the_vocabulary_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.safetensors");
        write(&path, 90);
        let message = TokenBatches::open(&path, WANTED).unwrap_err().to_string();
        assert!(message.contains("token 100 at position 10"), "{message}");
    }
}
