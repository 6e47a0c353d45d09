//! What the user asks for, and the layout it becomes once validated.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Axis, DEFAULT_ORDER, PipelineSchedule, PipelineShape, RankGrid, StageLayers};

/// The size of each kind of parallelism, under the names of Megatron's flags.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Ranks over which each layer's weights are split.
    pub tensor_model_parallel_size: usize,
    /// Ranks over which the layers are split.
    pub pipeline_model_parallel_size: usize,
    /// Stages on each pipeline rank, for an interleaved schedule.
    pub num_virtual_stages_per_pipeline_rank: Option<usize>,
    /// The same, said as the layers of one stage.
    pub num_layers_per_virtual_pipeline_stage: Option<usize>,
    /// The order of forwards and backwards; `1f1b` where not given, `interleaved` with virtual
    /// stages.
    pub pipeline_schedule: Option<PipelineSchedule>,
    /// Micro batches in a row through one virtual stage; the pipeline size where not given.
    pub microbatch_group_size_per_virtual_pipeline_stage: Option<usize>,
    /// Layers of the first pipeline rank, where they are not to be an equal share.
    pub decoder_first_pipeline_num_layers: Option<usize>,
    /// Layers of the last pipeline rank, likewise.
    pub decoder_last_pipeline_num_layers: Option<usize>,
    /// Count the embedding as a layer of the first stage.
    pub account_for_embedding_in_pipeline_split: bool,
    /// Count the output layer and the loss as a layer of the last stage.
    pub account_for_loss_in_pipeline_split: bool,
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
            num_virtual_stages_per_pipeline_rank: None,
            num_layers_per_virtual_pipeline_stage: None,
            pipeline_schedule: None,
            microbatch_group_size_per_virtual_pipeline_stage: None,
            decoder_first_pipeline_num_layers: None,
            decoder_last_pipeline_num_layers: None,
            account_for_embedding_in_pipeline_split: false,
            account_for_loss_in_pipeline_split: false,
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
    /// Width of a head, where it is not `hidden_size` over the heads.
    pub kv_channels: Option<usize>,
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
/// Displays as `tp=2 pp=1 dp=2 (world 4)`, with the virtual stages, cp and ep where they are
/// above 1.
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
    /// Every pipeline stage, in pipeline order; `virtual_stages` times pp.
    pub stages: Vec<StageLayers>,
    /// Stages on each pipeline rank.
    pub virtual_stages: usize,
    pub pipeline_schedule: PipelineSchedule,
    /// Micro batches in a row through one virtual stage, where not the pipeline size.
    pub group_size: Option<usize>,
}

impl Layout {
    /// What the pipeline's schedule is made for.
    pub fn pipeline(&self) -> PipelineShape {
        PipelineShape {
            ranks: self.grid.sizes().pp,
            virtual_stages: self.virtual_stages,
            microbatches: self.num_microbatches,
            group_size: self.group_size,
        }
    }

    /// The stages of one pipeline rank, its chunks in order.
    pub fn stages_of(&self, pp_rank: usize) -> impl Iterator<Item = &StageLayers> {
        let pp = self.grid.sizes().pp;
        self.stages.iter().skip(pp_rank).step_by(pp)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.grid.sizes();
        write!(f, "{}={} {}={}", Axis::Tp, sizes.tp, Axis::Pp, sizes.pp)?;
        if self.virtual_stages > 1 {
            write!(f, " v={}", self.virtual_stages)?;
        }
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
                stages: vec![StageLayers::whole(1)],
                virtual_stages: 1,
                pipeline_schedule: PipelineSchedule::default_for(1),
                group_size: None,
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
