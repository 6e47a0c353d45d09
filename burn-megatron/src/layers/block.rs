//! Transformer layers, and the stack of them.

use super::{
    Activation, Mlp, MlpConfig, Norm, NormConfig, Normalization, Recompute, RotaryConfig,
    SelfAttention, SelfAttentionConfig,
};
use crate::autograd::{reached, recompute};
use crate::dropout::{DropoutPlace, HiddenDropout, PassContext};
use crate::shard::ParallelBuilder;
use crate::topology::StageLayers;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::Tensor;

/// What the layers of one transformer have in common.
#[derive(Debug, Clone)]
pub struct TransformerConfig {
    pub num_layers: usize,
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    /// Heads of keys and values.
    pub num_query_groups: usize,
    /// Width of a head.
    pub kv_channels: usize,
    pub ffn_hidden_size: usize,
    pub normalization: Normalization,
    pub layernorm_epsilon: f64,
    /// Standard deviation of initial weights.
    pub init_method_std: f64,
    pub activation: Activation,
    /// Whether linear layers have biases.
    pub add_bias_linear: bool,
    /// Rotary positions; none for learned ones, or none at all.
    pub rotary: Option<RotaryConfig>,
    /// Normalise each head's queries and keys.
    pub qk_layernorm: bool,
    /// Part of what attention, MLP and embeddings give that is dropped in training.
    pub hidden_dropout: f64,
    /// Part of the attention's probabilities that is dropped in training.
    pub attention_dropout: f64,
    /// What the backward computes again instead of keeping; nothing where not given.
    pub recompute: Option<Recompute>,
}

impl TransformerConfig {
    /// Megatron's scaled initialisation for what adds to the residual: `std / √(2 L)`.
    pub fn output_init_std(&self) -> f64 {
        self.init_method_std / (2.0 * self.num_layers as f64).sqrt()
    }
}

/// A part of a layer: `[s, b, h] -> [s, b, h]`.
pub trait Sublayer: Module + ModuleDisplay + 'static {
    /// Applies it. `context` says which pass of the run it is, for a layer with dropout of its own.
    fn forward(&self, x: Tensor<3>, context: &PassContext) -> Tensor<3>;

    /// `residual + x`, and itself applied to that. A norm does both in one pass.
    fn forward_added(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        context: &PassContext,
    ) -> (Tensor<3>, Tensor<3>) {
        let sum = residual + x;
        let output = self.forward(sum.clone(), context);
        (sum, output)
    }
}

/// What flows from sublayer to sublayer: the residual, and what is to be added to it where the next norm can do so.
struct Stream {
    residual: Tensor<3>,
    more: Option<Tensor<3>>,
}

impl Stream {
    fn of(residual: Tensor<3>) -> Self {
        Stream {
            residual,
            more: None,
        }
    }

    /// All of it, and its norm.
    fn normalised<N: Sublayer>(self, norm: &N, context: &PassContext) -> (Tensor<3>, Tensor<3>) {
        reached(self.more.as_ref().unwrap_or(&self.residual));
        match self.more {
            Some(more) => norm.forward_added(more, self.residual, context),
            None => (self.residual.clone(), norm.forward(self.residual, context)),
        }
    }

    fn whole(self) -> Tensor<3> {
        match self.more {
            Some(more) => self.residual + more,
            None => self.residual,
        }
    }
}

/// Which modules a layer is built from. Replace a field, and its type, to change every layer.
/// Megatron's layer specs (`models/gpt/gpt_layer_specs.py`).
#[derive(Debug, Clone, Copy)]
pub struct LayerSpec<N, A, M> {
    pub input_layernorm: fn(&TransformerConfig, &ParallelBuilder) -> N,
    pub self_attention: fn(&TransformerConfig, &ParallelBuilder) -> A,
    pub pre_mlp_layernorm: fn(&TransformerConfig, &ParallelBuilder) -> N,
    pub mlp: fn(&TransformerConfig, &ParallelBuilder) -> M,
}

impl LayerSpec<Norm, SelfAttention, Mlp> {
    /// A decoder's layer: norm, causal attention and MLP, each as the configuration says. GPT's and
    /// Llama's are both this.
    pub fn gpt() -> Self {
        let norm = |config: &TransformerConfig, builder: &ParallelBuilder| {
            let config = NormConfig {
                kind: config.normalization,
                hidden_size: config.hidden_size,
                epsilon: config.layernorm_epsilon,
                partial_gradient: false,
            };
            config.init(builder)
        };
        LayerSpec {
            input_layernorm: norm,
            self_attention: |config, builder| SelfAttentionConfig::from(config).init(builder),
            pre_mlp_layernorm: norm,
            mlp: |config, builder| MlpConfig::from(config).init(builder),
        }
    }
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> LayerSpec<N, A, M> {
    /// One layer.
    pub fn layer(
        &self,
        config: &TransformerConfig,
        builder: &ParallelBuilder,
    ) -> TransformerLayer<N, A, M> {
        TransformerLayer {
            input_layernorm: (self.input_layernorm)(config, builder),
            self_attention: (self.self_attention)(config, builder),
            pre_mlp_layernorm: (self.pre_mlp_layernorm)(config, builder),
            mlp: (self.mlp)(config, builder),
            dropout: builder.hidden_dropout(config.hidden_dropout),
        }
    }

    /// The layers of one pipeline stage, with the final norm on the last.
    pub fn block(
        &self,
        config: &TransformerConfig,
        stage: &StageLayers,
        builder: &ParallelBuilder,
    ) -> TransformerBlock<N, A, M> {
        let layer = |i: usize| {
            let here = stage.layers.contains(&i);
            here.then(|| self.layer(config, builder))
        };
        let final_layernorm = || (self.input_layernorm)(config, builder);
        TransformerBlock {
            layers: (0..stage.layers.end).map(layer).collect(),
            final_layernorm: stage.is_last().then(final_layernorm),
            recompute: config.recompute,
        }
    }
}

/// `x + attention(norm(x))`, then `x + mlp(norm(x))`, with dropout on what is added. Megatron's
/// `transformer_layer.py`.
#[derive(Module, Debug)]
pub struct TransformerLayer<N: Module, A: Module, M: Module> {
    pub input_layernorm: N,
    pub self_attention: A,
    pub pre_mlp_layernorm: N,
    pub mlp: M,
    #[module(skip)]
    dropout: HiddenDropout,
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> TransformerLayer<N, A, M> {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, x: Tensor<3>, context: &PassContext) -> Tensor<3> {
        self.pass(Stream::of(x), context).whole()
    }

    fn pass(&self, stream: Stream, context: &PassContext) -> Stream {
        let (x, normal) = stream.normalised(&self.input_layernorm, context);
        let attended = self.self_attention.forward(normal, context);
        let stream = self.add(attended, x, context, DropoutPlace::AttentionOutput);
        let (x, normal) = stream.normalised(&self.pre_mlp_layernorm, context);
        let fed = self.mlp.forward(normal, context);
        self.add(fed, x, context, DropoutPlace::MlpOutput)
    }

    /// Dropout adds what it keeps in its own pass; without it the next norm adds.
    fn add(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        context: &PassContext,
        place: DropoutPlace,
    ) -> Stream {
        match self.dropout.drops(context) {
            true => Stream::of(self.dropout.add(x, residual, context, place)),
            false => Stream {
                residual,
                more: Some(x),
            },
        }
    }
}

/// One pipeline stage's layers one after another, and the norm after the model's last.
#[derive(Module, Debug)]
pub struct TransformerBlock<N: Module, A: Module, M: Module> {
    /// Numbered over the whole model: those of earlier stages are `None`.
    pub layers: Vec<Option<TransformerLayer<N, A, M>>>,
    pub final_layernorm: Option<N>,
    #[module(skip)]
    recompute: Option<Recompute>,
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> TransformerBlock<N, A, M> {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, mut x: Tensor<3>, context: &PassContext) -> Tensor<3> {
        // Layers count from 1.
        let first = 1 + self
            .layers
            .iter()
            .take_while(|layer| layer.is_none())
            .count();
        let here: Vec<_> = self.layers.iter().flatten().collect();
        let groups = self.recompute.map_or(Vec::new(), |r| r.groups(here.len()));
        let mut done = 0;
        for group in groups {
            let layers: Vec<_> = here[group.clone()].iter().copied().cloned().collect();
            let (number, context) = (first + group.start, *context);
            x = recompute(&layers, x, move |layers, x| {
                in_turn(layers, number, Stream::of(x), &context).whole()
            });
            done = group.end;
        }
        let rest = here[done..].iter().copied();
        let stream = in_turn(rest, first + done, Stream::of(x), context);
        match &self.final_layernorm {
            Some(norm) => stream.normalised(norm, context).1,
            None => stream.whole(),
        }
    }
}

/// The layers from the model's `first` on, one after another.
fn in_turn<'a, N: Sublayer, A: Sublayer, M: Sublayer>(
    layers: impl IntoIterator<Item = &'a TransformerLayer<N, A, M>>,
    first: usize,
    stream: Stream,
    context: &PassContext,
) -> Stream {
    let numbered = (first..).zip(layers);
    numbered.fold(stream, |stream, (number, layer)| {
        layer.pass(stream, &context.in_layer(number))
    })
}
