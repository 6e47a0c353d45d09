//! Root-mean-square normalisation (Zhang and Sennrich 2019) with its backward in one operation.

use super::layer_norm::rows;
use super::{ParallelOps, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};

/// `x / √(mean(x²) + ε) · weight` over the last dimension, computed in f32.
///
/// # Shapes
/// - `x`: `[.., h]`
/// - `weight`: `[h]`
/// - output: `[.., h]`
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::rms_norm_with(x, weight, epsilon))
}

/// Returns the output, the normalised input `[rows, h]` and `1/√(mean(x²) + ε)` `[rows, 1]`.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (shape, dtype) = (x.shape(), x.dtype());
    let h = weight.shape()[0];
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let mean_square = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let scale = B::float_sqrt(B::float_add_scalar(mean_square, epsilon.into()));
    let scale = B::float_recip(scale);
    let normal = B::float_mul(x, scale.clone());
    let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
    let out = narrowed::<B>(B::float_mul(normal.clone(), weight), dtype);
    let normal = narrowed::<B>(normal, dtype);
    (B::float_reshape(out, shape), normal, scale)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RmsNormBackward;

    impl<B: ParallelOps> Backward<B, 2> for RmsNormBackward {
        /// The normalised input `x̂ [rows, h]`, its scale `[rows, 1]`, and the weight `[h]`.
        type State = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>);

        /// With `g = dy ∘ weight`: `dx = scale (g - x̂ mean(g ∘ x̂))`, `dweight = Σ dy ∘ x̂`.
        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (normal, scale, weight) = ops.state;
            let [to_x, to_weight] = ops.parents;
            let dy = grads.consume::<B>(&ops.node);
            let (shape, h, dtype) = (dy.shape(), weight.shape()[0], dy.dtype());
            let dy = widened::<B>(B::float_reshape(dy, rows(&shape, h)));
            let normal = widened::<B>(normal);
            if let Some(node) = to_weight {
                let sums = B::float_sum_dim(B::float_mul(dy.clone(), normal.clone()), 0);
                let sums = narrowed::<B>(sums, weight.dtype());
                grads.register::<B>(node.id, B::float_reshape(sums, Shape::new([h])));
            }
            if let Some(node) = to_x {
                let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
                let g = B::float_mul(dy, weight);
                let along = B::float_mean_dim(B::float_mul(g.clone(), normal.clone()), 1);
                let dx = B::float_sub(g, B::float_mul(normal, along));
                let dx = narrowed::<B>(B::float_mul(dx, scale), dtype);
                grads.register::<B>(node.id, B::float_reshape(dx, shape));
            }
        }
    }

    let ((x, xn), (weight, wn)) = (x.into_parts(), weight.into_parts());
    match RmsNormBackward
        .prepare::<C>([xn, wn])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let (out, normal, scale) = forward::<B>(x, weight.clone(), epsilon);
            prep.finish((normal, scale, weight), out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::rms_norm_with(x, weight, epsilon)),
    }
}
