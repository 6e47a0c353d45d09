//! Layer normalisation (Ba et al. 2016) with its backward in one operation.

use super::{ParallelOps, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};

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
) -> Tensor<D> {
    let (x, weight, bias) = (
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
    );
    Tensor::from_dispatch(Dispatch::layer_norm_with(x, weight, bias, epsilon))
}

/// Returns the output, the normalised input `[rows, h]` and `1/√(variance + ε)` `[rows, 1]`.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: FloatTensor<B>,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (shape, dtype) = (x.shape(), x.dtype());
    let h = weight.shape()[0];
    let x = widened::<B>(B::float_reshape(x, rows(&shape, h)));
    let centered = B::float_sub(x.clone(), B::float_mean_dim(x, 1));
    let variance = B::float_mean_dim(B::float_mul(centered.clone(), centered.clone()), 1);
    let scale = B::float_recip(B::float_sqrt(B::float_add_scalar(variance, epsilon.into())));
    let normal = B::float_mul(centered, scale.clone());
    let row = |x| B::float_reshape(widened::<B>(x), Shape::new([1, h]));
    let out = B::float_add(B::float_mul(normal.clone(), row(weight)), row(bias));
    let out = B::float_reshape(narrowed::<B>(out, dtype), shape);
    (out, narrowed::<B>(normal, dtype), scale)
}

/// The shape of `[.., h]` as a matrix of rows.
pub(super) fn rows(shape: &Shape, h: usize) -> Shape {
    Shape::new([shape.num_elements() / h, h])
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct LayerNormBackward;

    impl<B: ParallelOps> Backward<B, 3> for LayerNormBackward {
        /// The normalised input `x̂ [rows, h]`, its scale `[rows, 1]`, and the weight `[h]`.
        type State = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>);

        /// With `g = dy ∘ weight`: `dx = scale (g - mean(g) - x̂ mean(g ∘ x̂))`,
        /// `dweight = Σ dy ∘ x̂`, `dbias = Σ dy`.
        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (normal, scale, weight) = ops.state;
            let [to_x, to_weight, to_bias] = ops.parents;
            let dy = grads.consume::<B>(&ops.node);
            let (shape, h, dtype) = (dy.shape(), weight.shape()[0], dy.dtype());
            let dy = widened::<B>(B::float_reshape(dy, rows(&shape, h)));
            let (normal, of_weight) = (widened::<B>(normal), weight.dtype());
            let column_sums = |x| {
                let sums = narrowed::<B>(B::float_sum_dim(x, 0), of_weight);
                B::float_reshape(sums, Shape::new([h]))
            };
            if let Some(node) = to_bias {
                grads.register::<B>(node.id, column_sums(dy.clone()));
            }
            if let Some(node) = to_weight {
                grads.register::<B>(
                    node.id,
                    column_sums(B::float_mul(dy.clone(), normal.clone())),
                );
            }
            if let Some(node) = to_x {
                let weight = B::float_reshape(widened::<B>(weight), Shape::new([1, h]));
                let g = B::float_mul(dy, weight);
                let mean = B::float_mean_dim(g.clone(), 1);
                let along = B::float_mean_dim(B::float_mul(g.clone(), normal.clone()), 1);
                let dx = B::float_sub(B::float_sub(g, mean), B::float_mul(normal, along));
                let dx = narrowed::<B>(B::float_mul(dx, scale), dtype);
                grads.register::<B>(node.id, B::float_reshape(dx, shape));
            }
        }
    }

    let ((x, xn), (weight, wn), (bias, bn)) =
        (x.into_parts(), weight.into_parts(), bias.into_parts());
    match LayerNormBackward
        .prepare::<C>([xn, wn, bn])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let (out, normal, scale) = forward::<B>(x, weight.clone(), bias, epsilon);
            prep.finish((normal, scale, weight), out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::layer_norm_with(x, weight, bias, epsilon)),
    }
}
