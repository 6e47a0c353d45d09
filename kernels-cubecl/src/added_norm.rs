//! A residual added, and the sum normalised, in one pass: what lies between two sublayers of a transformer.

use crate::bias::Bias;
use crate::{Fused, KernelOps, Kernels, layer_norm, rms_norm};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::Tensor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    added_norm(x, residual, weight, Some(bias), epsilon, kernels)
}

/// `residual + x`, and its [`rms_norm`](rms_norm::rms_norm()); shapes as for [`added_layer_norm`].
pub fn added_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
    kernels: Kernels,
) -> (Tensor<D>, Tensor<D>) {
    added_norm(x, residual, weight, None, epsilon, kernels)
}

/// Of RMSNorm without a bias.
fn added_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    epsilon: f64,
    kernels: Kernels,
) -> (Tensor<D>, Tensor<D>) {
    let (x, residual) = (x.into_dispatch(), residual.into_dispatch());
    let (weight, bias) = (weight.into_dispatch(), bias.into());
    let (sum, y) = Dispatch::added_norm_op(x, residual, weight, bias, epsilon, kernels);
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

/// What the backward has of an output's gradient.
type Kept<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

fn locked<B: Backend>(kept: &Kept<B>) -> MutexGuard<'_, Option<FloatTensor<B>>> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both outputs with a graph. Each is a node whose backward only keeps its gradient, for that of the one node before
/// them: so the norm's backward has the sum's other gradient, and adds to it.
pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    residual: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    epsilon: f64,
    kernels: Kernels,
) -> [FloatTensor<Autodiff<B, C>>; 2] {
    #[derive(Debug)]
    struct AddedNormBackward;

    impl<B: KernelOps + Fused> Backward<B, 4> for AddedNormBackward {
        type State = State<B>;

        fn backward(self, ops: Ops<State<B>, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
            let State {
                kept: [sum, stats, weight],
                biased,
                d_sum,
                dy,
                kernels,
            } = ops.state;
            let (d_sum, dy) = (locked::<B>(&d_sum).take(), locked::<B>(&dy).take());
            let [dx, d_weight, d_bias] = match (dy, biased) {
                (Some(dy), true) => {
                    layer_norm::backward::<B>(sum, stats, weight, dy, d_sum, kernels).map(Some)
                }
                (Some(dy), false) => {
                    let [dx, d_weight] =
                        rms_norm::backward::<B>(sum, stats, weight, dy, d_sum, kernels);
                    [Some(dx), Some(d_weight), None]
                }
                // Nobody took the norm.
                (None, _) => {
                    let (shape, device) = (weight.shape(), weight.device());
                    let zeros = B::float_zeros(shape, &device, weight.dtype().into());
                    [d_sum, Some(zeros.clone()), Some(zeros)]
                }
            };
            let all = [dx.clone(), dx, d_weight, d_bias];
            for (parent, gradient) in ops.parents.into_iter().zip(all) {
                if let (Some(node), Some(gradient)) = (parent, gradient) {
                    grads.register::<B>(node.id, gradient);
                }
            }
        }
    }

    let ((x, x_node), (residual, residual_node)) = (x.into_parts(), residual.into_parts());
    let (weight, weight_node) = weight.into_parts();
    let (bias, bias_node) = bias.into_parts(&x);
    let biased = bias.is_some();
    let [sum, y, stats] = forward::<B>(x, residual, weight.clone(), bias, epsilon, kernels);
    let state = State::<B> {
        kept: [sum.clone(), stats, weight],
        biased,
        d_sum: Kept::<B>::default(),
        dy: Kept::<B>::default(),
        kernels,
    };
    let (d_sum, dy) = (state.d_sum.clone(), state.dy.clone());
    let prepared = AddedNormBackward.prepare::<C>([x_node, residual_node, weight_node, bias_node]);
    let both = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, sum.clone()),
        OpsKind::UnTracked(prep) => prep.finish(sum.clone()),
    };
    [
        output::<B, C>(both.node(), sum, d_sum),
        output::<B, C>(both.node(), y, dy),
    ]
}

#[derive(Debug, Clone)]
struct State<B: Backend> {
    /// The sum, its norm's statistics, and the weight.
    kept: [FloatTensor<B>; 3],
    biased: bool,
    d_sum: Kept<B>,
    dy: Kept<B>,
    kernels: Kernels,
}

/// An output, whose gradient is kept in `to`.
fn output<B: KernelOps + Fused, C: CheckpointStrategy>(
    of: NodeGuard,
    value: FloatTensor<B>,
    to: Kept<B>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct OutputBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for OutputBackward {
        type State = Kept<B>;

        fn backward(self, ops: Ops<Kept<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let gradient = grads.consume::<B>(&ops.node);
            *locked::<B>(&ops.state) = Some(gradient);
        }
    }

    let prepared = OutputBackward.prepare::<C>([of]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(to, value),
        OpsKind::UnTracked(prep) => prep.finish(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn one_output_alone_has_its_gradients() {
        let device = Device::flex().autodiff();
        let row = |values: [f32; 3]| Tensor::<1>::from_data(values, &device).require_grad();
        for kernels in [Kernels::Fused, Kernels::Local] {
            let [x, residual, weight, bias] =
                [[1.0, 2.0, 4.0], [0.5, 0.0, -1.0], [1.0; 3], [0.0; 3]].map(row);
            let both = || {
                let (weight, bias) = (weight.clone(), bias.clone());
                added_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5, kernels)
            };
            let gradient = |of: &Tensor<1>, gradients: &_| -> Vec<f32> {
                of.grad(gradients)
                    .expect("a gradient")
                    .into_data()
                    .iter()
                    .collect()
            };
            let of_sum = both().0.sum().backward();
            assert_eq!(gradient(&x, &of_sum), [1.0; 3]);
            assert_eq!(gradient(&residual, &of_sum), [1.0; 3]);
            assert_eq!(gradient(&weight, &of_sum), [0.0; 3]);
            assert_eq!(gradient(&bias, &of_sum), [0.0; 3]);

            let of_norm = (both().1 * row([1.0, 0.0, 0.0])).sum().backward();
            let (sum, weight, bias) = (x.clone() + residual.clone(), weight.clone(), bias.clone());
            let y = layer_norm::layer_norm(sum, weight.clone(), bias.clone(), 1e-5, kernels);
            let want = (y * row([1.0, 0.0, 0.0])).sum().backward();
            for of in [&x, &residual, &weight, &bias] {
                assert_eq!(gradient(of, &of_norm), gradient(of, &want));
            }
        }
    }
}
