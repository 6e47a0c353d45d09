//! Megatron's `.bin`/`.idx` pair: token sequences in one file, where they lie in the other.
//!
//! The format of `megatron/core/datasets/indexed_dataset.py`, little-endian throughout:
//!
//! | `.idx` bytes | what |
//! |---|---|
//! | 9 | magic `MMIDIDX\0\0` |
//! | 8 | version, 1 |
//! | 1 | [`DType`] code |
//! | 8 | number of sequences, `n` |
//! | 8 | number of document indices, `d` (documents + 1) |
//! | 4n | length of each sequence, tokens, i32 |
//! | 8n | where each sequence starts in the `.bin`, bytes, i64 |
//! | 8d | document k is the sequences `[indices[k], indices[k + 1])`, i64 |
//!
//! The `.bin` holds the tokens, sequence after sequence, nothing between them.

mod reader;
mod writer;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use reader::IndexedDataset;
pub use writer::IndexedDatasetWriter;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Bytes before the sequence lengths.
const HEADER_BYTES: usize = 34;

/// `prefix` with `suffix` appended: prefixes may hold dots, which `with_extension` would cut.
fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(suffix);
    name.into()
}

/// How a token is stored; names and codes are Megatron's (`DType` in `indexed_dataset.py`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum DType {
    UInt8 = 1,
    Int8 = 2,
    Int16 = 3,
    Int32 = 4,
    Int64 = 5,
    Float64 = 6,
    Float32 = 7,
    UInt16 = 8,
}

impl DType {
    /// The type a code in an `.idx` stands for.
    pub fn from_code(code: u8) -> Option<Self> {
        use DType::*;
        [UInt8, Int8, Int16, Int32, Int64, Float64, Float32, UInt16]
            .into_iter()
            .find(|dtype| *dtype as u8 == code)
    }

    /// The code of this type in an `.idx`.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Bytes per token.
    pub fn size(self) -> usize {
        match self {
            DType::UInt8 | DType::Int8 => 1,
            DType::Int16 | DType::UInt16 => 2,
            DType::Int32 | DType::Float32 => 4,
            DType::Int64 | DType::Float64 => 8,
        }
    }

    /// Whether tokens can be of this type.
    pub fn is_integer(self) -> bool {
        !matches!(self, DType::Float32 | DType::Float64)
    }

    /// Megatron's `DType.optimal_dtype`: two bytes where the vocabulary allows it, else four.
    pub fn optimal(vocab_size: usize) -> Self {
        if vocab_size < 65500 {
            DType::UInt16
        } else {
            DType::Int32
        }
    }

    /// Appends `tokens` as they stand in a `.bin`.
    ///
    /// # Errors
    /// The first token that this type cannot hold.
    pub fn encode(self, tokens: &[u32], out: &mut Vec<u8>) -> Result<(), u32> {
        fn put<const N: usize>(
            tokens: &[u32],
            out: &mut Vec<u8>,
            bytes: impl Fn(u32) -> Option<[u8; N]>,
        ) -> Result<(), u32> {
            out.reserve(tokens.len() * N);
            for &token in tokens {
                out.extend_from_slice(&bytes(token).ok_or(token)?);
            }
            Ok(())
        }
        match self {
            DType::UInt8 => put(tokens, out, |t| Some(u8::try_from(t).ok()?.to_le_bytes())),
            DType::Int8 => put(tokens, out, |t| Some(i8::try_from(t).ok()?.to_le_bytes())),
            DType::Int16 => put(tokens, out, |t| Some(i16::try_from(t).ok()?.to_le_bytes())),
            DType::UInt16 => put(tokens, out, |t| Some(u16::try_from(t).ok()?.to_le_bytes())),
            DType::Int32 => put(tokens, out, |t| Some(i32::try_from(t).ok()?.to_le_bytes())),
            DType::Int64 => put(tokens, out, |t| Some(i64::from(t).to_le_bytes())),
            DType::Float32 | DType::Float64 => tokens.first().map_or(Ok(()), |t| Err(*t)),
        }
    }

    /// Appends the tokens that `bytes`, a whole number of them, hold.
    fn decode(self, bytes: &[u8], out: &mut Vec<i64>) {
        fn take<const N: usize>(bytes: &[u8], out: &mut Vec<i64>, read: impl Fn([u8; N]) -> i64) {
            let (tokens, _) = bytes.as_chunks::<N>();
            out.extend(tokens.iter().map(|token| read(*token)));
        }
        match self {
            DType::UInt8 => take(bytes, out, |b| u8::from_le_bytes(b).into()),
            DType::Int8 => take(bytes, out, |b| i8::from_le_bytes(b).into()),
            DType::Int16 => take(bytes, out, |b| i16::from_le_bytes(b).into()),
            DType::UInt16 => take(bytes, out, |b| u16::from_le_bytes(b).into()),
            DType::Int32 => take(bytes, out, |b| i32::from_le_bytes(b).into()),
            DType::Int64 => take(bytes, out, i64::from_le_bytes),
            // Refused when the index is opened.
            DType::Float32 | DType::Float64 => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_megatrons() {
        for code in 1..=8 {
            assert_eq!(DType::from_code(code).unwrap().code(), code);
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(9), None);
        assert_eq!(DType::optimal(50257), DType::UInt16);
        assert_eq!(DType::optimal(65499), DType::UInt16);
        assert_eq!(DType::optimal(65500), DType::Int32);
    }

    #[test]
    fn every_integer_type_reads_back_what_it_wrote() {
        for dtype in (1..=8).filter_map(DType::from_code) {
            let (mut bytes, mut tokens) = (Vec::new(), Vec::new());
            if dtype.is_integer() {
                dtype.encode(&[0, 1, 127], &mut bytes).unwrap();
                assert_eq!(bytes.len(), 3 * dtype.size());
                dtype.decode(&bytes, &mut tokens);
                assert_eq!(tokens, [0, 1, 127]);
            } else {
                assert_eq!(dtype.encode(&[3], &mut bytes), Err(3));
            }
        }
        assert_eq!(
            DType::UInt16.encode(&[1, 65536], &mut Vec::new()),
            Err(65536)
        );
    }
}
