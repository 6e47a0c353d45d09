//! Root-mean-square normalisation (Zhang and Sennrich 2019) with its backward in one operation.

use crate::backward::give_gradients;
use crate::{Fused, KernelOps, Kernels, column_sums, narrowed, rows, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};

/// `x / √(mean(x²) + ε) · weight` over the last dimension, computed in f32.
///
/// # Shapes
/// - `x`: `[.., h]`
/// - `weight`: `[h]`
/// - output: `[.., h]`
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
    kernels: Kernels,
) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::rms_norm_op(x, weight, epsilon, kernels))
}

/// Returns the output and each row's `1/√(mean(x²) + ε)`, `[rows, 1]`.
pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
    kernels: Kernels,
) -> (FloatTensor<B>, FloatTensor<B>) {
    if kernels.fuse::<B>(&x) {
        return B::fused_rms_norm(x, weight, epsilon);
    }
    let (shape, dtype, h) = (x.shape(), x.dtype(), weight.shape()[0]);
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let mean_square = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let scale = B::float_sqrt(B::float_add_scalar(mean_square, epsilon.into()));
    let scale = B::float_recip(scale);
    let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
    let out = B::float_mul(B::float_mul(x, scale.clone()), weight);
    let out = narrowed::<B>(out, dtype);
    (B::float_reshape(out, shape), scale)
}

/// With `x̂` the normalised input and `g = dy ∘ weight`: `dx = scale (g - x̂ mean(g ∘ x̂))`,
/// `dweight = Σ dy ∘ x̂`. What the input's gradient is `so_far` is added to it.
pub(crate) fn backward<B: Fused>(
    x: FloatTensor<B>,
    scale: FloatTensor<B>,
    weight: FloatTensor<B>,
    dy: FloatTensor<B>,
    so_far: Option<FloatTensor<B>>,
    kernels: Kernels,
) -> [FloatTensor<B>; 2] {
    if kernels.fuse::<B>(&x) {
        return B::fused_rms_norm_backward(x, scale, weight, dy, so_far);
    }
    let (shape, h, dtype) = (dy.shape(), weight.shape()[0], dy.dtype());
    let dy = widened::<B>(B::float_reshape(dy, rows(&shape, h)));
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let normal = B::float_mul(x, scale.clone());
    let d_weight = B::float_mul(dy.clone(), normal.clone());
    let d_weight = column_sums::<B>(d_weight, weight.dtype());
    let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
    let g = B::float_mul(dy, weight);
    let along = B::float_mean_dim(B::float_mul(g.clone(), normal.clone()), 1);
    let dx = B::float_sub(g, B::float_mul(normal, along));
    let dx = narrowed::<B>(B::float_mul(dx, scale), dtype);
    let dx = B::float_reshape(dx, shape);
    let dx = match so_far {
        Some(so_far) => B::float_add(so_far, dx),
        None => dx,
    };
    [dx, d_weight]
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RmsNormBackward;

    impl<B: KernelOps + Fused> Backward<B, 2> for RmsNormBackward {
        /// The input, its rows' scales, and the weight.
        type State = ([FloatTensor<B>; 3], Kernels);

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |([x, scale, weight], kernels), dy, _| {
                backward::<B>(x, scale, weight, dy, None, kernels).map(Some)
            });
        }
    }

    let ((x, xn), (weight, wn)) = (x.into_parts(), weight.into_parts());
    let (out, scale) = forward::<B>(x.clone(), weight.clone(), epsilon, kernels);
    let kept = [x, scale, weight];
    let prepared = RmsNormBackward.prepare::<C>([xn, wn]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((kept, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
