//! A training step on one rank, beside the bare matrix products that it cannot do without: the
//! ratio says what everything else costs.

use burn::tensor::{Device, Tensor};
use burn_megatron::launch::RankContext;
use burn_megatron::train::Trainer;
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use megatron_benches::{CASE_A, CASE_B, StepCase};
use std::hint::black_box;
use std::time::Duration;

fn step(c: &mut Criterion) {
    burn_megatron::keep_freed_memory();
    for case in [CASE_B, CASE_A] {
        let mut group = c.benchmark_group(format!("step/{}", case.name));
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        group
            .warm_up_time(Duration::from_millis(500))
            .measurement_time(Duration::from_secs(10));
        group.throughput(Throughput::Elements(case.tokens()));
        let rank = RankContext::single(Device::flex());
        let mut trainer = Trainer::new(&case.config(), &rank, None).expect("a trainer");
        let batch = [case.microbatch()];
        group.bench_function("train_step", |b| {
            b.iter(|| trainer.train_step(&batch).expect("a step"));
        });
        group.bench_function("reference: its matrix products alone", |b| {
            b.iter(|| products(&case));
        });
        group.finish();
    }
}

/// Forward and backward of every product: `C = A B`, `dA = dC Bᵀ`, `dB = Aᵀ dC`.
fn products(case: &StepCase) {
    let device = Device::flex();
    for (count, [m, k, n]) in case.products() {
        let a = Tensor::<2>::ones([m, k], &device);
        let b = Tensor::<2>::ones([k, n], &device);
        let dc = Tensor::<2>::ones([m, n], &device);
        for _ in 0..count {
            black_box(a.clone().matmul(b.clone()));
            black_box(dc.clone().matmul(b.clone().transpose()));
            black_box(a.clone().transpose().matmul(dc.clone()));
        }
    }
}

criterion_group!(benches, step);
criterion_main!(benches);
