//! JSON lines to `.bin`/`.idx`: Megatron's `tools/preprocess_data.py`.
//!
//! One thread reads chunks of whole lines, workers parse and tokenise them, and the calling thread
//! writes the results in the order of the input: reading, tokenising and writing overlap, and at
//! most a fixed number of chunks is in memory. The files are the same for any number of workers.

mod chunk;
mod jsonl;
mod pipeline;

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;
use std::time::Instant;

use super::indexed::{DType, IndexedDatasetWriter};
use super::tokenizer::Tokenizer;
use crate::{Error, Result, Violation};
use chunk::{ChunkEncoder, EncodedChunk};

/// Bytes of input that are read, handed to a worker, and written as one.
const CHUNK_BYTES: usize = 256 << 10;

/// What to preprocess; the names are Megatron's.
#[derive(Debug, Clone)]
pub struct PreprocessConfig {
    /// A JSON object per line.
    pub input: PathBuf,
    /// `P`: for each key, `P_{key}_document.bin` and `.idx` are written.
    pub output_prefix: PathBuf,
    /// The keys whose strings become documents, usually `text`.
    pub json_keys: Vec<String>,
    /// End each document that is not empty with the tokenizer's end-of-document token.
    pub append_eod: bool,
    /// Threads that tokenise.
    pub workers: usize,
    /// Count lines that are no JSON, lack a key, or hold no string there, and go on.
    pub skip_bad_lines: bool,
}

/// How far [`preprocess`] has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Documents (lines) written.
    pub documents: u64,
    /// Tokens written, of all keys.
    pub tokens: u64,
    /// Bytes of input done.
    pub bytes: u64,
    /// Bytes of input in all.
    pub total_bytes: u64,
}

/// What [`preprocess`] did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// Documents (lines) written.
    pub documents: u64,
    /// Tokens written, of all keys.
    pub tokens: u64,
    /// Lines left out by `skip_bad_lines`.
    pub skipped_lines: u64,
    /// Bytes of input read.
    pub bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Tokenises `config.input`; `progress` is called after each chunk written.
///
/// An empty document adds no tokens and no end-of-document token, but keeps its place in the
/// document indices, as in Megatron. Tokens take two bytes if the vocabulary is below 65,500, else
/// four. Existing output files are replaced when all is written, and left alone on any error.
///
/// # Errors
/// Every violation of the config at once; files that cannot be read or written; a bad line, by
/// file, byte and line number; an input without a single token.
pub fn preprocess(
    config: &PreprocessConfig,
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report> {
    preprocess_by(config, tokenizer, progress, CHUNK_BYTES)
}

fn preprocess_by(
    config: &PreprocessConfig,
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress),
    chunk_bytes: usize,
) -> Result<Report> {
    let start = Instant::now();
    config.validate(tokenizer)?;
    let input = File::open(&config.input).map_err(|e| Error::io(&config.input, e))?;
    let metadata = input.metadata().map_err(|e| Error::io(&config.input, e))?;
    let dtype = DType::optimal(tokenizer.vocab_size());
    let mut writers = config
        .json_keys
        .iter()
        .map(|key| IndexedDatasetWriter::create(config.output(key), dtype))
        .collect::<Result<Vec<_>>>()?;

    let mut done = Progress {
        total_bytes: metadata.len(),
        ..Progress::default()
    };
    let mut skipped_lines = 0;
    let encoder = || ChunkEncoder::new(config, tokenizer, dtype);
    pipeline::run(
        pipeline::Input {
            reader: input,
            path: &config.input,
            chunk_bytes,
        },
        config.workers,
        encoder,
        |chunk: EncodedChunk| {
            for (writer, key) in writers.iter_mut().zip(&chunk.keys) {
                writer.add_encoded_documents(&key.bytes, &key.lengths)?;
                done.tokens += key.lengths.iter().sum::<usize>() as u64;
            }
            done.documents += chunk.documents;
            done.bytes += chunk.input_bytes;
            skipped_lines += chunk.skipped_lines;
            progress(done);
            Ok(())
        },
    )?;
    if done.tokens == 0 {
        let reason = format!("no line of {} holds tokens", done.documents + skipped_lines);
        return Err(Error::data(&config.input, None, reason));
    }
    for writer in writers {
        writer.finish()?;
    }
    Ok(Report {
        documents: done.documents,
        tokens: done.tokens,
        skipped_lines,
        bytes: done.bytes,
        seconds: start.elapsed().as_secs_f64(),
    })
}

impl PreprocessConfig {
    /// `P_{key}_document`: where a key's `.bin` and `.idx` go, less their endings.
    pub fn output(&self, key: &str) -> PathBuf {
        let mut name = OsString::from(&self.output_prefix);
        name.push(format!("_{key}_document"));
        name.into()
    }

    fn validate(&self, tokenizer: &Tokenizer) -> Result<()> {
        let mut violations = Vec::new();
        let mut require = |holds: bool, rule: &str, nearest: &str| {
            if !holds {
                violations.push(Violation {
                    rule: rule.to_string(),
                    nearest: vec![nearest.to_string()],
                });
            }
        };
        require(self.workers > 0, "workers must be at least 1", "1");
        require(
            !self.json_keys.is_empty(),
            "json_keys must name a key",
            "text",
        );
        let repeated = |(i, key): (usize, &String)| self.json_keys[..i].contains(key);
        require(
            !self.json_keys.iter().enumerate().any(repeated),
            "json_keys must name each key once",
            "text",
        );
        require(
            !self.append_eod || tokenizer.eod().is_some(),
            "append_eod needs a tokenizer with an end-of-document token",
            "append_eod = false",
        );
        if violations.is_empty() {
            Ok(())
        } else {
            Err(Error::config(violations))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::IndexedDataset;
    use crate::data::fixtures;
    use crate::data::tokenizer::TokenizerConfig;
    use std::path::Path;

    fn gpt2() -> Tokenizer {
        Tokenizer::new(&TokenizerConfig::GPT2BPETokenizer {
            vocab_file: fixtures::path("gpt2/vocab.json"),
            merge_file: fixtures::path("gpt2/merges.txt"),
        })
        .unwrap()
    }

    fn null() -> Tokenizer {
        Tokenizer::new(&TokenizerConfig::NullTokenizer { vocab_size: 1000 }).unwrap()
    }

    fn config(folder: &Path, input: PathBuf) -> PreprocessConfig {
        PreprocessConfig {
            input,
            output_prefix: folder.join("small"),
            json_keys: vec!["text".to_string()],
            append_eod: true,
            workers: 2,
            skip_bad_lines: false,
        }
    }

    /// Preprocesses `lines` with the null tokenizer, in chunks of a line or two.
    fn run(
        folder: &Path,
        lines: &str,
        change: impl FnOnce(&mut PreprocessConfig),
    ) -> Result<Report> {
        let input = folder.join("in.jsonl");
        std::fs::write(&input, lines).unwrap();
        let mut config = config(folder, input);
        change(&mut config);
        preprocess_by(&config, &null(), &mut |_| (), 16)
    }

    #[test]
    fn writes_megatrons_bytes_whatever_the_workers_and_chunks() {
        let tokenizer = gpt2();
        for (workers, chunk_bytes) in [(1, CHUNK_BYTES), (1, 100), (2, 1), (2, 3000), (3, 700)] {
            let folder = tempfile::tempdir().unwrap();
            let mut config = config(folder.path(), fixtures::path("data/small.jsonl"));
            config.workers = workers;
            let mut seen = vec![Progress::default()];
            let mut progress = |p| seen.push(p);
            let report = preprocess_by(&config, &tokenizer, &mut progress, chunk_bytes).unwrap();
            assert_eq!((report.documents, report.tokens), (81, 6354));
            assert_eq!((report.skipped_lines, report.bytes), (0, 34739));
            let last = seen.last().unwrap();
            assert_eq!((last.documents, last.tokens), (81, 6354));
            assert_eq!((last.bytes, last.total_bytes), (34739, 34739));
            assert!(seen.windows(2).all(|w| w[0].bytes <= w[1].bytes));
            for suffix in ["bin", "idx"] {
                let name = format!("small_text_document.{suffix}");
                let written = std::fs::read(folder.path().join(&name)).unwrap();
                let expected = std::fs::read(fixtures::path("data").join(&name)).unwrap();
                assert!(written == expected, "{name} {workers} {chunk_bytes}");
            }
        }
    }

    #[test]
    fn each_key_has_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let lines = "{\"a\": \"1 2\", \"b\": \"\"}\r\n{\"b\": \"3\", \"x\": [{}], \"a\": \"4\"}";
        let report = run(folder.path(), lines, |c| {
            c.json_keys = vec!["b".to_string(), "a".to_string()];
        })
        .unwrap();
        assert_eq!((report.documents, report.tokens), (2, 7));
        for (key, expected) in [("a", vec![1, 2, 1000, 4, 1000]), ("b", vec![3, 1000])] {
            let prefix = folder.path().join(format!("small_{key}_document"));
            let data = IndexedDataset::open(prefix).unwrap();
            let mut tokens = Vec::new();
            for i in 0..data.num_sequences() {
                data.get(i, 0, data.sequence_length(i), &mut tokens)
                    .unwrap();
            }
            assert_eq!(tokens, expected);
            assert_eq!(data.num_documents(), 2);
        }
    }

    #[test]
    fn a_bad_line_is_an_error_with_its_place() {
        let good = "{\"text\": \"1\"}\n";
        for (bad, reason) in [
            ("{\"text\": \"1\"", "EOF"),
            ("", "blank"),
            ("{\"txt\": \"1\"}", "key \"text\" is missing"),
            ("{\"text\": 1}", "key \"text\": invalid type: integer"),
            ("{\"text\": null}", "key \"text\": invalid type: null"),
            ("[1]", "expected a JSON object"),
            ("{\"text\": \"1\"} x", "trailing characters"),
            ("{\"text\": \"1 x\"}", "\"x\" is no token id"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let lines = format!("{good}{good}{good}{bad}\n{good}{{\n");
            let error = run(folder.path(), &lines, |_| ()).unwrap_err().to_string();
            assert!(error.contains("in.jsonl at byte 42: line 4: "), "{error}");
            assert!(error.contains(reason), "{reason:?} not in {error}");
            let left = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(left, 1, "only the input is left");
        }
    }

    #[test]
    fn bad_lines_can_be_skipped_and_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let lines =
            "{\"text\": \"1\"}\n\n{\"text\": 2}\n{\"text\": \"3\"}\n{\"text\": \"\\ud800\"}";
        let report = run(folder.path(), lines, |c| c.skip_bad_lines = true).unwrap();
        assert_eq!(
            (report.documents, report.skipped_lines, report.tokens),
            (2, 3, 4)
        );
    }

    #[test]
    fn text_that_is_not_utf8_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in.jsonl");
        std::fs::write(&input, b"{\"text\": \"\xff\"}\n").unwrap();
        let config = config(folder.path(), input);
        let error = preprocess(&config, &null(), &mut |_| ())
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn no_tokens_and_broken_configs_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let error = run(folder.path(), "", |_| ()).unwrap_err().to_string();
        assert!(error.contains("holds tokens"), "{error}");
        let error = run(folder.path(), "{\"text\": \"\"}\n", |_| ())
            .unwrap_err()
            .to_string();
        assert!(error.contains("no line of 1 holds tokens"), "{error}");
        let error = run(folder.path(), "", |c| {
            c.workers = 0;
            c.json_keys.clear();
        })
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("workers") && error.contains("json_keys"),
            "{error}"
        );
        let mut missing = config(folder.path(), folder.path().join("missing.jsonl"));
        missing.workers = 1;
        let error = preprocess(&missing, &null(), &mut |_| ())
            .unwrap_err()
            .to_string();
        assert!(error.contains("missing.jsonl"), "{error}");
    }
}
