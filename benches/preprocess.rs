//! Tokenising JSONL with GPT-2's BPE, whole documents from file to `.bin/.idx`, beside the
//! `tokenizers` crate encoding the same documents in memory on one thread.
//!
//! The text is the bundled book (1.2 MB). `PREPROCESS_CORPUS=big.jsonl` benches another: the longer
//! it is, the less the first sight of each word weighs.

use burn_megatron::data::{PreprocessConfig, Tokenizer, TokenizerConfig, preprocess};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn tokenizing(c: &mut Criterion) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let input = std::env::var_os("PREPROCESS_CORPUS")
        .map_or_else(|| root.join("data/quickstart/corpus.jsonl"), PathBuf::from);
    let gpt2 = root.join("tests/fixtures/gpt2");
    let tokenizer = Tokenizer::new(&TokenizerConfig::GPT2BPETokenizer {
        vocab_file: gpt2.join("vocab.json"),
        merge_file: gpt2.join("merges.txt"),
    })
    .expect("GPT-2's tokenizer");
    let out = tempfile::tempdir().expect("a folder");
    let config = |workers| PreprocessConfig {
        input: input.clone(),
        output_prefix: out.path().join("corpus"),
        json_keys: vec!["text".into()],
        append_eod: true,
        workers,
        skip_bad_lines: false,
    };
    let report = preprocess(&config(1), &tokenizer, &mut |_| ()).expect("a readable corpus");

    let mut group = c.benchmark_group("preprocess");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(5));
    group.throughput(Throughput::Elements(report.tokens));
    for workers in [1, 2] {
        group.bench_function(format!("{workers} workers"), |b| {
            b.iter(|| preprocess(&config(workers), &tokenizer, &mut |_| ()).expect("a run"));
        });
    }
    let documents = documents(&input);
    let plain = plain_tokenizer(&gpt2);
    group.bench_function("reference: the tokenizers crate, one thread", |b| {
        b.iter(|| {
            for document in &documents {
                std::hint::black_box(plain.encode_fast(document.as_str(), false).expect("text"));
            }
        });
    });
    group.finish();
}

fn documents(input: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(input).expect("the corpus");
    let document = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("JSON");
        value["text"].as_str().expect("a text").to_string()
    };
    text.lines().map(document).collect()
}

/// GPT-2's pipeline as the crate offers it.
fn plain_tokenizer(gpt2: &Path) -> tokenizers::Tokenizer {
    use tokenizers::models::bpe::BPE;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    let path = |name: &str| gpt2.join(name).to_string_lossy().into_owned();
    let model = BPE::from_file(&path("vocab.json"), &path("merges.txt")).build();
    let mut tokenizer = tokenizers::Tokenizer::new(model.expect("GPT-2's files"));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer
}

criterion_group!(benches, tokenizing);
criterion_main!(benches);
