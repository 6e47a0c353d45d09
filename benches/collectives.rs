//! All-reduce between rank threads, 1 KiB to 64 MiB, beside copying as much memory with as many
//! threads: an all-reduce of `n` ranks reads and writes each rank's buffer once, as `n` copies do.

use burn_megatron::comm::threads::ThreadWorld;
use burn_megatron::comm::{Communicator, ReduceOp};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const SIZES: [usize; 5] = [1 << 10, 1 << 15, 1 << 20, 1 << 23, 1 << 26];

fn collectives(c: &mut Criterion) {
    for ranks in [2, 4] {
        let mut group = c.benchmark_group(format!("all-reduce/{ranks} ranks"));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300));
        group.measurement_time(Duration::from_secs(2));
        for bytes in SIZES {
            group.throughput(Throughput::Bytes((ranks * bytes) as u64));
            let id = |name: &str| BenchmarkId::new(name, format!("{} KiB", bytes >> 10));
            group.bench_function(id("all_reduce"), |b| {
                b.iter_custom(|iterations| all_reduce(ranks, bytes, iterations));
            });
            group.bench_function(id("reference: copy"), |b| {
                b.iter_custom(|iterations| copy(ranks, bytes, iterations));
            });
        }
        group.finish();
    }
}

/// The time of `iterations` all-reduces of `bytes` on each of `ranks` threads.
fn all_reduce(ranks: usize, bytes: usize, iterations: u64) -> Duration {
    let members: Vec<usize> = (0..ranks).collect();
    let comms = ThreadWorld::new(Duration::from_secs(60)).group("bench", &members);
    on_threads(ranks, iterations, |rank| {
        let comm = comms[rank].clone();
        let mut buffer = vec![0f32; bytes / 4];
        move || {
            comm.all_reduce(&mut buffer, ReduceOp::Sum)
                .expect("all ranks call")
        }
    })
}

/// The time of `iterations` copies of `bytes` on each of `ranks` threads.
fn copy(ranks: usize, bytes: usize, iterations: u64) -> Duration {
    on_threads(ranks, iterations, |_| {
        let from = vec![1u8; bytes];
        let mut to = vec![0u8; bytes];
        move || {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
        }
    })
}

/// Makes a job on each thread and runs it once, so that its memory is there; then times
/// `iterations` of all of them, from a common start to the last one's end.
fn on_threads<J: FnMut()>(
    ranks: usize,
    iterations: u64,
    prepare: impl Fn(usize) -> J + Sync,
) -> Duration {
    let start = Barrier::new(ranks + 1);
    let run = |rank| {
        let mut job = prepare(rank);
        job();
        start.wait();
        (0..iterations).for_each(|_| job());
    };
    let run = &run;
    thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        start.wait();
        let begun = Instant::now();
        handles
            .into_iter()
            .for_each(|handle| handle.join().expect("a thread of the bench"));
        begun.elapsed()
    })
}

criterion_group!(benches, collectives);
criterion_main!(benches);
