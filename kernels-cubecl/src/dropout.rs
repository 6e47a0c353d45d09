//! Which elements dropout keeps: functions of a seed, a stream and the element's index in the whole tensor.

use crate::random;

/// Which elements of a stream are kept, and what they are multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    seed: u64,
    stream: u64,
    /// A word of random bits below this drops its element.
    below: u32,
    scale: f32,
}

impl Keep {
    /// Drops the part `p`.
    pub fn new(p: f64, seed: u64, stream: u64) -> Self {
        Keep {
            seed,
            stream,
            below: (p * 2f64.powi(32)) as u32,
            scale: (1.0 / (1.0 - p)) as f32,
        }
    }

    /// The generator's key and stream, in halves; the bound, and the factor of what is kept.
    #[cfg(feature = "cube")]
    pub(crate) fn words(&self) -> ([u32; 2], [u32; 2], u32, f32) {
        let (key, stream) = (random::halves(self.seed), random::halves(self.stream));
        (key, stream, self.below, self.scale)
    }

    /// The factors of the elements from `index` on.
    pub fn fill(&self, index: u64, factors: &mut [f32]) {
        random::for_each_word(self.seed, self.stream, index, factors.len(), |i, word| {
            factors[i] = if word < self.below { 0.0 } else { self.scale };
        });
    }
}

/// Dropout on hidden states `[s, b, h]`, or on a rank's positions of them.
#[derive(Debug, Clone, Copy)]
pub struct HiddenKeep {
    pub keep: Keep,
    /// Place in the global batch of the first of the `samples` (`b`).
    pub first_sample: u64,
    pub samples: usize,
    /// The first position, of a sequence of `sequence`.
    pub first_position: usize,
    pub sequence: usize,
}

impl HiddenKeep {
    /// The factors of a row of features: that of position `row / b` and sample `row % b`.
    pub fn fill(&self, row: usize, factors: &mut [f32]) {
        let position = (self.first_position + row / self.samples) as u64;
        let sample = self.first_sample + (row % self.samples) as u64;
        let index = (sample * self.sequence as u64 + position) * factors.len() as u64;
        self.keep.fill(index, factors);
    }
}

/// Dropout on the attention's probabilities of a rank's heads.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout {
    pub keep: Keep,
    /// Place in the global batch of the first sample.
    pub first_sample: u64,
    pub heads: AttentionHeads,
}

/// Which heads a rank has.
#[derive(Debug, Clone, Copy)]
pub struct AttentionHeads {
    /// Query groups of this rank.
    pub groups: usize,
    /// The first of them, over all ranks.
    pub first_group: usize,
    /// Query heads of each group.
    pub queries_per_group: usize,
    /// Query heads over all ranks.
    pub num_attention_heads: usize,
}

impl AttentionDropout {
    /// The factors of the probabilities with which a query attends to the positions up to its own: `group` counts
    /// the groups of all samples, `head` the query heads of the group, of a sequence of `s`.
    pub fn fill(&self, group: usize, head: usize, query: usize, s: usize, factors: &mut [f32]) {
        let AttentionHeads {
            groups,
            first_group,
            queries_per_group,
            num_attention_heads,
        } = self.heads;
        let sample = self.first_sample + (group / groups) as u64;
        let head = (first_group + group % groups) * queries_per_group + head;
        let head = sample * num_attention_heads as u64 + head as u64;
        self.keep
            .fill((head * s as u64 + query as u64) * s as u64, factors);
    }

    /// The factors of the probabilities `[n, r s, s]` of `n` groups of all samples, the positions of one query
    /// head after another's. What the causal mask hides is 0.
    pub fn factors(&self, n: usize, s: usize) -> Vec<f32> {
        let r = self.heads.queries_per_group;
        let mut factors = vec![0f32; n * r * s * s];
        for (row, factors) in factors.chunks_mut(s).enumerate() {
            let (group, of_group) = (row / (r * s), row % (r * s));
            let (head, query) = (of_group / s, of_group % s);
            self.fill(group, head, query, s, &mut factors[..=query]);
        }
        factors
    }
}
