//! `y = x · Wᵀ` with the weight stored as `[out, in]`, as Megatron and PyTorch store it.
//!
//! One two-dimensional product each way, and a weight gradient that comes out contiguous in the
//! weight's own layout. (A batched product against a transposed view would give one weight
//! gradient per sequence position, to be summed, and then transposed.)

use crate::backward::give_gradients;
use crate::bias::{Bias, added};
use crate::{Fused, KernelOps, Kernels, column_sums, rows, width};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};

/// `x [.., in] · weightᵀ + bias -> [.., out]` for a `weight [out, in]`, and a `bias [out]` if there is one.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    kernels: Kernels,
) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::linear_op(x, weight, bias.into(), kernels))
}

/// Views `[.., n]` as `[rows, n]`.
fn as_matrix<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let n = width(&shape);
    B::float_reshape(x, rows(&shape, n))
}

/// The product, with a bias if there is one.
pub fn forward<B: Fused>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    kernels: Kernels,
) -> FloatTensor<B> {
    match kernels.fuse::<B>(&x) {
        true => B::fused_linear(x, weight, bias),
        false => reference::<B>(x, weight, bias),
    }
}

/// In primitives.
pub(crate) fn reference<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let shape = with_last(x.shape(), weight.shape()[0]);
    let y = B::float_matmul(as_matrix::<B>(x), B::float_transpose(weight));
    let y = B::float_reshape(y, shape);
    added::<B>(y, bias)
}

fn with_last(mut shape: Shape, last: usize) -> Shape {
    let at = shape.num_dims() - 1;
    shape[at] = last;
    shape
}

/// The gradients of input, weight, and bias, where they are wanted.
pub fn backward<B: Fused>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dy: FloatTensor<B>,
    wanted: [bool; 3],
    kernels: Kernels,
) -> [Option<FloatTensor<B>>; 3] {
    let fuse = kernels.fuse::<B>(&dy);
    let d_bias = wanted[2].then(|| match fuse {
        true => B::fused_column_sums(dy.clone()),
        false => column_sums::<B>(dy.clone(), weight.dtype()),
    });
    let dx = wanted[0].then(|| match fuse {
        true => B::fused_input_gradient(dy.clone(), weight),
        false => input_gradient_reference::<B>(dy.clone(), weight),
    });
    let d_weight = wanted[1].then(|| match fuse {
        true => B::fused_weight_gradient(dy, x),
        false => weight_gradient_reference::<B>(dy, x),
    });
    [dx, d_weight, d_bias]
}

pub(crate) fn input_gradient_reference<B: Backend>(
    dy: FloatTensor<B>,
    weight: FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = with_last(dy.shape(), weight.shape()[1]);
    B::float_reshape(B::float_matmul(as_matrix::<B>(dy), weight), shape)
}

pub(crate) fn weight_gradient_reference<B: Backend>(
    dy: FloatTensor<B>,
    x: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_matmul(B::float_transpose(as_matrix::<B>(dy)), as_matrix::<B>(x))
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct LinearBackward;

    impl<B: KernelOps + Fused> Backward<B, 3> for LinearBackward {
        type State = ([FloatTensor<B>; 2], Kernels);

        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |([x, weight], kernels), dy, wanted| {
                backward::<B>(x, weight, dy, wanted, kernels)
            });
        }
    }

    let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
    let (bias, bias_node) = bias.into_parts(&x);
    let y = forward::<B>(x.clone(), weight.clone(), bias, kernels);
    match LinearBackward
        .prepare::<C>([x_node, weight_node, bias_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(([x, weight], kernels), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}
