//! The reader: two memory maps, checked as a whole when they are opened.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::{DType, HEADER_BYTES, MAGIC, VERSION, with_suffix};
use crate::{Error, Result};

/// A `.bin`/`.idx` pair, memory-mapped: ranks of one machine share its pages.
///
/// Everything the index claims is checked in [`open`](Self::open), so that reading afterwards
/// cannot leave the files' bounds (Megatron-LM #62, #81, #718).
pub struct IndexedDataset {
    bin_path: PathBuf,
    bin: Mmap,
    idx: Mmap,
    layout: Layout,
    total_tokens: u64,
}

/// The header of an `.idx`, and where its arrays start.
#[derive(Debug, Clone, Copy)]
struct Layout {
    dtype: DType,
    sequences: usize,
    /// Entries of `document_indices`: one more than documents.
    document_indices: usize,
}

impl IndexedDataset {
    /// Opens `prefix.bin` and `prefix.idx`.
    ///
    /// # Errors
    /// A file that is missing, empty, truncated or inconsistent, with the byte offset of the first
    /// thing wrong; an index of no documents; a dtype that is no token's.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self> {
        let prefix = prefix.as_ref();
        let (bin_path, idx_path) = (with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx"));
        let idx = map(&idx_path)?;
        let layout = Layout::parse(&idx, &idx_path)?;
        let bin = map(&bin_path)?;
        let total_tokens = layout.check_sequences(&idx, &idx_path, &bin, &bin_path)?;
        layout.check_documents(&idx, &idx_path)?;
        Ok(Self {
            bin_path,
            bin,
            idx,
            layout,
            total_tokens,
        })
    }

    /// The `.bin` this reads, for messages.
    pub fn path(&self) -> &Path {
        &self.bin_path
    }

    /// How tokens are stored.
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// Number of sequences, at least 1.
    pub fn num_sequences(&self) -> usize {
        self.layout.sequences
    }

    /// Number of documents, at least 1. A document without tokens has no sequence.
    pub fn num_documents(&self) -> usize {
        self.layout.document_indices - 1
    }

    /// Tokens of all sequences.
    pub fn total_tokens(&self) -> u64 {
        self.total_tokens
    }

    /// Tokens of one sequence.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn sequence_length(&self, sequence: usize) -> usize {
        assert!(sequence < self.layout.sequences, "no sequence {sequence}");
        // Checked to be >= 0 at open.
        self.layout.length(&self.idx, sequence) as usize
    }

    /// Tokens of each sequence, in order.
    pub fn sequence_lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.layout.sequences).map(|i| self.layout.length(&self.idx, i) as usize)
    }

    /// `documents + 1` entries: document k is the sequences `[indices[k], indices[k + 1])`.
    pub fn document_indices(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        let start = self.layout.documents_at();
        (0..self.layout.document_indices).map(move |i| read_i64(&self.idx, start + 8 * i) as usize)
    }

    /// Appends `length` tokens of a sequence, from its token `offset` on, to `out`.
    ///
    /// # Errors
    /// If the sequence does not hold that range.
    pub fn get(
        &self,
        sequence: usize,
        offset: usize,
        length: usize,
        out: &mut Vec<i64>,
    ) -> Result<()> {
        let available = if sequence < self.layout.sequences {
            self.sequence_length(sequence)
        } else {
            0
        };
        if offset.checked_add(length).is_none_or(|end| end > available) {
            let reason = format!(
                "tokens {offset}..+{length} of sequence {sequence} were asked for, which has \
                 {available} ({} sequences)",
                self.layout.sequences
            );
            return Err(Error::data(&self.bin_path, None, reason));
        }
        let size = self.layout.dtype.size();
        let start = self.layout.pointer(&self.idx, sequence) as usize + offset * size;
        let bytes = &self.bin[start..start + length * size];
        self.layout.dtype.decode(bytes, out);
        Ok(())
    }
}

impl Layout {
    fn parse(idx: &[u8], path: &Path) -> Result<Self> {
        let bad = |offset: usize, reason: String| Err(Error::data(path, offset as u64, reason));
        if !idx.starts_with(MAGIC) {
            let reason = "not a Megatron index: the magic MMIDIDX is missing".to_string();
            return bad(0, reason);
        }
        if idx.len() < HEADER_BYTES {
            let reason = format!("truncated: the header is {HEADER_BYTES} bytes");
            return bad(idx.len(), reason);
        }
        let version = read_i64(idx, 9) as u64;
        if version != VERSION {
            return bad(9, format!("version {version}, only {VERSION} is known"));
        }
        let dtype = match DType::from_code(idx[17]) {
            Some(dtype) if dtype.is_integer() => dtype,
            Some(dtype) => return bad(17, format!("{dtype:?} is no type of token ids")),
            None => return bad(17, format!("unknown dtype code {}", idx[17])),
        };
        let (sequences, documents) = (read_i64(idx, 18) as u64, read_i64(idx, 26) as u64);
        // u128: counts of a corrupt file must not overflow their way past this check.
        let expected = HEADER_BYTES as u128 + 12 * sequences as u128 + 8 * documents as u128;
        if expected != idx.len() as u128 {
            let reason = format!(
                "{sequences} sequences and {documents} document indices take {expected} bytes, \
                 the file has {}: truncated or corrupt",
                idx.len()
            );
            return bad(
                if expected > idx.len() as u128 {
                    idx.len()
                } else {
                    18
                },
                reason,
            );
        }
        if documents < 2 || sequences == 0 {
            let reason = "the dataset holds no documents with tokens; was the input of \
                          preprocessing empty?"
                .to_string();
            return bad(if sequences == 0 { 18 } else { 26 }, reason);
        }
        Ok(Self {
            dtype,
            sequences: sequences as usize,
            document_indices: documents as usize,
        })
    }

    /// Lengths and pointers against the `.bin`; returns the number of tokens.
    fn check_sequences(
        self,
        idx: &[u8],
        idx_path: &Path,
        bin: &[u8],
        bin_path: &Path,
    ) -> Result<u64> {
        let size = self.dtype.size() as u64;
        let mut end = 0;
        for i in 0..self.sequences {
            let length = self.length(idx, i);
            let Ok(length) = u64::try_from(length) else {
                let reason = format!("sequence {i} has the length {length}");
                return Err(Error::data(idx_path, self.length_at(i) as u64, reason));
            };
            let pointer = self.pointer(idx, i);
            if pointer as u64 != end {
                let reason = format!(
                    "sequence {i} starts at byte {pointer} of the .bin, the ones before it end \
                     at {end}"
                );
                return Err(Error::data(idx_path, self.pointer_at(i) as u64, reason));
            }
            end += length * size;
            if end > bin.len() as u64 {
                // Reported below; the sum of a corrupt index must not run on until it overflows.
                break;
            }
        }
        if end != bin.len() as u64 {
            let reason = format!(
                "the sequences of the index end at byte {end} or later, the file has {}: \
                 truncated, or of another index",
                bin.len()
            );
            return Err(Error::data(bin_path, end.min(bin.len() as u64), reason));
        }
        Ok(end / size)
    }

    fn check_documents(self, idx: &[u8], path: &Path) -> Result<()> {
        let start = self.documents_at();
        let mut previous = 0;
        for i in 0..self.document_indices {
            let at = start + 8 * i;
            let index = read_i64(idx, at);
            let reason = if i == 0 && index != 0 {
                format!("the first document starts at sequence {index}, not 0")
            } else if index < previous {
                format!("document index {i} is {index}, after {previous}")
            } else if i == self.document_indices - 1 && index as u64 != self.sequences as u64 {
                format!(
                    "the last document ends at sequence {index} of {}",
                    self.sequences
                )
            } else {
                previous = index;
                continue;
            };
            return Err(Error::data(path, at as u64, reason));
        }
        Ok(())
    }

    fn length_at(self, sequence: usize) -> usize {
        HEADER_BYTES + 4 * sequence
    }

    fn pointer_at(self, sequence: usize) -> usize {
        HEADER_BYTES + 4 * self.sequences + 8 * sequence
    }

    fn documents_at(self) -> usize {
        HEADER_BYTES + 12 * self.sequences
    }

    fn length(self, idx: &[u8], sequence: usize) -> i32 {
        // The arrays start at byte 34: no element is aligned, so each is read by its bytes.
        let at = self.length_at(sequence);
        i32::from_le_bytes([idx[at], idx[at + 1], idx[at + 2], idx[at + 3]])
    }

    fn pointer(self, idx: &[u8], sequence: usize) -> i64 {
        read_i64(idx, self.pointer_at(sequence))
    }
}

fn read_i64(bytes: &[u8], at: usize) -> i64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    i64::from_le_bytes(word)
}

fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let bytes = file.metadata().map_err(|e| Error::io(path, e))?.len();
    if bytes == 0 {
        return Err(Error::data(path, 0, "the file is empty"));
    }
    // SAFETY: the map is read-only and only ever read as bytes, for which every bit pattern is
    // valid. What the type system cannot promise is that no other process rewrites the file: our
    // writer replaces files by renaming, which leaves an open map on the old content.
    unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::fixtures;

    /// Writes a pair into a new folder and opens it.
    fn open_bytes(idx: &[u8], bin: &[u8]) -> Result<IndexedDataset> {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("pair.v1");
        std::fs::write(with_suffix(&prefix, ".idx"), idx).unwrap();
        std::fs::write(with_suffix(&prefix, ".bin"), bin).unwrap();
        IndexedDataset::open(prefix)
    }

    fn small() -> (Vec<u8>, Vec<u8>) {
        let read = |name| std::fs::read(fixtures::path(name)).unwrap();
        (
            read("data/small_text_document.idx"),
            read("data/small_text_document.bin"),
        )
    }

    fn refused(result: Result<IndexedDataset>, expected: &str) {
        let message = result.err().expect("must be refused").to_string();
        assert!(message.contains("pair.v1."), "names no file: {message}");
        assert!(message.contains(expected), "{expected:?} not in: {message}");
    }

    #[test]
    fn reads_what_megatron_wrote() {
        let data = IndexedDataset::open(fixtures::path("data/small_text_document")).unwrap();
        let expected = fixtures::json("data/small_tokens.json");
        let ints = |v: &serde_json::Value| -> Vec<i64> {
            v.as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_i64().unwrap())
                .collect()
        };
        assert_eq!(data.dtype(), DType::UInt16);
        assert_eq!(data.total_tokens(), 6354);
        assert_eq!((data.num_sequences(), data.num_documents()), (80, 81));
        let lengths: Vec<i64> = data.sequence_lengths().map(|l| l as i64).collect();
        assert_eq!(lengths, ints(&expected["sequence_lengths"]));
        let documents: Vec<i64> = data.document_indices().map(|d| d as i64).collect();
        assert_eq!(documents, ints(&expected["document_indices"]));
        for (i, sequence) in expected["sequences"].as_array().unwrap().iter().enumerate() {
            let sequence = ints(sequence);
            let mut tokens = Vec::new();
            data.get(i, 0, sequence.len(), &mut tokens).unwrap();
            assert_eq!(tokens, sequence);
            tokens.clear();
            data.get(i, 1, sequence.len() - 1, &mut tokens).unwrap();
            assert_eq!(tokens, sequence[1..]);
        }
        let mut tokens = Vec::new();
        assert!(data.get(0, 1, 14, &mut tokens).is_err());
        assert!(data.get(0, usize::MAX, 1, &mut tokens).is_err());
        assert!(data.get(80, 0, 0, &mut tokens).is_ok());
        assert!(data.get(80, 0, 1, &mut tokens).is_err());
    }

    /// Megatron-LM #62, #81, #718: empty, foreign or broken index files.
    #[test]
    fn refuses_bad_files_with_their_name_and_offset() {
        let (idx, bin) = small();
        let with = |at: usize, bytes: &[u8]| {
            let mut idx = idx.clone();
            idx[at..at + bytes.len()].copy_from_slice(bytes);
            idx
        };
        refused(
            open_bytes(&[], &bin),
            "pair.v1.idx at byte 0: the file is empty",
        );
        refused(
            open_bytes(&idx, &[]),
            "pair.v1.bin at byte 0: the file is empty",
        );
        refused(
            open_bytes(b"hello", &bin),
            "at byte 0: not a Megatron index",
        );
        refused(open_bytes(&idx[..20], &bin), "at byte 20: truncated");
        refused(open_bytes(&with(9, &[2]), &bin), "at byte 9: version 2");
        refused(
            open_bytes(&with(17, &[9]), &bin),
            "at byte 17: unknown dtype code 9",
        );
        refused(
            open_bytes(&with(17, &[7]), &bin),
            "Float32 is no type of token ids",
        );
        refused(
            open_bytes(&with(18, &[0xff; 8]), &bin),
            "truncated or corrupt",
        );
        refused(
            open_bytes(&with(26, &[0xff; 8]), &bin),
            "truncated or corrupt",
        );
        refused(
            open_bytes(&with(34, &[0xff; 4]), &bin),
            "at byte 34: sequence 0 has the length -1",
        );
        refused(open_bytes(&idx[..idx.len() - 1], &bin), "at byte 1649");
        refused(
            open_bytes(&[&idx[..], &[0]].concat(), &bin),
            "truncated or corrupt",
        );
        refused(
            open_bytes(&idx, &bin[..bin.len() - 2]),
            "pair.v1.bin at byte 12706",
        );
        refused(
            open_bytes(&idx, &[&bin[..], &[0, 0]].concat()),
            "pair.v1.bin at byte 12708",
        );
        let documents = 34 + 12 * 80;
        refused(
            open_bytes(&with(documents, &[1]), &bin),
            "the first document starts at",
        );
        refused(
            open_bytes(&with(documents + 80, &[0]), &bin),
            "is 0, after 9",
        );
        refused(
            open_bytes(&with(idx.len() - 8, &[81]), &bin),
            "ends at sequence 81 of 80",
        );
        let mut none = with(18, &[0; 16]);
        none.truncate(HEADER_BYTES);
        refused(open_bytes(&none, &bin), "no documents");
        let missing = IndexedDataset::open("/nonexistent/pair.v1").map(|_| ());
        assert!(missing.unwrap_err().to_string().contains("pair.v1.idx"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_changed_header_length_or_pointer_is_refused(
            at in 0usize..34 + 12 * 80, change in 1u8..=255
        ) {
            // A dtype of the same width is the one change nothing in the files contradicts.
            prop_assume!(at != 17);
            let (mut idx, bin) = small();
            idx[at] ^= change;
            refused(open_bytes(&idx, &bin), "at byte");
        }

        #[test]
        fn any_changed_byte_is_refused_or_harmless(at in 0usize..1650, change in 1u8..=255) {
            let (mut idx, bin) = small();
            idx[at] ^= change;
            match open_bytes(&idx, &bin) {
                Err(error) => prop_assert!(error.to_string().contains("pair.v1.")),
                Ok(data) => {
                    let mut tokens = Vec::new();
                    for i in 0..data.num_sequences() {
                        data.get(i, 0, data.sequence_length(i), &mut tokens).unwrap();
                    }
                    prop_assert!(data.document_indices().all(|d| d <= data.num_sequences()));
                }
            }
        }

        #[test]
        fn a_truncated_file_is_refused(idx_keep in 0usize..1650, bin_keep in 0usize..12708) {
            let (idx, bin) = small();
            refused(open_bytes(&idx[..idx_keep], &bin), "at byte");
            refused(open_bytes(&idx, &bin[..bin_keep]), "pair.v1.bin at byte");
        }
    }
}
