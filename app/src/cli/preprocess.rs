//! Flags of `megatron preprocess`.

use super::by_name;
use crate::config::{TokenizerConfig, TokenizerType};
use clap::Args;
use std::path::PathBuf;

/// From JSON lines to token files.
#[derive(Debug, Args)]
pub struct PreprocessArgs {
    /// File of JSON objects, one a line
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Start of the output's path; key `text` becomes PREFIX_text_document.bin and .idx
    #[arg(long, value_name = "PREFIX")]
    pub output_prefix: PathBuf,
    /// Keys to tokenise, each into a pair of files of its own
    #[arg(long, value_name = "KEY", num_args = 1.., default_value = "text")]
    pub json_keys: Vec<String>,
    /// Tokenizer: GPT2BPETokenizer (needs --vocab-file and --merge-file), HuggingFaceTokenizer
    /// (needs --tokenizer-model) or NullTokenizer (numbers between spaces; needs --vocab-size)
    #[arg(long, value_name = "TYPE", value_parser = by_name::<TokenizerType>)]
    tokenizer_type: TokenizerType,
    /// The tokenizer.json of a HuggingFaceTokenizer
    #[arg(long, value_name = "FILE")]
    tokenizer_model: Option<PathBuf>,
    /// The vocab.json of a GPT2BPETokenizer
    #[arg(long, value_name = "FILE")]
    vocab_file: Option<PathBuf>,
    /// The merges.txt of a GPT2BPETokenizer
    #[arg(long, value_name = "FILE")]
    merge_file: Option<PathBuf>,
    /// Entries of a NullTokenizer's vocabulary
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// End every document with the end-of-document token
    #[arg(long)]
    pub append_eod: bool,
    /// Threads that tokenise; the output is the same for any number [default: all cores]
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Count and skip lines that are not JSON or lack a key, instead of stopping at the first
    #[arg(long)]
    pub skip_bad_lines: bool,
}

impl PreprocessArgs {
    pub fn tokenizer(&self) -> TokenizerConfig {
        TokenizerConfig {
            tokenizer_type: Some(self.tokenizer_type),
            tokenizer_model: self.tokenizer_model.clone(),
            vocab_file: self.vocab_file.clone(),
            merge_file: self.merge_file.clone(),
            vocab_size: self.vocab_size,
        }
    }
}
