//! Data, from text to the samples of one training step, in Megatron-LM's formats.
//!
//! ```text
//! corpus.jsonl --preprocess--> P_text_document.{bin,idx}     (offline, feature `preprocess`)
//!                                    |
//!                              IndexedDataset                 memory-mapped token sequences
//!                                    |  SplitRanges           "969,30,1": train / valid / test
//!                               GptDataset                    fixed-length samples, shuffled
//!                                    |  BlendedDataset        several corpora, weighted
//!                                 Sampler                     which samples this rank takes
//!                                    |
//!                                Prefetch                     batches ready before they are asked for
//! ```
//!
//! Every index and every shuffle is bit for bit Megatron's, so a corpus prepared for it trains here
//! on the same samples in the same order. Indices are rebuilt at start (seconds) and never cached on
//! disk: a stale or half-written cache shared by ranks is not something that can happen.

pub mod blended;
pub mod gpt_dataset;
pub mod indexed;
pub mod numpy_random;
pub mod prefetch;
pub mod sampler;
pub mod split;

#[cfg(feature = "preprocess")]
pub mod preprocess;
#[cfg(feature = "preprocess")]
pub mod tokenizer;

pub use blended::{BlendSizes, BlendedDataset};
pub use gpt_dataset::{GptDataset, GptDatasetConfig, Sample, TokenDataset};
pub use indexed::{DType, IndexedDataset, IndexedDatasetWriter};
pub use prefetch::Prefetch;
pub use sampler::{Sampler, SamplerConfig, SamplerPosition};
pub use split::{Split, SplitRanges};

#[cfg(feature = "preprocess")]
pub use preprocess::{PreprocessConfig, Progress, Report, preprocess};
#[cfg(feature = "preprocess")]
pub use tokenizer::{Encoder, Tokenizer, TokenizerConfig};

#[cfg(test)]
mod fixtures;
