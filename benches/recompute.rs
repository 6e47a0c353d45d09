//! What recomputation saves of a training step's memory and costs of its time; and sequence parallelism
//! beside plain tensor parallelism.

use burn_megatron::layers::{RecomputeGranularity, RecomputeMethod};
use burn_megatron::memory::CountingAllocator;
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use megatron_benches::{StepCase, above_state, steps};
use std::time::Duration;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const CASE: StepCase = StepCase {
    name: "L8 h256 a8 s512 b2 v8192",
    num_layers: 8,
    hidden_size: 256,
    num_attention_heads: 8,
    seq_length: 512,
    micro_batch_size: 2,
    vocab_size: 8192,
};

const FULL: Option<RecomputeGranularity> = Some(RecomputeGranularity::Full);

/// What is computed again: a granularity, a method and a number of layers.
type Again = (
    Option<RecomputeGranularity>,
    Option<RecomputeMethod>,
    Option<usize>,
);

/// A name, the tensor-parallel ranks, whether they split the sequence, and what is computed again.
const CASES: [(&str, usize, bool, Again); 9] = [
    ("reference: nothing", 1, false, (None, None, None)),
    (
        "selective",
        1,
        false,
        (Some(RecomputeGranularity::Selective), None, None),
    ),
    ("full, uniform 1", 1, false, (FULL, None, None)),
    ("full, uniform 4", 1, false, (FULL, None, Some(4))),
    (
        "full, block 4 of 8",
        1,
        false,
        (FULL, Some(RecomputeMethod::Block), Some(4)),
    ),
    ("tp 2", 2, false, (None, None, None)),
    ("tp 2, sequence parallel", 2, true, (None, None, None)),
    ("tp 2, full", 2, false, (FULL, None, None)),
    ("tp 2, sequence parallel, full", 2, true, (FULL, None, None)),
];

fn recompute(c: &mut Criterion) {
    burn_megatron::keep_freed_memory();
    let mut group = c.benchmark_group(format!("recompute/{}", CASE.name));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(10));
    group.throughput(Throughput::Elements(CASE.tokens()));
    for (name, tp, sequence_parallel, again) in CASES {
        let mut config = CASE.config().config().clone();
        let model = &mut config.model;
        (
            model.recompute_granularity,
            model.recompute_method,
            model.recompute_num_layers,
        ) = again;
        config.parallel.tensor_model_parallel_size = tp;
        config.parallel.sequence_parallel = sequence_parallel;
        let config = config.resolve().expect("a legal configuration");
        let batch = [CASE.microbatch()];
        let (_, ranks) = steps(&config, &batch, 1).expect("ranks");
        let fullest = ranks.into_iter().max_by_key(|memory| memory.peak);
        let memory = fullest.unwrap_or_default();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "{name}: kept for the backward {:.1} MiB ({:.1} predicted), peak of the step above weights, \
             gradients and optimizer {:.1} MiB, of the fullest rank",
            mib(memory.parts.activations),
            mib(config.rank_memory(0).activations),
            mib(above_state(&memory))
        );
        group.bench_function(name, |b| {
            b.iter_custom(|iterations| steps(&config, &batch, iterations).expect("ranks").0);
        });
    }
    group.finish();
}

criterion_group!(benches, recompute);
criterion_main!(benches);
