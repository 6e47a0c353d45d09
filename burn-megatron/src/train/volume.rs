//! What one step communicates, predicted from the configuration: plain arithmetic.

use super::ResolvedConfig;

/// All-reduces of one rank in one group during one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepVolume {
    pub calls: u64,
    /// Bytes of the buffers reduced.
    pub bytes: u64,
}

/// The all-reduces of a step, per axis; none on an axis of size 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepVolumes {
    pub tp: StepVolume,
    pub dp: StepVolume,
}

const NONE: StepVolume = StepVolume { calls: 0, bytes: 0 };
const F32: u64 = 4;

impl StepVolumes {
    /// For a GPT of `L` layers at `m` microbatches of `b` samples on each rank.
    ///
    /// Tensor parallel, per microbatch: `[s, b, h]` is reduced after attention and MLP in the
    /// forward and before them in the backward of each layer, after the embedding in the forward,
    /// and before the output layer in the backward; the loss reduces one value and then two for
    /// each of `s·b` tokens. Data parallel: every parameter's gradient, once, by buckets.
    pub(super) fn of(config: &ResolvedConfig) -> Self {
        let (batch, layout) = (config.config().batch, config.layout());
        let layers = config.model().transformer.num_layers as u64;
        let hidden = config.model().transformer.hidden_size as u64;
        let tokens = (batch.seq_length * batch.micro_batch_size) as u64;
        let microbatches = layout.num_microbatches as u64;
        let activations = 2 * (2 * layers + 1);
        let tp = StepVolume {
            calls: microbatches * (activations + 2),
            bytes: microbatches * F32 * tokens * (activations * hidden + 3),
        };
        let elements = config.parameters_per_rank();
        let dp = StepVolume {
            calls: elements.div_ceil(crate::grads::DEFAULT_BUCKET_ELEMENTS) as u64,
            bytes: F32 * elements as u64,
        };
        StepVolumes {
            tp: if layout.grid.sizes().tp > 1 { tp } else { NONE },
            dp: if layout.dp > 1 { dp } else { NONE },
        }
    }
}
