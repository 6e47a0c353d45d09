//! Dropout, and the residual that its output is added to, in one pass. Its mask is a function of each element's place:
//! the backward makes it again, and nothing is kept.

use crate::dropout::HiddenKeep;
use crate::{Fused, KernelOps, Kernels, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

/// `x` with elements dropped, `[s, b, h]`.
pub fn dropout(x: Tensor<3>, keep: HiddenKeep, kernels: Kernels) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::dropout_op(x.into_dispatch(), keep, kernels))
}

/// `residual + dropout(x)`, `[s, b, h]`. Megatron's `fusions/fused_bias_dropout.py`.
pub fn dropout_add(
    x: Tensor<3>,
    residual: Tensor<3>,
    keep: HiddenKeep,
    kernels: Kernels,
) -> Tensor<3> {
    let (x, residual) = (x.into_dispatch(), residual.into_dispatch());
    Tensor::from_dispatch(Dispatch::dropout_add_op(x, residual, keep, kernels))
}

pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    residual: Option<FloatTensor<B>>,
    keep: HiddenKeep,
    kernels: Kernels,
) -> FloatTensor<B> {
    match kernels.fuse::<B>(&x) {
        true => B::fused_dropout_add(x, residual, &keep),
        false => reference::<B>(x, residual, keep),
    }
}

fn reference<B: Backend>(
    x: FloatTensor<B>,
    residual: Option<FloatTensor<B>>,
    keep: HiddenKeep,
) -> FloatTensor<B> {
    let (shape, device, dtype) = (x.shape(), x.device(), x.dtype());
    let (h, x) = (shape[2], widened::<B>(x));
    let mut factors = vec![0f32; shape.num_elements()];
    for (row, factors) in factors.chunks_mut(h).enumerate() {
        keep.fill(row, factors);
    }
    let factors = B::float_from_data(TensorData::new(factors, shape), &device);
    // The result alone is rounded: a factor of 1/(1 - p) in 16 bits would be another p's.
    let kept = B::float_mul(x.clone(), narrowed::<B>(factors, x.dtype()));
    let sum = match residual {
        Some(residual) => B::float_add(widened::<B>(residual), kept),
        None => kept,
    };
    narrowed::<B>(sum, dtype)
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    keep: HiddenKeep,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct DropoutBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for DropoutBackward {
        type State = (HiddenKeep, Kernels);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (keep, kernels) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                forward::<B>(dy, None, keep, kernels)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = forward::<B>(x, None, keep, kernels);
    match DropoutBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((keep, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}

pub(crate) fn add_autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    residual: FloatTensor<Autodiff<B, C>>,
    keep: HiddenKeep,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct DropoutAddBackward;

    impl<B: KernelOps + Fused> Backward<B, 2> for DropoutAddBackward {
        type State = (HiddenKeep, Kernels);

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (keep, kernels) = ops.state;
            let [to_x, to_residual] = ops.parents;
            let dy = grads.consume::<B>(&ops.node);
            if let Some(node) = to_x {
                grads.register::<B>(node.id, forward::<B>(dy.clone(), None, keep, kernels));
            }
            if let Some(node) = to_residual {
                grads.register::<B>(node.id, dy);
            }
        }
    }

    let ((x, x_node), (residual, residual_node)) = (x.into_parts(), residual.into_parts());
    let out = forward::<B>(x, Some(residual), keep, kernels);
    match DropoutAddBackward
        .prepare::<C>([x_node, residual_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((keep, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
