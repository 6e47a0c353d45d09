//! Which activations the backward computes again instead of keeping.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How much is computed again, under Megatron's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeGranularity {
    /// The attention core: its probabilities and their dropout.
    Selective,
    /// Whole layers.
    Full,
}

/// Which layers [`RecomputeGranularity::Full`] computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeMethod {
    /// All, in groups of so many: the input of each group is kept.
    #[default]
    Uniform,
    /// The first so many of each stage, one by one; the others keep everything.
    Block,
}

/// What the layers of a stage compute again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// The attention core of every layer.
    Selective,
    /// Whole layers, in groups of `num_layers` or the first `num_layers` of a stage.
    Full {
        method: RecomputeMethod,
        num_layers: usize,
    },
}

impl Recompute {
    /// The places of a stage's `layers` that are computed again together, each group keeping its input;
    /// what is in no group keeps everything.
    pub fn groups(self, layers: usize) -> Vec<Range<usize>> {
        let (method, num_layers) = match self {
            Recompute::Selective => return Vec::new(),
            Recompute::Full { method, num_layers } => (method, num_layers.max(1)),
        };
        match method {
            RecomputeMethod::Uniform => (0..layers)
                .step_by(num_layers)
                .map(|start| start..layers.min(start + num_layers))
                .collect(),
            RecomputeMethod::Block => (0..num_layers.min(layers)).map(|i| i..i + 1).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_takes_all_in_groups_and_block_the_first_one_by_one() {
        let full = |method, num_layers| Recompute::Full { method, num_layers };
        let uniform = full(RecomputeMethod::Uniform, 2);
        assert_eq!(uniform.groups(5), [0..2, 2..4, 4..5]);
        let block = full(RecomputeMethod::Block, 2);
        assert_eq!(block.groups(5), [0..1, 1..2]);
        assert_eq!(block.groups(1), block.groups(5)[..1]);
        assert!(Recompute::Selective.groups(5).is_empty());
    }
}
