//! A linear layer of an activation's output. The backward makes that output again from the activation's input, which it
//! needs in any case: a pass over memory for the largest tensor of a layer that need not be kept. (Korthikanti et al.
//! 2022 do the same for attention's.)

use crate::activation::Activation;
use crate::backward::give_gradients;
use crate::bias::Bias;
use crate::{Fused, KernelOps, Kernels, linear};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch};
use burn::tensor::Tensor;

/// `activation(x + bias) · weightᵀ + out_bias`, as the activation and [`linear`](mod@crate::linear) one after the other.
///
/// # Shapes
/// - `x`: `[.., inputs · in]`, with as many inputs as the activation [has](Activation::inputs)
/// - `bias`: `[in]`, for GELU
/// - `weight`: `[out, in]`
/// - `out_bias`: `[out]`
/// - output: `[.., out]`
///
/// # Panics
/// If there is a bias for another activation than GELU.
pub fn activated_linear<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    weight: Tensor<2>,
    out_bias: Option<Tensor<1>>,
    activation: Activation,
    kernels: Kernels,
) -> Tensor<D> {
    assert!(
        bias.is_none() || matches!(activation, Activation::Gelu(_)),
        "{activation:?} adds no bias"
    );
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    let y =
        Dispatch::activated_linear(x, bias.into(), weight, out_bias.into(), activation, kernels);
    Tensor::from_dispatch(y)
}

pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    weight: FloatTensor<B>,
    out_bias: Option<FloatTensor<B>>,
    activation: Activation,
    kernels: Kernels,
) -> FloatTensor<B> {
    let inner = activation.forward::<B>(x, bias, kernels);
    linear::forward::<B>(inner, weight, out_bias, kernels)
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    out_bias: Bias<Autodiff<B, C>>,
    activation: Activation,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct ActivatedLinearBackward;

    impl<B: KernelOps + Fused> Backward<B, 4> for ActivatedLinearBackward {
        /// The activation's input and its bias; the weight.
        type State = (
            FloatTensor<B>,
            Option<FloatTensor<B>>,
            FloatTensor<B>,
            Activation,
            Kernels,
        );

        fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |state: Self::State, dy, wanted| {
                let (x, bias, weight, activation, kernels) = state;
                let [of_x, of_bias, of_weight, of_out_bias] = wanted;
                let inner = activation.forward::<B>(x.clone(), bias.clone(), kernels);
                let wanted = [of_x || of_bias, of_weight, of_out_bias];
                let [d_inner, d_weight, d_out_bias] =
                    linear::backward::<B>(inner, weight, dy, wanted, kernels);
                let (dx, d_bias) = d_inner.map_or((None, None), |d_inner| {
                    let (dx, d_bias) = activation.backward::<B>(x, bias, kernels, d_inner);
                    (Some(dx), d_bias)
                });
                [dx, d_bias, d_weight, d_out_bias]
            });
        }
    }

    let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
    let ((bias, bias_node), (out_bias, out_bias_node)) =
        (bias.into_parts(&x), out_bias.into_parts(&x));
    let y = forward::<B>(
        x.clone(),
        bias.clone(),
        weight.clone(),
        out_bias,
        activation,
        kernels,
    );
    match ActivatedLinearBackward
        .prepare::<C>([x_node, bias_node, weight_node, out_bias_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, bias, weight, activation, kernels), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}
