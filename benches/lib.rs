//! What the benches share: the models they run, and how.

use burn_megatron::grads::DataParallelConfig;
use burn_megatron::launch::{DEFAULT_TIMEOUT, run_ranks};
use burn_megatron::models::gpt::GptConfig;
use burn_megatron::optim::{MixedPrecisionConfig, OptimizerConfig};
use burn_megatron::topology::ParallelConfig;
use burn_megatron::train::{
    BatchConfig, MeasuredMemory, MicroBatch, ResolvedConfig, TrainConfig, Trainer,
};
use burn_megatron::{RankDevice, Result};
use std::time::{Duration, Instant};

/// A model and batch of the step bench.
#[derive(Debug, Clone, Copy)]
pub struct StepCase {
    pub name: &'static str,
    pub num_layers: usize,
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    pub seq_length: usize,
    pub micro_batch_size: usize,
    pub vocab_size: usize,
}

/// GPT with GPT-2's vocabulary, 30.1 M parameters.
pub const CASE_A: StepCase = StepCase {
    name: "L6 h384 a6 s256 b8 v50304",
    num_layers: 6,
    hidden_size: 384,
    num_attention_heads: 6,
    seq_length: 256,
    micro_batch_size: 8,
    vocab_size: 50304,
};

/// A GPT small enough for many steps a second.
pub const CASE_B: StepCase = StepCase {
    name: "L4 h256 a4 s128 b8 v8192",
    num_layers: 4,
    hidden_size: 256,
    num_attention_heads: 4,
    seq_length: 128,
    micro_batch_size: 8,
    vocab_size: 8192,
};

/// GPT-2's smallest, for one card.
pub const CASE_124M: StepCase = StepCase {
    name: "L12 h768 a12 s1024 b16 v50304",
    num_layers: 12,
    hidden_size: 768,
    num_attention_heads: 12,
    seq_length: 1024,
    micro_batch_size: 16,
    vocab_size: 50304,
};

/// GPT-3's 1.3 B, for one large card.
pub const CASE_1_3B: StepCase = StepCase {
    name: "L24 h2048 a16 s2048 b4 v50304",
    num_layers: 24,
    hidden_size: 2048,
    num_attention_heads: 16,
    seq_length: 2048,
    micro_batch_size: 4,
    vocab_size: 50304,
};

impl StepCase {
    /// The run's configuration on one rank, in f32 on the CPU.
    pub fn config(&self) -> ResolvedConfig {
        self.config_on(RankDevice::Cpu, false)
    }

    /// On a device of a kind, and perhaps in bf16.
    pub fn config_on(&self, device: RankDevice, bf16: bool) -> ResolvedConfig {
        let config = TrainConfig {
            model: GptConfig {
                num_layers: self.num_layers,
                hidden_size: self.hidden_size,
                num_attention_heads: self.num_attention_heads,
                ..GptConfig::default()
            },
            parallel: ParallelConfig::default(),
            data_parallel: DataParallelConfig::default(),
            device,
            batch: BatchConfig {
                seq_length: self.seq_length,
                micro_batch_size: self.micro_batch_size,
                global_batch_size: self.micro_batch_size,
            },
            rampup_batch_size: None,
            optimizer: OptimizerConfig::default(),
            vocab_size: self.vocab_size,
            train_iters: 1000,
            seed: 1,
            calculate_per_token_loss: true,
            mixed_precision: MixedPrecisionConfig {
                bf16,
                ..MixedPrecisionConfig::default()
            },
            check_for_nan_in_loss_and_grad: true,
        };
        config.resolve().expect("the case is a legal configuration")
    }

    /// A microbatch of arbitrary tokens.
    pub fn microbatch(&self) -> MicroBatch {
        let len = self.micro_batch_size * (self.seq_length + 1);
        let tokens = (0..len)
            .map(|i| (i * 7919 % self.vocab_size) as i64)
            .collect();
        MicroBatch {
            tokens,
            loss_mask: None,
        }
    }

    /// Tokens of one step.
    pub fn tokens(&self) -> u64 {
        (self.micro_batch_size * self.seq_length) as u64
    }

    /// The matrix products of one forward pass as `(count, rows, inner, columns)`.
    pub fn products(&self) -> Vec<(usize, [usize; 3])> {
        let (n, h) = (self.tokens() as usize, self.hidden_size);
        let (s, d) = (self.seq_length, h / self.num_attention_heads);
        let heads = self.num_layers * self.micro_batch_size * self.num_attention_heads;
        vec![
            (self.num_layers, [n, h, 3 * h]),
            (heads, [s, d, s]),
            (heads, [s, s, d]),
            (self.num_layers, [n, h, h]),
            (self.num_layers, [n, h, 4 * h]),
            (self.num_layers, [n, 4 * h, h]),
            (1, [n, h, self.vocab_size]),
        ]
    }
}

/// The slowest rank's time of so many steps, after one to warm up, and every rank's memory in the last, where
/// the bench counts it. `batch` is what a rank that reads data brings to each.
///
/// # Errors
/// If a rank fails.
pub fn steps(
    config: &ResolvedConfig,
    batch: &[MicroBatch],
    iterations: u64,
) -> Result<(Duration, Vec<MeasuredMemory>)> {
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(config, rank, None)?;
        let batch = if rank.reads_data() { batch } else { &[] };
        let world = &rank.groups.world.comm;
        trainer.train_step(batch)?;
        world.barrier()?;
        let start = Instant::now();
        for _ in 0..iterations {
            trainer.train_step(batch)?;
        }
        world.barrier()?;
        let memory = trainer.memory().copied().unwrap_or_default();
        Ok((start.elapsed(), memory))
    })?;
    let longest = ranks.iter().map(|(time, _)| *time).max();
    let memory = ranks.into_iter().map(|(_, memory)| memory).collect();
    Ok((longest.unwrap_or_default(), memory))
}

/// A rank's peak of a step above its weights, gradients and optimizer, in bytes.
pub fn above_state(memory: &MeasuredMemory) -> u64 {
    let parts = memory.parts;
    memory.peak - parts.weights - parts.gradients - parts.optimizer
}
