//! What the cross-crate tests share: the fixtures, and training from them at a layout.

pub mod sleeping;

use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron::grads::DataParallelConfig;
use burn_megatron::launch::{DEFAULT_TIMEOUT, RankContext, run_ranks, run_ranks_on};
use burn_megatron::layers::{Recompute, RecomputeGranularity};
use burn_megatron::models::gpt::GptConfig;
use burn_megatron::optim::{LrDecayStyle, MixedPrecisionConfig, OptimizerConfig};
use burn_megatron::random;
use burn_megatron::shard::FullWeights;
use burn_megatron::topology::{ParallelConfig, PipelineSchedule};
use burn_megatron::train::{
    BatchConfig, MicroBatch, ResolvedConfig, StepOutput, TrainConfig, Trainer,
};
use burn_megatron::{Kernels, RankDevice, Result};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// Every tensor of a safetensors fixture as f32, with its shape.
pub fn tensors(name: impl AsRef<Path>) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(name.as_ref()).expect("fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let read = |view: &safetensors::tensor::TensorView<'_>| -> Vec<f32> {
        match view.dtype() {
            safetensors::Dtype::F32 => (view.data().chunks_exact(4))
                .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")))
                .collect(),
            safetensors::Dtype::I64 => (view.data().chunks_exact(8))
                .map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as f32)
                .collect(),
            other => panic!("a fixture of {other:?}"),
        }
    };
    (file.tensors().iter())
        .map(|(name, view)| (name.clone(), (view.shape().to_vec(), read(view))))
        .collect()
}

/// One fixture run: Megatron's settings, at a layout of ours.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// The fixtures' Llama instead of their GPT.
    pub llama: bool,
    pub tp: usize,
    pub pp: usize,
    pub sequence_parallel: bool,
    /// Stages on each pipeline rank.
    pub virtual_stages: usize,
    pub dp: usize,
    pub schedule: Option<PipelineSchedule>,
    /// Layers of the first pipeline rank, where not an equal share.
    pub first_layers: Option<usize>,
    /// Count the embedding and the loss as layers when the layers are divided.
    pub account_for_ends: bool,
    pub micro_batch_size: usize,
    pub global_batch_size: usize,
    pub clip_grad: f64,
    pub masked: bool,
    pub per_token_loss: bool,
    pub erf_gelu: bool,
    pub check_for_nan: bool,
    /// On hidden states and on the attention's probabilities.
    pub dropout: f64,
    pub recompute: Option<Recompute>,
    pub distributed_optimizer: bool,
    /// Of the gradients' reduction and of the parameters' gathering.
    pub overlap: (bool, bool),
    /// Elements of a bucket.
    pub bucket_size: usize,
    pub mixed_precision: MixedPrecisionConfig,
    pub grad_reduce_in_bf16: bool,
    pub kernels: Kernels,
    pub device: RankDevice,
}

impl Run {
    /// The base run of the fixtures.
    pub fn at(tp: usize, dp: usize) -> Self {
        Run {
            llama: false,
            tp,
            sequence_parallel: false,
            pp: 1,
            virtual_stages: 1,
            dp,
            schedule: None,
            first_layers: None,
            account_for_ends: false,
            micro_batch_size: 2,
            global_batch_size: 8,
            clip_grad: 1.0,
            masked: false,
            per_token_loss: true,
            erf_gelu: false,
            check_for_nan: true,
            dropout: 0.0,
            recompute: None,
            distributed_optimizer: false,
            overlap: (false, false),
            bucket_size: 10_000,
            mixed_precision: MixedPrecisionConfig::default(),
            grad_reduce_in_bf16: false,
            kernels: Kernels::default(),
            device: RankDevice::default(),
        }
    }

    /// The same with a pipeline.
    pub fn with_pipeline(self, pp: usize, virtual_stages: usize) -> Self {
        Run {
            pp,
            virtual_stages,
            ..self
        }
    }

    /// Its layout, for messages.
    pub fn layout(&self) -> String {
        let model = if self.llama { "llama " } else { "" };
        let sp = if self.sequence_parallel { " sp" } else { "" };
        let Run {
            tp,
            pp,
            virtual_stages: v,
            dp,
            ..
        } = self;
        format!("{model}tp={tp}{sp} pp={pp} v={v} dp={dp}")
    }

    /// A fixture of its model.
    pub fn file(&self, name: &str) -> PathBuf {
        let model = if self.llama { "llama" } else { "gpt" };
        fixture(&format!("{model}_{name}"))
    }

    /// A path of its own in the temporary folder.
    pub fn scratch(&self, name: &str) -> PathBuf {
        let id = std::process::id();
        std::env::temp_dir().join(format!("megatron-{name}-{id}-{}", self.layout()))
    }

    /// The fixtures' model, data and optimizer.
    pub fn config(&self) -> ResolvedConfig {
        let base = match self.llama {
            true => GptConfig {
                num_query_groups: Some(2),
                ffn_hidden_size: Some(176),
                ..GptConfig::llama()
            },
            false => GptConfig::default(),
        };
        let (granularity, method, num_layers) = match self.recompute {
            None => (None, None, None),
            Some(Recompute::Selective) => (Some(RecomputeGranularity::Selective), None, None),
            Some(Recompute::Full { method, num_layers }) => {
                let full = RecomputeGranularity::Full;
                (Some(full), Some(method), Some(num_layers))
            }
        };
        let config = TrainConfig {
            model: GptConfig {
                num_layers: 4,
                hidden_size: 64,
                num_attention_heads: 4,
                make_vocab_size_divisible_by: 1,
                bias_gelu_fusion: !self.erf_gelu,
                hidden_dropout: self.dropout,
                attention_dropout: self.dropout,
                recompute_granularity: granularity,
                recompute_method: method,
                recompute_num_layers: num_layers,
                transformer_impl: self.kernels,
                ..base
            },
            parallel: ParallelConfig {
                tensor_model_parallel_size: self.tp,
                sequence_parallel: self.sequence_parallel,
                pipeline_model_parallel_size: self.pp,
                num_virtual_stages_per_pipeline_rank: Some(self.virtual_stages),
                pipeline_schedule: self.schedule,
                decoder_first_pipeline_num_layers: self.first_layers,
                account_for_embedding_in_pipeline_split: self.account_for_ends,
                account_for_loss_in_pipeline_split: self.account_for_ends,
                world_size: Some(self.tp * self.pp * self.dp),
                ..ParallelConfig::default()
            },
            data_parallel: DataParallelConfig {
                use_distributed_optimizer: self.distributed_optimizer,
                ddp_bucket_size: self.bucket_size,
                overlap_grad_reduce: self.overlap.0,
                overlap_param_gather: self.overlap.1,
                grad_reduce_in_bf16: self.grad_reduce_in_bf16,
            },
            device: self.device,
            batch: BatchConfig {
                seq_length: 32,
                micro_batch_size: self.micro_batch_size,
                global_batch_size: self.global_batch_size,
            },
            rampup_batch_size: None,
            optimizer: OptimizerConfig {
                lr: 1e-3,
                min_lr: 1e-4,
                lr_decay_style: LrDecayStyle::Cosine,
                lr_warmup_iters: 2,
                lr_decay_iters: Some(8),
                weight_decay: 0.1,
                clip_grad: self.clip_grad,
                adam_beta1: 0.9,
                adam_beta2: 0.95,
                adam_eps: 1e-8,
                ..OptimizerConfig::default()
            },
            vocab_size: 128,
            train_iters: 8,
            seed: 1234,
            calculate_per_token_loss: self.per_token_loss,
            mixed_precision: self.mixed_precision,
            check_for_nan_in_loss_and_grad: self.check_for_nan,
        };
        config
            .resolve()
            .expect("the fixtures' configuration is legal")
    }

    /// Runs the eight steps from the fixture's weights on every rank; `f` sees each rank's trainer
    /// at the end. Returns rank 0's steps and `f`'s results in rank order.
    pub fn train<T: Send>(
        &self,
        f: impl Fn(&RankContext, &Trainer) -> Result<T> + Sync,
    ) -> Result<(Vec<StepOutput>, Vec<T>)> {
        let config = self.config();
        let batches = tensors(fixture("train_tokens.safetensors"));
        let grid = &config.layout().grid;
        let results = run_ranks_on(self.device, grid, DEFAULT_TIMEOUT, |rank| {
            let weights = FullWeights::open(self.file("init.safetensors"))?;
            let mut trainer = Trainer::new(&config, rank, Some(&weights))?;
            let dp_rank = rank.groups.dp.comm.rank();
            let steps = (0..8).map(|step| {
                // The others get theirs from the ranks that read.
                let share = rank
                    .reads_data()
                    .then(|| self.share(&batches, step, dp_rank));
                trainer.train_step(&share.unwrap_or_default())
            });
            let steps = steps.collect::<Result<Vec<_>>>()?;
            Ok((steps, f(rank, &trainer)?))
        })?;
        let (mut steps, ends): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        assert!(
            steps.iter().all(|s| bits(s) == bits(&steps[0])),
            "every rank reports the same steps"
        );
        Ok((steps.swap_remove(0), ends))
    }

    /// Microbatch `i` of data-parallel rank `r` takes samples `[i·b·dp + r·b, +b)` of the step.
    pub fn share(
        &self,
        batches: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
        step: usize,
        dp_rank: usize,
    ) -> Vec<MicroBatch> {
        let b = self.micro_batch_size;
        let rows = |name: &str, width: usize, first: usize| {
            let start = (step * 8 + first) * width;
            batches[name].1[start..start + b * width].to_vec()
        };
        (0..8 / (b * self.dp))
            .map(|i| (i * self.dp + dp_rank) * b)
            .map(|first| MicroBatch {
                tokens: rows("tokens", 33, first)
                    .into_iter()
                    .map(|t| t as i64)
                    .collect(),
                loss_mask: self.masked.then(|| rows("loss_mask", 32, first)),
            })
            .collect()
    }
}

/// Every digit of what steps report. A norm that is no number is equal to itself here.
pub fn bits(steps: &[StepOutput]) -> String {
    format!("{steps:?}")
}

/// Runs `f` on `tp` tensor-parallel ranks and returns their results in rank order.
pub fn on_tp_ranks<T: Send>(tp: usize, f: impl Fn(&RankContext) -> T + Sync) -> Vec<T> {
    let config = Run::at(tp, 1).config();
    run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| Ok(f(rank))).expect("all ranks return")
}

/// A tensor of arbitrary, distinct values of order 1, the same for the same `salt`.
pub fn arbitrary<const D: usize>(shape: [usize; D], salt: u64, device: &Device) -> Tensor<D> {
    let mut values = vec![0f32; shape.iter().product()];
    random::fill_normal(salt, 0, 0, 1.0, &mut values);
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The values of a tensor on the host.
pub fn host<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("f32")
}

/// Asserts that two lists of values are close, relative to the largest of them.
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let scale = want.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let difference = (got - want).abs() / scale;
        assert!(
            difference <= tolerance,
            "{what}[{i}]: {got} is not {want} ({difference:e})"
        );
    }
}

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
