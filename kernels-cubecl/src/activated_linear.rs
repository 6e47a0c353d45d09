//! A linear layer of an activation's output. The backward makes that output again from the activation's input, which it
//! needs in any case: a pass over memory for the largest tensor of a layer that need not be kept. (Korthikanti et al.
//! 2022 do the same for attention's.)

use crate::activation::Activation;
use crate::{Fused, KernelOps, Kernels, linear};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, ExtensionType, TensorMetadata};
use burn::tensor::{Shape, Tensor};

/// A bias `[n]`, or none.
#[derive(ExtensionType)]
pub enum Bias<B: Backend> {
    None,
    Some(FloatTensor<B>),
}

impl<B: Backend> Bias<B> {
    pub(crate) fn tensor(self) -> Option<FloatTensor<B>> {
        match self {
            Bias::None => None,
            Bias::Some(bias) => Some(bias),
        }
    }
}

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
    let dispatch = |bias: Option<Tensor<1>>| match bias {
        Some(bias) => Bias::Some(bias.into_dispatch()),
        None => Bias::None,
    };
    let (bias, out_bias) = (dispatch(bias), dispatch(out_bias));
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    let y = Dispatch::activated_linear(x, bias, weight, out_bias, activation, kernels);
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
            let (x, bias, weight, activation, kernels) = ops.state;
            let dy = grads.consume::<B>(&ops.node);
            let [to_x, to_bias, to_weight, to_out_bias] = ops.parents;
            if let Some(node) = to_out_bias {
                let d_bias = linear::bias_gradient::<B>(dy.clone(), weight.dtype(), kernels);
                grads.register::<B>(node.id, d_bias);
            }
            let inner = activation.forward::<B>(x.clone(), bias.clone(), kernels);
            let wanted = [to_x.is_some() || to_bias.is_some(), to_weight.is_some()];
            let [d_inner, d_weight] = linear::backward::<B>(inner, weight, dy, wanted, kernels);
            if let (Some(node), Some(d_weight)) = (to_weight, d_weight) {
                grads.register::<B>(node.id, d_weight);
            }
            let Some(d_inner) = d_inner else { return };
            let (dx, d_bias) = activation.backward::<B>(x, bias, kernels, d_inner);
            for (parent, gradient) in [(to_x, Some(dx)), (to_bias, d_bias)] {
                if let (Some(node), Some(gradient)) = (parent, gradient) {
                    grads.register::<B>(node.id, gradient);
                }
            }
        }
    }

    // What is not there is a constant of the graph.
    let device = x.device();
    let part = |bias: Bias<Autodiff<B, C>>| match bias {
        Bias::Some(bias) => {
            let (bias, node) = bias.into_parts();
            (Some(bias), node)
        }
        Bias::None => {
            let none = B::float_empty(Shape::new([0]), &device, weight.dtype().into());
            let none = <Autodiff<B, C> as AutodiffBackend>::from_inner(none);
            (None, none.into_parts().1)
        }
    };
    let ((bias, bias_node), (out_bias, out_bias_node)) = (part(bias), part(out_bias));
    let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
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
