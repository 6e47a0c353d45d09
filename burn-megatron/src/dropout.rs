//! Dropout (Srivastava et al. 2014) whose masks depend on no layout: each element is kept or not by a
//! counter-based generator keyed by the seed, the step, the layer, the place in the layer and the
//! element's index in the whole tensor of the global batch.

use crate::random;
use burn::tensor::Tensor;
use burn_megatron_kernels::Kernels;
pub use burn_megatron_kernels::dropout::{AttentionDropout, AttentionHeads};
use burn_megatron_kernels::dropout::{HiddenKeep, Keep};
use burn_megatron_kernels::dropout_add::{dropout, dropout_add};

/// Where one forward pass stands in the run: what its dropout masks depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassContext {
    /// Dropout applies.
    pub training: bool,
    pub seed: u64,
    /// Optimizer steps before this one.
    pub step: u64,
    /// Place in the global batch of the microbatch's first sample.
    pub first_sample: u64,
    /// The layer at work, from 1; 0 is the embedding.
    pub layer: usize,
}

impl PassContext {
    /// A pass without dropout.
    pub fn evaluation() -> Self {
        PassContext {
            training: false,
            seed: 0,
            step: 0,
            first_sample: 0,
            layer: 0,
        }
    }

    /// The same pass, in its `layer`-th layer from 1.
    pub fn in_layer(self, layer: usize) -> Self {
        PassContext { layer, ..self }
    }

    fn keep(&self, p: f64, place: DropoutPlace) -> Keep {
        let stream = random::stream_of_numbers([self.step, self.layer as u64, place as u64]);
        Keep::new(p, self.seed, stream)
    }
}

/// Where in a layer dropout stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropoutPlace {
    /// On the sum of the embeddings.
    Embedding,
    /// On the attention's probabilities.
    Attention,
    /// On what the attention adds to the residual.
    AttentionOutput,
    /// On what the MLP adds to the residual.
    MlpOutput,
}

/// Dropout on `[s, b, h]`, or on a rank's positions of it.
#[derive(Debug, Clone, Copy)]
pub struct HiddenDropout {
    /// Part of the elements that is dropped, `0 <= p < 1`.
    pub p: f64,
    /// The rank's part of the sequence.
    pub part: usize,
    /// Ranks that have parts: 1 without sequence parallelism.
    pub parts: usize,
    pub kernels: Kernels,
}

impl HiddenDropout {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, x: Tensor<3>, context: &PassContext, place: DropoutPlace) -> Tensor<3> {
        match self.keep(x.dims(), context, place) {
            Some(keep) => dropout(x, keep, self.kernels),
            None => x,
        }
    }

    /// `residual + dropout(x)`
    pub fn add(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        context: &PassContext,
        place: DropoutPlace,
    ) -> Tensor<3> {
        match self.keep(x.dims(), context, place) {
            Some(keep) => dropout_add(x, residual, keep, self.kernels),
            None => residual + x,
        }
    }

    /// Whether it drops anything in that pass.
    pub fn drops(&self, context: &PassContext) -> bool {
        context.training && self.p > 0.0
    }

    /// Which elements of `[s, b, h]` are kept; `None` where all are.
    fn keep(
        &self,
        [s, b, _]: [usize; 3],
        context: &PassContext,
        place: DropoutPlace,
    ) -> Option<HiddenKeep> {
        self.drops(context).then(|| HiddenKeep {
            keep: context.keep(self.p, place),
            first_sample: context.first_sample,
            samples: b,
            first_position: self.part * s,
            sequence: s * self.parts,
        })
    }
}

/// Dropout of `p` on the attention's probabilities of a rank's heads; `None` where nothing is dropped.
pub(crate) fn attention_dropout(
    p: f64,
    heads: AttentionHeads,
    context: &PassContext,
) -> Option<AttentionDropout> {
    (context.training && p > 0.0).then(|| AttentionDropout {
        keep: context.keep(p, DropoutPlace::Attention),
        first_sample: context.first_sample,
        heads,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn context(step: u64, layer: usize, first_sample: u64) -> PassContext {
        PassContext {
            training: true,
            seed: 7,
            step,
            first_sample,
            layer,
        }
    }

    fn mask(
        dropout: HiddenDropout,
        b: usize,
        context: &PassContext,
        place: DropoutPlace,
    ) -> Vec<f32> {
        let s = 8 / dropout.parts;
        let x = Tensor::<3>::ones([s, b, 16], &Device::flex());
        let y = dropout.forward(x, context, place).into_data();
        y.try_into_vec().unwrap()
    }

    const WHOLE: HiddenDropout = HiddenDropout {
        p: 0.25,
        part: 0,
        parts: 1,
        kernels: Kernels::Auto,
    };

    #[test]
    fn a_quarter_is_dropped_and_the_rest_scaled() {
        let values = mask(WHOLE, 64, &context(0, 1, 0), DropoutPlace::MlpOutput);
        let dropped = values.iter().filter(|v| **v == 0.0).count() as f64;
        assert!((dropped / values.len() as f64 - 0.25).abs() < 0.02);
        let scale = 1.0 / 0.75;
        assert!(values.iter().all(|v| *v == 0.0 || *v == scale as f32));
        let sum: f32 = values.iter().sum();
        assert!((sum / values.len() as f32 - 1.0).abs() < 0.02);
    }

    #[test]
    fn steps_layers_places_and_samples_have_masks_of_their_own() {
        let place = DropoutPlace::MlpOutput;
        let masks = [
            mask(WHOLE, 1, &context(0, 1, 0), place),
            mask(WHOLE, 1, &context(1, 1, 0), place),
            mask(WHOLE, 1, &context(0, 2, 0), place),
            mask(WHOLE, 1, &context(0, 1, 1), place),
            mask(WHOLE, 1, &context(0, 1, 0), DropoutPlace::AttentionOutput),
        ];
        for (i, a) in masks.iter().enumerate() {
            assert!(masks[..i].iter().all(|b| a != b));
            // Nor do positions share one.
            assert_ne!(a[..16], a[16..32]);
        }
    }

    #[test]
    fn parts_of_the_sequence_and_of_the_batch_have_the_whole_ones_mask() {
        let place = DropoutPlace::Embedding;
        let whole = mask(WHOLE, 4, &context(3, 0, 8), place);
        for part in 0..2 {
            let half = HiddenDropout {
                part,
                parts: 2,
                ..WHOLE
            };
            let half = mask(half, 4, &context(3, 0, 8), place);
            assert_eq!(half, whole[part * half.len()..(part + 1) * half.len()]);
        }
        let later = mask(WHOLE, 2, &context(3, 0, 10), place);
        for position in 0..8 {
            let (wide, narrow) = (position * 4 * 16, position * 2 * 16);
            assert_eq!(later[narrow..narrow + 32], whole[wide + 32..wide + 64]);
        }
    }

    #[test]
    fn a_ranks_heads_have_the_whole_ones_mask() {
        let heads = |groups, first_group| AttentionHeads {
            groups,
            first_group,
            queries_per_group: 2,
            num_attention_heads: 8,
        };
        let factors = |heads| -> Vec<f32> {
            let dropout = attention_dropout(0.3, heads, &context(0, 1, 0)).unwrap();
            let n = 2 * heads.groups;
            dropout.factors(n, 5)
        };
        let whole = factors(heads(4, 0));
        let size = 2 * 5 * 5;
        for first in [0, 2] {
            let part = factors(heads(2, first));
            for sample in 0..2 {
                let (from, to) = (sample * 4 + first, sample * 2);
                assert_eq!(
                    part[to * size..(to + 2) * size],
                    whole[from * size..(from + 2) * size]
                );
            }
        }
    }
}
