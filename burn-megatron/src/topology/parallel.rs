//! What the user asks for, and the layout it becomes once validated.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Axis, DEFAULT_ORDER, RankGrid};

/// The size of each kind of parallelism, under the names of Megatron's flags.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Ranks over which each layer's weights are split.
    pub tensor_model_parallel_size: usize,
    /// Ranks over which the layers are split.
    pub pipeline_model_parallel_size: usize,
    /// Ranks over which each sequence is split.
    pub context_parallel_size: usize,
    /// Ranks over which the experts are split.
    pub expert_model_parallel_size: usize,
    /// Split the activations outside of the tensor-parallel regions along the sequence.
    pub sequence_parallel: bool,
    /// All ranks; as many as tp, pp and cp need where none is given, which makes dp 1.
    pub world_size: Option<usize>,
    /// The order of the axes in the world, innermost first.
    pub order: String,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            tensor_model_parallel_size: 1,
            pipeline_model_parallel_size: 1,
            context_parallel_size: 1,
            expert_model_parallel_size: 1,
            sequence_parallel: false,
            world_size: None,
            order: DEFAULT_ORDER.into(),
        }
    }
}

/// What a layout must know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    pub num_layers: usize,
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    /// Heads of keys and values; equal to `num_attention_heads` without grouped queries.
    pub num_query_groups: usize,
    /// Tokens of a training sample.
    pub seq_length: usize,
    pub max_position_embeddings: usize,
    /// The inner width of the MLP; for a gated one, of the gate alone.
    pub ffn_hidden_size: usize,
    /// Before padding.
    pub vocab_size: usize,
    pub make_vocab_size_divisible_by: usize,
}

/// How many samples a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples of one forward pass on one data-parallel rank.
    pub micro_batch_size: usize,
    /// Samples of one optimizer step, over all ranks.
    pub global_batch_size: usize,
}

/// A layout that keeps every rule; made by [`validate`](super::validate).
///
/// Displays as `tp=2 pp=1 dp=2 (world 4)`, with cp and ep where they are above 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The dense layers' grid: its ep is 1.
    pub grid: RankGrid,
    /// The expert-parallel size; [`RankGrid::expert`] gives the experts' grid.
    pub ep: usize,
    /// The data-parallel size.
    pub dp: usize,
    /// Microbatches that each data-parallel rank runs in one step.
    pub num_microbatches: usize,
    /// The vocabulary's size with padding, a multiple of tp.
    pub padded_vocab_size: usize,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.grid.sizes();
        write!(f, "{}={} {}={}", Axis::Tp, sizes.tp, Axis::Pp, sizes.pp)?;
        for (axis, size) in [(Axis::Cp, sizes.cp), (Axis::Ep, self.ep)] {
            if size > 1 {
                write!(f, " {axis}={size}")?;
            }
        }
        let world = self.grid.world_size();
        write!(f, " {}={} (world {world})", Axis::Dp, self.dp)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Axes;
    use super::*;

    #[test]
    fn a_layout_displays_its_axes() {
        let layout = |cp, ep| {
            let sizes = Axes {
                tp: 2,
                cp,
                ep: 1,
                dp: 2,
                pp: 1,
            };
            Layout {
                grid: RankGrid::new(sizes, DEFAULT_ORDER).unwrap(),
                ep,
                dp: 2,
                num_microbatches: 1,
                padded_vocab_size: 256,
            }
        };
        assert_eq!(layout(1, 1).to_string(), "tp=2 pp=1 dp=2 (world 4)");
        assert_eq!(
            layout(2, 2).to_string(),
            "tp=2 pp=1 cp=2 ep=2 dp=2 (world 8)"
        );
    }

    #[test]
    fn config_fields_are_megatrons_flags() {
        let text = r#"{ "tensor_model_parallel_size": 2, "world_size": 4 }"#;
        let config: ParallelConfig = serde_json::from_str(text).unwrap();
        let expected = ParallelConfig {
            tensor_model_parallel_size: 2,
            world_size: Some(4),
            ..Default::default()
        };
        assert_eq!(config, expected);
        assert!(serde_json::from_str::<ParallelConfig>(r#"{ "tensor_parallel": 2 }"#).is_err());
    }
}
