//! GPT: embeddings, a stack of transformer layers, and an output layer over the vocabulary.

mod config;

pub use config::{GptConfig, PositionEmbeddingType};

use super::{Stage, StageInput};
use crate::Kernels;
use crate::autograd::{
    VocabShard, copy_to_tensor_parallel_region, gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region, gathered_linear, head_loss, linear,
    vocab_parallel_cross_entropy,
};
use crate::dropout::{DropoutPlace, HiddenDropout, PassContext};
use crate::layers::{
    ColumnParallelLinear, ColumnParallelLinearConfig, LayerSpec, Mlp, Norm, Normalization,
    PositionEmbedding, PositionEmbeddingConfig, SelfAttention, Sublayer, TransformerBlock,
    TransformerConfig, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
};
use crate::shard::ParallelBuilder;
use crate::topology::StageLayers;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

/// Everything that fixes a GPT's parameters.
#[derive(Debug, Clone)]
pub struct GptModelConfig {
    pub transformer: TransformerConfig,
    /// Entries of the vocabulary, without padding.
    pub vocab_size: usize,
    /// With padding; a multiple of tp.
    pub padded_vocab_size: usize,
    pub max_position_embeddings: usize,
    pub position_embedding_type: PositionEmbeddingType,
    pub untie_embeddings_and_output_weights: bool,
}

impl GptModelConfig {
    /// A rank's part of the model on one pipeline stage, from GPT's own layers.
    pub fn init(&self, builder: &ParallelBuilder) -> GptModel {
        let whole = StageLayers::whole(self.transformer.num_layers);
        self.init_stage(&LayerSpec::gpt(), &whole, builder)
    }

    /// A rank's part of one pipeline stage, from the layers of `spec`. What belongs to another stage
    /// is not made: the embedding is on the first, the final norm and the output layer are on the
    /// last, where a tied output layer is a copy of the word embeddings.
    pub fn init_stage<N: Sublayer, A: Sublayer, M: Sublayer>(
        &self,
        spec: &LayerSpec<N, A, M>,
        stage: &StageLayers,
        builder: &ParallelBuilder,
    ) -> GptModel<N, A, M> {
        let h = self.transformer.hidden_size;
        let init_std = self.transformer.init_method_std;
        let tied = !self.untie_embeddings_and_output_weights;
        let words = VocabParallelEmbeddingConfig::new(self.vocab_size, self.padded_vocab_size, h)
            .with_init_std(init_std)
            .with_tied_over_stages(tied && stage.num_stages > 1);
        let positions =
            PositionEmbeddingConfig::new(self.max_position_embeddings, h).with_init_std(init_std);
        let embedding = || GptEmbedding {
            word_embeddings: words.init(builder),
            position_embeddings: (stage.is_first() && self.learns_positions())
                .then(|| positions.init(builder)),
        };
        let output_layer = || {
            ColumnParallelLinearConfig::new(h, self.padded_vocab_size)
                .with_bias(false)
                .with_init_std(init_std)
                .with_unpadded_rows(Some(self.vocab_size))
                .init(builder)
        };
        GptModel {
            embedding: (stage.is_first() || tied && stage.is_last()).then(embedding),
            decoder: spec.block(&self.transformer, stage, builder),
            output_layer: (!tied && stage.is_last()).then(output_layer),
            vocab: VocabShard::new(self.vocab_size, self.padded_vocab_size, builder.tp()),
            sequence_parallel: builder.sequence_parallel(),
            kernels: builder.kernels(),
            dropout: builder.hidden_dropout(self.transformer.hidden_dropout),
            hidden_size: h,
            max_position_embeddings: self.max_position_embeddings,
        }
    }

    /// Parameters of the whole model, vocabulary padding included, for GPT's own layers.
    pub fn num_parameters(&self) -> usize {
        self.stage_parameters(&StageLayers::whole(self.transformer.num_layers), 1)
    }

    fn learns_positions(&self) -> bool {
        self.position_embedding_type == PositionEmbeddingType::LearnedAbsolute
    }

    /// Parameters of one pipeline stage on one of `tp` ranks.
    pub fn stage_parameters(&self, stage: &StageLayers, tp: usize) -> usize {
        let config = &self.transformer;
        let (h, d) = (config.hidden_size, config.kv_channels);
        let layers = stage.layers.len();
        let (first, last) = (usize::from(stage.is_first()), usize::from(stage.is_last()));
        let bias = usize::from(config.add_bias_linear);
        let tables = match self.untie_embeddings_and_output_weights {
            true => first + last,
            false => first.max(last),
        };
        let qkv = (config.num_attention_heads + 2 * config.num_query_groups) * d;
        let fc1 = config.activation.inputs() * config.ffn_hidden_size;
        // Weights and biases of QKV and fc1; weights of the attention's output and of fc2.
        let split_per_layer = (h + bias) * (qkv + fc1)
            + h * (config.num_attention_heads * d + config.ffn_hidden_size);
        let split = tables * self.padded_vocab_size * h + layers * split_per_layer;
        split / tp + self.replicated_parameters(stage)
    }

    /// Those of one stage that every tensor-parallel rank has whole: norms, positions, and the biases of
    /// the row-parallel layers.
    pub(crate) fn replicated_parameters(&self, stage: &StageLayers) -> usize {
        let config = &self.transformer;
        let h = config.hidden_size;
        let (first, last) = (usize::from(stage.is_first()), usize::from(stage.is_last()));
        let norm = self.norm_parameters(h);
        let biases = usize::from(config.add_bias_linear) * 2 * h;
        let per_layer = 2 * norm + biases + self.head_norm_parameters();
        let positions = usize::from(self.learns_positions()) * self.max_position_embeddings * h;
        stage.layers.len() * per_layer + first * positions + last * norm
    }

    /// Those of one layer that normalise its queries and keys.
    pub(crate) fn head_norm_parameters(&self) -> usize {
        let config = &self.transformer;
        usize::from(config.qk_layernorm) * 2 * self.norm_parameters(config.kv_channels)
    }

    fn norm_parameters(&self, width: usize) -> usize {
        match self.transformer.normalization {
            Normalization::LayerNorm => 2 * width,
            Normalization::RmsNorm => width,
        }
    }
}

/// Word and position embeddings.
#[derive(Module, Debug)]
pub struct GptEmbedding {
    pub word_embeddings: VocabParallelEmbedding,
    /// On the first stage alone.
    pub position_embeddings: Option<PositionEmbedding>,
}

impl GptEmbedding {
    /// `tokens [b, s] -> [s, b, h]`, or `[s/t, b, h]` under sequence parallelism
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [b, s] = tokens.dims();
        let words = self
            .word_embeddings
            .forward(tokens.transpose().reshape([s * b]));
        let [n, h] = words.dims();
        let words = words.reshape([n / b, b, h]);
        match &self.position_embeddings {
            Some(positions) => words + positions.forward(s),
            None => words,
        }
    }
}

/// A rank's part of one pipeline stage of a GPT. The module tree's paths are Megatron-Core's parameter
/// names, numbered over the whole model.
#[derive(Module, Debug)]
pub struct GptModel<N: Module = Norm, A: Module = SelfAttention, M: Module = Mlp> {
    /// On the first stage, and where the output layer is tied to it on the last.
    pub embedding: Option<GptEmbedding>,
    pub decoder: TransformerBlock<N, A, M>,
    /// On the last stage, unless the word embeddings serve (tied).
    pub output_layer: Option<ColumnParallelLinear>,
    #[module(skip)]
    vocab: VocabShard,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    kernels: Kernels,
    #[module(skip)]
    dropout: HiddenDropout,
    #[module(skip)]
    hidden_size: usize,
    #[module(skip)]
    max_position_embeddings: usize,
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> GptModel<N, A, M> {
    /// The most tokens that it sees at once.
    pub fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    /// On the last stage: `hidden [s, b, h] ->` this rank's logits `[s, b, v/t]`; under sequence
    /// parallelism from `[s/t, b, h]`.
    ///
    /// # Panics
    /// On a stage without an output layer.
    pub fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        match (&self.output_layer, &self.embedding) {
            (Some(layer), _) => layer.forward(hidden).0,
            (None, Some(tied)) => {
                let (weight, tp) = (tied.word_embeddings.weight.val(), &self.vocab.tp);
                match self.sequence_parallel {
                    true => gathered_linear(hidden, weight, None, tp, self.kernels),
                    false => {
                        let hidden = copy_to_tensor_parallel_region(hidden, tp);
                        linear(hidden, weight, None, self.kernels)
                    }
                }
            }
            (None, None) => panic!("only the last pipeline stage has logits"),
        }
    }

    /// The output layer's weight, on the last stage.
    fn output_weight(&self) -> Option<Tensor<2>> {
        let own = self.output_layer.as_ref().map(|layer| &layer.weight);
        let tied = self.embedding.as_ref();
        let tied = tied.map(|embedding| &embedding.word_embeddings.weight);
        own.or(tied).map(|weight| weight.val())
    }

    /// On the last stage: the logits of the token after position `last`, over the vocabulary without
    /// padding. `hidden [s, b, h] -> [b, v]`, the same on every rank.
    pub fn next_token_logits(&self, hidden: Tensor<3>, last: usize) -> Tensor<2> {
        let at = |x: Tensor<3>| {
            let [_, b, n] = x.dims();
            x.slice([last..last + 1, 0..b, 0..n])
        };
        let logits = match self.sequence_parallel {
            // The position is on one rank alone until the logits are made.
            true => at(self.logits(hidden)),
            false => self.logits(at(hidden)),
        };
        let logits = gather_from_tensor_parallel_region(logits, &self.vocab.tp);
        let (b, v) = (logits.dims()[1], self.vocab.vocab_size);
        logits.slice([0..1, 0..b, 0..v]).reshape([b, v])
    }
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> Stage for GptModel<N, A, M> {
    fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    fn forward(&self, input: StageInput, context: &PassContext) -> Tensor<3> {
        let hidden = match (input, &self.embedding) {
            (StageInput::Hidden(hidden), _) => hidden,
            (StageInput::Tokens(tokens), Some(embedding)) => {
                let sum = embedding.forward(tokens);
                self.dropout.forward(sum, context, DropoutPlace::Embedding)
            }
            (StageInput::Tokens(_), None) => panic!("only the first pipeline stage takes tokens"),
        };
        self.decoder.forward(hidden, context)
    }

    fn loss(&self, hidden: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
        let [b, s] = labels.dims();
        let logits = self.logits(hidden);
        let v = logits.dims()[2];
        let labels = labels.transpose().reshape([s * b]);
        let loss = vocab_parallel_cross_entropy(logits.reshape([s * b, v]), labels, &self.vocab);
        loss.reshape([s, b]).transpose()
    }

    fn weighted_loss(
        &self,
        hidden: Tensor<3>,
        labels: Tensor<2, Int>,
        weights: &[f32],
    ) -> Tensor<2> {
        let fused = self.kernels.fuse_on(&hidden.device(), hidden.dtype());
        let Some(weight) = self.output_weight().filter(|_| fused) else {
            return self.loss(hidden, labels);
        };
        let [b, s] = labels.dims();
        let hidden = match self.sequence_parallel {
            true => gather_from_sequence_parallel_region(hidden, &self.vocab.tp),
            false => copy_to_tensor_parallel_region(hidden, &self.vocab.tp),
        };
        let hidden = hidden.reshape([s * b, self.hidden_size]);
        let labels = labels.transpose().reshape([s * b]);
        // Positions first, as the hidden states.
        let weights = (0..s * b).map(|i| weights[i % b * s + i / b]).collect();
        let loss = head_loss(hidden, weight, labels, weights, &self.vocab);
        loss.reshape([s, b]).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_models_have_their_known_sizes() {
        let parameters = |num_layers, hidden_size, positions| {
            let config = GptConfig {
                num_layers,
                hidden_size,
                num_attention_heads: 16,
                ..GptConfig::default()
            };
            let model = GptModelConfig {
                transformer: config.transformer(),
                vocab_size: 50257,
                padded_vocab_size: 50304,
                max_position_embeddings: positions,
                position_embedding_type: config.position_embedding_type,
                untie_embeddings_and_output_weights: false,
            };
            model.num_parameters()
        };
        // GPT-345M and GPT-1.3B, as Megatron-LM counts them.
        assert_eq!(parameters(24, 1024, 1024), 354_871_296);
        assert_eq!(parameters(24, 2048, 2048), 1_315_819_520);
        // Llama 3 8B.
        let config = GptConfig {
            num_layers: 32,
            hidden_size: 4096,
            num_attention_heads: 32,
            num_query_groups: Some(8),
            ffn_hidden_size: Some(14336),
            ..GptConfig::llama()
        };
        let model = GptModelConfig {
            transformer: config.transformer(),
            vocab_size: 128_256,
            padded_vocab_size: 128_256,
            max_position_embeddings: 8192,
            position_embedding_type: config.position_embedding_type,
            untie_embeddings_and_output_weights: true,
        };
        assert_eq!(model.num_parameters(), 8_030_261_248);
    }
}
