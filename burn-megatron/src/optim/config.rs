//! What a user sets of the optimizer, under the names of Megatron's flags.

use super::{
    AdamWConfig, LrDecayStyle, LrScheduleConfig, Rule, SgdConfig, Warmup, WeightDecayIncrStyle,
    WeightDecaySchedule, WsdDecayStyle,
};
use crate::error::Violation;
use serde::{Deserialize, Serialize};

/// The optimizer and its learning-rate schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    pub optimizer: OptimizerKind,
    /// The highest learning rate.
    pub lr: f64,
    /// The learning rate at the end of the decay.
    pub min_lr: f64,
    pub lr_decay_style: LrDecayStyle,
    /// Iterations of linear warm-up.
    pub lr_warmup_iters: u64,
    /// The same as a part of the iterations until `min_lr`.
    pub lr_warmup_fraction: Option<f64>,
    /// The same in samples.
    pub lr_warmup_samples: Option<u64>,
    /// `WSD`: iterations of the decay at the end.
    pub lr_wsd_decay_iters: Option<u64>,
    pub lr_wsd_decay_style: WsdDecayStyle,
    /// The learning rate that the warm-up starts from.
    pub lr_warmup_init: f64,
    /// Iterations until `min_lr`, warm-up included; all of the run's where not given.
    pub lr_decay_iters: Option<u64>,
    pub weight_decay: f64,
    /// Weight decay at the start and at the end, where it grows.
    pub start_weight_decay: Option<f64>,
    pub end_weight_decay: Option<f64>,
    pub weight_decay_incr_style: WeightDecayIncrStyle,
    /// The largest global gradient norm; 0 for no clipping.
    pub clip_grad: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_eps: f64,
    pub sgd_momentum: f64,
}

/// Which optimizer, under Megatron's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (AdamW).
    #[default]
    Adam,
    Sgd,
}

impl Default for OptimizerConfig {
    /// Megatron's defaults, with a learning rate for small models.
    fn default() -> Self {
        let adamw = AdamWConfig::default();
        OptimizerConfig {
            optimizer: OptimizerKind::default(),
            lr: 1e-3,
            min_lr: 0.0,
            lr_decay_style: LrDecayStyle::Linear,
            lr_warmup_iters: 0,
            lr_warmup_fraction: None,
            lr_warmup_samples: None,
            lr_wsd_decay_iters: None,
            lr_wsd_decay_style: WsdDecayStyle::default(),
            lr_warmup_init: 0.0,
            lr_decay_iters: None,
            weight_decay: 0.01,
            start_weight_decay: None,
            end_weight_decay: None,
            weight_decay_incr_style: WeightDecayIncrStyle::default(),
            clip_grad: 1.0,
            adam_beta1: adamw.adam_beta1,
            adam_beta2: adamw.adam_beta2,
            adam_eps: adamw.adam_eps,
            sgd_momentum: SgdConfig::default().sgd_momentum,
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
            warmup: match (self.lr_warmup_fraction, self.lr_warmup_samples) {
                (Some(fraction), _) => Warmup::Fraction(fraction),
                (None, Some(samples)) => Warmup::Samples(samples),
                (None, None) => Warmup::Iters(self.lr_warmup_iters),
            },
            lr_wsd_decay_iters: self.lr_wsd_decay_iters,
            lr_wsd_decay_style: self.lr_wsd_decay_style,
            lr_decay_iters: self.lr_decay_iters,
            lr_warmup_init: self.lr_warmup_init,
        }
    }

    /// The part that updates parameters.
    pub fn rule(&self) -> Rule {
        match self.optimizer {
            OptimizerKind::Adam => Rule::AdamW(AdamWConfig {
                adam_beta1: self.adam_beta1,
                adam_beta2: self.adam_beta2,
                adam_eps: self.adam_eps,
            }),
            OptimizerKind::Sgd => Rule::Sgd(SgdConfig {
                sgd_momentum: self.sgd_momentum,
            }),
        }
    }

    /// Weight decay over a run of so many samples.
    pub fn weight_decay_schedule(&self, samples: u64) -> WeightDecaySchedule {
        WeightDecaySchedule {
            start: self.start_weight_decay.unwrap_or(self.weight_decay),
            end: self.end_weight_decay.unwrap_or(self.weight_decay),
            style: self.weight_decay_incr_style,
            samples,
        }
    }

    /// What no optimizer can be.
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let ratio = |value: f64| (0.0..1.0).contains(&value);
        let above = |value: f64| value >= 0.0 && value.is_finite();
        let (start, end) = (self.start_weight_decay, self.end_weight_decay);
        let rules = [
            (
                "adam_beta1",
                self.adam_beta1,
                ratio(self.adam_beta1),
                "in [0, 1)",
                "0.9",
            ),
            (
                "adam_beta2",
                self.adam_beta2,
                ratio(self.adam_beta2),
                "in [0, 1)",
                "0.95",
            ),
            (
                "adam_eps",
                self.adam_eps,
                self.adam_eps > 0.0,
                "above 0",
                "1e-8",
            ),
            (
                "sgd_momentum",
                self.sgd_momentum,
                ratio(self.sgd_momentum),
                "in [0, 1)",
                "0.9",
            ),
            (
                "weight_decay",
                self.weight_decay,
                above(self.weight_decay),
                "0 or more",
                "0",
            ),
            (
                "start_weight_decay",
                start.unwrap_or(0.0),
                above(start.unwrap_or(0.0)),
                "0 or more",
                "0",
            ),
            (
                "end_weight_decay",
                end.unwrap_or(0.0),
                above(end.unwrap_or(0.0)),
                "0 or more",
                "0",
            ),
            (
                "clip_grad",
                self.clip_grad,
                self.clip_grad >= 0.0,
                "0 or more",
                "1.0",
            ),
        ];
        let rules = rules.into_iter().filter(|(.., holds, _, _)| !holds);
        let mut violations: Vec<Violation> = rules
            .map(|(name, value, _, must, nearest)| {
                Violation::new(format!("{name} is {value}, but must be {must}"), [nearest])
            })
            .collect();
        let lengths = [
            self.lr_warmup_iters > 0,
            self.lr_warmup_fraction.is_some(),
            self.lr_warmup_samples.is_some(),
        ];
        if lengths.iter().filter(|given| **given).count() > 1 {
            let rule =
                "lr_warmup_iters, lr_warmup_fraction and lr_warmup_samples say one thing; give one";
            violations.push(Violation::new(rule, ["lr_warmup_iters"]));
        }
        let grows = self.weight_decay_incr_style != WeightDecayIncrStyle::Constant;
        if grows != (start.is_some() && end.is_some()) {
            let rule = "weight_decay_incr_style linear or cosine goes with start_weight_decay and \
                        end_weight_decay";
            violations.push(Violation::new(rule, ["constant"]));
        }
        violations
    }
}
