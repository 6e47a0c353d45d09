//! The learning rate as a function of the samples seen.
//!
//! Keeps the arithmetic of `OptimizerParamScheduler` in Megatron-LM's
//! `megatron/core/optimizer_param_scheduler.py`, operation by operation: it counts samples, not
//! iterations, and steps after the optimizer, so that the first iteration of a warm-up from 0 runs
//! with a rate of 0.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, Violation};

/// How the rate falls between the warm-up and `lr_decay_iters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LrDecayStyle {
    /// It stays at `lr`, for ever.
    Constant,
    /// In a straight line to `min_lr`.
    #[default]
    Linear,
    /// Along half a cosine to `min_lr` (Loshchilov and Hutter 2017, SGDR).
    Cosine,
    /// With one over the root of the samples seen, not below `min_lr`.
    InverseSquareRoot,
    /// Warm-up, stable, decay (Hu et al. 2024, MiniCPM): it stays at `lr` until the last
    /// `lr_wsd_decay_iters`.
    #[serde(rename = "WSD")]
    Wsd,
}

/// How the rate falls at the end of [`LrDecayStyle::Wsd`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WsdDecayStyle {
    /// `2 · 0.5^x - 1`
    #[default]
    Exponential,
    Linear,
    Cosine,
    /// `1 - √x`
    MinusSqrt,
}

/// The schedule's settings, under the names of Megatron's flags and with its defaults; `lr` has
/// none.
#[derive(Debug, Clone, PartialEq)]
pub struct LrScheduleConfig {
    /// The rate at the end of the warm-up, the highest.
    pub lr: f64,
    /// The rate after the decay, the lowest.
    pub min_lr: f64,
    pub lr_decay_style: LrDecayStyle,
    /// Over which the rate rises in a straight line.
    pub warmup: Warmup,
    /// For [`LrDecayStyle::Wsd`]: the iterations of the decay, and its shape.
    pub lr_wsd_decay_iters: Option<u64>,
    pub lr_wsd_decay_style: WsdDecayStyle,
    /// Iterations, from the start, after which the rate is `min_lr`; those of the training where
    /// none are given.
    pub lr_decay_iters: Option<u64>,
    /// The rate at the start of the warm-up.
    pub lr_warmup_init: f64,
}

impl LrScheduleConfig {
    /// The default schedule with this highest rate.
    pub fn new(lr: f64) -> Self {
        LrScheduleConfig {
            lr,
            min_lr: 0.0,
            lr_decay_style: LrDecayStyle::default(),
            warmup: Warmup::default(),
            lr_wsd_decay_iters: None,
            lr_wsd_decay_style: WsdDecayStyle::default(),
            lr_decay_iters: None,
            lr_warmup_init: 0.0,
        }
    }
}

/// How long a warm-up is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    Iters(u64),
    Samples(u64),
    /// Of the iterations until the rate is `min_lr`.
    Fraction(f64),
}

impl Default for Warmup {
    fn default() -> Self {
        Warmup::Iters(0)
    }
}

/// A schedule that holds: made from a [`LrScheduleConfig`] and the run it belongs to.
#[derive(Debug, Clone, PartialEq)]
pub struct LrSchedule {
    max_lr: f64,
    min_lr: f64,
    init_lr: f64,
    style: LrDecayStyle,
    wsd_style: WsdDecayStyle,
    /// In samples, as is all below. A fraction of the decay need not be whole.
    warmup: f64,
    decay: u64,
    wsd_decay: u64,
}

impl LrSchedule {
    /// The schedule of a run of `train_iters` iterations of `global_batch_size` samples.
    ///
    /// # Errors
    /// A configuration error with every violation: a rate that is negative or not finite;
    /// `min_lr` or `lr_warmup_init` above `lr`; no iterations, or a warm-up not shorter than the
    /// decay; an empty batch; more samples than 64 bits count.
    pub fn new(
        config: &LrScheduleConfig,
        train_iters: u64,
        global_batch_size: u64,
    ) -> Result<Self> {
        let decay_iters = config.lr_decay_iters.unwrap_or(train_iters);
        let mut violations = rate_violations(config);
        violations.extend(length_violations(config, decay_iters, global_batch_size));
        if !violations.is_empty() {
            return Err(Error::config(violations));
        }
        Ok(LrSchedule {
            max_lr: config.lr,
            min_lr: config.min_lr,
            init_lr: config.lr_warmup_init,
            style: config.lr_decay_style,
            wsd_style: config.lr_wsd_decay_style,
            warmup: warmup_samples(config, decay_iters, global_batch_size),
            decay: decay_iters * global_batch_size,
            wsd_decay: config.lr_wsd_decay_iters.unwrap_or(0) * global_batch_size,
        })
    }

    /// The rate of the iteration that starts after `consumed_samples` samples; 0 of them for the
    /// first.
    pub fn learning_rate(&self, consumed_samples: u64) -> f64 {
        let samples = consumed_samples;
        if self.warmup > 0.0 && samples as f64 <= self.warmup {
            let rise = (self.max_lr - self.init_lr) * samples as f64 / self.warmup;
            return self.init_lr + rise;
        }
        if self.style == LrDecayStyle::Constant {
            return self.max_lr;
        }
        if samples > self.decay {
            return self.min_lr;
        }
        let ratio = (samples as f64 - self.warmup) / (self.decay as f64 - self.warmup);
        let height = match self.style {
            LrDecayStyle::Constant => 1.0,
            LrDecayStyle::Linear => 1.0 - ratio,
            LrDecayStyle::Cosine => 0.5 * ((PI * ratio).cos() + 1.0),
            LrDecayStyle::InverseSquareRoot => {
                let warmup = self.warmup.max(1.0);
                let lr = self.max_lr * warmup.sqrt() / (samples.max(1) as f64).sqrt();
                return lr.max(self.min_lr);
            }
            LrDecayStyle::Wsd => self.wsd_height(samples),
        };
        self.min_lr + height * (self.max_lr - self.min_lr)
    }

    /// The height between `min_lr` and `lr` before and in the last decay.
    fn wsd_height(&self, samples: u64) -> f64 {
        let start = self.decay - self.wsd_decay;
        if samples <= start {
            return 1.0;
        }
        let ratio = (samples - start) as f64 / self.wsd_decay as f64;
        match self.wsd_style {
            WsdDecayStyle::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            WsdDecayStyle::Linear => 1.0 - ratio,
            WsdDecayStyle::Cosine => 0.5 * ((PI * ratio).cos() + 1.0),
            WsdDecayStyle::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

fn warmup_samples(config: &LrScheduleConfig, decay_iters: u64, global_batch_size: u64) -> f64 {
    match config.warmup {
        Warmup::Iters(iters) => (iters * global_batch_size) as f64,
        Warmup::Samples(samples) => samples as f64,
        Warmup::Fraction(fraction) => fraction * (decay_iters * global_batch_size) as f64,
    }
}

fn rate_violations(config: &LrScheduleConfig) -> Vec<Violation> {
    let lr = config.lr;
    let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
    let mut violations = Vec::new();
    if !is_rate(lr) {
        violations.push(Violation {
            rule: format!("lr {lr:?} must be finite and at least 0"),
            nearest: Vec::new(),
        });
    }
    let below = [
        ("min_lr", config.min_lr),
        ("lr_warmup_init", config.lr_warmup_init),
    ];
    for (name, rate) in below {
        let (rule, legal) = if !is_rate(rate) {
            (
                format!("{name} {rate:?} must be finite and at least 0"),
                0.0,
            )
        } else if is_rate(lr) && rate > lr {
            (format!("{name} {rate:?} must be at most lr {lr:?}"), lr)
        } else {
            continue;
        };
        violations.push(Violation {
            rule,
            nearest: vec![format!("{legal:?}")],
        });
    }
    violations
}

fn length_violations(
    config: &LrScheduleConfig,
    decay_iters: u64,
    global_batch_size: u64,
) -> Vec<Violation> {
    // The length in force has the name under which the user gave it.
    let name = match config.lr_decay_iters {
        Some(_) => "lr_decay_iters",
        None => "train_iters",
    };
    let mut violations = Vec::new();
    let mut report = |rule: String, nearest: Option<u64>| {
        let nearest = nearest.iter().map(u64::to_string).collect();
        violations.push(Violation { rule, nearest });
    };
    if decay_iters == 0 {
        report(format!("{name} must be at least 1"), Some(1));
    } else {
        match config.warmup {
            Warmup::Iters(iters) if iters >= decay_iters => report(
                format!("lr_warmup_iters {iters} must be below {name} {decay_iters}"),
                Some(decay_iters - 1),
            ),
            Warmup::Samples(samples)
                if samples >= decay_iters.saturating_mul(global_batch_size) =>
            {
                report(
                    format!(
                        "lr_warmup_samples {samples} must be below the samples of {name} {decay_iters}"
                    ),
                    (decay_iters.saturating_mul(global_batch_size)).checked_sub(1),
                );
            }
            Warmup::Fraction(fraction) if !(0.0..1.0).contains(&fraction) => report(
                format!("lr_warmup_fraction {fraction} must be at least 0 and below 1"),
                Some(0),
            ),
            _ => {}
        }
        match (config.lr_decay_style, config.lr_wsd_decay_iters) {
            (LrDecayStyle::Wsd, None) => report(
                "lr_decay_style WSD needs lr_wsd_decay_iters".into(),
                Some((decay_iters / 10).max(1)),
            ),
            (LrDecayStyle::Wsd, Some(iters)) if !(1..=decay_iters).contains(&iters) => report(
                format!("lr_wsd_decay_iters {iters} must be 1 to {name} {decay_iters}"),
                Some(iters.clamp(1, decay_iters)),
            ),
            _ => {}
        }
    }
    if global_batch_size == 0 {
        report("global_batch_size must be at least 1".into(), Some(1));
    } else if decay_iters.checked_mul(global_batch_size).is_none() {
        report(
            format!("{name} {decay_iters} times global_batch_size {global_batch_size} is too many"),
            Some(u64::MAX / global_batch_size),
        );
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Trajectory {
        steps: Vec<Step>,
    }

    #[derive(Deserialize)]
    struct Step {
        step: u64,
        lr: f64,
    }

    fn cosine() -> LrScheduleConfig {
        LrScheduleConfig {
            min_lr: 1e-4,
            lr_decay_style: LrDecayStyle::Cosine,
            warmup: Warmup::Iters(2),
            ..LrScheduleConfig::new(1e-3)
        }
    }

    #[test]
    fn the_rates_are_megatrons() {
        for file in ["gpt_trajectory.json", "llama_trajectory.json"] {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/");
            let text = std::fs::read_to_string(format!("{folder}{file}")).unwrap();
            let run: Trajectory = serde_json::from_str(&text).unwrap();
            assert_eq!(run.steps.len(), 8);
            let schedule = LrSchedule::new(&cosine(), 8, 8).unwrap();
            for Step { step, lr } in run.steps {
                let ours = schedule.learning_rate((step - 1) * 8);
                assert!((ours - lr).abs() <= 1e-15 * lr, "step {step}: {ours} {lr}");
            }
        }
    }

    #[test]
    fn each_style_at_its_landmarks() {
        let rates = |style, warmup, at: [u64; 5]| {
            let config = LrScheduleConfig {
                min_lr: 0.25,
                lr_decay_style: style,
                warmup: Warmup::Iters(warmup),
                lr_decay_iters: Some(20),
                lr_warmup_init: 0.5,
                ..LrScheduleConfig::new(1.0)
            };
            let schedule = LrSchedule::new(&config, 100, 1).unwrap();
            at.map(|samples| schedule.learning_rate(samples))
        };
        let at = [0, 2, 4, 20, 21];
        let constant = rates(LrDecayStyle::Constant, 4, at);
        assert_eq!(constant, [0.5, 0.75, 1.0, 1.0, 1.0]);
        let linear = rates(LrDecayStyle::Linear, 4, [2, 4, 12, 20, 21]);
        assert_eq!(linear, [0.75, 1.0, 0.625, 0.25, 0.25]);
        let cosine = rates(LrDecayStyle::Cosine, 4, [2, 4, 20, 21, u64::MAX]);
        assert_eq!(cosine, [0.75, 1.0, 0.25, 0.25, 0.25]);
        // 4 / 16 under the root; after the decay min_lr, whatever the root.
        let root = rates(LrDecayStyle::InverseSquareRoot, 4, [2, 4, 16, 20, 21]);
        assert_eq!(root, [0.75, 1.0, 0.5, 2.0 / 20f64.sqrt(), 0.25]);
        // Without a warm-up the rates start at lr, and the root counts from 1 sample.
        let root = rates(LrDecayStyle::InverseSquareRoot, 0, [0, 1, 4, 16, 20]);
        assert_eq!(root, [1.0, 1.0, 0.5, 0.25, 0.25]);
        assert_eq!(rates(LrDecayStyle::Linear, 0, [0; 5]), [1.0; 5]);
    }

    #[test]
    fn wsd_stays_and_then_falls() {
        let rates = |style| {
            let config = LrScheduleConfig {
                min_lr: 1.0,
                lr_decay_style: LrDecayStyle::Wsd,
                lr_wsd_decay_iters: Some(4),
                lr_wsd_decay_style: style,
                warmup: Warmup::Fraction(0.125),
                ..LrScheduleConfig::new(5.0)
            };
            let schedule = LrSchedule::new(&config, 20, 1).unwrap();
            [0, 1, 3, 16, 17, 20, 21].map(|samples| schedule.learning_rate(samples))
        };
        assert_eq!(
            rates(WsdDecayStyle::Linear),
            [0.0, 2.0, 5.0, 5.0, 4.0, 1.0, 1.0]
        );
        assert_eq!(rates(WsdDecayStyle::MinusSqrt)[4], 3.0);
        let quarter = 1.0 + 4.0 * (2.0 * 0.5f64.powf(0.25) - 1.0);
        assert_eq!(rates(WsdDecayStyle::Exponential)[4..], [quarter, 1.0, 1.0]);
        let cosine = 1.0 + 4.0 * 0.5 * ((PI * 0.25).cos() + 1.0);
        assert_eq!(rates(WsdDecayStyle::Cosine)[4], cosine);
        let config = LrScheduleConfig {
            lr_decay_style: LrDecayStyle::Wsd,
            ..LrScheduleConfig::new(1.0)
        };
        let error = LrSchedule::new(&config, 20, 1).unwrap_err().to_string();
        assert!(error.contains("lr_wsd_decay_iters"), "{error}");
    }

    #[test]
    fn every_violation_is_reported_at_once() {
        let config = LrScheduleConfig {
            min_lr: 1e-2,
            warmup: Warmup::Iters(10),
            lr_decay_iters: Some(10),
            lr_warmup_init: f64::NAN,
            ..LrScheduleConfig::new(1e-3)
        };
        let error = LrSchedule::new(&config, 100, 0).unwrap_err().to_string();
        assert_eq!(
            error.lines().collect::<Vec<_>>(),
            [
                "the configuration breaks 4 rules:",
                "  - min_lr 0.01 must be at most lr 0.001; nearest legal: 0.001",
                "  - lr_warmup_init NaN must be finite and at least 0; nearest legal: 0.0",
                "  - lr_warmup_iters 10 must be below lr_decay_iters 10; nearest legal: 9",
                "  - global_batch_size must be at least 1; nearest legal: 1",
            ]
        );
        let config = LrScheduleConfig::new(-1.0);
        assert!(LrSchedule::new(&config, 0, 8).is_err());
        let config = LrScheduleConfig::new(1.0);
        assert!(LrSchedule::new(&config, u64::MAX, 2).is_err());
    }

    #[test]
    fn style_names_are_those_of_megatrons_flag() {
        let style: LrDecayStyle = serde_json::from_str(r#""inverse-square-root""#).unwrap();
        assert_eq!(style, LrDecayStyle::InverseSquareRoot);
    }

    proptest! {
        #[test]
        fn after_the_warmup_no_rate_rises(
            style in prop_oneof![
                Just(LrDecayStyle::Constant),
                Just(LrDecayStyle::Linear),
                Just(LrDecayStyle::Cosine),
                Just(LrDecayStyle::InverseSquareRoot),
            ],
            warmup in 0..50u64,
            length in 1..200u64,
            (max, min) in (1e-6..1.0f64, 0.0..1.0f64),
            samples in 0..2000u64,
        ) {
            let config = LrScheduleConfig {
                min_lr: min * max,
                lr_decay_style: style,
                warmup: Warmup::Iters(warmup),
                ..LrScheduleConfig::new(max)
            };
            let train_iters = warmup + length;
            let schedule = LrSchedule::new(&config, train_iters, 4).unwrap();
            let (lr, next) = (schedule.learning_rate(samples), schedule.learning_rate(samples + 1));
            let rounding = 1e-15 * max;
            prop_assert!(lr >= 0.0 && lr <= max + rounding);
            if samples >= warmup * 4 {
                prop_assert!(next <= lr + rounding, "{lr} {next}");
            }
            if samples > train_iters * 4 && style != LrDecayStyle::Constant {
                prop_assert_eq!(lr, min * max);
            }
        }
    }
}
