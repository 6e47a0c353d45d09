//! Training steps of one of the cases of `benches/step`, timed one by one: what `vs_torch.sh` and `gpu_check.sh` run
//! beside PyTorch.
//!
//! `step_time A|B|124M|1.3B STEPS [cpu|cuda|wgpu]` prints a JSON line: the seconds of each step, and the process's peak
//! memory. On a card it computes in bf16, if the card does.

use burn::tensor::DType;
use burn_megatron::RankDevice;
use burn_megatron::launch::RankContext;
use burn_megatron::train::Trainer;
use megatron_benches::{CASE_1_3B, CASE_124M, CASE_A, CASE_B};
use std::time::Instant;

fn main() {
    burn_megatron::keep_freed_memory();
    let mut args = std::env::args().skip(1);
    let case = match args.next().as_deref() {
        Some("A") => CASE_A,
        Some("B") => CASE_B,
        Some("124M") => CASE_124M,
        Some("1.3B") => CASE_1_3B,
        _ => return eprintln!("usage: step_time A|B|124M|1.3B STEPS [cpu|cuda|wgpu]"),
    };
    let steps = args.next().and_then(|n| n.parse().ok()).unwrap_or(5);
    let device = match args.next().as_deref() {
        Some("cuda") => RankDevice::Cuda,
        Some("wgpu") => RankDevice::Wgpu,
        _ => RankDevice::Cpu,
    };
    if let Some(violation) = device.violation(1) {
        return eprintln!("{}", violation.rule);
    }
    let rank = RankContext::single(device.of_rank(0));
    let bf16 = device != RankDevice::Cpu && rank.device.supports_dtype(DType::BF16);
    let config = case.config_on(device, bf16);
    let mut trainer = Trainer::new(&config, &rank, None).expect("a trainer");
    let batch = [case.microbatch()];
    // The first warms up.
    trainer.train_step(&batch).expect("a step");
    let times: Vec<f64> = (0..steps)
        .map(|_| {
            let start = Instant::now();
            trainer.train_step(&batch).expect("a step");
            start.elapsed().as_secs_f64()
        })
        .collect();
    println!("{{\"seconds\": {times:?}, \"peak_mb\": {}}}", peak_mb());
}

/// The most memory that the process has held, in MB; 0 where the system does not say.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024 / 1_000_000
}
