//! GELU, erf and tanh (Hendrycks & Gimpel 2016), each with its own derivative.
//!
//! Burn's default `gelu` pairs the erf forward with the derivative of the tanh form; training then
//! follows a gradient that is not its loss's.

use super::{ParallelOps, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
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

/// GELU of every element, computed in f32.
pub fn gelu<const D: usize>(x: Tensor<D>, approximation: GeluApproximation) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::gelu_with(x.into_dispatch(), approximation))
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

/// Returns GELU and the gate.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    how: GeluApproximation,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = x.dtype();
    let x = widened::<B>(x);
    let gate = gate::<B>(x.clone(), how);
    let y = narrowed::<B>(B::float_mul(x, gate.clone()), dtype);
    (y, narrowed::<B>(gate, dtype))
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

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    how: GeluApproximation,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct GeluBackward;

    impl<B: ParallelOps> Backward<B, 1> for GeluBackward {
        /// `x`, the gate (a sigmoid or erf costs more time than memory), the form.
        type State = (FloatTensor<B>, FloatTensor<B>, GeluApproximation);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (x, gate, how) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                let (dtype, grad) = (grad.dtype(), widened::<B>(grad));
                let slope = derivative::<B>(widened::<B>(x), widened::<B>(gate), how);
                narrowed::<B>(B::float_mul(slope, grad), dtype)
            });
        }
    }

    let (x, node) = x.into_parts();
    match GeluBackward.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (y, gate) = forward::<B>(x.clone(), how);
            prep.finish((x, gate, how), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::gelu_with(x, how)),
    }
}
