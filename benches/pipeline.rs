//! A training step over four pipeline ranks, by schedule, beside the same step on one rank; and the
//! memory that each takes at its peak.

use burn_megatron::memory::CountingAllocator;
use burn_megatron::topology::PipelineSchedule;
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use megatron_benches::{StepCase, above_state, steps};
use std::time::Duration;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const CASE: StepCase = StepCase {
    name: "L8 h256 a4 s128 b1 v8192",
    num_layers: 8,
    hidden_size: 256,
    num_attention_heads: 4,
    seq_length: 128,
    micro_batch_size: 1,
    vocab_size: 8192,
};

const MICROBATCHES: usize = 16;

/// A name, the pipeline ranks, the stages on each, and their schedule.
const LAYOUTS: [(&str, usize, usize, Option<PipelineSchedule>); 4] = [
    ("reference: one rank", 1, 1, None),
    ("gpipe", 4, 1, Some(PipelineSchedule::GPipe)),
    ("1f1b", 4, 1, None),
    ("interleaved, 2 stages a rank", 4, 2, None),
];

fn pipeline(c: &mut Criterion) {
    burn_megatron::keep_freed_memory();
    let mut group = c.benchmark_group(format!("pipeline/{} m{MICROBATCHES}", CASE.name));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(10));
    group.throughput(Throughput::Elements(CASE.tokens() * MICROBATCHES as u64));
    for (name, pp, virtual_stages, schedule) in LAYOUTS {
        let mut config = CASE.config().config().clone();
        config.batch.global_batch_size = MICROBATCHES;
        config.parallel.pipeline_model_parallel_size = pp;
        config.parallel.num_virtual_stages_per_pipeline_rank = Some(virtual_stages);
        config.parallel.pipeline_schedule = schedule;
        let config = config.resolve().expect("a legal configuration");
        let batch = vec![CASE.microbatch(); MICROBATCHES];
        let (_, ranks) = steps(&config, &batch, 1).expect("ranks");
        let above: u64 = ranks.iter().map(above_state).sum();
        println!(
            "{name}: {:.1} MiB above weights, gradients and optimizer at the peak of a step, over all ranks",
            above as f64 / f64::from(1 << 20)
        );
        group.bench_function(name, |b| {
            b.iter_custom(|iterations| steps(&config, &batch, iterations).expect("ranks").0);
        });
    }
    group.finish();
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
