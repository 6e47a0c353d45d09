//! Embeddings: tokens, split by vocabulary; positions, learned and replicated.

use super::DEFAULT_INIT_STD;
use crate::Kernels;
use crate::autograd::{
    VocabShard, embedding_rows, reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
};
use crate::shard::{Init, ParallelBuilder, ParamSpec};
use crate::topology::shard_range;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Int, Tensor};

/// Configuration of a [`VocabParallelEmbedding`].
#[derive(Config, Debug)]
pub struct VocabParallelEmbeddingConfig {
    /// Entries that mean something.
    pub vocab_size: usize,
    /// Entries with padding, over all ranks; a multiple of `t`.
    pub padded_vocab_size: usize,
    pub hidden_size: usize,
    /// Standard deviation of the initial weights.
    #[config(default = "DEFAULT_INIT_STD")]
    pub init_std: f64,
    /// Whether the last pipeline stage holds a copy as its output layer, where it is not the first
    /// as well.
    #[config(default = "false")]
    pub tied_over_stages: bool,
}

impl VocabParallelEmbeddingConfig {
    /// The rank's part of the table.
    ///
    /// # Panics
    /// If `padded_vocab_size` is not a multiple of `t`.
    pub fn init(&self, builder: &ParallelBuilder) -> VocabParallelEmbedding {
        let tp = builder.tp();
        let init = Init::Normal { std: self.init_std };
        let spec = builder.split([self.padded_vocab_size, self.hidden_size], 0, init);
        let spec = spec.with_unpadded_rows(Some(self.vocab_size));
        let spec = match self.tied_over_stages {
            true => spec.tied_over_stages(),
            false => spec,
        };
        VocabParallelEmbedding {
            weight: builder.param(spec),
            shard: VocabShard::new(self.vocab_size, self.padded_vocab_size, tp),
            sequence_parallel: builder.sequence_parallel(),
            kernels: builder.kernels(),
        }
    }
}

/// A token table whose rows are split over the ranks: each looks up the tokens it owns, zeros
/// stand for the rest, and the sum over the ranks is the embedding. Megatron's
/// `tensor_parallel/layers.py`, `VocabParallelEmbedding`.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// `[padded v/t, h]`
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    shard: VocabShard,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    kernels: Kernels,
}

impl VocabParallelEmbedding {
    /// This rank's part of the vocabulary, for a loss over logits that are split in the same way.
    pub fn vocab_shard(&self) -> VocabShard {
        self.shard.clone()
    }

    /// # Shapes
    /// - tokens: `[n]`, global ids, the same on every rank
    /// - output: `[n, h]`, the same on every rank; under sequence parallelism the rank's part of the
    ///   rows, `[n/t, h]`
    pub fn forward(&self, tokens: Tensor<1, Int>) -> Tensor<2> {
        if self.shard.tp.size() == 1 {
            return embedding_rows(self.weight.val(), tokens, self.kernels);
        }
        let rows = &self.shard.rows;
        let (start, len) = (rows.start as i64, rows.len() as i64);
        let local = tokens - start;
        let elsewhere = local
            .clone()
            .lower_elem(0)
            .bool_or(local.clone().greater_equal_elem(len));
        let rows = embedding_rows(self.weight.val(), local.clamp(0, len - 1), self.kernels);
        let owned = elsewhere
            .bool_not()
            .float()
            .cast(FloatDType::from(rows.dtype()));
        let owned = owned.unsqueeze_dim(1);
        // Without autodiff as it is, the mask is a constant of the product.
        let partial = rows * owned;
        match self.sequence_parallel {
            true => reduce_scatter_to_sequence_parallel_region(partial, &self.shard.tp),
            false => reduce_from_tensor_parallel_region(partial, &self.shard.tp),
        }
    }
}

/// Configuration of a [`PositionEmbedding`].
#[derive(Config, Debug)]
pub struct PositionEmbeddingConfig {
    pub max_position_embeddings: usize,
    pub hidden_size: usize,
    /// Standard deviation of the initial weights.
    #[config(default = "DEFAULT_INIT_STD")]
    pub init_std: f64,
}

impl PositionEmbeddingConfig {
    /// The table, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> PositionEmbedding {
        let shape = [self.max_position_embeddings, self.hidden_size];
        let init = Init::Normal { std: self.init_std };
        let (part, parts) = builder.sequence_part();
        PositionEmbedding {
            weight: builder.param(ParamSpec::replicated(shape, init)),
            part,
            parts,
        }
    }
}

/// Learned absolute positions.
#[derive(Module, Debug)]
pub struct PositionEmbedding {
    /// `[max positions, h]`
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    part: usize,
    #[module(skip)]
    parts: usize,
}

impl PositionEmbedding {
    /// The first `s` positions as `[s, 1, h]`, to be added to `[s, b, h]`; under sequence parallelism
    /// the rank's part of them, `[s/t, 1, h]`.
    pub fn forward(&self, s: usize) -> Tensor<3> {
        let h = self.weight.dims()[1];
        let here = shard_range(s, self.parts, self.part);
        self.weight.val().slice([here, 0..h]).unsqueeze_dim(1)
    }
}
