//! Causal multi-head self-attention, its heads split over the tensor-parallel ranks.

use super::Recompute;
use super::block::{Sublayer, TransformerConfig};
use super::{
    ColumnParallelLinear, ColumnParallelLinearConfig, Norm, NormConfig, Normalization,
    RotaryConfig, RotaryEmbedding, RowParallelLinear, RowParallelLinearConfig,
};
use crate::Kernels;
use crate::autograd::{AttentionOptions, Heads, causal_attention};
use crate::dropout::{AttentionHeads, PassContext, attention_dropout};
use crate::shard::ParallelBuilder;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of a [`SelfAttention`].
#[derive(Debug, Clone)]
pub struct SelfAttentionConfig {
    pub hidden_size: usize,
    /// Over all ranks; a multiple of the query groups.
    pub num_attention_heads: usize,
    /// Heads of keys and values over all ranks, each serving as many heads of queries; a multiple of
    /// `t`.
    pub num_query_groups: usize,
    /// Width of a head.
    pub kv_channels: usize,
    pub bias: bool,
    pub rotary: Option<RotaryConfig>,
    /// Normalise each head's queries and keys.
    pub qk_layernorm: Option<Normalization>,
    pub layernorm_epsilon: f64,
    /// Part of the probabilities that is dropped in training.
    pub attention_dropout: f64,
    /// Make the probabilities again in the backward instead of keeping them.
    pub recompute: bool,
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
            num_query_groups: config.num_query_groups,
            kv_channels: config.kv_channels,
            bias: config.add_bias_linear,
            rotary: config.rotary,
            qk_layernorm: config.qk_layernorm.then_some(config.normalization),
            layernorm_epsilon: config.layernorm_epsilon,
            attention_dropout: config.attention_dropout,
            recompute: config.recompute == Some(Recompute::Selective),
            init_std: config.init_method_std,
            output_init_std: config.output_init_std(),
        }
    }
}

impl SelfAttentionConfig {
    /// The rank's heads.
    pub fn init(&self, builder: &ParallelBuilder) -> SelfAttention {
        let (h, d) = (self.hidden_size, self.kv_channels);
        let (heads, groups) = (self.num_attention_heads, self.num_query_groups);
        let local_groups = groups / builder.tp().size();
        let norm = || {
            let config = |kind| NormConfig {
                kind,
                hidden_size: d,
                epsilon: self.layernorm_epsilon,
                // Each rank has heads of its own.
                partial_gradient: true,
            };
            self.qk_layernorm.map(|kind| config(kind).init(builder))
        };
        SelfAttention {
            linear_qkv: ColumnParallelLinearConfig::new(h, (heads + 2 * groups) * d)
                .with_bias(self.bias)
                .with_init_std(self.init_std)
                .init(builder),
            linear_proj: RowParallelLinearConfig::new(heads * d, h)
                .with_bias(self.bias)
                .with_init_std(self.output_init_std)
                .init(builder),
            q_layernorm: norm(),
            k_layernorm: norm(),
            heads: AttentionHeads {
                groups: local_groups,
                first_group: builder.tp().rank() * local_groups,
                queries_per_group: heads / groups,
                num_attention_heads: heads,
            },
            dropout: self.attention_dropout,
            recompute: self.recompute,
            head_width: d,
            rotary: self.rotary.map(|config| config.init(d)),
            kernels: builder.kernels(),
        }
    }
}

/// `softmax(Q Kᵀ / √d) V`, masked so that a position sees itself and what came before.
///
/// The rows of `linear_qkv` are laid out query group by query group as `[q heads | k | v]`, so that a
/// contiguous split of them is a split by groups. Megatron's `transformer/attention.py`,
/// `SelfAttention`.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// `h -> (a + 2 g) d/t`
    pub linear_qkv: ColumnParallelLinear,
    /// `a d/t -> h`
    pub linear_proj: RowParallelLinear,
    /// Over the features of each head of queries.
    pub q_layernorm: Option<Norm>,
    /// Over the features of each head of keys.
    pub k_layernorm: Option<Norm>,
    #[module(skip)]
    heads: AttentionHeads,
    #[module(skip)]
    dropout: f64,
    #[module(skip)]
    recompute: bool,
    #[module(skip)]
    head_width: usize,
    #[module(skip)]
    rotary: Option<RotaryEmbedding>,
    #[module(skip)]
    kernels: Kernels,
}

impl SelfAttention {
    /// `[s, b, h] -> [s, b, h]`, with `s/t` for `s` under sequence parallelism
    pub fn forward(&self, x: Tensor<3>, context: &PassContext) -> Tensor<3> {
        let (qkv, _) = self.linear_qkv.forward(x);
        let [s, b, _] = qkv.dims();
        let (groups, r, d) = (
            b * self.heads.groups,
            self.heads.queries_per_group,
            self.head_width,
        );
        let qkv = self.normalised(qkv.reshape([s, groups, (r + 2) * d]));
        let heads = Heads {
            width: d,
            turned: r + 1,
        };
        let qkv = match &self.rotary {
            Some(rotary) => rotary.forward(qkv, heads, self.kernels),
            None => qkv,
        };
        let options = AttentionOptions {
            queries_per_group: r,
            head_width: d,
            scale: 1.0 / (d as f64).sqrt(),
            dropout: attention_dropout(self.dropout, self.heads, context),
            recompute: self.recompute,
        };
        let context = causal_attention(qkv, options, self.kernels);
        // [s, b·g/t, r·d] is [s, b, a/t · d]
        let context = context.reshape([s, b, self.heads.groups * r * d]);
        self.linear_proj.forward(context).0
    }

    /// Queries and keys of `[s, groups, (r + 2) d]` normalised, head by head, where the model asks for it.
    fn normalised(&self, qkv: Tensor<3>) -> Tensor<3> {
        let (Some(of_queries), Some(of_keys)) = (&self.q_layernorm, &self.k_layernorm) else {
            return qkv;
        };
        let ([s, groups, width], d) = (qkv.dims(), self.head_width);
        let part = |from: usize, to: usize| {
            let part = qkv.clone().slice([0..s, 0..groups, from..to]);
            part.reshape([s, groups * (to - from) / d, d])
        };
        let (keys, values) = (width - 2 * d, width - d);
        let parts = [
            of_queries.forward(part(0, keys)),
            of_keys.forward(part(keys, values)),
            part(values, width),
        ];
        let parts = parts.map(|part| {
            let [_, heads, _] = part.dims();
            part.reshape([s, groups, heads / groups * d])
        });
        Tensor::cat(parts.into(), 2)
    }
}

impl Sublayer for SelfAttention {
    fn forward(&self, x: Tensor<3>, context: &PassContext) -> Tensor<3> {
        SelfAttention::forward(self, x, context)
    }
}
