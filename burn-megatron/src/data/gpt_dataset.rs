//! Fixed-length samples of a token stream: Megatron's `GPTDataset`.
//!
//! The sequences of a split, repeated for as many epochs as the samples asked for need, are
//! shuffled and read as one stream; sample `k` is its tokens `[k·s, k·s + s]`, `s` the sequence
//! length: neighbours share a token, which is the last label of one and the first input of the
//! other. Then the samples are shuffled. As in Megatron it is *sequences* that are split and
//! shuffled, which are the documents in all data with one sequence per document.
//!
//! Semantics of `megatron/core/datasets/gpt_dataset.py` and of `build_sample_idx` in `helpers.cpp`.

mod index;
mod sample;

use std::ops::Range;
use std::sync::Arc;

use index::{EpochPlan, Indices};
pub use sample::Sample;

use super::indexed::IndexedDataset;
use super::split::Split;
use crate::{Error, Result, Violation};

/// What [`GptDataset::sample`] pads and masks with where the tokenizer has no pad token.
const NO_PAD_TOKEN: i64 = -1;
/// As long as a sequence can be in an index.
const MAX_SEQ_LENGTH: usize = i32::MAX as usize;

/// Anything that gives samples by number; ranks share it.
pub trait TokenDataset: Send + Sync {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sample `i`.
    ///
    /// # Errors
    /// If `i` is past the end.
    fn sample(&self, i: usize) -> Result<Sample>;
}

/// How [`GptDataset`] cuts its samples; the names are Megatron's.
#[derive(Debug, Clone)]
pub struct GptDatasetConfig {
    /// Tokens per sample, `s`.
    pub seq_length: usize,
    /// Seed of the two shuffles.
    pub seed: u32,
    /// Samples needed; the dataset has at least as many. `None`: what one epoch gives.
    pub num_samples: Option<u64>,
    /// The split these samples are for.
    pub index_split: Split,
    /// Leave out a last validation sample that is not full; otherwise it is padded.
    pub drop_last_partial_validation_sequence: bool,
    /// Read `s + 1` tokens, so that the last label is a token of the text.
    pub add_extra_token_to_sequence: bool,
    /// Positions start again at 0 after an end-of-document token.
    pub reset_position_ids: bool,
    /// No loss where the input is an end-of-document token.
    pub eod_mask_loss: bool,
    /// The end-of-document token; needed by the two options above.
    pub eod_token: Option<i64>,
    /// The pad token. If there is none, or it is also the end-of-document token (whose loss must
    /// not vanish), -1 stands for it.
    pub pad_token: Option<i64>,
}

impl GptDatasetConfig {
    /// Megatron's defaults, for the training split.
    pub fn new(seq_length: usize, seed: u32, num_samples: Option<u64>) -> Self {
        Self {
            seq_length,
            seed,
            num_samples,
            index_split: Split::Train,
            drop_last_partial_validation_sequence: true,
            add_extra_token_to_sequence: true,
            reset_position_ids: false,
            eod_mask_loss: false,
            eod_token: None,
            pad_token: None,
        }
    }

    fn validate(&self) -> Result<()> {
        let mut violations = Vec::new();
        if self.seq_length == 0 || self.seq_length > MAX_SEQ_LENGTH {
            let rule = format!(
                "seq_length {} must be 1 to {MAX_SEQ_LENGTH}",
                self.seq_length
            );
            let nearest = self.seq_length.clamp(1, MAX_SEQ_LENGTH).to_string();
            violations.push(Violation {
                rule,
                nearest: vec![nearest],
            });
        }
        for (name, on) in [
            ("reset_position_ids", self.reset_position_ids),
            ("eod_mask_loss", self.eod_mask_loss),
        ] {
            if on && self.eod_token.is_none() {
                violations.push(Violation {
                    rule: format!("{name} needs a tokenizer with an end-of-document token"),
                    nearest: vec![format!("{name} = false")],
                });
            }
        }
        if violations.is_empty() {
            Ok(())
        } else {
            Err(Error::config(violations))
        }
    }

    fn extra(&self) -> usize {
        usize::from(self.add_extra_token_to_sequence)
    }

    fn pad(&self) -> i64 {
        self.pad_token
            .filter(|pad| Some(*pad) != self.eod_token)
            .unwrap_or(NO_PAD_TOKEN)
    }

    fn drop_last(&self) -> bool {
        self.index_split != Split::Valid || self.drop_last_partial_validation_sequence
    }
}

/// The samples of one split of one [`IndexedDataset`].
///
/// Memory: 12 bytes per sample and 4 per sequence and epoch, beside the shared file maps.
pub struct GptDataset {
    data: Arc<IndexedDataset>,
    config: GptDatasetConfig,
    num_epochs: u64,
    indices: Indices,
}

impl GptDataset {
    /// Plans the samples of the sequences `range` of `data` (see
    /// [`SplitRanges::range`](super::SplitRanges::range)).
    ///
    /// # Errors
    /// A broken config; a range outside the dataset; a split with too few tokens for one sample
    /// (where Megatron loops for ever, Megatron-LM #957); more than 2^32 - 2 samples.
    pub fn new(
        data: Arc<IndexedDataset>,
        range: Range<usize>,
        config: GptDatasetConfig,
    ) -> Result<Self> {
        config.validate()?;
        let fail = |reason: String| Error::data(data.path(), None, reason);
        if range.end > data.num_sequences() {
            return Err(fail(format!(
                "sequences {range:?} were asked for, the dataset has {}",
                data.num_sequences()
            )));
        }
        let tokens_per_epoch: u64 = range.clone().map(|i| data.sequence_length(i) as u64).sum();
        let plan = EpochPlan::new(
            tokens_per_epoch,
            config.seq_length as u64,
            config.extra() as u64,
            config.num_samples,
            config.drop_last(),
        )
        .map_err(|reason| {
            let split = format!("{:?}", config.index_split).to_lowercase();
            fail(format!(
                "the {split} split is too small: its {} sequences ({range:?} of {}) have \
                 {reason}; use more data, a larger share of --split, or a shorter seq_length",
                range.len(),
                data.num_sequences(),
            ))
        })?;
        let indices = Indices::build(&plan, range, config.seed, |i| data.sequence_length(i))
            .map_err(|reason| fail(format!("{reason}; use fewer samples")))?;
        Ok(Self {
            num_epochs: plan.num_epochs,
            data,
            config,
            indices,
        })
    }

    /// How often the split is read to make these samples.
    pub fn num_epochs(&self) -> u64 {
        self.num_epochs
    }

    /// The raw tokens of sample `i`: `s + 1` of them (`s` without the extra token), padded.
    ///
    /// # Errors
    /// If `i` is past the end.
    pub fn text(&self, i: usize) -> Result<Vec<i64>> {
        let Some(parts) = self.indices.parts(i) else {
            let reason = format!("sample {i} was asked for, there are {}", self.len());
            return Err(Error::data(self.data.path(), None, reason));
        };
        let extra = self.config.extra();
        let tokens = self.config.seq_length + extra;
        let mut text = Vec::with_capacity(tokens);
        let (first, last) = (parts.first, parts.last);
        for position in first.position..=last.position {
            let sequence = self.indices.document_index[position as usize] as usize;
            let begin = if position == first.position {
                first.offset as usize
            } else {
                0
            };
            let end = if position == last.position {
                last.offset as usize + extra
            } else {
                self.data.sequence_length(sequence)
            };
            self.data.get(sequence, begin, end - begin, &mut text)?;
        }
        text.resize(tokens, self.config.pad());
        Ok(text)
    }
}

impl TokenDataset for GptDataset {
    fn len(&self) -> usize {
        self.indices.shuffle_index.len()
    }

    fn sample(&self, i: usize) -> Result<Sample> {
        Ok(Sample::new(self.text(i)?, &self.config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{self, Tensors};

    fn open(name: &str) -> Arc<IndexedDataset> {
        let path = fixtures::path(&format!("data/{name}"));
        Arc::new(IndexedDataset::open(path).unwrap())
    }

    fn rows<T: Clone>(values: &[T], width: usize) -> Vec<Vec<T>> {
        values.chunks(width).map(<[T]>::to_vec).collect()
    }

    #[test]
    fn every_case_is_megatrons() {
        let cases = fixtures::json("data/gptdataset_cases.json");
        for (name, case) in cases.as_object().unwrap() {
            let int = |key: &str| case[key].as_u64().unwrap() as usize;
            let mut config = GptDatasetConfig::new(
                int("seq_length"),
                int("seed") as u32,
                case["num_samples"].as_u64(),
            );
            config.reset_position_ids = case["reset_position_ids"].as_bool().unwrap();
            config.eod_mask_loss = case["eod_mask_loss"].as_bool().unwrap();
            config.eod_token = Some(50256);
            config.add_extra_token_to_sequence = name != "noextra";
            if name.contains("valid") {
                config.index_split = Split::Valid;
                config.drop_last_partial_validation_sequence = name != "valid_keep_partial";
            }
            let data = open(case["dataset"].as_str().unwrap());
            let split = case["index_split"].as_str().unwrap();
            let split = Split::ALL[["train", "valid", "test"]
                .iter()
                .position(|s| *s == split)
                .unwrap()];
            let ranges = crate::data::SplitRanges::parse(case["split"].as_str().unwrap()).unwrap();
            let range = ranges.range(split, data.num_sequences()).unwrap();
            assert_eq!(range.len(), int("n_indices"), "{name}");
            assert_eq!(range.start, case["indices"][0].as_u64().unwrap() as usize);

            let width = config.seq_length;
            let extra = config.extra();
            let dataset = GptDataset::new(data, range, config).unwrap();
            assert_eq!(dataset.len(), int("len"), "{name}");
            assert_eq!(dataset.num_epochs(), int("num_epochs") as u64, "{name}");
            let expected = Tensors::read(&format!("data/gptdataset_{name}.safetensors"));
            let indices = &dataset.indices;
            let documents: Vec<i64> = indices.document_index.iter().map(|d| (*d).into()).collect();
            assert_eq!(documents, expected.ints("document_index").0, "{name}");
            let samples: Vec<i64> = indices
                .sample_index
                .iter()
                .flat_map(|s| [s.position.into(), s.offset.into()])
                .collect();
            assert_eq!(samples, expected.ints("sample_index").0, "{name}");
            let shuffle: Vec<i64> = indices.shuffle_index.iter().map(|s| (*s).into()).collect();
            assert_eq!(shuffle, expected.ints("shuffle_index").0, "{name}");

            let int_rows = |key: &str, width| rows(&expected.ints(key).0, width);
            let text = int_rows("text", width + extra);
            let (tokens, labels) = (int_rows("tokens", width), int_rows("labels", width));
            let positions = int_rows("position_ids", width);
            let masks = rows(&expected.floats("loss_mask"), width);
            for i in 0..text.len() {
                let sample = dataset.sample(i).unwrap();
                assert_eq!(dataset.text(i).unwrap(), text[i], "{name} {i}");
                assert_eq!(sample.tokens, tokens[i], "{name} {i}");
                assert_eq!(sample.labels, labels[i], "{name} {i}");
                assert_eq!(sample.loss_mask, masks[i], "{name} {i}");
                assert_eq!(sample.position_ids, positions[i], "{name} {i}");
            }
            for i in 0..dataset.len() {
                assert_eq!(dataset.text(i).unwrap().len(), width + extra);
            }
            assert!(dataset.sample(dataset.len()).is_err());
        }
    }

    /// Megatron-LM #957: a split with too few tokens sent the epoch count into an endless loop.
    #[test]
    fn a_tiny_split_is_an_error_at_once() {
        let data = open("small_text_document");
        for range in [5..5, 1..2, 11..12] {
            for num_samples in [None, Some(1), Some(1 << 40)] {
                let config = GptDatasetConfig::new(64, 1, num_samples);
                let error = GptDataset::new(data.clone(), range.clone(), config)
                    .err()
                    .unwrap();
                let error = error.to_string();
                assert!(error.contains("the train split is too small"), "{error}");
                assert!(error.contains("small_text_document.bin"), "{error}");
            }
        }
        let config = GptDatasetConfig::new(64, 1, Some(u64::MAX / 128));
        let error = GptDataset::new(data.clone(), 0..80, config).err().unwrap();
        assert!(error.to_string().contains("use fewer samples"), "{error}");
        let config = GptDatasetConfig::new(64, 1, Some(u64::MAX));
        assert!(GptDataset::new(data, 0..80, config).is_err());
    }

    #[test]
    fn a_broken_config_lists_every_violation() {
        let mut config = GptDatasetConfig::new(0, 1, None);
        config.reset_position_ids = true;
        config.eod_mask_loss = true;
        let error = GptDataset::new(open("multi"), 0..9, config).err().unwrap();
        let error = error.to_string();
        for part in ["seq_length", "reset_position_ids", "eod_mask_loss"] {
            assert!(error.contains(part), "{error}");
        }
        let config = GptDatasetConfig::new(8, 1, None);
        assert!(GptDataset::new(open("multi"), 0..134, config).is_err());
    }

    #[test]
    fn a_pad_token_that_is_also_eod_is_not_used() {
        let mut config = GptDatasetConfig::new(8, 1, None);
        config.eod_token = Some(7);
        assert_eq!(config.pad(), -1);
        config.pad_token = Some(7);
        assert_eq!(config.pad(), -1);
        config.pad_token = Some(3);
        assert_eq!(config.pad(), 3);
    }
}
