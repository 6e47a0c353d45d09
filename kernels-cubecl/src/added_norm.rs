//! A residual added, and the sum normalised, in one pass: what lies between two sublayers of a transformer.

use crate::{Fused, KernelOps, Kernels, layer_norm, rms_norm};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch};
use burn::tensor::Tensor;

/// `residual + x`, and its [`layer_norm`](layer_norm::layer_norm()).
///
/// # Shapes
/// - `x`, `residual`: `[.., h]`
/// - `weight`, `bias`: `[h]`
/// - outputs: `[.., h]`
pub fn added_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    kernels: Kernels,
) -> (Tensor<D>, Tensor<D>) {
    let (x, residual) = (x.into_dispatch(), residual.into_dispatch());
    let (weight, bias) = (weight.into_dispatch(), bias.into_dispatch());
    let (sum, y) = Dispatch::added_layer_norm_op(x, residual, weight, bias, epsilon, kernels);
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(y))
}

/// `residual + x`, and its [`rms_norm`](rms_norm::rms_norm()); shapes as for [`added_layer_norm`].
pub fn added_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
    kernels: Kernels,
) -> (Tensor<D>, Tensor<D>) {
    let (x, residual) = (x.into_dispatch(), residual.into_dispatch());
    let weight = weight.into_dispatch();
    let (sum, y) = Dispatch::added_rms_norm_op(x, residual, weight, epsilon, kernels);
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(y))
}

/// The sum, its norm, and the norm's statistics: of RMSNorm without a bias.
pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    residual: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    epsilon: f64,
    kernels: Kernels,
) -> [FloatTensor<B>; 3] {
    if kernels.fuse::<B>(&x) {
        return B::fused_added_norm(x, residual, weight, bias, epsilon);
    }
    let sum = B::float_add(residual, x);
    let (y, stats) = match bias {
        Some(bias) => layer_norm::forward::<B>(sum.clone(), weight, bias, epsilon, kernels),
        None => rms_norm::forward::<B>(sum.clone(), weight, epsilon, kernels),
    };
    [sum, y, stats]
}

/// Both outputs with a graph: the sum's is an addition's, and the norm's starts from it. Whatever takes the sum later
/// comes earlier in the backward, so the norm's adds its gradient to what is there.
pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    residual: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    epsilon: f64,
    kernels: Kernels,
) -> [FloatTensor<Autodiff<B, C>>; 2] {
    #[derive(Debug)]
    struct AddBackward;

    impl<B: KernelOps + Fused> Backward<B, 2> for AddBackward {
        type State = ();

        fn backward(self, ops: Ops<(), 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let dy = grads.consume::<B>(&ops.node);
            for node in ops.parents.into_iter().flatten() {
                grads.register::<B>(node.id, dy.clone());
            }
        }
    }

    let ((x, x_node), (residual, residual_node)) = (x.into_parts(), residual.into_parts());
    let (weight, weight_node) = weight.into_parts();
    let bias = bias.map(|bias| bias.into_parts());
    let (bias, bias_node) = bias.map_or((None, None), |(bias, node)| (Some(bias), Some(node)));
    let [sum, y, stats] = forward::<B>(x, residual, weight.clone(), bias, epsilon, kernels);
    let tracked = AddBackward.prepare::<C>([x_node, residual_node]);
    let sum: FloatTensor<Autodiff<B, C>> = match tracked.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), sum),
        OpsKind::UnTracked(prep) => prep.finish(sum),
    };
    let (of_sum, sum_node) = sum.clone().into_parts();
    let (kept, of) = ([of_sum, stats, weight], Some(sum.clone()));
    let y = match bias_node {
        Some(bias) => {
            layer_norm::record::<B, C>([sum_node, weight_node, bias], kept, of, kernels, y)
        }
        None => rms_norm::record::<B, C>([sum_node, weight_node], kept, of, kernels, y),
    };
    [sum, y]
}
