//! GELU, erf and tanh (Hendrycks & Gimpel 2016), each with its own derivative.
//!
//! Burn's default `gelu` pairs the erf forward with the derivative of the tanh form; training then
//! follows a gradient that is not its loss's.

use super::ParallelOps;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch};
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

/// GELU of every element.
pub fn gelu<const D: usize>(x: Tensor<D>, approximation: GeluApproximation) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::gelu_with(x.into_dispatch(), approximation))
}

/// √(2/π)
const SQRT_2_OVER_PI: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const CUBIC: f64 = 0.044715;

/// `tanh(√(2/π) (x + 0.044715 x³))` or `erf(x/√2)`.
fn saturation<B: Backend>(x: FloatTensor<B>, approximation: GeluApproximation) -> FloatTensor<B> {
    match approximation {
        GeluApproximation::Erf => B::float_erf(B::float_mul_scalar(x, FRAC_1_SQRT_2.into())),
        GeluApproximation::Tanh => {
            let square = B::float_mul(x.clone(), x.clone());
            let slope = B::float_mul_scalar(square, (SQRT_2_OVER_PI * CUBIC).into());
            let slope = B::float_add_scalar(slope, SQRT_2_OVER_PI.into());
            B::float_tanh(B::float_mul(x, slope))
        }
    }
}

/// Returns GELU and the saturation.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    how: GeluApproximation,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let s = saturation::<B>(x.clone(), how);
    let weight = B::float_add_scalar(s.clone(), 1f64.into());
    (
        B::float_mul(B::float_mul_scalar(x, 0.5f64.into()), weight),
        s,
    )
}

/// d gelu / dx at `x`: `(1 + s)/2 + x/2 · ds/dx`, with `s` the saturation.
fn derivative<B: Backend>(
    x: FloatTensor<B>,
    s: FloatTensor<B>,
    how: GeluApproximation,
) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x.clone());
    // x/2 · ds/dx
    let through_slope = match how {
        GeluApproximation::Erf => {
            let bell = B::float_exp(B::float_mul_scalar(square, (-0.5f64).into()));
            let density = FRAC_2_SQRT_PI * FRAC_1_SQRT_2 / 2.0;
            B::float_mul(x, B::float_mul_scalar(bell, density.into()))
        }
        GeluApproximation::Tanh => {
            let slope = B::float_mul_scalar(square, (1.5 * SQRT_2_OVER_PI * CUBIC).into());
            let slope = B::float_add_scalar(slope, (0.5 * SQRT_2_OVER_PI).into());
            let rest = B::float_neg(B::float_mul(s.clone(), s.clone()));
            let rest = B::float_add_scalar(rest, 1f64.into());
            B::float_mul(B::float_mul(x, slope), rest)
        }
    };
    let weight = B::float_add_scalar(B::float_mul_scalar(s, 0.5f64.into()), 0.5f64.into());
    B::float_add(weight, through_slope)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    how: GeluApproximation,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct GeluBackward;

    impl<B: ParallelOps> Backward<B, 1> for GeluBackward {
        /// `x`, the saturation (a tanh or erf costs more than the memory), the form.
        type State = (FloatTensor<B>, FloatTensor<B>, GeluApproximation);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (x, s, how) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                B::float_mul(derivative::<B>(x, s, how), grad)
            });
        }
    }

    let (x, node) = x.into_parts();
    match GeluBackward.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (y, s) = forward::<B>(x.clone(), how);
            prep.finish((x, s, how), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::gelu_with(x, how)),
    }
}
