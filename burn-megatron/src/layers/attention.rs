//! Causal multi-head self-attention, its heads split over the tensor-parallel ranks.

use super::block::{Sublayer, TransformerConfig};
use super::{
    ColumnParallelLinear, ColumnParallelLinearConfig, RowParallelLinear, RowParallelLinearConfig,
};
use crate::autograd::causal_attention;
use crate::shard::ParallelBuilder;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of a [`SelfAttention`].
#[derive(Debug, Clone)]
pub struct SelfAttentionConfig {
    pub hidden_size: usize,
    /// Over all ranks; a multiple of `t`.
    pub num_attention_heads: usize,
    /// Standard deviation of the initial weights of queries, keys and values.
    pub init_std: f64,
    /// Standard deviation of the initial weights of the output projection.
    pub output_init_std: f64,
}

impl From<&TransformerConfig> for SelfAttentionConfig {
    fn from(config: &TransformerConfig) -> Self {
        SelfAttentionConfig {
            hidden_size: config.hidden_size,
            num_attention_heads: config.num_attention_heads,
            init_std: config.init_method_std,
            output_init_std: config.output_init_std(),
        }
    }
}

impl SelfAttentionConfig {
    /// The rank's heads.
    pub fn init(&self, builder: &ParallelBuilder) -> SelfAttention {
        let h = self.hidden_size;
        SelfAttention {
            linear_qkv: ColumnParallelLinearConfig::new(h, 3 * h)
                .with_init_std(self.init_std)
                .init(builder),
            linear_proj: RowParallelLinearConfig::new(h, h)
                .with_init_std(self.output_init_std)
                .init(builder),
            local_heads: self.num_attention_heads / builder.tp().size(),
        }
    }
}

/// `softmax(Q Kᵀ / √d) V`, masked so that a position sees itself and what came before.
///
/// The rows of `linear_qkv` are laid out head by head as `[q | k | v]`, so that a contiguous split
/// of them is a split by heads. Megatron's `transformer/attention.py`, `SelfAttention`.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// `h -> 3 h/t`
    pub linear_qkv: ColumnParallelLinear,
    /// `h/t -> h`
    pub linear_proj: RowParallelLinear,
    #[module(skip)]
    local_heads: usize,
}

impl SelfAttention {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [s, b, _] = x.dims();
        let (qkv, _) = self.linear_qkv.forward(x);
        let heads = b * self.local_heads;
        let d = qkv.dims()[2] / (3 * self.local_heads);
        // [s, b, a/t · 3d] -> [b·a/t, s, 3d]
        let qkv = qkv.reshape([s, heads, 3 * d]).swap_dims(0, 1);
        let part = |i: usize| qkv.clone().slice([0..heads, 0..s, i * d..(i + 1) * d]);
        let scale = 1.0 / (d as f64).sqrt();
        let context = causal_attention(part(0), part(1), part(2), scale);
        // [b·a/t, s, d] -> [s, b, a/t · d]
        let context = context
            .swap_dims(0, 1)
            .reshape([s, b, self.local_heads * d]);
        self.linear_proj.forward(context).0
    }
}

impl Sublayer for SelfAttention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        SelfAttention::forward(self, x)
    }
}
