//! What a user sets of the optimizer, under the names of Megatron's flags.

use super::{AdamWConfig, LrDecayStyle, LrScheduleConfig};
use serde::{Deserialize, Serialize};

/// The optimizer and its learning-rate schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The highest learning rate.
    pub lr: f64,
    /// The learning rate at the end of the decay.
    pub min_lr: f64,
    pub lr_decay_style: LrDecayStyle,
    /// Iterations of linear warm-up.
    pub lr_warmup_iters: u64,
    /// The learning rate that the warm-up starts from.
    pub lr_warmup_init: f64,
    /// Iterations until `min_lr`, warm-up included; all of the run's where not given.
    pub lr_decay_iters: Option<u64>,
    pub weight_decay: f64,
    /// The largest global gradient norm; 0 for no clipping.
    pub clip_grad: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_eps: f64,
}

impl Default for OptimizerConfig {
    /// Megatron's defaults, with a learning rate for small models.
    fn default() -> Self {
        let adamw = AdamWConfig::default();
        OptimizerConfig {
            lr: 1e-3,
            min_lr: 0.0,
            lr_decay_style: LrDecayStyle::Linear,
            lr_warmup_iters: 0,
            lr_warmup_init: 0.0,
            lr_decay_iters: None,
            weight_decay: adamw.weight_decay,
            clip_grad: 1.0,
            adam_beta1: adamw.adam_beta1,
            adam_beta2: adamw.adam_beta2,
            adam_eps: adamw.adam_eps,
        }
    }
}

impl OptimizerConfig {
    /// The part that the learning rate follows.
    pub fn schedule(&self) -> LrScheduleConfig {
        LrScheduleConfig {
            lr: self.lr,
            min_lr: self.min_lr,
            lr_decay_style: self.lr_decay_style,
            lr_warmup_iters: self.lr_warmup_iters,
            lr_decay_iters: self.lr_decay_iters,
            lr_warmup_init: self.lr_warmup_init,
        }
    }

    /// The part of AdamW.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            weight_decay: self.weight_decay,
            adam_beta1: self.adam_beta1,
            adam_beta2: self.adam_beta2,
            adam_eps: self.adam_eps,
        }
    }
}
