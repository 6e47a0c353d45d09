//! Flags of checkpoints and of when a run ends, and those of `megatron checkpoint`.

use super::set_some;
use crate::config::CheckpointConfig;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// What is saved and loaded, and when the run ends before its last step.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointingArgs {
    /// Save checkpoints into this directory: at the end, when the run is stopped, and every
    /// --save-interval steps
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Steps between two checkpoints [default: at the end alone]
    #[arg(long, value_name = "N")]
    save_interval: Option<usize>,
    /// Of the older checkpoints keep those of every N-th step, and remove the others
    #[arg(long, value_name = "N")]
    save_retain_interval: Option<u64>,
    /// Keep the newest N checkpoints, and remove the others
    #[arg(long, value_name = "N")]
    keep_last: Option<usize>,
    /// Save in the background: the training waits only to copy its state, and for the save before
    #[arg(long)]
    async_save: bool,
    /// Go on from the newest checkpoint in this directory, whichever layout saved it; none there is an
    /// error
    #[arg(long, value_name = "DIR")]
    load: Option<PathBuf>,
    /// Go on from the checkpoint of this step instead of the newest
    #[arg(long, value_name = "N")]
    ckpt_step: Option<u64>,
    /// Load weights and counters, and start the optimizer's state anew
    #[arg(long)]
    no_load_optim: bool,
    /// Load the weights alone, and train from step 1
    #[arg(long)]
    finetune: bool,
    /// Start afresh where --load finds no checkpoint; for scripts that start and resume by one command
    #[arg(long)]
    no_exit_on_missing_checkpoint: bool,
    /// On SIGTERM or SIGINT finish the step, save and exit with status 0, for schedulers that send a
    /// signal before they kill; otherwise the status is 130
    #[arg(long)]
    exit_signal_handler: bool,
    /// Save and exit after this many minutes
    #[arg(long, value_name = "X")]
    exit_duration_in_mins: Option<f64>,
    /// Save and exit after a step that this number divides
    #[arg(long, value_name = "N")]
    exit_interval: Option<usize>,
}

impl CheckpointingArgs {
    pub fn apply(&self, config: &mut CheckpointConfig) {
        set_some(&mut config.save, &self.save);
        set_some(&mut config.save_interval, &self.save_interval);
        set_some(&mut config.save_retain_interval, &self.save_retain_interval);
        set_some(&mut config.keep_last, &self.keep_last);
        config.async_save |= self.async_save;
        set_some(&mut config.load, &self.load);
        set_some(&mut config.ckpt_step, &self.ckpt_step);
        config.no_load_optim |= self.no_load_optim;
        config.finetune |= self.finetune;
        config.exit_on_missing_checkpoint &= !self.no_exit_on_missing_checkpoint;
        config.exit_signal_handler |= self.exit_signal_handler;
        set_some(
            &mut config.exit_duration_in_mins,
            &self.exit_duration_in_mins,
        );
        set_some(&mut config.exit_interval, &self.exit_interval);
    }
}

/// The flags of `megatron checkpoint`.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    pub action: CheckpointAction,
}

/// What to do with a checkpoint.
#[derive(Debug, Subcommand)]
pub enum CheckpointAction {
    /// Say what is in it: its step, the layout that saved it, every tensor
    Inspect(CheckpointPath),
    /// Compare every byte with its checksum
    Verify(CheckpointPath),
    /// Write it anew as another layout would have saved it. Loading needs no such thing: any layout
    /// loads any checkpoint
    Reshard(ReshardArgs),
}

/// Which checkpoint.
#[derive(Debug, Args)]
pub struct CheckpointPath {
    /// A run's directory of checkpoints, or one checkpoint's own
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// The checkpoint of this step instead of the newest
    #[arg(long, value_name = "N")]
    pub ckpt_step: Option<u64>,
}

/// From which checkpoint, and how it is to be split.
#[derive(Debug, Args)]
pub struct ReshardArgs {
    #[command(flatten)]
    pub from: CheckpointPath,
    /// Directory for the new checkpoint
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Ranks that split every layer's weights
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_model_parallel_size: usize,
    /// Ranks that split the layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_model_parallel_size: usize,
    /// Ranks that split the optimizer's state
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub data_parallel_size: usize,
}
