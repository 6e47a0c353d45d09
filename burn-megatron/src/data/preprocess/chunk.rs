//! What one worker does with one chunk of lines.

use std::path::Path;

use super::{PreprocessConfig, jsonl};
use crate::data::indexed::DType;
use crate::data::tokenizer::{Encoder, Tokenizer};
use crate::{Error, ErrorKind, Result};

/// Whole lines of the input.
pub(super) struct Chunk {
    pub bytes: Vec<u8>,
    /// Where the chunk starts in the file, bytes.
    pub offset: u64,
    /// The number of its first line, from 1.
    pub first_line: u64,
}

/// The documents of a chunk, as they are written.
pub(super) struct EncodedChunk {
    pub keys: Vec<EncodedKey>,
    pub documents: u64,
    pub skipped_lines: u64,
    pub input_bytes: u64,
}

/// The documents of one key.
#[derive(Clone, Default)]
pub(super) struct EncodedKey {
    pub bytes: Vec<u8>,
    /// Tokens of each document.
    pub lengths: Vec<usize>,
}

/// One worker's encoder; its cache of words lives as long as the worker.
pub(super) struct ChunkEncoder<'a> {
    config: &'a PreprocessConfig,
    encoder: Encoder<'a>,
    eod: Option<u32>,
    dtype: DType,
    ids: Vec<u32>,
}

impl<'a> ChunkEncoder<'a> {
    pub fn new(config: &'a PreprocessConfig, tokenizer: &'a Tokenizer, dtype: DType) -> Self {
        Self {
            config,
            encoder: tokenizer.encoder(),
            eod: tokenizer.eod().filter(|_| config.append_eod),
            dtype,
            ids: Vec::new(),
        }
    }

    /// Parses and tokenises every line.
    ///
    /// # Errors
    /// The first bad line, by file, byte and line number, unless it is to be skipped.
    pub fn encode(&mut self, chunk: &Chunk) -> Result<EncodedChunk> {
        let mut out = EncodedChunk {
            keys: vec![EncodedKey::default(); self.config.json_keys.len()],
            documents: 0,
            skipped_lines: 0,
            input_bytes: chunk.bytes.len() as u64,
        };
        let mut offset = chunk.offset;
        let lines = chunk.bytes.split_inclusive(|b| *b == b'\n');
        for (line, number) in lines.zip(chunk.first_line..) {
            match jsonl::strings(line, &self.config.json_keys) {
                Ok(texts) => {
                    for (text, key) in texts.iter().zip(&mut out.keys) {
                        self.encode_document(text, key).map_err(|reason| {
                            bad_line(&self.config.input, offset, number, &reason)
                        })?;
                    }
                    out.documents += 1;
                }
                Err(_) if self.config.skip_bad_lines => out.skipped_lines += 1,
                Err(reason) => return Err(bad_line(&self.config.input, offset, number, &reason)),
            }
            offset += line.len() as u64;
        }
        Ok(out)
    }

    fn encode_document(&mut self, text: &str, out: &mut EncodedKey) -> Result<(), String> {
        self.ids.clear();
        self.encoder
            .encode_into(text, &mut self.ids)
            .map_err(|e| match e.kind() {
                ErrorKind::Data { reason, .. } => reason.clone(),
                _ => e.to_string(),
            })?;
        if !self.ids.is_empty() {
            self.ids.extend(self.eod);
        }
        self.dtype
            .encode(&self.ids, &mut out.bytes)
            .map_err(|id| format!("token {id} does not fit {:?}", self.dtype))?;
        out.lengths.push(self.ids.len());
        Ok(())
    }
}

fn bad_line(path: &Path, offset: u64, line: u64, reason: &str) -> Error {
    Error::data(path, offset, format!("line {line}: {reason}"))
}
