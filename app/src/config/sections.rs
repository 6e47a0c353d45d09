//! The sections that belong to the program; the others are the library's.

use burn_megatron::RankDevice;
use burn_megatron::checkpoint::Progress;
use burn_megatron::launch::DEFAULT_TIMEOUT;
use burn_megatron::train::{BatchSizes, RampupBatchSize};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `[training]`: batches, length and start of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// What the ranks compute on: cpu, cuda or wgpu.
    pub device: RankDevice,
    /// Tokens of a sample.
    pub seq_length: usize,
    /// Samples of one forward and backward pass on one rank.
    pub micro_batch_size: usize,
    /// Samples of one optimizer step over all ranks.
    pub global_batch_size: usize,
    /// Smaller batches at the start: from so many samples, by so many, over so many.
    pub rampup_batch_size: Option<RampupBatchSize>,
    /// Optimizer steps to take.
    pub train_iters: usize,
    /// Seed of the initial weights and of the data's order.
    pub seed: u64,
    /// Average over the global batch's tokens; false averages each micro batch by itself.
    pub calculate_per_token_loss: bool,
    /// Stop where a loss or a gradient is not a finite number.
    pub check_for_nan_in_loss_and_grad: bool,
    /// How long a rank waits for the others in one collective, in minutes.
    pub distributed_timeout_minutes: f64,
    /// Full weights to start from, with Megatron-Core's names.
    pub init_weights: Option<PathBuf>,
    /// Where the full weights go at the end.
    pub save_weights: Option<PathBuf>,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        TrainingConfig {
            device: RankDevice::default(),
            seq_length: 128,
            micro_batch_size: 1,
            global_batch_size: 8,
            rampup_batch_size: None,
            train_iters: 100,
            seed: 1234,
            calculate_per_token_loss: true,
            check_for_nan_in_loss_and_grad: true,
            distributed_timeout_minutes: DEFAULT_TIMEOUT.as_secs_f64() / 60.0,
            init_weights: None,
            save_weights: None,
        }
    }
}

impl TrainingConfig {
    /// The global batch of every step.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes {
            whole: self.global_batch_size,
            rampup: self.rampup_batch_size,
        }
    }

    /// Samples consumed at the end of a run that starts so far.
    pub fn samples_at_end(&self, start: Progress) -> u64 {
        let (steps, sizes) = (start.iteration..self.train_iters as u64, self.batch_sizes());
        steps.fold(start.consumed_samples, |consumed, _| {
            consumed + sizes.at(consumed) as u64
        })
    }
}

/// `[checkpoint]`: what is saved and loaded, and when a run ends before its last step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Where checkpoints go.
    pub save: Option<PathBuf>,
    /// Steps between two; at the end alone where not given.
    pub save_interval: Option<usize>,
    /// Older ones that stay are of every so many steps.
    pub save_retain_interval: Option<u64>,
    /// The newest so many stay.
    pub keep_last: Option<usize>,
    /// Save in the background.
    pub async_save: bool,
    /// Where to go on from.
    pub load: Option<PathBuf>,
    /// The step of the checkpoint to go on from; the newest where not given.
    pub ckpt_step: Option<u64>,
    /// Start the optimizer's state anew.
    pub no_load_optim: bool,
    /// Load the weights alone.
    pub finetune: bool,
    /// Whether a `load` that finds nothing is an error.
    pub exit_on_missing_checkpoint: bool,
    /// Save and exit with status 0 on a signal.
    pub exit_signal_handler: bool,
    /// Save and exit after so many minutes.
    pub exit_duration_in_mins: Option<f64>,
    /// Save and exit after a step that this divides.
    pub exit_interval: Option<usize>,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig {
            save: None,
            save_interval: None,
            save_retain_interval: None,
            keep_last: None,
            async_save: false,
            load: None,
            ckpt_step: None,
            no_load_optim: false,
            finetune: false,
            exit_on_missing_checkpoint: true,
            exit_signal_handler: false,
            exit_duration_in_mins: None,
            exit_interval: None,
        }
    }
}

/// Megatron's names of its tokenizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenizerType {
    #[serde(rename = "GPT2BPETokenizer")]
    Gpt2Bpe,
    #[serde(rename = "HuggingFaceTokenizer")]
    HuggingFace,
    #[serde(rename = "NullTokenizer")]
    Null,
}

/// The tokenizer's part of `[data]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerConfig {
    pub tokenizer_type: Option<TokenizerType>,
    pub tokenizer_model: Option<PathBuf>,
    pub vocab_file: Option<PathBuf>,
    pub merge_file: Option<PathBuf>,
    pub vocab_size: Option<usize>,
}

/// `[data]`: what to train on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Paths of datasets, or weights and paths in turn.
    pub data_path: Vec<String>,
    /// Shares of train, validation and test data.
    pub split: String,
    pub tokenizer_type: Option<TokenizerType>,
    /// A HuggingFaceTokenizer's tokenizer.json.
    pub tokenizer_model: Option<PathBuf>,
    /// A GPT2BPETokenizer's vocab.json.
    pub vocab_file: Option<PathBuf>,
    /// A GPT2BPETokenizer's merges.txt.
    pub merge_file: Option<PathBuf>,
    /// Entries of the vocabulary before padding, where no tokenizer says it.
    pub vocab_size: Option<usize>,
    /// Batches to take in order, instead of a dataset.
    pub token_batches: Option<PathBuf>,
    /// Use that file's `loss_mask`.
    pub token_batches_loss_mask: bool,
    /// Steps between two evaluations.
    pub eval_interval: usize,
    /// Global batches of one evaluation; 0 never evaluates.
    pub eval_iters: usize,
    /// Steps read ahead by a thread per rank; 0 reads on the training thread.
    pub prefetch: usize,
}

impl Default for DataConfig {
    fn default() -> Self {
        DataConfig {
            data_path: Vec::new(),
            split: "969, 30, 1".into(),
            tokenizer_type: None,
            tokenizer_model: None,
            vocab_file: None,
            merge_file: None,
            vocab_size: None,
            token_batches: None,
            token_batches_loss_mask: false,
            eval_interval: 1000,
            eval_iters: 100,
            prefetch: 2,
        }
    }
}

impl DataConfig {
    pub fn tokenizer(&self) -> TokenizerConfig {
        TokenizerConfig {
            tokenizer_type: self.tokenizer_type,
            tokenizer_model: self.tokenizer_model.clone(),
            vocab_file: self.vocab_file.clone(),
            merge_file: self.merge_file.clone(),
            vocab_size: self.vocab_size,
        }
    }
}

/// `[logging]`: what is reported, and where it goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoggingConfig {
    /// Steps between two progress lines.
    pub log_interval: usize,
    /// JSON lines, one per step.
    pub metrics_file: Option<PathBuf>,
    /// The last step's timeline, measured and simulated, as a Chrome trace.
    pub trace: Option<PathBuf>,
    /// The run's folder; `runs/<name>-<time>` where none is given.
    pub run_dir: Option<PathBuf>,
    /// Lines instead of the dashboard, on a terminal too.
    pub no_tui: bool,
}

impl Default for LoggingConfig {
    fn default() -> Self {
        LoggingConfig {
            log_interval: 100,
            metrics_file: None,
            trace: None,
            run_dir: None,
            no_tui: false,
        }
    }
}

/// `[generate]`: the sample at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// Text to continue.
    pub prompt: String,
    /// Tokens to add; 0 writes no sample.
    pub tokens: usize,
    /// Flatness of the distribution; 0 takes the likeliest token.
    pub temperature: f64,
    /// Sample from this many likeliest tokens; 0 from all.
    pub top_k: usize,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        GenerateConfig {
            prompt: String::new(),
            tokens: 0,
            temperature: 0.8,
            top_k: 40,
        }
    }
}
