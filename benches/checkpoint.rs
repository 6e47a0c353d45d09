//! Saving and loading a checkpoint, beside plain writing and reading of as many bytes; and what a save costs a
//! training step.

use burn_megatron::Result;
use burn_megatron::checkpoint::{Checkpoint, Kind, SaveTo, Saver};
use burn_megatron::launch::{DEFAULT_TIMEOUT, RankContext, run_ranks};
use burn_megatron::shard::{Init, ParamSpec};
use burn_megatron::train::{LoadOptions, ResolvedConfig, Trainer};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use megatron_benches::StepCase;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

const CASE: StepCase = StepCase {
    name: "L6 h512 a8 s64 b1 v16384",
    num_layers: 6,
    hidden_size: 512,
    num_attention_heads: 8,
    seq_length: 64,
    micro_batch_size: 1,
    vocab_size: 16384,
};

/// What a step does beside training.
#[derive(Clone, Copy, PartialEq)]
enum Save {
    Never,
    Now,
    InBackground,
}

fn checkpoint(c: &mut Criterion) {
    burn_megatron::keep_freed_memory();
    let scratch = tempfile::tempdir().expect("a folder");
    let mut config = CASE.config().config().clone();
    config.parallel.world_size = Some(2);
    config.batch.global_batch_size = 2;
    config.data_parallel.use_distributed_optimizer = true;
    let config = config.resolve().expect("a legal configuration");
    let bytes = save(&config, scratch.path(), 1).expect("ranks").1;

    let mut group = c.benchmark_group(format!(
        "checkpoint/{} dp2, {} MB",
        CASE.name,
        bytes / 1_000_000
    ));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(10));
    group.throughput(Throughput::BytesDecimal(bytes));
    let plain = scratch.path().join("plain");
    let data = vec![7u8; bytes as usize];
    fs::write(&plain, &data).expect("written");
    group.bench_function("reference: plain write and flush", |b| {
        b.iter(|| {
            let mut file = File::create(&plain).expect("a file");
            file.write_all(&data).expect("written");
            file.sync_all().expect("flushed");
        });
    });
    group.bench_function("save", |b| {
        b.iter_custom(|n| save(&config, scratch.path(), n).expect("ranks").0);
    });
    group.bench_function("reference: plain read", |b| {
        let mut data = Vec::with_capacity(bytes as usize);
        b.iter(|| {
            data.clear();
            let mut file = File::open(&plain).expect("a file");
            file.read_to_end(&mut data).expect("read");
        });
    });
    group.bench_function("read and checked", |b| {
        b.iter_custom(|n| read(&config, scratch.path(), n).expect("ranks"));
    });
    group.bench_function("load", |b| {
        b.iter_custom(|n| load(&config, scratch.path(), n).expect("ranks"));
    });
    group.finish();

    let mut group = c.benchmark_group(format!("checkpoint, a step of {} dp2", CASE.name));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.measurement_time(Duration::from_secs(10));
    for (name, how) in [
        ("reference: no save", Save::Never),
        ("saved", Save::Now),
        ("saved in the background", Save::InBackground),
    ] {
        group.bench_function(name, |b| {
            b.iter_custom(|n| steps(&config, scratch.path(), n, how).expect("ranks"));
        });
    }
    group.finish();
}

fn saver(rank: &RankContext, dir: &Path) -> Saver {
    let to = SaveTo {
        dir: dir.join("save"),
        ..SaveTo::default()
    };
    Saver::new(to, rank.groups.saver.comm.clone())
}

/// The time of so many saves, and the bytes of each.
fn save(config: &ResolvedConfig, dir: &Path, iterations: u64) -> Result<(Duration, u64)> {
    let _ = fs::remove_dir_all(dir.join("save"));
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let trainer = Trainer::new(config, rank, None)?;
        let mut saver = saver(rank, dir);
        rank.groups.world.comm.barrier()?;
        let (start, mut bytes) = (Instant::now(), 0);
        for _ in 0..iterations {
            bytes = saver.save(&trainer.snapshot(Value::Null))?.bytes;
        }
        Ok((start.elapsed(), bytes))
    })?;
    Ok(ranks.into_iter().next().unwrap_or_default())
}

/// The time in which the ranks read every tensor of a checkpoint, each a part, with its checksums.
fn read(config: &ResolvedConfig, dir: &Path, iterations: u64) -> Result<Duration> {
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut values = Vec::new();
        let mut pass = || -> Result<Duration> {
            rank.groups.world.comm.barrier()?;
            let start = Instant::now();
            let checkpoint = Checkpoint::find(&dir.join("save"), None)?;
            for (name, saved) in &checkpoint.manifest().tensors {
                let spec = ParamSpec::replicated(saved.shape.clone(), Init::Zeros);
                let half = spec.full_elements() / 2;
                let mine = rank.rank * half..(rank.rank + 1) * half;
                values.resize(values.len().max(half), 0.0);
                for kind in [Kind::Weight, Kind::ExpAvg, Kind::ExpAvgSq] {
                    checkpoint.read(kind, name, &spec, &mine, &mut values[..half])?;
                }
            }
            Ok(start.elapsed())
        };
        pass()?;
        (0..iterations).map(|_| pass()).sum::<Result<Duration>>()
    })?;
    Ok(ranks.into_iter().max().unwrap_or_default())
}

fn load(config: &ResolvedConfig, dir: &Path, iterations: u64) -> Result<Duration> {
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(config, rank, None)?;
        rank.groups.world.comm.barrier()?;
        let start = Instant::now();
        for _ in 0..iterations {
            let checkpoint = Checkpoint::find(&dir.join("save"), None)?;
            trainer.load(&checkpoint, LoadOptions::default())?;
        }
        Ok(start.elapsed())
    })?;
    Ok(ranks.into_iter().max().unwrap_or_default())
}

/// The time of so many steps, each with a save; the background ones still under way at the end are waited for
/// outside of it, but for one that a step would have waited for.
fn steps(config: &ResolvedConfig, dir: &Path, iterations: u64, how: Save) -> Result<Duration> {
    let _ = fs::remove_dir_all(dir.join("save"));
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(config, rank, None)?;
        let mut saver = saver(rank, dir);
        let batch = [CASE.microbatch()];
        trainer.train_step(&batch)?;
        rank.groups.world.comm.barrier()?;
        let start = Instant::now();
        for _ in 0..iterations {
            trainer.train_step(&batch)?;
            match how {
                Save::Never => {}
                Save::Now => drop(saver.save(&trainer.snapshot(Value::Null))?),
                Save::InBackground => {
                    if let Some(before) = saver.save_in_background(trainer.snapshot(Value::Null))? {
                        before?;
                    }
                }
            }
        }
        let elapsed = start.elapsed();
        if let Some(last) = saver.wait() {
            last?;
        }
        Ok(elapsed)
    })?;
    Ok(ranks.into_iter().max().unwrap_or_default())
}

criterion_group!(benches, checkpoint);
criterion_main!(benches);
