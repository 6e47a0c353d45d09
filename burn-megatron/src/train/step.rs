//! One rank's trainer.

use super::microbatch::{LossSum, MicroBatch, MicroBatchShape};
use super::passes::{ForwardPasses, GradientSums, Passed, Passes, Step};
use super::{MeasuredMemory, RankMemory, ResolvedConfig, TrainerConfig};
use crate::comm::background::Background;
use crate::dropout::PassContext;
use crate::error::{Error, ErrorKind, Result, Violation};
use crate::grads::{self, DataParallel, HostSums, OverlappedGather, OverlappedReduce};
use crate::launch::RankContext;
use crate::layers::LayerSpec;
use crate::models::Stage;
use crate::models::gpt::GptModel;
use crate::optim::{LossScaler, Optimizer, StepFactors};
use crate::pipeline::{self, Schedule, Span};
use crate::shard::{FlatBuffer, FullWeights, ParallelBuilder, ShardedModel, upload};
use crate::topology::nearest::multiples;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::flat::is_host;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// What a step reports; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutput {
    /// Counts from 1.
    pub iteration: usize,
    /// Mean over the tokens of the global batch that count.
    pub lm_loss: f32,
    /// Before clipping.
    pub grad_norm: f64,
    /// The rate this step used.
    pub learning_rate: f64,
    /// Samples of all steps so far, over all ranks.
    pub consumed_samples: u64,
    /// Tokens of this step, over all ranks.
    pub tokens: u64,
    /// Steps so far whose gradients were not finite, and which updated nothing.
    pub skipped_iterations: u64,
    /// What this step's mean loss was multiplied by before its backward, under fp16.
    pub loss_scale: Option<f64>,
}

/// One rank's model, gradients and optimizer.
#[derive(Debug)]
pub struct Trainer<M = GptModel> {
    pub(super) model: ShardedModel<M>,
    pub(super) config: TrainerConfig,
    pub(super) context: RankContext,
    schedule: Schedule,
    evaluation: Schedule,
    pub(super) data_parallel: Arc<DataParallel>,
    pub(super) optimizer: Optimizer,
    /// The parameters that this rank owns, packed: the optimizer's copy of them, or the model's own.
    pub(super) values: FlatBuffer,
    /// Whether the model's parameters are views of `values`.
    shares_values: bool,
    /// Sums over the step's microbatches, in flat order; between steps perhaps the parameters.
    gradients: FlatBuffer,
    pub(super) iteration: usize,
    /// Samples of all steps so far, over all ranks.
    pub(super) consumed_samples: u64,
    /// Steps that updated nothing, for gradients that are not finite.
    pub(super) skipped_iterations: u64,
    /// Samples of those steps: the schedules of learning rate and weight decay do not count them.
    pub(super) skipped_samples: u64,
    pub(super) loss_scaler: Option<LossScaler>,
    /// The thread that communicates beside the computation, and the parameters that it brings.
    background: Option<Arc<Background>>,
    arriving: Option<OverlappedGather>,
    last_step: PipelineRecord,
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

    /// One optimizer step over this data-parallel rank's share of the global batch. Every rank calls
    /// it; the microbatches are those of the ranks that
    /// [read the data](RankContext::reads_data), which share them with their tensor-parallel group:
    /// what other ranks pass is not looked at.
    ///
    /// # Errors
    /// If a microbatch is misshapen or has a token outside of the vocabulary, or if another rank
    /// fails.
    pub fn train_step(&mut self, microbatches: &[MicroBatch]) -> Result<StepOutput> {
        self.context.memory.reset_peak();
        let samples = self.config.batch_sizes().at(self.consumed_samples);
        self.schedule_batch(samples)?;
        let microbatches = self.take(microbatches, &self.schedule)?;
        let loss = self.forward_backward(&microbatches)?;
        let groups = &self.context.groups;
        let loss = loss
            .all_reduce(&groups.dp.comm)?
            .all_reduce(&groups.pp.comm)?;

        let average = match self.config.calculate_per_token_loss {
            true => 1.0 / loss.tokens.max(1.0),
            false => 1.0 / groups.dp.comm.size() as f64,
        };
        let loss_scale = self.loss_scale();
        let average = average / self.backward_scale(samples);
        let norm = average * self.finish_gradients()?;
        let overflow = !norm.is_finite();
        let expected = self.loss_scaler.as_ref().is_some_and(LossScaler::can_fall);
        if overflow && !expected && self.config.check_for_nan_in_loss_and_grad {
            return Err(self.not_finite(norm));
        }
        if let Some(scaler) = &mut self.loss_scaler {
            scaler.update(overflow);
        }
        let scheduled = self.consumed_samples - self.skipped_samples;
        let learning_rate = self.config.schedule.learning_rate(scheduled);
        if !overflow {
            let clip = grads::clip_coefficient(norm, self.config.optimizer.clip_grad);
            let weight_decay = self.config.weight_decay.weight_decay(scheduled);
            let step = StepFactors {
                grad_scale: average * clip,
                lr: learning_rate,
                weight_decay,
            };
            self.take_values();
            let (values, precision) = (&mut self.values, self.model.precision());
            let rounded = (self.optimizer).step(values, &self.gradients, step, precision);
            self.publish_values(rounded)?;
        } else {
            self.skipped_iterations += 1;
            self.skipped_samples += samples as u64;
        }
        self.iteration += 1;
        self.consumed_samples += samples as u64;
        if let Some(measured) = &mut self.memory {
            measured.peak = self.context.memory.peak().unwrap_or(0);
        }
        Ok(StepOutput {
            iteration: self.iteration,
            lm_loss: loss.mean(),
            grad_norm: norm,
            learning_rate,
            consumed_samples: self.consumed_samples,
            tokens: (samples * self.config.batch.seq_length) as u64,
            skipped_iterations: self.skipped_iterations,
            loss_scale,
        })
    }

    /// Runs the schedule, and sums the gradients over the microbatches and the data-parallel group, after
    /// the last backward or beside it. Returns this rank's loss.
    fn forward_backward(&mut self, microbatches: &[MicroBatch]) -> Result<LossSum> {
        let groups = &self.context.groups;
        let device = self.context.device.clone();
        let step = self.step(microbatches, &self.schedule, &device, true);
        self.gradients.clear();
        if self.gradients.len() != self.model.num_elements() {
            // A step that failed took them along.
            self.gradients = FlatBuffer::zeros(self.model.num_elements(), &device);
        }
        let params = self.model.params();
        let overlaps = self.config.data_parallel.overlap_grad_reduce;
        let background = self.background.as_ref().filter(|_| overlaps);
        let leaving = background.map(|background| {
            let sums = std::mem::take(&mut self.gradients).into_host();
            let dp = &groups.dp.comm;
            OverlappedReduce::new(&self.data_parallel, params, sums, background, dp)
        });
        let mut here = None;
        let sums = match (&leaving, is_host(&device)) {
            (Some(leaving), _) => GradientSums::Leaving(leaving.clone()),
            (None, true) => {
                let sums = std::mem::take(&mut self.gradients).into_host();
                let sums = here.insert(HostSums::new(params, sums));
                GradientSums::OnHost(sums.clone())
            }
            (None, false) => GradientSums::OnCard(&mut self.gradients),
        };
        let (pp, memory) = (&*groups.pp.comm, self.context.memory);
        let mut passes = Passes::new(step, &self.model, sums, &self.schedule, pp.rank(), memory);
        let spans = pipeline::execute(&self.schedule, pp, &mut passes, self.context.clock)?;
        let Passed {
            loss,
            max_live,
            max_kept,
        } = passes.finish()?;
        self.last_step = PipelineRecord { spans, max_live };
        if let Some(measured) = &mut self.memory {
            measured.parts.activations = max_kept;
        }
        // Nothing of the group is under way in the background when the rank itself calls it.
        let arriving = self.arriving.take();
        arriving.map_or(Ok(()), OverlappedGather::finish)?;
        if let Some(here) = here {
            self.gradients = FlatBuffer::Host(here.finish());
        }
        match leaving {
            Some(leaving) => self.gradients = FlatBuffer::new(leaving.finish()?, &device),
            None if groups.dp.comm.size() == 1 => {}
            None => self
                .gradients
                .change(0..self.model.num_elements(), |sums| {
                    self.data_parallel.reduce(sums, &*groups.dp.comm)
                })?,
        }
        Ok(loss)
    }

    /// Sums what the pipeline's ends both hold and what each tensor-parallel rank has a part of, and returns
    /// the whole model's norm.
    fn finish_gradients(&mut self) -> Result<f64> {
        let (groups, gradients) = (&self.context.groups, &mut self.gradients);
        let (params, owned) = (self.model.params(), self.data_parallel.owned());
        grads::all_reduce_tied(gradients, params, owned, &*groups.embedding.comm)?;
        grads::all_reduce_partial(gradients, params, &*groups.tp.comm)?;
        let squares = self.data_parallel.squares(gradients, params, groups)?;
        grads::global_norm(squares, groups)
    }

    /// The loss over this rank's share of some batch, without training. Every rank calls it, as
    /// [`train_step`](Trainer::train_step), and gets the loss over all.
    ///
    /// # Errors
    /// As for [`train_step`](Trainer::train_step).
    pub fn evaluate(&self, microbatches: &[MicroBatch]) -> Result<LossSum> {
        let groups = &self.context.groups;
        let microbatches = self.take(microbatches, &self.evaluation)?;
        let chunks: Vec<M> = self.model.chunks().iter().map(Module::valid).collect();
        let device = self.context.device.clone().inner();
        let mut passes = ForwardPasses::new(
            self.step(&microbatches, &self.evaluation, &device, false),
            &chunks,
        );
        pipeline::execute(
            &self.evaluation,
            &*groups.pp.comm,
            &mut passes,
            self.context.clock,
        )?;
        passes
            .finish()?
            .all_reduce(&groups.dp.comm)?
            .all_reduce(&groups.pp.comm)
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

    /// What is said of a gradient norm that is no number: the first parameter that makes it so, if it is one
    /// of this rank's.
    fn not_finite(&self, norm: f64) -> Error {
        let parts = self.data_parallel.owned().parts().iter();
        let mut broken = parts.filter(|part| {
            let gradients = self.gradients.part(part.flat.clone());
            gradients.iter().any(|gradient| !gradient.is_finite())
        });
        let whose = match broken.next() {
            Some(part) => format!("that of {}", self.model.params()[part.param].name),
            None => "another rank's".into(),
        };
        let scale = match self.loss_scale() {
            Some(scale) => format!(", at a loss scale of {scale} that cannot fall"),
            None => String::new(),
        };
        let reason = format!(
            "found a gradient norm of {norm} in iteration {}: {whose} is not finite{scale}",
            self.iteration + 1
        );
        let rank = self.context.rank;
        ErrorKind::Rank { rank, reason }.into()
    }

    /// What a step's mean loss is multiplied by, under fp16.
    fn loss_scale(&self) -> Option<f64> {
        self.loss_scaler.as_ref().map(|scaler| scaler.now().scale)
    }

    /// What a backward's loss is multiplied by in a step of so many samples. Under fp16 a sum over tokens is
    /// brought to the size of the mean, so that a loss scale means the same for both.
    fn backward_scale(&self, samples: usize) -> f64 {
        let tokens = samples * self.config.batch.seq_length;
        match (self.loss_scale(), self.config.calculate_per_token_loss) {
            (None, _) => 1.0,
            (Some(scale), false) => scale,
            (Some(scale), true) => scale / tokens as f64,
        }
    }

    /// Waits for updated parameters that are on their way from other ranks, as the next forward would.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn wait_for_parameters(&mut self) -> Result<()> {
        self.arriving
            .take()
            .map_or(Ok(()), OverlappedGather::finish)
    }

    /// Takes what the model shares with the optimizer from it, to be changed in place and
    /// [published](Trainer::publish_values).
    pub(super) fn take_values(&mut self) {
        if self.shares_values {
            self.model.let_go();
            let values = std::mem::take(&mut self.values).into_host();
            self.values = FlatBuffer::Host(values);
        }
    }

    /// Gives the model the values that the ranks of the data-parallel group own: `rounded` holds those of this rank in
    /// the model's type, if the device has made them.
    pub(super) fn publish_values(&mut self, rounded: Option<Tensor<1>>) -> Result<()> {
        if self.shares_values {
            let values = std::mem::take(&mut self.values).into_host();
            self.values = share(&mut self.model, values);
            return Ok(());
        }
        let dp = &self.context.groups.dp.comm;
        if let (Some(background), true) = (
            &self.background,
            self.config.data_parallel.overlap_param_gather,
        ) {
            let (packed, data_parallel) = (self.values.host(), &self.data_parallel);
            let arriving = OverlappedGather::start(data_parallel, &packed, background, dp);
            self.model
                .map_chunks(|chunk, params| arriving.give(chunk, params));
            self.arriving = Some(arriving);
            return Ok(());
        }
        let owns_all = self.values.len() == self.model.num_elements();
        if let (FlatBuffer::Device(values), true) = (&self.values, owns_all) {
            let round = || values.clone().cast(self.model.precision().float_dtype());
            let rounded = rounded.unwrap_or_else(round);
            self.model.set_values_on_device(rounded);
            return Ok(());
        }
        // Between steps the gradients are used up: their buffer takes the parameters.
        let packed = self.values.host();
        let mut spare = Vec::new();
        let parameters = match &mut self.gradients {
            FlatBuffer::Host(gradients) => gradients,
            FlatBuffer::Device(_) => {
                spare.resize(self.model.num_elements(), 0.0);
                &mut spare
            }
        };
        self.data_parallel.gather(&packed, parameters, &**dp)?;
        self.model.set_values(parameters);
        Ok(())
    }

    /// Makes the schedule one for a step of so many samples.
    fn schedule_batch(&mut self, samples: usize) -> Result<()> {
        let at_once = self.config.batch.micro_batch_size * self.context.groups.dp.comm.size();
        if self.schedule.shape().microbatches * at_once != samples {
            let (chunks, groups) = (self.model.chunks().len(), &self.context.groups);
            self.schedule = self.config.schedule_of(chunks, groups, samples)?;
        }
        Ok(())
    }

    /// The step's microbatches, on the stages that need them.
    fn take<'a>(
        &self,
        microbatches: &'a [MicroBatch],
        schedule: &Schedule,
    ) -> Result<Cow<'a, [MicroBatch]>> {
        let groups = &self.context.groups;
        let (shape, count) = (self.shape(), schedule.shape().microbatches);
        let pp = &groups.pp.comm;
        if pp.rank() != 0 && pp.rank() + 1 != pp.size() {
            return Ok(Cow::Borrowed(&[]));
        }
        if self.context.reads_data() {
            shape.check(microbatches, count, self.context.rank)?;
        }
        shape.broadcast(microbatches, count, &*groups.tp.comm)
    }

    fn shape(&self) -> MicroBatchShape {
        let parts = self.sequence_parts();
        MicroBatchShape::new(&self.config.batch, parts, self.config.vocab_size)
    }

    /// Ranks that each have a part of the sequence: 1 without sequence parallelism.
    pub(super) fn sequence_parts(&self) -> usize {
        match self.model.sequence_parallel() {
            true => self.context.groups.tp.comm.size(),
            false => 1,
        }
    }

    fn step<'a>(
        &self,
        microbatches: &'a [MicroBatch],
        schedule: &Schedule,
        device: &'a Device,
        training: bool,
    ) -> Step<'a> {
        let dp = &self.context.groups.dp.comm;
        let samples = self.config.batch.micro_batch_size;
        let at_once = samples * dp.size();
        Step {
            pipeline: *schedule.shape(),
            shape: self.shape(),
            microbatches,
            device,
            context: PassContext {
                training,
                seed: self.config.seed,
                step: self.iteration as u64,
                first_sample: (dp.rank() * samples) as u64,
                layer: 0,
            },
            samples_apart: (dp.size() * samples) as u64,
            calculate_per_token_loss: self.config.calculate_per_token_loss,
            backward_scale: self.backward_scale(at_once * schedule.shape().microbatches),
            precision: self.model.precision(),
            checked_on: (training && self.config.check_for_nan_in_loss_and_grad)
                .then_some(self.context.rank),
        }
    }
}

/// Makes the parameters views of `values`, all of them in flat order, on the host.
fn share<M: Module>(model: &mut ShardedModel<M>, values: Vec<f32>) -> FlatBuffer {
    let values = upload(values, &Device::flex());
    model.set_values_on_device(values.clone());
    FlatBuffer::Device(values)
}
