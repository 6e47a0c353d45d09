//! The tokenizer that the flags describe.

use crate::config::{TokenizerConfig, TokenizerType};
use crate::error::{Failure, Result};
use burn_megatron::data::{self as library, Tokenizer};

/// Loads the tokenizer.
///
/// # Errors
/// No type, a flag that the type needs is missing, or a file cannot be read.
pub fn build(config: &TokenizerConfig) -> Result<Tokenizer> {
    let needs = |kind: &str, flags: &str| {
        Failure::usage(
            format!("{kind} needs {flags}"),
            "give it as a flag, or under [data]",
        )
    };
    let config = match config.tokenizer_type {
        None => return Err(needs("this command", "--tokenizer-type")),
        Some(TokenizerType::Gpt2Bpe) => match (&config.vocab_file, &config.merge_file) {
            (Some(vocab_file), Some(merge_file)) => library::TokenizerConfig::GPT2BPETokenizer {
                vocab_file: vocab_file.clone(),
                merge_file: merge_file.clone(),
            },
            _ => return Err(needs("GPT2BPETokenizer", "--vocab-file and --merge-file")),
        },
        Some(TokenizerType::HuggingFace) => match &config.tokenizer_model {
            Some(tokenizer_model) => library::TokenizerConfig::HuggingFaceTokenizer {
                tokenizer_model: tokenizer_model.clone(),
                include_special_tokens: true,
            },
            None => return Err(needs("HuggingFaceTokenizer", "--tokenizer-model")),
        },
        Some(TokenizerType::Null) => match config.vocab_size.map(u32::try_from) {
            Some(Ok(vocab_size)) => library::TokenizerConfig::NullTokenizer { vocab_size },
            _ => return Err(needs("NullTokenizer", "--vocab-size, below 2^32")),
        },
    };
    Ok(Tokenizer::new(&config)?)
}
