//! Parallel layers, and the transformer block built from them.
//!
//! Shapes throughout: `s` sequence, `b` microbatch, `h` hidden, `a` attention heads, `g` query groups,
//! `d` head width, `v` vocabulary, `t` the size of the tensor-parallel group. Activations are `[s, b, h]`.

mod attention;
mod block;
mod column_parallel;
mod embedding;
mod mlp;
mod norm;
mod recompute;
mod rotary;
mod row_parallel;

pub use attention::{SelfAttention, SelfAttentionConfig};
pub use block::{LayerSpec, Sublayer, TransformerBlock, TransformerConfig, TransformerLayer};
pub use column_parallel::{ColumnParallelLinear, ColumnParallelLinearConfig};
pub use embedding::{
    PositionEmbedding, PositionEmbeddingConfig, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig,
};
pub use mlp::{Activation, Mlp, MlpConfig};
pub use norm::{
    LayerNorm, LayerNormConfig, Norm, NormConfig, Normalization, RmsNorm, RmsNormConfig,
};
pub use recompute::{Recompute, RecomputeGranularity, RecomputeMethod};
pub use rotary::{RotaryConfig, RotaryEmbedding};
pub use row_parallel::{RowParallelLinear, RowParallelLinearConfig};

use burn::tensor::Tensor;

/// `x [.., n] + bias [n]`.
pub(crate) fn add_bias<const D: usize>(x: Tensor<D>, bias: Tensor<1>) -> Tensor<D> {
    x + bias.unsqueeze()
}

/// Megatron's default standard deviation of initial weights (`--init-method-std`).
pub const DEFAULT_INIT_STD: f64 = 0.02;
