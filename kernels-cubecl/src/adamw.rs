//! AdamW (Loshchilov & Hutter 2019) over flat buffers of f32: the master weights, both moments and, for the model, the
//! weights rounded, in one pass.

use crate::flat::Ranges;
use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Slice};
use rayon::prelude::*;

/// One step's factors. The arithmetic is that of PyTorch's `AdamW`: decoupled decay first,
/// then the step with both moments corrected for their bias.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWFactors {
    pub grad_scale: f32,
    /// β₁, and 1 - β₁ as rounded once.
    pub beta1: [f32; 2],
    pub beta2: [f32; 2],
    /// The learning rate over the first moment's correction.
    pub step_size: f32,
    /// The root of the second moment's.
    pub second_correction: f32,
    pub eps: f32,
    /// What decay leaves of a weight that decays.
    pub keep: f32,
}

/// Elements that one task takes.
const CHUNK: usize = 1 << 14;

/// Updates weights and moments in place, on all of the thread pool's threads.
pub fn update(
    values: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    factors: AdamWFactors,
) {
    let moments = first
        .par_chunks_mut(CHUNK)
        .zip(second.par_chunks_mut(CHUNK));
    let all = values
        .par_chunks_mut(CHUNK)
        .zip(gradients.par_chunks(CHUNK));
    all.zip(moments)
        .for_each(|((values, gradients), (first, second))| {
            update_chunk(values, gradients, first, second, factors);
        });
}

fn update_chunk(
    values: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    f: AdamWFactors,
) {
    let moments = first.iter_mut().zip(second);
    for ((value, gradient), (first, second)) in values.iter_mut().zip(gradients).zip(moments) {
        let gradient = gradient * f.grad_scale;
        *first = f.beta1[0] * *first + f.beta1[1] * gradient;
        *second = f.beta2[0] * *second + f.beta2[1] * (gradient * gradient);
        let denominator = second.sqrt() / f.second_correction + f.eps;
        *value = *value * f.keep - f.step_size * (*first / denominator);
    }
}

/// In primitives: what [`Fused::fused_adamw`](crate::Fused::fused_adamw) says.
pub(crate) fn reference<B: Backend>(
    [values, first, second]: [FloatTensor<B>; 3],
    gradients: FloatTensor<B>,
    f: &AdamWFactors,
    decayed: &Ranges,
    dtype: DType,
) -> ([FloatTensor<B>; 3], FloatTensor<B>) {
    let times = |x: FloatTensor<B>, factor: f32| B::float_mul_scalar(x, factor.into());
    let gradients = times(gradients, f.grad_scale);
    let square = B::float_mul(gradients.clone(), gradients.clone());
    let first = B::float_add(times(first, f.beta1[0]), times(gradients, f.beta1[1]));
    let second = B::float_add(times(second, f.beta2[0]), times(square, f.beta2[1]));
    let denominator = times(B::float_sqrt(second.clone()), 1.0 / f.second_correction);
    let denominator = B::float_add_scalar(denominator, f.eps.into());
    let step = times(B::float_div(first.clone(), denominator), f.step_size);
    let kept = decayed.iter().fold(values, |values, range| {
        let slice = [Slice::from(range)];
        let kept = times(B::float_slice(values.clone(), &slice), f.keep);
        B::float_slice_assign(values, &slice, kept)
    });
    let values = B::float_sub(kept, step);
    let weights = B::float_cast(values.clone(), dtype.into());
    ([values, first, second], weights)
}
