//! What a run is made of, validated as a whole.

use super::{BatchSizes, RampupBatchSize, RankMemory, StepVolumes};
use crate::error::{Error, ErrorKind, Result, Violation};
use crate::grads::{Buckets, DataParallelConfig};
use crate::launch::ProcessGroups;
use crate::layers::{Activation, Normalization};
use crate::models::gpt::{GptConfig, GptModelConfig};
use crate::optim::{LrSchedule, MixedPrecisionConfig, OptimizerConfig, WeightDecaySchedule};
use crate::pipeline::Schedule;
use crate::topology::{
    BatchShape, Layout, ModelShape, ParallelConfig, PipelineSchedule, PipelineShape,
    batch_violation, validate,
};
use crate::{Kernels, RankDevice};
use serde::{Deserialize, Serialize};

/// How much data a step takes, under the names of Megatron's flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Tokens of a sample.
    pub seq_length: usize,
    /// Samples of one forward pass on one data-parallel rank.
    pub micro_batch_size: usize,
    /// Samples of one optimizer step, over all ranks.
    pub global_batch_size: usize,
}

impl BatchConfig {
    fn shape(&self) -> BatchShape {
        BatchShape {
            micro_batch_size: self.micro_batch_size,
            global_batch_size: self.global_batch_size,
        }
    }
}

impl Default for BatchConfig {
    fn default() -> Self {
        BatchConfig {
            seq_length: 128,
            micro_batch_size: 4,
            global_batch_size: 16,
        }
    }
}

/// Everything that fixes the numbers of a GPT training run, as the user gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    pub model: GptConfig,
    pub parallel: ParallelConfig,
    pub data_parallel: DataParallelConfig,
    pub mixed_precision: MixedPrecisionConfig,
    /// What the ranks compute on.
    pub device: RankDevice,
    pub batch: BatchConfig,
    /// Smaller global batches at the start.
    pub rampup_batch_size: Option<RampupBatchSize>,
    pub optimizer: OptimizerConfig,
    /// Entries of the vocabulary, without padding.
    pub vocab_size: usize,
    pub train_iters: usize,
    pub seed: u64,
    /// Average the loss over the tokens of the global batch. Otherwise, as Megatron's default,
    /// over each microbatch's tokens first and then over the microbatches.
    pub calculate_per_token_loss: bool,
    /// Stop where a loss or a gradient is not a finite number.
    pub check_for_nan_in_loss_and_grad: bool,
}

impl TrainConfig {
    /// Whether its operations are fused on its device.
    fn fuses(&self) -> bool {
        let (kernels, precision) = (
            self.model.transformer_impl,
            self.mixed_precision.precision(),
        );
        kernels.fuse_on(&self.device.of_rank(0), precision.dtype())
    }

    /// Validates everything at once.
    ///
    /// # Errors
    /// Every broken rule, each with the nearest legal values.
    pub fn resolve(self) -> Result<ResolvedConfig> {
        let mut violations = Vec::new();
        if self.train_iters == 0 {
            violations.push(Violation {
                rule: "train_iters is 0, but a run has at least one iteration".into(),
                nearest: vec!["1".into()],
            });
        }
        violations.extend(self.model.violations());
        violations.extend(self.optimizer.violations());
        violations.extend(self.mixed_precision.violations());
        let precision = self.mixed_precision.precision();
        violations.extend(self.data_parallel.violations(precision));
        let layout = violations_of(self.layout(), &mut violations)?;
        let ranks = layout.as_ref().map_or(1, |layout| layout.grid.world_size());
        let device = self.device.violation(ranks);
        if device.is_none() && self.model.transformer_impl == Kernels::Fused && !self.fuses() {
            let rule = format!(
                "transformer_impl is fused, but there are no fused kernels for {} on device {}",
                precision.name(),
                self.device.name()
            );
            violations.push(Violation::new(rule, ["auto", "local"]));
        }
        violations.extend(device);
        let schedule = LrSchedule::new(
            &self.optimizer.schedule(),
            self.train_iters.max(1) as u64,
            self.batch.global_batch_size as u64,
        );
        let schedule = violations_of(schedule, &mut violations)?;
        if let Some(layout) = &layout {
            violations.extend(self.recompute_violation(layout));
            let at_once = self.batch.micro_batch_size * layout.dp;
            let whole = self.batch.global_batch_size;
            let rampup = self.rampup_batch_size.iter();
            violations.extend(rampup.flat_map(|rampup| rampup.violations(whole, at_once)));
        }
        match (layout, schedule) {
            (Some(layout), Some(schedule)) if violations.is_empty() => Ok(ResolvedConfig {
                config: self,
                layout,
                schedule,
            }),
            _ => Err(Error::config(violations)),
        }
    }

    fn layout(&self) -> Result<Layout> {
        let model = &self.model;
        let shape = ModelShape {
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_attention_heads: model.num_attention_heads,
            num_query_groups: model.num_query_groups(),
            kv_channels: model.kv_channels,
            seq_length: self.batch.seq_length,
            max_position_embeddings: self.max_position_embeddings(),
            ffn_hidden_size: model.ffn_hidden_size(),
            vocab_size: self.vocab_size,
            make_vocab_size_divisible_by: model.make_vocab_size_divisible_by,
        };
        validate(&self.parallel, &shape, &self.batch.shape())
    }

    /// Megatron's rule for `recompute_num_layers`, where stages may be of several sizes.
    fn recompute_violation(&self, layout: &Layout) -> Option<Violation> {
        let layers = self.model.recompute_num_layers?;
        let pp = layout.grid.sizes().pp;
        let stages = (0..pp).flat_map(|rank| layout.stages_of(rank));
        let most = stages.map(|stage| stage.layers.len()).max()?;
        (!(1..=most).contains(&layers)).then(|| {
            let rule = format!(
                "recompute_num_layers is {layers}, but must be 1 to {most}, the layers of the largest stage"
            );
            Violation::new(rule, [layers.clamp(1, most).to_string()])
        })
    }

    fn max_position_embeddings(&self) -> usize {
        self.model
            .max_position_embeddings
            .unwrap_or(self.batch.seq_length)
    }
}

/// The value, or `None` with its broken rules added to the others.
fn violations_of<T>(result: Result<T>, violations: &mut Vec<Violation>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.kind() {
            ErrorKind::Config(broken) => {
                violations.extend(broken.iter().cloned());
                Ok(None)
            }
            _ => Err(error),
        },
    }
}

/// A configuration that keeps every rule, with what follows from it.
#[derive(Debug, Clone)]
pub struct ResolvedConfig {
    config: TrainConfig,
    layout: Layout,
    schedule: LrSchedule,
}

impl ResolvedConfig {
    /// What was asked for.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The grid of ranks, the microbatches, the padded vocabulary.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What fixes the model's parameters.
    pub fn model(&self) -> GptModelConfig {
        GptModelConfig {
            transformer: self.config.model.transformer(),
            vocab_size: self.config.vocab_size,
            padded_vocab_size: self.layout.padded_vocab_size,
            max_position_embeddings: self.config.max_position_embeddings(),
            position_embedding_type: self.config.model.position_embedding_type,
            untie_embeddings_and_output_weights: self
                .config
                .model
                .untie_embeddings_and_output_weights,
        }
    }

    /// Parameters of the whole model, vocabulary padding included.
    pub fn num_parameters(&self) -> usize {
        self.model().num_parameters()
    }

    /// Parameters of one rank of that place in the pipeline.
    pub fn parameters_per_rank(&self, pp_rank: usize) -> usize {
        let (model, tp) = (self.model(), self.layout.grid.sizes().tp);
        let stages = self.layout.stages_of(pp_rank);
        stages.map(|stage| model.stage_parameters(stage, tp)).sum()
    }

    /// The buckets of the flat buffers of a rank of that place in the pipeline.
    pub(super) fn buckets(&self, pp_rank: usize) -> Buckets {
        let (model, sizes) = (self.model(), self.layout.grid.sizes());
        let tied = !model.untie_embeddings_and_output_weights && sizes.pp > 1;
        let table = model.transformer.hidden_size * model.padded_vocab_size / sizes.tp;
        let mut segments = vec![0];
        for stage in self.layout.stages_of(pp_rank) {
            let all = model.stage_parameters(stage, sizes.tp);
            match tied && (stage.is_first() || stage.is_last()) {
                true => segments.extend([table, all - table]),
                false => *segments.last_mut().expect("at least one") += all,
            }
        }
        let size = self.config.data_parallel.ddp_bucket_size;
        Buckets::of_segments(segments, size, self.layout.dp)
    }

    /// Elements of the replicated parameters of one rank of that place in the pipeline whose gradients
    /// are summed over the tensor-parallel group.
    pub(super) fn partial_gradients(&self, pp_rank: usize) -> usize {
        let model = self.model();
        let sequence_parallel = self.config.parallel.sequence_parallel;
        let stages = self.layout.stages_of(pp_rank);
        stages
            .map(|stage| match sequence_parallel {
                true => model.replicated_parameters(stage),
                false => stage.layers.len() * model.head_norm_parameters(),
            })
            .sum()
    }

    /// Whether its operations are fused.
    pub fn fuses(&self) -> bool {
        self.config.fuses()
    }

    /// The operations that run fused.
    pub fn fused_operations(&self) -> Vec<&'static str> {
        if !self.fuses() {
            return Vec::new();
        }
        let (given, model) = (&self.config.model, self.model().transformer);
        let norm = match model.normalization {
            Normalization::LayerNorm => "LayerNorm",
            Normalization::RmsNorm => "RMSNorm",
        };
        let activation = match (model.activation, given.disable_bias_linear) {
            (Activation::Gelu(_), false) => Some("bias and GELU"),
            (Activation::Gelu(_), true) => Some("GELU"),
            (Activation::SwiGlu, _) => Some("SwiGLU"),
            (Activation::SquaredRelu, _) => None,
        };
        let bias = (!given.disable_bias_linear).then_some("linear layer and bias");
        let rotary = model.rotary.is_some().then_some("rotary positions");
        let dropout = (model.hidden_dropout > 0.0).then_some("dropout and residual");
        let all = [
            Some(norm),
            Some("attention"),
            activation,
            rotary,
            dropout,
            bias,
            Some("output layer and loss"),
        ];
        all.into_iter().flatten().collect()
    }

    /// What a rank of that place in the pipeline communicates in one step.
    pub fn step_volumes(&self, pp_rank: usize) -> StepVolumes {
        StepVolumes::of(self, pp_rank)
    }

    /// What a rank of that place in the pipeline needs memory for.
    pub fn rank_memory(&self, pp_rank: usize) -> RankMemory {
        RankMemory::of(self, pp_rank)
    }

    /// What the ranks of the pipeline do in one step.
    pub fn pipeline_schedule(&self) -> Schedule {
        Schedule::new(self.layout.pipeline_schedule, self.layout.pipeline())
            .expect("the layout was validated with its schedule")
    }

    /// What a trainer of this run needs to know.
    pub fn trainer(&self) -> TrainerConfig {
        TrainerConfig {
            schedule: self.schedule.clone(),
            weight_decay: self.config.optimizer.weight_decay_schedule(
                (self.config.train_iters * self.config.batch.global_batch_size) as u64,
            ),
            optimizer: self.config.optimizer.clone(),
            batch: self.config.batch,
            rampup_batch_size: self.config.rampup_batch_size,
            vocab_size: self.config.vocab_size,
            seed: self.config.seed,
            calculate_per_token_loss: self.config.calculate_per_token_loss,
            pipeline_schedule: Some(self.layout.pipeline_schedule),
            microbatch_group_size_per_virtual_pipeline_stage: self.layout.group_size,
            data_parallel: self.config.data_parallel,
            mixed_precision: self.config.mixed_precision,
            check_for_nan_in_loss_and_grad: self.config.check_for_nan_in_loss_and_grad,
        }
    }
}

/// What a [`Trainer`](super::Trainer) needs to know beside its model.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    pub schedule: LrSchedule,
    pub weight_decay: WeightDecaySchedule,
    pub optimizer: OptimizerConfig,
    pub batch: BatchConfig,
    /// Smaller global batches at the start.
    pub rampup_batch_size: Option<RampupBatchSize>,
    /// Tokens are checked against it.
    pub vocab_size: usize,
    /// Of the dropout's masks.
    pub seed: u64,
    pub calculate_per_token_loss: bool,
    /// `1f1b` where not given, `interleaved` for several chunks on each rank.
    pub pipeline_schedule: Option<PipelineSchedule>,
    /// For `interleaved`; the pipeline size where not given.
    pub microbatch_group_size_per_virtual_pipeline_stage: Option<usize>,
    pub data_parallel: DataParallelConfig,
    /// The type must be the model's.
    pub mixed_precision: MixedPrecisionConfig,
    /// Stop where a loss or a gradient is not a finite number; otherwise steps with such gradients update
    /// nothing and are counted.
    pub check_for_nan_in_loss_and_grad: bool,
}

impl TrainerConfig {
    /// For a model of your own: the loss averaged over the global batch's tokens.
    ///
    /// # Errors
    /// Every rule that the schedule breaks.
    pub fn new(
        optimizer: OptimizerConfig,
        batch: BatchConfig,
        vocab_size: usize,
        train_iters: usize,
    ) -> Result<Self> {
        let samples = batch.global_batch_size as u64;
        let schedule = LrSchedule::new(&optimizer.schedule(), train_iters as u64, samples)?;
        Ok(TrainerConfig {
            weight_decay: optimizer.weight_decay_schedule(train_iters as u64 * samples),
            schedule,
            optimizer,
            batch,
            rampup_batch_size: None,
            vocab_size,
            seed: 1234,
            calculate_per_token_loss: true,
            pipeline_schedule: None,
            microbatch_group_size_per_virtual_pipeline_stage: None,
            data_parallel: DataParallelConfig::default(),
            mixed_precision: MixedPrecisionConfig::default(),
            check_for_nan_in_loss_and_grad: true,
        })
    }

    /// The global batch of every step.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes {
            whole: self.batch.global_batch_size,
            rampup: self.rampup_batch_size,
        }
    }

    /// That the pipeline's schedule can run every batch on the way to the whole.
    pub(super) fn check_rampup(&self, virtual_stages: usize, groups: &ProcessGroups) -> Result<()> {
        let whole = self.batch.global_batch_size;
        let mut sizes = (self.rampup_batch_size.iter()).flat_map(|rampup| rampup.sizes(whole));
        sizes.try_for_each(|size| self.schedule_of(virtual_stages, groups, size).map(drop))
    }

    /// The schedule of a pipeline of these groups with `virtual_stages` on each rank.
    pub(super) fn schedule_of(
        &self,
        virtual_stages: usize,
        groups: &ProcessGroups,
        global_batch_size: usize,
    ) -> Result<Schedule> {
        let (pp, dp) = (groups.pp.comm.size(), groups.dp.comm.size());
        let kind = self.pipeline_schedule;
        let kind = kind.unwrap_or(PipelineSchedule::default_for(virtual_stages));
        let batch = BatchShape {
            global_batch_size,
            ..self.batch.shape()
        };
        if let Some(violation) = batch_violation(&batch, dp) {
            return Err(Error::config(vec![violation]));
        }
        let shape = PipelineShape {
            ranks: pp,
            virtual_stages,
            // Of a micro batch of nothing there are none, which the schedule refuses.
            microbatches: (batch.global_batch_size)
                .checked_div(batch.micro_batch_size * dp)
                .unwrap_or_default(),
            group_size: self.microbatch_group_size_per_virtual_pipeline_stage,
        };
        Schedule::new(kind, shape)
    }
}
