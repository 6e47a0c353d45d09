//! Where a rank's micro batches come from: a dataset, or batches given ready made.

mod corpus;
mod reader;
mod token_batches;
mod tokenise;
mod tokenizer;

pub use corpus::Corpus;
pub use token_batches::{Cursor, TokenBatches, Wanted};
pub use tokenizer::build as build_tokenizer;

use burn_megatron::Result;
use burn_megatron::data::SamplerConfig;
use burn_megatron::train::MicroBatch;
use std::sync::Arc;

/// One data-parallel rank's micro batches, step after step.
pub trait BatchSource {
    /// The micro batches of the next step.
    ///
    /// # Errors
    /// There are no more, or they could not be read.
    fn next(&mut self) -> Result<Vec<MicroBatch>>;
}

/// The data of a run, opened once and shared by the ranks.
pub enum RunData {
    Batches(Arc<TokenBatches>),
    Corpus(Corpus),
}

impl RunData {
    /// The training batches of one data-parallel rank, from the step after `iteration` on.
    pub fn train(&self, share: SamplerConfig, iteration: usize) -> Result<Box<dyn BatchSource>> {
        match self {
            RunData::Batches(batches) => {
                let cursor = Cursor::new(batches.clone(), share, iteration)?;
                Ok(Box::new(cursor))
            }
            RunData::Corpus(corpus) => corpus.train(share),
        }
    }

    /// Whether the run evaluates.
    pub fn evaluates(&self) -> bool {
        match self {
            RunData::Batches(_) => false,
            RunData::Corpus(corpus) => corpus.evaluates(),
        }
    }

    /// The validation batches, where the run evaluates.
    pub fn valid(&self, share: SamplerConfig) -> Result<Option<Box<dyn BatchSource>>> {
        match self {
            RunData::Batches(_) => Ok(None),
            RunData::Corpus(corpus) => corpus.valid(share),
        }
    }
}
