//! Flags of the training step and of the optimizer.

use super::{by_name, set, set_some};
use crate::config::TrainingConfig;
use burn_megatron::RankDevice;
use burn_megatron::optim::{
    LrDecayStyle, MixedPrecisionConfig, OptimizerConfig, OptimizerKind, WeightDecayIncrStyle,
    WsdDecayStyle,
};
use clap::Args;
use std::path::PathBuf;

/// Batches, length and start of the run.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingArgs {
    /// What the ranks compute on: cpu (the machine's cores, shared out), cuda (NVIDIA cards, one for each rank) or wgpu
    /// (the best card with a driver for Vulkan, Metal or DirectX); the last two if the program was built with the
    /// feature of that name [default: cpu]
    #[arg(long, value_name = "NAME", value_parser = by_name::<RankDevice>)]
    device: Option<RankDevice>,
    /// Tokens of a sample [default: 128]
    #[arg(long, value_name = "N")]
    seq_length: Option<usize>,
    /// Samples of one forward and backward pass on one rank [default: 1]
    #[arg(long, value_name = "N")]
    micro_batch_size: Option<usize>,
    /// Samples of one optimizer step over all ranks; a multiple of micro batch x data-parallel size
    /// [default: 8]
    #[arg(long, value_name = "N")]
    global_batch_size: Option<usize>,
    /// Smaller global batches at the start, as three numbers: from START samples by INCREMENT up to the global
    /// batch size, over the first SAMPLES samples
    #[arg(long, value_names = ["START", "INCREMENT", "SAMPLES"], num_args = 3)]
    rampup_batch_size: Option<Vec<usize>>,
    /// Optimizer steps to take [default: 100]
    #[arg(long, value_name = "N")]
    train_iters: Option<usize>,
    /// Seed of the initial weights and of the order of the data [default: 1234]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Average the loss over all tokens of the global batch; the default, and the same whatever the
    /// micro batch size
    #[arg(long, overrides_with = "no_calculate_per_token_loss")]
    calculate_per_token_loss: bool,
    /// Average each micro batch by itself, then the micro batches: Megatron's default. It differs
    /// where loss masks do
    #[arg(long)]
    no_calculate_per_token_loss: bool,
    /// Go on where a loss or a gradient is not a finite number: such a step updates nothing and is counted.
    /// Otherwise the run stops and says where
    #[arg(long)]
    no_check_for_nan_in_loss_and_grad: bool,
    /// How long a rank waits for the others in one collective before the run ends, in minutes
    /// [default: 10]
    #[arg(long, value_name = "X")]
    distributed_timeout_minutes: Option<f64>,
    /// Start from a full set of weights with Megatron-Core's names (.safetensors), instead of
    /// random ones
    #[arg(long, value_name = "FILE")]
    init_weights: Option<PathBuf>,
    /// Write the full, unsharded weights here at the end, with Megatron-Core's names (.safetensors)
    #[arg(long, value_name = "FILE")]
    save_weights: Option<PathBuf>,
}

impl TrainingArgs {
    pub fn apply(&self, training: &mut TrainingConfig) {
        set(&mut training.device, &self.device);
        set(&mut training.seq_length, &self.seq_length);
        set(&mut training.micro_batch_size, &self.micro_batch_size);
        set(&mut training.global_batch_size, &self.global_batch_size);
        if let Some([start, increment, samples]) = self.rampup_batch_size.as_deref() {
            training.rampup_batch_size = Some([*start, *increment, *samples].into());
        }
        set(&mut training.train_iters, &self.train_iters);
        set(&mut training.seed, &self.seed);
        set(
            &mut training.distributed_timeout_minutes,
            &self.distributed_timeout_minutes,
        );
        if self.calculate_per_token_loss || self.no_calculate_per_token_loss {
            training.calculate_per_token_loss = self.calculate_per_token_loss;
        }
        training.check_for_nan_in_loss_and_grad &= !self.no_check_for_nan_in_loss_and_grad;
        set_some(&mut training.init_weights, &self.init_weights);
        set_some(&mut training.save_weights, &self.save_weights);
    }
}

/// Which numbers the model computes with.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Mixed precision")]
pub struct MixedPrecisionArgs {
    /// Weights, activations and what ranks exchange of both in bf16; gradients are summed and weights updated
    /// in f32. On a CPU it saves memory, not time
    #[arg(long)]
    bf16: bool,
    /// The same in fp16, with a loss scale that follows the gradients
    #[arg(long)]
    fp16: bool,
    /// A loss scale that stays as it is, with --fp16
    #[arg(long, value_name = "X")]
    loss_scale: Option<f64>,
    /// Loss scale at the start: too high, and the first steps, whose gradients overflow, bring it down
    /// [default: 4294967296]
    #[arg(long, value_name = "X")]
    initial_loss_scale: Option<f64>,
    /// The least loss scale: gradients that overflow there end the run [default: 1]
    #[arg(long, value_name = "X")]
    min_loss_scale: Option<f64>,
    /// Steps without an overflow after which the loss scale doubles [default: 1000]
    #[arg(long, value_name = "N")]
    loss_scale_window: Option<u32>,
    /// Overflows before the loss scale halves [default: 2]
    #[arg(long, value_name = "N")]
    hysteresis: Option<u32>,
}

impl MixedPrecisionArgs {
    pub fn apply(&self, config: &mut MixedPrecisionConfig) {
        config.bf16 |= self.bf16;
        config.fp16 |= self.fp16;
        set_some(&mut config.loss_scale, &self.loss_scale);
        set(&mut config.initial_loss_scale, &self.initial_loss_scale);
        set(&mut config.min_loss_scale, &self.min_loss_scale);
        set(&mut config.loss_scale_window, &self.loss_scale_window);
        set(&mut config.hysteresis, &self.hysteresis);
    }
}

/// The optimizer, the learning rate and weight decay.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct OptimizerArgs {
    /// Highest learning rate, reached after the warm-up [default: 1e-3]
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
    /// Learning rate at the end of the decay, and the least from then on [default: 0]
    #[arg(long, value_name = "X")]
    min_lr: Option<f64>,
    /// Optimizer: adam (with decoupled weight decay) or sgd [default: adam]
    #[arg(long, value_name = "NAME", value_parser = by_name::<OptimizerKind>)]
    optimizer: Option<OptimizerKind>,
    /// How the rate falls after the warm-up: constant, linear, cosine, inverse-square-root or WSD (stays,
    /// and falls at the end) [default: linear]
    #[arg(long, value_name = "STYLE", value_parser = by_name::<LrDecayStyle>)]
    lr_decay_style: Option<LrDecayStyle>,
    /// Steps over which the rate rises linearly from its initial value; the first one runs with
    /// that value, as in Megatron [default: 0]
    #[arg(long, value_name = "N")]
    lr_warmup_iters: Option<u64>,
    /// The same as a part of the steps until the rate is at its minimum
    #[arg(long, value_name = "X")]
    lr_warmup_fraction: Option<f64>,
    /// The same in samples
    #[arg(long, value_name = "N")]
    lr_warmup_samples: Option<u64>,
    /// WSD: steps of the fall at the end
    #[arg(long, value_name = "N")]
    lr_wsd_decay_iters: Option<u64>,
    /// WSD: shape of that fall: exponential, linear, cosine or minus_sqrt [default: exponential]
    #[arg(long, value_name = "STYLE", value_parser = by_name::<WsdDecayStyle>)]
    lr_wsd_decay_style: Option<WsdDecayStyle>,
    /// Step at which the rate reaches its minimum [default: the last one]
    #[arg(long, value_name = "N")]
    lr_decay_iters: Option<u64>,
    /// Learning rate at the start of the warm-up [default: 0]
    #[arg(long, value_name = "X")]
    lr_warmup_init: Option<f64>,
    /// Weight decay; biases and norms have none [default: 0.01]
    #[arg(long, value_name = "X")]
    weight_decay: Option<f64>,
    /// Weight decay at the first step, where it grows
    #[arg(long, value_name = "X")]
    start_weight_decay: Option<f64>,
    /// Weight decay at the last step, where it grows
    #[arg(long, value_name = "X")]
    end_weight_decay: Option<f64>,
    /// How weight decay grows between the two: constant, linear or cosine [default: constant]
    #[arg(long, value_name = "STYLE", value_parser = by_name::<WeightDecayIncrStyle>)]
    weight_decay_incr_style: Option<WeightDecayIncrStyle>,
    /// Scale gradients down to this global L2 norm; 0 never does [default: 1]
    #[arg(long, value_name = "X")]
    clip_grad: Option<f64>,
    /// Adam: memory of the gradients' mean [default: 0.9]
    #[arg(long = "adam-beta1", value_name = "X")]
    adam_beta1: Option<f64>,
    /// Adam: memory of the gradients' squares [default: 0.999]
    #[arg(long = "adam-beta2", value_name = "X")]
    adam_beta2: Option<f64>,
    /// Adam: added to the denominator [default: 1e-8]
    #[arg(long, value_name = "X")]
    adam_eps: Option<f64>,
    /// SGD: momentum [default: 0.9]
    #[arg(long, value_name = "X")]
    sgd_momentum: Option<f64>,
}

impl OptimizerArgs {
    pub fn apply(&self, optimizer: &mut OptimizerConfig) {
        set(&mut optimizer.lr, &self.lr);
        set(&mut optimizer.min_lr, &self.min_lr);
        set(&mut optimizer.lr_decay_style, &self.lr_decay_style);
        set(&mut optimizer.lr_warmup_iters, &self.lr_warmup_iters);
        set_some(&mut optimizer.lr_decay_iters, &self.lr_decay_iters);
        set(&mut optimizer.lr_warmup_init, &self.lr_warmup_init);
        set(&mut optimizer.weight_decay, &self.weight_decay);
        set(&mut optimizer.clip_grad, &self.clip_grad);
        set(&mut optimizer.adam_beta1, &self.adam_beta1);
        set(&mut optimizer.adam_beta2, &self.adam_beta2);
        set(&mut optimizer.adam_eps, &self.adam_eps);
        set(&mut optimizer.sgd_momentum, &self.sgd_momentum);
        set(&mut optimizer.optimizer, &self.optimizer);
        set_some(&mut optimizer.lr_warmup_fraction, &self.lr_warmup_fraction);
        set_some(&mut optimizer.lr_warmup_samples, &self.lr_warmup_samples);
        set_some(&mut optimizer.lr_wsd_decay_iters, &self.lr_wsd_decay_iters);
        set(&mut optimizer.lr_wsd_decay_style, &self.lr_wsd_decay_style);
        set_some(&mut optimizer.start_weight_decay, &self.start_weight_decay);
        set_some(&mut optimizer.end_weight_decay, &self.end_weight_decay);
        set(
            &mut optimizer.weight_decay_incr_style,
            &self.weight_decay_incr_style,
        );
    }
}
