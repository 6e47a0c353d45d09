//! One rank's trainer: what it holds, and how it is made.

use super::parameters::share;
use super::{MeasuredMemory, RankMemory, ResolvedConfig, TrainerConfig};
use crate::comm::background::Background;
use crate::error::{Error, Result, Violation};
use crate::grads::{DataParallel, OverlappedGather};
use crate::launch::RankContext;
use crate::layers::LayerSpec;
use crate::models::Stage;
use crate::models::gpt::GptModel;
use crate::optim::{LossScaler, Optimizer};
use crate::pipeline::{Schedule, Span};
use crate::shard::{FlatBuffer, FullWeights, ParallelBuilder, ShardedModel};
use crate::topology::nearest::multiples;
use burn_megatron_kernels::flat::is_host;
use std::path::Path;
use std::sync::Arc;

/// One rank's model, gradients and optimizer.
#[derive(Debug)]
pub struct Trainer<M = GptModel> {
    pub(super) model: ShardedModel<M>,
    pub(super) config: TrainerConfig,
    pub(super) context: RankContext,
    pub(super) schedule: Schedule,
    pub(super) evaluation: Schedule,
    pub(super) data_parallel: Arc<DataParallel>,
    pub(super) optimizer: Optimizer,
    /// The parameters that this rank owns, packed: the optimizer's copy of them, or the model's own.
    pub(super) values: FlatBuffer,
    /// Whether the model's parameters are views of `values`.
    pub(super) shares_values: bool,
    /// Sums over the step's microbatches, in flat order; between steps perhaps the parameters.
    pub(super) gradients: FlatBuffer,
    pub(super) iteration: usize,
    /// Samples of all steps so far, over all ranks.
    pub(super) consumed_samples: u64,
    /// Steps that updated nothing, for gradients that are not finite.
    pub(super) skipped_iterations: u64,
    /// Samples of those steps: the schedules of learning rate and weight decay do not count them.
    pub(super) skipped_samples: u64,
    pub(super) loss_scaler: Option<LossScaler>,
    /// The thread that communicates beside the computation, and the parameters that it brings.
    pub(super) background: Option<Arc<Background>>,
    pub(super) arriving: Option<OverlappedGather>,
    pub(super) last_step: PipelineRecord,
    pub(super) memory: Option<MeasuredMemory>,
}

/// What this rank did in the pipeline in one step.
#[derive(Debug, Clone, Default)]
pub struct PipelineRecord {
    /// When it ran what, in seconds since [`RankContext::clock`].
    pub spans: Vec<Span>,
    /// The most forwards that waited for their backward at once, over all of its stages.
    pub max_live: usize,
}

impl Trainer {
    /// A GPT with its initial weights: Megatron's rule from the run's seed, or `weights`. The rank
    /// makes its own pipeline stages alone.
    ///
    /// # Errors
    /// If `weights` do not fit the model.
    pub fn new(
        config: &ResolvedConfig,
        rank: &RankContext,
        weights: Option<&FullWeights>,
    ) -> Result<Self> {
        let sequence_parallel = config.config().parallel.sequence_parallel;
        let builder = ParallelBuilder::new(rank)
            .with_sequence_parallel(sequence_parallel)
            .with_precision(config.config().mixed_precision.precision())
            .with_kernels(config.config().model.transformer_impl);
        let stages = config.layout().stages_of(rank.groups.pp.comm.rank());
        let (model, spec) = (config.model(), LayerSpec::gpt());
        let chunks = stages.map(|stage| model.init_stage(&spec, stage, &builder));
        let mut model = ShardedModel::of_chunks(chunks.collect(), &builder);
        match weights {
            Some(weights) => model.load(weights)?,
            None => model.init(config.config().seed)?,
        }
        Trainer::for_model(model, config.trainer(), rank)
    }
}

impl<M: Stage> Trainer<M> {
    /// A trainer for any model whose weights are filled. With a pipeline, its chunks are the stages
    /// `rank`, `p + rank`, … of this rank's place in the pipeline.
    ///
    /// # Errors
    /// If the pipeline's schedule cannot run the batch, with what it can; or if the sequence does not
    /// divide over the ranks of a sequence-parallel model.
    pub fn for_model(
        mut model: ShardedModel<M>,
        config: TrainerConfig,
        rank: &RankContext,
    ) -> Result<Self> {
        let (seq, tp) = (config.batch.seq_length, rank.groups.tp.comm.size());
        if model.sequence_parallel() && !seq.is_multiple_of(tp) {
            let rule = format!("the {tp} tensor-parallel ranks must divide seq_length {seq}");
            let violation = Violation::new(rule, multiples(seq, tp));
            return Err(Error::config(vec![violation]));
        }
        let precision = model.precision();
        let mut violations = config.mixed_precision.violations();
        violations.extend(config.data_parallel.violations(precision));
        if precision != config.mixed_precision.precision() {
            let (made, asked) = (precision.name(), config.mixed_precision.precision().name());
            let rule = format!("the model's parameters are {made}, but its training is {asked}");
            violations.push(Violation::new(rule, ["ParallelBuilder::with_precision"]));
        }
        if !rank.device.supports_dtype(precision.dtype()) {
            let rule = format!("{:?} does not compute in {}", rank.device, precision.name());
            violations.push(Violation::new(rule, ["fp32"]));
        }
        if !violations.is_empty() {
            return Err(Error::config(violations));
        }
        let overlaps = rank.groups.dp.comm.size() > 1 && config.data_parallel.overlaps();
        let background = match overlaps {
            true => Some(Arc::new(Background::start(rank.rank)?)),
            false => None,
        };
        let (chunks, whole) = (model.chunks().len(), config.batch.global_batch_size);
        config.check_rampup(chunks, &rank.groups)?;
        let schedule = config.schedule_of(chunks, &rank.groups, whole)?;
        let dp = &*rank.groups.dp.comm;
        let data_parallel = DataParallel::new(config.data_parallel, &model, dp);
        let shares_values =
            is_host(&rank.device) && config.data_parallel.shares_weights(precision, dp.size());
        let (optimizer, optimizer_bytes) = rank.memory.measure(|| {
            let owned = data_parallel.owned();
            let rule = config.optimizer.rule();
            let optimizer = Optimizer::new(rule, model.params(), owned, &rank.device);
            let values = (!shares_values).then(|| {
                let values = owned.pack(&model.values());
                FlatBuffer::new(values, &rank.device)
            });
            (optimizer, values)
        });
        let zeros = || FlatBuffer::zeros(model.num_elements(), &rank.device);
        let (gradients, gradient_bytes) = rank.memory.measure(zeros);
        let measured = || {
            Some(RankMemory {
                weights: model.allocated()?,
                gradients: gradient_bytes?,
                optimizer: optimizer_bytes?,
                activations: 0,
            })
        };
        let memory = measured().map(|parts| MeasuredMemory { parts, peak: 0 });
        let (optimizer, values) = optimizer;
        let values = values.unwrap_or_else(|| {
            let values = model.values();
            share(&mut model, values)
        });
        Ok(Trainer {
            evaluation: schedule.forward_only(),
            schedule,
            data_parallel: Arc::new(data_parallel),
            optimizer,
            values,
            shares_values,
            gradients,
            memory,
            model,
            context: rank.clone(),
            iteration: 0,
            consumed_samples: 0,
            skipped_iterations: 0,
            skipped_samples: 0,
            loss_scaler: LossScaler::new(&config.mixed_precision),
            config,
            background,
            arriving: None,
            last_step: PipelineRecord::default(),
        })
    }

    /// The rank's model.
    pub fn model(&self) -> &ShardedModel<M> {
        &self.model
    }

    /// What the ranks of the pipeline do in a step, as of the last one.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// What this rank did in the pipeline in the last step.
    pub fn last_step(&self) -> &PipelineRecord {
        &self.last_step
    }

    /// Writes the full, unsharded weights as safetensors. Every rank calls it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save_weights(&self, path: &Path) -> Result<()> {
        // One data-parallel replica writes.
        match self.context.groups.dp.comm.rank() {
            0 => self.model.save(path),
            _ => Ok(()),
        }
    }

    /// The rank's place and groups.
    pub fn context(&self) -> &RankContext {
        &self.context
    }
}
