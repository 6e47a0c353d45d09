//! GELU, erf and tanh (Hendrycks & Gimpel 2016), each with its own derivative.
//!
//! Burn's default `gelu` pairs the erf forward with the derivative of the tanh form; training then
//! follows a gradient that is not its loss's.

use crate::backward::give_gradients;
use crate::bias::{Bias, added};
use crate::{Fused, KernelOps, Kernels, column_sums, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::Tensor;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Which form of GELU: Megatron's fused bias-GELU is the tanh form, its unfused one is erf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GeluApproximation {
    /// `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`
    Tanh,
    /// `x/2 (1 + erf(x/√2))`
    Erf,
}

/// `gelu(x + bias)` for `x [.., n]`, and a `bias [n]` if there is one, computed in f32. Megatron's
/// `fusions/fused_bias_gelu.py`.
pub fn gelu<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    approximation: GeluApproximation,
    kernels: Kernels,
) -> Tensor<D> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(Dispatch::gelu_op(x, bias.into(), approximation, kernels))
}

/// √(2/π)
const SQRT_2_OVER_PI: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const CUBIC: f64 = 0.044715;

/// The factor that GELU multiplies `x` by: `(1 + tanh u)/2`, which is `sigmoid(2u)`, or
/// `(1 + erf(x/√2))/2`.
fn gate<B: Backend>(x: FloatTensor<B>, how: GeluApproximation) -> FloatTensor<B> {
    match how {
        GeluApproximation::Erf => {
            let erf = B::float_erf(B::float_mul_scalar(x, FRAC_1_SQRT_2.into()));
            B::float_add_scalar(B::float_mul_scalar(erf, 0.5f64.into()), 0.5f64.into())
        }
        GeluApproximation::Tanh => {
            let square = B::float_mul(x.clone(), x.clone());
            let slope = B::float_mul_scalar(square, (2.0 * SQRT_2_OVER_PI * CUBIC).into());
            let slope = B::float_add_scalar(slope, (2.0 * SQRT_2_OVER_PI).into());
            B::sigmoid(B::float_mul(x, slope))
        }
    }
}

pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    how: GeluApproximation,
    kernels: Kernels,
) -> FloatTensor<B> {
    match kernels.fuse::<B>(&x) {
        true => B::fused_gelu(x, bias, how),
        false => {
            let dtype = x.dtype();
            let x = biased::<B>(x, bias);
            narrowed::<B>(B::float_mul(x.clone(), gate::<B>(x, how)), dtype)
        }
    }
}

/// The sum, in f32.
fn biased<B: Backend>(x: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
    added::<B>(widened::<B>(x), bias.map(widened::<B>))
}

pub(crate) fn backward<B: Fused>(
    x: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    how: GeluApproximation,
    kernels: Kernels,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    if kernels.fuse::<B>(&x) {
        return B::fused_gelu_backward(x, bias, how, dy);
    }
    let dtype = dy.dtype();
    let x = biased::<B>(x, bias.clone());
    let slope = derivative::<B>(x.clone(), gate::<B>(x, how), how);
    let dx = narrowed::<B>(B::float_mul(slope, widened::<B>(dy)), dtype);
    let d_bias = bias.map(|bias| column_sums::<B>(dx.clone(), bias.dtype()));
    (dx, d_bias)
}

/// d gelu / dx: `gate + x · dgate/dx`.
fn derivative<B: Backend>(
    x: FloatTensor<B>,
    gate: FloatTensor<B>,
    how: GeluApproximation,
) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x.clone());
    let slope = match how {
        GeluApproximation::Erf => {
            let bell = B::float_exp(B::float_mul_scalar(square, (-0.5f64).into()));
            B::float_mul_scalar(bell, (0.5 * SQRT_2_OVER_PI).into())
        }
        GeluApproximation::Tanh => {
            let inner = B::float_mul_scalar(square, (6.0 * SQRT_2_OVER_PI * CUBIC).into());
            let inner = B::float_add_scalar(inner, (2.0 * SQRT_2_OVER_PI).into());
            let rest = B::float_add_scalar(B::float_neg(gate.clone()), 1f64.into());
            B::float_mul(B::float_mul(gate.clone(), rest), inner)
        }
    };
    B::float_add(gate, B::float_mul(x, slope))
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    how: GeluApproximation,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct GeluBackward;

    impl<B: KernelOps + Fused> Backward<B, 2> for GeluBackward {
        type State = (
            FloatTensor<B>,
            Option<FloatTensor<B>>,
            GeluApproximation,
            Kernels,
        );

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |(x, bias, how, kernels), dy, _| {
                let (dx, d_bias) = backward::<B>(x, bias, how, kernels, dy);
                [Some(dx), d_bias]
            });
        }
    }

    let (x, x_node) = x.into_parts();
    let (bias, bias_node) = bias.into_parts(&x);
    let y = forward::<B>(x.clone(), bias.clone(), how, kernels);
    match GeluBackward
        .prepare::<C>([x_node, bias_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, bias, how, kernels), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}
