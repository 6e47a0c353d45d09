//! One rank's trainer.

use super::{ResolvedConfig, TrainerConfig};
use crate::comm::{CommRef, all_gather_values};
use crate::error::{ErrorKind, Result};
use crate::grads;
use crate::launch::RankContext;
use crate::models::Stage;
use crate::models::gpt::GptModel;
use crate::optim::AdamW;
use crate::shard::{FullWeights, ParallelBuilder, ShardedModel};
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::path::Path;

/// Tokens of one microbatch of one data-parallel rank.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// `[micro batch, seq + 1]`, row by row: a sample's inputs are its first `seq`, its labels its
    /// last `seq`.
    pub tokens: Vec<i64>,
    /// `[micro batch, seq]`: which labels count; all where absent.
    pub loss_mask: Option<Vec<f32>>,
}

/// A loss over many tokens: kept as a sum, so that it can be averaged once.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSum {
    pub sum: f64,
    pub tokens: f64,
}

impl LossSum {
    /// Loss per token; 0 where no token counts.
    pub fn mean(&self) -> f32 {
        match self.tokens > 0.0 {
            true => (self.sum / self.tokens) as f32,
            false => 0.0,
        }
    }

    fn add(&mut self, other: LossSum) {
        self.sum += other.sum;
        self.tokens += other.tokens;
    }

    /// The sum over a group, added up in rank order.
    fn all_reduce(self, comm: &CommRef) -> Result<LossSum> {
        let mut total = LossSum::default();
        for [sum, tokens] in all_gather_values(&**comm, [self.sum, self.tokens])? {
            total.add(LossSum { sum, tokens });
        }
        Ok(total)
    }
}

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
}

/// One rank's model, gradients and optimizer.
#[derive(Debug)]
pub struct Trainer<M = GptModel> {
    model: ShardedModel<M>,
    config: TrainerConfig,
    context: RankContext,
    optimizer: AdamW,
    /// The optimizer's copy of the parameters, in flat order.
    values: Vec<f32>,
    /// Sums over the step's microbatches, in flat order.
    gradients: Vec<f32>,
    iteration: usize,
}

impl Trainer {
    /// A GPT with its initial weights: Megatron's rule from the run's seed, or `weights`.
    ///
    /// # Errors
    /// If `weights` do not fit the model.
    pub fn new(
        config: &ResolvedConfig,
        rank: &RankContext,
        weights: Option<&FullWeights>,
    ) -> Result<Self> {
        let builder = ParallelBuilder::new(rank);
        let mut model = ShardedModel::new(config.model().init(&builder), &builder);
        match weights {
            Some(weights) => model.load(weights)?,
            None => model.init(config.config().seed)?,
        }
        Ok(Trainer::for_model(model, config.trainer(), rank))
    }
}

impl<M: Stage> Trainer<M> {
    /// A trainer for any model whose weights are filled.
    pub fn for_model(model: ShardedModel<M>, config: TrainerConfig, rank: &RankContext) -> Self {
        Trainer {
            optimizer: AdamW::new(config.optimizer.adamw(), model.params()),
            values: model.values(),
            gradients: vec![0.0; model.num_elements()],
            model,
            config,
            context: rank.clone(),
            iteration: 0,
        }
    }

    /// The rank's model.
    pub fn model(&self) -> &ShardedModel<M> {
        &self.model
    }

    /// One optimizer step over this rank's share of the global batch. Every rank calls it.
    ///
    /// # Errors
    /// If a microbatch is misshapen or has a token outside of the vocabulary, or if another rank
    /// fails.
    pub fn train_step(&mut self, microbatches: &[MicroBatch]) -> Result<StepOutput> {
        self.gradients.fill(0.0);
        let mut loss = LossSum::default();
        for microbatch in microbatches {
            loss.add(self.forward_backward(microbatch, microbatches.len())?);
        }
        let (tp, dp) = (&self.context.groups.tp.comm, &self.context.groups.dp.comm);
        let loss = loss.all_reduce(dp)?;

        let bucket = grads::DEFAULT_BUCKET_ELEMENTS;
        grads::all_reduce_buckets(&mut self.gradients, &**dp, bucket)?;
        let average = match self.config.calculate_per_token_loss {
            true => 1.0 / loss.tokens.max(1.0),
            false => 1.0 / dp.size() as f64,
        };
        let norm = average * grads::global_norm(&self.gradients, self.model.params(), &**tp)?;
        let clip = grads::clip_coefficient(norm, self.config.optimizer.clip_grad);

        let learning_rate = self.config.schedule.learning_rate(self.consumed_samples());
        self.optimizer.step(
            &mut self.values,
            &self.gradients,
            average * clip,
            learning_rate,
        );
        self.model.set_values(&self.values);
        self.iteration += 1;
        Ok(StepOutput {
            iteration: self.iteration,
            lm_loss: loss.mean(),
            grad_norm: norm,
            learning_rate,
            consumed_samples: self.consumed_samples(),
            tokens: (self.config.batch.global_batch_size * self.config.batch.seq_length) as u64,
        })
    }

    /// The loss over this rank's share of some batch, without training. Every rank calls it, and
    /// gets the loss over all.
    ///
    /// # Errors
    /// As for [`train_step`](Trainer::train_step).
    pub fn evaluate(&self, microbatches: &[MicroBatch]) -> Result<LossSum> {
        let module = self.model.module().valid();
        let device = self.context.device.clone().inner();
        let mut total = LossSum::default();
        for microbatch in microbatches {
            let (sum, tokens) = self.masked_loss(&module, microbatch, &device)?;
            total.add(LossSum {
                sum: read_scalar(sum),
                tokens,
            });
        }
        total.all_reduce(&self.context.groups.dp.comm)
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

    fn consumed_samples(&self) -> u64 {
        (self.iteration * self.config.batch.global_batch_size) as u64
    }

    /// Forward and backward of one microbatch: adds its gradients, returns its loss.
    fn forward_backward(&mut self, microbatch: &MicroBatch, of: usize) -> Result<LossSum> {
        let device = &self.context.device;
        let (sum, tokens) = self.masked_loss(self.model.module(), microbatch, device)?;
        let loss = LossSum {
            sum: read_scalar(sum.clone().inner()),
            tokens,
        };
        let scaled = match self.config.calculate_per_token_loss {
            true => sum,
            false => sum / (tokens.max(1.0) * of as f64),
        };
        let gradients = scaled.backward();
        self.model.add_gradients(&gradients, &mut self.gradients);
        Ok(loss)
    }

    /// The sum of the losses that count, and how many they are.
    fn masked_loss(
        &self,
        module: &M,
        microbatch: &MicroBatch,
        device: &Device,
    ) -> Result<(Tensor<1>, f64)> {
        let (s, b) = (
            self.config.batch.seq_length,
            self.config.batch.micro_batch_size,
        );
        self.check(microbatch)?;
        let rows = |skip: usize| -> Tensor<2, Int> {
            let rows = microbatch
                .tokens
                .chunks(s + 1)
                .flat_map(|row| &row[skip..skip + s]);
            Tensor::from_data(
                TensorData::new(rows.copied().collect::<Vec<i64>>(), [b, s]),
                device,
            )
        };
        let loss = module.loss(rows(0), rows(1));
        Ok(match &microbatch.loss_mask {
            None => (loss.sum(), (b * s) as f64),
            Some(mask) => {
                let tokens = mask.iter().map(|m| f64::from(*m)).sum();
                let mask = Tensor::from_data(TensorData::new(mask.clone(), [b, s]), device);
                ((loss * mask).sum(), tokens)
            }
        })
    }

    fn check(&self, microbatch: &MicroBatch) -> Result<()> {
        let (s, b) = (
            self.config.batch.seq_length,
            self.config.batch.micro_batch_size,
        );
        let fail = |reason: String| {
            let rank = self.context.rank;
            Err(ErrorKind::Rank { rank, reason }.into())
        };
        let (len, want) = (microbatch.tokens.len(), b * (s + 1));
        if len != want {
            return fail(format!(
                "got a microbatch of {len} tokens, not {b} x ({s} + 1) = {want}"
            ));
        }
        if let Some(mask) = microbatch
            .loss_mask
            .as_ref()
            .filter(|mask| mask.len() != b * s)
        {
            return fail(format!(
                "got a loss mask of {} values, not {b} x {s}",
                mask.len()
            ));
        }
        let vocabulary = 0..self.config.vocab_size as i64;
        match microbatch
            .tokens
            .iter()
            .position(|token| !vocabulary.contains(token))
        {
            Some(at) => fail(format!(
                "got token {} at position {} of sample {} of a microbatch, but the vocabulary has {} \
                 entries; the data was made with another tokenizer",
                microbatch.tokens[at],
                at % (s + 1),
                at / (s + 1),
                self.config.vocab_size
            )),
            None => Ok(()),
        }
    }
}

fn read_scalar(x: Tensor<1>) -> f64 {
    f64::from(x.into_scalar::<f32>())
}
