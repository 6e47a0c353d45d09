//! Flags of the data, of what is reported, and of the sample at the end.

use super::{by_name, set, set_some};
use crate::config::{DataConfig, GenerateConfig, LoggingConfig, TokenizerType};
use clap::Args;
use std::path::PathBuf;

/// What to train on.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    /// Dataset: the path of a .bin/.idx pair without its ending, or a .jsonl file, which is
    /// tokenised into the run directory first. Several are blended: weight and path in turn
    #[arg(long, value_name = "[WEIGHT] PATH", num_args = 1.., conflicts_with = "token_batches")]
    data_path: Option<Vec<String>>,
    /// Shares of train, validation and test data, in any unit [default: 969, 30, 1]
    #[arg(long, value_name = "T,V,T")]
    split: Option<String>,
    /// Tokenizer: GPT2BPETokenizer (needs --vocab-file and --merge-file), HuggingFaceTokenizer
    /// (needs --tokenizer-model) or NullTokenizer (numbers; needs --vocab-size)
    #[arg(long, value_name = "TYPE", value_parser = by_name::<TokenizerType>)]
    tokenizer_type: Option<TokenizerType>,
    /// The tokenizer.json of a HuggingFaceTokenizer
    #[arg(long, value_name = "FILE")]
    tokenizer_model: Option<PathBuf>,
    /// The vocab.json of a GPT2BPETokenizer
    #[arg(long, value_name = "FILE")]
    vocab_file: Option<PathBuf>,
    /// The merges.txt of a GPT2BPETokenizer
    #[arg(long, value_name = "FILE")]
    merge_file: Option<PathBuf>,
    /// Entries of the vocabulary before padding, where no tokenizer says it
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Train on the tensor `tokens` [steps, global batch, sequence + 1] of this .safetensors file,
    /// in order, instead of a dataset
    #[arg(long, value_name = "FILE")]
    token_batches: Option<PathBuf>,
    /// Weigh each token's loss by the tensor `loss_mask` [steps, global batch, sequence] of the
    /// same file
    #[arg(long)]
    token_batches_loss_mask: bool,
    /// Steps between two evaluations on the validation data [default: 1000]
    #[arg(long, value_name = "N")]
    eval_interval: Option<usize>,
    /// Global batches of one evaluation; 0 never evaluates [default: 100]
    #[arg(long, value_name = "N")]
    eval_iters: Option<usize>,
    /// Steps that a thread per rank reads ahead; 0 reads on the training thread [default: 2]
    #[arg(long, value_name = "N")]
    prefetch: Option<usize>,
}

impl DataArgs {
    pub fn apply(&self, data: &mut DataConfig) {
        set(&mut data.data_path, &self.data_path);
        set(&mut data.split, &self.split);
        set_some(&mut data.tokenizer_type, &self.tokenizer_type);
        set_some(&mut data.tokenizer_model, &self.tokenizer_model);
        set_some(&mut data.vocab_file, &self.vocab_file);
        set_some(&mut data.merge_file, &self.merge_file);
        set_some(&mut data.vocab_size, &self.vocab_size);
        set_some(&mut data.token_batches, &self.token_batches);
        // A source named on the command line replaces the file's source of the other kind.
        if self.data_path.is_some() {
            data.token_batches = None;
        }
        if self.token_batches.is_some() {
            data.data_path.clear();
        }
        data.token_batches_loss_mask |= self.token_batches_loss_mask;
        set(&mut data.eval_interval, &self.eval_interval);
        set(&mut data.eval_iters, &self.eval_iters);
        set(&mut data.prefetch, &self.prefetch);
    }
}

/// What is reported, and where it goes.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Logging")]
pub struct LoggingArgs {
    /// Steps between two progress lines [default: 100]
    #[arg(long, value_name = "N")]
    log_interval: Option<usize>,
    /// Write a JSON line per step: iteration, lm_loss, grad_norm, learning_rate, consumed_samples,
    /// tokens_per_second, step_time_s; an existing file is replaced
    #[arg(long, value_name = "FILE")]
    metrics_file: Option<PathBuf>,
    /// Write what every rank did in the last step, measured and simulated, as a Chrome trace (.json):
    /// ui.perfetto.dev opens it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Folder of this run's config.toml, metrics and tokenised data; new or empty [default:
    /// runs/NAME-TIME, NAME the config's]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print progress lines even where the output is a terminal, instead of the dashboard
    #[arg(long)]
    no_tui: bool,
}

impl LoggingArgs {
    pub fn apply(&self, logging: &mut LoggingConfig) {
        set(&mut logging.log_interval, &self.log_interval);
        set_some(&mut logging.metrics_file, &self.metrics_file);
        set_some(&mut logging.trace, &self.trace);
        set_some(&mut logging.run_dir, &self.run_dir);
        logging.no_tui |= self.no_tui;
    }
}

/// The text that the trained model writes at the end; needs a tokenizer.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sample at the end")]
pub struct GenerateArgs {
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to add to it; 0 writes no sample [default: 0]
    #[arg(long, value_name = "N")]
    generate_tokens: Option<usize>,
    /// Flatness of the distribution sampled from; 0 takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "X")]
    temperature: Option<f64>,
    /// Sample from this many likeliest tokens; 0 from all [default: 40]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
}

impl GenerateArgs {
    pub fn apply(&self, generate: &mut GenerateConfig) {
        set(&mut generate.prompt, &self.prompt);
        set(&mut generate.tokens, &self.generate_tokens);
        set(&mut generate.temperature, &self.temperature);
        set(&mut generate.top_k, &self.top_k);
    }
}
