//! Weight decay as a function of the samples seen. Keeps the arithmetic of `get_wd` in Megatron-LM's
//! `megatron/core/optimizer_param_scheduler.py`.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// How weight decay grows over the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDecayIncrStyle {
    /// Not at all.
    #[default]
    Constant,
    Linear,
    Cosine,
}

/// Weight decay as a function of the samples seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightDecaySchedule {
    pub start: f64,
    pub end: f64,
    pub style: WeightDecayIncrStyle,
    /// Samples after which it is `end`.
    pub samples: u64,
}

impl WeightDecaySchedule {
    /// The decay of the iteration that starts after `consumed_samples` samples.
    pub fn weight_decay(&self, consumed_samples: u64) -> f64 {
        if consumed_samples >= self.samples {
            return self.end;
        }
        let ratio = consumed_samples as f64 / self.samples as f64;
        let height = match self.style {
            WeightDecayIncrStyle::Constant => return self.end,
            WeightDecayIncrStyle::Linear => ratio,
            WeightDecayIncrStyle::Cosine => 0.5 * ((PI * (1.0 - ratio)).cos() + 1.0),
        };
        self.start + height * (self.end - self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_decay_grows_as_asked() {
        let at = |style, samples| {
            WeightDecaySchedule {
                start: 0.1,
                end: 0.5,
                style,
                samples: 100,
            }
            .weight_decay(samples)
        };
        assert_eq!(at(WeightDecayIncrStyle::Constant, 0), 0.5);
        assert!((at(WeightDecayIncrStyle::Linear, 25) - 0.2).abs() < 1e-12);
        assert!((at(WeightDecayIncrStyle::Cosine, 50) - 0.3).abs() < 1e-12);
        assert_eq!(at(WeightDecayIncrStyle::Cosine, 0), 0.1);
        assert_eq!(at(WeightDecayIncrStyle::Linear, 101), 0.5);
    }
}
