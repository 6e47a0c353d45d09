//! Layer normalisation (Ba et al. 2016) with its backward in one operation.

use crate::backward::give_gradients;
use crate::{Fused, KernelOps, Kernels, column_sums, narrowed, rows, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor};

/// `(x - mean) / √(variance + ε) · weight + bias` over the last dimension, computed in f32.
///
/// # Shapes
/// - `x`: `[.., h]`
/// - `weight`, `bias`: `[h]`
/// - output: `[.., h]`
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    kernels: Kernels,
) -> Tensor<D> {
    let (x, weight, bias) = (
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
    );
    Tensor::from_dispatch(Dispatch::layer_norm_op(x, weight, bias, epsilon, kernels))
}

/// Returns the output and each row's mean and `1/√(variance + ε)`, `[rows, 2]`.
pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: FloatTensor<B>,
    epsilon: f64,
    kernels: Kernels,
) -> (FloatTensor<B>, FloatTensor<B>) {
    if kernels.fuse::<B>(&x) {
        return B::fused_layer_norm(x, weight, bias, epsilon);
    }
    let (shape, dtype, h) = (x.shape(), x.dtype(), weight.shape()[0]);
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let mean = B::float_mean_dim(x.clone(), 1);
    let centered = B::float_sub(x, mean.clone());
    let variance = B::float_mean_dim(B::float_mul(centered.clone(), centered.clone()), 1);
    let scale = B::float_recip(B::float_sqrt(B::float_add_scalar(variance, epsilon.into())));
    let normal = B::float_mul(centered, scale.clone());
    let row = |x| B::float_reshape(widened::<B>(x), Shape::new([1, h]));
    let out = B::float_add(B::float_mul(normal, row(weight)), row(bias));
    let out = B::float_reshape(narrowed::<B>(out, dtype), shape);
    (out, B::float_cat(vec![mean, scale], 1))
}

/// With `x̂` the normalised input and `g = dy ∘ weight`: `dx = scale (g - mean(g) - x̂ mean(g ∘ x̂))`,
/// `dweight = Σ dy ∘ x̂`, `dbias = Σ dy`. What the input's gradient is `so_far` is added to it.
pub(crate) fn backward<B: Fused>(
    x: FloatTensor<B>,
    stats: FloatTensor<B>,
    weight: FloatTensor<B>,
    dy: FloatTensor<B>,
    so_far: Option<FloatTensor<B>>,
    kernels: Kernels,
) -> [FloatTensor<B>; 3] {
    if kernels.fuse::<B>(&x) {
        return B::fused_layer_norm_backward(x, stats, weight, dy, so_far);
    }
    let (shape, h, dtype) = (dy.shape(), weight.shape()[0], dy.dtype());
    let dy = widened::<B>(B::float_reshape(dy, rows(&shape, h)));
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let n = x.shape()[0];
    let column = |i: usize| {
        let slices = [Slice::from(0..n), Slice::from(i..i + 1)];
        B::float_slice(stats.clone(), &slices)
    };
    let scale = column(1);
    let normal = B::float_mul(B::float_sub(x, column(0)), scale.clone());
    let d_bias = column_sums::<B>(dy.clone(), weight.dtype());
    let d_weight = B::float_mul(dy.clone(), normal.clone());
    let d_weight = column_sums::<B>(d_weight, weight.dtype());
    let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
    let g = B::float_mul(dy, weight);
    let mean = B::float_mean_dim(g.clone(), 1);
    let along = B::float_mean_dim(B::float_mul(g.clone(), normal.clone()), 1);
    let dx = B::float_sub(B::float_sub(g, mean), B::float_mul(normal, along));
    let dx = narrowed::<B>(B::float_mul(dx, scale), dtype);
    let dx = B::float_reshape(dx, shape);
    let dx = match so_far {
        Some(so_far) => B::float_add(so_far, dx),
        None => dx,
    };
    [dx, d_weight, d_bias]
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct LayerNormBackward;

    impl<B: KernelOps + Fused> Backward<B, 3> for LayerNormBackward {
        /// The input, its rows' statistics, and the weight.
        type State = ([FloatTensor<B>; 3], Kernels);

        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |([x, stats, weight], kernels), dy, _| {
                backward::<B>(x, stats, weight, dy, None, kernels).map(Some)
            });
        }
    }

    let ((x, xn), (weight, wn), (bias, bn)) =
        (x.into_parts(), weight.into_parts(), bias.into_parts());
    let (out, stats) = forward::<B>(x.clone(), weight.clone(), bias, epsilon, kernels);
    let kept = [x, stats, weight];
    let prepared = LayerNormBackward.prepare::<C>([xn, wn, bn]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((kept, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
