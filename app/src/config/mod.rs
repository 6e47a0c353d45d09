//! The one configuration of a run: a TOML file, then flags over it.
//!
//! The sections are the library's own records where it has them. Defaults live in each record's
//! `Default`, so that a value has one place to come from: flag, else file, else default.

mod file;
mod sections;

pub use sections::{
    CheckpointConfig, DataConfig, GenerateConfig, LoggingConfig, TokenizerConfig, TokenizerType,
    TrainingConfig,
};

use crate::cli::TrainArgs;
use crate::error::Result;
use burn_megatron::grads::DataParallelConfig;
use burn_megatron::models::gpt::GptConfig;
use burn_megatron::optim::{MixedPrecisionConfig, OptimizerConfig};
use burn_megatron::topology::ParallelConfig;
use burn_megatron::train::{BatchConfig, TrainConfig};
use serde::{Deserialize, Serialize};

/// Everything that decides a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    pub model: GptConfig,
    pub parallel: ParallelConfig,
    pub data_parallel: DataParallelConfig,
    pub mixed_precision: MixedPrecisionConfig,
    pub training: TrainingConfig,
    pub optimizer: OptimizerConfig,
    pub checkpoint: CheckpointConfig,
    pub data: DataConfig,
    pub logging: LoggingConfig,
    pub generate: GenerateConfig,
}

impl RunConfig {
    /// The file of `--config`, if there is one, with the flags over it.
    pub fn load(args: &TrainArgs) -> Result<Self> {
        let mut config = match &args.config {
            Some(path) => file::read(path)?,
            None => RunConfig::default(),
        };
        args.apply(&mut config);
        Ok(config)
    }

    /// The part of it that the library's trainer wants; `vocab_size` is what the tokenizer says.
    pub fn train_config(&self, vocab_size: usize) -> TrainConfig {
        let training = &self.training;
        TrainConfig {
            model: self.model.clone(),
            parallel: self.parallel.clone(),
            data_parallel: self.data_parallel,
            mixed_precision: self.mixed_precision,
            device: training.device,
            batch: BatchConfig {
                seq_length: training.seq_length,
                micro_batch_size: training.micro_batch_size,
                global_batch_size: training.global_batch_size,
            },
            rampup_batch_size: training.rampup_batch_size,
            optimizer: self.optimizer.clone(),
            vocab_size,
            train_iters: training.train_iters,
            seed: training.seed,
            calculate_per_token_loss: training.calculate_per_token_loss,
            check_for_nan_in_loss_and_grad: training.check_for_nan_in_loss_and_grad,
        }
    }
}
