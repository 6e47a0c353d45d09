//! `--data-path`: Megatron datasets, split, sampled and blended as Megatron does.

use super::reader::Reader;
use super::{BatchSource, tokenise};
use crate::config::RunConfig;
use crate::error::{Failure, Result};
use crate::train::intervals;
use burn_megatron::checkpoint::Progress;
use burn_megatron::data::{
    BlendSizes, BlendedDataset, GptDataset, GptDatasetConfig, IndexedDataset, SamplerConfig, Split,
    SplitRanges, TokenDataset, Tokenizer,
};
use burn_megatron::train::BatchSizes;
use burn_megatron::{Error, Violation};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The datasets of a run, open and indexed.
pub struct Corpus {
    train: Part,
    valid: Option<Part>,
    tokens: u64,
    prefetch: usize,
}

/// A dataset, and which of its batches the run takes.
struct Part {
    dataset: Arc<dyn TokenDataset>,
    sizes: BatchSizes,
    /// Samples before the run's start.
    consumed_samples: u64,
    /// Global batches from there on.
    steps: usize,
}

impl Part {
    fn batches(
        &self,
        share: SamplerConfig,
        prefetch: usize,
    ) -> burn_megatron::Result<Box<dyn BatchSource>> {
        let dataset = self.dataset.clone();
        let reader = Reader::new(dataset, share, self.sizes, self.consumed_samples)?;
        reader.batches(self.steps as u64, prefetch)
    }
}

impl Corpus {
    /// Checks that the files can be opened, before a run makes anything.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged.
    pub fn check(config: &RunConfig) -> Result<()> {
        for path in Blend::parse(&config.data.data_path).paths {
            match is_jsonl(&path) {
                true => drop(File::open(&path).map_err(|e| Failure::io(&path, &e))?),
                false => drop(IndexedDataset::open(&path)?),
            }
        }
        SplitRanges::parse(&config.data.split)?;
        Ok(())
    }

    /// Opens the datasets; `.jsonl` files are tokenised into `run_dir` first.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged, a split too small for one sample, a bad blend.
    pub fn open(
        config: &RunConfig,
        tokenizer: Option<Arc<Tokenizer>>,
        run_dir: &Path,
        start: Progress,
    ) -> Result<Self> {
        let blend = Blend::parse(&config.data.data_path);
        let split = SplitRanges::parse(&config.data.split)?;
        let mut files = Vec::new();
        for path in blend.paths {
            let prefix = match &tokenizer {
                Some(tokenizer) if is_jsonl(&path) => tokenise::run(&path, tokenizer, run_dir)?,
                _ => path,
            };
            files.push(Arc::new(IndexedDataset::open(prefix)?));
        }
        let training = &config.training;
        let (interval, per_interval) = (config.data.eval_interval, config.data.eval_iters);
        let evaluations = intervals(training.train_iters, interval).len() * per_interval;
        let iteration = start.iteration as usize;
        let evaluated = iteration / interval * per_interval;
        let builder = Builder {
            files: &files,
            weights: blend.weights,
            split,
            seq_length: training.seq_length,
            seed: seed(training.seed)?,
        };
        let samples = |steps: usize| (steps * training.global_batch_size) as u64;
        let train = builder.build(Split::Train, training.samples_at_end(start))?;
        let valid = match evaluations {
            0 => None,
            steps => builder.build(Split::Valid, samples(steps))?,
        };
        let Some(train) = train else {
            return Err(violation("the split leaves no training data", "969, 30, 1").into());
        };
        Ok(Corpus {
            train: Part {
                dataset: train,
                sizes: training.batch_sizes(),
                consumed_samples: start.consumed_samples,
                steps: training.train_iters.saturating_sub(iteration),
            },
            valid: valid.map(|dataset| Part {
                dataset,
                sizes: BatchSizes {
                    rampup: None,
                    ..training.batch_sizes()
                },
                consumed_samples: samples(evaluated),
                steps: evaluations.saturating_sub(evaluated),
            }),
            tokens: files.iter().map(|file| file.total_tokens()).sum(),
            prefetch: config.data.prefetch,
        })
    }

    /// Whether there is validation data that the run is to look at.
    pub fn evaluates(&self) -> bool {
        self.valid.is_some()
    }

    /// Tokens of all datasets, over all splits.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The training batches of one data-parallel rank.
    pub fn train(&self, share: SamplerConfig) -> burn_megatron::Result<Box<dyn BatchSource>> {
        self.train.batches(share, self.prefetch)
    }

    /// The validation batches of one data-parallel rank, where there are any.
    pub fn valid(
        &self,
        share: SamplerConfig,
    ) -> burn_megatron::Result<Option<Box<dyn BatchSource>>> {
        let valid = self.valid.as_ref();
        valid
            .map(|valid| valid.batches(share, self.prefetch))
            .transpose()
    }
}

/// The parts of `--data-path`.
struct Blend {
    paths: Vec<PathBuf>,
    /// One weight per path, where weights were given.
    weights: Option<Vec<f64>>,
}

impl Blend {
    /// As Megatron reads it: weights and paths in turn if every other word is a number, else paths.
    fn parse(words: &[String]) -> Self {
        let weights: Option<Vec<f64>> = match words.len() {
            n if n % 2 == 0 => words.iter().step_by(2).map(|w| w.parse().ok()).collect(),
            _ => None,
        };
        let paths: Vec<PathBuf> = match weights {
            Some(_) => words.iter().skip(1).step_by(2).map(PathBuf::from).collect(),
            None => words.iter().map(PathBuf::from).collect(),
        };
        Blend { paths, weights }
    }
}

/// Builds the dataset of one split.
struct Builder<'a> {
    files: &'a [Arc<IndexedDataset>],
    weights: Option<Vec<f64>>,
    split: SplitRanges,
    seq_length: usize,
    seed: u32,
}

impl Builder<'_> {
    /// At least `samples` samples; `None` where the split has no share of the data.
    fn build(
        &self,
        split: Split,
        samples: u64,
    ) -> burn_megatron::Result<Option<Arc<dyn TokenDataset>>> {
        if let [file] = self.files {
            return self.one(file, split, samples);
        }
        // Without weights, each dataset counts for what it holds.
        let sizes = || self.files.iter().map(|file| file.total_tokens() as f64);
        let weights = self.weights.clone().unwrap_or_else(|| sizes().collect());
        let shares = BlendSizes::new(&weights, samples)?;
        let mut datasets = Vec::new();
        for (file, &share) in self.files.iter().zip(&shares.num_samples) {
            match self.one(file, split, share)? {
                Some(dataset) => datasets.push(dataset),
                None => return Ok(None),
            }
        }
        let blended = BlendedDataset::new(datasets, &shares.weights, shares.size)?;
        Ok(Some(Arc::new(blended)))
    }

    fn one(
        &self,
        file: &Arc<IndexedDataset>,
        split: Split,
        samples: u64,
    ) -> burn_megatron::Result<Option<Arc<dyn TokenDataset>>> {
        let Some(range) = self.split.range(split, file.num_sequences()) else {
            return Ok(None);
        };
        let mut config = GptDatasetConfig::new(self.seq_length, self.seed, Some(samples));
        config.index_split = split;
        Ok(Some(Arc::new(GptDataset::new(
            file.clone(),
            range,
            config,
        )?)))
    }
}

fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "jsonl")
}

/// The shuffles' generator is NumPy's, whose seeds are 32-bit.
fn seed(seed: u64) -> Result<u32> {
    let limit = u32::MAX.to_string();
    u32::try_from(seed).map_err(|_| violation("seed must fit 32 bits", &limit).into())
}

fn violation(rule: &str, nearest: &str) -> Error {
    Error::config(vec![Violation {
        rule: rule.into(),
        nearest: vec![nearest.into()],
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> (Vec<PathBuf>, Option<Vec<f64>>) {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let blend = Blend::parse(&words);
        (blend.paths, blend.weights)
    }

    #[test]
    fn weights_and_paths_take_turns() {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(parse(&["a"]), (paths(&["a"]), None));
        assert_eq!(parse(&["a", "b"]), (paths(&["a", "b"]), None));
        let (blended, weights) = parse(&["0.3", "a", "0.7", "b"]);
        assert_eq!(
            (blended, weights),
            (paths(&["a", "b"]), Some(vec![0.3, 0.7]))
        );
        assert_eq!(parse(&["1", "a", "b"]).0.len(), 3);
    }
}
