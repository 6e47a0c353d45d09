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
use burn_megatron::train::MicroBatch;
use std::ops::Range;
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
    /// The training batches of data-parallel rank `share.rank`.
    pub fn train(&self, share: Share) -> Result<Box<dyn BatchSource>> {
        match self {
            RunData::Batches(batches) => Ok(Box::new(Cursor {
                batches: batches.clone(),
                share,
                step: 0,
            })),
            RunData::Corpus(corpus) => corpus.train(share),
        }
    }

    /// The validation batches, where the run evaluates.
    pub fn valid(&self, share: Share) -> Result<Option<Box<dyn BatchSource>>> {
        match self {
            RunData::Batches(_) => Ok(None),
            RunData::Corpus(corpus) => corpus.valid(share),
        }
    }
}

/// Which samples of each global batch a data-parallel rank takes.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// The data-parallel rank.
    pub rank: usize,
    /// The data-parallel size.
    pub ranks: usize,
    pub micro_batch_size: usize,
    pub global_batch_size: usize,
}

impl Share {
    /// Micro batch `i` is the samples `[(i · ranks + rank) · micro, + micro)`: Megatron's order.
    pub fn micro_batches(self) -> impl Iterator<Item = Range<usize>> {
        let micro = self.micro_batch_size;
        let starts = (self.rank * micro..self.global_batch_size).step_by(self.ranks * micro);
        starts.map(move |start| start..start + micro)
    }
}
