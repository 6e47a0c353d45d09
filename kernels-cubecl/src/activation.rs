//! The functions between the two linear layers of an MLP.

use crate::gelu::{self, GeluApproximation};
use crate::{Fused, Kernels, narrowed, swiglu, widened};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

/// What stands between the two linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Gelu(GeluApproximation),
    /// `silu(gate) ∘ up`, with gate and up side by side.
    SwiGlu,
    /// `max(x, 0)²` (So et al. 2021).
    SquaredRelu,
}

impl Activation {
    /// Features that it takes for each that it gives.
    pub fn inputs(self) -> usize {
        match self {
            Activation::SwiGlu => 2,
            Activation::Gelu(_) | Activation::SquaredRelu => 1,
        }
    }

    /// `[.., inputs · f] -> [.., f]`, after a bias that GELU alone adds.
    pub(crate) fn forward<B: Fused>(
        self,
        x: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        kernels: Kernels,
    ) -> FloatTensor<B> {
        match self {
            Activation::Gelu(how) => gelu::forward::<B>(x, bias, how, kernels),
            Activation::SwiGlu => swiglu::forward::<B>(x, kernels),
            Activation::SquaredRelu => {
                let dtype = x.dtype();
                let x = B::relu(widened::<B>(x));
                narrowed::<B>(B::float_mul(x.clone(), x), dtype)
            }
        }
    }

    /// The gradients of input and bias.
    pub(crate) fn backward<B: Fused>(
        self,
        x: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        kernels: Kernels,
        dy: FloatTensor<B>,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        match self {
            Activation::Gelu(how) => gelu::backward::<B>(x, bias, how, kernels, dy),
            Activation::SwiGlu => (swiglu::backward::<B>(x, kernels, dy), None),
            Activation::SquaredRelu => {
                let dtype = dy.dtype();
                let slope = B::float_mul_scalar(B::relu(widened::<B>(x)), 2f64.into());
                let dx = B::float_mul(slope, widened::<B>(dy));
                (narrowed::<B>(dx, dtype), None)
            }
        }
    }
}
