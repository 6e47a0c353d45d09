//! The writer: tokens stream to `.bin`, the index follows at the end.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{DType, MAGIC, VERSION, with_suffix};
use crate::{Error, Result};

/// Writes a `.bin`/`.idx` pair, byte for byte as Megatron's `IndexedDatasetBuilder` does.
///
/// Both files are written aside, as `.bin.tmp` and `.idx.tmp`, and renamed in
/// [`finish`](Self::finish): a run that dies leaves no half file under the final names, and one
/// that fails removes what it wrote.
pub struct IndexedDatasetWriter {
    prefix: PathBuf,
    dtype: DType,
    bin_tmp: PathBuf,
    idx_tmp: PathBuf,
    bin: BufWriter<File>,
    lengths: Vec<i32>,
    document_indices: Vec<i64>,
    /// The encoded tokens of one sequence, kept for its allocation.
    scratch: Vec<u8>,
    finished: bool,
}

impl IndexedDatasetWriter {
    /// Starts `prefix.bin` and `prefix.idx`; see [`DType::optimal`] for the type Megatron picks.
    ///
    /// # Errors
    /// If the `.bin.tmp` cannot be created.
    pub fn create(prefix: impl AsRef<Path>, dtype: DType) -> Result<Self> {
        let prefix = prefix.as_ref().to_path_buf();
        let bin_tmp = with_suffix(&prefix, ".bin.tmp");
        let file = File::create(&bin_tmp).map_err(|e| Error::io(&bin_tmp, e))?;
        Ok(Self {
            idx_tmp: with_suffix(&prefix, ".idx.tmp"),
            bin_tmp,
            prefix,
            dtype,
            bin: BufWriter::with_capacity(1 << 20, file),
            lengths: Vec::new(),
            document_indices: vec![0],
            scratch: Vec::new(),
            finished: false,
        })
    }

    /// Adds one sequence to the current document.
    ///
    /// # Errors
    /// A token the dtype cannot hold, a sequence of over `i32::MAX` tokens, a write that fails.
    pub fn add_sequence(&mut self, tokens: &[u32]) -> Result<()> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        self.dtype.encode(tokens, &mut bytes).map_err(|token| {
            let reason = format!("token {token} does not fit {:?}", self.dtype);
            Error::data(&self.bin_tmp, None, reason)
        })?;
        self.write_tokens(&bytes)?;
        self.scratch = bytes;
        self.push_length(tokens.len())
    }

    /// Ends the current document; one without sequences is kept, as an empty document.
    pub fn end_document(&mut self) {
        self.document_indices.push(self.lengths.len() as i64);
    }

    /// Adds a document of one sequence, or, without tokens, of none.
    ///
    /// # Errors
    /// As [`add_sequence`](Self::add_sequence).
    pub fn add_document(&mut self, tokens: &[u32]) -> Result<()> {
        if !tokens.is_empty() {
            self.add_sequence(tokens)?;
        }
        self.end_document();
        Ok(())
    }

    /// Adds documents already encoded by [`DType::encode`]; `lengths` are their tokens, 0 for an
    /// empty one.
    #[cfg(feature = "preprocess")]
    pub(crate) fn add_encoded_documents(&mut self, bytes: &[u8], lengths: &[usize]) -> Result<()> {
        debug_assert_eq!(
            bytes.len(),
            lengths.iter().sum::<usize>() * self.dtype.size()
        );
        self.write_tokens(bytes)?;
        for &length in lengths {
            if length > 0 {
                self.push_length(length)?;
            }
            self.end_document();
        }
        Ok(())
    }

    /// Writes the index and gives both files their final names, replacing what was there.
    ///
    /// # Errors
    /// If nothing with tokens was added, or a write fails.
    pub fn finish(mut self) -> Result<()> {
        if self.lengths.is_empty() {
            let reason = "nothing to write: no document has tokens";
            return Err(Error::data(with_suffix(&self.prefix, ".bin"), None, reason));
        }
        self.write_index()
            .map_err(|e| Error::io(&self.idx_tmp, e))?;
        self.bin
            .flush()
            .and_then(|()| self.bin.get_ref().sync_all())
            .map_err(|e| Error::io(&self.bin_tmp, e))?;
        let (bin, idx) = (
            with_suffix(&self.prefix, ".bin"),
            with_suffix(&self.prefix, ".idx"),
        );
        // An old index goes first: a crash between the renames must not pair it with the new .bin.
        match fs::remove_file(&idx) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&idx, e)),
            _ => {}
        }
        fs::rename(&self.bin_tmp, &bin).map_err(|e| Error::io(&bin, e))?;
        fs::rename(&self.idx_tmp, &idx).map_err(|e| Error::io(&idx, e))?;
        self.finished = true;
        Ok(())
    }

    fn write_tokens(&mut self, bytes: &[u8]) -> Result<()> {
        self.bin
            .write_all(bytes)
            .map_err(|e| Error::io(&self.bin_tmp, e))
    }

    fn push_length(&mut self, length: usize) -> Result<()> {
        let length = i32::try_from(length).map_err(|_| {
            let reason = format!("a sequence of {length} tokens is too long for the format");
            Error::data(&self.bin_tmp, None, reason)
        })?;
        self.lengths.push(length);
        Ok(())
    }

    fn write_index(&self) -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&self.idx_tmp)?);
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[self.dtype.code()])?;
        out.write_all(&(self.lengths.len() as u64).to_le_bytes())?;
        out.write_all(&(self.document_indices.len() as u64).to_le_bytes())?;
        for length in &self.lengths {
            out.write_all(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            out.write_all(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.dtype.size() as i64;
        }
        for index in &self.document_indices {
            out.write_all(&index.to_le_bytes())?;
        }
        out.into_inner()?.sync_all()
    }
}

impl Drop for IndexedDatasetWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that will not go.
            let _ = fs::remove_file(&self.bin_tmp);
            let _ = fs::remove_file(&self.idx_tmp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::IndexedDataset;
    use crate::data::fixtures;

    fn files(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn rewrites_megatrons_files_byte_for_byte() {
        for name in ["small_text_document", "multi"] {
            let source = fixtures::path(&format!("data/{name}"));
            let data = IndexedDataset::open(&source).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let prefix = folder.path().join(name);
            let mut writer = IndexedDatasetWriter::create(&prefix, data.dtype()).unwrap();
            let documents: Vec<_> = data.document_indices().collect();
            for document in documents.windows(2) {
                for sequence in document[0]..document[1] {
                    let mut tokens = Vec::new();
                    data.get(sequence, 0, data.sequence_length(sequence), &mut tokens)
                        .unwrap();
                    let tokens: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
                    writer.add_sequence(&tokens).unwrap();
                }
                writer.end_document();
            }
            let (bin, idx) = (format!("{name}.bin"), format!("{name}.idx"));
            assert_eq!(files(folder.path()), [format!("{name}.bin.tmp")]);
            writer.finish().unwrap();
            assert_eq!(files(folder.path()), [bin, idx]);
            for suffix in [".bin", ".idx"] {
                let written = fs::read(with_suffix(&prefix, suffix)).unwrap();
                assert!(written == fs::read(with_suffix(&source, suffix)).unwrap());
            }
        }
    }

    #[test]
    fn a_failed_run_leaves_nothing_and_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("out");
        let mut writer = IndexedDatasetWriter::create(&prefix, DType::UInt16).unwrap();
        writer.add_document(&[1, 2, 3]).unwrap();
        writer.finish().unwrap();

        let mut writer = IndexedDatasetWriter::create(&prefix, DType::UInt16).unwrap();
        let error = writer.add_document(&[4, 70000]).unwrap_err().to_string();
        assert!(error.contains("token 70000 does not fit UInt16"), "{error}");
        drop(writer);
        assert_eq!(files(folder.path()), ["out.bin", "out.idx"]);
        assert_eq!(IndexedDataset::open(&prefix).unwrap().total_tokens(), 3);
    }

    #[test]
    fn nothing_to_write_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer =
            IndexedDatasetWriter::create(folder.path().join("out"), DType::Int32).unwrap();
        writer.add_document(&[]).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("no document has tokens"), "{error}");
        assert!(files(folder.path()).is_empty());
    }
}
