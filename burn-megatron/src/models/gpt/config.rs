//! The shape of a GPT, as its user gives it.

use crate::Kernels;
use crate::Violation;
use crate::autograd::GeluApproximation;
use crate::layers::{
    Activation, Normalization, Recompute, RecomputeGranularity, RecomputeMethod, RotaryConfig,
    TransformerConfig,
};
use serde::{Deserialize, Serialize};

/// How a model knows the order of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbeddingType {
    /// A learned table, added to the word embeddings.
    #[default]
    LearnedAbsolute,
    /// Queries and keys turned by angles that grow with the position.
    Rope,
    /// Not at all, but for the causal mask.
    None,
}

/// The shape of a GPT, or of a Llama, under the names of Megatron's flags. What depends on the data or the layout
/// (vocabulary, default positions) joins it in [`GptModelConfig`](super::GptModelConfig).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GptConfig {
    pub num_layers: usize,
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    /// Heads of keys and values; as many as attention heads where not given.
    pub num_query_groups: Option<usize>,
    /// Width of a head; hidden / heads where not given.
    pub kv_channels: Option<usize>,
    /// Inner width of the MLP; where not given 4 × hidden, and for SwiGLU two thirds of that, down to a
    /// multiple of 64.
    pub ffn_hidden_size: Option<usize>,
    pub normalization: Normalization,
    pub position_embedding_type: PositionEmbeddingType,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    /// Part of each head's features that turn.
    pub rotary_percent: f64,
    /// Stretch the low rotary frequencies, as Llama 3 does for long contexts.
    pub use_rope_scaling: bool,
    pub rope_scaling_factor: f64,
    /// Gate the MLP by SiLU instead of applying GELU.
    pub swiglu: bool,
    /// Square the MLP's ReLU instead of applying GELU.
    pub squared_relu: bool,
    /// Linear layers without biases.
    pub disable_bias_linear: bool,
    /// Normalise each head's queries and keys.
    pub qk_layernorm: bool,
    /// Part of what attention, MLP and embeddings give that is dropped in training.
    pub hidden_dropout: f64,
    /// Part of the attention's probabilities that is dropped in training.
    pub attention_dropout: f64,
    /// What the backward computes again instead of keeping; nothing where not given.
    pub recompute_granularity: Option<RecomputeGranularity>,
    /// Which layers full recomputation takes; `uniform` where not given.
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers of a group (`uniform`) or of a stage (`block`) that are computed again; 1 where not given.
    pub recompute_num_layers: Option<usize>,
    /// Rows of the position table; the sequence length where not given.
    pub max_position_embeddings: Option<usize>,
    pub layernorm_epsilon: f64,
    /// Standard deviation of initial weights.
    pub init_method_std: f64,
    /// Give the output layer a table of its own instead of the word embeddings'.
    pub untie_embeddings_and_output_weights: bool,
    /// Use the tanh form of GELU, as Megatron's fused kernel does; the erf form otherwise.
    pub bias_gelu_fusion: bool,
    /// Which kernels the layers' operations take.
    pub transformer_impl: Kernels,
    /// The vocabulary is padded to a multiple of this times tp.
    pub make_vocab_size_divisible_by: usize,
}

impl Default for GptConfig {
    /// A model small enough for a laptop: 4 layers of 128.
    fn default() -> Self {
        GptConfig {
            num_layers: 4,
            hidden_size: 128,
            num_attention_heads: 4,
            num_query_groups: None,
            kv_channels: None,
            ffn_hidden_size: None,
            normalization: Normalization::LayerNorm,
            position_embedding_type: PositionEmbeddingType::LearnedAbsolute,
            rotary_base: 10_000.0,
            rotary_percent: 1.0,
            use_rope_scaling: false,
            rope_scaling_factor: 8.0,
            swiglu: false,
            squared_relu: false,
            disable_bias_linear: false,
            qk_layernorm: false,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            recompute_granularity: None,
            recompute_method: None,
            recompute_num_layers: None,
            max_position_embeddings: None,
            layernorm_epsilon: 1e-5,
            init_method_std: crate::layers::DEFAULT_INIT_STD,
            untie_embeddings_and_output_weights: false,
            bias_gelu_fusion: true,
            transformer_impl: Kernels::default(),
            make_vocab_size_divisible_by: 128,
        }
    }
}

impl GptConfig {
    /// Llama's choices, at the default size: RMSNorm, rotary positions, SwiGLU, no biases, an output
    /// layer of its own.
    pub fn llama() -> Self {
        GptConfig {
            normalization: Normalization::RmsNorm,
            position_embedding_type: PositionEmbeddingType::Rope,
            swiglu: true,
            disable_bias_linear: true,
            untie_embeddings_and_output_weights: true,
            ..GptConfig::default()
        }
    }

    /// Inner width of the MLP.
    pub fn ffn_hidden_size(&self) -> usize {
        self.ffn_hidden_size.unwrap_or(match self.swiglu {
            true => (8 * self.hidden_size / 3 / 64 * 64).max(64),
            false => 4 * self.hidden_size,
        })
    }

    /// Heads of keys and values.
    pub fn num_query_groups(&self) -> usize {
        self.num_query_groups.unwrap_or(self.num_attention_heads)
    }

    /// Width of a head.
    pub fn kv_channels(&self) -> usize {
        let shared = self.hidden_size.checked_div(self.num_attention_heads);
        self.kv_channels.unwrap_or(shared.unwrap_or_default())
    }

    fn rotary(&self) -> Option<RotaryConfig> {
        (self.position_embedding_type == PositionEmbeddingType::Rope).then_some(RotaryConfig {
            rotary_base: self.rotary_base,
            rotary_percent: self.rotary_percent,
            rope_scaling_factor: self.use_rope_scaling.then_some(self.rope_scaling_factor),
        })
    }

    /// What the backward computes again.
    pub fn recompute(&self) -> Option<Recompute> {
        self.recompute_granularity
            .map(|granularity| match granularity {
                RecomputeGranularity::Selective => Recompute::Selective,
                RecomputeGranularity::Full => Recompute::Full {
                    method: self.recompute_method.unwrap_or_default(),
                    num_layers: self.recompute_num_layers.unwrap_or(1),
                },
            })
    }

    fn activation(&self) -> Activation {
        match (self.swiglu, self.squared_relu, self.bias_gelu_fusion) {
            (true, ..) => Activation::SwiGlu,
            (_, true, _) => Activation::SquaredRelu,
            (_, _, true) => Activation::Gelu(GeluApproximation::Tanh),
            (_, _, false) => Activation::Gelu(GeluApproximation::Erf),
        }
    }

    /// What no model can be.
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        if self.swiglu && self.squared_relu {
            let rule = "swiglu and squared_relu are two activations; give one";
            violations.push(Violation::new(rule, ["swiglu", "squared_relu"]));
        }
        if self.kv_channels == Some(0) {
            violations.push(Violation::new("kv_channels must be at least 1", ["64"]));
        }
        for (name, p) in [
            ("hidden_dropout", self.hidden_dropout),
            ("attention_dropout", self.attention_dropout),
        ] {
            if !(0.0..1.0).contains(&p) {
                let rule = format!("{name} is {p}, but must be at least 0 and below 1");
                violations.push(Violation::new(rule, ["0.1"]));
            }
        }
        let detailed = self.recompute_method.is_some() || self.recompute_num_layers.is_some();
        if detailed && self.recompute_granularity != Some(RecomputeGranularity::Full) {
            let rule = "recompute_method and recompute_num_layers need recompute_granularity full";
            violations.push(Violation::new(rule, ["full"]));
        }
        let Some(rotary) = self.rotary() else {
            if self.use_rope_scaling {
                let rule = "use_rope_scaling needs position_embedding_type rope";
                violations.push(Violation::new(rule, ["rope"]));
            }
            return violations;
        };
        let (percent, d) = (self.rotary_percent, self.kv_channels());
        if !(percent > 0.0 && percent <= 1.0) {
            let rule = format!("rotary_percent is {percent}, but must be above 0 and at most 1");
            violations.push(Violation::new(rule, ["1"]));
        } else if rotary.rotary_dim(d) < 2 || !rotary.rotary_dim(d).is_multiple_of(2) {
            let rule = format!(
                "rotary_percent {percent} of kv_channels {d} is {} features, but they turn in pairs",
                rotary.rotary_dim(d)
            );
            let pairs = (percent * d as f64 / 2.0).round().max(1.0);
            let nearest = 2.0 * pairs / d as f64;
            violations.push(Violation::new(rule, [nearest.to_string()]));
        }
        for (name, value) in [
            ("rotary_base", self.rotary_base),
            ("rope_scaling_factor", self.rope_scaling_factor),
        ] {
            if !(value >= 1.0 && value.is_finite()) {
                let rule = format!("{name} is {value}, but must be at least 1");
                violations.push(Violation::new(rule, ["1"]));
            }
        }
        violations
    }

    /// What the layers have in common.
    pub fn transformer(&self) -> TransformerConfig {
        TransformerConfig {
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_attention_heads: self.num_attention_heads,
            num_query_groups: self.num_query_groups(),
            kv_channels: self.kv_channels(),
            ffn_hidden_size: self.ffn_hidden_size(),
            normalization: self.normalization,
            layernorm_epsilon: self.layernorm_epsilon,
            init_method_std: self.init_method_std,
            activation: self.activation(),
            add_bias_linear: !self.disable_bias_linear,
            rotary: self.rotary(),
            qk_layernorm: self.qk_layernorm,
            hidden_dropout: self.hidden_dropout,
            attention_dropout: self.attention_dropout,
            recompute: self.recompute(),
        }
    }
}
