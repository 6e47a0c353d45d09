//! What one step communicates, predicted from the configuration: plain arithmetic.

use super::ResolvedConfig;
use crate::autograd::head_loss_blocks;
use crate::grads::Buckets;

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
    /// All-reduces of activations, their gradients and the loss; under sequence parallelism of the loss
    /// and of the gradients of norms, biases and positions.
    pub tp: StepVolume,
    /// Under sequence parallelism: all-gathers of activations and their gradients.
    pub tp_gather: StepVolume,
    /// Under sequence parallelism: reduce-scatters of activations and their gradients.
    pub tp_scatter: StepVolume,
    /// Broadcasts of the step's tokens.
    pub tp_data: StepVolume,
    /// All-reduces of gradients, without a distributed optimizer.
    pub dp: StepVolume,
    /// With one: reduce-scatters of gradients.
    pub dp_scatter: StepVolume,
    /// With one: all-gathers of updated parameters.
    pub dp_gather: StepVolume,
    /// Sends of activations and their gradients to neighbouring stages.
    pub pp: StepVolume,
    /// All-reduces of the tied embedding's gradient.
    pub embedding: StepVolume,
}

const F32: u64 = 4;
const I64: u64 = 8;
const F64: u64 = 8;

impl StepVolumes {
    /// For a GPT at `m` microbatches of `b` samples on each rank, on the ranks of one place in the
    /// pipeline.
    ///
    /// Tensor parallel, per microbatch: `[s, b, h]` is reduced after attention and MLP in the
    /// forward and before them in the backward of each layer, after the embedding in the forward,
    /// and before the output layer in the backward; the loss reduces one value and then two for
    /// each of `s·b` tokens. Under sequence parallelism each of these all-reduces of `[s, b, h]` becomes
    /// an all-gather and a reduce-scatter, but for the embedding and the output layer, where one of the
    /// two suffices; the backward gathers the inputs of QKV, fc1 and an output layer that is not fused again; and the
    /// gradients of what is replicated are summed once. A layer that is computed again communicates what
    /// its forward does again. Where data is needed, the `b (s + 1)` tokens of
    /// each microbatch and one flag are broadcast, the masks of those that have one apart. Data
    /// parallel: every parameter's gradient, once, by buckets; with a distributed optimizer every updated
    /// parameter as well. Pipeline: `[s, b, h]`, or `[s/t, b, h]`,
    /// for each microbatch to the next stage, and back. Tied embedding: the rank's part of the table.
    /// Activations, their gradients and parameters have the model's type, other gradients f32.
    pub(super) fn of(config: &ResolvedConfig, pp_rank: usize) -> Self {
        let (batch, layout) = (config.config().batch, config.layout());
        let (model, sizes) = (config.model(), layout.grid.sizes());
        let hidden = model.transformer.hidden_size as u64;
        // Bytes of an activation or a parameter, and of a gradient between data-parallel ranks.
        let value = config.config().mixed_precision.precision().bytes() as u64;
        let data_parallel = config.config().data_parallel;
        let gradient = data_parallel.gradient_precision().bytes() as u64;
        let tokens = (batch.seq_length * batch.micro_batch_size) as u64;
        let microbatches = layout.num_microbatches as u64;
        let stages: Vec<_> = layout.stages_of(pp_rank).collect();
        let layers: usize = stages.iter().map(|stage| stage.layers.len()).sum();
        let recompute = model.transformer.recompute;
        let groups = stages.iter().flat_map(|stage| {
            recompute.map_or(Vec::new(), |recompute| recompute.groups(stage.layers.len()))
        });
        // What the forwards communicate, they communicate again.
        let again: usize = groups.map(|group| group.len()).sum();
        let first = u64::from(stages.iter().any(|stage| stage.is_first()));
        let last = u64::from(stages.iter().any(|stage| stage.is_last()));

        let sequence_parallel = config.config().parallel.sequence_parallel;
        let (layers, again) = (layers as u64, again as u64);
        let partial = F32 * config.partial_gradients(pp_rank) as u64;
        let partial_calls = u64::from(partial > 0);
        // Of [s, b, h], in each microbatch.
        let activations = |count: u64| StepVolume {
            calls: microbatches * count,
            bytes: microbatches * count * value * tokens * hidden,
        };
        let reduced = activations(match sequence_parallel {
            true => 0,
            false => 4 * layers + 2 * again + first + last,
        });
        // A fused output layer needs its input in the forward alone, and reduces its loss block by block.
        let fused = config.fuses();
        let head_gathers = if fused { last } else { 2 * last };
        let loss_calls = match fused {
            true => {
                let rows = model.padded_vocab_size / sizes.tp;
                let host = config.config().device.is_host();
                2 * head_loss_blocks(tokens as usize, rows, host) as u64 * last
            }
            false => 2 * last,
        };
        let tp = StepVolume {
            calls: reduced.calls + microbatches * loss_calls + partial_calls,
            bytes: reduced.bytes + microbatches * F32 * tokens * 3 * last + partial,
        };
        // The gradient norm's two f64 of each rank are gathered as well.
        let gathered = activations(6 * layers + 2 * again + first + head_gathers);
        let tp_gather = StepVolume {
            calls: gathered.calls + 1,
            bytes: gathered.bytes + 2 * F64 * sizes.tp as u64,
        };
        let tp_scatter = activations(4 * layers + 2 * again + first + last);
        let rows = (batch.micro_batch_size * (batch.seq_length + 1) + 1) as u64;
        let tp_data = StepVolume {
            calls: 1,
            bytes: microbatches * I64 * rows,
        };
        let distributed = data_parallel.use_distributed_optimizer;
        let buckets = config.buckets(pp_rank);
        let dp = StepVolume {
            calls: buckets.ranges().len() as u64,
            bytes: gradient * buckets.elements() as u64,
        };
        // Two f64 of each rank are gathered for the loss, and two for the gradient's norm.
        let dp_gather = StepVolume {
            calls: dp.calls + 2,
            bytes: value * buckets.elements() as u64 + 4 * F64 * layout.dp as u64,
        };
        let sends = config.pipeline_schedule().sends(pp_rank) as u64;
        let parts = if sequence_parallel {
            sizes.tp as u64
        } else {
            1
        };
        let pp = StepVolume {
            calls: sends,
            bytes: sends * value * tokens / parts * hidden,
        };
        // Of the table each rank sums what it owns.
        let (table, owners) = (
            hidden as usize * model.padded_vocab_size / sizes.tp,
            if distributed { layout.dp } else { 1 },
        );
        let size = data_parallel.ddp_bucket_size;
        let embedding = match distributed {
            true => Buckets::of_segments([table], size, owners).ranges().len(),
            false => 1,
        };
        let embedding = StepVolume {
            calls: embedding as u64,
            bytes: F32 * table.div_ceil(owners) as u64,
        };
        let tied = !model.untie_embeddings_and_output_weights;
        let ends = first + last > 0;
        let only_if = |condition: bool, volume: StepVolume| match condition {
            true => volume,
            false => StepVolume::default(),
        };
        StepVolumes {
            tp: only_if(sizes.tp > 1, tp),
            tp_gather: only_if(sequence_parallel, tp_gather),
            tp_scatter: only_if(sequence_parallel, tp_scatter),
            tp_data: only_if(sizes.tp > 1 && ends, tp_data),
            dp: only_if(layout.dp > 1 && !distributed, dp),
            dp_scatter: only_if(layout.dp > 1 && distributed, dp),
            dp_gather: only_if(layout.dp > 1 && distributed, dp_gather),
            pp: only_if(sizes.pp > 1, pp),
            embedding: only_if(sizes.pp > 1 && tied && ends, embedding),
        }
    }
}
