//! Which numbers a model computes with, and the factor that keeps fp16 gradients from vanishing
//! (Micikevicius et al. 2018), as Megatron's `optimizer/grad_scaler.py` moves it.

use crate::error::Violation;
use crate::precision::Precision;
use serde::{Deserialize, Serialize};

/// Which numbers a model computes with, and the loss scale, under the names of Megatron's flags.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MixedPrecisionConfig {
    /// Weights and activations in bf16.
    pub bf16: bool,
    /// Weights and activations in fp16, with a loss scale.
    pub fp16: bool,
    /// A loss scale that stays as it is.
    pub loss_scale: Option<f64>,
    /// The loss scale at the start, where it moves: too high, for a few steps that overflow are said and left
    /// out, while gradients that vanish are neither.
    pub initial_loss_scale: f64,
    pub min_loss_scale: f64,
    /// Steps without an overflow after which it doubles.
    pub loss_scale_window: u32,
    /// Overflows before it halves, since it last doubled.
    pub hysteresis: u32,
}

impl Default for MixedPrecisionConfig {
    fn default() -> Self {
        MixedPrecisionConfig {
            bf16: false,
            fp16: false,
            loss_scale: None,
            initial_loss_scale: 4294967296.0,
            min_loss_scale: 1.0,
            loss_scale_window: 1000,
            hysteresis: 2,
        }
    }
}

impl MixedPrecisionConfig {
    /// The type of weights and activations.
    pub fn precision(&self) -> Precision {
        match (self.bf16, self.fp16) {
            (true, _) => Precision::Bf16,
            (false, true) => Precision::Fp16,
            (false, false) => Precision::Fp32,
        }
    }

    /// What cannot be.
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let above = |value: f64| value > 0.0 && value.is_finite();
        let (fixed, initial) = (self.loss_scale, self.initial_loss_scale);
        let scales = [
            ("loss_scale", fixed.unwrap_or(1.0), "65536"),
            ("initial_loss_scale", initial, "4294967296"),
            ("min_loss_scale", self.min_loss_scale, "1"),
        ];
        let scales = scales.into_iter().filter(|(_, value, _)| !above(*value));
        let mut violations: Vec<Violation> = scales
            .map(|(name, value, nearest)| {
                Violation::new(format!("{name} is {value}, but must be above 0"), [nearest])
            })
            .collect();
        if self.bf16 && self.fp16 {
            let rule = "bf16 and fp16 exclude each other";
            violations.push(Violation::new(rule, ["bf16", "fp16"]));
        }
        if fixed.is_some() && !self.fp16 {
            let rule = "a loss_scale goes with fp16: bf16 and fp32 need none";
            violations.push(Violation::new(rule, ["fp16"]));
        }
        if above(initial) && initial < self.min_loss_scale {
            let rule = format!(
                "initial_loss_scale is {initial}, below min_loss_scale {}",
                self.min_loss_scale
            );
            violations.push(Violation::new(rule, [self.min_loss_scale.to_string()]));
        }
        let counts = [
            ("loss_scale_window", self.loss_scale_window),
            ("hysteresis", self.hysteresis),
        ];
        let counts = counts.into_iter().filter(|(_, count)| *count == 0);
        violations.extend(counts.map(|(name, _)| {
            Violation::new(format!("{name} is 0, but must be at least 1"), ["1"])
        }));
        violations
    }
}

/// Where the loss scale is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    pub scale: f64,
    /// Steps without an overflow since the last one, or since it last doubled.
    pub growth_tracker: u32,
    /// Overflows left before it halves.
    pub hysteresis_tracker: u32,
}

/// Moves the loss scale.
#[derive(Debug, Clone)]
pub struct LossScaler {
    config: MixedPrecisionConfig,
    now: LossScale,
}

impl LossScaler {
    /// At the start; `None` without fp16.
    pub fn new(config: &MixedPrecisionConfig) -> Option<Self> {
        let scale = config.loss_scale.unwrap_or(config.initial_loss_scale);
        let scaler = || LossScaler {
            config: *config,
            now: LossScale {
                scale,
                growth_tracker: 0,
                hysteresis_tracker: config.hysteresis,
            },
        };
        (config.precision() == Precision::Fp16).then(scaler)
    }

    /// Where it is.
    pub fn now(&self) -> LossScale {
        self.now
    }

    /// Goes on from a checkpoint. A fixed scale stays what the configuration says.
    pub fn restore(&mut self, saved: LossScale) {
        if self.config.loss_scale.is_none() {
            self.now = saved;
        }
    }

    /// Whether a step whose gradients overflow may be left out: a later one has a lower scale.
    pub fn can_fall(&self) -> bool {
        self.config.loss_scale.is_none() && self.now.scale > self.config.min_loss_scale
    }

    /// Takes note of a step whose gradients overflowed, or did not.
    pub fn update(&mut self, overflow: bool) {
        if self.config.loss_scale.is_some() {
            return;
        }
        let (now, config) = (&mut self.now, &self.config);
        if overflow {
            now.growth_tracker = 0;
            now.hysteresis_tracker = now.hysteresis_tracker.saturating_sub(1);
            if now.hysteresis_tracker == 0 {
                now.scale = (now.scale / 2.0).max(config.min_loss_scale);
            }
            return;
        }
        now.growth_tracker += 1;
        if now.growth_tracker >= config.loss_scale_window {
            now.growth_tracker = 0;
            now.hysteresis_tracker = config.hysteresis;
            now.scale *= 2.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> MixedPrecisionConfig {
        MixedPrecisionConfig {
            fp16: true,
            initial_loss_scale: 8.0,
            min_loss_scale: 1.0,
            loss_scale_window: 3,
            hysteresis: 2,
            ..MixedPrecisionConfig::default()
        }
    }

    /// The scales after each of a run's steps: `x` overflows, `.` does not.
    fn scales(config: &MixedPrecisionConfig, steps: &str) -> Vec<f64> {
        let mut scaler = LossScaler::new(config).unwrap();
        let step = |step: char| {
            scaler.update(step == 'x');
            scaler.now().scale
        };
        steps.chars().map(step).collect()
    }

    #[test]
    fn it_doubles_after_a_window_and_halves_after_hysteresis() {
        assert_eq!(scales(&config(), "..."), [8.0, 8.0, 16.0]);
        // The second overflow halves it, and so does each that follows until it doubles again.
        assert_eq!(scales(&config(), "x.x.x"), [8.0, 8.0, 4.0, 4.0, 2.0]);
        assert_eq!(
            scales(&config(), "xx...xx"),
            [8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0]
        );
        // It starts to count anew after an overflow, and stops at the least.
        assert_eq!(scales(&config(), "..x..."), [8.0, 8.0, 8.0, 8.0, 8.0, 16.0]);
        assert_eq!(scales(&config(), "xxxxxx")[3..], [1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_fixed_scale_stays_and_others_have_none() {
        let fixed = MixedPrecisionConfig {
            loss_scale: Some(128.0),
            ..config()
        };
        assert_eq!(scales(&fixed, "xx...."), [128.0; 6]);
        assert!(!LossScaler::new(&fixed).unwrap().can_fall());
        let bf16 = MixedPrecisionConfig {
            bf16: true,
            ..MixedPrecisionConfig::default()
        };
        assert!(LossScaler::new(&bf16).is_none());
    }

    #[test]
    fn what_cannot_be_is_said() {
        let broken = MixedPrecisionConfig {
            bf16: true,
            initial_loss_scale: 0.0,
            hysteresis: 0,
            ..config()
        };
        let rules: Vec<String> = broken.violations().into_iter().map(|v| v.rule).collect();
        assert_eq!(
            rules,
            [
                "initial_loss_scale is 0, but must be above 0",
                "bf16 and fp16 exclude each other",
                "hysteresis is 0, but must be at least 1"
            ]
        );
        let fixed = MixedPrecisionConfig {
            loss_scale: Some(2.0),
            fp16: false,
            ..config()
        };
        assert_eq!(fixed.violations().len(), 1);
        assert!(config().violations().is_empty());
    }
}
