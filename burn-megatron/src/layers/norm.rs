//! Layer normalisation.

use super::block::Sublayer;
use crate::autograd::layer_norm;
use crate::shard::{Init, ParallelBuilder, ParamSpec};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// Configuration of a [`LayerNorm`].
#[derive(Debug, Clone)]
pub struct LayerNormConfig {
    pub hidden_size: usize,
    pub epsilon: f64,
}

impl LayerNormConfig {
    /// With Megatron's default epsilon, 1e-5.
    pub fn new(hidden_size: usize) -> Self {
        LayerNormConfig {
            hidden_size,
            epsilon: 1e-5,
        }
    }

    /// Sets epsilon.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// The layer, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> LayerNorm {
        let param = |init| builder.param(ParamSpec::replicated([self.hidden_size], init));
        LayerNorm {
            weight: param(Init::Ones),
            bias: param(Init::Zeros),
            epsilon: self.epsilon,
        }
    }
}

/// `(x - mean) / √(variance + ε) · weight + bias` over the last dimension (Ba et al. 2016).
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// `[h]`
    pub weight: Param<Tensor<1>>,
    /// `[h]`
    pub bias: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl LayerNorm {
    /// `[.., h] -> [.., h]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        layer_norm(x, self.weight.val(), self.bias.val(), self.epsilon)
    }
}

impl Sublayer for LayerNorm {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        LayerNorm::forward(self, x)
    }
}
