//! Text to token ids and back, under the names Megatron's `--tokenizer-type` knows.
//!
//! The `tokenizers` crate is the source of vocabularies, merges, added tokens and the BPE model
//! itself. For GPT-2's pipeline, which most pretraining corpora are made with, the way *to* that
//! model is our own: a hand-written splitter and a cache of words (see `byte_level`).

mod byte_level;
mod split_words;
mod word_cache;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

use crate::{Error, Result, Violation};
use byte_level::ByteLevelBpe;
use word_cache::WordCache;

/// What ends a document in GPT-2's vocabulary.
const GPT2_EOD: &str = "<|endoftext|>";
/// Tokens taken for the end of a document where `tokenizer_config.json` names none.
const EOD_NAMES: [&str; 6] = [
    GPT2_EOD,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "[EOD]",
    "<eod>",
];

/// Which tokenizer, and its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tokenizer_type", deny_unknown_fields)]
pub enum TokenizerConfig {
    /// GPT-2's byte-level BPE.
    GPT2BPETokenizer {
        /// `vocab.json`
        vocab_file: PathBuf,
        /// `merges.txt`
        merge_file: PathBuf,
    },
    /// A `tokenizer.json`.
    HuggingFaceTokenizer {
        /// The `tokenizer.json`, or the folder that holds it.
        tokenizer_model: PathBuf,
        /// Add the tokens that its post-processor adds (a leading `<s>`, say), as Megatron does
        /// unless told `--tokenizer-hf-no-include-special-tokens`.
        #[serde(default = "yes")]
        include_special_tokens: bool,
    },
    /// No tokenizer: the text is token ids below `vocab_size`, with spaces between.
    NullTokenizer {
        /// Ids, without the end-of-document token that follows them.
        vocab_size: u32,
    },
}

fn yes() -> bool {
    true
}

/// A tokenizer; threads share it, each with an [`Encoder`] of its own.
pub struct Tokenizer {
    kind: Kind,
    vocab_size: usize,
    eod: Option<u32>,
}

// One value per process: its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Kind {
    Null,
    HuggingFace {
        inner: HfTokenizer,
        /// Set where the pipeline is GPT-2's.
        fast: Option<ByteLevelBpe>,
        include_special_tokens: bool,
        /// For messages.
        source: PathBuf,
    },
}

impl Tokenizer {
    /// Loads a tokenizer.
    ///
    /// # Errors
    /// A file that is missing or that the `tokenizers` crate refuses; a vocabulary of size 0.
    pub fn new(config: &TokenizerConfig) -> Result<Self> {
        match config {
            TokenizerConfig::GPT2BPETokenizer {
                vocab_file,
                merge_file,
            } => {
                let inner = load_gpt2(vocab_file, merge_file)?;
                Ok(Self::hugging_face(inner, GPT2_EOD_ONLY, vocab_file, false))
            }
            TokenizerConfig::HuggingFaceTokenizer {
                tokenizer_model,
                include_special_tokens,
            } => {
                let file = if tokenizer_model.is_dir() {
                    tokenizer_model.join("tokenizer.json")
                } else {
                    tokenizer_model.clone()
                };
                let bytes = std::fs::read(&file).map_err(|e| Error::io(&file, e))?;
                let mut inner = HfTokenizer::from_bytes(bytes)
                    .map_err(|e| Error::data(&file, None, e.to_string()))?;
                // A document is neither cut nor padded, whatever the file says for batches.
                let _ = inner.with_padding(None).with_truncation(None);
                let eos = eos_token(&file)?;
                let names: Vec<&str> = match &eos {
                    Some(name) => vec![name],
                    None => EOD_NAMES.to_vec(),
                };
                Ok(Self::hugging_face(
                    inner,
                    &names,
                    &file,
                    *include_special_tokens,
                ))
            }
            TokenizerConfig::NullTokenizer { vocab_size } => {
                if *vocab_size == 0 || *vocab_size == u32::MAX {
                    return Err(Error::config(vec![Violation {
                        rule: format!("vocab_size {vocab_size} leaves no room for token ids"),
                        nearest: vec!["1".to_string()],
                    }]));
                }
                Ok(Self {
                    kind: Kind::Null,
                    vocab_size: *vocab_size as usize + 1,
                    eod: Some(*vocab_size),
                })
            }
        }
    }

    fn hugging_face(
        inner: HfTokenizer,
        eod_names: &[&str],
        source: &Path,
        include_special_tokens: bool,
    ) -> Self {
        Self {
            vocab_size: inner.get_vocab_size(true),
            eod: eod_names.iter().find_map(|name| inner.token_to_id(name)),
            kind: Kind::HuggingFace {
                fast: ByteLevelBpe::recognise(&inner, include_special_tokens),
                inner,
                include_special_tokens,
                source: source.to_path_buf(),
            },
        }
    }

    /// An encoder with a cache of its own: one per thread, kept across documents.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder {
            tokenizer: self,
            cache: WordCache::default(),
        }
    }

    /// The ids of one text; for many, keep an [`encoder`](Self::encoder).
    ///
    /// # Errors
    /// As [`Encoder::encode_into`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encoder().encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// The text of ids; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Null => Ok(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")),
            Kind::HuggingFace { inner, source, .. } => inner
                .decode(ids, false)
                .map_err(|e| Error::data(source, None, e.to_string())),
        }
    }

    /// Number of ids, added tokens and end of document included; not padded.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The end-of-document token: GPT-2's `<|endoftext|>`; the `eos_token` of a
    /// `tokenizer_config.json` beside a `tokenizer.json`, else a token of a name usual for it; for
    /// the null tokenizer, the id after the last.
    pub fn eod(&self) -> Option<u32> {
        self.eod
    }

    /// Whether texts take the fast way, or the `tokenizers` crate's own.
    pub fn is_fast(&self) -> bool {
        match &self.kind {
            Kind::Null => true,
            Kind::HuggingFace { fast, .. } => fast.is_some(),
        }
    }
}

/// Encodes texts one after another, remembering the words it saw.
pub struct Encoder<'t> {
    tokenizer: &'t Tokenizer,
    cache: WordCache,
}

impl Encoder<'_> {
    /// Appends the ids of `text`.
    ///
    /// # Errors
    /// If the model has no token for some of it, or (null tokenizer) it is not ids.
    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &self.tokenizer.kind {
            Kind::Null => encode_null(text, self.tokenizer.vocab_size, ids),
            Kind::HuggingFace {
                inner,
                fast: Some(fast),
                source,
                ..
            } => fast
                .encode(inner, &mut self.cache, text, ids)
                .map_err(|e| Error::data(source, None, e.to_string())),
            Kind::HuggingFace {
                inner,
                include_special_tokens,
                source,
                ..
            } => {
                let encoding = inner
                    .encode_fast(text, *include_special_tokens)
                    .map_err(|e| Error::data(source, None, e.to_string()))?;
                ids.extend_from_slice(encoding.get_ids());
                Ok(())
            }
        }
    }
}

const GPT2_EOD_ONLY: &[&str] = &[GPT2_EOD];

fn load_gpt2(vocab_file: &Path, merge_file: &Path) -> Result<HfTokenizer> {
    for file in [vocab_file, merge_file] {
        std::fs::metadata(file).map_err(|e| Error::io(file, e))?;
    }
    let (vocab, merges) = (vocab_file.to_string_lossy(), merge_file.to_string_lossy());
    let bad = |e: tokenizers::Error| {
        let reason = format!("with {}: {e}", merge_file.display());
        Error::data(vocab_file, None, reason)
    };
    let model = BPE::from_file(&vocab, &merges).build().map_err(bad)?;
    let mut inner = HfTokenizer::new(model);
    let byte_level = ByteLevel::default().add_prefix_space(false);
    inner
        .with_pre_tokenizer(Some(byte_level))
        .with_decoder(Some(byte_level));
    inner
        .add_special_tokens([AddedToken::from(GPT2_EOD, true)])
        .map_err(bad)?;
    Ok(inner)
}

/// The `eos_token` that the `tokenizer_config.json` beside `tokenizer_json` names, if any.
fn eos_token(tokenizer_json: &Path) -> Result<Option<String>> {
    let path = tokenizer_json.with_file_name("tokenizer_config.json");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(&path, e)),
    };
    let config: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| Error::data(&path, None, e.to_string()))?;
    let eos = &config["eos_token"];
    // Either the token, or an object that describes it.
    let name = eos.as_str().or_else(|| eos["content"].as_str());
    Ok(name.map(str::to_string))
}

fn encode_null(text: &str, vocab_size: usize, ids: &mut Vec<u32>) -> Result<()> {
    for word in text.split_ascii_whitespace() {
        match word.parse::<u32>() {
            Ok(id) if (id as usize) < vocab_size => ids.push(id),
            _ => {
                let reason = format!("\"{word}\" is no token id below {vocab_size}");
                return Err(Error::data("NullTokenizer", None, reason));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures;

    pub(super) fn gpt2() -> Tokenizer {
        let config = TokenizerConfig::GPT2BPETokenizer {
            vocab_file: fixtures::path("gpt2/vocab.json"),
            merge_file: fixtures::path("gpt2/merges.txt"),
        };
        Tokenizer::new(&config).unwrap()
    }

    #[test]
    fn gpt2_is_megatrons() {
        let tokenizer = gpt2();
        assert!(tokenizer.is_fast());
        assert_eq!(tokenizer.vocab_size(), 50257);
        assert_eq!(tokenizer.eod(), Some(50256));
        let text = "Hello, world!<|endoftext|> naïve 中文 🏳️‍🌈\n\n  x";
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids[..5], [15496, 11, 995, 0, 50256]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert!(tokenizer.encode("").unwrap().is_empty());
    }

    #[test]
    fn the_null_tokenizer_reads_ids() {
        let tokenizer =
            Tokenizer::new(&TokenizerConfig::NullTokenizer { vocab_size: 100 }).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (101, Some(100)));
        assert_eq!(tokenizer.encode("1 22  99").unwrap(), [1, 22, 99]);
        assert_eq!(tokenizer.decode(&[1, 22]).unwrap(), "1 22");
        for text in ["1 x", "101", "-1"] {
            assert!(tokenizer.encode(text).is_err(), "{text}");
        }
        assert!(Tokenizer::new(&TokenizerConfig::NullTokenizer { vocab_size: 0 }).is_err());
    }

    #[test]
    fn a_tokenizer_json_takes_the_fast_way_only_where_it_is_gpt2s() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        let Kind::HuggingFace { inner, .. } = gpt2().kind else {
            panic!("not a BPE");
        };
        let load = |json: &serde_json::Value| {
            std::fs::write(&file, json.to_string()).unwrap();
            Tokenizer::new(&TokenizerConfig::HuggingFaceTokenizer {
                tokenizer_model: folder.path().to_path_buf(),
                include_special_tokens: true,
            })
            .unwrap()
        };
        let json: serde_json::Value = serde_json::to_value(&inner).unwrap();
        let text = "It's 12 o'clock,  naïve ½ <|endoftext|> x";
        let expected = gpt2().encode(text).unwrap();
        let plain = load(&json);
        assert!(plain.is_fast());
        assert_eq!(plain.eod(), Some(50256));
        assert_eq!(plain.encode(text).unwrap(), expected);

        let mut changed = json.clone();
        changed["pre_tokenizer"]["add_prefix_space"] = true.into();
        assert!(!load(&changed).is_fast());
        assert_ne!(load(&changed).encode(text).unwrap(), expected);

        let mut changed = json.clone();
        changed["normalizer"] = serde_json::json!({"type": "NFC"});
        assert!(!load(&changed).is_fast());

        let mut changed = json.clone();
        changed["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>":
                {"id": "<|endoftext|>", "ids": [50256], "tokens": ["<|endoftext|>"]}}
        });
        let with_bos = load(&changed);
        assert!(!with_bos.is_fast());
        assert_eq!(with_bos.encode(text).unwrap()[0], 50256);
        assert_eq!(with_bos.encode(text).unwrap()[1..], expected);

        let mut changed = json.clone();
        changed["added_tokens"][0]["rstrip"] = true.into();
        assert!(!load(&changed).is_fast());

        let mut changed = json;
        changed["truncation"] = serde_json::json!({"direction": "Right", "max_length": 2,
            "strategy": "LongestFirst", "stride": 0});
        assert_eq!(load(&changed).encode(text).unwrap(), expected);

        let config = folder.path().join("tokenizer_config.json");
        std::fs::write(&config, r#"{"eos_token": {"content": "x"}}"#).unwrap();
        assert_eq!(
            load(&changed).eod(),
            gpt2().encode("x").unwrap().first().copied()
        );
    }

    #[test]
    fn missing_files_are_named() {
        let config = TokenizerConfig::GPT2BPETokenizer {
            vocab_file: fixtures::path("gpt2/vocab.json"),
            merge_file: "nowhere/merges.txt".into(),
        };
        let error = Tokenizer::new(&config).err().unwrap().to_string();
        assert!(error.contains("nowhere/merges.txt"), "{error}");
    }

    #[test]
    fn the_config_reads_megatrons_names() {
        let json = r#"{"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t.json"}"#;
        let config: TokenizerConfig = serde_json::from_str(json).unwrap();
        let expected = TokenizerConfig::HuggingFaceTokenizer {
            tokenizer_model: "t.json".into(),
            include_special_tokens: true,
        };
        assert_eq!(config, expected);
    }
}
