//! A training step, and an evaluation, of one rank.

use super::microbatch::{LossSum, MicroBatch, MicroBatchShape};
use super::passes::{ForwardPasses, GradientSums, Passed, Passes, Step};
use super::{PipelineRecord, Trainer};
use crate::dropout::PassContext;
use crate::error::{Error, ErrorKind, Result};
use crate::grads::{self, HostSums, OverlappedGather, OverlappedReduce};
use crate::models::Stage;
use crate::optim::{LossScaler, StepFactors};
use crate::pipeline::{self, Schedule};
use crate::shard::FlatBuffer;
use burn::module::Module;
use burn::tensor::Device;
use burn_megatron_kernels::flat::is_host;
use std::borrow::Cow;

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

impl<M: Stage> Trainer<M> {
    /// One optimizer step over this data-parallel rank's share of the global batch. Every rank calls
    /// it; the microbatches are those of the ranks that
    /// [read the data](crate::launch::RankContext::reads_data), which share them with their tensor-parallel group:
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
