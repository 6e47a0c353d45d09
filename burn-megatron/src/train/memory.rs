//! What a rank's memory goes to, predicted from the configuration: plain arithmetic; and what was
//! measured of it.

use super::{ResolvedConfig, Trainer};
use crate::comm::all_gather_values;
use crate::error::Result;
use crate::layers::{Activation, Normalization, Recompute};
use crate::models::Stage;
use crate::pipeline::Kind;
use crate::topology::StageLayers;

/// Bytes of one rank that stay over a step, or from a forward to its backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// The model's parameters.
    pub weights: u64,
    /// The sums of their gradients over a step's microbatches.
    pub gradients: u64,
    /// What the optimizer keeps of each weight (Adam both moments), and master weights where they are not the model's own;
    /// of a distributed optimizer this rank's part.
    pub optimizer: u64,
    /// What the graphs of all microbatches in flight keep for their backwards, at most.
    pub activations: u64,
}

/// What a rank's allocator counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasuredMemory {
    pub parts: RankMemory,
    /// The most that was in use at once during the last step: beside the parts, what a backward works with, one layer's
    /// gradients among it (on a card one microbatch's), and whatever else the rank holds.
    pub peak: u64,
}

const F32: u64 = 4;
const I32: u64 = 4;
const I64: u64 = 8;

impl RankMemory {
    /// For a GPT, on the ranks of one place in the pipeline.
    pub(super) fn of(config: &ResolvedConfig, pp_rank: usize) -> Self {
        let elements = config.buckets(pp_rank).elements();
        let owned = match config.config().data_parallel.use_distributed_optimizer {
            true => elements / config.layout().dp,
            false => elements,
        };
        let (given, dp) = (config.config(), config.layout().dp);
        let precision = given.mixed_precision.precision();
        let shared = given.device.is_host() && given.data_parallel.shares_weights(precision, dp);
        let kept = given.optimizer.rule().state().len() + usize::from(!shared);
        RankMemory {
            weights: value_bytes(config) * config.parameters_per_rank(pp_rank) as u64,
            gradients: F32 * elements as u64,
            optimizer: kept as u64 * F32 * owned as u64,
            activations: activations(config, pp_rank),
        }
    }
}

/// Bytes of a weight or an activation.
fn value_bytes(config: &ResolvedConfig) -> u64 {
    config.config().mixed_precision.precision().bytes() as u64
}

/// The most that is kept at once, over the rank's schedule.
fn activations(config: &ResolvedConfig, pp_rank: usize) -> u64 {
    let schedule = config.pipeline_schedule();
    let chunks: Vec<u64> = (config.layout().stages_of(pp_rank))
        .map(|stage| KeptValues::new(config).of_stage(stage))
        .collect();
    let (mut held, mut most) = (0, 0);
    for action in schedule.compute(pp_rank) {
        let bytes = chunks[schedule.shape().chunk_of(action.stage)];
        match action.kind {
            Kind::Forward => held += bytes,
            _ => held -= bytes,
        }
        most = most.max(held);
    }
    most
}

/// What one microbatch's graph keeps on one rank.
///
/// A layer of a GPT keeps, in values (`s` sequence, `b` samples, `h` hidden, `t` tensor-parallel
/// ranks, `a` heads; an MLP of `4h`):
///
/// | what | values |
/// |---|---|
/// | both norms: the input; their outputs, as the inputs of QKV and fc1 | `4 sbh` |
/// | attention: Q, K, V, and its output as the projection's input | `4 sbh/t` |
/// | attention that is not fused: probabilities, unless they are recomputed | `as²b/t` |
/// | MLP: GELU's input | `4 sbh/t` |
/// | MLP that is not fused: GELU's output, as the input of fc2, as well | `4 sbh/t` |
///
/// In bytes of f32 `sbh (16 + 32/t)`, and in 16 bits, which nothing is fused for on the CPU,
/// `sbh (8 + 24/t + 2as/(ht))`; Korthikanti et al. 2022 count `sbh (10 + 24/t + 5as/(ht))`: dropout's masks are made
/// again here. Sequence parallelism divides the first row by `t` as
/// well. Full recomputation keeps `sbh` for each group of layers, `sbh/t` under sequence parallelism.
struct KeptValues<'a> {
    config: &'a ResolvedConfig,
    /// Bytes of an activation.
    value: u64,
    /// `s b`
    tokens: u64,
    /// Ranks that share the tensor-parallel regions.
    t: u64,
    /// Ranks that share the rest: `t` under sequence parallelism, else 1.
    parts: u64,
}

impl<'a> KeptValues<'a> {
    fn new(config: &'a ResolvedConfig) -> Self {
        let (batch, t) = (
            config.config().batch,
            config.layout().grid.sizes().tp as u64,
        );
        KeptValues {
            config,
            value: value_bytes(config),
            tokens: (batch.seq_length * batch.micro_batch_size) as u64,
            t,
            parts: match config.config().parallel.sequence_parallel {
                true => t,
                false => 1,
            },
        }
    }

    /// Values of `[s, b, h]`, or of the rank's part of it.
    fn hidden(&self) -> u64 {
        self.tokens * self.config.config().model.hidden_size as u64 / self.parts
    }

    /// Bytes of a norm over the hidden size: its input, two statistics of each token (RMSNorm one), and its
    /// output.
    fn norm(&self) -> u64 {
        2 * self.value * self.hidden() + self.stats() * F32 * self.tokens / self.parts
    }

    /// Values that a norm keeps of each row.
    fn stats(&self) -> u64 {
        match self.config.config().model.normalization {
            Normalization::LayerNorm => 2,
            Normalization::RmsNorm => 1,
        }
    }

    /// Bytes of a layer.
    fn layer(&self) -> u64 {
        let model = self.config.model().transformer;
        let of = |features: usize| self.tokens * features as u64 / self.t;
        let (a, g) = (model.num_attention_heads, model.num_query_groups);
        let (d, f) = (model.kv_channels, model.ffn_hidden_size);
        let qkv = of((a + 2 * g) * d);
        let head_norms = match model.qk_layernorm {
            true => self.value * of((a + g) * d) + self.stats() * F32 * of(a + g),
            false => 0,
        };
        let probabilities = match (self.config.fuses(), model.recompute) {
            // The log-sum-exp of every row instead.
            (true, _) => F32 * of(a),
            (false, Some(Recompute::Selective)) => 0,
            (false, _) => self.value * of(a * self.config.config().batch.seq_length),
        };
        let inner = match model.activation {
            Activation::SwiGlu => of(2 * f),
            Activation::Gelu(_) | Activation::SquaredRelu => of(f),
        };
        let output = if self.config.fuses() { 0 } else { of(f) };
        let values = qkv + of(a * d) + inner + output;
        let attention = head_norms + probabilities;
        2 * self.norm() + attention + self.value * values
    }

    /// Bytes of a whole stage.
    fn of_stage(&self, stage: &StageLayers) -> u64 {
        let model = self.config.model();
        let layers = stage.layers.len();
        let recompute = model.transformer.recompute;
        let groups = recompute.map_or(Vec::new(), |recompute| recompute.groups(layers));
        let recomputed: usize = groups.iter().map(|group| group.len()).sum();
        let mut bytes = (layers - recomputed) as u64 * self.layer();
        // Where nothing is recomputed, the stage's input is its first norm's.
        bytes += self.value * groups.len() as u64 * self.hidden();
        if stage.is_first() {
            // The tokens; and which of them are in this rank's part of the table.
            bytes += I32 * self.tokens;
            bytes += if self.t > 1 {
                self.value * self.tokens
            } else {
                0
            };
        }
        if stage.is_last() {
            let vocab = model.padded_vocab_size as u64 / self.t;
            bytes += self.norm() + self.head(vocab);
        }
        bytes
    }
}

impl KeptValues<'_> {
    /// Bytes of the output layer and the loss, beside the layer's input.
    fn head(&self, vocab: u64) -> u64 {
        let weights = F32 * self.tokens;
        if !self.config.fuses() {
            // The softmax in f32; each token's place in it and whether it is there.
            return weights + F32 * self.tokens * (vocab + 1) + I64 * self.tokens;
        }
        // The gradients of the gathered input and of the weight; each token's target and its loss's weight.
        let h = self.config.config().model.hidden_size as u64;
        let gathered = self.tokens * h;
        let input = match self.parts {
            1 => 0,
            // The gathered input instead of the rank's part.
            _ => gathered - self.hidden(),
        };
        let gradients = gathered + vocab * h;
        weights + F32 * (input + gradients + self.tokens) + I64 * self.tokens
    }
}

impl<M: Stage> Trainer<M> {
    /// What this rank's memory went to, as of the last step; `None` where the program does not count
    /// ([`CountingAllocator`](crate::memory::CountingAllocator)).
    pub fn memory(&self) -> Option<&MeasuredMemory> {
        self.memory.as_ref()
    }

    /// [`memory`](Trainer::memory) of every rank, in rank order. Every rank calls it.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn memory_of_all(&self) -> Result<Option<Vec<MeasuredMemory>>> {
        let MeasuredMemory { parts, peak } = self.memory.unwrap_or_default();
        let RankMemory {
            weights,
            gradients,
            optimizer,
            activations,
        } = parts;
        let mine = [weights, gradients, optimizer, activations, peak];
        let all = all_gather_values(&*self.context.groups.world.comm, mine)?;
        let all = all
            .into_iter()
            .map(
                |[weights, gradients, optimizer, activations, peak]| MeasuredMemory {
                    parts: RankMemory {
                        weights,
                        gradients,
                        optimizer,
                        activations,
                    },
                    peak,
                },
            );
        Ok(self.memory.is_some().then(|| all.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::grads::DataParallelConfig;
    use crate::layers::RecomputeGranularity;
    use crate::models::gpt::GptConfig;
    use crate::optim::{MixedPrecisionConfig, OptimizerConfig};
    use crate::topology::ParallelConfig;
    use crate::train::{BatchConfig, TrainConfig};

    const S: u64 = 1024;
    const B: u64 = 4;
    const H: u64 = 1024;
    const A: u64 = 16;

    fn config(t: usize, sequence_parallel: bool, model: GptConfig) -> ResolvedConfig {
        let config = TrainConfig {
            model: GptConfig {
                num_layers: 24,
                hidden_size: H as usize,
                num_attention_heads: A as usize,
                ..model
            },
            parallel: ParallelConfig {
                tensor_model_parallel_size: t,
                sequence_parallel,
                ..ParallelConfig::default()
            },
            device: Default::default(),
            batch: BatchConfig {
                seq_length: S as usize,
                micro_batch_size: B as usize,
                global_batch_size: B as usize,
            },
            rampup_batch_size: None,
            optimizer: OptimizerConfig::default(),
            vocab_size: 50257,
            data_parallel: DataParallelConfig::default(),
            train_iters: 1,
            seed: 1,
            calculate_per_token_loss: false,
            mixed_precision: MixedPrecisionConfig::default(),
            check_for_nan_in_loss_and_grad: true,
        };
        config.resolve().unwrap()
    }

    fn dropout() -> GptConfig {
        GptConfig {
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            ..GptConfig::default()
        }
    }

    /// Bytes of a layer, as the table says; what norms and attention keep of each row apart.
    #[test]
    fn a_layer_keeps_what_the_table_says() {
        let sbh = S * B * H;
        let local = GptConfig {
            transformer_impl: Kernels::Local,
            ..dropout()
        };
        for t in [1, 2, 4, 8] {
            let bytes = |sequence_parallel, model: &GptConfig| {
                KeptValues::new(&config(t, sequence_parallel, model.clone())).layer()
            };
            let t = t as u64;
            let (stats, lse) = (4 * F32 * S * B, F32 * A * S * B / t);
            assert_eq!(
                bytes(false, &dropout()),
                16 * sbh + 32 * sbh / t + stats + lse
            );
            if t > 1 {
                let divided = (16 * sbh + stats) / t + 32 * sbh / t + lse;
                assert_eq!(bytes(true, &dropout()), divided);
            }
            let probabilities = 4 * A * S * S * B / t;
            let plain = 16 * sbh + 48 * sbh / t + stats;
            assert_eq!(bytes(false, &local), plain + probabilities);
            let selective = GptConfig {
                recompute_granularity: Some(RecomputeGranularity::Selective),
                ..local.clone()
            };
            assert_eq!(bytes(false, &selective), plain);
        }
    }

    #[test]
    fn full_recomputation_keeps_one_input_for_each_group() {
        let stage = StageLayers::whole(24);
        let bytes = |num_layers| {
            let full = GptConfig {
                recompute_granularity: Some(RecomputeGranularity::Full),
                recompute_num_layers: Some(num_layers),
                ..GptConfig::default()
            };
            KeptValues::new(&config(1, false, full)).of_stage(&stage)
        };
        assert_eq!(bytes(1) - bytes(24), 23 * F32 * S * B * H);
        assert_eq!(bytes(1) - bytes(5), 19 * F32 * S * B * H);
    }
}
