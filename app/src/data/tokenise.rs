//! A `.jsonl` data path, tokenised on first use into the run's folder.

use crate::error::{Failure, Result};
use crate::say::say;
use crate::units::grouped;
use burn_megatron::data::{PreprocessConfig, Tokenizer, preprocess};
use std::fs;
use std::path::{Path, PathBuf};

/// Megatron's default key.
const KEY: &str = "text";

/// Tokenises the key `text` of `input` and gives the prefix of the files made.
pub fn run(input: &Path, tokenizer: &Tokenizer, run_dir: &Path) -> Result<PathBuf> {
    let folder = run_dir.join("data");
    fs::create_dir_all(&folder).map_err(|e| Failure::io(&folder, &e))?;
    let stem = input.file_stem().unwrap_or_default().to_string_lossy();
    let output_prefix = free_prefix(&folder, &stem);
    let config = PreprocessConfig {
        input: input.to_path_buf(),
        output_prefix,
        json_keys: vec![KEY.into()],
        append_eod: true,
        workers: std::thread::available_parallelism().map_or(1, |n| n.get()),
        skip_bad_lines: false,
    };
    let report = preprocess(&config, tokenizer, &mut |_| ()).map_err(|error| {
        let next = "correct that line, or make a dataset of the others: megatron preprocess \
                    --skip-bad-lines";
        Failure::bad_line(error, next)
    })?;
    let prefix = config.output(KEY);
    say!(
        "tokenised {} into {}: {} documents, {} tokens",
        input.display(),
        prefix.display(),
        grouped(report.documents),
        grouped(report.tokens)
    );
    Ok(prefix)
}

/// `folder/stem`, or with a number where two inputs of a blend have the same name.
fn free_prefix(folder: &Path, stem: &str) -> PathBuf {
    let taken = |name: &str| folder.join(format!("{name}_text_document.idx")).exists();
    let numbered = (2..).map(|n| format!("{stem}-{n}"));
    let name = std::iter::once(stem.to_string())
        .chain(numbered)
        .find(|name| !taken(name));
    folder.join(name.unwrap_or_default())
}
