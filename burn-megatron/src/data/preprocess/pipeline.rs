//! Reader, workers and writer: three stages that overlap, in bounded memory and fixed order.
//!
//! A permit goes round with each chunk: the reader takes one before it reads, the writer gives it
//! back once the chunk is written. So the chunks in flight are bounded even when one of them takes
//! long and those behind it wait for their turn.

use std::collections::BTreeMap;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::chunk::{Chunk, ChunkEncoder, EncodedChunk};
use crate::data::prefetch::panic_message;
use crate::{Error, Result};

/// The lines to read.
pub(super) struct Input<'a, R> {
    pub reader: R,
    /// For messages.
    pub path: &'a Path,
    /// Chunks end with the first line that ends at or after this many bytes.
    pub chunk_bytes: usize,
}

/// A chunk, or the error that ends the input, by its place in the order.
type Numbered<T> = (u64, Result<T>);

/// Reads `input`, encodes its chunks on `workers` threads with an encoder each, and hands the
/// results to `write` on this thread, in order.
///
/// # Errors
/// The first error in the order of the input, or of `write`; the threads have ended by then.
pub(super) fn run<'a, R: Read + Send>(
    input: Input<R>,
    workers: usize,
    encoder: impl Fn() -> ChunkEncoder<'a> + Sync,
    mut write: impl FnMut(EncodedChunk) -> Result<()>,
) -> Result<()> {
    let (permit, permits) = channel();
    for _ in 0..2 * workers + 2 {
        // The receiver is in scope: this cannot fail.
        let _ = permit.send(());
    }
    let (chunk_sender, chunks) = channel();
    let chunks = Mutex::new(chunks);
    let (sender, results) = channel();
    thread::scope(|scope| {
        let path = input.path;
        scope.spawn(move || read_chunks(input, &permits, &chunk_sender));
        for _ in 0..workers {
            let (chunks, sender, encoder) = (&chunks, sender.clone(), &encoder);
            scope.spawn(move || work(path, chunks, &sender, encoder()));
        }
        drop(sender);
        let written = write_in_order(&results, &permit, &mut write);
        // Whatever is still under way ends at its next send or receive.
        drop(results);
        drop(permit);
        written
    })
}

/// The first stage: whole lines, numbered.
fn read_chunks<R: Read>(
    mut input: Input<R>,
    permits: &Receiver<()>,
    chunks: &Sender<Numbered<Chunk>>,
) {
    let (mut offset, mut line) = (0, 1);
    let mut rest = Vec::new();
    for number in 0.. {
        if permits.recv().is_err() {
            return;
        }
        let bytes = match read_lines(&mut input, &mut rest) {
            Ok(bytes) if bytes.is_empty() => return,
            Ok(bytes) => bytes,
            Err(error) => {
                // No receiver, no interest.
                let _ = chunks.send((number, Err(Error::io(input.path, error))));
                return;
            }
        };
        let (length, lines) = (bytes.len() as u64, count_lines(&bytes));
        let chunk = Chunk {
            bytes,
            offset,
            first_line: line,
        };
        if chunks.send((number, Ok(chunk))).is_err() {
            return;
        }
        offset += length;
        line += lines;
    }
}

/// At least `chunk_bytes` of whole lines, or what is left; `rest` is what was read beyond them.
fn read_lines<R: Read>(input: &mut Input<R>, rest: &mut Vec<u8>) -> std::io::Result<Vec<u8>> {
    let mut bytes = std::mem::take(rest);
    // Where a line end can still be: what is before was searched.
    let mut searched = 0;
    loop {
        if bytes.len() >= input.chunk_bytes {
            let from = searched.max(input.chunk_bytes.saturating_sub(1));
            if let Some(at) = bytes[from..].iter().position(|b| *b == b'\n') {
                *rest = bytes.split_off(from + at + 1);
                return Ok(bytes);
            }
            searched = bytes.len();
        }
        let want = input.chunk_bytes.max(4096) as u64;
        if input.reader.by_ref().take(want).read_to_end(&mut bytes)? == 0 {
            return Ok(bytes);
        }
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|b| **b == b'\n').count() as u64
}

/// The second stage, on each worker.
fn work(
    path: &Path,
    chunks: &Mutex<Receiver<Numbered<Chunk>>>,
    results: &Sender<Numbered<EncodedChunk>>,
    mut encoder: ChunkEncoder,
) {
    loop {
        // A poisoned lock is still a receiver: nothing panics while it is held.
        let next = chunks.lock().unwrap_or_else(|e| e.into_inner()).recv();
        let Ok((number, chunk)) = next else {
            return;
        };
        let result = chunk.and_then(|chunk| {
            // After a panic this run ends; the encoder is not used for anything that counts.
            catch_unwind(AssertUnwindSafe(|| encoder.encode(&chunk))).unwrap_or_else(|panic| {
                let message = panic_message(panic.as_ref());
                let reason = format!(
                    "tokenising panicked in the lines from {} on: {message}",
                    chunk.first_line
                );
                Err(Error::data(path, chunk.offset, reason))
            })
        });
        if results.send((number, result)).is_err() {
            return;
        }
    }
}

/// The last stage: results wait here until those before them are written.
fn write_in_order(
    results: &Receiver<Numbered<EncodedChunk>>,
    permit: &Sender<()>,
    write: &mut impl FnMut(EncodedChunk) -> Result<()>,
) -> Result<()> {
    let mut waiting = BTreeMap::new();
    let mut next = 0;
    while let Ok((number, result)) = results.recv() {
        waiting.insert(number, result);
        while let Some(result) = waiting.remove(&next) {
            write(result?)?;
            next += 1;
            // Fails only when the reader has read all there is.
            let _ = permit.send(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_lines_and_all_of_the_input() {
        let text = "a\nbb\n\nccccccccccc\nd";
        for chunk_bytes in 1..=text.len() + 1 {
            let mut input = Input {
                reader: text.as_bytes(),
                path: Path::new("in"),
                chunk_bytes,
            };
            let (mut rest, mut all) = (Vec::new(), Vec::new());
            loop {
                let bytes = read_lines(&mut input, &mut rest).unwrap();
                if bytes.is_empty() {
                    break;
                }
                all.extend_from_slice(&bytes);
                assert!(bytes.ends_with(b"\n") || all.len() == text.len());
                assert!(bytes.len() >= chunk_bytes || all.len() == text.len());
            }
            assert_eq!(all, text.as_bytes());
        }
    }
}
