//! What one step communicates, predicted from the configuration: plain arithmetic.

use super::ResolvedConfig;

/// Calls of one kind by one rank in one group during one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepVolume {
    pub calls: u64,
    /// Bytes of the buffers reduced, broadcast or sent.
    pub bytes: u64,
}

/// What a rank communicates in a step, in the groups of more than one rank. The few values of loss
/// and gradient norm are left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepVolumes {
    /// All-reduces of activations, their gradients and the loss.
    pub tp: StepVolume,
    /// Broadcasts of the step's tokens.
    pub tp_data: StepVolume,
    /// All-reduces of gradients.
    pub dp: StepVolume,
    /// Sends of activations and their gradients to neighbouring stages.
    pub pp: StepVolume,
    /// All-reduces of the tied embedding's gradient.
    pub embedding: StepVolume,
}

const F32: u64 = 4;
const I64: u64 = 8;

impl StepVolumes {
    /// For a GPT at `m` microbatches of `b` samples on each rank, on the ranks of one place in the
    /// pipeline.
    ///
    /// Tensor parallel, per microbatch: `[s, b, h]` is reduced after attention and MLP in the
    /// forward and before them in the backward of each layer, after the embedding in the forward,
    /// and before the output layer in the backward; the loss reduces one value and then two for
    /// each of `s·b` tokens. Where data is needed, the `b (s + 1)` tokens of each microbatch and one
    /// flag are broadcast, the masks of those that have one apart. Data parallel: every parameter's
    /// gradient, once, by buckets. Pipeline: `[s, b, h]` for each microbatch to the next stage, and
    /// back. Tied embedding: the rank's part of the table.
    pub(super) fn of(config: &ResolvedConfig, pp_rank: usize) -> Self {
        let (batch, layout) = (config.config().batch, config.layout());
        let (model, sizes) = (config.model(), layout.grid.sizes());
        let hidden = model.transformer.hidden_size as u64;
        let tokens = (batch.seq_length * batch.micro_batch_size) as u64;
        let microbatches = layout.num_microbatches as u64;
        let stages: Vec<_> = layout.stages_of(pp_rank).collect();
        let layers: usize = stages.iter().map(|stage| stage.layers.len()).sum();
        let first = u64::from(stages.iter().any(|stage| stage.is_first()));
        let last = u64::from(stages.iter().any(|stage| stage.is_last()));

        let activations = 4 * layers as u64 + first + last;
        let tp = StepVolume {
            calls: microbatches * (activations + 2 * last),
            bytes: microbatches * F32 * tokens * (activations * hidden + 3 * last),
        };
        let rows = (batch.micro_batch_size * (batch.seq_length + 1) + 1) as u64;
        let tp_data = StepVolume {
            calls: 1,
            bytes: microbatches * I64 * rows,
        };
        let elements = config.parameters_per_rank(pp_rank);
        let dp = StepVolume {
            calls: elements.div_ceil(crate::grads::DEFAULT_BUCKET_ELEMENTS) as u64,
            bytes: F32 * elements as u64,
        };
        let sends = config.pipeline_schedule().sends(pp_rank) as u64;
        let pp = StepVolume {
            calls: sends,
            bytes: sends * F32 * tokens * hidden,
        };
        let embedding = StepVolume {
            calls: 1,
            bytes: F32 * hidden * (model.padded_vocab_size / sizes.tp) as u64,
        };
        let tied = !model.untie_embeddings_and_output_weights;
        let ends = first + last > 0;
        let only_if = |condition: bool, volume: StepVolume| match condition {
            true => volume,
            false => StepVolume::default(),
        };
        StepVolumes {
            tp: only_if(sizes.tp > 1, tp),
            tp_data: only_if(sizes.tp > 1 && ends, tp_data),
            dp: only_if(layout.dp > 1, dp),
            pp: only_if(sizes.pp > 1, pp),
            embedding: only_if(sizes.pp > 1 && tied && ends, embedding),
        }
    }
}
