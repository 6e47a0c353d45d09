//! The declared record of one parameter: its full shape, this rank's part, its initial values.

use crate::random;
use std::ops::Range;

/// How a rank's part of a parameter relates to the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sharding {
    /// Every rank of the tensor-parallel group holds the whole, always with the same values.
    Replicated,
    /// Along `dim` stand `blocks` equal blocks (1, or more where several matrices are one parameter);
    /// rank `index` of `parts` holds the `index`-th of `parts` equal parts of each.
    Split {
        dim: usize,
        index: usize,
        parts: usize,
        blocks: usize,
    },
}

/// A parameter's initial values, by Megatron's rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// What the module was built with; it must be the same on every rank.
    AsBuilt,
    Zeros,
    Ones,
    /// Normal with mean 0, drawn by the element's index in the full parameter: the same values
    /// whatever the layout.
    Normal {
        std: f64,
    },
}

/// What a layer declares of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Shape of the whole parameter, vocabulary padding included.
    pub full_shape: Vec<usize>,
    pub sharding: Sharding,
    pub init: Init,
    /// Rows of the whole that mean something, where the rest is padding of the vocabulary.
    pub unpadded_rows: Option<usize>,
    /// The first and the last pipeline stage each hold a copy, under one name: a table that serves
    /// as embedding there and as output layer here. Their gradients are summed, and it counts once.
    pub tied_over_stages: bool,
    /// Each rank of the tensor-parallel group computes a part of the gradient of this replicated
    /// parameter, from its heads or its positions alone: the gradient is their sum.
    pub partial_gradient: bool,
}

impl ParamSpec {
    /// A parameter that every rank holds whole.
    pub fn replicated(full_shape: impl Into<Vec<usize>>, init: Init) -> Self {
        ParamSpec {
            full_shape: full_shape.into(),
            sharding: Sharding::Replicated,
            init,
            unpadded_rows: None,
            tied_over_stages: false,
            partial_gradient: false,
        }
    }

    /// A parameter of which rank `index` holds the `index`-th of `parts` parts along `dim`; with one
    /// part it is no split, and counted and stored as replicated.
    pub fn split(
        full_shape: impl Into<Vec<usize>>,
        dim: usize,
        (index, parts): (usize, usize),
        init: Init,
    ) -> Self {
        ParamSpec {
            sharding: match parts {
                1 => Sharding::Replicated,
                _ => Sharding::Split {
                    dim,
                    index,
                    parts,
                    blocks: 1,
                },
            },
            ..ParamSpec::replicated(full_shape, init)
        }
    }

    /// Sets how many rows mean something, where the rest is padding of the vocabulary.
    pub fn with_unpadded_rows(self, unpadded_rows: Option<usize>) -> Self {
        ParamSpec {
            unpadded_rows,
            ..self
        }
    }

    /// Splits each of `blocks` equal blocks along the dimension by itself, such as the gate and what it
    /// gates in one matrix.
    pub fn with_blocks(mut self, count: usize) -> Self {
        if let Sharding::Split { blocks, .. } = &mut self.sharding {
            *blocks = count;
        }
        self
    }

    /// Declares that the first and the last pipeline stage each hold a copy.
    pub fn tied_over_stages(self) -> Self {
        ParamSpec {
            tied_over_stages: true,
            ..self
        }
    }

    /// Declares that each rank of the tensor-parallel group computes a part of the gradient.
    pub fn with_partial_gradient(self, partial_gradient: bool) -> Self {
        ParamSpec {
            partial_gradient,
            ..self
        }
    }

    /// Shape of this rank's part.
    ///
    /// # Panics
    /// If the parameter does not divide into equal parts; layouts are validated before.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.full_shape.clone();
        if let Sharding::Split {
            dim, parts, blocks, ..
        } = self.sharding
        {
            assert_eq!(
                shape[dim] % (blocks * parts),
                0,
                "dimension {dim} of {shape:?} in {blocks} blocks of {parts} parts"
            );
            shape[dim] /= parts;
        }
        shape
    }

    /// Elements of the whole, vocabulary padding included.
    pub fn full_elements(&self) -> usize {
        self.full_shape.iter().product()
    }

    /// The shape under which the whole is stored in files: without vocabulary padding.
    pub fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.full_shape.clone();
        if let (Some(rows), Some(first)) = (self.unpadded_rows, shape.first_mut()) {
            *first = rows;
        }
        shape
    }

    /// This rank's part as runs of consecutive elements of the whole (row major), in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (dim, index, parts, blocks) = match self.sharding {
            Sharding::Replicated => (0, 0, 1, 1),
            Sharding::Split {
                dim,
                index,
                parts,
                blocks,
            } => (dim, index, parts, blocks),
        };
        let outer = blocks * self.full_shape[..dim].iter().product::<usize>();
        let stride = self.full_shape[dim..].iter().product::<usize>() / blocks;
        let len = stride / parts;
        (0..outer).map(move |o| o * stride + index * len..o * stride + (index + 1) * len)
    }

    /// Fills this rank's part with its initial values; `name` and `seed` choose the random ones.
    pub fn fill(&self, name: &str, seed: u64, out: &mut [f32]) {
        match self.init {
            Init::AsBuilt => {}
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
            Init::Normal { std } => {
                let (stream, mut rest) = (random::stream_of(name), out);
                for run in self.runs() {
                    let (now, later) = rest.split_at_mut(run.len());
                    random::fill_normal(seed, stream, run.start as u64, std as f32, now);
                    rest = later;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_all_ranks_cover_the_whole_once() {
        for dim in 0..3 {
            let mut seen = [0; 4 * 2 * 6];
            for index in 0..2 {
                let spec = ParamSpec::split([4, 2, 6], dim, (index, 2), Init::Zeros);
                let spec = spec.with_blocks(if dim == 0 { 2 } else { 1 });
                let part: Vec<usize> = spec.runs().flatten().collect();
                assert_eq!(part.len(), spec.local_shape().iter().product::<usize>());
                part.into_iter().for_each(|i| seen[i] += 1);
            }
            assert!(seen.iter().all(|&n| n == 1), "dim {dim}");
        }
    }

    #[test]
    fn initial_values_do_not_depend_on_the_split() {
        let init = Init::Normal { std: 0.02 };
        let mut whole = vec![0.0; 6 * 8];
        ParamSpec::replicated([6, 8], init).fill("decoder.weight", 7, &mut whole);
        for (dim, parts) in [(0, 2), (0, 3), (1, 2), (1, 4)] {
            for index in 0..parts {
                let spec = ParamSpec::split([6, 8], dim, (index, parts), init);
                let mut part = vec![0.0; 6 * 8 / parts];
                spec.fill("decoder.weight", 7, &mut part);
                let want: Vec<f32> = spec.runs().flatten().map(|i| whole[i]).collect();
                assert_eq!(part, want, "dim {dim}, part {index} of {parts}");
            }
        }
    }
}
