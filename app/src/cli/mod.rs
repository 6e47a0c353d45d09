//! The command line. Flags carry Megatron-LM's names; each is optional and overrides the TOML file.

mod checkpoint;
mod data;
mod model;
mod preprocess;
mod schedule;
mod training;

pub use checkpoint::{CheckpointAction, CheckpointArgs, CheckpointPath, ReshardArgs};
pub use preprocess::PreprocessArgs;
pub use schedule::{ScheduleArgs, ScheduleFormat};

use crate::config::RunConfig;
use clap::{Args, Parser, Subcommand};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NameError, StrDeserializer};
use std::path::PathBuf;

/// Trains large transformers with Megatron-LM's parallelism, on Burn.
#[derive(Debug, Parser)]
#[command(name = "megatron", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a GPT; ranks are threads of this process, on the CPU or on cards
    Train(Box<TrainArgs>),
    /// Turn JSON lines into token files (.bin and .idx) as Megatron-LM writes them
    Preprocess(PreprocessArgs),
    /// Draw a pipeline-parallel schedule and say how long its ranks idle, without running it
    Schedule(ScheduleArgs),
    /// Look at checkpoints, check them, split them anew
    Checkpoint(CheckpointArgs),
}

/// The flags of `megatron train`. A flag given twice counts as given last, as in Megatron: scripts
/// append to a common command line.
#[derive(Debug, Default, Args)]
#[command(args_override_self = true)]
pub struct TrainArgs {
    /// TOML file with the sections model, parallel, data_parallel, mixed_precision, training,
    /// optimizer, checkpoint, data, logging and generate;
    /// flags override it, and what neither says keeps its default
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    parallel: model::ParallelArgs,
    #[command(flatten)]
    data_parallel: model::DataParallelArgs,
    #[command(flatten)]
    mixed_precision: training::MixedPrecisionArgs,
    #[command(flatten)]
    training: training::TrainingArgs,
    #[command(flatten)]
    optimizer: training::OptimizerArgs,
    #[command(flatten)]
    checkpoint: checkpoint::CheckpointingArgs,
    #[command(flatten)]
    data: data::DataArgs,
    #[command(flatten)]
    logging: data::LoggingArgs,
    #[command(flatten)]
    generate: data::GenerateArgs,
}

impl TrainArgs {
    /// Writes every flag that was given over the file's values.
    pub fn apply(&self, config: &mut RunConfig) {
        self.model.apply(&mut config.model);
        self.parallel.apply(&mut config.parallel);
        self.data_parallel.apply(&mut config.data_parallel);
        self.mixed_precision.apply(&mut config.mixed_precision);
        self.training.apply(&mut config.training);
        self.optimizer.apply(&mut config.optimizer);
        self.checkpoint.apply(&mut config.checkpoint);
        self.data.apply(&mut config.data);
        self.logging.apply(&mut config.logging);
        self.generate.apply(&mut config.generate);
    }
}

/// Overrides `slot` if the flag was given.
fn set<T: Clone>(slot: &mut T, flag: &Option<T>) {
    if let Some(value) = flag {
        slot.clone_from(value);
    }
}

/// Overrides an optional `slot` if the flag was given.
fn set_some<T: Clone>(slot: &mut Option<T>, flag: &Option<T>) {
    if flag.is_some() {
        slot.clone_from(flag);
    }
}

/// Reads a name as the TOML file does, so that both accept the same spellings.
fn by_name<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, String> {
    let name: StrDeserializer<'_, NameError> = text.into_deserializer();
    T::deserialize(name).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_override_the_file_and_nothing_else() {
        let line = "megatron train --hidden-size 96 --lr 1 --lr 0.5 --no-calculate-per-token-loss";
        let Command::Train(args) = Cli::parse_from(line.split(' ')).command else {
            panic!("train was asked for");
        };
        let mut config = RunConfig::default();
        config.training.train_iters = 7;
        let mut expected = config.clone();
        args.apply(&mut config);
        expected.model.hidden_size = 96;
        expected.optimizer.lr = 0.5;
        expected.training.calculate_per_token_loss = false;
        assert_eq!(config, expected);
    }
}
