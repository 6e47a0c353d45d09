//! What the fused output layer and cross entropy of a vocabulary shard need, and give. Who holds the other
//! shards, the caller knows.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use std::fmt;

/// How values of all shards are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    Max,
}

/// Joins values with the other shards'.
pub type Join<'a> = dyn Fn(&mut [f32], Reduce) + 'a;

/// One shard's view of a batch of `n` tokens.
pub struct HeadShard<'a> {
    /// Each token's target: a row of this shard's weight, or none where another shard has it.
    pub targets: &'a [Option<usize>],
    /// Rows of the weight that are entries of the vocabulary: the rest is padding.
    pub known: usize,
    /// What each token's loss is multiplied by in the end: its gradient.
    pub d_losses: &'a [f32],
    /// Logits exist for so many tokens at a time; the same on all shards.
    pub tokens_at_once: usize,
    /// Joins values with the other shards', if there are any.
    pub reduce: Option<&'a Join<'a>>,
}

impl HeadShard<'_> {
    pub(crate) fn reduce(&self, values: &mut [f32], how: Reduce) {
        if let Some(reduce) = self.reduce {
            reduce(values, how);
        }
    }
}

impl fmt::Debug for HeadShard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeadShard({} tokens)", self.targets.len())
    }
}

/// The losses `[n]`; and with `d_losses` as their gradients, this shard's part of the hidden states' `[n, h]` and
/// the weight's `[v, h]`.
#[derive(Debug)]
pub struct HeadLoss<B: Backend> {
    pub losses: FloatTensor<B>,
    pub gradients: Option<(FloatTensor<B>, FloatTensor<B>)>,
}
