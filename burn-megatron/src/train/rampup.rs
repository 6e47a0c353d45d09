//! Batches that grow over the first samples of a training.

use crate::error::Violation;
use crate::topology::nearest::multiples;
use serde::{Deserialize, Serialize};

/// Megatron's `--rampup-batch-size` (`num_microbatches_calculator.py`): the global batch starts at `start`
/// samples and grows by `increment`, in equal parts of `samples` samples, up to the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[usize; 3]", into = "[usize; 3]")]
pub struct RampupBatchSize {
    pub start: usize,
    pub increment: usize,
    pub samples: usize,
}

impl From<[usize; 3]> for RampupBatchSize {
    fn from([start, increment, samples]: [usize; 3]) -> Self {
        RampupBatchSize {
            start,
            increment,
            samples,
        }
    }
}

impl From<RampupBatchSize> for [usize; 3] {
    fn from(rampup: RampupBatchSize) -> Self {
        [rampup.start, rampup.increment, rampup.samples]
    }
}

impl RampupBatchSize {
    /// The global batch after so many samples, where it grows to `whole`.
    fn size_at(&self, whole: usize, consumed_samples: u64) -> usize {
        let increments = whole.saturating_sub(self.start) / self.increment.max(1);
        if increments == 0 || consumed_samples > self.samples as u64 {
            return whole;
        }
        let each = self.samples as f64 / increments as f64;
        let done = (consumed_samples as f64 / each) as usize;
        whole.min(self.start + done * self.increment)
    }

    /// All sizes on the way, and the whole.
    pub fn sizes(&self, whole: usize) -> impl Iterator<Item = usize> {
        (self.start..whole)
            .step_by(self.increment.max(1))
            .chain([whole])
    }

    /// What keeps it from growing to `whole` in steps of what the ranks take at once.
    pub(super) fn violations(&self, whole: usize, at_once: usize) -> Vec<Violation> {
        let mut violations = Vec::new();
        let at_once = at_once.max(1);
        for (name, value) in [("start", self.start), ("increment", self.increment)] {
            if value == 0 || !value.is_multiple_of(at_once) {
                let rule = format!(
                    "rampup_batch_size's {name} {value} must be a multiple of micro_batch_size times the \
                     data-parallel size, {at_once}"
                );
                violations.push(Violation::new(rule, multiples(value, at_once)));
            }
        }
        let grows = whole.checked_sub(self.start);
        if self.increment > 0 && grows.is_none_or(|by| !by.is_multiple_of(self.increment)) {
            let rule = format!(
                "rampup_batch_size must reach global_batch_size {whole} from {} in steps of {}",
                self.start, self.increment
            );
            violations.push(Violation::new(rule, [whole.to_string()]));
        }
        violations
    }
}

/// The global batch of every step of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes {
    /// From the end of the ramp-up on; always, without one.
    pub whole: usize,
    pub rampup: Option<RampupBatchSize>,
}

impl BatchSizes {
    /// Samples of the step after so many, over all ranks.
    pub fn at(&self, consumed_samples: u64) -> usize {
        let rampup = self.rampup;
        rampup.map_or(self.whole, |rampup| {
            rampup.size_at(self.whole, consumed_samples)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_as_megatrons() {
        let rampup = RampupBatchSize::from([8, 4, 60]);
        // Three increments of 20 samples each; after 60 samples the whole.
        let at = |consumed| rampup.size_at(20, consumed);
        assert_eq!(
            [0, 19, 20, 39, 40, 59, 60, 61, 1000].map(at),
            [8, 8, 12, 12, 16, 16, 20, 20, 20]
        );
        assert_eq!(rampup.sizes(20).collect::<Vec<_>>(), [8, 12, 16, 20]);
        assert_eq!(rampup.violations(20, 4), []);
        assert_eq!(rampup.violations(22, 4).len(), 1);
        assert_eq!(rampup.violations(20, 3).len(), 2);
        assert_eq!(RampupBatchSize::from([24, 4, 9]).violations(20, 4).len(), 1);
    }
}
