//! Which samples each data-parallel rank takes at each step.
//!
//! Semantics of `MegatronPretrainingSampler` in Megatron's `data_samplers.py`: microbatch `i` of
//! rank `r` is the samples `[c + i·b·d + r·b, + b)`, where `c` samples were consumed before this
//! step, `b` is the microbatch and `d` the data-parallel size. The order of samples does not depend
//! on the layout: a run resumed with another data-parallel size goes on with the same samples
//! (torchtitan #811, Megatron-LM #761).

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, Violation};

/// How far a run has come in its data: all there is to save and to resume from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerPosition {
    /// Samples all ranks together have trained on.
    pub consumed_samples: u64,
}

/// The sizes of a [`Sampler`].
#[derive(Debug, Clone, Copy)]
pub struct SamplerConfig {
    /// Samples one rank computes at a time, `b`.
    pub micro_batch_size: usize,
    /// Samples per step, over all ranks.
    pub global_batch_size: usize,
    /// Number of data-parallel ranks, `d`.
    pub data_parallel_size: usize,
    /// This rank among them, `r`.
    pub data_parallel_rank: usize,
}

/// Gives the sample numbers of one data-parallel rank.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    total_samples: u64,
}

impl Sampler {
    /// A sampler over a dataset of `total_samples`.
    ///
    /// # Errors
    /// Every size that is 0 or does not divide, all at once.
    pub fn new(config: SamplerConfig, total_samples: u64) -> Result<Self> {
        let mut violations = Vec::new();
        let mut require = |holds: bool, rule: String, nearest: Vec<usize>| {
            if !holds {
                violations.push(Violation {
                    rule,
                    nearest: nearest.iter().map(usize::to_string).collect(),
                });
            }
        };
        let c = config;
        require(
            c.micro_batch_size > 0,
            "micro_batch_size must be at least 1".to_string(),
            vec![1],
        );
        require(
            c.data_parallel_rank < c.data_parallel_size,
            format!(
                "data_parallel_rank {} is not below data_parallel_size {}",
                c.data_parallel_rank, c.data_parallel_size
            ),
            Vec::new(),
        );
        let per_round = c.micro_batch_size.saturating_mul(c.data_parallel_size);
        if let Some(rounds) = c.global_batch_size.checked_div(per_round) {
            let below = rounds * per_round;
            require(
                c.global_batch_size > 0 && below == c.global_batch_size,
                format!(
                    "global_batch_size {} must be a multiple of micro_batch_size {} times \
                     data_parallel_size {}",
                    c.global_batch_size, c.micro_batch_size, c.data_parallel_size
                ),
                [below, below.saturating_add(per_round)]
                    .into_iter()
                    .filter(|n| *n > 0)
                    .collect(),
            );
        }
        if violations.is_empty() {
            Ok(Self {
                config,
                total_samples,
            })
        } else {
            Err(Error::config(violations))
        }
    }

    /// Microbatches per step of each rank.
    pub fn num_microbatches(&self) -> usize {
        let c = &self.config;
        c.global_batch_size / (c.micro_batch_size * c.data_parallel_size)
    }

    /// The samples of microbatch `microbatch` of the step that starts at `position`.
    ///
    /// # Errors
    /// If the dataset has no samples left for this step: it is built as long as the run, and a
    /// sample is never given out twice instead.
    pub fn samples(&self, position: SamplerPosition, microbatch: usize) -> Result<Range<u64>> {
        let c = &self.config;
        let step_end = self.advance(position).consumed_samples;
        if step_end > self.total_samples || microbatch >= self.num_microbatches() {
            let reason = format!(
                "microbatch {microbatch} of {} of the step from sample {} to {step_end} was \
                 asked for, the dataset has {}",
                self.num_microbatches(),
                position.consumed_samples,
                self.total_samples
            );
            return Err(Error::data("sampler", None, reason));
        }
        let (b, d) = (c.micro_batch_size, c.data_parallel_size);
        let start =
            position.consumed_samples + ((microbatch * d + c.data_parallel_rank) * b) as u64;
        Ok(start..start + b as u64)
    }

    /// The position so many steps after `start`.
    pub fn after(&self, start: SamplerPosition, steps: u64) -> SamplerPosition {
        let samples = steps.saturating_mul(self.config.global_batch_size as u64);
        SamplerPosition {
            consumed_samples: start.consumed_samples.saturating_add(samples),
        }
    }

    /// The position after a step that starts at `position`.
    pub fn advance(&self, position: SamplerPosition) -> SamplerPosition {
        SamplerPosition {
            consumed_samples: position
                .consumed_samples
                .saturating_add(self.config.global_batch_size as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(b: usize, g: usize, d: usize, r: usize) -> Sampler {
        let config = SamplerConfig {
            micro_batch_size: b,
            global_batch_size: g,
            data_parallel_size: d,
            data_parallel_rank: r,
        };
        Sampler::new(config, 100).unwrap()
    }

    #[test]
    fn microbatches_interleave_ranks() {
        let position = SamplerPosition {
            consumed_samples: 24,
        };
        let rank_1 = sampler(2, 12, 3, 1);
        assert_eq!(rank_1.num_microbatches(), 2);
        assert_eq!(rank_1.samples(position, 0).unwrap(), 26..28);
        assert_eq!(rank_1.samples(position, 1).unwrap(), 32..34);
        assert!(rank_1.samples(position, 2).is_err());
    }

    #[test]
    fn every_layout_consumes_the_same_samples_in_a_step() {
        for (b, d) in [(1, 1), (1, 12), (2, 3), (4, 3), (3, 2), (12, 1)] {
            let mut seen: Vec<u64> = (0..d)
                .map(|r| sampler(b, 12, d, r))
                .flat_map(|s| (0..s.num_microbatches()).map(move |i| (s.clone(), i)))
                .flat_map(|(s, i)| {
                    s.samples(
                        SamplerPosition {
                            consumed_samples: 36,
                        },
                        i,
                    )
                    .unwrap()
                })
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, (36..48).collect::<Vec<_>>(), "b {b} d {d}");
        }
    }

    #[test]
    fn the_end_is_an_error_and_never_wraps() {
        let sampler = sampler(2, 12, 3, 0);
        assert!(
            sampler
                .samples(
                    SamplerPosition {
                        consumed_samples: 88
                    },
                    0
                )
                .is_ok()
        );
        let error = sampler
            .samples(
                SamplerPosition {
                    consumed_samples: 89,
                },
                0,
            )
            .unwrap_err();
        assert!(error.to_string().contains("the dataset has 100"), "{error}");
        assert!(
            sampler
                .samples(
                    SamplerPosition {
                        consumed_samples: u64::MAX
                    },
                    0
                )
                .is_err()
        );
    }

    #[test]
    fn the_position_is_one_number() {
        let position = sampler(2, 12, 3, 0).advance(SamplerPosition {
            consumed_samples: 12,
        });
        let text = serde_json::to_string(&position).unwrap();
        assert_eq!(text, r#"{"consumed_samples":24}"#);
        assert_eq!(
            serde_json::from_str::<SamplerPosition>(&text).unwrap(),
            position
        );
    }

    #[test]
    fn illegal_sizes_are_all_reported_with_legal_ones() {
        let config = SamplerConfig {
            micro_batch_size: 4,
            global_batch_size: 13,
            data_parallel_size: 1,
            data_parallel_rank: 1,
        };
        let error = Sampler::new(config, 100).unwrap_err().to_string();
        assert!(error.contains("breaks 2 rules"), "{error}");
        assert!(error.contains("nearest legal: 12, 16"), "{error}");
        let zero = SamplerConfig {
            micro_batch_size: 0,
            ..config
        };
        assert!(Sampler::new(zero, 100).is_err());
    }
}
