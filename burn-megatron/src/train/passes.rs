//! Forward and backward of microbatches through a rank's stages: what the pipeline's executor runs.

use super::microbatch::{LossSum, MicroBatch, MicroBatchShape};
use crate::Precision;
use crate::autograd::{BackwardSeed, HooksFollow};
use crate::dropout::PassContext;
use crate::error::{ErrorKind, Result};
use crate::grads::{HostSums, OverlappedReduce};
use crate::memory::MemoryAccount;
use crate::models::{Stage, StageInput};
use crate::pipeline::{Kind, Schedule, Work};
use crate::shard::{FlatBuffer, ShardedModel};
use crate::topology::PipelineShape;
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_megatron_kernels::flat::is_host;
use std::collections::HashMap;

/// What the passes of one step have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step<'a> {
    pub pipeline: PipelineShape,
    pub shape: MicroBatchShape,
    /// Empty on the stages between the first and the last.
    pub microbatches: &'a [MicroBatch],
    pub device: &'a Device,
    /// Of the first microbatch.
    pub context: PassContext,
    /// From one microbatch's first sample to the next's, in the global batch.
    pub samples_apart: u64,
    pub calculate_per_token_loss: bool,
    /// What the loss is multiplied by before its backward.
    pub backward_scale: f64,
    /// The type of what stages exchange.
    pub precision: Precision,
    /// The rank, where it is an error that a loss is not a number.
    pub checked_on: Option<usize>,
}

/// A graph between a stage's forward and its backward.
struct Graph {
    /// What the forward started from, where another stage wants its gradient.
    input: Option<Tensor<3>>,
    end: End,
    /// What it keeps.
    bytes: i64,
}

/// Where gradients are summed over the step's microbatches, in flat order.
pub(super) enum GradientSums<'a> {
    /// On a card: all of a backward's at once, when it is done.
    OnCard(&'a mut FlatBuffer),
    /// On the host: each as it comes.
    OnHost(HostSums),
    /// As well, and from there they leave bucket by bucket.
    Leaving(OverlappedReduce),
}

/// What came of a step's passes on one rank.
pub(super) struct Passed {
    /// 0 but on the last stage.
    pub loss: LossSum,
    /// The most graphs that were alive at once.
    pub max_live: usize,
    /// The most bytes that they kept at once; 0 where nobody counts.
    pub max_kept: u64,
}

enum End {
    Loss(Tensor<1>),
    Output(BackwardSeed),
}

/// Training: forwards keep their graphs until their backwards, which add to the gradients and free
/// them.
pub(super) struct Passes<'a, M> {
    step: Step<'a>,
    model: &'a ShardedModel<M>,
    gradients: GradientSums<'a>,
    /// The last microbatch whose backward each stage runs.
    last_backward: HashMap<usize, usize>,
    live: HashMap<(usize, usize), Graph>,
    max_live: usize,
    memory: MemoryAccount,
    /// Bytes in use before the first pass.
    before: i64,
    /// Bytes that the live graphs keep.
    kept: i64,
    max_kept: i64,
    losses: Losses,
}

impl<'a, M: Stage> Passes<'a, M> {
    pub fn new(
        step: Step<'a>,
        model: &'a ShardedModel<M>,
        gradients: GradientSums<'a>,
        schedule: &Schedule,
        rank: usize,
        memory: MemoryAccount,
    ) -> Self {
        Passes {
            step,
            model,
            gradients,
            last_backward: schedule
                .compute(rank)
                .filter(|action| action.kind == Kind::Backward)
                .map(|action| (action.stage, action.microbatch))
                .collect(),
            live: HashMap::new(),
            max_live: 0,
            memory,
            before: in_use(memory),
            kept: 0,
            max_kept: 0,
            losses: Losses::default(),
        }
    }

    /// The stage's chunk for a microbatch whose gradients are added up as they come.
    fn hooked(&self, stage: usize, microbatch: usize) -> Option<M> {
        let chunk = self.step.pipeline.chunk_of(stage);
        let (module, first) = (&self.model.chunks()[chunk], self.model.first_param(chunk));
        match &self.gradients {
            GradientSums::OnCard(_) => None,
            GradientSums::OnHost(sums) => Some(sums.hooked(module, first)),
            GradientSums::Leaving(reduce) => {
                let last = self.last_backward[&stage] == microbatch;
                Some(reduce.hooked(module, first, last))
            }
        }
    }

    /// What came of it.
    ///
    /// # Errors
    /// If a loss is not a number, and that is one.
    pub fn finish(self) -> Result<Passed> {
        // What stays although every graph is gone was no graph's: the matrix products' workspace, which
        // the first step allocates.
        let stays = (in_use(self.memory) - self.before).max(0);
        Ok(Passed {
            loss: self.losses.finish(&self.step)?,
            max_live: self.max_live,
            max_kept: (self.max_kept - stays).try_into().unwrap_or(0),
        })
    }
}

impl<M: Stage> Work for Passes<'_, M> {
    fn message_bytes(&self) -> usize {
        self.step.message_bytes(&self.model.chunks()[0])
    }

    fn forward(
        &mut self,
        stage: usize,
        microbatch: usize,
        input: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        let step = self.step;
        let chunk = &self.model.chunks()[step.pipeline.chunk_of(stage)];
        let received = input.as_ref().map_or(0, Vec::capacity);
        let before = in_use(self.memory) - received as i64;
        let input = input.map(|bytes| {
            let hidden = step.hidden(chunk, &bytes, step.device);
            hidden.require_grad()
        });
        let hooked = self.hooked(stage, microbatch);
        let _follow = hooked.is_some().then(HooksFollow::the_forward);
        let chunk = hooked.as_ref().unwrap_or(chunk);
        let output = step.forward(chunk, microbatch, input.clone());
        let (end, message) = if step.is_last(stage) {
            let (losses, scaled) = step.loss(chunk, microbatch, output);
            self.losses.take(&step, microbatch, losses)?;
            (End::Loss(scaled), None)
        } else {
            let message = to_bytes(output.clone().inner());
            (End::Output(BackwardSeed::new(output)), Some(message))
        };
        let to_send = message.as_ref().map_or(0, Vec::capacity);
        let bytes = in_use(self.memory) - before - to_send as i64;
        let graph = Graph { input, end, bytes };
        self.live.insert((stage, microbatch), graph);
        self.max_live = self.max_live.max(self.live.len());
        self.kept += bytes;
        self.max_kept = self.max_kept.max(self.kept);
        Ok(message)
    }

    fn backward(
        &mut self,
        stage: usize,
        microbatch: usize,
        gradient: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        let graph = self.live.remove(&(stage, microbatch));
        let graph = graph.expect("a checked schedule runs forward first");
        let Graph { input, end, bytes } = graph;
        self.kept -= bytes;
        let chunk = self.step.pipeline.chunk_of(stage);
        let mut gradients: Gradients = match (end, gradient) {
            (End::Loss(loss), _) => loss.backward(),
            (End::Output(seed), Some(bytes)) => {
                let device = self.step.device.clone().inner();
                let chunk = &self.model.chunks()[chunk];
                seed.backward(self.step.hidden(chunk, &bytes, &device))
            }
            (End::Output(_), None) => unreachable!("all stages but the last receive a gradient"),
        };
        if let GradientSums::OnCard(sums) = &mut self.gradients {
            self.model.sum_gradients(chunk, &mut gradients, sums);
        }
        let input = input.map(|input| {
            let gradient = input.grad_remove(&mut gradients);
            to_bytes(gradient.unwrap_or_else(|| input.inner().zeros_like()))
        });
        Ok(input)
    }
}

/// Evaluation: forwards alone, that keep nothing.
pub(super) struct ForwardPasses<'a, M> {
    step: Step<'a>,
    /// Without autodiff.
    chunks: &'a [M],
    losses: Losses,
}

impl<'a, M: Stage> ForwardPasses<'a, M> {
    pub fn new(step: Step<'a>, chunks: &'a [M]) -> Self {
        ForwardPasses {
            step,
            chunks,
            losses: Losses::default(),
        }
    }

    /// This rank's loss, 0 but on the last stage.
    pub fn finish(self) -> Result<LossSum> {
        self.losses.finish(&self.step)
    }
}

impl<M: Stage> Work for ForwardPasses<'_, M> {
    fn message_bytes(&self) -> usize {
        self.step.message_bytes(&self.chunks[0])
    }

    fn forward(
        &mut self,
        stage: usize,
        microbatch: usize,
        input: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        let step = self.step;
        let chunk = &self.chunks[step.pipeline.chunk_of(stage)];
        let input = input.map(|bytes| step.hidden(chunk, &bytes, step.device));
        let output = step.forward(chunk, microbatch, input);
        if step.is_last(stage) {
            let (losses, _) = step.loss(chunk, microbatch, output);
            self.losses.take(&step, microbatch, losses)?;
            return Ok(None);
        }
        Ok(Some(to_bytes(output)))
    }

    fn backward(&mut self, _: usize, _: usize, _: Option<Vec<u8>>) -> Result<Option<Vec<u8>>> {
        unreachable!("an evaluation has no backward")
    }
}

impl Step<'_> {
    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.pipeline.num_stages()
    }

    /// `[s, b, h]` of what stages exchange.
    fn hidden_shape<M: Stage>(&self, chunk: &M) -> [usize; 3] {
        [
            self.shape.hidden_seq,
            self.shape.samples,
            chunk.hidden_size(),
        ]
    }

    fn message_bytes<M: Stage>(&self, chunk: &M) -> usize {
        self.precision.bytes() * self.hidden_shape(chunk).iter().product::<usize>()
    }

    /// What a stage received.
    fn hidden<M: Stage>(&self, chunk: &M, bytes: &[u8], device: &Device) -> Tensor<3> {
        from_bytes(bytes, self.hidden_shape(chunk), self.precision, device)
    }

    fn forward<M: Stage>(
        &self,
        chunk: &M,
        microbatch: usize,
        hidden: Option<Tensor<3>>,
    ) -> Tensor<3> {
        let first_sample = self.context.first_sample + microbatch as u64 * self.samples_apart;
        let context = PassContext {
            first_sample,
            ..self.context
        };
        let input = match hidden {
            Some(hidden) => StageInput::Hidden(hidden),
            None => {
                let microbatch = &self.microbatches[microbatch];
                StageInput::Tokens(self.shape.inputs(microbatch, self.device))
            }
        };
        chunk.forward(input, &context)
    }

    /// The losses `[b, s]` without a graph, and what their backward starts from.
    fn loss<M: Stage>(
        &self,
        chunk: &M,
        microbatch: usize,
        hidden: Tensor<3>,
    ) -> (Tensor<2>, Tensor<1>) {
        let microbatch = &self.microbatches[microbatch];
        let labels = self.shape.labels(microbatch, self.device);
        let tokens = self.shape.tokens_that_count(microbatch);
        let weight = self.backward_scale
            * match self.calculate_per_token_loss {
                true => 1.0,
                false => 1.0 / (tokens.max(1.0) * self.microbatches.len() as f64),
            };
        let weights = self.shape.weights(microbatch, weight);
        let losses = chunk.weighted_loss(hidden, labels, &weights);
        let values = losses.clone().inner();
        let weights = TensorData::new(weights, losses.dims());
        let weights = Tensor::from_data(weights, (&losses.device(), DType::F32));
        (values, (losses * weights).sum())
    }

    /// The sum of a microbatch's losses.
    fn read(&self, number: usize, losses: Tensor<2>) -> Result<LossSum> {
        let microbatch = &self.microbatches[number];
        let loss = LossSum {
            sum: self.shape.sum(losses, microbatch),
            tokens: self.shape.tokens_that_count(microbatch),
        };
        if let (Some(rank), false) = (self.checked_on, loss.sum.is_finite()) {
            let reason = format!(
                "found a loss of {} in micro batch {number} of iteration {}",
                loss.sum,
                self.context.step + 1
            );
            return Err(ErrorKind::Rank { rank, reason }.into());
        }
        Ok(loss)
    }
}

/// The losses of a rank's microbatches. A read waits for all that a card was given to do: there it comes after the last
/// microbatch, so that the card always has work.
#[derive(Default)]
struct Losses {
    sum: LossSum,
    unread: Vec<(usize, Tensor<2>)>,
}

impl Losses {
    fn take(&mut self, step: &Step<'_>, microbatch: usize, losses: Tensor<2>) -> Result<()> {
        match is_host(step.device) {
            true => self.sum.add(step.read(microbatch, losses)?),
            false => self.unread.push((microbatch, losses)),
        }
        Ok(())
    }

    fn finish(mut self, step: &Step<'_>) -> Result<LossSum> {
        for (microbatch, losses) in self.unread {
            self.sum.add(step.read(microbatch, losses)?);
        }
        Ok(self.sum)
    }
}

/// Bytes in use; 0 where nobody counts.
fn in_use(memory: MemoryAccount) -> i64 {
    let bytes = memory.current().unwrap_or(0);
    bytes.try_into().unwrap_or(i64::MAX)
}

/// A tensor as a message.
pub(super) fn to_bytes(x: Tensor<3>) -> Vec<u8> {
    x.into_data().as_bytes().to_vec()
}

/// The way back.
pub(super) fn from_bytes(
    bytes: &[u8],
    shape: [usize; 3],
    precision: Precision,
    device: &Device,
) -> Tensor<3> {
    Tensor::from_data(precision.data(bytes, shape), (device, precision.dtype()))
}
